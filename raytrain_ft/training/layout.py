"""Which bytes of the training state one worker stores.

The state is one sequence of bytes, tensor after tensor; each of n workers takes an n-th of it, whatever tensors that cuts
through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, eq, is_, methodcaller
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from raytrain_ft.errors import ConfigError
from raytrain_ft.storage.shard import Piece
from raytrain_ft.training.guard import guard
from raytrain_ft.training.memory import Numbers, addresses, at_a_time, pointers

ALIGNMENT = 4096
Pairs = Sequence[tuple[str, Tensor]]
_layout, _dtype, _shape = attrgetter("layout"), attrgetter("dtype"), attrgetter("shape")
_alias = methodcaller("detach")


class Slice(NamedTuple):
    """A piece of one tensor.

    Attributes:
        offset: of its first byte in the part.
        tensor: an alias of it, so that its bytes stay where they are until they are copied, also if a forward pass gives the
            parameter others (`p.data = ...`).
        source: the tensor itself.
    """

    piece: Piece
    offset: int
    tensor: Tensor
    source: Tensor


class Plain(NamedTuple):
    """Pieces whose bytes lie one after the other, in this process, in columns: an alias of a small tensor, and an object that
    holds it, take as long to make as its bytes to copy.

    Attributes:
        numbers: which pieces of the layout.
        sources: the tensors; storages: their memory, which is not freed as long as it is held here, if it stays in its place
            (`Stay`).
        begins: where the bytes of each tensor begin; addresses: where those of its piece do.
        offsets: of its first byte in the part; sizes: bytes.
    """

    numbers: Numbers
    sources: list[Tensor]
    storages: list[torch.UntypedStorage]
    begins: Numbers
    addresses: Numbers
    offsets: Numbers
    sizes: Numbers


class Pending(NamedTuple):
    """Pieces that are to be copied: those in plain memory, and all others."""

    plain: Plain
    slices: list[Slice]


@dataclass(frozen=True, slots=True)
class Described:
    """What a layout follows from: of all tensors, what they are; the last `own` of them are stored whole."""

    names: Sequence[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    own: int
    number: int
    count: int


class Layout:
    """The pieces of one worker's part. It stays the same as long as names, dtypes and shapes do, so it is kept: of thousands of
    tensors, to describe all takes as long as to copy them.

    Attributes:
        described: what it follows from.
        tensors: the numbers of the tensors, in order; pieces: of each, what belongs to the part.
        starts, sizes, offsets: of the pieces: where they begin in their tensors, bytes, where they begin in the part.
        size: of the part, bytes.
    """

    def __init__(self, described: Described, sources: Sequence[Tensor]) -> None:
        self.described = described
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(described.shapes, described.dtypes, strict=True)]
        shared = len(sizes) - described.own
        cuts = _cuts(sizes[:shared], described.number, described.count)
        cuts += [(number, 0, sizes[number]) for number in range(shared, len(sizes))]
        self.tensors = [number for number, _, _ in cuts]
        names, dtypes, shapes = described.names, described.dtypes, described.shapes
        self.pieces = [Piece(names[i], str(dtypes[i]), tuple(shapes[i]), start, size) for i, start, size in cuts]
        self.starts = np.array([piece.start for piece in self.pieces], np.int64)
        self.sizes = np.array([piece.size for piece in self.pieces], np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.size = int(self.sizes.sum())
        self._are_alike = guard(sources)
        self._plain = addresses(self.mine(sources)) != 0

    def mine(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Of all tensors those that the pieces are of."""
        return [sources[number] for number in self.tensors]

    def locate(self, names: Sequence[str], sources: Sequence[Tensor], own: int, number: int, count: int) -> Numbers | None:
        """Where the bytes of its pieces' tensors begin, 0 of those that are not plain; None if these have another layout."""
        described = self.described
        if (described.own, described.number, described.count) != (own, number, count) or described.names != names:
            return None
        if self._are_alike(sources):
            return np.where(self._plain, pointers(self.mine(sources)), 0)
        fits = all(self._fits(sources[some], some) for some in at_a_time(len(sources)))
        return addresses(self.mine(sources)) if fits else None

    def _fits(self, sources: Sequence[Tensor], numbers: slice) -> bool:
        """Nothing is kept of what is looked at: so many new objects would have Python look for garbage."""
        same_dtypes = all(map(is_, map(_dtype, sources), self.described.dtypes[numbers]))
        same_shapes = same_dtypes and all(map(eq, map(_shape, sources), self.described.shapes[numbers]))
        return same_shapes and all(map(is_, map(_layout, sources), repeat(torch.strided)))


