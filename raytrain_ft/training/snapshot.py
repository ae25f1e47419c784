"""Copies a worker's share of the training state into memory that its persister reads, while training goes on.

The copy runs on a thread of its own during the next step's forward and backward pass, and only the weight update waits for it
(CheckFreq, section 4.3.1). A tensor on the CPU is really copied: an alias would change under the writer. A small one is copied
at once, for that takes no longer than to see to it that it can be copied later.
"""

from __future__ import annotations

import _thread
import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.log_files import version_of, versions_of
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.shard import Piece
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.training.layout import Pending, Plain, Share, Slice
from raytrain_ft.training.memory import Numbers, move_all
from raytrain_ft.training.stay import Stay

POLL_S = 0.05
MOST_NAMES = 3
"""Of tensors that an error names."""
AT_ONCE_BYTES = 32 * 2**10
"""A tensor of less is copied in the time that a hold on its memory and two looks at what counts its changes take."""


class Copy:
    """One snapshot: the copy of a worker's share into shared memory, on a thread.

    On a GPU it may be copied within the device's memory first (mode "gpu", section 4.3.1): the weights may change again as soon
    as that is done. If the device has no room by then, it is copied to the host at once.

    Attributes:
        pending: what is still to be copied.
        seconds: how long it took to be in host memory; None while it is under way.
        device_seconds: how long it took within the device; None if it was not copied there.
    """

    def __init__(
        self,
        share: Share,
        memory: SharedMemory,
        then: Callable[[Copy], None],
        mode: Literal["cpu", "gpu"] = "cpu",
        stay: Stay | None = None,
    ) -> None:
        """
        Args:
            then: called on the thread when all is copied, or cannot be.
            stay: has kept the tensors' memory in its place since the share was looked at; it ends with the copy.
        """
        self.size = share.layout.size
        self.pending: Pending | None = None
        self.device_seconds: float | None = None
        self.seconds: float | None = None
        self.error: BaseException | None = None
        self._share: Share | None = share
        self._stay = stay
        self._versions: list[int] = []
        self._places: list[int] = []
        self._pieces: Sequence[Piece] = ()
        self._mode = mode
        self._memory = memory
        self._then = then
        self._done = threading.Event()
        self._handed_on = threading.Event()
        self._ready: Callable[[], None] = lambda: None
        self._began = 0.0

    def start(self) -> None:
        """Begins. From now on nobody may change the tensors until `wait` returns.

        Raises:
            OSError: there is no thread for it.
        """
        self._began = time.monotonic()
        share, self._share = self._share, None
        assert share is not None, "it is begun once"
        self.pending = share.pending(self._copy_small(share), plain=self._mode == "cpu")
        self._pieces = share.layout.pieces
        self._versions = versions_of(_sources(self.pending))
        self._places = _places_of(self.pending.plain)
        self._ready = _now_on_device(self.pending.slices)
        try:
            _thread.start_new_thread(self._run, ())  # `Thread.start` waits until it runs, which training has no need of
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from error

    def _copy_small(self, share: Share) -> Numbers | None:
        """Copies what takes no longer than to arrange for later; returns the numbers of the others (None: all)."""
        if len(self._memory.view) < self.size:  # its pages are still to be touched, which would hold training up
            return None
        try:
            return copy_small(share, self._memory.view)
        except Exception:
            return None  # the thread meets it again, and tells of it

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as error:  # told to whoever waits
            self.error = error.with_traceback(None)  # whose frames hold the clones
        self.pending = None  # clones, and bytes that a parameter no longer has, are given back
        if self._stay is not None:
            self._stay.end()
        self.seconds = time.monotonic() - self._began
        self._done.set()
        try:
            self._then(self)
        finally:
            self._handed_on.set()

    def _copy(self) -> None:
        pending = self.pending
        assert pending is not None
        self._ready()
        if self._mode == "gpu" and (clones := _cloned(pending.slices)) is not None:
            self._check_unchanged(pending)
            self.pending = pending = Pending(pending.plain, clones)
            self._versions = []
            self.device_seconds = time.monotonic() - self._began
            self._done.set()
        memory = self._memory.reserve(self.size)
        if torch.cuda.is_initialized():
            _pin(self._memory)
        copy_all(pending, memory)
        self._check_unchanged(pending)

    def _check_unchanged(self, pending: Pending) -> None:
        """Raises StorageError if somebody did not wait: the copy may hold a mix of before and after."""
        plain, slices = pending
        now = zip(plain.numbers.tolist(), self._places, _places_of(plain), strict=True)
        moved = [self._pieces[number].name for number, before, after in now if before != after]
        if moved:
            raise StorageError(
                f"{', '.join(moved[:MOST_NAMES])} got other memory while being copied: nothing may resize the storage of what "
                "is stored, but in an update, which waits for the copy"
            )
        sources = _sources(pending)
        if not self._versions or versions_of(sources) == self._versions:  # clones are nobody else's, and have none
            return
        pieces = [*map(self._pieces.__getitem__, plain.numbers.tolist()), *(one.piece for one in slices)]
        begins = [*plain.begins.tolist(), *(one.tensor.data_ptr() for one in slices)]
        begun = zip(pieces, sources, begins, self._versions, strict=True)
        changed = [piece.name for piece, source, begin, version in begun if _is_changed(source, begin, version)]
        if changed:
            raise StorageError(
                f"{', '.join(changed[:MOST_NAMES])} changed while being copied: nothing but an update, which waits for the "
                "copy, may change what is stored. In a loop of raytrain_ft.checkfreq, put what changes a tensor besides the "
                'optimizer\'s step into "with run.update():"'
            )

    def join(self, timeout_s: float = 5.0) -> None:
        """Waits until the copy was also handed on, which takes milliseconds unless who it goes to is frozen."""
        self._handed_on.wait(timeout_s)

    def wait(self, check: Callable[[], None], timeout_s: float = 300.0) -> float:
        """Waits until the tensors may change again; returns how long that took, in seconds.

        Args:
            check: called again and again; may raise to leave the wait.

        Raises:
            StorageError: the copy does not end in time. One that failed raises nothing: the tensors may change, and `error`
                says why there is no snapshot.
        """
        if self._done.is_set():
            return 0.0
        began = time.monotonic()
        while not self._done.wait(POLL_S):
            check()
            if time.monotonic() - began > timeout_s:
                raise StorageError(f"a snapshot of {self.size} bytes has not ended within {timeout_s:g} s")
        return time.monotonic() - began


