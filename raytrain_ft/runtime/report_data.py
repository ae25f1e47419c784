"""What a run's report shows, read from its event log. Any field may be missing or of any type: logs outlive versions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raytrain_ft.checks import is_number
from raytrain_ft.policy.accounts import Accounts
from raytrain_ft.policy.strategy import spans

Record = dict[str, Any]
Point = tuple[float, float]

LARGEST = 1e12
"""Numbers beyond this are damage, not measurements; they would only spoil an axis."""
LONGEST_TEXT = 500
MOST_POINTS = 40_000
"""Of a curve: far more than is drawn."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost."""

    at: float
    member: str
    cause: str


@dataclass(frozen=True, slots=True)
class Account:
    """One recovery or resize; times are seconds since the run began. `phases`: name, begin and end of those that are known."""

    number: int
    at: float
    end: float | None
    cause: str
    reason: str
    noticed_by: str
    strategy: str
    guarantee: str
    lost: tuple[str, ...]
    step: float | None
    world: str
    phases: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> float | None:
        """From the first sign to the first step committed afterwards."""
        return None if self.end is None else self.end - self.at


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was committed, or with a `failure`, one that was not."""

    at: float
    step: float | None
    name: str = ""
    size: float | None = None
    snapshot_s: float | None = None
    stall_s: float | None = None
    persist_s: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice of the checkpoint interval k, with the bounds that it came from."""

    at: float
    step: float | None
    k: float
    mode: str
    bounds: dict[str, float]
    observed: float | None
    reason: str


@dataclass(slots=True)
class Facts:
    """All that the report shows.

    Attributes:
        outcome: "finished", "failed", or "open" when the log has no end.
        begun: the step that it went on from; None if the log does not say.
        progress: (seconds, steps committed), the returns to an earlier step included.
        losses: (steps committed, loss), the last word on each step.
        worlds: (seconds, workers).
    """

    name: str = ""
    run_id: str = ""
    update: str = ""
    outcome: str = "open"
    error: str = ""
    seconds: float = 0.0
    steps: float = 0
    begun: float | None = None
    max_steps: float | None = None
    stages: float = 1
    progress: list[Point] = field(default_factory=list)
    losses: list[Point] = field(default_factory=list)
    worlds: list[Point] = field(default_factory=list)
    gone: list[Loss] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    recoveries: list[Account] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    failures: list[Checkpoint] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


def number(record: Record, name: str) -> float | None:
    """A finite number, or None."""
    value = record.get(name)
    if not is_number(value) or not abs(value) < LARGEST:
        return None
    return float(value)


def text(record: Record, name: str) -> str:
    """A field as text that can be written as UTF-8; "" when it is missing."""
    value = record.get(name)
    if value is None:
        return ""
    cut = str(value)[: LONGEST_TEXT + 1].encode("utf-8", "replace").decode()
    return cut if len(cut) <= LONGEST_TEXT else cut[:LONGEST_TEXT] + "…"


