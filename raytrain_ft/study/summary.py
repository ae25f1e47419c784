"""Means over seeds, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from raytrain_ft.simulate.outcome import T_95
from raytrain_ft.study.protocol import Arm, Outcome


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval (Student's t; NaN of a single value)."""

    mean: float
    half: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves zero out."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value."""
    t = T_95[len(values) - 1] if len(values) <= len(T_95) else 1.96
    return Estimate(fmean(values), t * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm at one point of the training, over all seeds.

    Attributes:
        model, step, arm: as in `Outcome`.
        accuracy, loss: held-out, from 0 to 1 and in nats, right after the mini-batch.
        accuracy_off, loss_off: their difference to Baseline's, seed by seed. later_*: the same some mini-batches later.
        distance: of the weights to Baseline's, relative to the norm of those. of_a_step: relative to how far Baseline moved.
        later_distance: as `distance`, some mini-batches later.
        updated_twice: parameters. computed: mini-batches, until this one is done.
    """

    model: str
    step: int
    arm: Arm
    accuracy: Estimate
    loss: Estimate
    accuracy_off: Estimate
    loss_off: Estimate
    later_accuracy_off: Estimate
    later_loss_off: Estimate
    distance: Estimate
    of_a_step: Estimate
    later_distance: Estimate
    updated_twice: int
    computed: int


def summarize(outcomes: Iterable[Outcome]) -> list[Summary]:
    """One for each model, step and arm, in the order in which they came."""
    found: dict[tuple[str, int, Arm], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.model, outcome.step, outcome.arm), []).append(outcome)
    return [_summary(model, step, arm, some) for (model, step, arm), some in found.items()]


def _summary(model: str, step: int, arm: Arm, some: list[Outcome]) -> Summary:
    def of(name: str) -> Estimate:
        return estimate([getattr(outcome, name) for outcome in some])

    names = [name for name, kind in Summary.__annotations__.items() if kind == "Estimate"]
    twice, computed = some[0].updated_twice, some[0].computed
    return Summary(
        model=model, step=step, arm=arm, updated_twice=twice, computed=computed, **{name: of(name) for name in names}
    )
