"""The run's event log after a crash in the middle of a line, and with a file system that takes less than it is given."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raytrain_ft.cli.main import main
from raytrain_ft.errors import StorageError
from raytrain_ft.policy import messages as m
from raytrain_ft.runtime import event_log
from raytrain_ft.runtime.event_log import (
    EventLog,
    decode,
    earlier_logs,
    encode,
    has_end,
    read_past,
    read_records,
    read_run,
)

EVENT = m.CapacityChanged(at=1.0, slots=3)


def read_events(path: Path) -> list[m.Event]:
    """Without the notes between them."""
    return [event for _, event in read_past(path) if event is not None]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_comes_back_as_it_was(tmp_path: Path, loss: float) -> None:
    """Else a supervisor that was lost could not come back after such a step, which `on_non_finite="skip"` commits."""
    drawn: dict[str, Any] = {"rank": 0, "world_size": 1, "epoch": 0, "start": 0, "ids_digest": ""}
    event = m.StepsCommitted(at=1.0, member="w0", incarnation=1, first_step=3, stop_step=4, loss=loss, **drawn)
    again = decode(encode(event))
    assert isinstance(again, m.StepsCommitted)
    assert str(again.loss) == str(loss)
    log = EventLog(tmp_path / "events.jsonl")
    log.append(event)
    log.append(EVENT)
    log.close()
    steps, other = read_events(log.path)
    assert (str(steps), other) == (str(event), EVENT)
    assert str(read_records(log.path)[0]["loss"]) == str(loss)


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


@pytest.mark.parametrize("block", [1, 7, 2**16])
def test_a_line_that_was_cut_is_taken_away_without_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(event_log, "BLOCK_BYTES", block)
    path = tmp_path / "events.jsonl"
    line = f"{encode(EVENT)}\n".encode()
    for before in (b"", line, line + line):
        path.write_bytes(before + b'{"event": "Cut')
        EventLog(path).close()
        assert path.read_bytes() == before


@pytest.mark.parametrize("block", [1, 7, 2**16])
@pytest.mark.parametrize("cut", ["", '{"event": "Cut'])
@pytest.mark.parametrize("damaged", ["{damaged\n", "\0\0\0\0\n", '{"event":"CapacityChanged","at":1}\n', "\xf8\n", "\n"])
def test_a_damaged_line_that_was_forgiven_damages_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, cut: str, block: int
) -> None:
    """As the last it is; with others after it, the supervisor could not come back once more."""
    monkeypatch.setattr(event_log, "BLOCK_BYTES", block)
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encode(EVENT)}\n{damaged}{cut}", encoding="latin-1")
    assert read_events(path) == [EVENT]
    log = EventLog(path)
    log.append(EVENT)
    log.close()
    assert read_events(path) == [EVENT, EVENT]


def test_the_end_of_a_run_is_looked_for_in_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "END_BYTES", 200)
    log = EventLog(tmp_path / "events.jsonl")
    for _ in range(50):
        log.append(EVENT)
    assert not has_end(log.path)
    log.note("RunFailed", at=9.0, error=["TaskError", "it failed" * 100])
    assert has_end(log.path), "though it begins before those"
    log.note("ReportFailed", at=9.1, reason="no space")
    assert has_end(log.path)
    log.close()


def test_notes_have_a_name_and_only_the_last_line_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(EVENT)
    for name in ("State", "Recovery", "State"):
        log.note(name, at=2.0)
    log.close()
    whole = path.read_text()
    for rest in ("", "{damaged\n", '{"event": "State"', "{damaged\n{"):
        path.write_text(whole + rest)
        notes = [("State", None), ("Recovery", None), ("State", None)]
        assert list(read_past(path)) == [(type(EVENT).__name__, EVENT), *notes]
    path.write_text(whole + "{damaged\n" + whole)
    with pytest.raises(StorageError, match="line 5 is damaged"):
        list(read_past(path))
    path.write_text("")
    assert list(read_past(path)) == []


def test_a_write_that_takes_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    log = EventLog(tmp_path / "events.jsonl")
    log.append(EVENT)
    log.append(EVENT)
    assert read_events(log.path) == [EVENT, EVENT]
    log.close()


class Disk:
    """Takes so many bytes and is full then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self._write: Any = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.free])
        self.free -= written
        return written


