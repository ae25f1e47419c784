"""What is left of training where workers die again and again, and what it costs to keep watch.

    python -m benchmarks.goodput [--quick] --json FILE

Four workers, of which one at random is killed at exponential intervals; drained nodes; 64 members that compute nothing; and
where time allows Ray Train's restart and Ray Train + torchft, on the same work: killed at the same moments, and with the same
interval of checkpoints as ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import control_plane, drains
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, p95_of
from benchmarks.ours import Paced, Task
from benchmarks.peers.share import ShareOf, Strikes, restart_share, torchft_share
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
CHECKPOINT_EVERY = 20
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
    """How long everything goes on.

    Attributes:
        run_s: seconds of each run. rounds: of runs for each mean time between failures, each struck at moments of its own: a
            single draw may be a freak. drains: how many. peers: whether there is time for them.
    """

    run_s: float
    rounds: int
    drains: int
    peers: bool

    @property
    def calm_s(self) -> float:
        """Of each undisturbed stretch, which is short beside the others where they are long."""
        return max(LEAST_CALM_S, self.run_s / 10)


QUICK = Lengths(run_s=30.0, rounds=1, drains=1, peers=False)  # four minutes in all
FULL = Lengths(run_s=240.0, rounds=3, drains=100, peers=True)


def kill_times(seed: int, mtbf: int, number: int, seconds: float) -> list[float]:
    """When a worker dies in the run of this number, in seconds from where training goes on: whoever is compared."""
    gaps = np.random.default_rng([seed, mtbf, number]).exponential(mtbf, size=20 + 10 * round(seconds / mtbf))
    return [at for at in np.cumsum(gaps).tolist() if at < seconds]


def scenario_of(name: str, seconds: float, kills: Sequence[float] = ()) -> Scenario:
    """A run of about so many seconds, in which one worker dies at each of these times."""
    return Scenario(
        name=name,
        workers=WORKERS,
        spares=SPARES,
        steps=round(seconds / STEP_S),
        batch=WORKERS * WORK.batch_per_worker,
        checkpoint_every=CHECKPOINT_EVERY,
        events=tuple(Event(action="kill", who=Who(count=1), when=When(seconds=at)) for at in kills),
    )


def shares(played: Played, steps_per_s: float, run_s: float, window_s: float) -> list[float]:
    """Of each stretch of `window_s`: steps committed / steps that the undisturbed run commits in that time. Only of the first
    `run_s`, as of others: no kill is drawn for later, and a rest without any would make up for what they cost."""
    times, steps = commits(played)
    seconds = min(times[-1] - times[0], run_s)
    marks = np.linspace(times[0], times[0] + seconds, max(2, round(seconds / window_s) + 1))
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
    """Runs for each mean time between failures, and undisturbed stretches before, between and after the rounds of them."""
    lost, paces = 0, []
    calm = scenario_of("undisturbed", lengths.run_s)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory, laptop(calm) as cluster:
        ground, storage = Laptop(cluster), Path(directory)
        # For the bits, which do not depend on how long a step takes.
        reference = finished(Runs(calm, Task(replace(WORK, pace_s=0.0)), ground, storage, quiet=True).play("reference"))
        paces.append(pace_of(report, ground, storage, lengths, len(paces)))
        runs: dict[int, list[Played]] = {mtbf: [] for mtbf in MTBFS}
        for number in range(lengths.rounds):
            for mtbf in MTBFS:
                kills = kill_times(seed, mtbf, number, lengths.run_s)
                scenario = scenario_of(f"mtbf-{mtbf}-{number}", lengths.run_s, kills)
                struck = Runs(scenario, Task(WORK), ground, storage, quiet=True)
                runs[mtbf].append(struck.play(scenario.name, Schedule(scenario, seed)))
            paces.append(pace_of(report, ground, storage, lengths, len(paces)))
        report.noise_floor = max(paces) / min(paces) - 1.0
        for mtbf, played in runs.items():
            lost += _add_share(report, mtbf, played, reference, float(np.median(paces)), lengths.run_s)
    report.add("samples_lost", float(lost))


def pace_of(report: Report, ground: Laptop, storage: Path, lengths: Lengths, number: int) -> float:
    """Steps per second that an undisturbed run commits."""
    calm = scenario_of("undisturbed", lengths.calm_s)
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


def _add_share(report: Report, mtbf: int, runs: Sequence[Played], reference: Played, steps_per_s: float, run_s: float) -> int:
    """Adds the share of these runs; returns the samples that their audits miss, promises that were broken included."""
    key, found, lost = f"committed_share_mtbf_{mtbf}", [], 0
    for played in runs:
        records = read_records(played.path / "events.jsonl")
        seconds = training_seconds(records, Clock.of(records, played.offsets))
        more = f"; {len(played.missed)} more were due when it ended" if played.missed else ""
        kills = f"{len(played.struck)} kills in {seconds:.1f} s, {committed(records)} steps{more}"
        measured_s = min(seconds, run_s)
        rest = f"; the share is of the first {run_s:g} s" if seconds > run_s else ""
        report.note(f"mean time between failures {mtbf} s: {kills}{rest}")
        if played.error is None and seconds:
            found += shares(played, steps_per_s, run_s, window_s=min(float(mtbf), measured_s / 5))
        proof = audit(records)
        broken = [*proof.violations, *violations(records, played, reference)]
        for violation in broken:
            report.note(f"AUDIT: {violation}")
        lost += proof.samples_lost + len(broken)
    failed = [f"a run failed after {len(played.struck)} kills: {played.error}" for played in runs if played.error is not None]
    if failed:
        report.absent(key, why="; ".join(failed)[:300])
    elif not any(played.struck for played in runs):
        report.absent(key, why="no kill was drawn: another seed, or longer runs")
    else:
        report.add(key, found, statistic=mean)
    return lost


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
            found: list[ShareOf] = []
            for number in range(lengths.rounds):
                kills = kill_times(seed, mtbf, number, lengths.run_s)
                found.append(measured(WORK, WORKERS, Strikes(kills, lengths.run_s, lengths.calm_s, CHECKPOINT_EVERY, seed)))
                report.note(f"{peer}, mean time between failures {mtbf} s: {found[-1]}")
            whole = [share.share for share in found if share.share is not None]
            if len(whole) == len(found) and any(share.kills for share in found):
                report.add(key, whole, statistic=mean)
            elif len(whole) == len(found):
                report.absent(key, why="no kill was drawn: another seed, or longer runs")
            else:
                report.absent(key, why="; ".join(share.why for share in found if share.share is None))


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
