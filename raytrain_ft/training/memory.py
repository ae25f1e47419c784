"""Plain copies of memory: of tensors' bytes, without what torch does for every operation (most of a small one).

What is large is copied by the C library. Thousands of small blocks are given to the kernel in one call: it copies them in a
quarter of the time that Python takes to ask for each, and whoever trains meanwhile has the interpreter for himself.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raytrain_ft.storage.cores import on_two

SMALL_BYTES = 32 * 2**10
PART_BYTES = 4 * 2**20
"""Of a large block at once, so that two threads share the work. Of less than 1 MiB the C library copies two pages side by side
instead of four, and takes up to twice as long."""
TURN_BYTES = 8 * 2**20
"""What one thread copies before it looks what is next."""
MOST_TURNS = 32
"""More are not worth what it takes to begin each: then they are longer."""
ALONE = 2
"""So many turns are not worth a second thread, which uses what one leaves of the memory's bandwidth."""
MOST_BLOCKS = 1024
"""That the kernel takes at once (IOV_MAX)."""
LOOK = 256
"""Tensors that are looked at together."""

STREAMING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x10000"}
"""For the environment of a process that copies large states, before it starts: the C library then writes what has 64 KiB or
more past the processor's cache, which would read it from memory first. By default it does so only from 3/4 of a shared cache
on, and a copy takes up to 1.7 times as long."""

Numbers = npt.NDArray[np.int64]
Blocks = tuple[Numbers, Numbers, Numbers]
_is_cpu = attrgetter("is_cpu")

_library = ctypes.CDLL(None)
_long, _short = _library.memmove, ctypes.PyDLL(None).memmove  # the first lets other threads run meanwhile
for _function in (_long, _short):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None
_gather, _scatter = (getattr(_library, name, None) for name in ("process_vm_writev", "process_vm_readv"))
for _function in (_gather, _scatter):
    if _function is not None:
        _function.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
        _function.restype = ctypes.c_ssize_t


def move(target: int, source: int, size: int) -> None:
    """Copies `size` bytes from an address to another. A short copy is over before it would pay to let others run."""
    if size < SMALL_BYTES:
        _short(target, source, size)
        return
    for start in range(0, size, PART_BYTES):
        _long(target + start, source + start, min(PART_BYTES, size - start))


def is_in_a_row(tensor: Tensor) -> bool:
    """Whether the tensor's bytes lie one after the other from `data_ptr()` on, in this process."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def at_a_time(count: int) -> Iterator[slice]:
    """Numbers of as many tensors as one should be asked of all before the next is: so Python is asked a few times instead of
    thousands, and finds what torch knows of them in the processor's cache."""
    return (slice(n, n + LOOK) for n in range(0, count, LOOK))


