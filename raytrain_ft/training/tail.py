"""What travels in the tail of a step's last bucket: values that every rank must agree upon when the step ends.

``[loss | stop | checkpoint | sleep | flags | changes of integer buffers | changes of floating buffers]``, all summed over
ranks: the loss weighted by samples; how many ranks were asked to stop at this step's boundary, and whether rank 0 wants a
checkpoint of the state there (so that all stop, or begin one, at the same boundary, without a collective of its own); per
replica, whether it sleeps from the next step on (see `sleep`); of each large buffer, a flag (see below); what one rank's
forward pass changed in integer buffers, such as BatchNorm's batch counter; and the mean, by samples, of what all ranks' changed
in floating and complex ones, such as its statistics. So no rank ever holds committed state that nobody else has, and a buffer
that nobody changed keeps its bits. A floating change is two numbers: see `changes`.

Of a large buffer, such as a mask, there is only the flag: how many ranks have changes of it to add. What is said of those that
any rank has changed travels in a tensor of its own, `more`, which is reduced right after the last bucket; mostly there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import TaskError
from raytrain_ft.training.changes import Row, after, alike, by_blocks, change_of, same_bits, scaled
from raytrain_ft.training.lists import copy_
from raytrain_ft.training.sleep import Sleep

HEADER = 3
LARGEST_EXACT_INTEGER = 2**24
"""Changes of integer buffers travel as fp32, which holds integers exactly up to here."""
LARGE = 2**16
"""Values of a buffer of which nothing travels unless somebody changes it: to send a mask of millions, and to compute what has
changed in it, would take longer than a step."""


Place = tuple[nn.Module, str]
"""Where a buffer is: its module, and its name there."""


def places(model: nn.Module) -> list[tuple[str, Place]]:
    """The name and the place of every buffer that is not empty; of one that has several names, the first."""
    found: dict[int, tuple[str, Place]] = {}
    for path, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            if buffer.numel() > 0:
                found.setdefault(id(buffer), (f"{path}.{own}" if path else own, (module, own)))
    return list(found.values())


def here(place: Place) -> Tensor:
    """The buffer that is there now, without its graph."""
    return getattr(*place).detach()


def _memory_of_trained(modules: Sequence[nn.Module]) -> set[int]:
    params = (p for module in modules for p in module._parameters.values() if p is not None and p.requires_grad)
    return {p.untyped_storage().data_ptr() for p in params}


def _check_known(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raises `TaskError` if the model has a parameter that is none of these."""
    known = set(map(id, parameters))
    if new := [name for name, p in model.named_parameters() if id(p) not in known]:
        raise TaskError(
            f"the forward pass has made the parameter {new[0]}, which was not there when the optimizer was: it would not be "
            "trained, and a replacement would not have it. Create it in __init__, in its full size"
        )


def _kind(buffer: Any) -> str:
    return f"{buffer.dtype} {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else "None"


