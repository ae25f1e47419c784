"""The run's event log: JSON lines under its directory, written before an event is acted upon.

The machine's state is a fold of this log, so a supervisor that was lost comes back from it, and a person can read what
happened. The first field of a line is the event's class.

While the file cannot be written (a full disk, a server that is away), lines wait in memory for up to `PATIENCE_S`, and the run
goes on. Only then is an event acted upon before it is written: if the supervisor is lost as well, so is what waits, and the
next one comes back to an earlier state than the one that its workers are in.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from raytrain_ft.errors import StorageError
from raytrain_ft.policy import messages
from raytrain_ft.policy.history import ENDS
from raytrain_ft.policy.messages import Event

_CLASSES: dict[str, type[Event]] = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in _CLASSES.values()}

PATIENCE_S = 60.0
MOST_WAITING = 10_000
"""Lines."""
BLOCK_BYTES = 2**16
END_BYTES = 2**20
"""In which the last lines of a log lie."""
EARLIER = re.compile(r"events-[0-9]+\.jsonl")
"""The log of a run, once another of the same name has followed it."""
DAMAGE = (ValueError, TypeError, AttributeError, KeyError)
"""What comes of reading a line that is damaged."""


def encode(event: Event) -> str:
    """One line, without the newline."""
    fields = _ADAPTERS[type(event)].dump_python(event, mode="json")
    return json.dumps({"event": type(event).__name__, **fields}, separators=(",", ":"))


def decode(line: str) -> Event | None:
    """The event of a line, or None for a line that is for people only."""
    return _named(line)[1]


def _named(line: str) -> tuple[str, Event | None]:
    if not line.isascii():
        raise ValueError("it has bytes that are not written there")
    fields = json.loads(line)
    name = fields.pop("event")
    cls = _CLASSES.get(name)
    return name, None if cls is None else _ADAPTERS[cls].validate_python(fields)


class EventLog:
    """Appends to one file. Each line reaches the kernel before `append` returns, so it survives this process; if that fails,
    it waits for the next `append`, `note` or `flush`. What is to survive this machine waits for the next `sync`: on NFS, the
    client keeps what was written until then, or until the file is closed.

    Args:
        now: the clock of the log's times.

    Attributes:
        unsynced: whether anything was written since the last `sync`.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.unsynced = False
        self._now = now
        self._waiting: deque[bytes] = deque()  # of the first, what is not written yet
        self._late_since: float | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:  # a line that a crash cut short would damage the next one, and one that it damaged is forgiven as the last only
            os.ftruncate(self._file, _sound_lines(path))
        except OSError:
            os.close(self._file)
            raise

    def append(self, event: Event) -> None:
        """Writes an event.

        Raises:
            StorageError: for too long, nothing could be written.
        """
        self._write(encode(event))

    def note(self, name: str, **fields: Any) -> None:
        """Writes a line that is for people and tools, not for the machine.

        Raises:
            StorageError: for too long, nothing could be written.
        """
        self._write(_note(name, **fields))

    def _write(self, line: str) -> None:
        self._waiting.append((line + "\n").encode())
        error = self.flush()
        late = 0.0 if self._late_since is None else self._now() - self._late_since
        if error is not None and (late > PATIENCE_S or len(self._waiting) > MOST_WAITING):
            raise StorageError(
                f"{self.path} could not be written for {late:.0f} s, {len(self._waiting)} lines wait: "
                f"{error.strerror or error}. Look at the space, the quota and the mount of its file system, then run the job "
                "again: it goes on from the newest checkpoint"
            ) from error

    def flush(self) -> OSError | None:
        """Writes what waits; returns what stands in the way, if something does. The next try goes on where this one ended, also
        in the middle of a line."""
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[0])
                self.unsynced = True
                self._waiting[0] = self._waiting[0][written:]
                if not self._waiting[0]:
                    self._waiting.popleft()
                if not self._waiting and self._late_since is not None:
                    late, self._late_since = self._now() - self._late_since, None
                    self._waiting.append((_note("LogDelayed", at=self._now(), seconds=round(late, 3)) + "\n").encode())
        except OSError as error:
            self._late_since = self._now() if self._late_since is None else self._late_since
            return error
        return None

    def sync(self) -> None:
        """Brings what is written to where it survives the loss of this machine. It may take as long as the storage likes: to be
        called by a thread that has the time, and by one at once. If it fails, the next one tries again."""
        self.unsynced = False  # before: what is written meanwhile may come too late for this one
        try:
            os.fdatasync(self._file)
        except OSError:
            self.unsynced = True

    def close(self) -> None:
        """Ends the log."""
        self.flush()
        os.close(self._file)