def gather(records: Iterable[Any], name: str = "") -> Facts:
    """The facts of a run's records, of which there may be millions. `name` is used for a run that does not say its own."""
    facts = Facts(name=name)
    incarnation = -1.0
    losses: dict[float, float] = {}
    accounts = Accounts()
    for record in (one for one in records if isinstance(one, dict)):
        accounts.take(record)
        at = number(record, "at")
        facts.seconds = max(facts.seconds, at or 0.0)
        if len(losses) > MOST_POINTS:
            losses = dict(thin(sorted(losses.items()), MOST_POINTS // 2))
        if len(facts.progress) > MOST_POINTS:
            facts.progress = thin(facts.progress, MOST_POINTS // 2)
        match record.get("event"):
            case "RunStarted":
                _identify(facts, record)
            case "RunFinished" | "RunFailed" as end:
                facts.outcome, facts.error = ("finished", "") if end == "RunFinished" else ("failed", _error(record))
            case "Resumed" if at is not None:
                incarnation = max(incarnation, number(record, "incarnation") or 0.0)
                _resumed(facts, losses, record, at)
            case "StepsCommitted" if at is not None and (number(record, "incarnation") or 0.0) >= incarnation:
                _committed(facts, losses, record, at)
            case _ if at is not None:
                _happened(facts, record, at)
            case _:
                pass
    recoveries = {f"{one.get('detected')} {one.get('incarnation')}": one for one in accounts.all}
    facts.recoveries = [_account(index, record) for index, record in enumerate(recoveries.values(), 1)]
    known = {loss.member for loss in facts.gone}
    facts.gone += [  # those of whom no event but their recovery says that they were lost
        Loss(account.at, member, account.cause)
        for account in facts.recoveries
        for member in account.lost
        if member not in known
    ]
    facts.losses = sorted(losses.items())
    facts.steps = facts.progress[-1][1] if facts.progress else 0
    return facts


def _identify(facts: Facts, record: Record) -> None:
    found = record.get("details")
    details: Record = found if isinstance(found, dict) else {}
    facts.name = text(details, "name") or facts.name
    facts.run_id, facts.update = text(record, "run_id"), text(details, "update")
    facts.max_steps, facts.stages = number(details, "max_steps"), number(details, "stages") or 1


def _error(record: Record) -> str:
    error = record.get("error")
    if isinstance(error, list | tuple):
        return text({"error": ": ".join(str(part) for part in error)}, "error")
    return text(record, "error")


def _resumed(facts: Facts, losses: dict[float, float], record: Record, at: float) -> None:
    if (step := number(record, "step")) is not None:
        while losses and next(reversed(losses)) > step:  # of steps that all have gone back from; they are in order
            losses.popitem()
        facts.progress.append((at, step))
        facts.begun = step if facts.begun is None else facts.begun
    if (replicas := number(record, "world_size")) is not None:
        facts.worlds.append((at, replicas * facts.stages))


def _committed(facts: Facts, losses: dict[float, float], record: Record, at: float) -> None:
    step, loss = number(record, "stop_step"), number(record, "loss")
    if step is None:
        return
    if not facts.progress or step > facts.progress[-1][1]:
        facts.progress.append((at, step))
    if loss is not None:
        losses[step] = loss


def _happened(facts: Facts, record: Record, at: float) -> None:
    match record.get("event"):
        case "WorkerLost" if text(record, "member") not in [loss.member for loss in facts.gone]:  # several notice one loss
            facts.gone.append(Loss(at, text(record, "member"), text(record, "cause")))
        case "SupervisorRestarted":
            facts.restarts.append(at)
        case "CheckpointCommitted":
            size, snapshot, stall, persist = (number(record, name) for name in ("bytes", "snapshot_s", "stall_s", "persist_s"))
            name, step = text(record, "name"), number(record, "step")
            facts.checkpoints.append(Checkpoint(at, step, name, size, snapshot, stall, persist))
        case "CheckpointFailed":
            failed = Checkpoint(at, number(record, "step"), failure=text(record, "reason") or "no reason was recorded")
            if not facts.failures or facts.failures[-1].step != failed.step:  # each of the workers tells of it
                facts.failures.append(failed)
        case "IntervalChosen" if (k := number(record, "k")) is not None:
            names = ("k_persist", "k_overhead", "k_failures")
            bounds = {name: value for name in names if (value := number(record, name)) is not None}
            about = (text(record, "mode"), bounds, number(record, "observed"), text(record, "reason"))
            facts.decisions.append(Decision(at, number(record, "step"), k, *about))


def _account(index: int, record: Record) -> Account:
    phases = tuple(phase for phase in spans(partial(number, record)) if phase[2] >= phase[1])
    found = record.get("lost")
    lost = tuple(text({"member": member}, "member") for member in found) if isinstance(found, list) else ()
    sizes = [number(record, name) for name in ("world_before", "world_after")]
    return Account(
        number=index,
        at=number(record, "detected") or 0.0,
        end=number(record, "resumed"),
        cause=text(record, "cause"),
        reason=text(record, "reason"),
        noticed_by=text(record, "noticed_by"),
        strategy=text(record, "strategy"),
        guarantee=text(record, "guarantee"),
        lost=lost,
        step=number(record, "step"),
        world=" → ".join("?" if size is None else f"{size:g}" for size in sizes),
        phases=phases,
    )


def thin(points: list[Point], limit: int = 2000) -> list[Point]:
    """At most `limit` points in their order: of each stretch its lowest and its highest, so that no peak is lost."""
    if len(points) <= limit:
        return points
    stretches = max(1, (limit - 2) // 2)
    length = math.ceil((len(points) - 2) / stretches)
    kept = [0]
    for begin in range(1, len(points) - 1, length):
        stretch = range(begin, min(begin + length, len(points) - 1))
        kept += sorted({min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])})
    return [points[i] for i in [*kept, len(points) - 1]]
