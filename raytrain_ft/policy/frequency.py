"""How often to checkpoint: CheckFreq's Algorithm 1, and the feedback that corrects it (sections 4.3.2 and 4.4).

A checkpoint is taken every k steps. Algorithm 1 chooses the smallest k for which a checkpoint is durable before the next one is
due, and for which what training sees of it costs at most a share p of the time. What it needs is measured in the first steps,
without checkpoints, and in the first checkpoint; afterwards `Tuner` compares what was promised with what is observed, and moves
k both ways. Pure: times come in as numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from raytrain_ft.errors import ConfigError

LONGEST_PROFILE = 50
"""Steps (section 4.4: 1 % of an epoch, but no more than this)."""
SHORTEST_PROFILE = 4
"""Steps: the first one is warm-up, and one alone is no measurement."""
SMOOTHING = 0.3
"""Weight of the newest observation."""
TOLERANCE = 0.1
"""A k that is off by less than this share is left alone while the overhead is within its budget."""


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
        k_persist, k_overhead, k_failures: the least k for which persisting is done in time; for which the overhead stays
            within its budget; beyond which more frequent checkpoints would cost more than the work that they save.
    """

    k: int
    mode: Literal["cpu", "gpu"]
    overhead: float
    k_persist: int
    k_overhead: int
    k_failures: int = 0

    @property
    def reason(self) -> str:
        """Which of the bounds it was."""
        if self.k == self.k_failures > max(self.k_persist, self.k_overhead):
            return "failures are rare: more frequent checkpoints would cost more than they save"
        if self.k_overhead > self.k_persist:
            return "the overhead would exceed its budget"
        return "a checkpoint must be durable before the next one is due" if self.k > 1 else "every step can be afforded"


def choose(profile: Profile, budget: float, *, overhead: float | None = None, failure_s: float | None = None) -> Interval:
    """Algorithm 1, and Young and Daly's interval if the mean time between failures is known; the largest k wins.

    Args:
        budget: share of the time that checkpoints may cost [p], in (0, 1).
        overhead: what training sees of a checkpoint, if that was observed; by default it is derived from the profile.
        failure_s: mean time between failures, seconds.

    Raises:
        ConfigError: a value that cannot be used.
    """
    check_budget(budget)
    if not (0 < profile.iteration < math.inf) or min(profile.update, profile.copy, profile.persist) < 0:
        raise ConfigError(f"{profile}: a step takes a positive time, and no other time is negative")
    on_host = max(0.0, profile.copy - (profile.iteration - profile.update))
    fits = profile.free > profile.size and profile.device_copy <= on_host
    seen = (profile.device_copy if fits else on_host) if overhead is None else overhead
    k_persist = _whole((profile.copy + profile.persist - seen) / profile.iteration)
    k_overhead = _whole(seen / (budget * profile.iteration))
    k_failures = 0 if failure_s is None else _whole(math.sqrt(2 * seen * failure_s) / profile.iteration)
    k = max(1, k_persist, k_overhead, k_failures)
    mode = "gpu" if fits else "cpu"
    return Interval(k=k, mode=mode, overhead=seen, k_persist=k_persist, k_overhead=k_overhead, k_failures=k_failures)


