"""`raytrain-ft suspend`, `resume` and `leave`: one replica of a run that is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from raytrain_ft import steer
from raytrain_ft.cli import arguments
from raytrain_ft.errors import FTError
from raytrain_ft.progress import printable

RUN = click.argument("run")
RANK = click.argument("rank", type=int)


@click.command("suspend")
@RUN
@RANK
@click.option(
    "--at-once", is_flag=True, help="Contribute nothing more to the step under way either; its samples are listed as lost."
)
def suspend_command(run: str, rank: int, at_once: bool) -> None:
    """Lets the replica of this RANK sleep: it contributes nothing for now, and can wake from one step to the next.

    RUN is the run's directory or its name. No group is rebuilt, and nobody waits.
    """
    _carry_out(steer.suspend, run, rank, at_once=at_once)
    click.echo(f"rank {rank} sleeps from the next step on")


@click.command("resume")
@RUN
@RANK
def resume_command(run: str, rank: int) -> None:
    """Wakes the suspended replica of this RANK: it takes part again.

    RUN is the run's directory or its name. A run that has ended is resumed in another way: run its job again.
    """
    _carry_out(steer.resume, run, rank)
    click.echo(f"rank {rank} takes part from the next step on")


@click.command("leave")
@RUN
@RANK
@click.option(
    "--within", "within_s", type=arguments.NOT_NEGATIVE, default=120.0, show_default=True, help="Seconds that it has."
)
@click.option("--no-replacement", is_flag=True, help="Nobody takes its place: the run has one worker less from then on.")
def leave_command(run: str, rank: int, within_s: float, no_replacement: bool) -> None:
    """Replaces the worker of this RANK and lets it leave at a step boundary: nothing is lost.

    RUN is the run's directory or its name. If there is no replacement by then, and the run may not go on with fewer workers, it
    stays.
    """
    _carry_out(steer.leave, run, rank, within_s, replace=not no_replacement)
    click.echo(f"rank {rank} was asked to leave within {within_s:g} s{' without a replacement' if no_replacement else ''}")


def _carry_out(request: Callable[..., None], *args: Any, **options: Any) -> None:
    try:
        request(*args, **options)
    except FTError as error:
        click.echo(f"{type(error).__name__}: {printable(str(error))}", err=True)
        sys.exit(2)
