"""What the commands print that read a run's records."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from raytrain_ft.cli import main


def test_every_loss_is_printed_with_its_cause(tmp_path: Path) -> None:
    """Also one by a deadline, of which the log has only that this passed."""
    records = [
        {"at": 1.0, "event": "WorkerStarted", "member": "w0"},
        {"at": 2.0, "event": "WorkerLost", "member": "w1", "cause": "the process died"},
        {"at": 3.0, "event": "TimerFired", "timer": "fence", "incarnation": 2},
        {"at": 4.0, "event": "TimerFired", "timer": "replacement", "incarnation": 2},
        {"at": 5.0, "event": "TaskFailed", "member": "w2", "cause": None, "message": "ZeroDivisionError"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    printed = CliRunner().invoke(main, ["events", str(tmp_path)]).output.splitlines()
    assert [line.split() for line in printed[:4]] == [
        ["1", "TaskFailed"],
        ["2", "TimerFired"],
        ["1", "WorkerLost"],
        ["1", "WorkerStarted"],
    ]
    assert [" ".join(line.split()) for line in printed[4:]] == [
        "2.00 s WorkerLost w1 the process died",
        "3.00 s TimerFired fence",
        "5.00 s TaskFailed w2 ZeroDivisionError",
    ]


def test_a_directory_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(main, ["events", str(tmp_path)])
    assert answer.exit_code == 1
    assert "has no events.jsonl: give the directory of a run" in answer.output
