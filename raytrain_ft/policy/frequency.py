"""How often to checkpoint: CheckFreq's Algorithm 1 (section 4.3.2). The feedback that corrects it is in `tuner`.

A checkpoint is taken every k steps. Algorithm 1 chooses the smallest k for which a checkpoint is durable before the next one is
due, and for which what training sees of it costs at most a share p of the time. What it needs is measured in the first steps,
without checkpoints, and in the first checkpoint.

Algorithm 1 knows one time for persisting. On real disks one checkpoint of thirty takes ten times as long as the others, and a k
for the mean then has training wait far beyond its budget: so where several were seen, these waits count. Pure: times come in as
numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from raytrain_ft.checks import is_number
from raytrain_ft.errors import ConfigError

LONGEST_PROFILE = 50
"""Steps (section 4.4: 1 % of an epoch, but no more than this)."""
LEARNT = 0.005
"""Weight of the newest checkpoint in how waits compare with what was foreseen: what happens once in a hundred counts."""
MOST_OFF = 3.0
"""Times by which waits may be longer or shorter than foreseen: more comes of a disk that has just become another one."""
SHORTEST_PROFILE = 4
"""Steps: the first one is warm-up, and one alone is no measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured. Seconds and bytes; the paper's names are in brackets.

    Attributes:
        iteration: a step without checkpoints [T_i].
        update: its weight update [T_w].
        copy: of the state into host memory [T_c].
        persist: from host memory to durable [T_s].
        device_copy: of the state into the device's own memory [T_g].
        size: of the state [m]; free: memory of the device that training leaves free [M_max - M].
    """

    iteration: float
    update: float
    copy: float
    persist: float
    device_copy: float = math.inf
    size: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A decision.

    Attributes:
        k: steps from one checkpoint to the next.
        mode: where the snapshot is taken to first: "cpu" or "gpu" memory.
        overhead: what training sees of one checkpoint, seconds [T_o].
        k_persist, k_overhead, k_failures: the least k for which persisting is done in time, as a rule; for which the overhead,
            and waiting for the checkpoints that take longer, stay within the budget; beyond which more frequent checkpoints
            would cost more than the work that they save.
        shorter: where it is the budget that k comes of, share of the intervals that may be one step shorter, so that it is used
            up on average. k is a whole number of steps, and of a small one a part of a step is much of the budget.
    """

    k: int
    mode: Literal["cpu", "gpu"]
    overhead: float
    k_persist: int
    k_overhead: int
    k_failures: int = 0
    shorter: float = 0.0

    @property
    def reason(self) -> str:
        """Which of the bounds it was."""
        if self.k == self.k_failures > max(self.k_persist, self.k_overhead):
            return "failures are rare: more frequent checkpoints would cost more than they save"
        if self.k_overhead > self.k_persist:
            return "the overhead, or waiting for slow checkpoints, would exceed the budget"
        return "a checkpoint must be durable before the next one is due" if self.k > 1 else "every step can be afforded"


@dataclass(slots=True)
class Foresight:
    """How the waits for checkpoints compare with what was foreseen of them. That is too little where one of a hundred takes
    much longer, which is forgotten until the next one does, and as k is the one of many for which few happened to be slow.

    Attributes:
        next: what is foreseen of the next ones, seconds each; None while nothing is; foreseen: of the latest; waited: what
            they were.
    """

    next: float | None = None
    foreseen: float = 0.0
    waited: float = 0.0

    def take(self, count: int, waited: float) -> None:
        """So many checkpoints more were waited for, `waited` seconds each."""
        if self.next is None:
            return
        newest = 1 - (1 - LEARNT) ** count
        self.foreseen += newest * (self.next - self.foreseen)
        self.waited += newest * (waited - self.waited)

    def off(self, little: float) -> float:
        """How many times as long as foreseen training waits. `little`: seconds that make no difference."""
        return min(max((self.waited + little) / (self.foreseen + little), 1 / MOST_OFF), MOST_OFF)


@dataclass(frozen=True, slots=True)
class Seen:
    """One of the latest checkpoints: seconds from its beginning until it was durable, and how much that counts."""

    seconds: float
    weight: float = 1.0


