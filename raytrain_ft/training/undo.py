"""Undo of the latest optimizer update, from the gradient and the state that are there anyway (SWIFT, section 4).

A worker that updated some parameters before a failure was noticed takes the update back, so that all survivors stand
at the same step. Nothing of the size of a parameter is kept for it: only, per parameter, a reference to the gradient
that the step consumed, the hyper-parameters that it used, and one number for LAMB, NAdam and Adafactor. The result is
exact up to rounding; `docs/undo.md` has the measured errors.

The algebra is in `inverses`; what is refused, and why, in `undo_rules`. This module must not know who calls it: it
serves any loop that calls ``optimizer.step()``, for all parameters at once or bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from raytrain_ft.errors import UndoRefusedError
from raytrain_ft.training.blocks import pieces
from raytrain_ft.training.inverse_tools import Batch
from raytrain_ft.training.inverses import INVERSES, Inverse
from raytrain_ft.training.lamb import LAMB
from raytrain_ft.training.lists import add_number_
from raytrain_ft.training.undo_rules import (
    TRAINED_IN,
    Mode,
    call_first,
    hyper_reasons,
    overwrites_gradient,
    reasons_now,
    refusal,
    refusals,
    scaled_decay,
)

_NO_STATE: dict[str, Any] = {}
_WITH_STATE = False, 0.0


class Update(NamedTuple):
    """What one step did to one parameter group.

    Attributes:
        hyper: the group at that time, without its parameters.
        overwritten: SGD left something else in the gradients; see `overwrites_gradient`.
        found_inf: not zero if a GradScaler made the step leave everything as it was. On the device: read only on undo.
    """

    hyper: Mapping[str, Any]
    overwritten: bool
    found_inf: Tensor | None


class Record(NamedTuple):
    """What it did to one parameter of the group. A step makes one for each, so they are made and read column by column.

    Attributes:
        gradient: what the step consumed.
        fresh: the optimizer had no state for it.
        scalar: LAMB's trust ratio, NAdam's product of momenta before the step, the norm of an Adafactor parameter then.
        versions: of the parameter and the gradient right after the step; None for a view.
    """

    parameter: Tensor
    gradient: Tensor
    fresh: bool
    scalar: Tensor | float
    versions: tuple[int | None, int | None]
    update: Update


class Undo:
    """Watches an optimizer so that its latest update can be undone (SWIFT, section 4).

    ::

        undo = Undo(optimizer)       # once; raises if this optimizer cannot be undone
        ...
        optimizer.step()             # for all parameters, or several times, each time for some
        undo.undo()                  # parameters and optimizer state are as before; or undo.undo(some_parameters)
        undo.forget()                # or else: the step is final; releases the gradients

    A parameter's record lasts until that parameter is stepped again, whether it is then updated or not. Schedulers,
    a `GradScaler` and gradient clipping may be used as ever; they have state of their own, which is not undone.

    Args:
        mode: "exact" restores everything. "replay" also admits AMSGrad and Adamax, whose running maximum cannot be
            inverted: it is left such that applying the *same* gradient again leads where it led before.

    Raises:
        UndoRefusedError: the update of this optimizer cannot be undone. Names each reason, where it is, and the remedy.
    """

    def __init__(self, optimizer: Optimizer, mode: Mode = "exact") -> None:
        reasons = refusals(optimizer, mode)
        if reasons:
            raise refusal(optimizer, reasons)
        self._optimizer = optimizer
        self._mode: Mode = mode
        self._inverse = INVERSES[type(optimizer)]
        self._before: dict[int, tuple[bool, Tensor | float]] = {}  # by id: hashing a tensor is slow
        self._records: dict[int, Record] = {}
        self._undone: dict[int, int] = {}  # by the memory of parameters: the version that the undo of some has left
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            call_first(optimizer, self._after_step),  # what other hooks do then, a schedule or a clipping, is not the step's
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget()),
        ]

    def updated(self) -> list[Tensor]:
        """The parameters whose latest update can be undone, in the order of their updates."""
        records = list(self._records.values())
        return [r.parameter for r, skipped in zip(records, _skipped(records), strict=True) if not skipped]

    def forget(self, params: Iterable[Tensor] | None = None) -> None:
        """Makes the latest update of these parameters (default: of all) final, and lets go of their gradients."""
        if params is None:
            self._records.clear()
        else:
            for p in params:
                self._records.pop(id(p), None)

    def close(self) -> None:
        """Stops watching the optimizer."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    @torch.inference_mode()
    def undo(self, params: Iterable[Tensor] | None = None) -> None:
        """Undoes the latest update of these parameters (default: of all updated ones) and of their optimizer state.

        Parameters that are not named are not touched. Either all are undone, or none and an error is raised. An update
        that a `GradScaler` skipped, because a gradient was infinite, was none and is passed over.

        Raises:
            UndoRefusedError: a parameter was not updated, or its update was undone or forgotten already; or the
                parameter, its gradient or the hyper-parameters of the step do not permit it.
        """
        cohorts = self._cohorts(self._chosen(params))
        reasons = [reason for cohort in cohorts for reason in self._objections(cohort)]
        if reasons:
            raise refusal(self._optimizer, reasons)
        # Before anything is changed: what fails half-way must not be undone a second time.
        self.forget(None if params is None else [r.parameter for cohort in cohorts for r in cohort.records])
        for cohort in cohorts:
            _count_back(cohort)
            # All views first: what a view is made of would have left the cache again after each block.
            for batch in list(cohort.batches(self._inverse)):
                self._inverse.undo(batch)
            self._drop_first_state(cohort)
        if self._records:  # those of others, of which some may have the same memory
            undone = (r.parameter for cohort in cohorts for r in cohort.records if r.versions[0] is not None)
            self._undone |= {p.untyped_storage().data_ptr(): p._version for p in undone}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        self._before.clear()
        self._undone.clear()
        read, known = self._inverse.before, optimizer.state
        for group in optimizer.param_groups:
            for p in group["params"]:
                # If this step fails half-way, there is nothing left that could be undone by mistake.
                self._records.pop(id(p), None)
                state = known.get(p, _NO_STATE)
                fresh = True
                for value in state.values():
                    if isinstance(value, Tensor):
                        fresh = False
                        break
                if fresh or read:
                    # A frozen one that has a gradient is updated, too; that of any other may be there only after a closure.
                    lost = read(p, _NO_STATE if fresh else state) if read and (p.requires_grad or p.grad is not None) else 0.0
                    self._before[id(p)] = fresh, lost

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        found_inf = getattr(optimizer, "found_inf", None)  # there while a GradScaler calls a fused optimizer
        for group in optimizer.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            if not updated:
                continue
            hyper = {name: group[name] for name in optimizer.defaults}
            overwritten = isinstance(optimizer, SGD) and overwrites_gradient(hyper, updated)
            fresh, scalars = zip(*[self._before.get(id(p), _WITH_STATE) for p in updated], strict=True)
            if self._inverse.after is not None:
                scalars = [self._inverse.after(optimizer, p) for p in updated]
            gradients = [p.grad for p in updated]
            versions = zip(map(_version, updated), map(_version, gradients), strict=True)
            update = Update(hyper, overwritten, found_inf)
            records = map(Record, updated, gradients, fresh, scalars, versions, repeat(update))
            self._records.update(zip(map(id, updated), records, strict=True))
        self._before.clear()

    def _chosen(self, params: Iterable[Tensor] | None) -> list[Record]:
        keys = list(self._records) if params is None else list({id(p): None for p in params})
        missing = [] if params is None else [i for i, key in enumerate(keys) if key not in self._records]
        if missing or (params is None and not keys):
            what = f"the parameters at {missing} of the {len(keys)} given have" if keys else "there is"
            raise UndoRefusedError(
                f"{what} no update to undo: not updated in the latest step, or undone or forgotten already. "
                "Undo each update once; Undo.updated() lists what can be undone."
            )
        records = [self._records[key] for key in reversed(keys)]  # last updated, first undone: the cache still holds that
        skipped = _skipped(records)
        if any(skipped):
            self.forget(r.parameter for r, was in zip(records, skipped, strict=True) if was)
            records = [r for r, was in zip(records, skipped, strict=True) if not was]
        return records

    def _cohorts(self, records: list[Record]) -> list[_Cohort]:
        """Puts together what one batched operation can undo. Every microsecond here is one per parameter of the model."""
        known, own = self._optimizer.state, self._inverse.state
        entries = [known.get(r.parameter, _NO_STATE) for r in records]
        steps = _numbers([entry.get("step", 0.0) for entry in entries])
        scalars = _numbers([entry.get("mu_product", r.scalar) for entry, r in zip(entries, records, strict=True)])
        there = zip(*[[entry.get(name) is not None for entry in entries] for name in own], strict=True)
        cohorts: dict[Any, _Cohort] = {}
        last, cohort = None, _Cohort((), 0, False, [], [], [])
        for r, entry, t, scalar, has in zip(records, entries, steps, scalars, there, strict=True):
            p, _, fresh, _, _, update = r
            kind = (p.device, p.dtype, t, fresh, has, id(update))
            if kind != last:  # neighbours are nearly always of one kind: to compare is quicker than to look each up
                last = kind
                names = tuple([name for name, is_there in zip(own, has, strict=True) if is_there])
                first = t == 1 if t else fresh
                alike = (p.device, p.dtype, t, first, names, update.overwritten, str(update.hyper))
                cohort = cohorts.get(alike) or cohorts.setdefault(alike, _Cohort(names, int(t), first, [], [], []))
            cohort.records.append(r)
            cohort.entries.append(entry)
            cohort.scalars.append(scalar)
        return list(cohorts.values())

    def _objections(self, cohort: _Cohort) -> list[str]:
        """Why this cohort cannot be undone after all: what only the latest step could show."""
        reasons = hyper_reasons(type(self._optimizer), cohort.update.hyper, self._mode, "the latest step")
        for p, g, _, _, (of_p, of_g), _ in cohort.records:
            changed, other = of_p is not None and self._was_changed(p, of_p), of_g is not None and g._version != of_g
            if changed or other or g.dtype != p.dtype or g.layout != torch.strided or p.dtype not in TRAINED_IN:
                reasons += reasons_now(p, g, changed, other)
        if not reasons and self._inverse.kept is not None:
            kept = (self._inverse.kept(batch) for batch in cohort.batches(self._inverse))
            reasons += scaled_decay([t.abs().min() for some in kept if some is not None for t in some if t.numel()])
        if not reasons and type(self._optimizer) is LAMB:
            lr, wd = cohort.update.hyper["lr"], cohort.update.hyper["weight_decay"]
            reasons += scaled_decay([torch.tensor(abs(1 - lr * wd * ratio)) for ratio in cohort.scalars])
        return reasons

    def _was_changed(self, p: Tensor, version: int) -> bool:
        """Whether the parameter is not what the step left. Of several that were cut out of one tensor torch counts the changes
        together: what the latest update or undo of one of them left, is what the step left of all."""
        if p._version == version:
            return False
        memory = p.untyped_storage().data_ptr()
        alike = (r for r in self._records.values() if r.parameter.untyped_storage().data_ptr() == memory)
        left = [r.versions[0] for r in alike if _version(r.parameter) == p._version]
        return p._version not in (*left, self._undone.get(memory))

    def _drop_first_state(self, cohort: _Cohort) -> None:
        """A first step's state is deleted, or set to what it began with."""
        if cohort.first:
            # torch fills every sum with the constructor's value, whatever a group says
            initial = self._optimizer.defaults["initial_accumulator_value"] if type(self._optimizer) is Adagrad else 0.0
            for entry in cohort.kept:
                for name in cohort.names:
                    entry[name].fill_(initial)
        for r in cohort.records:
            if r.fresh:
                self._optimizer.state.pop(r.parameter, None)


