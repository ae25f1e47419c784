"""A scenario in the simulator: the same events, at a job's measured or assumed costs.

What the simulator cannot play is refused: it takes events at steps or at times, not both in one run; and it has no supervisor
to lose, no spares by name, and no phases of a recovery.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.random import Generator

from raytrain_ft.drill.faults import ranks, share_before
from raytrain_ft.drill.numbers import Kind, Report, Spread
from raytrain_ft.drill.verdict import verdict
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.strategy import weakest
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Event, Scenario, Who
from raytrain_ft.scenario.events import WHOLE_NODES
from raytrain_ft.scenario.points import STEP_PHASES
from raytrain_ft.simulate import Costs, Failure, Job, Outcome, SpotTrace, Strategy, simulate
from raytrain_ft.simulate.calibrate import calibrate

SEEDS = 10
PHASE_AT = {
    "data": 0.0,
    "receive": 0.1,
    "forward": 0.2,
    "backward_pass": 0.5,
    "send": 0.6,
    "backward": 0.63,
    "reduce": 0.63,
    "reduced": 0.92,
    "tied": 0.92,
    "checkpoint": 0.0,
}
"""About where in a step its phases are; the pass backward takes twice as long as the one forward. A checkpoint comes before the
step that it is of."""
LEFT_OF_UPDATE = {"update": 0.9, "updated": 0.2, "commit": 0.1}
"""Once all is reduced, how much of the update there still is to do."""
BACKWARD_AT, BACKWARD = 0.33, 0.6
"""About where back-propagation begins, and its share of a step."""
STILL = 1e9
"""How many times slower a worker is that stands still."""
PLACES = ("bucket", "layer", "name")
SIMULATED = ("kill", "kill_node", "freeze", "unplug", "drain", "slow_down", "bring_back", "exit")
KINDS = {"auto": "replication", "replication": "replication", "logging": "logging", "snapshot": "elastic_horovod"}


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulator says of a scenario: an outcome for each seed, which events did not come about in one of them, and
    which of those at random came in none."""

    job: Job
    strategy: Strategy
    outcomes: tuple[Outcome, ...]
    missed: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()

    def mean(self, name: str) -> float:
        """Of a number that outcomes have."""
        return sum(getattr(outcome, name) for outcome in self.outcomes) / len(self.outcomes)

    @property
    def training_s(self) -> float:
        """Without the run's beginning and end; one that failed has come to neither perhaps."""
        around = [outcome.lost_s.get("begin", 0.0) + outcome.lost_s.get("end", 0.0) for outcome in self.outcomes]
        return self.mean("seconds") - sum(around) / len(around)

    @property
    def undisturbed_s(self) -> float:
        """The same without failures."""
        return self.strategy.undisturbed_s(self.job)

    @property
    def goodput(self) -> float:
        """Steps that stood, as a share of what a run without failures makes in the same time."""
        steps = self.mean("useful_s") / self.job.useful_s
        return steps * self.undisturbed_s / self.training_s if self.training_s > 0 else 0.0

    @property
    def failure(self) -> str:
        """Why a run did not finish; "" if all did."""
        return next((outcome.reason for outcome in self.outcomes if not outcome.finished), "")

    @property
    def pauses(self) -> Spread:
        """Of all runs."""
        return Spread.of([pause for outcome in self.outcomes for pause in outcome.pauses])

    @property
    def numbers(self) -> dict[str, float]:
        """For the column beside the measured ones."""
        found = {"goodput": self.goodput, "training": self.training_s}
        found |= {name: self.mean(name) for name in ("recoveries", "samples_lost")}
        found |= {"missed": float(len(self.missed))} if self.missed else {}
        return found | ({"pause": self.pauses.p50} if self.pauses.p50 is not None else {})


def predict(scenario: Scenario, job: Job, seeds: int = SEEDS) -> Predicted:
    """What a scenario will cost this job.

    Raises:
        ScenarioError: an event that the simulator does not know.
    """
    events = Events(scenario, job.costs.begin_s)
    strategy = strategy_of(scenario, job)
    chance = any(event.when is not None and event.when.mtbf is not None for event in scenario.events)
    outcomes = tuple(simulate(job, strategy, events, seed=seed) for seed in range(seeds if chance else 1))
    return Predicted(job, strategy, outcomes, events.missed(outcomes), events.absent(outcomes))


