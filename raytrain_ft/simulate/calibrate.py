"""The job, its costs, its strategy and its failures, from the event log of a finished run: what the simulator needs to tell how
long that run, or another of the same job, takes. A run that was resumed is one of fewer steps.

Costs are means over the run. What a log does not tell apart is put together: the state's size and the bandwidth are in
`fill_s`, what logging adds to a step is in `step_s`, and where everybody went back, the rendezvous is told from loading only if
the run had recoveries of both kinds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from raytrain_ft.errors import ConfigError
from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.listed import Listed
from raytrain_ft.simulate.model import Costs, Job
from raytrain_ft.simulate.strategies import Kind, Strategy

Records = Sequence[dict[str, Any]]

KINDS: dict[str, Kind] = {
    "logging": "logging",
    "checkpoint": "checkpoint",
    "snapshot": "elastic_horovod",
    "lossy": "lossy",
    "rollback": "rollback",
    "skip": "skip",
}
"""The simulator's word for a run's strategy. Of a log that does not say which that was, it is the first of these that one of
the run's recoveries used; else, and of "auto" without replays, it is "replication"."""
SAID = ("replacement", "update", "quorum", "lost_samples")
"""What else the log says of a strategy."""
CHOOSING = ("logging", "checkpoint", "elastic_horovod")
"""Kinds for which the simulator would choose an interval, or ask for one."""
HELPED = re.compile(r" by (\d+) workers")
"""In the reason of a recovery by replay: how many shared it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished run as the simulator sees it.

    Attributes:
        failures: those of the run, at the steps at which they struck.
        measured_s: from the run's start to its end.
    """

    job: Job
    strategy: Strategy
    failures: Listed
    measured_s: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    """An incarnation that trained: from step `begin`, of which the first was committed at `first_at`; `end` is the last step of
    which it was told, at `end_at`, before anything went wrong. `stalled_s`: standing still for checkpoints in between."""

    resumed_at: float
    begin: int
    first_at: float
    end: int
    end_at: float
    stalled_s: float


def calibrate(records: Records) -> Calibration:
    """What the records of a finished run say.

    Args:
        records: of one run, in the order of its event log.

    Raises:
        ConfigError: the run did not finish, or too little of it is there.
    """
    started, finished = _only(records, "RunStarted"), _only(records, "RunFinished")
    stretches = _stretches(records)
    if sum(stretch.end - stretch.begin - 1 for stretch in stretches) < 2:
        raise ConfigError("this run has too few steps to be calibrated on: use one with at least 3 between two losses")
    details = started["details"]
    recoveries = [record for record in _of(records, "Recovery") if record["lost"]]
    step_s, begun, strategy = _step_s(stretches), _begun(records), _strategy(records, recoveries, details)
    stages = details.get("stages", 1)
    job = Job(
        name=details["name"],
        steps=details["max_steps"] - begun,
        step_s=step_s,
        workers=_of(records, "Resumed")[0]["world_size"] * stages,
        stages=stages,
        spares=_spares(records, details),
        min_workers=details["num_workers"][0],
        batch=details["global_batch_size"],
        costs=_costs(records, stretches, recoveries, step_s, strategy.kind),
    )
    return Calibration(job, strategy, _failures(records, recoveries, stretches, job), finished["at"])


def _begun(records: Records) -> int:
    """The step that the run went on from: those before were another run's."""
    return _of(records, "Resumed")[0]["step"]


# ---------------------------------------------------------------- stretches of training


def _stretches(records: Records) -> list[_Stretch]:
    """Incarnations that committed at least one step."""
    found = []
    for resumed in _of(records, "Resumed"):
        incarnation, begin = resumed["incarnation"], resumed["step"]
        over = min((r["detected"] for r in _of(records, "Recovery") if r["detected"] > resumed["at"]), default=math.inf)
        commits = [r for r in _of(records, "StepsCommitted") if r["incarnation"] == incarnation]
        timely = [r for r in commits if resumed["at"] < r["at"] < over]
        first = next((r for r in timely if r["first_step"] == begin), None)
        if first is None:
            continue
        last = max(timely, key=lambda r: (r["stop_step"], -r["at"]))
        stalls = [r for r in _of(records, "CheckpointCommitted") if r["incarnation"] == incarnation]
        stalled = sum(r["stall_s"] for r in stalls if r["step"] < last["stop_step"])
        found.append(_Stretch(resumed["at"], begin, first["at"], last["stop_step"], last["at"], stalled))
    return found


def _step_s(stretches: Iterable[_Stretch]) -> float:
    """Of a step, without checkpoints. The first of a stretch is left out: with it, a group warms up."""
    counted = [stretch for stretch in stretches if stretch.end > stretch.begin + 1]
    seconds = sum(stretch.end_at - stretch.first_at - stretch.stalled_s for stretch in counted)
    return seconds / sum(stretch.end - stretch.begin - 1 for stretch in counted)


# ---------------------------------------------------------------- costs


