"""What it costs to go on without redoing: workers killed at random phases of a step, and replicas that are put to sleep.

    python -m benchmarks.forward [--quick] --json FILE

Steps are paced: their computation sleeps, forward and backward, in proportion to a replica's samples. A pause is the longest
time between two committed steps, from the last before the kill to the third after it, so it holds the step that would have been
computed anyway.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray

import raytrain_ft as ft
from benchmarks import dormant
from benchmarks.drains import committed_at
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, p95_of
from benchmarks.ours import Run, Task, training
from benchmarks.recovery import CommitJournal, breakdown, wait_for
from benchmarks.slow import SlowWork
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE, supervisor_name

WORKERS = 4
BATCH = 12  # of a replica; divides among two, three and four
BUCKETS = {"bucket_bytes": 200_000, "first_bucket_bytes": 50_000}
KILLS_APART = 30  # steps, in which a replacement starts and joins
FOLLOWING = 3
FIXED_S = {"lossy": 0.3, "rollback": 0.5}
"""What a pause may take besides steps."""
PHASES = ("data", "forward", "backward", "reduce", "reduced", "update", "updated", "commit")
LIMITS = {"lossy": Goal("<=", 1.1), "rollback": Goal("<=", 2.0)}
"""Of pauses, in steps: of all kills, and of those that were met by the strategy itself."""
OWN_SHARE = Goal(">=", 0.25)
"""Of the kills, those that come between the first bucket and the last. In other phases nothing is lost, or nothing is left."""
GOALS = {
    **{f"{strategy}_pause_p95_steps": limit for strategy, limit in LIMITS.items()},
    **{f"{strategy}_own_pause_p95_steps": limit for strategy, limit in LIMITS.items()},
    **{f"{strategy}_own_share": OWN_SHARE for strategy in LIMITS},
    **{f"{strategy}_violations": Goal("<=", 0.0) for strategy in LIMITS},
    "suspend_latency_steps": Goal("<=", 1.0),
    "resume_latency_steps": Goal("<=", 1.0),
    "suspend_latency_p95_steps": REPORT_ONLY,
    "resume_latency_p95_steps": REPORT_ONLY,
    "first_step_awake_steps": REPORT_ONLY,
    **dormant.GOALS,
}


class Forward(Task):
    """That work, with a journal of committed steps."""

    def __init__(self, directory: str) -> None:
        super().__init__(SlowWork(num_parameters=200_000, batch_per_worker=BATCH))
        self._directory = directory

    def scheduler(self, optimizer: Any) -> CommitJournal:
        """No schedule: a journal."""
        return CommitJournal(self._directory)


# ---------------------------------------------------------------- kills


@dataclass(frozen=True, slots=True)
class Pauses:
    """What kills of one run cost. Seconds.

    Attributes:
        kills: (phase, pause, way) of each; the way is the strategy of its recovery, which redoes exactly what needs no loss.
        step_s: median time of a step in which nothing happened. other: what the recoveries of another way say of it.
        missed: faults that did not come about. phases: medians of the phases of the recoveries, in words. run_s: from the first
            committed step to the last.
    """

    kills: list[tuple[str, float, str]]
    step_s: float
    other: list[str]
    missed: int
    samples_lost: int
    violations: list[str]
    phases: str
    run_s: float


def faults(count: int, seed: int) -> list[ft.FailAt]:
    """So many kills, each phase in turn in an order that is drawn; where in a step, and of which rank, is drawn too."""
    chance = random.Random(seed)
    phases = list(itertools.chain.from_iterable(chance.sample(PHASES, len(PHASES)) for _ in range(-(-count // len(PHASES)))))
    return [
        ft.FailAt(
            phase=phase,
            step=KILLS_APART * (number + 1) + chance.randrange(4),
            rank=chance.randrange(2),  # there may be fewer than all
            bucket=chance.randrange(3) if phase in ("backward", "reduce") else None,
        )
        for number, phase in enumerate(phases[:count])
    ]


def pause_after(times: list[float], killed: float) -> float:
    """The longest time between two of these, from the last before the kill to the third after it."""
    at = next(index for index, when in enumerate(times) if when > killed)
    return max(b - a for a, b in itertools.pairwise(times[max(0, at - 1) : at + FOLLOWING]))


def way_of(fault: ft.FailAt, recoveries: list[dict[str, Any]]) -> str:
    """The strategy of the recovery of this kill, which is that of the nearest step: the next kill is many steps away."""
    assert fault.step is not None
    return min(recoveries, key=lambda recovery: abs(recovery["step"] - fault.step))["strategy"]


def measure_kills(strategy: Literal["lossy", "rollback"], count: int, seed: int) -> Pauses:
    """One run that is killed so many times; survivors go on at once, and are joined by a replacement later."""
    planned = faults(count, seed)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory, LocalCluster(WORKERS):
        recovery = ft.RecoveryConfig(
            strategy=strategy,
            update="wait_free" if strategy == "rollback" else "barrier",
            num_spares=0,
            replacement="shrink",
        )
        settings: dict[str, Any] = {"max_steps": planned[-1].step + KILLS_APART // 2, "faults": planned, **BUCKETS}
        with training(Forward(directory), strategy, directory, (1, WORKERS), recovery, **settings) as run:
            run.result(timeout_s=60 + count * KILLS_APART * 1.5)
        records = read_records(run.directory / "events.jsonl")
        markers = [(fault, run.directory / "faults" / fault.name) for fault in planned]
        struck = [(fault, float(path.read_text().split()[0])) for fault, path in markers if path.exists()]
        times = committed_at(directory)
    found = [r for r in records if r["event"] == "Recovery" and r["lost"]]
    proof = audit(records)
    return Pauses(
        kills=[(fault.phase, pause_after(times, killed), way_of(fault, found)) for fault, killed in struck],
        step_s=statistics.median(b - a for a, b in itertools.pairwise(times)),
        other=[f"{r['strategy']}: {r['reason']}"[:120] for r in found if r["strategy"] != strategy],
        missed=count - len(struck),
        samples_lost=proof.samples_lost,
        violations=list(proof.violations),
        phases=breakdown(records),
        run_s=times[-1] - times[0],
    )


def add_kills(report: Report, strategy: Literal["lossy", "rollback"], count: int, seed: int) -> None:
    """The metric of a strategy."""
    pauses = measure_kills(strategy, count, seed)
    costs = [((seconds - FIXED_S[strategy]) / pauses.step_s, way) for _, seconds, way in pauses.kills]
    own = [steps for steps, way in costs if way == strategy]
    report.add(f"{strategy}_pause_p95_steps", [steps for steps, _ in costs], statistic=p95_of)
    if own:
        report.add(f"{strategy}_own_pause_p95_steps", own, statistic=p95_of)
    else:
        report.absent(f"{strategy}_own_pause_p95_steps", why=f"none of {count} kills was met by it")
    report.add(f"{strategy}_own_share", len(own) / count, n=count)
    report.add(f"{strategy}_violations", float(len(pauses.violations)), n=count)
    by_phase = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds, _ in pauses.kills)
    report.note(
        f"{strategy}: a step takes {pauses.step_s:.3f} s; pauses {by_phase}; {pauses.missed} kills missed; "
        f"{pauses.samples_lost} samples lost and listed; {pauses.run_s:.0f} s in all"
    )
    report.note(f"  medians of the phases: {pauses.phases}")
    for way in pauses.other:
        report.note(f"  not {strategy}, but {way}")
    for violation in pauses.violations:
        report.note(f"AUDIT: {violation}")


# ---------------------------------------------------------------- sleep


@contextmanager
def calm(directory: str, name: str) -> Iterator[tuple[Run, str]]:
    """An undisturbed run, and the directory of its journals."""
    journals = Path(directory) / f"journals-{name}"
    journals.mkdir()
    recovery = ft.RecoveryConfig(num_spares=0)
    task = Forward(str(journals))
    with training(task, name, directory, WORKERS, recovery, max_steps=1_000_000, **BUCKETS) as run:
        wait_for(lambda: len(committed_at(str(journals))) > 5, 120)
        yield run, str(journals)


def steps_per_s(journals: str, count: int) -> float:
    """How many steps a second are committed, over the next so many."""
    before = len(committed_at(journals))
    wait_for(lambda: len(committed_at(journals)) > before + count, 30 + 3 * count)
    times = committed_at(journals)[before : before + count + 1]
    return count / (times[-1] - times[0])


def dormancies(run: Run) -> list[dict[str, Any]]:
    """The supervisor's records of who fell asleep or woke."""
    return [record for record in read_records(run.directory / "events.jsonl") if record["event"] == "Dormant"]