def job_of(scenario: Scenario, known: Job | None) -> Job:
    """The scenario's job for the simulator: its costs are those of `known`, a job of the same kind that was measured, or those
    that the scenario assumes.

    Raises:
        ScenarioError: nothing is known of its costs.
    """
    if known is not None:
        step_s, costs = known.step_s, known.costs
    elif scenario.assumed is not None:
        step_s, costs = scenario.assumed.step_s, Costs(**scenario.assumed.costs)
    else:
        raise scenario.error(
            (), "the simulator must know what a step and a recovery cost: give assumed: {step_s: ...}, or --from-run RUN"
        )
    least, most = scenario.range
    nodes, spare_nodes = _spread(scenario)
    return Job(
        name=scenario.name,
        steps=scenario.steps,
        step_s=step_s,
        workers=most,
        stages=scenario.stages,
        nodes=nodes,
        spares=scenario.spares,
        spare_nodes=spare_nodes,
        min_workers=least if least < most else None,
        micro_batches=scenario.count_micro_batches,
        batch=scenario.batch,
        replacement_timeout=scenario.replacement_timeout,
        max_fruitless_recoveries=scenario.max_fruitless_recoveries,
        costs=costs,
    )


def _spread(scenario: Scenario) -> tuple[int | None, int]:
    """The nodes that the workers are spread over, None for one each, and how many more there are.

    Where workers share nodes, and no node is struck, the simulator need not know who is where.
    """
    most, spares = scenario.range[1], scenario.spares
    nodes = scenario.nodes or most + spares
    if nodes >= most + spares:
        return None, nodes - most - spares
    struck = any(event.action in WHOLE_NODES for event in scenario.events)
    if not spares and most % nodes == 0 and not (struck and scenario.stages > 1):  # it matters which stages share a node
        return nodes, 0
    if struck:
        raise scenario.error(
            ("nodes",),
            "in the simulator as many workers are on each node, each stage on one of its own, and spares on others: "
            f"give {most + spares} nodes",
        )
    return None, 0


def strategy_of(scenario: Scenario, job: Job) -> Strategy:
    """The scenario's strategy for the simulator. A pipeline without replicas of its stages replays from its log; "replication"
    never goes back, so the simulator is told of no checkpoints."""
    every = scenario.checkpoint_every
    name = "logging" if scenario.strategy == "auto" and 1 < job.stages == job.workers else scenario.strategy
    kind = KINDS.get(name, name)
    if kind == "elastic_horovod" and not isinstance(every, int):
        raise scenario.error(("strategy",), "snapshot in the simulator: give checkpoint_every, the steps between two snapshots")
    if every == "auto":
        every = Strategy(kind="checkpoint").interval(job)
    if scenario.strategy == "replication":
        every = None
    elif kind == "logging" and every is None:
        every = job.steps  # never: it replays from the beginning
    stated: dict[str, Any] = {name: getattr(scenario, name) for name in ("quorum", "lost_samples", "replacement", "update")}
    return Strategy(kind=kind, every=every, **stated)  # pyright: ignore[reportArgumentType]