def _costs(records: Records, stretches: Sequence[_Stretch], recoveries: Records, step_s: float, kind: Kind) -> Costs:
    saved, chosen = _of(records, "CheckpointCommitted"), _of(records, "IntervalChosen")
    whole = [r for r in recoveries if r["attempts"] == 1 and None not in (r["fenced"], r["reconciled"], r["filled"])]
    loading = [r for r in whole if r["strategy"] in ("checkpoint", "snapshot")]
    others = [r for r in whole if r not in loading]
    rendezvous = _mean(r["reconciled"] - _ready(records, r) for r in others)
    replayed = [r for r in others if r["strategy"] == "logging"]
    load, replay_step = _line([r["replayed"] for r in replayed], [r["filled"] - r["reconciled"] for r in replayed])
    if loading:
        load = max(0.0, _mean(r["reconciled"] - _ready(records, r) for r in loading) - rendezvous)
    completed = [r["at"] for r in _of(records, "Completed")]
    stalls = _mean(r["stall_s"] for r in saved)
    updates = [r["update_s"] for r in chosen if r["update_s"] is not None]  # not where k was asked for
    update_s = min(median(updates) if updates else 0.0, 0.9 * step_s)
    in_memory = kind == "elastic_horovod"  # of its copies, the simulator hides nothing behind the next step
    hidden = 0.0 if in_memory else step_s - update_s
    return Costs(
        update_s=update_s,
        copy_s=stalls + hidden if in_memory or stalls > 1e-3 else _mean(r["snapshot_s"] for r in saved),
        persist_s=_mean(r["persist_s"] for r in saved),
        load_s=load,
        restore_s=load if in_memory else 0.0,
        detect_s=_mean(_unaccounted(stretch, r, step_s)[1] for r, stretch in _struck(recoveries, stretches)),
        fence_s=_mean(r["fenced"] - r["detected"] for r in whole),
        rendezvous_s=rendezvous,
        fill_s=_mean(r["filled"] - r["reconciled"] for r in others if r not in replayed),
        start_s=_start_s(records),
        resume_s=max(0.0, _mean(stretch.first_at - stretch.resumed_at for stretch in stretches[1:]) - step_s),
        replay_ratio=replay_step / step_s if replayed else 1.0,
        begin_s=stretches[0].first_at - step_s if stretches[0].first_at > step_s else 0.0,
        end_s=max(0.0, _only(records, "RunFinished")["at"] - min(completed)) if completed else 0.0,
    )


def _ready(records: Records, recovery: dict[str, Any]) -> float:
    """When all survivors were fenced and there was a replacement."""
    came = [r["at"] for r in _of(records, "WorkerStarted") if recovery["fenced"] < r["at"] < recovery["reconciled"]]
    return max([recovery["fenced"], *came])


def _start_s(records: Records) -> float:
    """Of a new worker, from when it was asked for until it was ready.

    Members are numbered in the order in which they are asked for: one for each that was lost, while the recovery waits if there
    was no spare, and else when training had gone on. One for each that had notice was asked for before, at a time that the
    accounts do not tell.
    """
    changes = [r for r in _of(records, "Recovery") if r["lost"] or r.get("left")]
    ready = {r["member"]: r["at"] for r in _of(records, "WorkerStarted")}
    early = min((r["at"] for r in (*_of(records, "WorkerLost"), *_of(records, "Noticed"))), default=math.inf)
    number = 1 + max((int(member[1:]) for member, at in ready.items() if at < early), default=-1)
    times = []
    for change in changes:
        new = range(number, number + len(change["lost"]) + len(change.get("left", ())))
        number = new.stop
        if change.get("left") or change["fenced"] is None or change["resumed"] is None:
            continue
        waited = _ready(records, change) > change["fenced"]
        begun = change["fenced" if waited else "resumed"]
        times += [ready[f"w{member}"] - begun for member in new if f"w{member}" in ready]
    return _mean(at for at in times if at > 0)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """What does not depend on x, and what each of it costs; neither is negative."""
    if not x or not any(x):
        return _mean(y), 0.0
    slope, base = np.polyfit(x, y, 1) if len(set(x)) > 1 else (0.0, 0.0)
    if slope <= 0 or base < 0:
        return 0.0, sum(y) / sum(x)
    return float(base), float(slope)


# ---------------------------------------------------------------- strategy and failures


def _strategy(records: Records, recoveries: Records, details: dict[str, Any]) -> Strategy:
    kind = _kind(details.get("strategy"), {r["strategy"] for r in recoveries})
    helped = [int(number) for r in recoveries for number in HELPED.findall(r["reason"])]
    workers = max(helped, default=1)
    said: dict[str, Any] = {name: details[name] for name in SAID if name in details}
    every = _interval(records)
    if kind in CHOOSING and every is None:
        every = details["max_steps"]  # never: it began anew, or replayed from the beginning
    return Strategy(kind=kind, every=every, replay_workers=workers, label=kind, **said)


