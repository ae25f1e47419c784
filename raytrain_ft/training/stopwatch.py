"""How long a step takes, without what is no part of training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

UNTIMED_STEPS, TIMED_STEPS = 1, 3
"""Of the first: in a step to warm up, memory is touched for the first time."""


class FirstSteps:
    """How long a stage computes in a step, by its first ones."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def add(self, seconds: float) -> float | None:
        """One more step. With enough of them, that which took least: what disturbs one of them is no property of the stage."""
        self._seconds.append(seconds)
        enough = len(self._seconds) == UNTIMED_STEPS + TIMED_STEPS
        return min(self._seconds[UNTIMED_STEPS:]) if enough else None


class Stopwatch:
    """Adds up the time during which it runs. At first it stands still."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None
        self._held = 0  # by how many at once
        self._started = False  # while it was held

    def start(self) -> None:
        """From now on it runs, unless it is held: then it does after that."""
        if self._held:
            self._started = True
        elif self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """From now on it stands still."""
        self._started = False
        if self._since is not None:
            self._before += time.monotonic() - self._since
            self._since = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stands still inside; then it goes on if it ran before, whoever stops it there (an evaluation's loader, at its end),
        or if it was started there (by the first batch, if to wait for that is no training)."""
        ran = self._since is not None
        if ran:
            self.stop()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if ran or (self._started and not self._held):
                self.start()

    def take(self) -> float:
        """The seconds since they were last taken. It begins anew from zero, and runs if it ran."""
        now = time.monotonic()
        seconds, self._before = self._before, 0.0
        if self._since is not None:
            seconds, self._since = seconds + now - self._since, now
        return seconds
