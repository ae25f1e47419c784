"""`raytrain-ft list`, `attach` and `stop`: runs that are under way, from anywhere on their cluster."""

from __future__ import annotations

import sys

import click
from rich.table import Table
from rich.text import Text

from raytrain_ft import attaching
from raytrain_ft.cli import output
from raytrain_ft.errors import AbortedError, ConfigError, FTError
from raytrain_ft.follow import result_of
from raytrain_ft.policy.units import counted
from raytrain_ft.progress import printable

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


@click.command("list")
def list_command() -> None:
    """Lists the runs that are alive on this cluster."""
    try:
        accounts = attaching.alive()
    except FTError as error:
        _tell(error)
        sys.exit(2)
    table = Table("run", "state", "step", "workers", "last followed", "directory")
    for account in accounts:
        if "state" not in account:
            table.add_row(Text(printable(account["name"])), "does not answer")
            continue
        step, followed = f"{account['step']:,} of {account['max_steps']:,}", f"{account['unfollowed_s']:.0f} s ago"
        row = (account["state"].lower(), step, str(account["world_size"]), followed, account["directory"])
        output.row(table, account["name"], *row)
    output.console().print(table if accounts else "no run is alive on this cluster")


@click.command("attach")
@click.argument("run")
def attach_command(run: str) -> None:
    """Follows a run that is under way until its end, and keeps it going meanwhile.

    RUN is the run's directory, or the name of one that is alive on the cluster. Shows what the job that started it would show;
    leaving (Ctrl-C) does not end the run. The exit code is 0 if it finished, 1 if it failed, was ended or does not answer, 2 if
    there is no such run, it is about to begin once more or it ended with a ConfigError, 130 if you left.
    """
    try:
        result = attaching.attach(run)
    except KeyboardInterrupt:
        click.echo("left; the run goes on", err=True)
        sys.exit(INTERRUPTED)
    except FTError as error:
        _tell(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    loss = result.metrics["loss"]
    told = "" if loss is None else f", loss {loss:.4f}"
    recovered = counted(len(result.recoveries), "recovery", "recoveries")
    click.echo(f"finished: step {result.metrics['step']}{told}, {recovered}, digest {result.digest}")
    click.echo(printable(str(result.path)))


@click.command("stop")
@click.argument("run")
def stop_command(run: str) -> None:
    """Ends a run that is under way. It saves a checkpoint first, from which it goes on when its job is run again.

    RUN is the run's directory, or the name of one that is alive on the cluster.
    """
    try:
        account = attaching.stop(run, "`raytrain-ft stop`")
        result_of(account)
    except AbortedError as error:
        click.echo(printable(str(error)))
    except FTError as error:
        _tell(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    else:
        click.echo("it had finished before")


def _tell(error: FTError) -> None:
    click.echo(f"{type(error).__name__}: {printable(str(error))}", err=True)
