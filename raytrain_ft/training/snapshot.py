"""Copies a worker's share of the training state into memory that its persister reads, while training goes on.

The state is one sequence of bytes, tensor after tensor; each of n workers takes an n-th of it, whatever tensors that cuts
through. The copy runs on a thread of its own during the next step's forward and backward pass, and only the weight update
waits for it (CheckFreq, section 4.3.1). A tensor on the CPU is really copied: an alias would change under the writer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.storage.log_files import version_of
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.shard import Piece
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.training.memory import is_plain, move

ALIGNMENT = 4096
POLL_S = 0.05
MOST_NAMES = 3
"""Of tensors that an error names."""


class Slice(NamedTuple):
    """A piece of one tensor.

    Attributes:
        tensor: an alias of it, so that its bytes stay where they are until they are copied, also if a forward pass gives the
            parameter others (`p.data = ...`).
        source: the tensor itself.
    """

    piece: Piece
    tensor: Tensor
    source: Tensor


def total_size(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


def share(tensors: Sequence[tuple[str, Tensor]], number: int, count: int) -> list[Slice]:
    """Worker `number`'s part of the state: all parts are of about the same size, and together they are the whole.

    Raises:
        ConfigError: a tensor is of a kind that has no plain bytes (sparse, quantized, on "meta").
    """
    for name, tensor in tensors:
        check_plain(name, tensor)
    sizes = [tensor.nbytes for _, tensor in tensors]
    total = sum(sizes)
    first, last = _cut(total, number, count), _cut(total, number + 1, count)
    found: list[Slice] = []
    offset = 0
    for (name, tensor), size in zip(tensors, sizes, strict=True):
        start, stop = max(first, offset) - offset, min(last, offset + size) - offset
        # a tensor without bytes belongs to whoever has the place where it would be; at the very end, to the last worker
        empty_here = size == 0 and (first <= offset < last or (offset == total and number == count - 1))
        if start < stop or empty_here:
            piece = Piece(name, str(tensor.dtype), tuple(tensor.shape), start if size else 0, max(0, stop - start))
            found.append(Slice(piece, tensor.detach(), tensor))
        offset += size
    return found


def _cut(total: int, number: int, count: int) -> int:
    """Where the part of worker `number` begins. Aligned, so that small tensors are rarely cut."""
    return total if number == count else total * number // count // ALIGNMENT * ALIGNMENT


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for a tensor that has no bytes in a row."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(f"{name} is a {tensor.layout} tensor on {tensor.device}: only plain (strided) tensors can be stored")


class Copy:
    """One snapshot: the copy of a worker's share into shared memory, on a thread.

    On a GPU it may be copied within the device's memory first (mode "gpu", section 4.3.1): the weights may change again as soon
    as that is done. If the device has no room by then, it is copied to the host at once.

    Attributes:
        seconds: how long it took to be in host memory; None while it is under way.
        device_seconds: how long it took within the device; None if it was not copied there.
    """

    def __init__(
        self, slices: Sequence[Slice], memory: SharedMemory, then: Callable[[Copy], None], mode: Literal["cpu", "gpu"] = "cpu"
    ) -> None:
        self.slices = slices
        self._versions = [version_of(s.source) for s in slices]
        self.device_seconds: float | None = None
        self._mode = mode
        self.size = sum(s.piece.size for s in slices)
        self.seconds: float | None = None
        self.error: BaseException | None = None
        self._memory = memory
        self._then = then
        self._done = threading.Event()
        self._ready = _now_on_device(slices)
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)

    def start(self) -> None:
        """Begins. From now on nobody may change the tensors until `wait` returns."""
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            memory = self._memory.reserve(self.size)
            self._ready()
            if self._mode == "gpu" and (clones := _cloned(self.slices)) is not None:
                self._check_unchanged()
                self.slices, self._versions = clones, []
                self.device_seconds = time.monotonic() - began
                self._done.set()
            if torch.cuda.is_initialized():
                _pin(self._memory)
            copy_all(self.slices, memory)
            self._check_unchanged()
        except BaseException as error:  # told to whoever waits
            self.error = error
        self.slices = []  # clones, and bytes that a parameter no longer has, are given back
        self.seconds = time.monotonic() - began
        self._done.set()
        self._then(self)

    def _check_unchanged(self) -> None:
        """Raises StorageError if somebody did not wait: the copy may hold a mix of before and after."""
        begun = zip(self.slices, self._versions, strict=False)  # clones are nobody else's, and have none
        changed = [one.piece.name for one, version in begun if _is_changed(one, version)]
        if changed:
            raise StorageError(
                f"{', '.join(changed[:MOST_NAMES])} changed while being copied: put what changes a tensor besides the "
                'optimizer\'s step into "with run.update():", which waits for the copy'
            )

    def join(self, timeout_s: float = 5.0) -> None:
        """Waits until the copy was also handed on, which takes milliseconds unless who it goes to is frozen."""
        self._thread.join(timeout_s)

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


def _is_changed(one: Slice, version: int) -> bool:
    """Whether its bytes are not those of this version any more, as far as torch counts. Memory of which it is a part may have
    one counter for all, and a tensor that was given other memory counts what is changed there."""
    if version_of(one.source) == version or one.source.data_ptr() != one.tensor.data_ptr():
        return False
    return one.source.untyped_storage().nbytes() == one.source.nbytes


@torch.no_grad()
def _cloned(slices: Sequence[Slice]) -> list[Slice] | None:
    """The slices, copied within their device's memory; None if it has no room for them."""
    clones = []
    try:
        for piece, tensor, _ in slices:
            clone = bytes_of(tensor)[piece.start : piece.start + piece.size].clone()
            clones.append(Slice(piece._replace(start=0), clone, clone))
    except torch.OutOfMemoryError:
        return None
    _synchronize(slices)
    return clones


def free_on_device(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Bytes that are free on the GPU that the tensors are on, on the fullest one of several; 0 without one."""
    return min((torch.cuda.mem_get_info(device)[0] for device in _devices(tensor for _, tensor in tensors)), default=0)


@torch.no_grad()
def copy_all(slices: Sequence[Slice], memory: memoryview) -> None:
    """Copies the slices into memory, one after the other."""
    if not len(memory):
        return
    target = torch.frombuffer(memory, dtype=torch.uint8)
    address, offset = target.data_ptr(), 0
    for piece, tensor, _ in slices:
        start, size = piece.start, piece.size
        if not size:
            continue
        if is_plain(tensor):
            move(address + offset, tensor.data_ptr() + start, size)
        else:
            target[offset : offset + size].copy_(bytes_of(tensor)[start : start + size], non_blocking=True)
        offset += size
    _synchronize(slices)


def _pin(memory: SharedMemory) -> None:
    """Lets the GPU write to this memory by itself, at the speed of its bus. Memory that cannot be pinned is used as it is."""
    if memory.unpin is not None or not len(memory.view):
        return
    runtime: Any = torch.cuda.cudart()
    address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    pinned = int(runtime.cudaHostRegister(address, len(memory.view), 0)) == 0
    memory.unpin = (lambda: runtime.cudaHostUnregister(address)) if pinned else lambda: None


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
