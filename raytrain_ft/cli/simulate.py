"""`raytrain-ft simulate`: what failures will cost under each strategy, before a cluster is rented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from raytrain_ft.cli import arguments, output
from raytrain_ft.cli import simulation_views as views
from raytrain_ft.cli.simulation_file import Simulation, load
from raytrain_ft.errors import FTError
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.simulate import (
    Exponential,
    Failures,
    Job,
    Listed,
    Strategy,
    Uniform,
    Weibull,
    best_interval,
    compare,
    simulate,
)
from raytrain_ft.simulate import sweep_failures as sweep_mtbf
from raytrain_ft.simulate.calibrate import calibrate
from raytrain_ft.simulate.presets import jobs
from raytrain_ft.simulate.strategies import ONLY_GIVEN, Kind
from raytrain_ft.simulate.study import SEEDS, Sweep, sweep_intervals

console = output.console()
PRESETS = jobs()
POINTS = 15
"""Of a sweep."""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("simulate")
@click.argument("file", required=False, type=FILE)
@click.option("--from-run", type=RUN, help="A finished run: calibrates on its event log, and predicts that run.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A model of the papers, with the costs that they print.")
@click.option(
    "--strategy", "kinds", multiple=True, type=click.Choice(get_args(Kind)), help="Instead of the file's; repeatable."
)
@click.option("--every", type=click.IntRange(min=1), help="Steps between checkpoints, for all strategies.")
@click.option(
    "--mtbf",
    type=arguments.POSITIVE,
    help="Hours between failures of the whole cluster, instead of the file's failures.",
)
@click.option("--seeds", type=click.IntRange(min=1), show_default=str(SEEDS), help="Runs of each strategy.")
@click.option("--sweep", "sweeps", multiple=True, type=click.Choice(["interval", "mtbf"]), help="Vary this; repeatable.")
@click.option("--best-interval", "best", is_flag=True, help="Save as often as takes the least time, whatever --every says.")
@click.option("--plots", type=output.DIRECTORY, help="A directory: writes plots there.")
@click.option("--json", "json_path", type=output.FILE, help="A file: writes everything there.")
def simulate_command(
    file: Path | None,
    from_run: Path | None,
    preset: str | None,
    kinds: tuple[Kind, ...],
    every: int | None,
    mtbf: float | None,
    seeds: int | None,
    sweeps: tuple[str, ...],
    best: bool,
    plots: Path | None,
    json_path: Path | None,
) -> None:
    """Tells what failures will cost: time to finish, goodput, lost work, node hours.

    FILE is a job with its costs, strategies and failures, in YAML or JSON (docs/simulator.md). With --from-run these come
    from a finished run; with any other option but --json, what that job would have cost is told too, or otherwise. With
    --preset they are those of a model of the papers, which needs --mtbf.
    """
    if sum(source is not None for source in (file, from_run, preset)) != 1:
        raise click.UsageError("give one of a FILE, --from-run RUN and --preset NAME")
    if preset is not None and mtbf is None:
        raise click.UsageError("a preset says nothing of failures: give --mtbf, the hours between two of them")
    output.try_out(plots, json_path)
    try:
        if from_run is not None:
            what, more = _predict(from_run)
            if not (kinds or every or mtbf is not None or seeds or sweeps or best or plots):
                output.write(json_path, views.as_json(what.job, [], **more))
                return
        else:
            what, more = _of_the_papers(preset) if preset is not None else load(file or Path()), {}
        _study(_instead(what, kinds, every, mtbf), seeds or SEEDS, sweeps, best, plots, json_path, more)
    except FTError as error:
        raise click.ClickException(str(error)) from error


def _of_the_papers(preset: str) -> Simulation:
    """A model of the papers under this project's strategy for it, and no failures."""
    job = PRESETS[preset]
    return Simulation(job, (Strategy(kind="logging" if job.stages > 1 else "replication"),), Listed())


def _instead(what: Simulation, kinds: tuple[Kind, ...], every: int | None, mtbf: float | None) -> Simulation:
    """What is to be simulated instead of what the file or the run says."""
    strategies = what.strategies
    if kinds:
        strategies = tuple(strategy for kind in dict.fromkeys(kinds) for strategy in _of_kind(kind, what.strategies, every))
    if every:
        strategies = tuple(replace(strategy, every=every) for strategy in strategies)
    failures = what.failures if mtbf is None else Exponential(mtbf_s=mtbf * views.HOUR)
    return replace(what, strategies=strategies, failures=failures)


def _of_kind(kind: Kind, known: Sequence[Strategy], every: int | None) -> list[Strategy]:
    """Those that are known; or else a plain one, which is told another's interval only if it cannot do without."""
    lent = next((strategy.every for strategy in known if strategy.every is not None), None)
    plain = every or (lent if kind in ONLY_GIVEN else None)
    return [strategy for strategy in known if strategy.kind == kind] or [Strategy(kind=kind, every=plain)]


