"""How far training gets in a time, and how long it takes to a step: in closed form, never step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

EPSILON = 1e-9
"""Relative: a step that is due at a moment is committed at that moment, whatever was rounded on the way there."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Where training stands: `step` steps committed, `into` seconds into the next one, `stalled` seconds lost to saving."""

    step: int
    into: float
    stalled: float


@dataclass(frozen=True, slots=True)
class Pace:
    """A step takes `step_s`; after every `every` steps, training stands still for `stall_s`. All times are since training
    began at step `begin`; a step is committed at its end, before the state is saved."""

    begin: int
    step_s: float
    every: int | None = None
    stall_s: float = 0.0

    def until(self, position: float) -> float:
        """When training is at this position: 12 when the twelfth step is committed, 12.5 half a step and a stall later."""
        whole = int(position)
        part = position - whole
        last = whole if part else whole - 1
        return max(0.0, (position - self.begin) * self.step_s + self.stall_s * self._saves(last))

    def after(self, seconds: float) -> Stand:
        """Where training stands after a time."""
        seconds = seconds * (1 + EPSILON)
        if self.every is None:
            steps = int(seconds / self.step_s)
            return Stand(self.begin + steps, max(0.0, seconds - steps * self.step_s), 0.0)
        first = self.begin // self.every * self.every
        since = seconds + (self.begin - first) * self.step_s  # as if it had begun where the state was saved last
        period = self.every * self.step_s + self.stall_s
        periods = int(since / period)
        rest = since - periods * period
        steps = min(self.every, int(rest / self.step_s))
        step = first + periods * self.every + steps
        standing_still = steps == self.every
        into = 0.0 if standing_still else max(0.0, rest - steps * self.step_s)
        return Stand(step, into, max(0.0, seconds - (step - self.begin) * self.step_s - into))

    def saved(self, seconds: float, durable_s: float) -> list[int]:
        """The two newest steps that were saved and are durable after a time, newest first; none from before `begin`."""
        if self.every is None or seconds < durable_s:
            return []
        newest = self.after(seconds - durable_s).step // self.every * self.every
        return [step for step in (newest, newest - self.every) if step > self.begin]

    def _saves(self, step: int) -> int:
        """How often the state was saved after steps from `begin` (not itself) to `step`."""
        return 0 if self.every is None else max(0, step // self.every - self.begin // self.every)


At = Callable[[float, Callable[[float], None]], None]
"""Calls a function at a time, with the time."""


@dataclass(slots=True, eq=False)
class Training:
    """A stretch of training: by whom, at which pace, and when it is where.

    Attributes:
        pace: while nobody is slowed. factor: how many times longer everything takes now: every step waits for the slowest.
        since: since when it takes so long. worked: what was done before that, in seconds of the pace.
    """

    at: At
    since: float
    pace: Pace
    world: tuple[str, ...]
    incarnation: int
    factor: float = 1.0
    worked: float = 0.0
    _awaited: list[tuple[float, Callable[[float], None]]] = field(default_factory=list)
    _turns: int = 0

    def done(self, now: float) -> float:
        """Seconds of the pace since it began."""
        return self.worked + (now - self.since) / self.factor

    def slowed_s(self, now: float) -> float:
        """How many seconds of the pace were lost since the factor has changed last."""
        return (now - self.since) * (1 - 1 / self.factor)

    def when_at(self, position: float, what: Callable[[float], None]) -> None:
        """Calls this when training comes to a position, unless it ends before."""
        self._awaited.append((position, what))
        self._await((position, what))

    def turn(self, factor: float, now: float) -> None:
        """From now on everything takes so many times longer, and what is on the way comes later or earlier."""
        self.since, self.worked, self.factor, self._turns = now, self.done(now), factor, self._turns + 1
        for awaited in self._awaited:
            self._await(awaited)

    def end(self) -> None:
        """It comes to nothing any more."""
        self._awaited, self._turns = [], self._turns + 1

    def _await(self, awaited: tuple[float, Callable[[float], None]]) -> None:
        turns = self._turns

        def come(at: float) -> None:
            if self._turns == turns:
                self._awaited.remove(awaited)
                awaited[1](at)

        self.at(self.since + (self.pace.until(awaited[0]) - self.worked) * self.factor, come)
