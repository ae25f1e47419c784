"""What a drained node costs: Ray drains it with a deadline of 30 s, its worker leaves at a step boundary, a warm spare goes on.

    python -m benchmarks.drains [--quick] --json FILE

The pause is the longest time between two committed steps from the notice until the node has left, as the workers' own journals
have it, so it holds the step that would have been computed anyway.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import raytrain_ft as ft
from benchmarks.harness import Goal, Options, Report, main, p95_of
from benchmarks.ours import Run, training
from benchmarks.peers.kills import read_journals
from benchmarks.recovery import Journaled, has_spares, wait_for
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.event_log import read_records

WORKERS = 4
DEADLINE_S = 30.0
FIXED_S = 0.3
"""What a pause may take besides steps."""
STEADY_STEPS = 5
GOALS = {
    "drain_deadlines_missed": Goal("<=", 0.0),
    "drain_pause_p95_steps": Goal("<=", 2.0),
    "drain_steps_redone": Goal("<=", 0.0),
    "samples_lost": Goal("<=", 0.0),
}


@dataclass(frozen=True, slots=True)
class Drain:
    """What one drain cost. Seconds.

    Attributes:
        left_s: from the drain until the node's raylet had ended.
        pause_s: the longest time between two committed steps meanwhile.
        step_s: median time of the steps before.
    """

    left_s: float
    pause_s: float
    step_s: float

    @property
    def pause_steps(self) -> float:
        """The pause in steps, without what it may take besides."""
        return (self.pause_s - FIXED_S) / self.step_s


def committed_at(directory: str) -> list[float]:
    """When each step was committed by the first of its workers (monotonic), in order."""
    first: dict[int, float] = {}
    for entries in read_journals(directory).values():
        for entry in entries:
            first[entry.step] = min(entry.when, first.get(entry.step, entry.when))
    return [first[step] for step in sorted(first)]


def steps_redone(directory: str) -> int:
    """Steps that some worker committed twice."""
    steps = [[entry.step for entry in entries] for entries in read_journals(directory).values()]
    return sum(len(each) - len(set(each)) for each in steps)


def drain_one(cluster: LocalCluster, running: Run, directory: str, chance: np.random.Generator) -> Drain:
    """Adds a node, and drains one on which a worker trains."""
    cluster.add_node()
    begun = len(committed_at(directory))
    wait_for(lambda: len(committed_at(directory)) > begun + STEADY_STEPS and has_spares(running, 1), 120)
    account = running.status()
    assert account is not None
    before = committed_at(directory)[-STEADY_STEPS - 1 :]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(before))
    member = str(chance.choice(account["world"]))
    node = account["nodes"][member]
    began = time.monotonic()
    cluster.drain_node(node, DEADLINE_S)
    wait_for(lambda: node not in cluster.node_ids(), 4 * DEADLINE_S)
    left = time.monotonic()
    wait_for(lambda: committed_at(directory)[-1] > left, 60)
    times = [at for at in committed_at(directory) if at > began - 2 * step_s]
    pause = max(b - a for a, b in itertools.pairwise(times))
    return Drain(left - began, pause, step_s)


def measure_drains(count: int, seed: int = 0) -> tuple[list[Drain], int, list[str]]:
    """So many drains of one run. Returns them, the steps that were redone, and what the audit of the run's record found."""
    chance = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory, LocalCluster(WORKERS + 1) as cluster:
        recovery = ft.RecoveryConfig(num_spares=1, preemption=("ray",))
        with training(Journaled(directory), "drains", directory, WORKERS, recovery, max_steps=1_000_000) as running:
            wait_for(lambda: has_spares(running, 1), 120)
            drains = [drain_one(cluster, running, directory, chance) for _ in range(count)]
        proof = audit(read_records(Path(directory) / "drains" / "events.jsonl"))
        found = [*proof.violations, *([f"{proof.samples_lost} samples lost"] if proof.samples_lost else [])]
        return drains, steps_redone(directory), found


def add_to(report: Report, drains: list[Drain], redone: int, found: list[str]) -> None:
    """The metrics of these drains."""
    report.add("drain_deadlines_missed", float(sum(drain.left_s > DEADLINE_S for drain in drains)), n=len(drains))
    report.add("drain_pause_p95_steps", [drain.pause_steps for drain in drains], statistic=p95_of)
    report.add("drain_steps_redone", float(redone))
    report.add("samples_lost", float(len(found)))
    for violation in found:
        report.note(f"AUDIT: {violation}")
    left, pause, step = ([getattr(d, name) for d in drains] for name in ("left_s", "pause_s", "step_s"))
    report.note(
        f"{len(drains)} drains: gone after median {statistics.median(left):.1f} s, at most {max(left):.1f} s; pause median "
        f"{statistics.median(pause):.2f} s, at most {max(pause):.2f} s; a step takes {statistics.median(step):.2f} s"
    )


def run(options: Options) -> Report:
    """All of it."""
    report = Report("drains", GOALS)
    add_to(report, *measure_drains(5 if options.quick else 100, options.seed))
    return report


if __name__ == "__main__":
    main(run, __doc__)
