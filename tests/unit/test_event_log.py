"""The run's event log after a crash in the middle of a line, and with a file system that takes less than it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raytrain_ft.policy import messages as m
from raytrain_ft.runtime.event_log import EventLog, read_events, read_records

EVENT = m.CapacityChanged(at=1.0, slots=3)


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_a_crash_cut_short_damages_no_later_one(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    for lives in range(3):
        log = EventLog(path)
        log.append(EVENT)
        log.append(EVENT)
        log.close()
        os.truncate(path, path.stat().st_size - cut)
        assert read_events(path) == [EVENT] * (lives + 1)
    log = EventLog(path)
    log.note("State", at=2.0)
    log.close()
    assert [record["event"] for record in read_records(path)] == ["CapacityChanged"] * 3 + ["State"]


def test_a_write_that_takes_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    log = EventLog(tmp_path / "events.jsonl")
    log.append(EVENT)
    log.append(EVENT)
    assert read_events(log.path) == [EVENT, EVENT]
    log.close()
