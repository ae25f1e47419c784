"""How far undisturbed training gets in a time, and how long it takes to a step: in closed form, never step by step."""

from __future__ import annotations

from dataclasses import dataclass

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
