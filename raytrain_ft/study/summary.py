"""Means over seeds, how sure they are, and in how many cases a trend held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from raytrain_ft.simulate.outcome import T_95
from raytrain_ft.study.protocol import Arm, Outcome


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval (Student's t; NaN of a single value, and of a training that
    diverged, whose values are infinite or NaN)."""

    mean: float
    half: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves zero out."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Estimate(sum(values) / len(values), math.nan)  # not fmean, which refuses infinities of both signs
    t = T_95[len(values) - 1] if len(values) <= len(T_95) else 1.96
    return Estimate(fmean(values), t * stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm at one point of the training, over all seeds.

    Attributes:
        model, step, arm: as in `Outcome`.
        accuracy, loss: held-out, from 0 to 1 and in nats, right after the mini-batch.
        accuracy_off, loss_off: their difference to Baseline's, seed by seed. later_*: the same some mini-batches later.
        distance: of the weights to Baseline's, relative to the norm of those. of_a_step: relative to how far Baseline moved.
        later_distance: as `distance`, some mini-batches later.
        updated_twice: parameters. slowdown: how long the mini-batch took until it was done, over Baseline's. Workers take
            turns, so it holds all of them, and nothing of a network.
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
    slowdown: Estimate


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
    return Summary(model=model, step=step, arm=arm, updated_twice=some[0].updated_twice, **{name: of(name) for name in names})


# ---------------------------------------------------------------- over several points of the training


def over_points(outcomes: Iterable[Outcome], of: Callable[[Outcome], float]) -> Estimate:
    """The mean of each training, and of these means an interval: what one training's points have in common is no certainty."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.seed, []).append(of(outcome))
    return estimate([sum(values) / len(values) for values in found.values()])


@dataclass(frozen=True, slots=True)
class Count:
    """In how many cases something held."""

    held: int
    cases: int

    def __str__(self) -> str:
        return f"{self.held} of {self.cases}"


def count(cases: Iterable[bool]) -> Count:
    """Of each case whether it held."""
    known = list(cases)
    return Count(sum(known), len(known))


def nearer_than_rollback(outcomes: Iterable[Outcome]) -> Count:
    """After lossy forward the weights are nearer to Baseline's than after a rollback with the same cut."""
    known = list(outcomes)
    rollback = {(o.model, o.seed, o.step, o.arm.cut): o.distance for o in known if o.arm.kind == "rollback"}
    return count(o.distance < rollback[o.model, o.seed, o.step, o.arm.cut] for o in known if o.arm.kind == "lossy")


def nearer_with_survivors(outcomes: Iterable[Outcome]) -> Count:
    """After lossy forward with one cut the weights are the nearer to Baseline's, the more survivors there are."""
    known = sorted((o for o in outcomes if o.arm.kind == "lossy"), key=lambda o: o.arm.survivors)
    return _falling(known, lambda o: (o.model, o.seed, o.step, o.arm.cut))


def nearer_with_cuts(outcomes: Iterable[Outcome]) -> Count:
    """After lossy forward with as many survivors the weights are nearer to Baseline's from each cut to the next, as listed."""
    known = [o for o in outcomes if o.arm.kind == "lossy"]
    return _falling(known, lambda o: (o.model, o.seed, o.step, o.arm.survivors))


def farther_with_cuts(outcomes: Iterable[Outcome]) -> Count:
    """After a rollback the weights are farther from Baseline's from each cut to the next, as listed."""
    known = [o for o in outcomes if o.arm.kind == "rollback"][::-1]
    return _falling(known, lambda o: (o.model, o.seed, o.step))


def _falling(outcomes: Iterable[Outcome], case: Callable[[Outcome], tuple[object, ...]]) -> Count:
    """Cases in which each distance is smaller than the one before."""
    found: dict[tuple[object, ...], list[float]] = {}
    for outcome in outcomes:
        found.setdefault(case(outcome), []).append(outcome.distance)
    return count(all(b < a for a, b in pairwise(values)) for values in found.values() if len(values) > 1)


def lower_loss(outcomes: Iterable[Outcome]) -> Count:
    """The held-out loss is lower than Baseline's."""
    return count(o.loss_off < 0 for o in outcomes)


@dataclass(frozen=True, slots=True)
class Trend:
    """What held for a model, and in how many cases."""

    model: str
    what: str
    count: Count


def trends(outcomes: Iterable[Outcome]) -> list[Trend]:
    """All that are counted, for each model."""
    known = list(outcomes)
    found = []
    for model in dict.fromkeys(o.model for o in known):
        mine = [o for o in known if o.model == model]
        cut = [o for o in mine if o.arm.cut]
        means = [one for one in summarize(mine) if one.arm.cut]
        kinds = {kind: [o for o in cut if o.arm.kind == kind] for kind in ("rollback", "lossy")}
        counts = {
            f"lossy, {left} left: weights nearer to Baseline's than rollback's": nearer_than_rollback(
                o for o in cut if o.arm.survivors in (0, left)
            )
            for left in dict.fromkeys(o.arm.survivors for o in kinds["lossy"])
        }
        counts |= {
            "lossy: nearer with each more survivor": nearer_with_survivors(cut),
            "lossy: nearer with each later cut": nearer_with_cuts(cut),
            "rollback: farther with each later cut": farther_with_cuts(cut),
            **{f"{kind}: loss lower than Baseline's": lower_loss(some) for kind, some in kinds.items()},
            "accuracy off Baseline's, interval without zero": count(one.accuracy_off.differs for one in means),
            "loss off Baseline's, interval without zero": count(one.loss_off.differs for one in means),
            "later: accuracy off, interval without zero": count(one.later_accuracy_off.differs for one in means),
            "later: loss off, interval without zero": count(one.later_loss_off.differs for one in means),
        }
        found += [Trend(model, what, one) for what, one in counts.items()]
    return found