def _kind(said: str | None, used: set[str]) -> Kind:
    """By what the run was told, for one recovery of another kind (a fall-back to a checkpoint) says little of the others."""
    if said == "auto":
        return "logging" if "logging" in used else "replication"
    if said is None:
        said = next((name for name in KINDS if name in used), None)
    return KINDS.get(said or "", "replication")


def _interval(records: Records) -> int | None:
    """Steps between two checkpoints: as the run decided, or else as most often within an incarnation."""
    chosen = [r["k"] for r in _of(records, "IntervalChosen")]
    if chosen:
        return chosen[-1]
    saved = _of(records, "CheckpointCommitted")
    pairs = [
        (a["step"], b["step"]) for a, b in pairwise(saved) if a["incarnation"] == b["incarnation"] and a["step"] < b["step"]
    ]
    if pairs:
        return Counter(b - a for a, b in pairs).most_common(1)[0][0]
    return math.gcd(*(r["step"] - _begun(records) for r in saved)) or None


def _failures(records: Records, recoveries: Records, stretches: Sequence[_Stretch], job: Job) -> Listed:
    ranks = {(r["incarnation"], r["member"]): r["rank"] for r in _of(records, "StepsCommitted")}
    found = []
    for recovery, stretch in _struck(recoveries, stretches):
        into, _ = _unaccounted(stretch, recovery, job.step_s)
        lost: list[int] = []
        for member in recovery["lost"]:
            number = _worker(records, member, recovery, ranks, job)
            others = [other for other in range(job.workers) if other not in lost]  # the log may not say which worker it was
            lost.append(number if number in others or not others else others[0])
        step = max(0.0, _reached(recovery, stretch) - _begun(records) + into)
        found.append(Failure(step=min(step, job.steps - 0.01), workers=tuple(dict.fromkeys(lost))))
    return Listed(tuple(sorted(found, key=lambda failure: failure.step or 0.0)))


def _worker(records: Records, member: str, recovery: dict[str, Any], ranks: dict[tuple[int, str], int], job: Job) -> int:
    """The number of a lost worker. Of a pipeline, the log says which stages were left; it was another, if one is missing."""
    replicas = [rank for (_, name), rank in ranks.items() if name == member]
    replica = replicas[-1] if replicas else 0
    if job.stages == 1:
        return replica if replica < job.workers else 0
    stages = [r["stage"] for r in records if r["event"] in ("Filled", "Completed") and r["member"] == member]
    if stages:
        return replica * job.stages + stages[-1]
    left = {
        r["marks"]["stage"]
        for r in _of(records, "Fenced")
        if r["marks"] is not None and recovery["detected"] <= r["at"] <= (recovery["fenced"] or r["at"])
    }
    missing = [stage for stage in range(job.stages) if stage not in left]
    return replica * job.stages + (missing[0] if missing else 0)


def _struck(recoveries: Records, stretches: Sequence[_Stretch]) -> list[tuple[dict[str, Any], _Stretch]]:
    """Each recovery, and the stretch of training that it ended."""
    pairs = []
    for recovery in recoveries:
        before = [stretch for stretch in stretches if stretch.first_at <= recovery["detected"]]
        if before:
            pairs.append((recovery, before[-1]))
    return pairs


def _reached(recovery: dict[str, Any], stretch: _Stretch) -> int:
    """Steps that were committed when the failure struck."""
    if recovery["redone"]:
        return max(stretch.end, recovery["step"] + recovery["redone"])
    advanced = recovery["completes"] or recovery["strategy"] in ("lossy", "skip")
    return max(recovery["step"] - advanced, stretch.begin)


def _unaccounted(stretch: _Stretch, recovery: dict[str, Any], step_s: float) -> tuple[float, float]:
    """How far into a step (as a share of it) the failure struck, and how long it took to be detected, seconds: what is left of
    the time since the last step, which does not tell the two apart; a detection is taken to take no longer than it must."""
    steps = _reached(recovery, stretch) - stretch.begin - 1
    committed = stretch.first_at + steps * step_s + stretch.stalled_s
    left = max(0.0, recovery["detected"] - committed)
    into = min(left, 0.99 * step_s)
    return into / step_s, left - into


# ---------------------------------------------------------------- records


def _spares(records: Records, details: dict[str, Any]) -> int:
    """Workers beyond those that train that had started before anybody was lost, or was told to leave."""
    first = min((r["at"] for r in (*_of(records, "WorkerLost"), *_of(records, "Noticed"))), default=math.inf)
    early = [r for r in _of(records, "WorkerStarted") if r["at"] < first]
    return max(0, len(early) - details["num_workers"][1])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return max(0.0, fmean(values)) if values else 0.0


def _of(records: Records, event: str) -> list[dict[str, Any]]:
    return [record for record in records if record["event"] == event]


def _only(records: Records, event: str) -> dict[str, Any]:
    found = _of(records, event)
    if len(found) != 1:
        raise ConfigError(f"the log has {len(found)} {event} lines: calibrate on a single run that finished")
    return found[0]
