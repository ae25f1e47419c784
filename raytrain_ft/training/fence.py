"""The off switch of an incarnation on one worker, and the two ways in which it ends. Knows neither torch nor Ray."""

from __future__ import annotations

import threading
from datetime import timedelta

from raytrain_ft.errors import FencedError

WAIT_DEADLINE = timedelta(minutes=30)
"""Longest wait for a collective. A backstop only: the supervisor notices a peer that does not come long before."""


class PeerLostError(RuntimeError):
    """A collective failed: some peer of this incarnation is gone, or its connection is. Or a helper cannot help."""


class Fence:
    """The off switch of one incarnation: once tripped, every wait of it ends with `FencedError`."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._lock = threading.Lock()
        self._tripped = False
        self._forsaken = False
        self._worth: int | None = None
        self._waiters: set[threading.Event] = set()

    @property
    def tripped(self) -> bool:
        return self._tripped

    def trip(self) -> None:
        """Ends this incarnation on this worker; safe to call twice and from any thread."""
        with self._lock:
            self._tripped = True
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter.set()

    def forsake(self, worth: int | None) -> None:
        """Says to whom computes on in spite of the fence, for its own gradients, that nobody can use them, unless they are of
        step `worth`. From any thread."""
        self._worth = worth
        self._forsaken = True  # last: who looks in between goes on for now

    def is_vain(self, step: int) -> bool:
        """Whether it is known that nobody can use what is still computed of this step."""
        return self._forsaken and step != self._worth

    def check(self) -> None:
        """Raises `FencedError` if this incarnation is over."""
        if self._tripped:
            raise FencedError(f"incarnation {self.incarnation} is over on this worker")

    def wait(self, done: threading.Event, deadline: timedelta = WAIT_DEADLINE) -> None:
        """Waits for `done`, but no longer than the fence or the deadline.

        Raises:
            FencedError: this incarnation ended first.
            PeerLostError: the deadline passed.
        """
        if not done.is_set() and not self.came(done, deadline.total_seconds()):
            raise PeerLostError(f"no answer from the peers within {deadline}")
        self.check()

    def came(self, event: threading.Event, seconds: float) -> bool:
        """Whether the event came within so many seconds.

        Raises:
            FencedError: this incarnation ended first.
        """
        with self._lock:
            if not self._tripped:
                self._waiters.add(event)
        self.check()
        came = event.wait(seconds)
        with self._lock:
            self._waiters.discard(event)
        self.check()
        return came
