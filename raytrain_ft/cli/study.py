"""`raytrain-ft study`: what lossy forward and rollback do to a model, as in Nicolae et al., section IV."""

from __future__ import annotations

from pathlib import Path

import click

from raytrain_ft.cli import output
from raytrain_ft.cli import study_views as views
from raytrain_ft.cli.study_file import load_plan, quick
from raytrain_ft.errors import FTError
from raytrain_ft.study import ModelStudy, Plan, run

console = output.console()
DEFAULT = Plan(
    name="digits",
    models=(
        ModelStudy(model="resnet", batch=32, lr=0.05, at=(20, 50, 150, 300)),
        ModelStudy(model="nt3", batch=32, lr=0.1, at=(40, 100, 300)),
    ),
)


@click.command("study")
@click.argument("scenario", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--quick", "is_quick", is_flag=True, help="Two trainings of each model, one early point: to see that it runs.")
@click.option("--plots", type=output.DIRECTORY, help="A directory: writes plots there.")
@click.option("--json", "json_path", type=output.FILE, help="A file: writes everything there.")
def study_command(scenario: Path | None, is_quick: bool, plots: Path | None, json_path: Path | None) -> None:
    """Cuts mini-batches in the middle of back-propagation, and compares what each strategy makes of them.

    SCENARIO is a YAML file (docs/study.md); without one, both models are studied at several points of their training. Workers
    are emulated in this process: no cluster is needed.
    """
    output.try_out(plots, json_path)
    try:
        plan = load_plan(scenario) if scenario is not None else DEFAULT
        plan = quick(plan) if is_quick else plan
        with output.progress(plan.name, plan.count) as done:
            results = run(plan, done)
    except FTError as error:
        raise click.ClickException(str(error)) from error
    console.width = output.WIDE  # a narrow terminal wraps lines, which is better than numbers on two of them
    for table in views.tables(results):
        console.print(table)
    output.write(json_path, views.as_json(results))  # first, for it is all that was found, and a plot may fail
    if plots is not None:
        with output.told(plots):
            views.plot(results, plots)
        console.print(f"plots are in {plots}", markup=False)
