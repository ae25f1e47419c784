"""From a checkpoint back into tensors: compared first, then verified and copied in one pass over the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.pieces import Columns
from raytrain_ft.storage.shard import Part
from raytrain_ft.storage.tensors import DTYPES
from raytrain_ft.training.memory import Blocks, Numbers, addresses, move, move_all, move_blocks

_nbytes = attrgetter("nbytes")


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
    names, targets = list(tensors), list(tensors.values())
    try:
        found = content.pieces.columns(names)
    except KeyError as missing:
        raise _misfit(content, f"{missing.args[0]} is not there") from None
    _check_sizes(names, targets, found, content)
    places = addresses(targets)
    copies = _copies(places, found)
    if not content.verified:
        content.verify(_Walk(*copies).copy)
    elif len(found.sizes):
        move_all(*copies, content.check)
    for number in np.flatnonzero(places == 0).tolist():
        _put(targets[number], content.pieces[names[number]])


def _check_sizes(names: Sequence[str], targets: Sequence[Tensor], found: Columns, content: Content) -> None:
    """Raises StorageError unless each tensor has as many bytes there as here."""
    reached = np.concatenate(([0], np.cumsum(found.sizes)))
    there = np.diff(reached[np.cumsum(found.counts)], prepend=0)
    here = np.fromiter(map(_nbytes, targets), np.int64, len(targets))
    for number in np.flatnonzero(there != here).tolist():
        raise _misfit(content, f"{names[number]} is not there with {here[number]} bytes")


def _misfit(content: Content, what: str) -> StorageError:
    """What is raised for a tensor that is not as it should be, unless a file is damaged: then that is raised instead."""
    content.verify()
    return StorageError(f"{content.manifest.name}: tensor {what}")


def _copies(places: Numbers, found: Columns) -> Blocks:
    """Targets, sources and sizes of what fills the tensors that begin at these addresses; 0 of one that is filled otherwise."""
    targets = np.repeat(places, found.counts)
    some = (targets != 0) & (found.sizes > 0)
    return (targets + found.starts)[some], found.addresses[some], found.sizes[some]


def _put(tensor: Tensor, parts: list[Part]) -> None:
    """Fills a tensor of another kind."""
    if tensor.numel():
        whole = np.concatenate([np.frombuffer(part.data, dtype=np.uint8) for part in parts])
        tensor.copy_(torch.from_numpy(whole).view(tensor.dtype).reshape(tensor.shape))


class _Walk:
    """Copies in the order of their sources, done bit by bit as the sources come by."""

    def __init__(self, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        order = np.argsort(sources)
        self._sources, self._sizes = sources[order], sizes[order]
        self._shifts = targets[order] - self._sources
        self._ends = self._sources + self._sizes

    def copy(self, start: int, stop: int) -> None:
        """Copies what begins at address `start` and ends at `stop`."""
        some = slice(self._ends.searchsorted(start, "right"), self._sources.searchsorted(stop))
        first, last = np.maximum(self._sources[some], start), np.minimum(self._ends[some], stop)
        move_blocks(first + self._shifts[some], first, last - first)


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
        return torch.empty(first.shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise _misfit(content, f"{name}, {first.dtype} {list(first.shape)}: {error}") from error


def make(content: Content, name: str) -> Tensor:
    """A new tensor with the content of one in a verified checkpoint.

    Raises:
        StorageError: as `allocate` does.
    """
    assert content.verified
    tensor = allocate(content, name)
    place = tensor.data_ptr()
    for piece, _, address in content.pieces[name]:
        if piece.size:
            move(place + piece.start, address, piece.size)
    return tensor
