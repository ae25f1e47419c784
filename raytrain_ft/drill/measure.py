"""What a drill came to: numbers from the records of its two runs and the list of what was struck."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from raytrain_ft.drill.numbers import Kind, Report, Spread, Strike
from raytrain_ft.drill.played import Played, Struck
from raytrain_ft.policy.accounts import accounts
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.history import LONGEST_RECOVERY_S, check
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.policy.strategy import Guarantee, Recovery, weakest
from raytrain_ft.result import recovery_of
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Scenario

EARLY_S = 0.05
"""By how much a sign may seem to come before its strike: clocks are compared by messages."""
LETHAL = ("kill", "kill_node", "exit")
"""Actions after which who was struck is gone, whatever comes then."""
SILENT = ("freeze", "unplug")
"""Actions after which nothing is heard of who was struck, until they are over."""
SILENCE_S = 5.0
"""For how long, before that must have been noticed: several times the heartbeat's timeout and the probe's, 1.2 s together."""
SIGNS = ("WorkerLost", "Noticed")
"""Events that say that a member was struck."""
Records = list[dict[str, Any]]


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
    """The time in a run's records, turned into the driver's: where the supervisor came back on another machine, the records
    have how long it was away by the time of day, which machines do not quite agree upon.

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
    began = _first(records, {State.RUNNING})
    return 0.0 if began is None else _end(records, clock) - clock.real(began)


def _first(records: Records, states: Set[State]) -> float | None:
    return next((record["at"] for record in records if record["event"] == "State" and record["state"] in states), None)


def _end(records: Records, clock: Clock) -> float:
    """When training was over, or was last heard of."""
    ended = _first(records, ENDED | {State.SHUTTING_DOWN})
    return clock.real(max((record.get("at", 0.0) for record in records), default=0.0) if ended is None else ended)


def recoveries_of(records: Records, clock: Clock | None = None) -> list[Recovery]:
    """The accounts at the end of the records, their times by this clock."""
    found = [recovery_of(record) for record in accounts(records)]
    if clock is not None:
        for recovery in found:
            recovery.detected = clock.real(recovery.detected)
            recovery.resumed = None if recovery.resumed is None else clock.real(recovery.resumed)
    return found


def violations(
    records: Records,
    played: Played,
    reference: Played,
    longest_recovery: float = LONGEST_RECOVERY_S,
    *,
    comparable: bool = True,
) -> list[str]:
    """What the run promised and did not keep. `comparable`: see `incomparable`."""
    found = check(records, longest_recovery=longest_recovery) if played.error is None else []
    excused = any(recovery.guarantee != Guarantee.EXACT for recovery in recoveries_of(records)) or _lost_samples(records)
    if bit_equal(played, reference) is False and comparable and not excused:
        found.append("I3 the final state differs from the undisturbed run's, and no recovery says why")
    return found


def _lost_samples(records: Records) -> bool:
    """Also without a recovery: in a step in which somebody fell silent."""
    return any(record["event"] == "SamplesLost" for record in records)


def disturbance(records: Records) -> str:
    """What happened to a run to which nothing was done; "" if nothing did."""
    for recovery in recoveries_of(records):
        if gone := [*recovery.lost, *recovery.left]:
            return f"{', '.join(gone)}: {recovery.cause}"
    return "samples were lost" if _lost_samples(records) else ""


def incomparable(records: Records, calm: Records) -> str:
    """Why an undisturbed run, with the second of these records, cannot say how fast this one should have been, or in which
    state it should have ended; "" if it can. It trained with other numbers of workers, or not exactly itself."""
    own, others = ([record["world_size"] for record in some if record["event"] == "Resumed"] for some in (records, calm))
    if own and others and own[0] != others[0]:
        return f"the undisturbed run began with a world of {others[0]}, this one with {own[0]}"
    if len(set(others)) > 1:
        return f"the undisturbed run had worlds of {', '.join(map(str, dict.fromkeys(others)))}"
    kept = weakest(*(recovery.guarantee for recovery in recoveries_of(calm)))
    return "" if kept == Guarantee.EXACT else f"the undisturbed run kept no more than {kept}"


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
    noticed = _noticed(records, clock)
    blame = guilty(played.struck, noticed)
    strikes = tuple(
        _followed(struck, members, noticed, recoveries) for struck, members in zip(played.struck, blame, strict=True)
    )
    pauses = [_pause(recovery, strikes, blame) for recovery in recoveries]
    causes = [_cause(recovery, strikes, blame) for recovery in recoveries]
    kept = [str(recovery.guarantee) for recovery in recoveries]
    steps, seconds = committed(records), training_seconds(records, clock)
    calm_steps, calm_seconds = committed(calm), training_seconds(calm, calm_clock)
    expected = calm_steps / calm_seconds * seconds if calm_seconds else 0.0
    no_measure = incomparable(records, calm)
    longest_s = max(LONGEST_RECOVERY_S, scenario.replacement_timeout + scenario.hang_timeout)
    return Report(
        scenario=scenario.name,
        ground=ground,
        steps=steps,
        max_steps=scenario.steps,
        training_s=seconds,
        undisturbed_s=calm_seconds,
        goodput=steps / expected if expected else 0.0,
        strikes=strikes,
        unnoticed=_unnoticed(_fatal(played.struck, scenario, _end(records, clock)), noticed, recoveries),
        missed=tuple(played.missed),
        absent=tuple(played.absent),
        dropped=played.dropped,
        recoveries=_kinds(recoveries, causes, pauses),
        detection=Spread.of([strike.detected_s for strike in strikes if strike.detected_s is not None]),
        pauses=Spread.of([pause for pause in pauses if pause is not None]),
        samples_lost=audit(records).samples_lost,
        guarantee=str(weakest("lossy" if _lost_samples(records) else "exact", *kept)),
        bit_equal=bit_equal(played, reference),
        violations=tuple(violations(records, played, reference, longest_s, comparable=not no_measure)),
        incomparable=no_measure,
        failure=f"{type(played.error).__name__}: {played.error}" if played.error is not None else "",
        paths=(str(played.path), str(reference.path)),
    )


