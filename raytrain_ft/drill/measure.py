"""What a drill came to: numbers from the records of its two runs and the list of what was struck."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_ft.drill.engine import Played, Struck
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.history import check
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.result import recovery_of
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Scenario

WEAKER = ("exact", "rounding", "lossy")
"""Guarantees, the strongest first."""
EARLY_S = 0.05
"""By how much a sign may seem to come before its strike: clocks are compared by messages."""
SIGNS = ("WorkerLost", "Noticed")
"""Events that say that a member was struck."""
Records = list[dict[str, Any]]


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
    """Recoveries of one kind. cause: the actions that caused them, or "resize"."""

    cause: str
    strategy: str
    guarantee: str
    count: int
    pause: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A threshold, and whether it was kept."""

    name: str
    wanted: str
    found: str
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a drill came to. Times in seconds.

    Attributes:
        steps: committed. training_s: from the first step to the end; undisturbed_s: of the run without failures.
        goodput: steps committed, as a share of what the undisturbed run would have made in the same time.
        strikes: all that was done. missed: numbers of the events that did not come about.
        recoveries: by cause, strategy and guarantee. detection, pauses: see `Strike`; pauses are of all recoveries, those
            without a strike included.
        guarantee: the weakest that a recovery kept. bit_equal: whether the final state is the undisturbed run's; None if one
            of the runs did not end. violations: of the promises that `policy.history` and the audit check.
        predicted: by the simulator, for the same events: numbers by name.
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
    checks: tuple[Check, ...] = ()
    predicted: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    paths: tuple[str, str] = ("", "")

    @property
    def passed(self) -> bool:
        """Whether every threshold was kept."""
        return all(check.kept for check in self.checks)


def committed(records: Records) -> int:
    """Steps that stand at the end."""
    steps = 0
    incarnation = -1
    for record in records:
        if record["event"] == "Resumed":
            incarnation, steps = record["incarnation"], record["step"]
        elif record["event"] == "StepsCommitted" and record["incarnation"] >= incarnation:
            steps = max(steps, record["stop_step"])
    return steps


@dataclass(frozen=True, slots=True)
class Clock:
    """The time in a run's records, turned into one that goes on while the supervisor is away.

    Attributes:
        offsets: see `Played`. restarts: of the supervisor, as the records say.
    """

    offsets: tuple[float, ...]
    restarts: tuple[float, ...]

    @classmethod
    def of(cls, records: Records, offsets: Sequence[float]) -> Clock:
        """Of this run."""
        return cls(tuple(offsets), tuple(record["at"] for record in records if record["event"] == "SupervisorRestarted"))

    def real(self, at: float) -> float:
        """Seconds since the run began. A life of the supervisor that was too short to be seen counts as the one before."""
        lives = sum(restart <= at for restart in self.restarts)
        return at + (self.offsets[min(lives, len(self.offsets) - 1)] if self.offsets else 0.0)


def training_seconds(records: Records, clock: Clock) -> float:
    """From the first step to the end, without the start of the workers."""
    states = [record for record in records if record["event"] == "State"]
    began = next((record["at"] for record in states if record["state"] == "RUNNING"), None)
    if began is None:
        return 0.0
    over = ("SHUTTING_DOWN", "ERRORED", "ABORTED", "FINISHED")
    ended = next((record["at"] for record in states if record["state"] in over), records[-1].get("at", began))
    return clock.real(ended) - clock.real(began)


def recoveries_of(records: Records, clock: Clock | None = None) -> list[Recovery]:
    """The accounts at the end of the records, their times by this clock."""
    found = [recovery_of(record) for record in records if record["event"] == "Recovery"]
    if clock is not None:
        for recovery in found:
            recovery.detected = clock.real(recovery.detected)
            recovery.resumed = None if recovery.resumed is None else clock.real(recovery.resumed)
    return found


def violations(records: Records, played: Played, reference: Played) -> list[str]:
    """What the run promised and did not keep."""
    found = check(records) if played.error is None else []
    if bit_equal(played, reference) is False and not any(_excused(recovery) for recovery in recoveries_of(records)):
        found.append("I3 the final state differs from the undisturbed run's, and no recovery says why")
    return found


def _excused(recovery: Recovery) -> bool:
    """Whether the final state may differ after it: another world adds in another order, an undo rounds, samples are lost."""
    return recovery.world_after != recovery.world_before or recovery.undone > 0 or str(recovery.guarantee) == "lossy"


def bit_equal(played: Played, reference: Played) -> bool | None:
    """Whether both runs ended in the same state, to the bit."""
    if played.result is None or reference.result is None:
        return None
    return played.result.digest == reference.result.digest