class Events:
    """A scenario's events as the simulator's `Failures`.

    Args:
        begin_s: of the run, before training begins: a scenario's times are counted from there.
    """

    def __init__(self, scenario: Scenario, begin_s: float = 0.0) -> None:
        self._scenario = scenario
        self._begin_s = begin_s
        self._at_steps = [
            n for n, event in enumerate(scenario.events) if event.when is not None and event.when.step is not None
        ]
        self._before: dict[int, float] = {}  # of events at a place in back-propagation, the share of gradients before it
        for number, event in enumerate(scenario.events):
            self._check(number, event)
            if event.at is not None and not set(PLACES).isdisjoint(event.at.places):
                self._before[number] = share_before(scenario, number, event.at)

    def _check(self, number: int, event: Event) -> None:
        place = ("events", number, "action")
        if event.action not in SIMULATED:
            raise self._scenario.error(place, f"{event.action}: the simulator knows {', '.join(SIMULATED)}")
        if event.who is not None and event.who.role in ("supervisor", "spare"):
            raise self._scenario.error((*place[:2], "who"), f"the simulator does not lose a {event.who.role}")
        if event.when is None or (event.at is not None and event.at.strikes_in not in STEP_PHASES):
            raise self._scenario.error(place, "the simulator strikes at steps and times, not at phases of a recovery")
        if self._at_steps and number not in self._at_steps:
            raise self._scenario.error(
                (*place[:2], "when"), "the simulator takes events at steps or at times, not both: another event has a step"
            )

    def check(self, job: Job) -> None:
        """Whether traces take more nodes than there are, and whether workers are on the nodes that are named.

        Raises:
            ScenarioError: one does, or nobody is.
        """
        nodes = self._nodes(job)
        for number, event in enumerate(self._scenario.events):
            if event.who is not None and event.who.node is not None and event.who.node >= nodes:
                raise self._scenario.error(
                    ("events", number, "who", "node"), f"{event.who.node}: the simulator loses no spare: use 0 to {nodes - 1}"
                )
            if event.when is not None and event.when.trace is not None:
                try:
                    SpotTrace.read(self._scenario.relative(event.when.trace)).check(job)
                except ConfigError as error:
                    raise self._scenario.error(("events", number, "when", "trace"), str(error)) from error

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """The failures of one run, in order."""
        self.check(job)
        draws = random.Random(int(chance.integers(2**62)))
        if self._at_steps:
            found = [self._at_step(number, job, draws) for number in self._at_steps]
            yield from sorted(found, key=lambda failure: failure.step or 0.0)
            return
        numbered = enumerate(self._scenario.events)
        streams = [self._timed(number, event, job, random.Random(draws.random())) for number, event in numbered]
        yield from heapq.merge(*streams, key=lambda failure: failure.at or 0.0)

    def _at_step(self, number: int, job: Job, draws: random.Random) -> Failure:
        event = self._scenario.events[number]
        assert event.when is not None
        assert event.when.step is not None
        failure = self._failure(number, event, job, draws, 0.0)
        return replace(failure, at=None, step=min(event.when.step + self._place(number, job), job.steps - 1e-3))

    def _place(self, number: int, job: Job) -> float:
        """About where in its step an event strikes, from 0 to 1."""
        at = self._scenario.events[number].at
        if at is None:
            return PHASE_AT["forward"]
        share = self._before.get(number, at.share if at.share is not None else at.tensors)
        if share is not None:
            return BACKWARD_AT + BACKWARD * share
        if at.strikes_in in LEFT_OF_UPDATE:
            return 1 - LEFT_OF_UPDATE[at.strikes_in] * job.costs.update_s / job.step_s
        return PHASE_AT[at.strikes_in]

    def _timed(self, number: int, event: Event, job: Job, draws: random.Random) -> Iterator[Failure]:
        when = event.when
        assert when is not None
        if when.trace is not None:
            for change in SpotTrace.read(self._scenario.relative(when.trace)).failures:
                at = self._begin_s + (change.at or 0.0) / (when.speed or 1.0)
                back = Failure(at=at, back=change.back, event=number) if change.back else None
                yield back or self._of_nodes(number, event, change.lost, at)
        elif when.mtbf is not None:
            at, left = self._begin_s, when.count or math.inf
            while left > 0:
                at, left = at + draws.expovariate(1 / when.mtbf), left - 1
                yield replace(self._failure(number, event, job, draws, at), spares_one=True)
        else:
            yield self._failure(number, event, job, draws, self._begin_s + (when.seconds or 0.0))

    def _failure(self, number: int, event: Event, job: Job, draws: random.Random, at: float) -> Failure:
        """What an event does to the cluster, once."""
        if event.action == "bring_back":
            return Failure(at=at, back=1, event=number)
        who = event.who
        assert who is not None
        anyone = who.role == "any" and event.when is not None and event.when.step is None  # in a step, spares are not struck
        struck = () if anyone else self._ranks(who, job, draws)
        if event.action in WHOLE_NODES:
            on = {rank % self._nodes(job) for rank in struck}  # workers go round them
            return self._of_nodes(number, event, len(on) or 1, at, struck if job.per_node == 1 else (), anyone)
        slow: dict[str, Any] = {}
        if event.action == "slow_down":
            slow = {"factor": event.factor or 1.0, "lasts_s": event.lasts or 0.0}
        elif event.action == "freeze" and event.lasts is not None and event.lasts < job.costs.detect_s:
            slow = {"factor": STILL, "lasts_s": event.lasts}  # it is over before anybody notices
        return Failure(at=at, workers=struck, anyone=anyone, event=number, **slow)

    def _ranks(self, who: Who, job: Job, draws: random.Random) -> tuple[int, ...]:
        if who.role == "any":
            return (draws.randrange(job.workers),)
        if who.node is not None:
            return tuple(range(who.node, job.workers, self._nodes(job)))
        return tuple(rank for rank in ranks(who, job.workers, draws) if rank is not None)

    def _nodes(self, job: Job) -> int:
        """That those who train are on."""
        return min(self._scenario.nodes or job.workers, job.workers)

    def _of_nodes(
        self, number: int, event: Event, count: int, at: float, of: tuple[int, ...] = (), anyone: bool = False
    ) -> Failure:
        """So many nodes are lost, perhaps with notice, perhaps for a while."""
        notice_s, back = event.notice or 0.0, count if event.lasts is not None else 0
        lasts_s = notice_s + (event.lasts or 0.0)
        return Failure(at=at, lost=count, of=of, anyone=anyone, notice_s=notice_s, back=back, back_s=lasts_s, event=number)

    def absent(self, outcomes: Sequence[Outcome]) -> tuple[int, ...]:
        """The events at random that never came, in no run."""
        at_random = [
            n for n, event in enumerate(self._scenario.events) if event.when is not None and event.when.mtbf is not None
        ]
        return tuple(n for n in at_random if all(n not in outcome.struck for outcome in outcomes))

    def missed(self, outcomes: Sequence[Outcome]) -> tuple[int, ...]:
        """The events that did not come about as often as they should."""
        return tuple(n for n, event in enumerate(self._scenario.events) if self._has_missed(n, event, outcomes))

    def _has_missed(self, number: int, event: Event, outcomes: Sequence[Outcome]) -> bool:
        """In one run at least; an event at random that came, in all of them."""
        when, times = event.when, [outcome.struck.get(number) for outcome in outcomes]
        if when is not None and when.mtbf is not None:
            return any(found is not None for found in times) and not any(times)
        trace = when.trace if when is not None else None
        least = 1 if trace is None else len(SpotTrace.read(self._scenario.relative(trace)).failures)
        return any((found or 0) < least for found in times)


