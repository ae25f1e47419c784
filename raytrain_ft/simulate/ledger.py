"""Where a simulated run's time went. Every second is booked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import Outcome
from raytrain_ft.simulate.pace import Stand
from raytrain_ft.simulate.strategies import Strategy


@dataclass(slots=True)
class Ledger:
    """Books times.

    Attributes:
        lost_s: seconds by kind, as in `Outcome`, but for what was done again.
        executed: steps that were committed, some perhaps more than once.
        node_s: seconds of nodes.
        pauses: seconds of each recovery. struck_at: when the failure came whose recovery is under way.
    """

    job: Job
    strategy: Strategy
    lost_s: dict[str, float] = field(default_factory=dict)
    executed: int = 0
    node_s: float = 0.0
    failures: int = 0
    pauses: list[float] = field(default_factory=list)
    struck_at: float | None = None
    _skipped: list[int] = field(default_factory=list)
    _lost: list[tuple[int, int, float]] = field(default_factory=list)

    def book(self, kind: str, seconds: float) -> None:
        """So many seconds went into this."""
        if seconds:
            self.lost_s[kind] = self.lost_s.get(kind, 0.0) + seconds

    def trained(self, begin: int, stand: Stand, workers: int) -> None:
        """Training went on from `begin` to here, with so many workers."""
        steps = stand.step - begin
        self.executed += steps
        self.book("interrupted", stand.into)
        self.book("saving", stand.stalled)
        self._price(steps, workers)

    def completed(self, into: float, rest: float, workers: int) -> None:
        """A recovery completed the interrupted step: what had been done of it, and the rest, were not lost after all."""
        self.executed += 1
        self.book("interrupted", -into)
        self.book("replace", -rest)
        self._price(1, workers)

    def skipped(self, step: int) -> None:
        """This step counts as committed, and nobody computes it."""
        self._skipped.append(step)

    def lost(self, begin: int, end: int, samples: float) -> None:
        """Of each step from `begin` up to `end`, so many samples take no part."""
        self._lost.append((begin, end, samples))

    def went_back(self, step: int) -> None:
        """Training goes on from this step; what was skipped or lost since is done after all."""
        self._skipped = [skipped for skipped in self._skipped if skipped < step]
        self._lost = [(begin, min(end, step), samples) for begin, end, samples in self._lost if begin < step]

    def struck(self, at: float) -> None:
        """A failure came that holds up training."""
        if self.struck_at is None:
            self.struck_at = at

    def resumed(self, at: float) -> None:
        """The first step after a recovery, if there was one, was committed."""
        if self.struck_at is not None:
            self.pauses.append(at - self.struck_at)
            self.struck_at = None

    def _price(self, steps: int, workers: int) -> None:
        full = self.strategy.step_s(self.job)
        self.book("slowdown", steps * (full - self.job.step_s))
        self.book("shrunk", steps * (step_seconds(self.job, self.strategy, workers) - full))

    def outcome(self, seed: int, seconds: float, step: int, reason: str, **more: object) -> Outcome:
        """The account, once the run has ended at this step."""
        stands = step - len(self._skipped)
        useful = stands * self.job.step_s
        self.book("redone", (self.executed - stands) * self.job.step_s)
        hours = self.node_s / 3600
        return Outcome(
            strategy=self.strategy.name,
            seed=seed,
            interval=self.strategy.interval(self.job),
            finished=not reason,
            reason=reason,
            seconds=seconds,
            useful_s=useful,
            lost_s=self.lost_s,
            samples_lost=round(sum((end - begin) * samples for begin, end, samples in self._lost)),
            node_hours=hours,
            cost=hours * self.job.node_hour,
            failures=self.failures,
            pauses=tuple(self.pauses),
            **more,  # pyright: ignore[reportArgumentType]
        )


def step_seconds(job: Job, strategy: Strategy, workers: int) -> float:
    """Seconds of a step of so many workers: they share the same global batch, so fewer take longer."""
    return strategy.step_s(job) * job.workers / workers
