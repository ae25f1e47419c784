"""What a simulated run came to, and what several of them came to on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from raytrain_ft.policy.strategy import weakest

T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Student's t for 95 % (two-sided), by degrees of freedom; beyond the table 1.96 is near enough."""
HOPELESS = 20
"""Times the undisturbed time that a run may take: it would go back for ever, or nearly so."""
GAVE_UP = f"it was given up: after {HOPELESS} times the undisturbed time there was no end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One simulated run. `useful_s` and the values of `lost_s` add up to `seconds`.

    Attributes:
        strategy: its name. seed: of its failures. interval: steps between two times that the state was saved; None: never.
        finished: whether all steps were committed. reason: if not, why not.
        seconds: from the start to the end.
        useful_s: of steps that were committed and stood, at the undisturbed speed.
        lost_s: seconds by what they went into: "saving" (standing still for checkpoints and snapshots), "slowdown" (the
            strategy's price per step, logging included), "shrunk" (steps of fewer workers), "slowed" (steps that waited for
            a worker that was slow), "interrupted" (the part of a step that a failure cut off), "redone"
            (committed steps that were done again), "detect", "fence", "replace" (waiting for workers, new group, loading),
            "rebuild" (filling, replaying), "resume", "begin" (before the first step), "end" (after the last).
        samples_lost: samples that took no part in the training.
        node_hours: of all nodes of the job, spares included. cost: these, at the job's price.
        failures: that struck, notices and slow workers among them. recoveries: they may be fewer, for failures during a
            recovery belong to it; that a worker with notice left is one.
        pauses: seconds of each recovery, from the failure, or the call to stop for who leaves, to the first step committed
            afterwards.
        guarantee: the weakest that a recovery kept: "exact", "rounding" or "lossy".
        strategies: by how many recoveries each of the machine's strategies was carried out.
        struck: how often each of a scenario's events that came came about as it was written, by its number.
    """

    strategy: str
    seed: int
    interval: int | None
    finished: bool
    seconds: float
    useful_s: float
    lost_s: dict[str, float]
    samples_lost: int = 0
    node_hours: float = 0.0
    cost: float = 0.0
    failures: int = 0
    recoveries: int = 0
    pauses: tuple[float, ...] = ()
    guarantee: str = "exact"
    strategies: dict[str, int] = field(default_factory=dict)
    struck: dict[int, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that stood."""
        return self.useful_s / self.seconds if self.seconds else 1.0

    @property
    def lost_work_s(self) -> float:
        """Seconds of computation that was thrown away and done again."""
        return self.lost_s.get("redone", 0.0) + self.lost_s.get("interrupted", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Several runs of one strategy: means, and half the width of the 95 % confidence interval of the mean time.

    Attributes:
        runs: how many. finished: how many came to their end; means are of these, and NaN if there are none.
        pause_s: mean of all pauses. longest_pause_s: the longest of all.
        guarantee: the weakest of all.
        reason: why the first that did not finish did not.
    """

    strategy: str
    interval: int | None
    runs: int
    finished: int
    seconds: float
    ci_s: float
    goodput: float
    lost_work_s: float
    lost_s: dict[str, float]
    samples_lost: float
    node_hours: float
    cost: float
    failures: float
    recoveries: float
    pause_s: float
    longest_pause_s: float
    guarantee: str
    reason: str = ""


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Means over runs of one strategy; of at least one run."""
    done = [outcome for outcome in outcomes if outcome.finished]
    pauses = [pause for outcome in done for pause in outcome.pauses]

    def mean(name: str) -> float:
        return fmean(getattr(outcome, name) for outcome in done) if done else math.nan

    kinds = {kind for outcome in done for kind in outcome.lost_s}
    times = [outcome.seconds for outcome in done]
    t = T_95[len(times) - 1] if len(times) <= len(T_95) else 1.96
    return Summary(
        strategy=outcomes[0].strategy,
        interval=outcomes[0].interval,
        runs=len(outcomes),
        finished=len(done),
        seconds=mean("seconds"),
        ci_s=t * stdev(times) / math.sqrt(len(times)) if len(times) > 1 else math.nan,
        goodput=mean("goodput"),
        lost_work_s=mean("lost_work_s"),
        lost_s={kind: fmean(outcome.lost_s.get(kind, 0.0) for outcome in done) for kind in sorted(kinds)},
        samples_lost=mean("samples_lost"),
        node_hours=mean("node_hours"),
        cost=mean("cost"),
        failures=mean("failures"),
        recoveries=mean("recoveries"),
        pause_s=fmean(pauses) if pauses else 0.0,
        longest_pause_s=max(pauses, default=0.0),
        guarantee=str(weakest(*(outcome.guarantee for outcome in outcomes))),
        reason=next((outcome.reason for outcome in outcomes if not outcome.finished), ""),
    )
