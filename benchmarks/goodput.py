"""What is left of training where workers die again and again, and what it costs to keep watch.

    python -m benchmarks.goodput [--quick] --json FILE

Four workers, of which one at random is killed at exponential intervals; drained nodes; 64 members that compute nothing; and
where time allows the same failures for Ray Train's restart and for Ray Train + torchft, on the same work.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import control_plane, drains
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, p95_of
from benchmarks.ours import Paced, Task
from benchmarks.peers.share import ShareOf, restart_share, torchft_share
from raytrain_ft.drill.grounds import Laptop, laptop
from raytrain_ft.drill.measure import Clock, committed, training_seconds, violations
from raytrain_ft.drill.played import Played
from raytrain_ft.drill.runs import Runs
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Event, Scenario, When, Who

WORKERS = 4
SPARES = 2
WORK = Paced(num_parameters=200_000, batch_per_worker=16, pace_s=0.25)
STEP_S = 0.27  # what a step takes on a quick machine, to choose how many there are: no run is shorter than it should be
MTBFS = (15, 60)
LEAST_CALM_S = 10.0  # of an undisturbed stretch
GOALS = {
    "committed_share_mtbf_60": Goal(">=", 0.95),
    "committed_share_mtbf_15": Goal(">=", 0.85),
    "samples_lost": Goal("<=", 0.0),
    "drain_deadlines_missed": Goal("<=", 0.0),
    "drain_pause_p95_steps": drains.GOALS["drain_pause_p95_steps"],
    "control_plane_ms_per_step_64": Goal("<=", 1.0),
    "failure_handled_s_64": Goal("<=", 2.0),
    **{f"{peer}_committed_share_mtbf_{mtbf}": REPORT_ONLY for peer in ("ray_train", "torchft") for mtbf in MTBFS},
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long everything goes on: seconds of each run, drains, and whether there is time for peers."""

    run_s: float
    drains: int
    peers: bool


QUICK = Lengths(run_s=30.0, drains=1, peers=False)  # four minutes in all
FULL = Lengths(run_s=900.0, drains=100, peers=True)


def scenario_of(mtbf: int | None, seconds: float) -> Scenario:
    """A run of about so many seconds, whose workers die so often. None: undisturbed."""
    kills = () if mtbf is None else (Event(action="kill", who=Who(count=1), when=When(mtbf=float(mtbf))),)
    return Scenario(
        name=f"mtbf-{mtbf}" if mtbf is not None else "undisturbed",
        workers=WORKERS,
        spares=SPARES,
        steps=round(seconds / STEP_S),
        batch=WORKERS * WORK.batch_per_worker,
        checkpoint_every=None,
        events=kills,
    )


def shares(played: Played, steps_per_s: float, window_s: float) -> list[float]:
    """Of each stretch of so many seconds: steps committed / steps that the undisturbed run commits in that time."""
    times, steps = commits(played)
    marks = np.linspace(times[0], times[-1], max(2, round((times[-1] - times[0]) / window_s) + 1))
    reached = np.interp(marks, times, steps)
    return (np.diff(reached) / np.diff(marks) / steps_per_s).tolist()


def commits(played: Played) -> tuple[list[float], list[float]]:
    """When so many steps were committed, from the moment at which it trains: times in seconds, and steps."""
    records = read_records(played.path / "events.jsonl")
    clock = Clock.of(records, played.offsets)
    times = [next(clock.real(r["at"]) for r in records if r["event"] == "State" and r["state"] == "RUNNING")]
    steps = [float(min(r["first_step"] for r in records if r["event"] == "StepsCommitted"))]
    for record in records:
        if record["event"] == "StepsCommitted" and record["stop_step"] > steps[-1]:
            times.append(max(times[-1], clock.real(record["at"])))
            steps.append(record["stop_step"])
    return times, steps


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """For the harness: the mean along its axis."""
    return np.mean(values, axis=axis)


