"""One simulated run: events in order of their time, the supervisor's own machine, and a crew that answers it.

Between failures, training is a closed form (`pace`), so a run costs as much as its failures, however long it is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.leaving import DRAIN
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.policy.strategy import weakest
from raytrain_ft.simulate.crew import Crew
from raytrain_ft.simulate.failure import Failure, unheeded
from raytrain_ft.simulate.failures import Failures
from raytrain_ft.simulate.ledger import Ledger
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.nodes import Nodes
from raytrain_ft.simulate.outcome import GAVE_UP, Outcome
from raytrain_ft.simulate.peers import simulate_torchft
from raytrain_ft.simulate.strategies import HEEDLESS, Strategy, longest_s

Watch = Callable[[RunState, m.Event, State, list[c.Command]], None]
"""Sees every event, the state before it, and what the machine asks for."""

BOOKED_AS = {
    State.INITIALIZING: "begin",
    State.SCHEDULING: "begin",
    State.RUNNING: "detect",
    State.RESIZING: "detect",
    State.FENCE: "fence",
    State.REPLACE: "replace",
    State.REBUILD: "rebuild",
    State.RESUME: "resume",
    State.SHUTTING_DOWN: "end",
}
"""What time goes into while nobody trains."""


def simulate(job: Job, strategy: Strategy, failures: Failures, *, seed: int = 0) -> Outcome:
    """One run of a job under a strategy and failures.

    The same seed gives the same failures to every strategy, as long as they do not depend on how far training is.

    Raises:
        ConfigError: the failures cannot happen to this job, or the strategy does not go with it.
    """
    strategy.check(job)
    drawn = failures.draw(job, np.random.default_rng([seed, 0]))
    if strategy.kind in HEEDLESS:
        drawn = unheeded(drawn, job)
    if strategy.kind == "torchft":
        return simulate_torchft(job, strategy, drawn, seed)
    return Simulation(job, strategy, drawn, seed).run()


def rules_of(job: Job, strategy: Strategy) -> Rules:
    """What the supervisor would be told of this job. Deadlines are long enough for what the job's costs say."""
    costs, saves = job.costs, strategy.interval(job) is not None
    kinds: dict[str, Any] = {
        "global_checkpoint": "checkpoint",
        "checkfreq": "checkpoint",
        "checkpoint": "checkpoint",
        "elastic_horovod": "snapshot",
        "replication": "auto" if saves else "replication",
        "logging": "logging",
        "lossy": "lossy",
        "rollback": "rollback",
        "skip": "skip",
    }
    slowest = max(costs.begin_s, costs.restart_s + costs.rendezvous_s + costs.load_s + costs.restore_s + costs.filling_s)
    return Rules(
        min_workers=job.fewest,
        max_workers=job.workers,
        max_steps=job.steps,
        stages=job.stages,
        logging=strategy.kind == "logging",
        replay_workers=strategy.replay_workers,
        spares=job.spares * job.per_node,
        whole_update=not strategy.updates_early,
        strategy=kinds[strategy.kind],
        quorum=strategy.quorum,
        checkpoints=saves,
        wait_for_replacement=strategy.replacement == "wait",
        schedule_timeout=3 * costs.begin_s + 120,
        replacement_timeout=job.replacement_timeout,
        max_fruitless_recoveries=job.max_fruitless_recoveries,
        fence_timeout=3 * costs.fence_s + 10,
        phase_timeout=3 * (slowest + job.step_s + costs.end_s) + 60,
    )