def measure(scenario: Scenario, ground: str, played: Played, reference: Played) -> Report:
    """The report of the run that was played, without its verdict. `reference` is the undisturbed one."""
    records, calm = (read_records(run.path / "events.jsonl") for run in (played, reference))
    clock, calm_clock = Clock.of(records, played.offsets), Clock.of(calm, reference.offsets)
    recoveries = recoveries_of(records, clock)
    strikes = tuple(_followed(struck, records, clock, recoveries) for struck in played.struck)
    owned = [_strikes_of(recovery, strikes) for recovery in recoveries]
    pauses = [_pause(recovery, own) for recovery, own in zip(recoveries, owned, strict=True)]
    steps, seconds = committed(records), training_seconds(records, clock)
    calm_steps, calm_seconds = committed(calm), training_seconds(calm, calm_clock)
    expected = calm_steps / calm_seconds * seconds if calm_seconds else 0.0
    return Report(
        scenario=scenario.name,
        ground=ground,
        steps=steps,
        max_steps=scenario.steps,
        training_s=seconds,
        undisturbed_s=calm_seconds,
        goodput=steps / expected if expected else 0.0,
        strikes=strikes,
        missed=tuple(played.missed),
        recoveries=_kinds(recoveries, owned, pauses),
        detection=Spread.of([strike.detected_s for strike in strikes if strike.detected_s is not None]),
        pauses=Spread.of([pause for pause in pauses if pause is not None]),
        samples_lost=audit(records).samples_lost,
        guarantee=max((str(recovery.guarantee) for recovery in recoveries), key=WEAKER.index, default="exact"),
        bit_equal=bit_equal(played, reference),
        violations=tuple(violations(records, played, reference)),
        failure=f"{type(played.error).__name__}: {played.error}" if played.error is not None else "",
        paths=(str(played.path), str(reference.path)),
    )


def _followed(struck: Struck, records: Records, clock: Clock, recoveries: list[Recovery]) -> Strike:
    """A strike, and when it was noticed. Who left after a notice made no pause but that of the change itself."""
    members = set(struck.members)
    signs = [
        at
        for record in records
        if record["event"] in SIGNS and record["member"] in members
        if (at := clock.real(record["at"])) >= struck.at - EARLY_S
    ]
    own = [r for r in recoveries if members & {*r.lost, *r.left} and (r.resumed is None or r.resumed >= struck.at - EARLY_S)]
    signs += [r.detected for r in own if members & set(r.lost) and r.detected >= struck.at - EARLY_S]
    first = min((r for r in own if r.resumed is not None), key=lambda r: r.detected, default=None)
    pause = None
    if first is not None and first.resumed is not None:
        pause = first.resumed - (struck.at if members & set(first.lost) else first.detected)
    return Strike(
        event=struck.event,
        action=struck.action,
        members=struck.members,
        node=struck.node,
        at=struck.at,
        step=struck.step,
        note=struck.note,
        detected_s=max(0.0, min(signs) - struck.at) if signs else None,
        pause_s=None if pause is None else max(0.0, pause),
    )


def _strikes_of(recovery: Recovery, strikes: Sequence[Strike]) -> list[Strike]:
    """The strikes that a recovery is due to: members are never called by the same name again."""
    return [strike for strike in strikes if set(strike.members) & {*recovery.lost, *recovery.left}]


def _pause(recovery: Recovery, own: list[Strike]) -> float | None:
    """From the first of its strikes, or else from the first sign, to the first step committed afterwards."""
    if recovery.resumed is None:
        return None
    struck = [strike.at for strike in own if set(strike.members) & set(recovery.lost)]
    return recovery.resumed - min([recovery.detected, *struck])


def _kinds(recoveries: list[Recovery], owned: list[list[Strike]], pauses: list[float | None]) -> tuple[Kind, ...]:
    kinds: dict[tuple[str, str, str], list[float]] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for recovery, own, pause in zip(recoveries, owned, pauses, strict=True):
        actions = sorted({strike.action for strike in own})
        cause = " + ".join(actions) or ("other" if recovery.lost else "resize")
        key = (cause, str(recovery.strategy), str(recovery.guarantee))
        counts[key] += 1
        kinds.setdefault(key, []).extend([pause] if pause is not None else [])
    return tuple(
        Kind(
            cause=cause,
            strategy=strategy,
            guarantee=guarantee,
            count=counts[cause, strategy, guarantee],
            pause=Spread.of(times),
        )
        for (cause, strategy, guarantee), times in kinds.items()
    )
