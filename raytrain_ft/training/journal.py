"""What a run decided and what became of its checkpoints: a line of JSON each, and the same to `logging`."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("raytrain_ft.checkfreq")
_LEVELS = {
    "CheckpointFailed": logging.ERROR,
    "CheckpointPassedOver": logging.WARNING,
    "NothingToStore": logging.WARNING,
    "CheckpointCommitted": logging.DEBUG,
}


class Journal:
    """Appends to a file, if there is one. May be used by any thread."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None for none (the storage is no directory of this machine, or another rank writes it)."""
        self._lock = threading.Lock()
        self._path = path
        self._file: TextIO | None = None

    def tell(self, event: str, fields: dict[str, Any]) -> None:
        """Writes an event down. A journal that cannot be written is no reason to end training: logging says it once."""
        log.log(_LEVELS.get(event, logging.INFO), "%s %s", event, " ".join(f"{k}={_short(v)}" for k, v in fields.items()))
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        with self._lock:
            try:
                if self._file is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self._path.open("a", buffering=1)
                self._file.write(line + "\n")
            except OSError as error:
                log.warning("%s cannot be written (%s): this run has no journal from here on", self._path, error)
                self._path = None

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._path = None
            if self._file is not None:
                self._file.close()
                self._file = None


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
