"""Is training beside a replica that sleeps as fast as in a group that never had it? Three live runs take turns.

A run of four, one of which sleeps, and two runs of three (which say how far a pace differs from itself) train the same global
batch, on one node. Part of `benchmarks.forward`; alone: `python -m benchmarks.dormant`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from benchmarks.harness import Goal, Options, Report, main, total_ratio
from benchmarks.models import Work
from benchmarks.ours import PATIENT, Run, Timed, training
from benchmarks.recovery import wait_for
from benchmarks.slow import SlowWork
from benchmarks.turns import BlockTimes, Turns, read_blocks
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE, supervisor_name

WORKERS = 4
SIDES = ("smaller", "asleep", "smaller again")
BUCKETS = {"bucket_bytes": 200_000, "first_bucket_bytes": 50_000}
BEGIN_IN = 30
"""Steps from which on all clocks of a side tick: by then each of its workers has heard of it."""
MARGIN = 0.995
"""No interval shows that two things are equal: it must reach 1, and may not go further down than this."""
GOALS = {
    f"dormant_{what}_{size}": goal
    for size in ("small", "large")
    for what, goal in (("throughput_ratio_vs_smaller_group", Goal(">=", MARGIN)), ("is_slower", Goal("==", 0.0)))
}


class Clocked(Timed):
    """Takes turns from the step on that a file names, which comes in the midst of training."""

    def __init__(self, work: Work, turns: Turns, side: str, plan: tuple[int, int]) -> None:
        super().__init__(work, turns, side, plan)
        self._begin = Path(turns.directory, f"{side}.begin")
        self._steps = 0
        self._from: int | None = None

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """Asked for once a step by all who are awake."""
        self._steps += 1
        if self._from is None and self._begin.exists():
            self._from = int(self._begin.read_text())
        if self._from is None or self._steps < self._from:
            return self.work.loss(output, batch[1])
        return super().loss(output, batch)


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters of the model, seconds that a sample takes, how often all runs begin anew, blocks each time, and steps of each.

    Two runs of the same kind differ from each other by some tenths of a per cent for as long as they live: one set of runs, be
    it measured for hours, could not tell that from a difference between the kinds.
    """

    num_parameters: int
    sample_s: float
    sets: int
    blocks: int
    steps: int


def records(run: Run, event: str) -> list[dict[str, Any]]:
    """Those of one kind in a run's log so far."""
    log = run.directory / "events.jsonl"
    return [record for record in read_records(log) if record["event"] == event] if log.exists() else []


def committed(run: Run) -> int:
    """How many steps a run has committed, as far as its log says."""
    return max((record["stop_step"] for record in records(run, "StepsCommitted")), default=0)


def begin(run: Run, turns: Turns, side: str) -> None:
    """Lets a side's clocks tick from a step on that nobody has come to."""
    wait_for(lambda: committed(run) > 2, 120)
    path = Path(turns.directory, f"{side}.begin")
    unfinished = path.with_suffix(".new")
    unfinished.write_text(str(committed(run) + BEGIN_IN))
    unfinished.rename(path)


def fall_asleep(run: Run) -> None:
    """The last rank sleeps, and the others train without it."""
    wait_for(lambda: committed(run) > 2, 120)
    supervisor: Any = ray.get_actor(supervisor_name(run.name), namespace=NAMESPACE)
    ray.get(supervisor.sleep.remote(WORKERS - 1, True, False), timeout=30)
    wait_for(lambda: bool(records(run, "Parted")), 60)


@contextmanager
def runs(case: Case, turns: Turns, directory: str) -> Iterator[list[Run]]:
    """All sides, each on its way to its first block."""
    with ExitStack() as stack:
        found = []
        for side, workers in zip(SIDES, (WORKERS - 1, WORKERS, WORKERS - 1), strict=True):
            batch = 12 * WORKERS // workers
            work = SlowWork(num_parameters=case.num_parameters, batch_per_worker=batch, sample_s=case.sample_s)
            task = Clocked(work, turns, side, (case.blocks + 1, case.steps))  # nobody trains beside the last block of another
            name = side.replace(" ", "-")
            found.append(stack.enter_context(training(task, name, directory, workers, PATIENT, max_steps=1_000_000, **BUCKETS)))
        fall_asleep(found[1])
        for run, side in zip(found, SIDES, strict=True):
            begin(run, turns, side)
        yield found


def measure(case: Case) -> dict[str, list[BlockTimes]]:
    """The blocks of each side, without the first, in which it warms up."""
    sides = [(side, WORKERS - 1) for side in SIDES]
    with (
        tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory,
        Turns.create(sides, timeout_s=600.0) as turns,
        LocalCluster(1, cpus_per_node=3 * WORKERS),  # each node has agents, which want a share of two cores, too
        runs(case, turns, directory) as found,
    ):
        last = [Path(turns.directory, f"{SIDES[-1]}.{case.blocks - 1}.{rank}.times") for rank in range(WORKERS - 1)]
        while not all(path.exists() for path in last):
            if any(why := [run.why_ended() for run in found]):
                raise RuntimeError(f"a run ended: {why}")
            time.sleep(0.5)
        blocks = {side: read_blocks(turns, side, case.blocks)[1:] for side in SIDES}
        turns.stop("all is measured")
        return blocks


def add(report: Report, size: str, case: Case) -> None:
    """The metrics of a case."""
    sets = [measure(case) for _ in range(case.sets)]
    # of each set all steps at once: what runs of one set have in common is no more certain for having been looked at often
    once, asleep, again = ([[step for block in found[side] for step in block.rank0] for found in sets] for side in SIDES)
    both = [one + other for one, other in zip(once, again, strict=True)]
    ratio = total_ratio(both, asleep)
    report.add(f"dormant_throughput_ratio_vs_smaller_group_{size}", ratio)
    report.add(f"dormant_is_slower_{size}", float(ratio.high < 1.0))
    same = total_ratio(once, again)
    report.noise_floor = max(1.0 - same.low, same.high - 1.0, report.noise_floor or 0.0)
    step_s = sorted(step for block in both for step in block)
    report.note(
        f"{size}: {4 * case.num_parameters / 1e6:.1f} MB of gradients, steps of {step_s[len(step_s) // 2]:.3f} s; the smaller "
        f"group against itself {same.value:.4f} [{same.low:.4f}, {same.high:.4f}]"
    )


def add_all(report: Report, *, quick: bool) -> None:
    """Of a small and a large model."""
    sets, blocks = (2, 5) if quick else (8, 9)
    add(report, "small", Case(200_000, 0.02, sets, blocks, 12))
    # The pace of large gradients drifts by some per cent within seconds: short turns meet the same of it.
    add(report, "large", Case(3_000_000, 0.006, 2 * sets, 7 * blocks, 4))


def run(options: Options) -> Report:
    """All of it."""
    report = Report("dormant", GOALS)
    add_all(report, quick=options.quick)
    return report


if __name__ == "__main__":
    main(run, __doc__)
