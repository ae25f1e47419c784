"""What is news in a run's events: steps committed for the first time, and recoveries that have ended. Each is told once.

Every worker tells of every step, a recovery may set everybody back, and a worker's last words may come late. This fold sees
through that, for whoever follows a run: its metrics (`measures`) and the callbacks of its driver (`runtime.follow`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.strategy import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps [first, stop) were committed for the first time: those that a worker told of and no other had told of before. Each
    tells once a second or less often, so several of them tell of a second in as many parts.

    Attributes:
        redone: steps before these that were committed again, after going back to a checkpoint.
        seconds: that all of these took; None where it is not known (a recovery completed the step).
        longest_s: the longest of them, on the worker that told of them.
        loss: mean loss over the last global batch.
        world_size: workers.
        at: seconds since the run began.
    """

    first: int
    stop: int
    redone: int
    seconds: float | None
    longest_s: float
    loss: float
    world_size: int
    at: float

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step."""
        steps = self.stop - self.first + self.redone
        return None if self.seconds is None or not steps else self.seconds / steps

    def with_next(self, following: Steps) -> Steps | None:
        """These steps and the following ones as one; None if that would blur what is known of them."""
        if self.seconds is None or following.seconds is None:
            return None
        if (self.stop, self.world_size) != (following.first, following.world_size):
            return None
        return replace(
            following,
            first=self.first,
            redone=self.redone + following.redone,
            seconds=self.seconds + following.seconds,
            longest_s=max(self.longest_s, following.longest_s),
        )


@dataclass(slots=True)
class Chronicle:
    """The fold. Recoveries come in the order in which they ended, each before the steps that ended it."""

    _state: State = State.INITIALIZING
    _recovered: int = 0
    _furthest: int | None = None  # the first step that nobody has ever committed
    _reached: int | None = None  # the first step that nobody has committed in this incarnation
    _since: float = 0.0  # when that step began

    def take(self, event: m.Event, run: RunState) -> list[Steps | Recovery]:
        """Takes in an event, after the machine has; returns what is new. `Steps` may be empty but for what was redone."""
        if run.state != self._state:
            if run.state == State.RESUME:
                self._reached, self._since = None, event.at
                self._furthest = run.step if self._furthest is None else self._furthest
            self._state = run.state
        news: list[Steps | Recovery] = []
        for recovery in run.recoveries[self._recovered :]:
            if recovery.resumed is None:
                break
            self._recovered += 1
            news.append(recovery)
        if isinstance(event, m.StepsCommitted) and (steps := self._commit(event, run)) is not None:
            news.append(steps)
        return news

    def _commit(self, event: m.StepsCommitted, run: RunState) -> Steps | None:
        first = event.first_step if self._furthest is None else self._furthest
        stop = self._furthest = max(first, event.stop_step)
        redone, seconds = 0, None
        if event.incarnation == run.incarnation:  # else a recovery completed the step: its time says nothing
            begun = event.first_step if self._reached is None else self._reached
            if event.stop_step <= begun:
                return None  # others told of it before
            redone = max(0, event.stop_step - begun - (stop - first))
            seconds = event.at - self._since
            self._reached, self._since = event.stop_step, event.at
        elif stop == first:
            return None
        about = {"longest_s": event.longest_s, "loss": event.loss, "world_size": len(run.world), "at": event.at}
        return Steps(first=first, stop=stop, redone=redone, seconds=seconds, **about)
