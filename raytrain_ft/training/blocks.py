"""Cuts what many operations are to be done on into pieces that stay in a processor's cache from one operation to the next.

On a device with kernels for whole lists of tensors there is no cache to make use of, and the lists are only kept from needing
temporaries without bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # index2/size reads "2048K"
_USUAL_CACHE = 2**20
_ON_DEVICE = 2**24  # elements
_SMALL = 8  # a tensor of less than this part of a block goes together with others


class Piece(NamedTuple):
    """Some rows, or a block of one.

    Attributes:
        rows: their numbers.
        columns: their tensors, the first of each row, the second, and so on.
        scratch: where it is one row on a CPU, memory for a temporary as large as its tensors. One piece takes it over from the
            other, so that the cache still holds it: what an allocator gives comes from anywhere. Else None.
    """

    rows: list[int]
    columns: list[list[Tensor]]
    scratch: Tensor | None


def pieces(rows: Sequence[tuple[Tensor, ...]], temporaries: int, *, whole: bool) -> Iterator[Piece]:
    """Puts small tensors together and cuts large ones into blocks. One piece after the other: they share the scratch memory.

    Blocks begin at multiples of a fixed size within each tensor, so that the rounding of an element does not depend on what
    else there is.

    Args:
        rows: tensors of one shape each, all of one device and dtype.
        temporaries: how many tensors as large as those of a row are needed at a time. 0: the operations are so few that the
            cache which cores share does as well, where it holds everything.
        whole: no tensor is cut.
    """
    first, width = rows[0][0], len(rows[0]) + temporaries
    lengths = [row[0].numel() for row in rows]
    small = together = largest = block = _ON_DEVICE
    if first.is_cpu:
        block = together = block_size(width, first.itemsize, torch.get_num_threads())
        small, largest = block // _SMALL, sum(lengths)
        if not temporaries and largest * width * first.itemsize <= shared_cache():
            together, largest = largest, block
    scratch = first.new_empty(block) if first.is_cpu and temporaries else None
    numbers, size = [], 0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if small < length <= largest and not whole and all([t.is_contiguous() for t in row]):  # noqa: C419 - a generator is slow
            for tensors in zip(*[_cut(t, block) for t in row], strict=True) if length > block else (row,):
                yield Piece([i], [[t] for t in tensors], _like(scratch, tensors[0]))
            continue
        if numbers and size + length > together:
            yield _of(rows, numbers)
            numbers, size = [], 0
        numbers.append(i)
        size += length
    if numbers:
        yield _of(rows, numbers)


def _of(rows: Sequence[tuple[Tensor, ...]], numbers: list[int]) -> Piece:
    return Piece(numbers, [list(column) for column in zip(*[rows[i] for i in numbers], strict=True)], None)


def _like(scratch: Tensor | None, t: Tensor) -> Tensor | None:
    return scratch if scratch is None or scratch.shape == t.shape else scratch.as_strided(t.shape, t.stride())


def _cut(t: Tensor, size: int) -> Sequence[Tensor]:
    """Not by `split`, which takes as long as an operation on a whole block."""
    n, flat = t.numel(), t.view(-1)
    if n % size == 0:
        return flat.view(-1, size).unbind()
    even = n - n % size
    return *flat[:even].view(-1, size).unbind(), flat[even:]


@lru_cache(maxsize=64)
def block_size(tensors: int, itemsize: int, threads: int) -> int:
    """How many elements of each of so many tensors fit together into the caches of the cores that share out each operation.

    A power of two, so that whole vectors fill a block of any size: an element's rounding does not depend on the cache (torch
    with three threads or more may cut a block elsewhere).
    """
    fit = own_cache() // (tensors * itemsize)
    return 1 << min(max(fit.bit_length() - 1, 14), 18) + threads.bit_length() - 1


@lru_cache(maxsize=1)
def own_cache() -> int:
    """Bytes of the cache that a core has for itself (level 2), or what is usual where the system does not tell."""
    return _size(2) or _USUAL_CACHE


@lru_cache(maxsize=1)
def shared_cache() -> int:
    """Bytes of the cache that cores share (level 3), 0 where the system does not tell."""
    return _size(3)


def _size(level: int) -> int:
    try:
        return int((_CACHES / f"index{level}" / "size").read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0