def _sources(pending: Pending) -> list[Tensor]:
    return [*pending.plain.sources, *(one.source for one in pending.slices)]


def _places_of(plain: Plain) -> list[int]:
    """Where the memory of each begins. It is of no use to hold a storage that is given other memory."""
    return [storage.data_ptr() for storage in plain.storages]


def _is_changed(source: Tensor, begin: int, version: int) -> bool:
    """Whether its bytes, which began there, are not those of this version any more, as far as torch counts. Memory of which it
    is a part may have one counter for all, and a tensor that was given other memory counts what is changed there."""
    if version_of(source) == version or source.data_ptr() != begin:
        return False
    return source.untyped_storage().nbytes() == source.nbytes


@torch.no_grad()
def _cloned(slices: Sequence[Slice]) -> list[Slice] | None:
    """The slices, copied within their device's memory; None if it has no room for them."""
    clones = []
    try:
        for piece, offset, tensor, _ in slices:
            clone = bytes_of(tensor)[piece.start : piece.start + piece.size].clone()
            clones.append(Slice(piece._replace(start=0), offset, clone, clone))
    except torch.OutOfMemoryError:
        return None
    _synchronize(slices)
    return clones


def free_on_device(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Bytes that are free on the GPU that the tensors are on, on the fullest one of several; 0 without one."""
    return min((torch.cuda.mem_get_info(device)[0] for device in _devices(tensor for _, tensor in tensors)), default=0)


def copy_small(share: Share, memory: memoryview) -> Numbers:
    """Copies the small tensors of this process into memory; returns the numbers of the others that have any bytes."""
    layout, left = share.layout, share.layout.sizes > 0
    which = np.flatnonzero(left & (layout.sizes < AT_ONCE_BYTES) & (share.addresses != 0))
    if len(which):
        target = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        move_all(target + layout.offsets[which], share.addresses[which] + layout.starts[which], layout.sizes[which])
        left[which] = False
    return np.flatnonzero(left)


@torch.no_grad()
def copy_all(pending: Pending, memory: memoryview) -> None:
    """Copies pieces to their places in memory."""
    if not len(memory):
        return
    plain, slices = pending
    target = torch.frombuffer(memory, dtype=torch.uint8)
    for (_, _, _, start, size), offset, tensor, _ in slices:
        if size:
            target[offset : offset + size].copy_(bytes_of(tensor)[start : start + size], non_blocking=True)
    move_all(target.data_ptr() + plain.offsets, plain.addresses, plain.sizes)
    _synchronize(slices)


def _pin(memory: SharedMemory) -> None:
    """Lets the GPU write to this memory by itself, at the speed of its bus. Memory that cannot be pinned is used as it is."""
    if memory.unpin is not None or not len(memory.view):
        return
    runtime: Any = torch.cuda.cudart()
    address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    pinned = int(runtime.cudaHostRegister(address, len(memory.view), 0)) == 0
    memory.unpin = (lambda: runtime.cudaHostUnregister(address)) if pinned else lambda: None
    if not pinned:
        with suppress(RuntimeError):  # the runtime keeps an error until it is asked, and torch asks after each kernel
            torch.zeros((), device="cuda")


def _now_on_device(slices: Sequence[Slice]) -> Callable[[], None]:
    """On each GPU, the copy runs on a stream of its own, after what is queued on the training stream now."""
    marked = {device: torch.cuda.current_stream(device).record_event() for device in _devices(s.tensor for s in slices)}

    def enter() -> None:
        for device, event in marked.items():
            stream = _stream(device)
            torch.cuda.set_stream(stream)
            stream.wait_event(event)

    return enter


def _synchronize(slices: Sequence[Slice]) -> None:
    """Waits for what this thread has queued on the GPUs that the slices are on."""
    for device in _devices(s.tensor for s in slices):
        torch.cuda.current_stream(device).synchronize()


def _devices(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The GPUs that these are on."""
    return {tensor.device for tensor in tensors if tensor.is_cuda}


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all snapshots of a device: memory that one has given back is kept for this stream, and no other can use it."""
    return torch.cuda.Stream(device)
