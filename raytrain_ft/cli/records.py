"""`raytrain-ft audit`, `recoveries`, `events`, `timeline` and `report`: what a run's records tell."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
from rich.table import Table

from raytrain_ft.cli import output
from raytrain_ft.errors import StorageError
from raytrain_ft.policy.accounts import accounts
from raytrain_ft.policy.audit import audit as audit_records
from raytrain_ft.policy.units import counted
from raytrain_ft.progress import describe, printable
from raytrain_ft.result import recovery_of
from raytrain_ft.runtime import report as reports
from raytrain_ft.runtime import timeline as timelines
from raytrain_ft.runtime.event_log import each_record, earlier_logs, read_records, read_run

LOST = ("WorkerLost", "CauseFound", "Suspected", "TaskFailed")
ENDED = ("SupervisorRestarted", "AbortRequested", "RightLost", "RunFailed")
FAILED = ("CheckpointFailed", "CheckpointRejected", "LogFailed", "LogMissing", "UndoRefused")

console = output.console()
RUN = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))


def _log_of(run: Path) -> Path:
    path = run / "events.jsonl"
    if not path.exists():
        raise click.ClickException(f"{run} has no events.jsonl: give the directory of a run (storage_path/name)")
    return path


def _records(run: Path) -> list[dict]:
    return read_records(_log_of(run))


@click.command()
@RUN
def audit(run: Path) -> None:
    """Proves from a run's own records that every sample of every epoch was used exactly once, or is listed as lost.

    Of a run that went on from a checkpoint, the records of the runs before are part of the proof.
    """
    _log_of(run)
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


@click.command()
@RUN
def recoveries(run: Path) -> None:
    """Prints the account of every recovery of a run, from its first launch on."""
    logs, count = [*earlier_logs(run), _log_of(run)], 0
    several = len(logs) > 1
    for number, log in enumerate(logs, 1):
        if several:
            console.print(f"launch {number} of {len(logs)} ({log.name})", markup=False)
        found = accounts(each_record(log))
        for record in found:
            console.print(printable(describe(recovery_of(record))), markup=False)
        count += len(found)
    console.print(counted(count, "recovery", "recoveries") + (f" in {len(logs)} launches" if several else ""))


@click.command()
@RUN
def events(run: Path) -> None:
    """Counts the events of a run's last launch by kind, and prints those about losses and failures."""
    records = _records(run)
    for name, count in sorted(Counter(record["event"] for record in records).items()):
        console.print(f"{count:8,}  {printable(name)}", markup=False)
    for record in records:
        late = record["event"] == "TimerFired" and record["timer"].startswith(("fence", "save"))  # who did not answer is lost
        if late or record["event"] in LOST + ENDED + FAILED:
            what = next((record[key] for key in ("cause", "reason", "message", "error", "timer") if record.get(key)), "")
            if isinstance(what, list):  # an error: its class, and what it says
                what = ": ".join(map(str, what))
            who = record.get("lost" if record["event"] == "CauseFound" else "member", "")
            line = f"{record['at']:9.2f} s  {record['event']}  {who}  {what}"
            console.print(printable(line), markup=False)


@click.command()
@RUN
def timeline(run: Path) -> None:
    """Writes timeline.json, which ui.perfetto.dev and chrome://tracing open."""
    _write(run, timelines.write)


@click.command()
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