def check_budget(budget: float) -> float:
    """The budget, if it is a share.

    Raises:
        ConfigError: it is not between 0 and 1.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
        raise ConfigError(
            f"overhead={budget!r} is the share of the time that checkpoints may cost: use a number between 0 and 1"
        )
    return float(budget)


def profile_steps(steps_per_epoch: int) -> int:
    """How many steps are measured before the first checkpoint (section 4.4)."""
    return max(SHORTEST_PROFILE, min(math.ceil(steps_per_epoch / 100), LONGEST_PROFILE))


def _whole(steps: float) -> int:
    return max(0, math.ceil(steps - 1e-9))


# ---------------------------------------------------------------- feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision with the numbers behind it, for the record.

    Attributes:
        step: steps committed when it was made.
        observed: share of the time that checkpoints cost since the last decision; None if that is not known.
        reason: in words.
    """

    step: int
    interval: Interval
    profile: Profile
    observed: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one checkpoint took, seconds.

    Attributes:
        copy: until the snapshot was complete; persist: from there until it was durable.
        stall: how long updates waited for the copy.
        device_copy: until the snapshot was complete within the device's memory; None if it was not taken there.
    """

    copy: float
    persist: float
    stall: float
    device_copy: float | None = None


@dataclass(slots=True, kw_only=True)
class Tuner:
    """Decides after which steps to checkpoint. One worker's decides for all.

    Attributes:
        budget: the share of the time that checkpoints may cost; fixed: take this k and measure only.
        window: steps to measure before the first checkpoint.
        last: the step after which the latest checkpoint was taken, or with which training began.
        k: steps between checkpoints; 0 while that is not known.
        mode: where snapshots are taken to first, if there is room.
        profile: the measurements, smoothed; None while there are none.
    """

    budget: float
    window: int
    fixed: int | None = None
    failure_s: float | None = None
    last: int = 0
    k: int = 0
    mode: Literal["cpu", "gpu"] = "gpu"
    profile: Profile | None = None
    _free: list[float] = field(default_factory=list)
    _updates: list[float] = field(default_factory=list)
    _all: list[float] = field(default_factory=list)
    _waited: float = 0.0
    _costs: Costs | None = None
    _overhead: float | None = None
    _lower: list[int] = field(default_factory=list)
    _measured: int = 0

    def stepped(self, seconds: float, update_s: float, *, busy: bool) -> None:
        """Takes in a step, but for the first one of a world. `busy`: a checkpoint was under way during it."""
        self._all.append(seconds)
        if not busy:
            self._free.append(seconds)
            self._updates.append(update_s)

    def waited(self, seconds: float) -> None:
        """A checkpoint was due, and the one before was not durable yet."""
        self._waited += seconds

    def due(self, step: int, *, busy: bool) -> bool:
        """Whether to checkpoint after this step (`step`: steps committed by then). `busy`: the one before is under way."""
        if self.fixed is not None:
            return step - self.last >= self.fixed
        if self.k:
            return step - self.last >= self.k
        return not busy and len(self._free) >= self.window

    def earliest(self, step: int, *, warm_up: int = 0) -> int:
        """The first step after this one at which a checkpoint may be due, by what is known now. While the first one is on its
        way nothing is known: the answer then is near, and farther the longer it takes. `warm_up`: steps that will not be
        measured."""
        if self.fixed is not None or self.k:
            return max(step + 1, self.last + (self.fixed or self.k))
        if self._costs is None and self.profile is not None:
            return step + 1 + (step - self.last) // 4
        return step + max(1, self.window - len(self._free)) + warm_up

    def persisted(self, costs: Costs) -> None:
        """The latest checkpoint is durable."""
        self._costs = costs

    def began(self, step: int) -> Decision | None:
        """A checkpoint is taken after this step: what the interval before it tells."""
        decision = self._evaluate(step)
        self.last = step
        self._all, self._free, self._updates, self._waited, self._costs = [], [], [], 0.0, None
        return decision

    def settle(self, step: int) -> Decision | None:
        """The first decision, as soon as the first checkpoint is durable."""
        if self.k or self.fixed is not None or self._costs is None or self.profile is None:
            return None
        self._take(self._costs)
        interval = choose(self.profile, self.budget, failure_s=self.failure_s)
        self.k, self.mode = interval.k, interval.mode
        return Decision(
            step=step, interval=interval, profile=self.profile, observed=None, reason=f"profiled: {interval.reason}"
        )

    def disturbed(self, step: int, *, resized: bool) -> None:
        """Training goes on at this step after a recovery: the interval tells nothing. In a world of another size steps take
        another time, too, which is measured before the next decision."""
        self.last = min(self.last, step)
        self._all, self._free, self._updates, self._waited, self._costs = [], [], [], 0.0, None
        if resized:
            self._measured = 0
            self._overhead = None

    # ---------------------------------------------------------------- the interval that ends

    def _evaluate(self, step: int) -> Decision | None:
        self._take_free()
        if self.profile is None or self._costs is None or not self._all:
            return None
        self._take(self._costs)
        base = self.profile.iteration * len(self._all)
        extra = sum(self._all) - base
        observed = extra / base
        overhead = max(0.0, extra - self._waited, self._costs.stall)
        self._overhead = overhead if self._overhead is None else _smooth(self._overhead, overhead)
        if self.fixed is not None or not self.k:
            return None
        interval = choose(self.profile, self.budget, overhead=self._overhead, failure_s=self.failure_s)
        k, reason = self._moved(interval, observed)
        if k == self.k:
            return None
        reason = f"{reason} ({observed:.1%} observed, budget {self.budget:.1%}): {interval.reason}"
        self.k = k
        return Decision(step=step, interval=interval, profile=self.profile, observed=observed, reason=reason)

    def _take_free(self) -> None:
        """The time of a step without checkpoints, from those that had none under way."""
        if len(self._free) < 3:
            return
        iteration, update = median(self._free), median(self._updates)
        if self.profile is None:
            self.profile = Profile(iteration=iteration, update=update, copy=0.0, persist=0.0)
        elif not self._measured:
            self.profile = replace(self.profile, iteration=iteration, update=update)
        else:
            old = self.profile
            self.profile = replace(old, iteration=_smooth(old.iteration, iteration), update=_smooth(old.update, update))
        self._measured += 1

    def _take(self, costs: Costs) -> None:
        assert self.profile is not None
        known = self.profile.persist > 0
        copy = _smooth(self.profile.copy, costs.copy) if known else costs.copy
        persist = _smooth(self.profile.persist, costs.persist) if known else costs.persist
        self.profile = replace(self.profile, copy=copy, persist=persist)
        if costs.device_copy is not None:  # it fitted: by how much does not matter
            self.profile = replace(self.profile, device_copy=costs.device_copy, free=self.profile.size + 1)

    def _moved(self, interval: Interval, observed: float) -> tuple[int, str]:
        """Up at once when the budget is exceeded or persisting takes longer; down only when two intervals in a row say so, and
        then no further than both of them say."""
        over = observed > self.budget
        if interval.k > self.k and (over or interval.k > self.k * (1 + TOLERANCE)):
            self._lower = []
            return interval.k, "raised"
        if interval.k < self.k * (1 - TOLERANCE) and not over:
            self._lower.append(interval.k)
            if len(self._lower) >= 2:
                k, self._lower = max(self._lower), []
                return k, "lowered"
            return self.k, ""
        self._lower = []
        return self.k, ""

    # ---------------------------------------------------------------- between runs

    def to_json(self) -> dict[str, Any]:
        """What a later run of the same kind begins with."""
        profile = self.profile
        times = {} if profile is None else {name: getattr(profile, name) for name in ("iteration", "update", "copy", "persist")}
        return {"k": self.k, "profile": times}

    def begin_from(self, stored: dict[str, Any]) -> bool:
        """Takes over what an earlier run measured, so that this one need not; whether it could be used."""
        try:
            times = {name: float(stored["profile"][name]) for name in ("iteration", "update", "copy", "persist")}
            profile = Profile(**times)  # pyright: ignore[reportArgumentType]
            k = int(stored["k"])
        except (KeyError, TypeError, ValueError):
            return False
        if k < 1 or not 0 < profile.iteration < math.inf:
            return False
        self.k, self.profile = k, profile
        return True


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