@pytest.mark.parametrize("free", [0, 5, 60])
def test_what_a_full_disk_did_not_take_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    clock = iter(range(1000))
    log = EventLog(tmp_path / "events.jsonl", lambda: float(next(clock)))
    with monkeypatch.context() as patch:
        disk = Disk(patch, free)
        log.append(EVENT)
        log.append(EVENT)
        log.note("State", at=2.0)
        assert log.flush() is not None
        disk.free = 13  # and full again, in the middle of a line
        log.append(EVENT)
    assert log.flush() is None
    log.append(EVENT)
    log.close()
    events = ["CapacityChanged", "CapacityChanged", "State", "CapacityChanged", "LogDelayed", "CapacityChanged"]
    records = read_records(log.path)
    assert [record["event"] for record in records] == events, "each once, whole and in order"
    assert records[4]["seconds"] > 0
    assert read_events(log.path) == [EVENT] * 4


def test_a_log_that_cannot_be_written_for_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0]
    log = EventLog(tmp_path / "events.jsonl", lambda: times[0])
    with monkeypatch.context() as patch:
        Disk(patch, 5)
        log.append(EVENT)
        times[0] = event_log.PATIENCE_S
        log.append(EVENT)
        times[0] += 1
        with pytest.raises(StorageError, match=rf"{log.path} could not be written for 61 s, 3 lines wait: No space left"):
            log.append(EVENT)
    log.close()
    assert read_events(log.path) == [EVENT] * 3


def test_not_everything_waits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MOST_WAITING", 3)
    log = EventLog(tmp_path / "events.jsonl")
    Disk(monkeypatch, 0)
    for _ in range(3):
        log.append(EVENT)
    with pytest.raises(StorageError, match="4 lines wait"):
        log.append(EVENT)
    log.close()


def test_a_log_has_news_to_sync_until_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is written meanwhile, which may come too late for that, and what a sync that failed has not brought there."""
    log = EventLog(tmp_path / "events.jsonl")
    files: list[int] = []

    def late(file: int) -> None:
        files.append(file)
        if len(files) == 1:
            log.append(EVENT)
        elif len(files) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", late)
    assert not log.unsynced
    log.append(EVENT)
    assert log.unsynced
    for left in (True, True, False):
        log.sync()
        assert log.unsynced is left
    assert {Path(f"/proc/self/fd/{file}").readlink() for file in files} == {log.path}
    log.close()


@pytest.mark.parametrize("damage", [b'{"event":"Sta\xf8te","at":1}\n', b"5\n", b'{"x":1}\n', b"[1]\n"])
def test_a_line_that_is_no_record_is_damage_and_no_crash(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(EVENT)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + damage)
    assert read_events(path) == [EVENT], "it is the last"
    assert len(read_records(path)) == 1
    assert len(read_run(tmp_path)) == 1
    path.write_bytes(whole + damage + whole)
    assert len(read_records(path)) == 1
    with pytest.raises(StorageError, match="line 2 is damaged"):
        read_run(tmp_path)
    with pytest.raises(StorageError, match="line 2 is damaged"):
        list(read_past(path))


def test_nothing_is_proven_by_what_is_left_of_a_damaged_log(tmp_path: Path) -> None:
    """Whatever was lost or repeated after the damage would not be seen."""
    log = EventLog(tmp_path / "events.jsonl")
    for _ in range(3):
        log.append(EVENT)
    log.close()
    whole = log.path.read_bytes()
    log.path.rename(tmp_path / "events-001.jsonl")
    (tmp_path / "events.jsonl").write_bytes(whole)
    assert len(read_run(tmp_path)) == 6
    middle = len(whole) // 3
    (tmp_path / "events-001.jsonl").write_bytes(whole[:middle] + b"\0" * 9 + whole[middle + 9 :])
    done = CliRunner().invoke(main, ["audit", str(tmp_path)])
    assert done.exit_code == 1
    assert "events-001.jsonl, line 2 is damaged, and others follow it" in done.output
    assert "exactly once" not in done.output


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log would be put aside over an earlier one."""
    for number in (2, 10, 1000, 999):
        (tmp_path / f"events-{number:03d}.jsonl").touch()
    assert [path.name[7:-6] for path in earlier_logs(tmp_path)] == ["002", "010", "999", "1000"]
    assert earlier_logs(tmp_path / "nowhere") == []

    def denied(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(PermissionError):
        earlier_logs(tmp_path)
