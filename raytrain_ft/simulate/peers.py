"""Strategies that are not decided by this project's machine, by their published mechanics.

After a failure the survivors notice (`detect_s`), leave the step (`fence_s`) and form a new group (`rendezvous_s`). Then

- torchft drops the step and goes on with those who are left, each with its share of the batch as before, so what the missing
  ones would have contributed is lost; a replacement takes its state from a survivor while the others go on.
- skip drops the step, and waits for the replacement to be filled.
- rollback keeps what was updated, fills the replacement from a survivor, and does the same mini-batch again.
- lossy finishes the step with the survivors' gradients; the replacement is filled before the next one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from raytrain_ft.simulate.failures import Failure
from raytrain_ft.simulate.ledger import Ledger, step_seconds
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import Outcome
from raytrain_ft.simulate.pace import Pace, Stand
from raytrain_ft.simulate.strategies import Strategy

BY_MECHANICS = frozenset({"torchft", "lossy", "rollback", "skip"})
"""Kinds that are simulated here."""


def simulate_peer(job: Job, strategy: Strategy, failures: Iterator[Failure], seed: int) -> Outcome:
    """One run of a job under one of these strategies."""
    nodes = math.inf if job.spare_nodes is None else job.spares + job.spare_nodes
    return _Peer(job, strategy, failures, Ledger(job, strategy), [0.0] * job.spares, nodes).run(seed)


@dataclass(slots=True)
class _Peer:
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
        while self.step < job.steps and not reason:
            stand, struck = self._train(failure)
            if not struck or failure is None:
                continue
            self.nodes += failure.back
            if failure.lost or failure.workers:
                recoveries += 1
                reason = self._recover(failure, stand)
            failure = next(self.failures, None)
        self._wait("end", 0.0 if reason else job.costs.end_s)
        kind, guarantee = self.strategy.kind, "lossy" if recoveries else "exact"
        counts = {"recoveries": recoveries, "strategies": {kind: recoveries} if recoveries else {}}
        return self.ledger.outcome(seed, self.now, self.step, reason, guarantee=guarantee, **counts)

    def _train(self, failure: Failure | None) -> tuple[Stand, bool]:
        """Until the next failure, until somebody comes back, or to the end; and whether it was the failure."""
        job = self.job
        pace = Pace(self.step, self.strategy.step_s(job), self.strategy.interval(job), self.strategy.stall_s(job))
        end, strikes, comes = self.now + pace.until(job.steps), math.inf, math.inf
        if failure is not None:
            at = self.now + pace.until(failure.step) if failure.step is not None else failure.at
            strikes = max(self.now, at or 0.0)
        if self.coming:  # they join at a boundary between steps
            since = max(0.0, self.coming[0][0] - self.now)
            comes = self.now + pace.until(min(job.steps, pace.after(since).step + (since > 0)))
        until = min(end, strikes, comes)
        stand = Stand(job.steps, 0.0, pace.until(job.steps) - (job.steps - self.step) * pace.step_s)
        if until < end:
            stand = pace.after(until - self.now)
        if comes == until < strikes:
            self.absent -= heapq.heappop(self.coming)[1]
            stand = Stand(stand.step, 0.0, stand.stalled)
        self.ledger.trained(self.step, stand, job.workers)
        self.ledger.samples_lost += (stand.step - self.step) * job.batch * self.absent / job.workers
        if stand.step > self.step:
            self.ledger.resumed(min(until, self.now + pace.until(self.step + 1)))
        self._pass(until - self.now)
        self.step = stand.step
        return stand, strikes == until < end

    def _recover(self, failure: Failure, stand: Stand) -> str:
        """Books a recovery; why there cannot be one, or an empty string."""
        job, costs, kind = self.job, self.job.costs, self.strategy.kind
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
        if kind == "torchft":
            self.ledger.samples_lost += job.batch
            self.absent += lost
            heapq.heappush(self.coming, (ready + costs.filling_s, lost))
            return ""
        self._wait("replace", ready - self.now)
        self._wait("rebuild", costs.filling_s)
        if kind == "skip":
            self.ledger.samples_lost += job.batch
        elif kind == "lossy":
            rest = step_seconds(job, self.strategy, job.workers) - stand.into
            self._wait("replace", rest)
            self.ledger.completed(stand.into, rest, job.workers)
            self.ledger.samples_lost += job.batch * lost / job.workers
            self.step += 1
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
