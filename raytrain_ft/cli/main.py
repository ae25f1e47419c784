"""`raytrain-ft`: looks into runs. It inspects; jobs are Python."""

from __future__ import annotations

from typing import Any

import click

from raytrain_ft import __version__
from raytrain_ft.cli.attach import attach_command, list_command, stop_command
from raytrain_ft.cli.checkpoints import checkpoints
from raytrain_ft.cli.cluster import check_cluster
from raytrain_ft.cli.dashboard import dashboard_command
from raytrain_ft.cli.drill import drill_command
from raytrain_ft.cli.plan import plan_command
from raytrain_ft.cli.records import audit, events, recoveries, report, timeline
from raytrain_ft.cli.simulate import simulate_command
from raytrain_ft.cli.steer import leave_command, resume_command, suspend_command
from raytrain_ft.cli.study import study_command
from raytrain_ft.places import told
from raytrain_ft.progress import printable


class _Main(click.Group):
    """A URI on a command line may hold credentials: what is wrong with it is told without them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = printable(told(error.message))  # pyright: ignore[reportAttributeAccessIssue] - of each kind, as it is
            raise


@click.group(cls=_Main)
@click.version_option(__version__)  # which there is where the package is not installed, too
def main() -> None:
    """Looks into the runs of raytrain_ft, rehearses failures, and steers runs that are under way.

    RUN is a run's directory, storage_path/name. Commands that talk to a run under way (attach, stop, suspend, resume, leave)
    also take its name.
    """


for command in (
    audit,
    recoveries,
    events,
    timeline,
    report,
    checkpoints,
    dashboard_command,
    drill_command,
    plan_command,
    list_command,
    attach_command,
    stop_command,
    suspend_command,
    resume_command,
    leave_command,
    check_cluster,
    simulate_command,
    study_command,
):
    main.add_command(command)
