"""How long a step takes, without what is no part of training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the time during which it runs. At first it stands still."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None
        self._held = 0  # by how many at once

    def start(self) -> None:
        """From now on it runs, unless it is held."""
        if self._since is None and not self._held:
            self._since = time.monotonic()

    def stop(self) -> None:
        """From now on it stands still."""
        if self._since is not None:
            self._before += time.monotonic() - self._since
            self._since = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stands still inside, whoever starts and stops it there; then it goes on if it ran before."""
        ran = self._since is not None
        self.stop()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if ran:
                self.start()

    def take(self) -> float:
        """The seconds since they were last taken. It begins anew from zero, and runs if it ran."""
        ran = self._since is not None
        self.stop()
        seconds, self._before = self._before, 0.0
        if ran:
            self.start()
        return seconds
