"""Process groups that can be left: build, fence, abandon.

Every incarnation of the world has a fresh default group whose backend is "fenced": a Python ``ProcessGroup`` around gloo (or
NCCL) whose works can be woken. Neither ``abort()`` nor deleting a group wakes a wait on gloo, and a wait with a time-out
breaks the group. So nobody here ever waits inside gloo: a wait is on a ``threading.Event`` that is set by completion or by the
fence, and a group that is no longer wanted is *abandoned*: kept referenced for as long as something in it is under way, never
waited for, its buffers never used again. What then still waits for others who wait as well, as the neighbours of a pipeline do,
is cut off once the next incarnation is over too.

This module knows nothing of who decides to fence, or why.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from raytrain_ft.training.exchange import Buffers, Exchange, exchange, is_small
from raytrain_ft.training.fence import WAIT_DEADLINE, Fence, PeerLostError
from raytrain_ft.training.fenced_work import FencedWork

BACKEND = "fenced"
UNUSED_TAG = 0
"""Of messages that nobody sends."""
CROWD = 64
"""Works. Of more, those are looked for that have ended before the first one has, such as a receive that waits for long."""


def _fenced(name: str) -> Callable[..., FencedWork]:
    def collective(self: FencedGroup, *args: Any, **kwargs: Any) -> FencedWork:
        return self.start(name, *args, **kwargs)

    collective.__name__ = name
    return collective


class FencedGroup(dist.ProcessGroup):
    """A process group of one incarnation, around gloo or NCCL. torch sees an ordinary group."""

    def __init__(self, inner: Any, fence: Fence, rank: int, size: int, store: Store) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.inner: Any = inner
        self.fence = fence
        self._rank, self._size = rank, size
        self._on_device = not isinstance(inner, dist.ProcessGroupGloo)
        self._store = store  # NCCL may come back to it
        self._works: deque[FencedWork] = deque()
        self._crowd = CROWD
        self._buffers = Buffers()
        self._posted = False
        self._waits_end = math.inf

    def start(self, name: str, *args: Any, **kwargs: Any) -> FencedWork:
        """Starts a collective of the inner group.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it could not start.
        """
        self.fence.check()
        try:
            work = getattr(self.inner, name)(*args, **kwargs)
        except RuntimeError as error:
            raise PeerLostError(f"{name} could not start: {error}") from error
        self.forget()
        self._works.append(FencedWork(work, self.fence, on_device=self._on_device))
        return self._works[-1]

    def forget(self) -> None:
        """Lets go of the tensors of what has come to its end: mostly what began first. To ask all at every start would take
        as long as there are buckets, for each."""
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        if len(self._works) >= self._crowd:
            self._works = deque(work for work in self._works if not work.is_completed())
            self._crowd = max(CROWD, 2 * len(self._works))

    def all_reduce(self, tensor: Tensor, silent: Collection[int] = (), said: int = 0) -> FencedWork | Exchange:
        """Starts to sum a contiguous tensor over all ranks, in place, to the same bits everywhere. Raises as `start` does.

        Args:
            silent: ranks of whose tensors all but the last `said` elements are zeros, which need not travel.
        """
        if self._on_device or not is_small(tensor, self._size):
            return self.start("allreduce", [tensor])
        return Exchange(self.start, self._buffers, tensor, self._rank, self._size, silent, said)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, by rank: [ranks, elements]. Waits; raises as `start` and its work do."""
        parts = torch.empty((self._size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        if self._on_device or not is_small(tensor, self._size):
            self.start("_allgather_base", parts.view(-1), tensor.reshape(-1)).wait()
        else:
            exchange(self.start, tensor.reshape(-1).repeat(self._size), parts.view(-1), [tensor.numel()] * self._size).wait()
        return parts

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Of every rank, by rank, the part that it has for this one: [ranks, elements of a part]. `tensor` has as many elements
        for each rank. Waits; raises as `start` and its work do."""
        parts = torch.empty((self._size, tensor.numel() // self._size), dtype=tensor.dtype, device=tensor.device)
        each = [parts.shape[1]] * self._size
        self.start("alltoall_base", parts.view(-1), tensor.reshape(-1), each, each, dist.AllToAllOptions()).wait()
        return parts

    def leave(self) -> None:
        """Nobody begins to wait in it from now on."""
        self._waits_end = time.monotonic() + WAIT_DEADLINE.total_seconds()

    def cut_off(self) -> None:
        """Closes the connections of a group of gloo's that was left, so that whatever is under way in it fails, here and there.
        A wait of gloo's that times out does that, and nothing else of what torch shows of it."""
        if self._on_device:
            return
        for peer in range(self._size):
            if peer != self._rank:
                with suppress(RuntimeError):  # to be expected: of the time-out, or because that connection is broken already
                    self.inner.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
        self._waits_end = time.monotonic()

    def is_quiet(self) -> bool:
        """Whether nothing is under way. What was posted tells nobody of its end, but nobody waits for it for ever."""
        if self._posted and time.monotonic() < self._waits_end:
            return False
        return self._on_device or all(work.is_completed() for work in list(self._works))

    def release(self) -> None:
        """Gives back what the system holds for it. It may not be used any more. What NCCL has under way is broken off."""
        if self._on_device:
            for work in self._works:
                work.break_off()
            self.inner.abort()
        self._works.clear()
        self.inner = self._store = None

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begins to send to a rank, as gloo does it: nothing tells of its end. Both must be kept until the peer has it.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it could not start.
        """
        return self._post("send", tensor, peer, tag)

    def post_receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begins to receive from a rank; only a thread that may be left behind for ever may wait for it."""
        return self._post("recv", tensor, peer, tag)

    def _post(self, name: str, tensor: Tensor, peer: int, tag: int) -> Any:
        self.fence.check()
        self._posted = True
        try:
            return getattr(self.inner, name)([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerLostError(f"{name} with rank {peer} could not start: {error}") from error

    def getBackendName(self) -> str:
        return BACKEND

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size


for _name in (
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "alltoall", "alltoall_base", "barrier"),
    *("broadcast", "gather", "reduce", "reduce_scatter", "scatter", "send", "recv", "recv_anysource"),
    *("_allgather_base", "_reduce_scatter_base"),
):
    setattr(FencedGroup, _name, _fenced(_name))


_abandoned: list[FencedGroup] = []
"""Groups that were left. Destroying one with works under way would wait for a peer that never comes."""
_leaving = threading.Lock()


def _create(options: Any, prepared: FencedGroup) -> FencedGroup:
    # torch calls this from init_process_group; the group was built before, where a dead peer cannot hold us
    del options
    return prepared


def _register() -> None:
    # Else each rank of gloo asks the store for each other one's address by itself, twice: of 128 ranks, 33,000 questions. It
    # looks here once, when the process makes its first group.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _connect(store: Store, rank: int, size: int, host: str, use_gpu: bool, timeout: timedelta) -> Any:
    if use_gpu:
        # torch's watchdog would end this process when a peer dies: here the fence does what is to be done
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = WAIT_DEADLINE
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        # Else it comes together with its first collective, where no fence wakes whoever waits for a peer that died, and once
        # more for each pair that sends and receives.
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return group
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    # bound to this node's address alone: gloo's default is whatever the host name resolves to
    # One of its own: after a failed build gloo calls back into what it freed, unless the device ends with it.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 2
    group = dist.ProcessGroupGloo(store, rank, size, options)
    # `timeout` is for coming together. A slow peer may take longer over a step: whether it hangs is the supervisor's business.
    group._set_default_timeout(WAIT_DEADLINE)
    return group


def build(
    store: Store,
    rank: int,
    size: int,
    fence: Fence,
    *,
    host: str,
    use_gpu: bool = False,
    timeout: timedelta,
    default: bool = True,
) -> FencedGroup:
    """Joins the incarnation of `fence` and makes its group the default group of torch.distributed, unless it is a part of it.

    Args:
        store: where the ranks exchange their addresses; only keys of this incarnation may be in it.
        host: the address of this node to listen on.
        timeout: how long to wait for all ranks to come.

    Raises:
        FencedError: the incarnation ended while the group was being built.
        PeerLostError: a rank did not come in time, or its connection failed.
    """
    _register()
    done = threading.Event()
    outcome: list[Any] = []

    def connect() -> None:
        try:
            outcome.append(_connect(store, rank, size, host, use_gpu, timeout))
        except Exception as error:  # whatever it is, who waits for this thread must hear of it
            outcome.append(error.with_traceback(None))  # whose frames keep what it was to be built of
        done.set()

    # In a thread of its own: gloo's constructor may hang on a peer that died between publishing its address and connecting.
    threading.Thread(target=connect, name=f"connect-{fence.incarnation}", daemon=True).start()
    fence.wait(done, timeout)
    inner = outcome[0]
    if isinstance(inner, Exception):
        fence.check()
        raise PeerLostError(f"the group of incarnation {fence.incarnation} could not be built: {inner}") from inner
    group = FencedGroup(inner, fence, rank, size, store)
    if not default:
        return group
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=size, timeout=timeout, pg_options=group)
    return group


def abandon(group: FencedGroup | None) -> None:
    """Leaves a group for ever. Works under way stay referenced, for gloo may still write into their buffers."""
    if group is None:
        return
    group.fence.trip()
    if dist.is_initialized():
        dist.destroy_process_group()
    leave(group)


def leave(group: object) -> None:
    """Leaves a part of the world, as `abandon` leaves the world; anything else than a group needs no leaving."""
    with _leaving:
        if isinstance(group, FencedGroup):
            # That one came together says that all who are in it have left those before it.
            for before in _abandoned:
                if before.fence.incarnation < group.fence.incarnation and not before.is_quiet():
                    before.cut_off()
            group.leave()
            _abandoned.append(group)
        quiet = [each for each in _abandoned if each.is_quiet()]
        _abandoned[:] = [each for each in _abandoned if each not in quiet]
    if quiet:  # else each incarnation would keep some threads and sockets; gloo joins its threads, for which nobody waits here
        threading.Thread(target=lambda: [each.release() for each in quiet], name="release-groups", daemon=True).start()