def _numbers(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _is_float(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _integer_change(row: Row, dtype: torch.dtype) -> Tensor:
    """Raises `TaskError` if it is too large to travel."""
    change = row.now - row.old
    if int(change.abs().max()) > LARGEST_EXACT_INTEGER:
        raise TaskError(f"an integer buffer changed by more than {LARGEST_EXACT_INTEGER} within one step")
    return change.to(dtype)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the ranks agreed upon in a step, which is the same on all.

    Attributes:
        loss: its mean over the global batch. stop: some rank asked for a stop. checkpoint: one is due at this boundary.
        said: by each replica, of its sleep.
    """

    loss: float = math.nan
    stop: bool = False
    checkpoint: bool = False
    said: list[int] = field(default_factory=list)


class Tail:
    """Packs and unpacks the tail of one model.

    Attributes:
        losses: per micro-batch of this rank, loss * samples / global samples.
        stop_requested: whether this rank asks for a stop at the step's boundary.
        sleep: who of the replicas sleeps.
        checkpoint_wanted: whether this rank wants a checkpoint of the state at the step's boundary.
    """

    def __init__(self, model: nn.Module, seats: int = 1) -> None:
        found = places(model)
        named = [(place, here(place)) for _, place in found]
        small = [(place, b) for place, b in named if b.numel() < LARGE]
        self._names = {place: name for name, place in found}
        self._modules, self._looked = list(model.modules()), False
        self._parameters = list(model.parameters())
        self._floats = [place for place, b in small if _is_float(b)]
        self._integers = [place for place, b in small if not _is_float(b)]
        self._large = [place for place, b in named if b.numel() >= LARGE]
        self._sizes = [_numbers(b).numel() * (2 if _is_float(b) else 1) for b in map(here, self._large)]
        self.sleep = Sleep()
        self._flags = HEADER + seats
        self._start = self._flags + len(self._large)  # of the buffers
        self.size = self._start + sum(b.numel() for b in self.integers) + 2 * sum(b.numel() for b in self.floats)
        self.losses: list[Tensor] = []
        self.stop_requested = False
        self.checkpoint_wanted = False
        self._before: list[Tensor] | None = None
        self._memory: list[Tensor] = []  # for that, used again: to touch new memory takes longer than to fill it
        self._there: list[Tensor] = []  # the buffers themselves when the attempt began
        self._kinds: list[str] = []
        self._touched: list[Tensor] = []  # by this rank's forward pass: integer, then floating ones; empty: unknown
        self._altered: list[bool] = []  # by it, of the large ones; empty: unknown
        self._weight, self._leads = 0.0, False  # what this rank's changes count for, as it has said last

    @property
    def integers(self) -> list[Tensor]:
        """The integer buffers as they are now: a forward pass may put another tensor in the place of one."""
        return [here(place) for place in self._integers]

    @property
    def floats(self) -> list[Tensor]:
        """The floating buffers as they are now; complex ones as pairs of numbers."""
        return [_numbers(here(place)) for place in self._floats]

    @property
    def large(self) -> list[Tensor]:
        """The large ones as they are now, of all dtypes."""
        return [_numbers(here(place)) for place in self._large]

    @torch.no_grad()
    def begin(self) -> None:
        """Saves the buffers, which the forward pass will change, for the case that the step must be redone."""
        now, kinds = self._now, self._kinds
        self._there = [getattr(*place) for place in self._all]
        self._kinds = [_kind(buffer) for buffer in self._there]
        if self._memory and kinds == self._kinds:
            copy_(self._memory, now)
        else:
            self._memory = [b.clone() for b in now]
        self._before = self._memory
        self.losses, self._touched, self._altered = [], [], []
        self.sleep.silent_from = None

    def restore(self) -> None:
        """Puts the buffers back to what they were when the attempt began. What the forward pass has put in the place of one is
        not written to: it may be anything."""
        for place, there, before in zip(self._all, self._there, self._before or (), strict=False):
            setattr(*place, there)
            _numbers(there.detach()).copy_(before)

    @property
    def _all(self) -> list[Place]:
        return [*self._integers, *self._floats, *self._large]

    @property
    def _now(self) -> list[Tensor]:
        return [*self.integers, *self.floats, *self.large]

    def changed(self) -> bool:
        """Whether this attempt has changed a buffer."""
        before = zip(self._now, self._before or [], strict=False)
        return any(not same_bits(buffer, old) for buffer, old in before)

    def settled(self) -> None:
        """The attempt was committed: there is nothing to put back."""
        self._before = None

    @torch.no_grad()
    def fill(self, tail: Tensor, samples: int, batch: int, rank: int, *, leads: bool) -> None:
        """Writes this rank's contribution.

        Args:
            samples: how many of the `batch` of all ranks it has read.
            leads: one rank speaks for all of what is the same everywhere.

        Raises:
            TaskError: a buffer came into being, has another shape, or is an integer one that changed by too much.
        """
        self._look()
        tail.zero_()
        silent = self.sleep.silent_from is not None
        weight = 0.0 if silent else samples / batch
        for loss in [] if silent else self.losses:
            tail[0] += loss.detach().to(tail.dtype)
        for other, word in self.sleep.say(rank, samples, leads=leads).items():
            tail[HEADER + other] = word
        tail[1] = 1.0 if self.stop_requested else 0.0
        tail[2] = 1.0 if self.checkpoint_wanted else 0.0
        self._weight, self._leads = weight, leads
        # By their bytes: what a task writes through `.data`, as many do to a codebook, leaves no other trace.
        self._altered = [not same_bits(now, old) for now, old in self._large_pairs]
        for number, (place, altered) in enumerate(zip(self._large, self._altered, strict=True)):
            if altered and (weight > 0 if _is_float(here(place)) else leads):
                tail[self._flags + number] = 1.0
        integers, floats = self._rows(tail.device)
        offset, self._touched = self._start, []
        for row in integers:
            self._touched.append(row.touched())
            if leads:
                tail[offset : offset + row.size] = _integer_change(row, tail.dtype)
            offset += row.size
        for row in floats:
            self._touched.append(row.touched())
            if weight > 0:
                tail[offset : offset + 2 * row.size] = torch.cat(change_of(row.now, row.old, weight, tail.dtype))
            offset += 2 * row.size

    def needs(self, tail: Tensor) -> int:
        """Numbers that are to be reduced besides the tail, as the ranks say in it: the same on all."""
        return sum(size for _, size in self._spoken_of(tail))

    def _spoken_of(self, tail: Tensor) -> list[tuple[int, int]]:
        """The large buffers that some rank has changes of, and how many numbers are said of each."""
        if not self._large:
            return []
        flags = tail[self._flags : self._start].tolist()
        return [(n, self._sizes[n]) for n, flag in enumerate(flags) if flag > 0]

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """All buffers, now and when the attempt began."""
        assert self._before is not None or not self._all, "between two attempts there is nothing to agree upon"
        return list(zip(self._now, self._before or (), strict=True))

    @property
    def _large_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return self._pairs[len(self._integers) + len(self._floats) :]

    def _large_rows(self, tail: Tensor, more: Tensor | None) -> Iterator[tuple[int, Row, Tensor]]:
        """Of the large buffers that are spoken of: number, row, and what is said."""
        offset, pairs = 0, self._large_pairs
        for number, size in self._spoken_of(tail):
            assert more is not None, "of what was changed the changes are there"
            (row,) = alike(pairs[number : number + 1], tail.device, None if _is_float(pairs[number][0]) else torch.int64)
            yield number, row, more[offset : offset + size]
            offset += size

    @torch.no_grad()
    def fill_more(self, tail: Tensor, more: Tensor) -> None:
        """Writes this rank's changes of those large buffers that the ranks speak of; zeros if it has none.

        Raises:
            TaskError: one of integers changed by too much.
        """
        more.zero_()
        for number, row, said in self._large_rows(tail, more):
            if not self._altered[number]:
                continue
            if not row.now.is_floating_point():
                if self._leads:
                    said.copy_(_integer_change(row, more.dtype))
            elif self._weight > 0:
                for now, old, most, rest in by_blocks(row.now, row.old, *said.view(2, -1)):
                    for to, what in zip((most, rest), change_of(now, old, self._weight, more.dtype), strict=True):
                        to.copy_(what)

    def _look(self) -> None:
        """Looks at what the forward pass has put in the place of buffers, and takes it over in memory of its own: else what is
        agreed upon might be written to a weight, or to the data. After the first one, also at whether there are new parameters.

        Raises:
            TaskError: nobody could agree upon it, nor copy it to a replacement.
        """
        if not self._looked:  # layers may have come with it
            self._modules, self._looked = list(self._modules[0].modules()), True
            _check_known(self._modules[0], self._parameters)
        buffers = (b for module in self._modules for b in module._buffers.values() if b is not None and b.numel())
        if len({id(buffer) for buffer in buffers}) > len(self._names):
            new = {name for module in self._modules[:1] for name, place in places(module) if place not in self._names}
            raise TaskError(
                f"the forward pass has made the buffer {min(new, default='?')}, which was None, empty or another one's before: "
                "create it in __init__ in its full size, or keep it in an attribute that is no buffer"
            )
        trained: set[int] | None = None
        for place, there, kind in zip(self._all, self._there, self._kinds, strict=True):
            now = getattr(*place)
            if (found := _kind(now)) != kind:
                raise TaskError(
                    f"the forward pass has changed the buffer {self._names[place]} from {kind} to {found}: replicas can agree "
                    "only upon buffers of one dtype and shape. Convert it, or keep it in an attribute that is no buffer"
                )
            if now is there:
                continue
            if trained is None:
                trained = _memory_of_trained(self._modules)
            if now.untyped_storage().data_ptr() in trained:
                raise TaskError(
                    f"the forward pass has put a trained parameter itself in the place of the buffer {self._names[place]}, so "
                    "each would be written over by the other: put a copy there (.detach().clone())"
                )
            setattr(*place, now.detach().clone())

    def _rows(self, device: torch.device) -> tuple[list[Row], list[Row]]:
        """The integer buffers and the floating ones, now and at the attempt's beginning, in the order of the tail."""
        count = len(self._integers)
        pairs = self._pairs[: count + len(self._floats)]
        return alike(pairs[:count], device, torch.int64), alike(pairs[count:], device)

    @torch.no_grad()
    def apply(self, tail: Tensor, more: Tensor | None = None) -> None:
        """Sets the buffers to what the ranks agreed upon. Part of the last bucket's update. What nobody changed is not written
        to: it may be about to be logged."""
        self._apply_large(tail, more)
        integers, floats = self._rows(tail.device)
        offset, values, said = self._start, [], []
        for row in integers:
            change = tail[offset : offset + row.size]
            values.append(row.old + change.to(torch.int64))
            said.append(row.which(change != 0))
            offset += row.size
        for row in floats:
            most, rest = tail[offset : offset + 2 * row.size].view(2, -1)
            values.append(after(row.old, most, rest))
            said.append(row.which((most != 0) | (rest != 0)))
            offset += 2 * row.size
        if not said:
            return
        # what this rank's forward pass alone has changed is put back; nothing is known of that if there was none
        written = (torch.cat(said) | torch.cat(self._touched) if self._touched else torch.ones_like(torch.cat(said))).tolist()
        for row, value in zip((*integers, *floats), values, strict=True):
            row.write(value, [written.pop(0) for _ in row.buffers])

    def _apply_large(self, tail: Tensor, more: Tensor | None) -> None:
        pairs, spoken_of = self._large_pairs, set[int]()
        for number, row, said in self._large_rows(tail, more):
            spoken_of.add(number)
            buffer = pairs[number][0]
            if not row.now.is_floating_point():
                value = row.old + said.to(torch.int64)
            else:
                value = torch.cat([after(*block) for block in by_blocks(row.old, *said.view(2, -1))])
            buffer.copy_(value.view(buffer.shape))
        for number, (buffer, old) in enumerate(pairs):
            if number in spoken_of:
                continue
            # what this rank alone has changed is put back
            if self._altered[number] if self._altered else not same_bits(buffer, old):
                buffer.copy_(old)

    @torch.no_grad()
    def scale(self, tail: Tensor, factor: float, more: Tensor | None = None) -> None:
        """Multiplies what is a mean over samples, because some of them are missing in it."""
        tail[0] *= factor
        for _, row, said in self._large_rows(tail, more):
            if row.now.is_floating_point():
                most, rest = said.view(2, -1)
                said.copy_(torch.cat(scaled(row.old, most, rest, factor)))
        _, floats = self._rows(tail.device)
        offset = self.size - 2 * sum(row.size for row in floats)
        for row in floats:
            part = tail[offset : offset + 2 * row.size]
            most, rest = part.view(2, -1)
            part.copy_(torch.cat(scaled(row.old, most, rest, factor)))
            offset += 2 * row.size

    @staticmethod
    def hear(tail: Tensor, replicas: int) -> Heard:
        """What the ranks said, all at once: each look waits for all that the device has to do."""
        loss, stop, checkpoint, *said = tail[: HEADER + replicas].tolist()
        return Heard(loss, stop > 0, checkpoint > 0, [int(word) for word in said])
