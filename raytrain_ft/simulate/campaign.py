"""Random troubled runs, each checked after every event, and its record at its end.

    python -m raytrain_ft.simulate.campaign --seeds 10000

A seed draws a small job, a strategy and failures that come as often as recoveries take long: nodes are lost together, while
others recover, come back or do not, are scarce or not, had notice or not, and workers are slow. What must hold is in `promises`
and `policy.history`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, get_args

import numpy as np
from numpy.random import Generator

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import history
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.states import State
from raytrain_ft.simulate.engine import Simulation, rules_of
from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.failures import Exponential, Failures, Weibull
from raytrain_ft.simulate.listed import Listed
from raytrain_ft.simulate.model import Costs, Job
from raytrain_ft.simulate.outcome import GAVE_UP, Outcome
from raytrain_ft.simulate.promises import PromiseBroken, Promises, Record
from raytrain_ft.simulate.strategies import ONLY_GIVEN, Kind, Strategy, fits

KINDS: tuple[Any, ...] = tuple(kind for kind in get_args(Kind) if kind != "torchft")
UPDATES: tuple[Any, ...] = (None, "barrier", "wait_free")
REPLACEMENTS: tuple[Any, ...] = ("wait", "shrink")
NOTHING_STANDS = "I1 no step was committed: nothing is proven"
"""No violation of a run that failed before a step that stands."""
NO_END = "I6 the run has 0 ends"
"""No violation of a run that was given up as hopeless."""
MOST_FAILURES = 60
"""Of a run: then it is left in peace, so that it comes to an end."""


@dataclass(frozen=True, slots=True)
class Story:
    """What a seed came to. violations: in words; empty if every promise was kept. edges: of the machine that were taken."""

    seed: int
    job: Job
    strategy: Strategy
    outcome: Outcome | None
    violations: tuple[str, ...]
    edges: frozenset[tuple[str, State, State]]


def troubled_run(seed: int) -> Story:
    """One random run, checked."""
    chance = np.random.default_rng([seed, 2])
    job = _job(chance)
    strategy = _strategy(job, chance)
    drawn = _failures(job, chance).draw(job, chance)
    failures = islice(_milder(drawn, np.random.default_rng([seed, 3])), MOST_FAILURES)
    simulation = Simulation(job, strategy, failures, seed)
    rules = rules_of(job, strategy)
    promises, record = Promises(rules, simulation.crew.holds), Record(rules, Sampling(12 * job.batch, job.batch, seed))
    edges: set[tuple[str, State, State]] = set()

    def watch(run: RunState, event: m.Event, before: State, commands: list[c.Command]) -> None:
        edges.add((type(event).__name__, before, run.state))
        promises.after(run, event, before, commands)
        record.after(run, event, before, commands)

    simulation.watch = watch
    try:
        outcome = simulation.run()
    except PromiseBroken as broken:
        return Story(seed, job, strategy, None, (str(broken),), frozenset(edges))
    violations = history.check(record.lines, longest_recovery=np.inf)
    if not outcome.finished:
        endless = (NO_END,) if outcome.reason == GAVE_UP else ()
        violations = [violation for violation in violations if violation not in (NOTHING_STANDS, *endless)]
    violations += _of_the_account(job, outcome)
    return Story(seed, job, strategy, outcome, tuple(violations), frozenset(edges))


def _of_the_account(job: Job, outcome: Outcome) -> list[str]:
    """Every second is booked once, none of them negative; who finished has done everything."""
    found = []
    booked = outcome.useful_s + sum(outcome.lost_s.values())
    if abs(booked - outcome.seconds) > 1e-6 * (1 + outcome.seconds):
        found.append(f"{booked} s are booked, and the run took {outcome.seconds} s")
    found += [f"{kind}: {seconds} s" for kind, seconds in outcome.lost_s.items() if seconds < -1e-6 * (1 + outcome.seconds)]
    if outcome.finished and outcome.useful_s != job.useful_s and not outcome.samples_lost:
        found.append(f"it finished with {outcome.useful_s} of {job.useful_s} s of useful work")
    if not outcome.finished and not outcome.reason:
        found.append("it did not finish and does not say why")
    return found


def _job(chance: Generator) -> Job:
    stages = int(chance.choice([1, 1, 2, 3]))
    replicas = int(chance.integers(1, 5 if stages == 1 else 3))
    workers = stages * replicas
    nodes = int(chance.choice([n for n in range(1, workers + 1) if workers % n == 0]))
    fewest = stages * int(chance.integers(1, replicas + 1))

    def seconds(most: float) -> float:
        return float(chance.choice([0.0, chance.uniform(0, most)]))

    costs = Costs(
        update_s=seconds(0.5),
        copy_s=seconds(2),
        persist_s=seconds(5),
        load_s=seconds(3),
        restore_s=seconds(1),
        log_s=seconds(0.1),
        detect_s=seconds(2),
        fence_s=seconds(0.5),
        rendezvous_s=seconds(1),
        fill_s=seconds(2),
        restart_s=seconds(5),
        start_s=seconds(10),
        resume_s=seconds(0.2),
        begin_s=seconds(3),
        end_s=seconds(1),
        replay_ratio=float(chance.uniform(0.1, 1)),
    )
    return Job(
        steps=int(chance.integers(1, 200)),
        step_s=1.0,
        workers=workers,
        stages=stages,
        nodes=nodes,
        spares=int(chance.integers(0, 3)),
        spare_nodes=None if chance.random() < 0.4 else int(chance.integers(0, 4)),
        min_workers=fewest,
        micro_batches=4,
        batch=8,
        replacement_timeout=float(chance.choice([5.0, 60.0, 600.0])),
        costs=costs,
    )


def _strategy(job: Job, chance: Generator) -> Strategy:
    kinds = [kind for kind in KINDS if fits(kind, job)]
    kind = kinds[chance.integers(len(kinds))]
    unsaved = kind not in ONLY_GIVEN and chance.random() < 0.25  # or as often as Algorithm 1 chooses
    return Strategy(
        kind=kind,
        every=None if unsaved else int(chance.integers(1, 30)),
        replay_workers=int(chance.integers(1, 4)),
        quorum=float(chance.choice([0.0, 0.5, 0.9])),
        update=None if job.stages > 1 else UPDATES[chance.integers(len(UPDATES))],
        replacement=REPLACEMENTS[chance.integers(len(REPLACEMENTS))],
    )


def _failures(job: Job, chance: Generator) -> Failures:
    most = min(3, job.number_of_nodes)
    together = tuple(share / sum(range(1, most + 1)) for share in range(most, 0, -1))
    mtbf_s = float(np.exp(chance.uniform(np.log(2), np.log(200))))
    match chance.integers(3):
        case 0:
            return Exponential(mtbf_s=mtbf_s, together=together)
        case 1:
            return Weibull(mtbf_s=mtbf_s, shape=float(chance.uniform(0.4, 2)), together=together)
    return Listed(tuple(_comings_and_goings(job, mtbf_s, most, chance)))


def _comings_and_goings(job: Job, mtbf_s: float, most: int, chance: Generator) -> Iterator[Failure]:
    at = 0.0
    for _ in range(int(chance.integers(1, 40))):
        at += float(chance.exponential(mtbf_s))
        failure = Failure(at=at, lost=int(chance.integers(1, most + 1)))
        match chance.integers(3):
            case 0:
                failure = replace(failure, lost=0, back=int(chance.integers(1, 3)))
            case 1:
                failure = replace(failure, lost=0, workers=(int(chance.integers(job.workers)),))
        yield failure


def _milder(failures: Iterator[Failure], chance: Generator) -> Iterator[Failure]:
    """In half of the runs, some of the nodes that are lost have notice, and some of the workers are slow instead."""
    share = float(chance.choice([0.0, 0.0, 0.5, 1.0]))
    for failure in failures:
        if chance.random() >= share:
            yield failure
        elif failure.lost:
            yield replace(failure, notice_s=float(chance.exponential(15)))
        elif failure.workers:
            yield replace(failure, factor=1 + float(chance.exponential(5)), lasts_s=float(chance.exponential(15)))
        else:
            yield failure


def main() -> None:
    """Runs seeds 0, 1, ... and prints what they came to; the exit status is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    began, ends, broken, recoveries, edges = time.perf_counter(), Counter[str](), 0, 0, set()
    for seed in range(options.first, options.first + options.seeds):
        story = troubled_run(seed)
        edges |= story.edges
        broken += bool(story.violations)
        if story.outcome is not None:
            recoveries += story.outcome.recoveries
            ends[story.outcome.reason.partition(":")[0] or "finished"] += 1
        if story.violations:
            print(f"seed {seed}: {len(story.violations)} violations: {story.violations[0]}", flush=True)
    ended = ", ".join(f"{number} {how}" for how, number in ends.most_common())
    print(
        f"{options.seeds} seeds in {time.perf_counter() - began:.0f} s: {broken} broke a promise; {recoveries} recoveries, "
        f"{len(edges)} edges of the machine; {ended}"
    )
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