def ask(run: Run, journals: str, asleep: bool, at_once: bool) -> float:
    """Asks that the last rank sleep or wake; returns the seconds until the step boundary from which on it does."""
    before = len(dormancies(run))
    supervisor: Any = ray.get_actor(supervisor_name(run.name), namespace=NAMESPACE)
    asked = time.monotonic()
    ray.get(supervisor.sleep.remote(WORKERS - 1, asleep, at_once), timeout=30)
    wait_for(lambda: len(dormancies(run)) > before, 60)
    return committed_at(journals)[dormancies(run)[-1]["step"] - 1] - asked


@dataclass(slots=True)
class Naps:
    """What a replica that sleeps and wakes again and again was seen to do. Latencies in seconds; paces in steps per second.

    Attributes:
        suspended: until it slept, of requests at a step's end (False) and at once (True). resumed: until it woke.
        awake, dormant: the pace of all, and of the others while it sleeps. first: seconds of the step in which it takes part
            again: the others wait there until it is up to date.
    """

    suspended: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    resumed: list[float] = field(default_factory=list)
    awake: list[float] = field(default_factory=list)
    dormant: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def take_naps(naps: Naps, directory: str, number: int, rounds: int, chance: random.Random) -> None:
    """One run with requests at random phases."""
    with calm(directory, f"sleep-{number}") as (run, journals):
        step_s = 1 / steps_per_s(journals, 10)
        for request in range(rounds):
            time.sleep(chance.uniform(2.0, 3.0) * step_s)
            at_once = request % 4 == 3
            naps.suspended[at_once].append(ask(run, journals, True, at_once))
            naps.dormant.append(steps_per_s(journals, 10))
            time.sleep(chance.uniform(0.0, 1.0) / naps.dormant[-1])
            naps.resumed.append(ask(run, journals, False, False))
            naps.awake.append(steps_per_s(journals, 5))
            step, times = dormancies(run)[-1]["step"], committed_at(journals)
            naps.first.append(times[step] - times[step - 1])


