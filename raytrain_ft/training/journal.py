"""What a run decided and what became of its checkpoints: a line of JSON each, and the same to `logging`."""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("raytrain_ft.checkfreq")
_LEVELS = {
    "CheckpointFailed": logging.ERROR,
    "CheckpointPassedOver": logging.WARNING,
    "EpochNotOver": logging.WARNING,
    "EpochsNotAsked": logging.WARNING,
    "NotGiven": logging.WARNING,
    "NothingToStore": logging.WARNING,
    "SamplesVary": logging.WARNING,
    "WillNotFit": logging.WARNING,
    "CheckpointCommitted": logging.DEBUG,
}


LEAVE_S = 10.0
"""How long the end of a run waits for the last lines to be written."""


class Journal:
    """Appends to a file, if there is one, on a thread of its own: a disk that hangs holds nobody up. May be used by any
    thread."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None for none (the storage is no directory of this machine, or another rank writes it)."""
        self._path = path
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        if path is not None:
            self._thread.start()

    def tell(self, event: str, fields: dict[str, Any]) -> None:
        """Writes an event down. A journal that cannot be written is no reason to end training: logging says it once."""
        level = logging.WARNING if fields.get("untidy") else _LEVELS.get(event, logging.INFO)
        log.log(level, "%s %s", event, " ".join(f"{k}={_short(v)}" for k, v in fields.items()))
        if self._path is not None:
            self._lines.put(json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n")

    def show(self, line: str) -> None:
        """Prints what everybody should see once, where a program has not set up logging, which would then hold it back as
        being no warning. Any handler, or a level of this logger, is a decision about what is shown."""
        if not log.hasHandlers() and log.level == logging.NOTSET and not log.disabled:
            print(f"{log.name}: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Waits until all is written; not for ever."""
        self._lines.put(None)
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)

    def _write(self) -> None:
        for line in iter(self._lines.get, None):
            if self._path is None:
                continue
            try:
                _append(self._path, line)
            except OSError as error:
                log.warning("%s cannot be written (%s): this run has no journal from here on", self._path, error)
                self._path = None


def _append(path: Path, line: str) -> None:
    """The directory may hold what others have put there: a link is not followed, and nobody is waited for at a pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    carefully = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "a", opener=lambda name, flags: os.open(name, flags | carefully, 0o600)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        file.write(line)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