def _noticed(records: Records, clock: Clock) -> dict[str, float]:
    """When it was first said of each member that it is lost, or will be. Members are never called by the same name again."""
    found: dict[str, float] = {}
    for record in records:
        if record["event"] in SIGNS:
            found.setdefault(record["member"], clock.real(record["at"]))
    return found


def guilty(struck: Sequence[Struck], noticed: dict[str, float]) -> list[set[str]]:
    """Of each strike, the members that are gone because of it: it is the last that hit them before that was noticed; or the
    only one at all, though it seems to come after that, where the clocks of two machines differ."""
    found: list[set[str]] = [set() for _ in struck]
    for member, at in noticed.items():
        hits = [n for n, strike in enumerate(struck) if member in strike.members]
        before = hits if len(hits) == 1 else [n for n in hits if struck[n].at <= at + EARLY_S]
        if before:
            found[max(before, key=lambda n: struck[n].at)].add(member)
    return found


def _fatal(struck: Sequence[Struck], scenario: Scenario, end: float) -> list[Struck]:
    """The strikes whose victims must have been given up before this time: they were gone, or silent for long enough."""

    def is_silent(one: Struck) -> bool:
        return one.action in SILENT and end - one.at > SILENCE_S and scenario.events[one.event].lasts is None

    return [one for one in struck if one.action in LETHAL or is_silent(one)]


def _unnoticed(struck: Sequence[Struck], noticed: dict[str, float], recoveries: Sequence[Recovery]) -> tuple[int, ...]:
    """The events among these of whose victims the records say nothing. Nobody keeps account of supervisors there."""
    known = {"supervisor", *noticed, *(member for recovery in recoveries for member in (*recovery.lost, *recovery.left))}
    return tuple(sorted({one.event for one in struck if not known.issuperset(one.members)}))


def _followed(struck: Struck, members: set[str], noticed: dict[str, float], recoveries: list[Recovery]) -> Strike:
    """A strike, and what came of it: these members are gone because of it. Who left after a notice made no pause but that of
    the change itself."""
    own = [recovery for recovery in recoveries if members & {*recovery.lost, *recovery.left}]
    signs = [noticed[member] for member in members]
    signs += [r.detected for r in own if members & set(r.lost) and r.detected >= struck.at - EARLY_S]
    first = min((r for r in own if r.resumed is not None), key=lambda r: r.detected, default=None)
    pause = None
    if first is not None and first.resumed is not None:
        stopped_it = members & set(first.lost) and struck.action != "drain"
        pause = first.resumed - (struck.at if stopped_it else first.detected)
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


def _pause(recovery: Recovery, strikes: Sequence[Strike], blame: Sequence[set[str]]) -> float | None:
    """From the first of its strikes, or else from the first sign, to the first step committed afterwards. A drain is no strike:
    who has notice trains on, until its node is gone."""
    if recovery.resumed is None:
        return None
    lost, both = set(recovery.lost), zip(strikes, blame, strict=True)
    struck = [strike.at for strike, members in both if members & lost and strike.action != "drain"]
    return recovery.resumed - min([recovery.detected, *struck])


def _cause(recovery: Recovery, strikes: Sequence[Strike], blame: Sequence[set[str]]) -> str:
    """The actions that it is due to; "other" for a loss that nobody asked for; if nobody was lost, "resize" or, where the
    workers are as many as before, "false alarm"."""
    gone = {*recovery.lost, *recovery.left}
    actions = {strike.action for strike, members in zip(strikes, blame, strict=True) if members & gone}
    resized = recovery.world_before != recovery.world_after
    return " + ".join(sorted(actions)) or ("other" if gone else "resize" if resized else "false alarm")


def _kinds(recoveries: list[Recovery], causes: list[str], pauses: list[float | None]) -> tuple[Kind, ...]:
    kinds: dict[tuple[str, str, str], list[float | None]] = {}
    for recovery, cause, pause in zip(recoveries, causes, pauses, strict=True):
        kinds.setdefault((cause, str(recovery.strategy), str(recovery.guarantee)), []).append(pause)
    return tuple(
        Kind(
            cause=cause,
            strategy=strategy,
            guarantee=guarantee,
            count=len(times),
            pause=Spread.of([pause for pause in times if pause is not None]),
        )
        for (cause, strategy, guarantee), times in kinds.items()
    )