def _predict(run: Path) -> tuple[Simulation, dict[str, Any]]:
    """Predicts a finished run from its own costs and failures, and prints that beside what was measured."""
    path = run / "events.jsonl"
    if not path.exists():
        raise click.ClickException(f"{run} has no events.jsonl: give the directory of a run (storage_path/name)")
    known = calibrate(read_records(path))
    outcome = simulate(known.job, known.strategy, known.failures)
    deviation = outcome.seconds / known.measured_s - 1
    shown = Table(title=Text(f"{known.job.name}: predicted from its own costs"), show_header=False)
    rows = {
        "strategy": known.strategy.name,
        "failures": f"{len(known.failures.failures)}",
        "a step": views.in_time(known.job.step_s),
        "predicted": views.in_time(outcome.seconds),
        "measured": views.in_time(known.measured_s),
        "deviation": f"{deviation:+.1%}",
        **{f"  {kind}": views.in_time(seconds) for kind, seconds in outcome.lost_s.items() if seconds > 0.005},
    }
    for name, value in rows.items():
        output.row(shown, name, value)
    console.print(shown)
    if outcome.reason:
        console.print(f"the simulated run did not finish: {outcome.reason}", markup=False)
    more = {"predicted_s": outcome.seconds, "measured_s": known.measured_s, "deviation": deviation}
    return Simulation(known.job, (known.strategy,), known.failures), more


def _study(
    what: Simulation,
    seeds: int,
    sweeps: Sequence[str],
    best: bool,
    plots: Path | None,
    json_path: Path | None,
    more: dict[str, Any],
) -> None:
    job, strategies, failures = what.job, what.strategies, what.failures
    times = _times_between(job, failures) if "mtbf" in sweeps else []
    saving = [strategy for strategy in strategies if strategy.interval(job) is not None]
    if best or "interval" in sweeps:
        _tell_left_out([strategy.name for strategy in strategies if strategy not in saving], not saving)
    if best:
        with output.progress("best interval", len(saving)) as done:
            found = {strategy: best_interval(job, strategy, failures, seeds, done)[0] for strategy in saving}
        strategies = tuple(replace(strategy, every=found.get(strategy, strategy.every)) for strategy in strategies)
    with output.progress("runs", len(strategies) * seeds) as done:
        summaries = compare(job, strategies, failures, seeds, done)
    console.print(views.table(job, summaries))
    for reason in views.reasons(summaries):
        console.print(reason, markup=False)
    swept: list[Sweep] = []
    if "interval" in sweeps:
        points = sorted({round(point) for point in np.geomspace(max(1, job.steps // 20_000), max(2, job.steps // 50), POINTS)})
        with output.progress("intervals", len(saving) * len(points) * seeds) as done:
            swept.append(sweep_intervals(job, saving, failures, points, seeds, done))
    if times:
        assert isinstance(failures, Exponential | Weibull | Uniform)
        with output.progress("times between failures", len(strategies) * len(times)) as done:
            swept.append(sweep_mtbf(job, strategies, failures, times, seeds, done))
    for sweep in swept:
        console.print(views.sweep_table(sweep))
    output.write(json_path, views.as_json(job, summaries, swept, **more))
    if plots is not None:
        with output.told(plots):
            plots.mkdir(parents=True, exist_ok=True)
            views.plot_losses(job, summaries, plots / "losses.png")
            for sweep in swept:
                views.plot_sweep(job, sweep, plots / f"{sweep.variable.removesuffix('_s')}.png")
        console.print(f"plots are in {plots}", markup=False)


def _tell_left_out(names: Sequence[str], all_are: bool) -> None:
    """That the interval of these strategies cannot be varied.

    Raises:
        click.ClickException: they are all that there are.
    """
    lines = [f"{name} saves nothing: give it `every`, or --every" for name in names]
    if all_are:
        raise click.ClickException("\n".join(lines))
    for line in lines:
        output.warn(line)


def _times_between(job: Job, failures: Failures) -> list[float]:
    """Around what these failures have by themselves, seconds of the whole cluster.

    Raises:
        click.ClickException: they have no such time.
    """
    mean_s = failures.mean_s(job) if isinstance(failures, Exponential | Weibull | Uniform) else math.inf
    if not math.isfinite(mean_s):
        raise click.ClickException(
            "a sweep over mtbf needs failures of a distribution: exponential, weibull or uniform; if their number is given, "
            "at least 1"
        )
    return [float(point) for point in np.geomspace(mean_s / 8, mean_s * 8, POINTS)]