def measure_sleep(report: Report, turns: int, rounds: int, seed: int) -> None:
    """How long it takes until a replica sleeps, and until it takes part again."""
    naps, chance = Naps(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory, LocalCluster(WORKERS):
        for number in range(turns):
            take_naps(naps, directory, number, rounds, chance)
    step_s = 1 / statistics.median(naps.awake)
    latencies = {
        "suspend_latency": [seconds / step_s for seconds in naps.suspended[False]],
        "resume_latency": [seconds * statistics.median(naps.dormant) for seconds in naps.resumed],
    }
    for name, steps in latencies.items():
        report.add(f"{name}_steps", steps)
        report.add(f"{name}_p95_steps", steps, statistic=p95_of)
    report.add("first_step_awake_steps", [seconds / step_s for seconds in naps.first])
    at_rest, at_once = (statistics.median(naps.suspended[way]) for way in (False, True))
    report.note(
        f"sleep: a step takes {step_s:.3f} s with {WORKERS} awake, {1 / statistics.median(naps.dormant):.3f} s with one "
        f"asleep; falls asleep in median {at_rest:.3f} s ({at_once:.3f} s if at once), "
        f"wakes in {statistics.median(naps.resumed):.3f} s"
    )


def run(options: Options) -> Report:
    """All of it."""
    report = Report("forward", GOALS)
    kills = 2 if options.quick else 32
    measure_sleep(report, *((1, 4) if options.quick else (4, 15)), options.seed)
    dormant.add_all(report, quick=options.quick)
    add_kills(report, "lossy", kills, options.seed)
    add_kills(report, "rollback", kills, options.seed + 1)
    return report


if __name__ == "__main__":
    main(run, __doc__)
