"""torchft, which does not decide as this project's machine does, by its published mechanics.

After a failure the survivors notice (`detect_s`), leave the step (`fence_s`), drop it, and form a new quorum (`rendezvous_s`).
They go on at once with those who are left, each with its share of the batch as before, so what the missing ones would have
contributed is lost too. A replacement takes its state from a survivor while the others go on, and joins between two steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from raytrain_ft.simulate.failures import Failure
from raytrain_ft.simulate.ledger import Ledger
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import GAVE_UP, HOPELESS, Outcome
from raytrain_ft.simulate.pace import Pace, Stand
from raytrain_ft.simulate.strategies import Strategy


def simulate_torchft(job: Job, strategy: Strategy, failures: Iterator[Failure], seed: int) -> Outcome:
    """One run of a job."""
    nodes = math.inf if job.spare_nodes is None else job.spares + job.spare_nodes
    return _Torchft(job, strategy, failures, Ledger(job, strategy), [0.0] * job.spares, nodes).run(seed)


@dataclass(slots=True)
class _Torchft:
    """A run. spares: when each spare is ready. nodes: on which workers can be started again. absent: workers that are missing;
    coming: when they are back."""

    job: Job
    strategy: Strategy
    failures: Iterator[Failure]
    ledger: Ledger
    spares: list[float]
    nodes: float
    now: float = 0.0
    step: int = 0
    absent: int = 0
    coming: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seed: int) -> Outcome:
        """To the run's end."""
        job, reason, recoveries = self.job, "", 0
        self._wait("begin", job.costs.begin_s)
        failure = next(self.failures, None)
        longest = HOPELESS * (job.useful_s + job.costs.begin_s)
        while self.step < job.steps and not reason:
            if self.now > longest:
                reason = GAVE_UP
                break
            struck = self._train(failure)
            if not struck or failure is None:
                continue
            self.nodes += failure.back
            if failure.lost or failure.workers:
                recoveries += 1
                reason = self._recover(failure)
            failure = next(self.failures, None)
        self._wait("end", 0.0 if reason else job.costs.end_s)
        guarantee = "lossy" if recoveries else "exact"
        counts = {"recoveries": recoveries, "strategies": {"torchft": recoveries} if recoveries else {}}
        return self.ledger.outcome(seed, self.now, self.step, reason, guarantee=guarantee, **counts)

    def _train(self, failure: Failure | None) -> bool:
        """Until the next failure, until somebody comes back, or to the end; and whether it was the failure."""
        job = self.job
        pace = Pace(self.step, self.strategy.step_s(job), self.strategy.interval(job), self.strategy.stall_s(job))
        end, strikes, comes = self.now + pace.until(job.steps), math.inf, math.inf
        if failure is not None:
            at = self.now + pace.until(failure.step) if failure.step is not None else failure.at
            strikes = max(self.now, at or 0.0)
        if self.coming:  # they join at a boundary between steps
            ready = pace.after(max(0.0, self.coming[0][0] - self.now))
            comes = self.now + pace.until(min(job.steps, ready.step + (ready.into > 1e-6 * pace.step_s)))
        until = min(end, strikes, comes)
        stand = Stand(job.steps, 0.0, pace.until(job.steps) - (job.steps - self.step) * pace.step_s)
        if until < end:
            stand = pace.after(until - self.now)
        joins = comes == until < strikes
        if joins:
            stand = Stand(stand.step, 0.0, stand.stalled)
        self.ledger.trained(self.step, stand, job.workers)
        self.ledger.lost(self.step, (stand.step - self.step) * job.batch * self.absent / job.workers)
        if joins:
            self.absent -= heapq.heappop(self.coming)[1]
        if stand.step > self.step:
            self.ledger.resumed(min(until, self.now + pace.until(self.step + 1)))
        self._pass(until - self.now)
        self.step = stand.step
        return strikes == until < end

    def _recover(self, failure: Failure) -> str:
        """Books a recovery; why there cannot be one, or an empty string."""
        job, costs = self.job, self.job.costs
        lost = failure.lost * job.per_node or len(failure.workers)
        self.ledger.failures += 1
        self.ledger.struck(self.now)
        if lost >= job.workers - self.absent:
            return "NoSurvivorError: every worker was lost"
        self._wait("detect", costs.detect_s)
        self._wait("fence", costs.fence_s)
        self._wait("replace", costs.rendezvous_s)
        ready = max(self._replacement() for _ in range(max(1, failure.lost)))
        if math.isinf(ready):
            return "RecoveryError: there are no nodes left"
        self.ledger.lost(self.step, job.batch)
        self.absent += lost
        heapq.heappush(self.coming, (ready + costs.filling_s, lost))
        return ""

    def _replacement(self) -> float:
        """When the next spare node is ready; another one is started in its place."""
        self.nodes -= 1
        if self.nodes < 0:
            return math.inf
        start = self.job.costs.start_s
        if not self.spares:
            return self.now + start
        ready = max(self.now, heapq.heappop(self.spares))
        heapq.heappush(self.spares, ready + start)
        return ready

    def _wait(self, kind: str, seconds: float) -> None:
        self.ledger.book(kind, seconds)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.node_s += seconds * (self.job.number_of_nodes + self.job.spares)