def _sound_lines(path: Path) -> int:
    """Bytes up to the end of the last line that was written whole, without that one if it is damaged: as `read_past` reads
    them."""
    with path.open("rb") as file:
        end = _line_before(file, file.seek(0, os.SEEK_END))
        begin = _line_before(file, end - 1) if end else 0
        file.seek(begin)
        try:
            _named(file.read(end - begin).decode("ascii", "surrogateescape"))
        except DAMAGE:
            return begin
    return end


def _line_before(file: BinaryIO, end: int) -> int:
    """Where the line begins that this place is in: after the newline before it."""
    while end:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        if found := file.read(end - begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0


def has_end(path: Path) -> bool:
    """Whether a log may have the end of its run, which is among its last lines. To read all of a long one takes a minute."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - END_BYTES)
        file.seek(_line_before(file, begin))  # the error that it ended with may be long
        last = file.read()
    return any(f'"event":"{name}"'.encode() in last for name in ENDS)


def _note(name: str, **fields: Any) -> str:
    return json.dumps({"event": name, **fields}, separators=(",", ":"))


def read_past(path: Path) -> Iterator[tuple[str, Event | None]]:
    """The events of a log in order, one after the other, for all of a long log would not fit into memory; and the notes between
    them, of which there is nothing but the name. A last line that was cut short by a crash is left out.

    Raises:
        StorageError: another line is damaged.
    """
    with path.open(encoding="ascii", errors="surrogateescape") as log:
        for number, line in enumerate(log, 1):
            if not line.endswith("\n"):
                break
            try:
                named = _named(line)
            except DAMAGE as error:
                if not next(log, "").endswith("\n"):  # it is the last that was written whole
                    break
                raise StorageError(f"{path}, line {number} is damaged: {error}") from error
            yield named


def each_record(path: Path, damaged: Callable[[StorageError], object] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a log as dictionaries, notes included, up to one that was cut short or damaged.

    Args:
        damaged: is told of a line that is damaged although a whole one follows it, and may raise; if it does not, what follows
            is read as well. Such a line at the end may be one that a crash cut short, and is only left out.
    """
    bad = 0
    with path.open(encoding="ascii", errors="surrogateescape") as log:
        for number, line in enumerate(log, 1):
            if not line.endswith("\n"):  # `EventLog` takes it away, so nobody may have read it
                return
            if bad and damaged is not None:
                damaged(StorageError(f"{path}, line {bad} is damaged, and others follow it"))
            record = _record(line)
            bad = number if record is None else 0
            if record is not None:
                yield record
            elif damaged is None:
                return


def _record(line: str) -> dict[str, Any] | None:
    """None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    sound = line.isascii() and isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if sound else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """All of them."""
    return list(each_record(path))


def earlier_logs(directory: Path) -> list[Path]:
    """The logs of the runs in a directory that others of the same name have followed, oldest first.

    Raises:
        OSError: the directory cannot be read, which is not the same as that there are none.
    """
    try:
        there = [path for path in directory.iterdir() if EARLIER.fullmatch(path.name)]  # `glob` may pass over such a directory
    except FileNotFoundError:
        return []
    return sorted(there, key=lambda path: int(path.stem[7:]))


def read_run(directory: Path) -> list[dict[str, Any]]:
    """The records of all runs in a directory, oldest first: those that a later run of the same name went on from, too.

    Raises:
        StorageError: a line is damaged, and not only the last of a log: nothing is proven by what is left.
    """

    def refuse(error: StorageError) -> None:
        raise error

    logs = [*earlier_logs(directory), directory / "events.jsonl"]
    return [record for path in logs if path.exists() for record in each_record(path, refuse)]