def pointers(tensors: Sequence[Tensor]) -> Numbers:
    """Where the memory of each begins, in whatever order its elements lie there."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def addresses(tensors: Sequence[Tensor]) -> Numbers:
    """Where the bytes of each begin; 0 of one whose bytes are not (`is_in_a_row`, for thousands)."""
    return np.concatenate([np.zeros(0, np.int64), *(_addresses(tensors[some]) for some in at_a_time(len(tensors)))])


def _addresses(tensors: Sequence[Tensor]) -> Numbers:
    in_a_row = all(map(_is_cpu, tensors)) and all(map(Tensor.is_contiguous, tensors))
    if in_a_row and not any(map(Tensor.is_conj, tensors)) and not any(map(Tensor.is_neg, tensors)):
        return pointers(tensors)
    return np.array([tensor.data_ptr() if is_in_a_row(tensor) else 0 for tensor in tensors], np.int64)


def move_all(targets: Numbers, sources: Numbers, sizes: Numbers, check: Callable[[], None] = lambda: None) -> None:
    """Copies many blocks of memory, by two threads if that pays: `sizes[i]` bytes from `sources[i]` to `targets[i]`.

    Args:
        check: called again and again; may raise to leave.
    """
    plan = _plan(sizes.tobytes())
    targets, sources = targets[plan.blocks] + plan.starts, sources[plan.blocks] + plan.starts
    turns = deque(plan.turns)

    def work() -> None:
        try:
            while (turn := _next(turns)) is not None:
                check()
                some, are_large = turn
                (_move_each if are_large else move_blocks)(targets[some], sources[some], plan.sizes[some])
        except BaseException:
            turns.clear()
            raise

    if len(turns) > ALONE:
        on_two(work)
    else:
        work()


def _next(turns: deque[tuple[slice, bool]]) -> tuple[slice, bool] | None:
    with suppress(IndexError):  # none is left
        return turns.popleft()
    return None


class _Plan(NamedTuple):
    """How two threads share the work on blocks of some sizes.

    Attributes:
        blocks, starts, sizes: of the parts that they are cut into: of which block, where it begins there, bytes.
        turns: of parts, one after the other; and whether they are large.
    """

    blocks: Numbers
    starts: Numbers
    sizes: Numbers
    turns: list[tuple[slice, bool]]


@lru_cache(maxsize=8)
def _plan(block_sizes: bytes) -> _Plan:
    """Of blocks of the same sizes, which a state has at every snapshot, it is made once: two dozen short calls in cold caches
    take as long as to copy a megabyte."""
    sizes = np.frombuffer(block_sizes, np.int64)
    counts = -(-sizes // PART_BYTES)
    blocks = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)) * PART_BYTES
    parts = np.minimum(sizes[blocks] - starts, PART_BYTES)
    ends = np.cumsum(parts)
    turn = max(TURN_BYTES, int(parts.sum()) // MOST_TURNS)
    firsts = np.flatnonzero(np.diff((ends - parts) // turn, prepend=-1)).tolist()
    turns = [slice(first, last) for first, last in pairwise([*firsts, len(parts)])]
    return _Plan(blocks, starts, parts, [(some, _are_large(parts[some])) for some in turns])


def _are_large(sizes: Numbers) -> bool:
    """Whether the C library copies these sooner than the kernel does, or no later."""
    return len(sizes) < 8 or int(sizes.sum()) >= SMALL_BYTES * len(sizes)


def move_blocks(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
    """As `move_all`, on this thread alone."""
    if _are_large(sizes) or not _by_kernel(targets, sources, sizes):
        _move_each(targets, sources, sizes)


def _move_each(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
    for n in range(0, len(sizes), MOST_BLOCKS):  # between two of these calls others may run
        some = [numbers[n : n + MOST_BLOCKS].tolist() for numbers in (targets, sources, sizes)]
        # a loop in Python would take as long again, and two threads would wait for each other in it
        deque(map(_short if max(some[2]) < SMALL_BYTES else _long, *some), maxlen=0)


def _by_kernel(targets: Numbers, sources: Numbers, sizes: Numbers) -> bool:
    """Whether the kernel has copied all of it. Some do not allow that."""
    for n in range(0, len(sizes), MOST_BLOCKS):
        some = slice(n, n + MOST_BLOCKS)
        ends, starts = _vectors(targets[some], sizes[some]), _vectors(sources[some], sizes[some])
        # the other side's pages are looked up one by one, so that is the one with fewer vectors
        function, here, there = (_gather, starts, ends) if len(ends) <= len(starts) else (_scatter, ends, starts)
        if function is None:
            return False
        copied = function(os.getpid(), here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if copied != sizes[some].sum():
            return False
    return True


def _vectors(addresses: Numbers, sizes: Numbers) -> Numbers:
    """An array of struct iovec (address and length) for these blocks; those that adjoin are one."""
    firsts = np.flatnonzero(np.concatenate(([True], addresses[1:] != addresses[:-1] + sizes[:-1])))
    return np.stack((addresses[firsts], np.add.reduceat(sizes, firsts)), axis=1)
