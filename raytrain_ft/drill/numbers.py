"""What a drill's report consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles (nearest rank) of some times, seconds; None without any."""

    count: int
    p50: float | None = None
    p95: float | None = None
    longest: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these."""
        known = sorted(values)
        if not known:
            return cls(count=0)
        rank = lambda share: known[max(0, math.ceil(share * len(known)) - 1)]  # noqa: E731
        return cls(count=len(known), p50=rank(0.5), p95=rank(0.95), longest=known[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What was struck, and what came of it. Seconds; None if it was not noticed, or training did not stand still for it.

    Attributes:
        at: since the run began. detected_s: from the strike to the first sign of it. pause_s: from the strike to the first step
            committed afterwards.
    """

    event: int
    action: str
    members: tuple[str, ...]
    node: str
    at: float
    step: int
    note: str
    detected_s: float | None = None
    pause_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Recoveries of one kind. cause: the actions that caused them, or "other", "resize", "false alarm"."""

    cause: str
    strategy: str
    guarantee: str
    count: int
    pause: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A threshold, and whether it was kept; None if nothing there can be checked."""

    name: str
    wanted: str
    found: str
    kept: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a drill came to. Times in seconds.

    Attributes:
        steps: committed. training_s: from the first step to the end; undisturbed_s: of the run without failures.
        goodput: steps committed, as a share of what the undisturbed run would have made in the same time.
        incomparable: why the undisturbed run is no measure of goodput and of the final state; "" if it is.
        strikes: all that was done. missed: numbers of the events that did not come about. absent: of those at random that never
            came. dropped: how often an event at random came when it could not strike. unnoticed: events that took somebody,
            or silenced him for good, of whose end the records say nothing.
        recoveries: by cause, strategy and guarantee. detection, pauses: see `Strike`; pauses are of all recoveries, those
            without a strike included.
        guarantee: the weakest that a recovery kept. bit_equal: whether the final state is the undisturbed run's; None if one
            of the runs did not end. violations: of the promises that `policy.history` and the audit check; unchecked: why
            nobody looked for any.
        predicted: by the simulator, for the same events: numbers by name. unpredicted: why there are none.
        failure: why the run failed. paths: records of the two runs.
    """

    scenario: str
    ground: str
    steps: int
    max_steps: int
    training_s: float
    undisturbed_s: float
    goodput: float
    strikes: tuple[Strike, ...]
    missed: tuple[int, ...]
    recoveries: tuple[Kind, ...]
    detection: Spread
    pauses: Spread
    samples_lost: int
    guarantee: str
    bit_equal: bool | None
    violations: tuple[str, ...]
    unchecked: str = ""
    dropped: int = 0
    absent: tuple[int, ...] = ()
    unnoticed: tuple[int, ...] = ()
    incomparable: str = ""
    checks: tuple[Check, ...] = ()
    predicted: dict[str, float] = field(default_factory=dict)
    unpredicted: str = ""
    failure: str = ""
    paths: tuple[str, str] = ("", "")

    @property
    def passed(self) -> bool:
        """Whether every threshold was kept that could be checked."""
        return all(check.kept is not False for check in self.checks)
