"""`raytrain-ft dashboard`: a Grafana dashboard of all runs of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from raytrain_ft.cli import output
from raytrain_ft.errors import StorageError
from raytrain_ft.runtime import dashboard as dashboards

console = output.console()


@click.command("dashboard")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to; by default where Ray's Grafana looks.")
def dashboard_command(out: Path | None) -> None:
    """Writes a Grafana dashboard of all runs of the cluster: call it on the head node."""
    try:
        place = out or dashboards.directory()
    except StorageError as error:
        raise click.ClickException(f"{error}; give --out DIR") from error
    if out is not None:
        with output.told(out):
            out.mkdir(parents=True, exist_ok=True)
    elif not place.is_dir():
        raise click.ClickException(
            f"{place} is not there: no Ray dashboard has run on this machine, or with another --temp-dir or other variables "
            "(docs/metrics.md); give --out DIR"
        )
    try:
        console.print(str(dashboards.write(place)), markup=False)
    except StorageError as error:
        raise click.ClickException(str(error)) from error
