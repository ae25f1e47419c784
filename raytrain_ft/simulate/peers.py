"""torchft, which does not decide as this project's machine does, by its published mechanics.

After a failure the survivors notice (`detect_s`), leave the step (`fence_s`), drop it, and form a new quorum (`rendezvous_s`).
They go on at once with those who are left, each with its share of the batch as before, so what the missing ones would have
contributed is lost too. A replacement takes its state from a survivor while the others go on, and joins between two steps.
Fewer than `min_workers` wait for others; if nobody is left, the first who come load what was saved last.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.ledger import Ledger
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import GAVE_UP, Outcome
from raytrain_ft.simulate.pace import Pace, Stand
from raytrain_ft.simulate.strategies import Strategy, longest_s


def simulate_torchft(job: Job, strategy: Strategy, failures: Iterator[Failure], seed: int) -> Outcome:
    """One run of a job."""
    free = None if job.spare_nodes is None else [0.0] * job.spare_nodes
    return _Torchft(job, strategy, failures, Ledger(job, strategy), [0.0] * job.spares, free).run(seed)


@dataclass(slots=True)
class _Torchft:
    """A run.

    Attributes:
        spares: when each spare is ready. free: when each further node is there; None: nodes are not scarce.
        absent: workers that are missing. vacant: groups of them that have no node yet; coming: when the others are back.
        saved: the step of the newest checkpoint. reason: why the run cannot go on.
        there: nodes that there are, where they are scarce. returning: when so many more of them are there.
    """

    job: Job
    strategy: Strategy
    failures: Iterator[Failure]
    ledger: Ledger
    spares: list[float]
    free: list[float] | None
    now: float = 0.0
    step: int = 0
    absent: int = 0
    vacant: list[int] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)
    saved: int | None = None
    reason: str = ""
    there: int = 0
    returning: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seed: int) -> Outcome:
        """To the run's end."""
        job, recoveries = self.job, 0
        self.there = job.number_of_nodes + job.spares + (job.spare_nodes or 0)
        self._wait("begin", job.costs.begin_s)
        failure = next(self.failures, None)
        longest = longest_s(job, self.strategy)
        while self.step < job.steps and not self.reason:
            if self.now > longest:
                self.reason = GAVE_UP
                break
            struck = self._train(failure) if self.present >= (job.min_workers or 1) else self._gather(failure)
            if not struck or failure is None:
                continue
            if failure.factor > 1:
                self.ledger.failures += 1
                self._wait("slowed", self._slowed_s(failure))
            elif _loses(failure):
                recoveries += 1
                self._recover(failure)
            self._free(failure.back, failure.back_s)
            heapq.heappush(self.returning, (self.now + failure.back_s, failure.back))
            self._replace()
            failure = next(self.failures, None)
        self._wait("end", 0.0 if self.reason else job.costs.end_s)
        guarantee = "lossy" if recoveries else "exact"
        counts = {"recoveries": recoveries, "strategies": {"torchft": recoveries} if recoveries else {}}
        return self.ledger.outcome(seed, self.now, self.step, self.reason, guarantee=guarantee, **counts)

    @property
    def present(self) -> int:
        """Workers that are there."""
        return self.job.workers - self.absent

    @property
    def _pace(self) -> Pace:
        """Of training from here on."""
        job, strategy = self.job, self.strategy
        return Pace(self.step, strategy.step_s(job), strategy.interval(job), strategy.stall_s(job))

    def _slowed_s(self, failure: Failure) -> float:
        """What a slow worker costs: it is booked at once, as if training stood still, and no longer than until the run ends."""
        left = self._pace.until(self.job.steps)
        return min(failure.lasts_s * (1 - 1 / failure.factor), left * (failure.factor - 1))

    def _train(self, failure: Failure | None) -> bool:
        """Until the next failure, until somebody comes back, or to the end; and whether it was the failure."""
        job, pace = self.job, self._pace
        end, strikes, comes = self.now + pace.until(job.steps), math.inf, math.inf
        if failure is not None:
            at = self.now + pace.until(failure.step) if failure.step is not None else failure.at
            strikes = max(self.now, at or 0.0)
            if not _loses(failure):
                strikes = self._boundary(pace, strikes)  # no step is dropped for it
        if self.coming:  # they join at a boundary between steps
            comes = self._boundary(pace, self.coming[0][0])
        until = min(end, strikes, comes)
        stand = Stand(job.steps, 0.0, pace.until(job.steps) - (job.steps - self.step) * pace.step_s)
        if until < end:
            stand = pace.after(until - self.now)
        joins = comes == until < strikes
        if joins:
            stand = Stand(stand.step, 0.0, stand.stalled)
        self.ledger.trained(self.step, stand, job.workers)
        self.ledger.lost(self.step, stand.step, job.batch * self.absent / job.workers)
        if joins:
            self.absent -= heapq.heappop(self.coming)[1]
        if stand.step > self.step:
            self.ledger.resumed(min(until, self.now + pace.until(self.step + 1)))
        self.saved = next(iter(pace.saved(until - self.now, self.strategy.durable_s(job))), self.saved)
        self._pass(until - self.now)
        self.step = stand.step
        return strikes == until < end

    def _boundary(self, pace: Pace, at: float) -> float:
        """When the step that is under way then ends."""
        there = pace.after(max(0.0, at - self.now))
        return self.now + pace.until(min(self.job.steps, there.step + (there.into > 1e-6 * pace.step_s)))

    def _gather(self, failure: Failure | None) -> bool:
        """With too few: until somebody comes back, or the next failure; and whether it was the failure."""
        strikes = failure.at if failure is not None and failure.at is not None else math.inf
        comes = self.coming[0][0] if self.coming else math.inf
        limit = self.job.replacement_timeout
        until = max(self.now, min(strikes, comes, self.now + limit))
        self._wait("replace", until - self.now)
        if strikes <= until:
            return True
        if comes <= until:
            self.absent -= heapq.heappop(self.coming)[1]
        else:
            self.reason = f"RecoveryError: {self.present} workers are left and none came within {limit:g} s"
        return False

    def _recover(self, failure: Failure) -> None:
        """Books a recovery. Of lost processes, the nodes are still there."""
        costs, size = self.job.costs, self.job.per_node if failure.lost else 1
        workers = len(failure.workers) + failure.anyone
        lost = min(self.present, failure.lost * size or workers)
        self.ledger.failures += 1
        self.ledger.struck(self.now)
        self.there = max(0, self.there - failure.lost)
        if lost == self.present and self.saved is None:
            self.reason = "NoSurvivorError: every worker was lost"
            return
        self._wait("detect", costs.detect_s)
        self._wait("fence", costs.fence_s)
        self._wait("replace", costs.rendezvous_s)
        self.absent += lost
        self.vacant += [min(size, lost - first) for first in range(0, lost, size)]
        self._free(0 if failure.lost else workers)
        if self.present:
            self.ledger.lost(self.step, self.step + 1, self.job.batch)
            return
        self._wait("replace", costs.load_s)
        self.step = self.saved or 0
        self.ledger.went_back(self.step)

    def _free(self, nodes: int, seconds: float = 0.0) -> None:
        """So many nodes will be free then."""
        if self.free is not None:
            self.free = sorted([*self.free, *[self.now + seconds] * nodes])

    def _replace(self) -> None:
        """Spares and new workers take the places of the missing, as far as there are nodes; then there are new spares."""
        while self.vacant and (self.spares or self.free != []):
            ready = max(self.now, heapq.heappop(self.spares)) if self.spares else self._started()
            heapq.heappush(self.coming, (ready + self.job.costs.filling_s, self.vacant.pop()))
        while len(self.spares) < self.job.spares and self.free != []:
            heapq.heappush(self.spares, self._started())

    def _started(self) -> float:
        """When a worker that is started on the next free node is ready."""
        there = self.now if self.free is None else max(self.now, heapq.heappop(self.free))
        return there + self.job.costs.start_s

    def _wait(self, kind: str, seconds: float) -> None:
        self.ledger.book(kind, seconds)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        until = self.now + seconds
        while self.returning and self.returning[0][0] <= until:
            at, nodes = heapq.heappop(self.returning)
            self._pay(at)
            self.there += nodes
        self._pay(until)

    def _pay(self, until: float) -> None:
        """For the nodes that there are, and no more than the job asks for. Not scarce, another is there at once."""
        wanted = self.job.number_of_nodes + self.job.spares
        self.ledger.node_s += (until - self.now) * (wanted if self.free is None else min(wanted, self.there))
        self.now = until


def _loses(failure: Failure) -> bool:
    """Whether somebody is lost; or else nodes come back, or workers are slow."""
    return failure.strikes and failure.factor == 1
