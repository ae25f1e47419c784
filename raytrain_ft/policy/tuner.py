"""The feedback that corrects Algorithm 1: what was promised is compared with what is observed (CheckFreq, 4.3.2 and 4.4).

Checkpoints cost what steps take longer than those that have none under way. k goes up at once when that exceeds the budget, and
down when it may (the published code only goes up, and never looks again). Pure: times come in as numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import mul
from statistics import fmean, median
from typing import Any, Literal

from raytrain_ft.policy.frequency import Foresight, Interval, Profile, Seen, choose, waits

SMOOTHING = 0.05
"""Weight of the newest checkpoint. Single ones say little: on real disks their times have a long tail."""
RARE = 0.03
"""The same where training would have to wait: one checkpoint in thirty that takes much longer is not to be forgotten soon."""
REMEMBERED = 100
"""Checkpoints: older ones would have a weight of less than a twentieth of the newest."""
FEWEST_FREE = 4
"""Steps without a checkpoint under way that say what a step takes by itself."""
MOST_FREE = 1000
"""The latest of them, where there are more."""
LATE_FREE = 100
"""So many count even if they came before the last judgement: where nearly all steps have a checkpoint under way, the few others
are no measure, for what a step takes varies."""
UNLIKELY = 3
"""Standard errors by which the steps since the last judgement differ from those before only if steps have changed."""
HICCUP = 10
"""Of these, one counts for no more than so many median ones; of those with a checkpoint under way, for no more than so many of
what a step takes by itself, and what training has waited for checkpoints, unless most checkpoints have one. The budget is about
the mean, and a median would charge steps that regularly take a few times as long to the checkpoints beside which they happen to
be. But a pause of a minute says nothing of steps of a tenth of a second."""
USUAL = 0.5
"""More hiccups than this for each checkpoint come of checkpoints."""
UNSEEN = 10
"""Judgements in a row without steps that say what one takes by itself, as where a checkpoint is under way in each: then one is
put off until there are some."""
WINDOW_S = 60.0
"""Once a few steps are measured, a first checkpoint is put off no longer than this to measure more: who is always stopped
before it would never get further."""
MOST_WINDOWS = 2
"""After so many windows without a checkpoint one is due, whatever was measured: where losses come more often than every window,
it is never full."""
MOST_LOOKS = 0.5
"""Of the budget: of steps of a tenth of a millisecond, to look takes all of it, and a k without end would not change that."""
DOUBLINGS = 4
"""Until a checkpoint is durable, each that fails doubles the steps before the next: no more often than this, or up to the k of
an earlier launch."""
LIMIT = 30
"""Of doublings, wherever k ends."""
LITTLE = 0.1
"""Of the budget: by so much more or less than foreseen training may wait, and nothing comes of it."""
JUDGED_STEPS = 30
"""Steps that a judgement needs at least: a few, of which some happen to be slow, say nothing."""
TOLERANCE = 0.02
"""A k that is off by less than this share is left alone while the overhead is within its budget. Of one below 50, where a step
is much of the budget, every step counts."""
MOST_RECALLED = 4
"""A k of an earlier launch counts for no more than so many times that of Algorithm 1. What is observed may ask for more, and is
observed again; but who is stopped sooner than k steps would never get further, and a file may be damaged."""
MOST_AT_ONCE = 4
"""Times k by which it is raised at once. One of the first checkpoints that takes a minute would else have a run of hours write
none any more; if others take as long, k is raised again."""
TIMES = ("iteration", "update", "copy", "persist", "device_copy")
SIZES = ("size", "free")
"""What of a profile a later run begins with: seconds, and bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision with the numbers behind it, for the record.

    Attributes:
        step: steps committed when it was made.
        interval: of it, only k counts where nothing was measured.
        profile: None if nothing was measured: k was asked for.
        observed: share of the time that checkpoints cost since the last decision; None if that is not known.
        reason: in words.
    """

    step: int
    interval: Interval
    profile: Profile | None
    observed: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one checkpoint took, seconds.

    Attributes:
        copy: until the snapshot was complete; persist: from there until it was durable.
        stall: how long updates waited for the copy.
        device_copy: until the snapshot was complete within the device's memory; None if it was not taken there.
        size: bytes of the snapshot; free: of the device's memory when it began.
    """

    copy: float
    persist: float
    stall: float
    device_copy: float | None = None
    size: int = 0
    free: int = 0