@dataclass(frozen=True, slots=True)
class _Cohort:
    """Parameters whose updates are undone together. `records`, `entries` of the state and `scalars` run parallel."""

    names: tuple[str, ...]
    t: int
    first: bool
    records: list[Record]
    entries: list[dict[str, Any]]
    scalars: list[float]

    @property
    def update(self) -> Update:
        """Theirs, or one just like it."""
        return self.records[0].update

    @property
    def kept(self) -> list[dict[str, Any]]:
        """The entries that were there before the update."""
        return [entry for r, entry in zip(self.records, self.entries, strict=True) if not r.fresh]

    def batches(self, inverse: Inverse) -> Iterator[Batch]:
        """In pieces that a cache holds. One after the other: they share scratch memory."""
        rows = [
            (r.parameter, r.gradient, *[entry[name] for name in self.names])
            for r, entry in zip(self.records, self.entries, strict=True)
        ]
        hyper, overwritten = self.update.hyper, self.update.overwritten
        for numbers, (x, g, *state), scratch in pieces(rows, inverse.temporaries, whole=inverse.whole):
            named, scalars = dict(zip(self.names, state, strict=True)), [self.scalars[i] for i in numbers]
            yield Batch(x, g, named, scalars, hyper, self.t, self.first, overwritten, scratch)