def rehearse(scenario: Scenario, known: Job | None = None) -> Report:
    """A drill in the simulator: the same report, of simulated runs; means, and the pauses of all of them.

    Args:
        known: a job of the same kind whose costs were measured (`known_job`).

    Raises:
        ScenarioError: something that the simulator does not know.
    """
    job = job_of(scenario, known)
    found = predict(scenario, job)
    runs = len(found.outcomes)
    counts: Counter[str] = Counter()
    for outcome in found.outcomes:
        counts.update(outcome.strategies)
    kept = str(weakest(*(outcome.guarantee for outcome in found.outcomes)))
    report = Report(
        scenario=scenario.name,
        ground="simulator" if runs == 1 else f"simulator ({runs} seeds, means)",
        steps=0 if found.failure else scenario.steps,
        max_steps=scenario.steps,
        training_s=found.training_s,
        undisturbed_s=found.undisturbed_s,
        goodput=found.goodput,
        strikes=(),
        missed=found.missed,
        absent=found.absent,
        recoveries=tuple(
            Kind(cause="all", strategy=name, guarantee=kept, count=round(count / runs), pause=found.pauses)
            for name, count in counts.items()
        ),
        detection=Spread.of([job.costs.detect_s]),
        pauses=found.pauses,
        samples_lost=round(found.mean("samples_lost")),
        guarantee=kept,
        bit_equal=None,
        violations=(),
        unchecked="there are no records",  # to write them would take longer than to simulate months
        failure=found.failure,
    )
    worst = max(outcome.samples_lost for outcome in found.outcomes)  # a mean would round a rare loss away
    return replace(report, checks=verdict(replace(report, samples_lost=worst), scenario))


def known_job(run: Path) -> Job:
    """The job of a finished run, with the costs that its records show.

    Raises:
        ConfigError: they do not show enough.
    """
    log = run / "events.jsonl"
    if not log.exists():
        raise ConfigError(f"{run} has no events.jsonl: give the directory of a finished run (storage_path/name)")
    return calibrate(read_records(log)).job