class Simulation:
    """A run under way: the queue of what will happen, and the clock."""

    def __init__(self, job: Job, strategy: Strategy, failures: Iterator[Failure], seed: int) -> None:
        self.job, self.strategy, self.seed = job, strategy, seed
        self.now = 0.0
        self.state = RunState(rules_of(job, strategy))
        self.ledger = Ledger(job, strategy)
        self.nodes = Nodes(job)
        self.crew = Crew(job, strategy, self.ledger, self.nodes, self._at, self._tell)
        self.watch: Watch | None = None
        self._failures = failures
        self._next: Failure | None = None
        self._waiting: list[Failure] = []  # for one of those whom they name, who is missing
        self._chance = np.random.default_rng([seed, 1])
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._watched: object = None
        self._events: Counter[int] = Counter()  # those of a scenario that came, and how often they came about

    def run(self) -> Outcome:
        """To the run's end."""
        stored = tuple(self.crew.disk)
        self._tell([m.RunStarted(run_id="simulation", stored=stored), m.CapacityChanged(slots=self.nodes.slots)])
        self._next_failure()
        longest = longest_s(self.job, self.strategy)
        while self.state.state not in ENDED and self._queue and self._queue[0][0] <= longest:
            at, _, what = heapq.heappop(self._queue)
            self._pass_time(at)
            what(at)
            self._waiting = [failure for failure in self._waiting if not self._struck_now(failure, at)]
            if self.crew.training is not self._watched:
                self._await_step()
        self.crew.interrupt(self.now)  # of a run that is given up, what was computed since the last failure counts
        reason = "" if self.state.state == State.FINISHED else ": ".join(self.state.failure or (GAVE_UP,))
        recoveries = [recovery for recovery in self.state.recoveries if recovery.lost or recovery.left]
        return self.ledger.outcome(
            self.seed,
            self.now,
            self.crew.step,
            reason,
            recoveries=len(recoveries),
            guarantee=str(weakest(*(recovery.guarantee for recovery in self.state.recoveries))),
            strategies=dict(Counter(str(recovery.strategy) for recovery in recoveries)),
            struck=dict(self._events),
        )

    # ---------------------------------------------------------------- time

    def _at(self, at: float, what: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (at, self._number, what))

    def _pass_time(self, at: float) -> None:
        seconds = at - self.now
        self.now = at
        self.ledger.node_s += seconds * self.nodes.paid
        if self.crew.training is None:  # training books its own time
            began = self.crew.began or self.state.state != State.REPLACE
            self.ledger.book(BOOKED_AS[self.state.state] if began else "begin", seconds)

    def _tell(self, events: Iterable[m.Event]) -> None:
        for event in events:
            if self.state.state in ENDED:
                return
            before = self.state.state
            commands = handle(self.state, event)
            if self.watch is not None:
                self.watch(self.state, event, before, commands)
            if self.state.state == State.RESIZING != before and not self.state.leaving.keys().isdisjoint(self.state.world):
                self.ledger.struck(self.now)  # the pause of who leaves is that of the change itself
            for command in commands:
                self.crew.carry_out(command, self.now)

    # ---------------------------------------------------------------- failures

    def _next_failure(self) -> None:
        """Draws the next failure; one that is due at a time is due then."""
        self._next = failure = next(self._failures, None)
        if failure is not None and failure.at is not None:
            self._at(max(failure.at, self.now), lambda at: self._strike(failure, at))
        self._await_step()

    def _await_step(self) -> None:
        """A failure that is due at a step strikes when this stretch of training comes to it."""
        self._watched = training = self.crew.training
        failure = self._next
        if training is not None and failure is not None and failure.step is not None:
            training.when_at(failure.step, lambda at: self._strike(failure, at))

    def _strike(self, failure: Failure, now: float) -> None:
        if failure is not self._next:
            return
        if failure.event is not None:
            self._events[failure.event] += 0
        if not self._struck_now(failure, now) and not failure.spares_one:
            self._waiting.append(failure)
        self._next_failure()

    def _struck_now(self, failure: Failure, now: float) -> bool:
        """It strikes; or else, at a time, one of those whom it names is missing, or nobody would be left."""
        if failure.at is not None and len(self._named(failure)) < len(failure.workers or failure.of):
            return False
        workers, nodes = ([], self._struck(failure)) if failure.lost else (self._meant(failure), [])
        if failure.spares_one and not self._spares_one(workers, nodes):
            return False
        self._carry_out(failure, workers, nodes, now)
        return True

    def _carry_out(self, failure: Failure, workers: list[str], nodes: list[int], now: float) -> None:
        """It strikes these workers, or these nodes."""
        slots = self.nodes.slots
        self.ledger.failures += failure.strikes
        back = min(failure.back, len(nodes)) if failure.lost else failure.back  # who was not there does not come back
        meant = failure.lost or len(failure.workers) or int(failure.anyone)
        if failure.event is not None and len(workers) + len(nodes) >= meant:  # or else it has not come about as it was written
            self._events[failure.event] += 1
        if failure.factor > 1:
            self.crew.slow(workers, failure.factor, failure.lasts_s, now)
        elif failure.strikes and not failure.lost:
            self._lose(workers, "the process died", now)
        elif failure.notice_s:
            self._give_notice(nodes, failure.notice_s, now)
            slots = self.nodes.slots  # that is known
        elif failure.lost:
            self._lose(self.nodes.lose(nodes), f"{failure.lost} nodes were lost", now)
        if failure.back_s:
            self._resize(slots, 0, now)
            self._at(now + failure.back_s, lambda at: self._resize(self.nodes.slots, back, at))
        else:
            self._resize(slots, back, now)

    def _lose(self, members: list[str], cause: str, now: float) -> None:
        if not set(self.state.joining).isdisjoint(members):
            self.ledger.struck(now)
        self.crew.lose(members, now, cause)

    def _give_notice(self, nodes: list[int], seconds: float, now: float) -> None:
        """It is said at once of these nodes that they will be gone, and when the time has come they are."""
        members = [member for member in self.nodes.condemn(nodes) if member not in self.crew.dead]
        told = {"at": now, "deadline_s": seconds, "source": DRAIN, "reason": "the node is drained"}
        self._tell([m.CapacityChanged(at=now, slots=self.nodes.slots), *(m.Noticed(member=one, **told) for one in members)])
        words = "a node was lost that had notice"
        self._at(now + seconds, lambda at: self._lose(self.nodes.lose(nodes), words, at))

    def _resize(self, slots: int, back: int, now: float) -> None:
        """So many nodes come back; if there is room for other than so many workers now, the supervisor will hear of it."""
        if back:
            self.nodes.add(back)
            self.crew.place_waiting(now)
        if self.nodes.slots != slots:
            changed = m.CapacityChanged(at=now, slots=self.nodes.slots)
            self._at(now + self.job.costs.detect_s, lambda _: self._tell([changed]))

    def _spares_one(self, workers: list[str], nodes: list[int]) -> bool:
        """Whether somebody who holds the training state is left without them."""
        gone = self.crew.dead.union(workers, *(self.nodes.hosts[node] for node in nodes))
        return not gone.issuperset(self.crew.holding)

    def _meant(self, failure: Failure) -> list[str]:
        """The workers that are named, as far as they live, or whoever is drawn, spares among them."""
        if failure.anyone:
            living = sorted(member for member in self.nodes.node_of if member not in self.crew.dead)
            return [living[self._chance.integers(len(living))]] if living else []
        return self._named(failure)

    def _named(self, failure: Failure) -> list[str]:
        world = self.state.joining or self.state.world
        members = [world[rank] for rank in failure.workers or failure.of if rank < len(world)]
        return [member for member in members if member in self.nodes.node_of and member not in self.crew.dead]

    def _struck(self, failure: Failure) -> list[int]:
        """The nodes that are meant, or else nodes of the present world, drawn by chance, further ones only if these do not
        suffice."""
        if failure.of or failure.anyone:
            return list(dict.fromkeys(self.nodes.node_of[member] for member in self._meant(failure)))
        world = self.state.joining or self.state.world
        at_work = {self.nodes.node_of[member] for member in world if member in self.nodes.node_of}
        chosen = self._draw(sorted(at_work), failure.lost)
        if len(chosen) < failure.lost:
            chosen += self._draw([node for node in self.nodes.hosts if node not in at_work], failure.lost - len(chosen))
        return chosen

    def _draw(self, nodes: list[int], number: int) -> list[int]:
        number = min(number, len(nodes))
        return [nodes[i] for i in self._chance.choice(len(nodes), number, replace=False)] if number else []