def _cuts(sizes: Sequence[int], number: int, count: int) -> list[tuple[int, int, int]]:
    """Number, first byte and bytes of what worker `number` takes of each tensor."""
    total = sum(sizes)
    first, last = _cut(total, number, count), _cut(total, number + 1, count)
    found: list[tuple[int, int, int]] = []
    offset = 0
    for which, size in enumerate(sizes):
        start, stop = max(first, offset) - offset, min(last, offset + size) - offset
        # a tensor without bytes belongs to whoever has the place where it would be; at the very end, to the last worker
        empty_here = size == 0 and (first <= offset < last or (offset == total and number == count - 1))
        if start < stop or empty_here:
            found.append((which, start if size else 0, max(0, stop - start)))
        offset += size
    return found


def _cut(total: int, number: int, count: int) -> int:
    """Where the part of worker `number` begins. Aligned, so that small tensors are rarely cut."""
    return total if number == count else total * number // count // ALIGNMENT * ALIGNMENT


class Share(NamedTuple):
    """One worker's part of the state.

    Attributes:
        sources: the tensors that the pieces of its layout are of.
        addresses: where the bytes of each begin; 0 if they do not lie one after the other, in this process.
    """

    layout: Layout
    sources: Sequence[Tensor]
    addresses: Numbers

    def pending(self, numbers: Numbers | None = None, *, plain: bool = True) -> Pending:
        """The pieces of these numbers (all), in whatever memory they are now.

        Args:
            plain: whether those in plain memory are told apart.
        """
        chosen = np.arange(len(self.sources)) if numbers is None else numbers
        apart = (self.addresses[chosen] != 0) & plain
        return Pending(self._plain(chosen[apart]), self._slices(chosen[~apart]))

    def _plain(self, numbers: Numbers) -> Plain:
        sources, layout = [self.sources[n] for n in numbers.tolist()], self.layout
        begins, storages = self.addresses[numbers], list(map(Tensor.untyped_storage, sources))
        places = begins + layout.starts[numbers]
        return Plain(numbers, sources, storages, begins, places, layout.offsets[numbers], layout.sizes[numbers])

    def _slices(self, numbers: Numbers) -> list[Slice]:
        sources = [self.sources[n] for n in numbers.tolist()]
        pieces = [self.layout.pieces[n] for n in numbers.tolist()]
        return list(map(Slice, pieces, self.layout.offsets[numbers].tolist(), map(_alias, sources), sources))


def share(tensors: Pairs, number: int, count: int, own: Pairs = (), before: Layout | None = None) -> Share:
    """Worker `number`'s part of the state: all parts are of about the same size, and together they are the whole.

    Args:
        own: tensors that belong to this worker alone.
        before: the layout of the state that was shared last, which may be that of this one.

    Raises:
        ConfigError: a tensor is of a kind that has no plain bytes (see `check_plain`).
    """
    pairs = [*tensors, *own]
    names, sources = [name for name, _ in pairs], [tensor for _, tensor in pairs]
    found = before.locate(names, sources, len(own), number, count) if before is not None else None
    if before is None or found is None:
        for name, tensor in pairs:
            check_plain(name, tensor)
        described = Described(names, list(map(_dtype, sources)), list(map(_shape, sources)), len(own), number, count)
        before = Layout(described, sources)
        found = addresses(before.mine(sources))
    return Share(before, before.mine(sources), found)


def total_size(tensors: Pairs) -> int:
    """Bytes of these tensors."""
    return sum(tensor.nbytes for _, tensor in tensors)


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for a tensor that has no bytes in a row, or is more than its bytes."""
    if is_lazy(tensor):  # first: of one whose shape is not known yet little else can be asked
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}, of a lazy module that has seen no input yet: call the model once before"
        )
    if not has_plain_layout(tensor):
        raise ConfigError(f"{name} is a {tensor.layout} tensor on {tensor.device}: only plain (strided) tensors can be stored")
    if tensor.is_nested or is_wrapper(tensor):
        kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__module__}.{type(tensor).__name__}"
        raise ConfigError(
            f"{name} is a {kind}, which is made of other tensors: only plain ones can be stored. Keep plain tensors in the "
            "model and its optimizer, and make it from them where it is used"
        )


def check_own_memory(what: str, tensor: Tensor) -> None:
    """Raises ConfigError for a plain tensor of which several elements are one place in memory: torch writes to none such."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(f"{what} is an expanded tensor, which cannot be written to: register its .contiguous()")


def is_plain(tensor: Tensor) -> bool:
    """Whether `check_plain` raises nothing."""
    return not is_lazy(tensor) and has_plain_layout(tensor) and not tensor.is_nested and not is_wrapper(tensor)


def has_plain_layout(tensor: Tensor) -> bool:
    """Whether it says itself that its bytes are in a row."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def is_wrapper(tensor: Tensor) -> bool:
    """Whether what it holds is in other tensors (those of torchao, say). It has no bytes of its own, and tells of none of this:
    it says that it is strided, and what is read at its address is anything."""
    # most are of these kinds, and all are looked at for each checkpoint
    return type(tensor) not in (Tensor, nn.Parameter) and (
        is_traceable_wrapper_subclass(tensor) or isinstance(tensor, MaskedTensor)
    )