def choose(
    profile: Profile,
    budget: float,
    *,
    overhead: float | None = None,
    failure_s: float | None = None,
    latest: Sequence[Seen] = (),
    off: float = 1.0,
) -> Interval:
    """Algorithm 1, and Young and Daly's interval if the mean time between failures is known; the largest k wins.

    Args:
        budget: share of the time that checkpoints may cost [p], in (0, 1).
        overhead: what training sees of a checkpoint, if that was observed; by default it is derived from the profile.
        failure_s: mean time between failures, seconds.
        latest: how long checkpoints took lately; off: how many times as long as comes of that training waits.

    Raises:
        ConfigError: a value that cannot be used.
    """
    check_budget(budget)
    if not (0 < profile.iteration < math.inf) or min(profile.update, profile.copy, profile.persist) < 0:
        raise ConfigError(f"{profile}: a step takes a positive time, and no other time is negative")
    on_host = max(0.0, profile.copy - (profile.iteration - profile.update))
    fits = profile.free > profile.size and profile.device_copy <= on_host
    seen = (profile.device_copy if fits else on_host) if overhead is None else overhead
    for_persist = (profile.copy + profile.persist - seen) / profile.iteration
    k_persist = _whole(for_persist)
    k_overhead = _whole(seen / (budget * profile.iteration))
    beyond = partial(_beyond, overhead=seen, latest=latest, off=off, budget=budget, iteration=profile.iteration)
    if latest:
        longest = _whole(max(one.seconds for one in latest) / profile.iteration)  # with which nobody waits
        k_overhead = _least_waiting(max(1, k_persist, k_overhead), longest, beyond) or k_overhead
    for_failures = 0.0 if failure_s is None else math.sqrt(2 * seen * failure_s) / profile.iteration
    k_failures = _whole(for_failures)
    k = max(1, k_persist, k_overhead, k_failures)
    mode = "gpu" if fits else "cpu"
    bounds = {"k_persist": k_persist, "k_overhead": k_overhead, "k_failures": k_failures}
    others = max(1.0, for_persist, for_failures)  # with that many steps, if there were parts of one, is the budget kept?
    shorter = min(k - others, _shorter(k, beyond)) if beyond(others) > 0 else 0.0
    return Interval(k=k, mode=mode, overhead=seen, shorter=shorter, **bounds)


def waits(k: float, latest: Sequence[Seen], iteration: float) -> float:
    """How long training waits for a checkpoint, seconds, by the mean of the latest: for one of s seconds
    ``s - k * iteration``."""
    found = sum(seen.weight * max(0.0, seen.seconds - k * iteration) for seen in latest)
    return found / (sum(seen.weight for seen in latest) or 1.0)


def _beyond(k: float, *, overhead: float, latest: Sequence[Seen], off: float, budget: float, iteration: float) -> float:
    """By how many seconds the overhead of a checkpoint and the wait for it exceed the budget of k steps; negative: of that, so
    much is left."""
    return overhead + off * waits(k, latest, iteration) - budget * k * iteration * (1 + 1e-6)


def _least_waiting(least: int, longest: int, beyond: Callable[[float], float]) -> int:
    """The least k, greater than `least`, with which the budget is not exceeded; 0 if it is not with `least`. It is not with
    `longest`."""
    if beyond(least) <= 0:
        return 0
    return least + bisect_left(range(least, max(least, longest)), True, key=lambda k: beyond(k) <= 0)


def _shorter(k: int, beyond: Callable[[float], float]) -> float:
    """See `Interval`: what k leaves of the budget, by what one step less costs more."""
    left, missing = -beyond(k), beyond(k - 1)
    return max(0.0, left / (left + missing)) if missing > 0 else 0.0


def check_budget(budget: float) -> float:
    """The budget, if it is a share.

    Raises:
        ConfigError: it is not between 0 and 1.
    """
    if not is_number(budget) or not 0 < budget < 1:
        raise ConfigError(
            f"overhead={budget!r} is the share of the time that checkpoints may cost: use a number between 0 and 1"
        )
    return float(budget)


def profile_steps(steps_per_epoch: int) -> int:
    """How many steps are measured before the first checkpoint (section 4.4)."""
    return max(SHORTEST_PROFILE, min(math.ceil(steps_per_epoch / 100), LONGEST_PROFILE))


def _whole(steps: float) -> int:
    return max(0, math.ceil(steps - 1e-9))