def measure_ours(report: Report, lengths: Lengths, seed: int) -> None:
    """One run for each mean time between failures, and undisturbed stretches before, between and after them."""
    lost, paces = 0, []
    calm = scenario_of(None, lengths.run_s)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory, laptop(calm) as cluster:
        ground, storage = Laptop(cluster), Path(directory)
        # For the bits, which do not depend on how long a step takes.
        reference = finished(Runs(calm, Task(replace(WORK, pace_s=0.0)), ground, storage, quiet=True).play("reference"))
        paces.append(pace_of(report, ground, storage, lengths, len(paces)))
        runs = []
        for mtbf in MTBFS:
            scenario = scenario_of(mtbf, lengths.run_s)
            runs.append(Runs(scenario, Task(WORK), ground, storage, quiet=True).play(scenario.name, Schedule(scenario, seed)))
            paces.append(pace_of(report, ground, storage, lengths, len(paces)))
        report.noise_floor = max(paces) / min(paces) - 1.0
        for mtbf, played in zip(MTBFS, runs, strict=True):
            lost += _add_share(report, mtbf, played, reference, float(np.median(paces)))
    report.add("samples_lost", float(lost))


def pace_of(report: Report, ground: Laptop, storage: Path, lengths: Lengths, number: int) -> float:
    """Steps per second that an undisturbed run commits, which is a tenth as long as the others where they are long."""
    calm = scenario_of(None, max(LEAST_CALM_S, lengths.run_s / 10))
    played = finished(Runs(calm, Task(WORK), ground, storage, quiet=True).play(f"undisturbed-{number}"))
    times, steps = commits(played)
    count, seconds = steps[-1] - steps[1], times[-1] - times[1]  # between the first commit and the last
    report.note(f"undisturbed: {count:.0f} steps in {seconds:.1f} s, {seconds / count:.4f} s each")
    return count / seconds


def finished(played: Played) -> Played:
    """It, unless it failed: then its error is raised."""
    if played.error is not None:
        raise played.error
    return played


def _add_share(report: Report, mtbf: int, played: Played, reference: Played, steps_per_s: float) -> int:
    """Adds a run's share; returns the samples that the audit misses, promises that were broken included."""
    key = f"committed_share_mtbf_{mtbf}"
    records = read_records(played.path / "events.jsonl")
    seconds = training_seconds(records, Clock.of(records, played.offsets))
    struck = len(played.struck)
    if played.error is not None:
        report.absent(key, why=f"the run failed after {struck} kills: {played.error}"[:300])
    elif not struck:
        report.absent(key, why=f"no kill was drawn within {seconds:.0f} s: another seed, or a longer run")
    else:
        share = shares(played, steps_per_s, window_s=min(float(mtbf), seconds / 5))
        report.add(key, share, statistic=mean)
    more = f"; {played.dropped} more were drawn and could not strike" if played.dropped else ""
    report.note(f"mean time between failures {mtbf} s: {struck} kills in {seconds:.1f} s, {committed(records)} steps{more}")
    proof = audit(records)
    broken = [*proof.violations, *violations(records, played, reference)]
    for violation in broken:
        report.note(f"AUDIT: {violation}")
    return proof.samples_lost + len(broken)


def measure_drains(report: Report, count: int, seed: int) -> None:
    """Drains with a deadline; see `benchmarks.drains`, which says more of them."""
    found, redone, broken = drains.measure_drains(count, seed)
    missed = sum(drain.left_s > drains.DEADLINE_S for drain in found)
    report.add("drain_deadlines_missed", float(missed), n=len(found))
    report.add("drain_pause_p95_steps", [drain.pause_steps for drain in found], statistic=p95_of)
    slowest = max(drain.left_s for drain in found)
    report.note(
        f"{len(found)} drains: the slowest gone after {slowest:.1f} s; {redone} steps redone; audit: {broken or 'sound'}"
    )


def measure_peers(report: Report, lengths: Lengths, seed: int) -> None:
    """The same failures for others."""
    for peer, measured in (("torchft", torchft_share), ("ray_train", restart_share)):
        for mtbf in MTBFS:
            key = f"{peer}_committed_share_mtbf_{mtbf}"
            if not lengths.peers:
                report.absent(key, why="--quick leaves this out")
                continue
            found: ShareOf = measured(WORK, WORKERS, float(mtbf), lengths.run_s, seed)
            if found.share is None:
                report.absent(key, why=found.why)
            else:
                report.add(key, found.share, n=found.kills)
                report.note(f"{peer}, mean time between failures {mtbf} s: {found.kills} kills in {found.seconds:.0f} s")


def run(options: Options) -> Report:
    """All of it."""
    report = Report("goodput", GOALS)
    lengths = QUICK if options.quick else FULL
    with report.until_interrupted():
        control_plane.add_to(report, options.quick)
        measure_ours(report, lengths, options.seed)
        measure_drains(report, lengths.drains, options.seed)
        measure_peers(report, lengths, options.seed)
    return report


if __name__ == "__main__":
    main(run, __doc__)
