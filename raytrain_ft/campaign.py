"""A seeded campaign of kills: real processes, real SIGKILL, at random moments.

    python -m raytrain_ft.campaign --kills 200 --mtbf 3 --seed 0 [--stages 3]

Every worker process is fair game at any moment, in whatever phase of a step or of a recovery it is, spares too; now and then
the supervisor or a whole node goes. Runs follow one another until the kills are used up; each must end with a record that the
history checker finds sound, and bit-equal to the undisturbed run: with `--update wait_free` unless an update had to be undone.
It is a drill that is repeated: one scenario, many seeds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from raytrain_ft.cli import arguments
from raytrain_ft.drill.faults import task_of
from raytrain_ft.drill.grounds import Laptop, laptop
from raytrain_ft.drill.measure import measure
from raytrain_ft.drill.numbers import Report
from raytrain_ft.drill.played import Played
from raytrain_ft.drill.runs import Runs
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.policy.units import counted
from raytrain_ft.scenario import Event, Scenario, When, Who

MICRO_BATCHES = 4
"""Of a step, in a pipeline."""
SHARES = {"worker": 0.85, "supervisor": 0.1, "node": 0.05}
"""How often each kind of victim is drawn."""
SURE = 7
"""Of a kind that should have been struck so often, none was by chance in one campaign of a thousand."""
FRUITLESS = 100
"""Recoveries in a row without a step, after which a run gives up. It is struck about as often as it can recover: ten in a row,
where runs give up by default, are chance here, and a hundred are a recovery that comes to nothing."""


def scenario_of(mtbf: float, steps: int, workers: int, stages: int, update: str = "barrier") -> Scenario:
    """The campaign's scenario: three sources of kills, as often as their shares say, each at exponential intervals."""

    def every(kind: str) -> When:
        return When(mtbf=mtbf / SHARES[kind])

    return Scenario(
        name="campaign",
        workers=workers,
        stages=stages,
        micro_batches=MICRO_BATCHES if stages > 1 else None,
        nodes=workers + 3,
        spares=2,
        steps=steps,
        update=update,
        batch=48,
        max_fruitless_recoveries=FRUITLESS,
        bucket_bytes=32_768,
        first_bucket_bytes=8_192,
        events=(
            Event(action="kill", who=Who(role="any"), when=every("worker")),
            Event(action="kill", who=Who(role="supervisor"), when=every("supervisor")),
            Event(action="kill_node", who=Who(role="any"), when=every("node"), lasts=0),
        ),
    )


@click.command()
@click.option("--kills", type=arguments.WHOLE, default=200, show_default=True, help="Victims in all.")
@click.option("--mtbf", type=arguments.POSITIVE, default=3.0, show_default=True, help="Mean time between kills, seconds.")
@click.option("--seed", default=0, show_default=True, help="Of the victims and moments.")
@click.option("--steps", type=arguments.WHOLE, default=400, show_default=True, help="Steps of each run.")
@click.option("--workers", type=arguments.WHOLE, default=3, show_default=True, help="Workers of a run.")
@click.option("--stages", type=arguments.WHOLE, default=1, show_default=True, help="Stages of a pipeline; divides the workers.")
@click.option("--update", type=click.Choice(["barrier", "wait_free"]), default="barrier", show_default=True)
def main(kills: int, mtbf: float, seed: int, steps: int, workers: int, stages: int, update: str) -> None:
    """A seeded campaign of kills; exits non-zero at any violation."""
    scenario = scenario_of(mtbf, steps, workers, stages, update)
    storage = Path(tempfile.mkdtemp(prefix="raytrain_ft-campaign-"))
    reports: list[Report] = []
    with laptop(scenario) as cluster:
        runs = Runs(scenario, task_of(scenario), Laptop(cluster), storage, quiet=True)
        reference = runs.play("undisturbed")
        if reference.error is not None:
            raise reference.error
        print(f"records in {storage}", flush=True)
        for name, played, left in _played(runs, scenario, kills, seed):
            reports.append(_strictly(measure(scenario, "local", played, reference), update))
            _tell(name, played, reports[-1], left)
    killed = Counter(list(SHARES)[strike.event] for report in reports for strike in report.strikes)
    spared = [kind for kind, share in SHARES.items() if not killed[kind] and share * killed.total() >= SURE]
    broken = sum(len(report.violations) + bool(report.failure) for report in reports) + len(spared)
    shares = [report.goodput for report in reports]
    played = f"{counted(killed.total(), 'kill')} ({dict(killed)}) in {counted(len(reports), 'run')}"
    for kind in spared:
        print(f"  VIOLATION no {kind} was ever struck, so nothing was shown of one", flush=True)
    print(f"{played}; {counted(broken, 'violation')}")
    print(f"committed steps, as a share of what an undisturbed run commits in the same time: {sum(shares) / len(shares):.1%}")
    sys.exit(1 if broken else 0)


def _played(runs: Runs, scenario: Scenario, kills: int, seed: int) -> Iterator[tuple[str, Played, int]]:
    """One run after the other, and the kills that are left after it, until none is. A run that fails before anything was done
    to it is the last one: so would the next, and no kill would ever be used up."""
    number, left, failed = 0, kills, False
    while left > 0 and not failed:
        number += 1
        name = f"run-{number}"
        played = runs.play(name, Schedule(scenario, f"{seed} {name}"), most=left)
        left -= len(played.struck)
        failed = played.error is not None and not played.struck
        yield name, played, left


def _strictly(report: Report, update: str) -> Report:
    """A difference counts, whatever guarantee a recovery told of: here all can be exact, but where an update is undone."""
    if report.bit_equal is not False or report.violations or update != "barrier":
        return report
    return replace(report, violations=("I3 the final state differs from the undisturbed run's",))


def _tell(name: str, played: Played, report: Report, left: int) -> None:
    median = "none" if report.pauses.p50 is None else f"{report.pauses.p50:.2f} s"
    equal = {True: "bit-equal", False: "NOT bit-equal", None: "did not end"}[report.bit_equal]
    recovered = counted(report.pauses.count, "recovery", "recoveries")
    print(f"{name}: {recovered} (median {median}), {equal}, {counted(left, 'kill')} left", flush=True)
    for violation in (*report.violations, *([report.failure] if played.error is not None else [])):
        print(f"  VIOLATION {violation}", flush=True)


if __name__ == "__main__":
    main()