def _count_back(cohort: _Cohort) -> None:
    """Restores the step counters and NAdam's products. Before the tensors are undone: now the counters are in the cache."""
    if not cohort.t:
        return
    kept = cohort.kept
    if kept:
        add_number_([entry["step"] for entry in kept], -1.0)
    if "mu_product" in cohort.entries[0]:
        for r, entry in zip(cohort.records, cohort.entries, strict=True):
            entry["mu_product"].fill_(r.scalar)


def _version(t: Tensor) -> int | None:
    """A number that every change in place advances; None for a view, where it counts changes of its neighbours too."""
    if t._is_view():
        return None
    try:
        return t._version
    except RuntimeError:  # an inference tensor
        return None


def _skipped(records: list[Record]) -> list[bool]:
    """Whether a GradScaler made each step leave everything as it was, because a gradient was infinite."""
    updates = {id(update): update for *_, update in records}
    skipped = {key for key, update in updates.items() if update.found_inf is not None and update.found_inf.item() != 0}
    return [id(r.update) in skipped for r in records] if skipped else [False] * len(records)


def _numbers(values: list[Any]) -> list[float]:
    """Numbers and 0-dim tensors as numbers, with one transfer per device."""
    if all(type(v) is float for v in values):
        return values
    result: list[Any] = [v.item() if type(v) is Tensor and v.is_cpu else v for v in values]
    distant: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(result):
        if isinstance(value, Tensor):
            distant.setdefault((value.device, value.dtype), []).append(i)
    for indices in distant.values():
        for i, number in zip(indices, torch.stack([values[i] for i in indices]).tolist(), strict=True):
            result[i] = number
    return result


__all__ = ["Mode", "Undo", "refusals"]
