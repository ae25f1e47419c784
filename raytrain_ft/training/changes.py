"""What the ranks say of a buffer that a forward pass changed, and what comes of it.

Of floating buffers it is the mean, in two numbers for each value. Mostly these are the change and what rounding would take from
it: so what nobody changed keeps its bits. Of what a change cannot be measured from (the 1e9 or the infinity that a running
minimum begins with) they are the new value, and the share of the batch that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.storage.tensors import bytes_of

BLOCK = 2**16
"""Numbers of one that are computed at once on a CPU, for what is computed meanwhile to stay in its caches."""
ALL = 1.0 - 1e-5
"""Of the batch, up to rounding."""
LARGEST_BASE = 2.0**24
"""Changes are measured from less than this: the difference to a larger number has no digits left of what a small one was."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their size, to compare bits by."""


def _is_number(old: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a change is measured from it: not from the infinity, or the 1e9, that a running minimum begins with, nor from the
    NaN of what was not set yet. Of a buffer of more digits than travel, large ones are, for else the digits would be lost."""
    has_more = torch.finfo(dtype).eps > torch.finfo(old.dtype).eps
    return old.abs() < (torch.finfo(dtype).max / 4 if has_more else LARGEST_BASE)


def change_of(now: Tensor, old: Tensor, weight: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers for each, zeros where nothing changed: what is to be added to the old one, and what is left of that by
    rounding. Where nothing is measured from the old one: the new one, and 1. All times `weight`, the share of the batch that
    says so."""
    number, exact = _is_number(old, dtype), now.double()
    base = old.double().masked_fill(~number, 0.0)
    most, rest = _apart((exact - base) * weight, base, dtype)
    if weight == 1.0:
        rest = (exact - (base + most.double())).to(dtype)  # of what nobody adds anything to, to the last bit
    rest = torch.where(number, rest.masked_fill(~most.isfinite(), 0.0), weight)
    unchanged = (now == old) | (now.isnan() & old.isnan())
    return most.masked_fill(unchanged, 0.0), rest.masked_fill(unchanged, 0.0)


def _apart(change: Tensor, base: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The change as two numbers of this dtype. The first is in whole steps of the base's last bit, as long as it is not far
    larger than the base: such numbers are summed up without rounding, in whatever order."""
    _, exponent = torch.frexp(base)
    step = torch.ldexp(torch.full_like(base, torch.finfo(dtype).eps / 2), exponent)
    steps = (change / step).round()
    is_small = (base != 0) & (steps.abs() <= 2 / torch.finfo(dtype).eps)
    most = torch.where(is_small, steps * step, change).to(dtype)
    return most, (change - most.double()).to(dtype)


def after(old: Tensor, most: Tensor, rest: Tensor) -> Tensor:
    """What it is by now, of the sums of what the ranks say (`change_of`). What is no number stays as it is until all have set
    it."""
    exact, more = old.double(), most.double()
    share = torch.where(old.isfinite(), more + (1.0 - rest.double()) * exact, exact)  # of the others, it is the old one
    direct = torch.where(rest > ALL, more, share)
    now = torch.where(_is_number(old, most.dtype), exact + more + rest.double(), direct).to(old.dtype)
    return torch.where((most == 0) & (rest == 0), old, now)


def scaled(old: Tensor, most: Tensor, rest: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """What the ranks say, if it is to count for so many times more."""
    if factor == 1.0:
        return most, rest
    number = _is_number(old, most.dtype)
    base = old.double().masked_fill(~number, 0.0)
    first, second = _apart((most.double() + rest.double()) * factor, base, most.dtype)
    second = second.masked_fill(~first.isfinite(), 0.0)
    return torch.where(number, first, most * factor), torch.where(number, second, rest * factor)


def _bits(values: Tensor) -> Tensor:
    """To be compared: 0.0 and -0.0 are different bits, and one NaN has the same as itself."""
    return values.view(_WHOLE[values.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two of one dtype and shape are equal in all their bits."""
    pair = [bytes_of(tensor) for tensor in (one, other)]
    if all(len(each) % 8 == 0 and each.storage_offset() % 8 == 0 for each in pair):
        pair = [each.view(torch.int64) for each in pair]  # eight at once: torch compares one by one
    return torch.equal(*pair)


def by_blocks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of one length, cut alike. A GPU takes them whole."""
    size = max(1, len(rows[0])) if rows[0].is_cuda else BLOCK
    return zip(*(row.split(size) for row in rows), strict=True)


class Row:
    """Some buffers as one row of numbers, for a model may have hundreds.

    Attributes:
        now, old: their values, and those when the attempt began; size: how many.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        self._how: dict[str, Any] = {"dtype": dtype, "device": device}
        self.buffers = [buffer for buffer, _ in pairs]
        self._sizes = [buffer.numel() for buffer in self.buffers]
        self.size = sum(self._sizes)
        self.now = self._row(self.buffers)
        self.old = self._row([old for _, old in pairs])

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        rows = [one.reshape(-1).to(**self._how) for one in tensors] or [torch.zeros(0, **self._how)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def touched(self) -> Tensor:
        """To which of the buffers this rank's forward pass has written other bits. bool [buffers]."""
        return self.which(_bits(self.now) != _bits(self.old))

    def which(self, numbers: Tensor) -> Tensor:
        """In which of the buffers any of these numbers is. bool [buffers]."""
        if len(self.buffers) < 2:
            return numbers.any().repeat(len(self.buffers))
        ends = torch.tensor(self._sizes, device=numbers.device).cumsum(0)
        counts = numbers.cumsum(0)[ends - 1]
        return counts.diff(prepend=counts.new_zeros(1)) > 0

    def write(self, values: Tensor, written: Sequence[bool]) -> None:
        """Sets those of the buffers."""
        for buffer, value, wanted in zip(self.buffers, values.split(self._sizes), written, strict=True):
            if wanted:
                buffer.copy_(value.view(buffer.shape))


def alike(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype | None = None) -> list[Row]:
    """Buffers of one dtype (or as of this one) in a row, in the order in which dtypes come."""
    rows: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for buffer, old in pairs:
        rows.setdefault(dtype or buffer.dtype, []).append((buffer, old))
    # of numbers of eight bits torch computes nothing
    kinds = [torch.float32 if kind.is_floating_point and kind.itemsize == 1 else kind for kind in rows]
    return [Row(some, kind, device) for some, kind in zip(rows.values(), kinds, strict=True)]