@dataclass(slots=True)
class Stretch:
    """The steps since the last judgement, and what came in with them.

    Attributes:
        steps: how many; busy: of them, those that had a checkpoint under way.
        looked_s: what it took to see whether a checkpoint is due; it is in none of the following.
        busy_s: what the busy ones took together; least: the shortest of them.
        hiccups: how many of them were one; beyond_s: what these took beyond what counts of one.
        free: what each of the others took; updates: of it, its weight update.
        costs: of the checkpoints that became durable; waited: for those that were not yet when the next one was due.
    """

    steps: int = 0
    busy: int = 0
    looked_s: float = 0.0
    busy_s: float = 0.0
    least: float = math.inf
    hiccups: int = 0
    beyond_s: float = 0.0
    free: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_FREE))
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_FREE))
    costs: list[Costs] = field(default_factory=list)
    waited: float = 0.0

    @property
    def stood(self) -> float:
        """How long training waited: for copies, and for checkpoints that were not durable yet."""
        return self.waited + sum(costs.stall for costs in self.costs)

    @property
    def unexplained_s(self) -> float:
        """What hiccups took that no wait for a checkpoint explains."""
        return max(0.0, self.beyond_s - self.stood)

    def take(self, seconds: float, update_s: float, looked_s: float, *, most: float, free: bool) -> None:
        """One more step. most: what is longer is a hiccup, if a checkpoint is under way."""
        self.steps, self.looked_s = self.steps + 1, self.looked_s + looked_s
        seconds -= looked_s
        if free:
            self.free.append(seconds)
            self.updates.append(update_s)
        else:
            self.busy, self.busy_s, self.least = self.busy + 1, self.busy_s + seconds, min(self.least, seconds)
            self.hiccups, self.beyond_s = self.hiccups + (seconds > most), self.beyond_s + max(0.0, seconds - most)


