"""`raytrain-ft drill`: rehearses a scenario on a laptop cluster, on a running cluster, or in the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import ray
from ray.exceptions import RayError

from raytrain_ft.cli import output
from raytrain_ft.drill import Report, drill
from raytrain_ft.drill.grounds import Running
from raytrain_ft.drill.predict import known_job, rehearse
from raytrain_ft.drill.report import show
from raytrain_ft.errors import ConfigError, FTError
from raytrain_ft.runtime.placement import knock, other_versions
from raytrain_ft.scenario import Scenario

FAILED, REFUSED = 1, 2
"""Exit codes: a threshold was not kept; nothing was struck."""


@click.command("drill")
@click.argument("scenario", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--on", "place", type=click.Choice(["local", "cluster", "simulator"]), default="local", show_default=True)
@click.option("--address", help="Of the running cluster; default: as Ray finds it.")
@click.option(
    "--yes-break-this-cluster",
    "confirmed",
    metavar="ADDRESS",
    help="Needed with --on cluster: the address of the cluster whose processes and nodes may be killed.",
)
@click.option("--storage-path", type=click.Path(file_okay=False, path_type=Path), help="For the records; every node sees it.")
@click.option(
    "--from-run",
    "run",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A finished run: what the simulator takes the costs from, for --on simulator and for what is predicted.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but the report.")
def drill_command(
    scenario: Path,
    place: str,
    address: str | None,
    confirmed: str | None,
    storage_path: Path | None,
    run: Path | None,
    quiet: bool,
) -> None:
    """Rehearses SCENARIO, and says whether its thresholds were kept.

    SCENARIO is a YAML file, or a Python file that says scenario = Scenario(...) and is executed like any job (docs/drills.md).
    The job is trained twice, undisturbed and struck. Exit code 0: all thresholds kept; 1: not, or the drill broke off;
    2: refused, or the undisturbed run failed or was disturbed: nothing was struck.
    """
    try:
        if place != "cluster" and (address or confirmed):
            raise click.UsageError(f"--address and --yes-break-this-cluster go with --on cluster, not with --on {place}")
        if place == "simulator" and storage_path is not None:
            raise click.UsageError("--storage-path does not go with --on simulator, which keeps no records")
        found = _drill(Scenario.load(scenario), place, address, confirmed, storage_path, run, quiet)
    except FTError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(REFUSED)
    show(found, output.console())
    sys.exit(0 if found.passed else FAILED)


def _drill(
    scenario: Scenario,
    place: str,
    address: str | None,
    confirmed: str | None,
    storage: Path | None,
    run: Path | None,
    quiet: bool,
) -> Report:
    known = known_job(run) if run is not None else None
    if place == "simulator":
        return rehearse(scenario, known)
    if place == "local":
        return drill(scenario, storage_path=storage, quiet=quiet, known=known)
    knock(address)
    try:
        ray.init(address=address or "auto", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        why = other_versions(error) or f"there is no Ray cluster to be reached: {error}"
        raise ConfigError(f"--address {address or 'auto'}: {why}") from error
    ground = Running(confirmed)
    try:
        return drill(scenario, ground, storage_path=storage, quiet=quiet, known=known)
    finally:
        ground.close()
