"""From a checkpoint back into tensors: compared first, then verified and copied in one pass over the bytes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.shard import Part
from raytrain_ft.storage.tensors import DTYPES
from raytrain_ft.training.memory import is_plain, move, move_all

Copy = tuple[int, int, int]
"""Addresses of the source and the target, and bytes."""


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)}, as `checkpoint.differences` takes it."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], content: Content) -> None:
    """Overwrites tensors with those of the same names in a checkpoint, all of whose bytes it verifies while it copies.

    They must be of the same dtype and shape.

    Raises:
        StorageError: a tensor is not there, or of another size: nothing was changed. Or a file is damaged: by then the tensors
            hold anything, and the caller must fill them from another checkpoint or give them up.
    """
    copies: list[Copy] = []
    others: list[str] = []
    for name, tensor in tensors.items():
        parts, size = content.pieces.get(name), tensor.nbytes
        if parts is None or sum([part.piece.size for part in parts]) != size:
            raise _misfit(content, f"{name} is not there, or not with {size} bytes")
        if is_plain(tensor):
            copies += _copies(tensor, parts)
        else:
            others.append(name)
    if not content.verified:
        content.verify(_Walk(copies).copy)
    elif copies:
        sources, targets, sizes = np.array(copies, np.int64).T
        move_all(targets, sources, sizes, content.check)
    for name in others:
        _put(tensors[name], content.pieces[name])


def _misfit(content: Content, what: str) -> StorageError:
    """What is raised for a tensor that is not as it should be, unless a file is damaged: then that is raised instead."""
    content.verify()
    return StorageError(f"{content.manifest.name}: tensor {what}")


def _copies(tensor: Tensor, parts: list[Part]) -> list[Copy]:
    """What fills a plain tensor."""
    target = tensor.data_ptr()
    return [(address, target + piece.start, piece.size) for piece, _, address in parts if piece.size]


def _put(tensor: Tensor, parts: list[Part]) -> None:
    """Fills a tensor of another kind."""
    if tensor.numel():
        whole = np.concatenate([np.frombuffer(part.data, dtype=np.uint8) for part in parts])
        tensor.copy_(torch.from_numpy(whole).view(tensor.dtype).reshape(tensor.shape))


class _Walk:
    """Copies in the order of their sources, done bit by bit as the sources come by."""

    def __init__(self, copies: list[Copy]) -> None:
        self._copies = sorted(copies)
        self._sources = [source for source, _, _ in self._copies]

    def copy(self, start: int, stop: int) -> None:
        """Copies what begins at address `start` and ends at `stop`."""
        number, end = max(0, bisect_right(self._sources, start) - 1), bisect_left(self._sources, stop)
        for source, target, size in self._copies[number:end]:
            first, last = max(source, start), min(source + size, stop)
            if first < last:
                move(target + first - source, first, last - first)


def allocate(content: Content, name: str) -> Tensor:
    """A new tensor like one in a checkpoint, not filled yet.

    Raises:
        StorageError: it is not there, or does not have the bytes that its dtype and shape ask for.
    """
    parts = content.pieces.get(name)
    if parts is None:
        raise _misfit(content, f"{name} is not there")
    first = parts[0].piece
    dtype = DTYPES.get(first.dtype)
    size = sum(len(part.data) for part in parts)
    if dtype is None or min(first.shape, default=0) < 0 or math.prod(first.shape) * dtype.itemsize != size:
        raise _misfit(content, f"{name} says {first.dtype} {list(first.shape)} but has {size} bytes")
    try:
        return torch.empty(first.shape, dtype=dtype)
    except RuntimeError as error:
        raise _misfit(content, f"{name}, {first.dtype} {list(first.shape)}: {error}") from error


def make(content: Content, name: str) -> Tensor:
    """A new tensor with the content of one in a verified checkpoint.

    Raises:
        StorageError: as `allocate` does.
    """
    assert content.verified
    tensor = allocate(content, name)
    for source, target, size in _copies(tensor, content.pieces[name]):
        move(target, source, size)
    return tensor