@dataclass(slots=True, kw_only=True)
class Tuner:
    """Decides after which steps to checkpoint, where one worker's speaks for all; and where to copy to first, each for its own.

    Attributes:
        budget: the share of the time that checkpoints may cost; fixed: take this k and measure only.
        window: steps to measure before the first checkpoint.
        last: the step after which the latest checkpoint was taken, or with which training began.
        k: steps between checkpoints; 0 while that is not known.
        mode: where snapshots are taken to first, if there is room; looked at again whenever k moves.
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
    _latest: deque[Costs] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _stretch: Stretch = field(default_factory=Stretch)
    _free: list[float] = field(default_factory=list)  # what steps without a checkpoint took of late
    _overhead: float | None = None
    _foresight: Foresight = field(default_factory=Foresight)
    _looks: float = 0.0  # share of the time that goes to seeing whether a checkpoint is due
    _hiccups: float = 0.0  # per checkpoint, of late
    _deviation: float = 0.0
    _tried: int = 0
    _unseen: int = 0  # judgements in a row that had too few free steps
    _under_way: bool = False
    _raised: bool = False
    _shorter: float = 0.0  # share of intervals that may be a step shorter than k, by what was observed
    _saved: float = 0.0  # of a step: what intervals of k left of the budget since one was shorter

    def stepped(self, seconds: float, update_s: float, looked_s: float = 0.0, *, busy: bool) -> None:
        """Takes in a step, but for the first one of a world. `looked_s`: of its seconds, what it took to see whether a
        checkpoint is due, which checkpoints cost as well. `busy`: one is under way at its end."""
        if seconds > looked_s:  # in a loop that is timed nowhere, steps say nothing
            most = math.inf if self.profile is None else HICCUP * self.profile.iteration
            self._stretch.take(seconds, update_s, looked_s, most=most, free=not busy and not self._under_way)
        self._under_way = busy

    def waited(self, seconds: float) -> None:
        """A checkpoint was due, and the one before was not durable yet."""
        self._stretch.waited += seconds

    def due(self, step: int, *, busy: bool) -> bool:
        """Whether to checkpoint after this step (`step`: steps committed by then). `busy`: the one before is under way."""
        k = self._next
        if k and step - self.last >= k:
            return not self._looks_first(step, k)
        if self._stands or busy:
            return False
        return self._missing <= 0 or (not self._tried and step >= self._latest_first)

    def earliest(self, step: int, *, warm_up: int = 0) -> int:
        """The first step after this one at which a checkpoint may be due, by what is known now. While the first one is on its
        way nothing is known: the answer then is near, and farther the longer it takes. `warm_up`: steps that will not be
        measured."""
        k = self._next
        then = max(step + 1, self.last + k)
        if self._stands:
            return then
        if self._tried:
            first = step + 1 + (step - self.last) // 4
        else:
            first = min(step + max(1, self._missing) + warm_up, max(step + 1, self._latest_first))
        return min(first, then) if k else first

    def _looks_first(self, step: int, k: int) -> bool:
        """Whether a checkpoint that is due is put off: for long, no step has said what one takes by itself."""
        if self.fixed is not None or self._unseen < UNSEEN or len(self._stretch.free) >= FEWEST_FREE:
            return False
        return step < self.last + k + MOST_WINDOWS * self.window  # where something is under way all the time, none will

    @property
    def _next(self) -> int:
        """Steps from the latest checkpoint to the next; 0 while that is not known."""
        return self.fixed or (max(1, self.k - 1) if self._saved >= 1 else self.k)

    @property
    def _stands(self) -> bool:
        """Whether k is relied upon: it was asked for, or a checkpoint was durable in this launch, in a world of this size."""
        return self.fixed is not None or bool(self.k and self._latest)

    @property
    def _missing(self) -> int:
        """How many more steps are measured before a first checkpoint is taken, or tried again after some have failed."""
        measured = self._stretch.steps - self._stretch.busy
        if not self._tried:
            return self._enough - measured
        doublings = min(self._tried, LIMIT if self.k else DOUBLINGS)
        return (self.window << doublings) - measured

    @property
    def _enough(self) -> int:
        """Steps to measure before a first checkpoint: the window, or what of it fits into `WINDOW_S`, once that can be told."""
        free = _without_hiccups(self._stretch.free)
        count, seconds = len(free), sum(free)
        if count < FEWEST_FREE:
            return min(self.window, FEWEST_FREE)
        if seconds * self.window <= WINDOW_S * count:
            return self.window
        return min(self.window, max(FEWEST_FREE, int(WINDOW_S * count / seconds)))

    @property
    def _latest_first(self) -> int:
        """The step after which a first checkpoint is taken at the latest; but one that failed is tried again by the rule for
        those, until the next disturbance."""
        return self.last + MOST_WINDOWS * self.window

    def persisted(self, costs: Costs) -> None:
        """The latest checkpoint is durable."""
        self._latest.append(costs)  # first: another thread judges them as soon as there are any in the stretch
        self._stretch.costs.append(costs)
        self._tried = 0

    def began(self, step: int) -> Decision | None:
        """A checkpoint is taken after this step. What the intervals before it tell, once they have enough steps."""
        decision = None
        if self._unseen >= UNSEEN:  # it was put off, whatever came of that
            self._unseen = 0
        if self.profile is None or not self._stands:
            self._take_free()
            self._stretch = Stretch()
        elif self._stretch.steps >= JUDGED_STEPS:
            decision = self._judge(step) if self._stretch.costs else None
            self._stretch = Stretch()
        self.last, self._under_way, self._tried = step, True, self._tried + 1
        self._saved += self._shorter - (self._saved >= 1)
        return decision

    def known(self, step: int) -> Decision | None:
        """The decision that training begins with at this step, if there is one: k was asked for, or comes of what was measured
        before. It may then be off the bounds, for what was observed has corrected it."""
        if self.fixed is not None:
            interval = Interval(k=self.fixed, mode=self.mode, overhead=0.0, k_persist=0, k_overhead=0)
            return Decision(step=step, interval=interval, profile=None, observed=None, reason="fixed: as it was asked for")
        if not self.k or self.profile is None:
            return None
        interval = replace(choose(self.profile, self.budget, failure_s=self.failure_s), k=self.k, mode=self.mode)
        reason = "recalled: as it was measured before"
        return Decision(step=step, interval=interval, profile=self.profile, observed=None, reason=reason)

    def settle(self, step: int) -> Decision | None:
        """The first decision, as soon as the first checkpoint is durable; of a launch that recalled k, whether that can be."""
        if self.fixed is not None or not self._stretch.costs or self.profile is None or (self.k and len(self._latest) > 1):
            return None
        self._take()
        interval = choose(self.profile, self.budget, failure_s=self.failure_s)
        k = min(self.k, MOST_RECALLED * interval.k) or interval.k
        if k == self.k:
            return None
        what = "lowered: far more than was measured anew" if self.k else "profiled"
        self.k, self.mode, self._shorter = k, interval.mode, 0.0
        return Decision(
            step=step,
            interval=replace(interval, k=k),
            profile=self.profile,
            observed=None,
            reason=f"{what}: {interval.reason}",
        )

    def disturbed(self, step: int, *, resized: bool) -> None:
        """Training goes on at this step after a recovery: the interval tells nothing, nor a checkpoint that was broken off.
        In a world of another size steps and checkpoints take another time, too, which is measured before the next decision."""
        self.last, self._tried = min(self.last, step), 0
        if resized:
            self._overhead, self._shorter, self._foresight, self._free = None, 0.0, Foresight(), []
            self._latest.clear()
        self._stretch = Stretch()

    # ---------------------------------------------------------------- what the intervals tell

    def _judge(self, step: int) -> Decision | None:
        """Compares what the steps that had a checkpoint under way since the last time took with what they take without."""
        doubt, stretch = self._take_free(), self._stretch
        self._take()
        assert self.profile is not None
        count, base = len(stretch.costs), self.profile.iteration * stretch.steps
        self._hiccups += (1 - (1 - SMOOTHING) ** count) * (stretch.hiccups / count - self._hiccups)
        pauses = 0.0 if self._hiccups > USUAL else stretch.unexplained_s  # what comes with most checkpoints is a cost of theirs
        extra = stretch.busy_s - pauses - self.profile.iteration * stretch.busy
        overhead = (extra - stretch.waited) / count  # may be negative: steps vary, and only the mean of many tells
        weight = 1.0 if self._overhead is None else 1 - (1 - SMOOTHING) ** count
        self._overhead = (1 - weight) * (self._overhead or 0.0) + weight * overhead
        self._looks = (1 - weight) * self._looks + weight * min(stretch.looked_s / base, MOST_LOOKS * self.budget)
        if self.fixed is not None or not self.k:
            return None
        costs_of = list(self._latest)  # at once: another thread may add to it
        seen = max(0.0, self._overhead, _mean([costs.stall for costs in costs_of]))
        weights = _weights(len(costs_of), RARE)
        latest = [Seen(costs.copy + costs.persist, weight) for costs, weight in zip(costs_of, weights, strict=True)]
        self._foresight.take(count, stretch.waited / count)
        off = self._foresight.off(LITTLE * self.budget * self.k * self.profile.iteration)
        aim = self.budget - self._looks  # what k cannot change is taken off the budget
        interval = choose(self.profile, aim, overhead=seen, failure_s=self.failure_s, latest=latest, off=off)
        observed = extra / base + self._looks
        k, moved = self._moved(interval, over=observed - doubt / base > self.budget)
        self._shorter = interval.shorter if k == interval.k else 0.0
        of_k, of_less = (waits(steps, latest, self.profile.iteration) for steps in (k, k - 1))
        self._foresight.next = of_k + self._shorter * (of_less - of_k)
        if k == self.k:
            return None
        self.k, self.mode = k, interval.mode
        interval = replace(interval, k=k)
        reason = f"{moved} ({observed:.1%} observed, budget {self.budget:.1%}): {interval.reason}"
        return Decision(step=step, interval=interval, profile=self.profile, observed=observed, reason=reason)

    def _take_free(self) -> float:
        """The time of a step without checkpoints, from those that had none under way; returns the standard error of the time
        that the others would have taken without, seconds."""
        free, n = _without_hiccups(self._stretch.free), self._stretch.busy
        before = [] if _have_changed(self._free, free) else self._free
        self._free = (before + free)[-max(LATE_FREE, len(free)) :]
        if not free or len(self._free) < FEWEST_FREE:
            self._unseen += 1
            self._bound()
            return self._deviation * math.sqrt(n)
        self._unseen = 0
        profile = self.profile or Profile(iteration=0.0, update=0.0, copy=0.0, persist=0.0)
        self.profile = replace(profile, iteration=fmean(self._free), update=fmean(_without_hiccups(self._stretch.updates)))
        self._deviation = _spread(self._free)
        return self._deviation * math.sqrt(n + n * n / len(self._free))

    def _bound(self) -> None:
        """No step says what one takes by itself. What was known of it may be too long by now, and with the k that comes of that
        none would ever be free again: so where training waits for longer than it may, a step takes no longer than those beside
        a persister do without that."""
        stretch, stood = self._stretch, self._stretch.stood
        moved = stretch.busy_s - stood
        if self.profile is not None and stretch.busy and stood > self.budget * moved:
            at_most = max(moved / stretch.busy, stretch.least)
            error = self._deviation * math.sqrt(1 / stretch.busy + 1 / max(1, len(self._free)))
            if self.profile.iteration - at_most > UNLIKELY * error:  # steps are quicker by now
                self._free = []
            self.profile = replace(self.profile, iteration=min(self.profile.iteration, at_most) or self.profile.iteration)

    def _take(self) -> None:
        """The times of a checkpoint, from the latest ones."""
        assert self.profile is not None
        latest = list(self._latest)  # at once: another thread may add to it
        if not latest:  # it counted a checkpoint in the stretch that began with a resize, which had forgotten its times
            return
        copy, persist = (_mean(times) for times in zip(*((c.copy, c.persist) for c in latest), strict=True))
        last = latest[-1]
        self.profile = replace(self.profile, copy=copy, persist=persist, size=last.size, free=last.free)
        if last.device_copy is not None:
            self.profile = replace(self.profile, device_copy=last.device_copy)

    def _moved(self, interval: Interval, *, over: bool) -> tuple[int, str]:
        """Up at once when the budget is exceeded or persisting takes longer; down not right after it went up."""
        just_raised, self._raised = self._raised, False
        if interval.k > self.k and (over or interval.k > self.k * (1 + TOLERANCE)):
            self._raised = True
            return min(interval.k, MOST_AT_ONCE * self.k), "raised"
        if interval.k < self.k * (1 - TOLERANCE) and not over and not just_raised:
            return interval.k, "lowered"
        return self.k, ""

    # ---------------------------------------------------------------- between runs

    def to_json(self) -> dict[str, Any]:
        """What a later run of the same kind begins with."""
        found = asdict(self.profile) if self.profile is not None else {}
        known = {name: value for name, value in found.items() if value < math.inf}
        return {"k": self.k, "mode": self.mode, "profile": known}

    def begin_from(self, stored: dict[str, Any]) -> bool:
        """Takes over what an earlier run measured, so that this one need not; whether it could be used."""
        try:
            known = {"device_copy": math.inf, "size": 0, "free": 0, **stored["profile"]}
            times, sizes = {name: float(known[name]) for name in TIMES}, {name: int(known[name]) for name in SIZES}
            profile = Profile(**times, **sizes)  # pyright: ignore[reportArgumentType]
            k, mode = int(stored["k"]), stored.get("mode", "gpu")
            k = min(k, MOST_RECALLED * choose(profile, self.budget, failure_s=self.failure_s).k)
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        needed = (profile.iteration, profile.update, profile.copy, profile.persist)
        if k < 1 or mode not in ("cpu", "gpu") or not all(0 <= seconds < math.inf for seconds in needed):
            return False
        self.k, self.mode, self.profile = k, mode, profile
        self._unseen = UNSEEN  # what a step took then, it need not take now
        return True


def _without_hiccups(steps: Sequence[float]) -> list[float]:
    most = HICCUP * median(steps) if steps else math.inf
    return [min(seconds, most) for seconds in steps]


def _have_changed(before: Sequence[float], since: Sequence[float]) -> bool:
    """Whether steps take another time than they did. A few that are slow may have been unlucky; none is quick by chance, but
    one may have had a smaller batch."""
    if len(before) < FEWEST_FREE or not since:
        return False
    longer = fmean(since) - fmean(before)
    deviation = max(_spread(before), _spread(since))
    differ = abs(longer) > UNLIKELY * deviation * math.sqrt(1 / len(before) + 1 / len(since))
    return differ and len(since) >= (2 if longer < 0 else FEWEST_FREE)


def _spread(values: Sequence[float]) -> float:
    """Standard deviation. (That of `statistics` is exact, and takes a millisecond of a step.)"""
    middle = fmean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / max(1, len(values) - 1))


def _weights(count: int, newest: float = SMOOTHING) -> list[float]:
    """Of so many checkpoints, the oldest first."""
    return [(1 - newest) ** age for age in reversed(range(count))]


def _mean(values: Sequence[float]) -> float:
    weights = _weights(len(values))
    return sum(map(mul, weights, values)) / sum(weights)
