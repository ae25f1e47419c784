"""`raytrain-ft drill`: rehearses a scenario on a laptop cluster or on a running cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from raytrain_ft.errors import FTError
from raytrain_ft.scenario import Scenario

FAILED, REFUSED = 1, 2
"""Exit codes: a threshold was not kept; nothing was done."""


@click.command("drill")
@click.argument("scenario", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--on", "place", type=click.Choice(["local", "cluster"]), default="local", show_default=True)
@click.option("--address", help="Of the running cluster; default: as Ray finds it.")
@click.option(
    "--yes-break-this-cluster",
    "confirmed",
    metavar="ADDRESS",
    help="Needed with --on cluster: the address of the cluster whose processes and nodes may be killed.",
)
@click.option("--storage-path", type=click.Path(file_okay=False, path_type=Path), help="For the records; every node sees it.")
@click.option("--quiet", is_flag=True, help="Show nothing but the report.")
def drill_command(
    scenario: Path, place: str, address: str | None, confirmed: str | None, storage_path: Path | None, quiet: bool
) -> None:
    """Rehearses SCENARIO, a YAML file, and says whether its thresholds were kept.

    The job is trained twice, undisturbed and struck. Exit code 0: all thresholds kept; 1: not; 2: refused, nothing was done.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        passed = _drill(Scenario.load(scenario), place, address, confirmed, storage_path, quiet, console)
    except FTError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(REFUSED)
    sys.exit(0 if passed else FAILED)


def _drill(
    scenario: Scenario,
    place: str,
    address: str | None,
    confirmed: str | None,
    storage: Path | None,
    quiet: bool,
    console: Console,
) -> bool:
    if place != "cluster" and (address or confirmed):
        raise click.UsageError(f"--address and --yes-break-this-cluster go with --on cluster, not with --on {place}")
    from raytrain_ft.drill import drill, report

    if place == "local":
        found = drill(scenario, storage_path=storage, quiet=quiet)
    else:
        import ray

        from raytrain_ft.drill.grounds import Running

        ray.init(address=address or "auto", log_to_driver=False)
        ground = Running(confirmed)
        try:
            found = drill(scenario, ground, storage_path=storage, quiet=quiet)
        finally:
            ground.close()
    report.show(found, console)
    return found.passed
