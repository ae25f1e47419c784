"""`raytrain-ft`: looks into runs. It inspects; jobs are Python."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from raytrain_ft import output
from raytrain_ft.cli_attach import attach_command, list_command, stop_command
from raytrain_ft.cli_checkpoints import checkpoints
from raytrain_ft.cli_cluster import check_cluster
from raytrain_ft.cli_drill import drill_command
from raytrain_ft.cli_plan import plan_command
from raytrain_ft.cli_simulate import simulate_command
from raytrain_ft.cli_steer import leave_command, resume_command, suspend_command
from raytrain_ft.cli_study import study_command
from raytrain_ft.errors import StorageError
from raytrain_ft.places import told
from raytrain_ft.policy.audit import audit as audit_records
from raytrain_ft.policy.units import counted
from raytrain_ft.progress import describe, printable
from raytrain_ft.result import recovery_of
from raytrain_ft.runtime import dashboard as dashboards
from raytrain_ft.runtime import report as reports
from raytrain_ft.runtime import timeline as timelines
from raytrain_ft.runtime.event_log import each_record, earlier_logs, read_records, read_run

FAILURES = ("WorkerLost", "Suspected", "TaskFailed", "CheckpointFailed", "LogFailed", "SupervisorRestarted", "RunFailed")

console = output.console()
RUN = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))


class _Main(click.Group):
    """A URI on a command line may hold credentials: what is wrong with it is told without them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = printable(told(error.message))  # pyright: ignore[reportAttributeAccessIssue] - of each kind, as it is
            raise


@click.group(cls=_Main)
@click.version_option(package_name="raytrain_ft")
def main() -> None:
    """Looks into the runs of raytrain_ft, rehearses failures, and steers runs that are under way.

    RUN is a run's directory, storage_path/name. Commands that talk to a run under way (attach, stop, suspend, resume, leave)
    also take its name.
    """


main.add_command(checkpoints)
main.add_command(drill_command)
main.add_command(plan_command)
main.add_command(list_command)
main.add_command(attach_command)
main.add_command(stop_command)
main.add_command(suspend_command)
main.add_command(resume_command)
main.add_command(leave_command)
main.add_command(check_cluster)
main.add_command(simulate_command)
main.add_command(study_command)


def _log_of(run: Path) -> Path:
    path = run / "events.jsonl"
    if not path.exists():
        raise click.ClickException(f"{run} has no events.jsonl: give the directory of a run (storage_path/name)")
    return path


def _records(run: Path) -> list[dict]:
    return read_records(_log_of(run))


@main.command()
@RUN
def audit(run: Path) -> None:
    """Proves from a run's own records that every sample of every epoch was used exactly once, or is listed as lost.

    Of a run that went on from a checkpoint, the records of the runs before are part of the proof.
    """
    _records(run)
    try:
        result = audit_records(read_run(run))
    except StorageError as error:
        raise click.ClickException(f"nothing is proven: {error}") from error
    table = Table(show_header=False)
    table.add_row("run finished", "yes" if result.finished else "no")
    table.add_row("steps audited", f"{result.steps:,}")
    table.add_row("complete epochs", f"{result.epochs_complete:,}")
    table.add_row("samples used exactly once", f"{result.samples_used:,}")
    table.add_row("samples listed as lost", f"{result.samples_lost:,}")
    table.add_row("violations", f"{len(result.violations)}")
    console.print(table)
    for violation in result.violations:
        console.print(f"  {printable(violation)}", markup=False)
    console.print("exactly once: proven" if result.ok else "exactly once: NOT proven")
    sys.exit(0 if result.ok else 1)


@main.command()
@RUN
def recoveries(run: Path) -> None:
    """Prints the account of every recovery of a run, from its first launch on."""
    logs, count = [*earlier_logs(run), _log_of(run)], 0
    several = len(logs) > 1
    for number, log in enumerate(logs, 1):
        if several:
            console.print(f"launch {number} of {len(logs)} ({log.name})", markup=False)
        for record in each_record(log):
            if record["event"] == "Recovery":
                console.print(printable(describe(recovery_of(record))), markup=False)
                count += 1
    console.print(counted(count, "recovery", "recoveries") + (f" in {len(logs)} launches" if several else ""))


@main.command()
@RUN
def events(run: Path) -> None:
    """Counts the events of a run's last launch by kind, and prints those about losses and failures."""
    records = _records(run)
    for name, count in sorted(Counter(record["event"] for record in records).items()):
        console.print(f"{count:8,}  {printable(name)}", markup=False)
    for record in records:
        late = record["event"] == "TimerFired" and record["timer"].startswith(("fence", "save"))  # who did not answer is lost
        if late or record["event"] in FAILURES:
            what = next((record[key] for key in ("cause", "reason", "message", "error", "timer") if record.get(key)), "")
            line = f"{record['at']:9.2f} s  {record['event']}  {record.get('member', '')}  {what}"
            console.print(printable(line), markup=False)


@main.command()
@RUN
def timeline(run: Path) -> None:
    """Writes timeline.json, which ui.perfetto.dev and chrome://tracing open."""
    _write(run, timelines.write)


@main.command()
@RUN
def report(run: Path) -> None:
    """Writes report.html: steps, losses, recoveries and checkpoints of a run in pictures."""
    _write(run, reports.write)


def _write(run: Path, make: Callable[[Path], Path]) -> None:
    """Makes a file of a run's records, beside them."""
    output.try_out(run)
    _records(run)
    with output.told(run):
        path = make(run)
    console.print(str(path), markup=False)


@main.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to; by default where Ray's Grafana looks.")
def dashboard(out: Path | None) -> None:
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


if __name__ == "__main__":
    main()
