"""Was the promise kept? One checker for every run, healthy or not, that reads nothing but the run's own event log.

It asserts what can be read there of the invariants:

* I1: every sample was used exactly once or is listed as lost (`audit`).
* I2: all replicas of a stage had equal hashes when they had been filled and went on to train, and at the end of the run; not
  after each step, of which the log has no hashes.
* I3: where every recovery kept every bit, a step that was committed twice, by other ranks or once more after everybody had gone
  back, has one loss, bit by bit. Equality with an undisturbed run needs that run's digest.
* I4: a committed checkpoint is found when it is looked for; everybody goes back to the newest one that could be loaded, and not
  before anybody looked. What a checkpoint holds is not in the log.
* I5: nobody who was given up for lost joined, or was heard of, in a later incarnation; that nothing else of it arrived anywhere
  is not in the log.
* I6: every recovery of a run that finished came to its end, in bounded time and with its phases in order, and every run has one
  end.
* I8: every loss, recovery and failure says why; not whether that names the place and the remedy.

Not in the log: I7, nothing left behind, is about processes and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.lineage import Return, Returns, stands
from raytrain_ft.policy.strategy import GOING_BACK, MARKS, Guarantee, Strategy

LONGEST_RECOVERY_S = 120.0
ENDS = ("RunFinished", "RunFailed")
"""The notes with which a run's records end."""
VOICES = ("Reconciled", "Filled", "StepsCommitted", "CheckpointCommitted", "Stopped", "Completed")


def check(records: Sequence[dict[str, Any]], *, longest_recovery: float = LONGEST_RECOVERY_S) -> list[str]:
    """Every violation found in a run's event log, in words; empty if the promise was kept."""
    result = audit(records)
    return [
        *(f"I1 {violation}" for violation in result.violations),
        *_differing_replicas(records),
        *_differing_losses(records),
        *_hidden_checkpoints(records),
        *_wrong_returns(records),
        *_voices_of_the_lost(records),
        *_unending(records, longest_recovery),
        *_unexplained(records),
    ]


def _differing_replicas(records: Sequence[dict[str, Any]]) -> list[str]:
    """All who hold the whole state of a stage in an incarnation, after filling and at the end, have the same hashes. Where that
    was seen not to be so, nobody trained in that incarnation."""
    found: list[str] = []
    trained = {record["incarnation"] for record in records if record["event"] == "Resumed"}
    for event, field in (("Filled", "digests"), ("Completed", "digest")):
        seen: dict[tuple[int, int], tuple[str, Any]] = {}
        for record in records:
            if record["event"] != event or record["incarnation"] not in trained:
                continue
            where = (record["incarnation"], record.get("stage", 0))
            member, value = seen.setdefault(where, (record["member"], record[field]))
            if value != record[field]:
                found.append(f"I2 {event} in incarnation {record['incarnation']}: {record['member']} differs from {member}")
    return found


def _differing_losses(records: Sequence[dict[str, Any]]) -> list[str]:
    """A step's loss is the same for whoever commits it and how often, if nothing made the run differ from an undisturbed one:
    no recovery that was not exact, no other number of workers, no replica that slept."""
    sizes = {record["world_size"] for record in records if record["event"] == "Resumed"}
    guarantees = {record["guarantee"] for record in records if record["event"] == "Recovery"}
    slept = any(record["event"] == "Dormant" for record in records)
    if len(sizes) > 1 or guarantees - {Guarantee.EXACT} or slept:
        return []
    found: list[str] = []
    seen: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["event"] == "StepsCommitted" and not isnan(record["loss"]):
            first = seen.setdefault(record["stop_step"], record)
            if first["loss"] != record["loss"]:
                who = [f"{one['member']} {one['loss']!r} in incarnation {one['incarnation']}" for one in (first, record)]
                found.append(f"I3 the loss of step {record['stop_step'] - 1} is, of {who[0]}, of {who[1]}")
    return found


def _hidden_checkpoints(records: Sequence[dict[str, Any]]) -> list[str]:
    """Who looks for checkpoints finds the newest that was committed, unless it could not be loaded before; or one that has
    taken its place, whose writer died before it could tell of it.

    Copies in other nodes' memory (Elastic Horovod) may be lost with these nodes.
    """
    run = next((record for record in records if record["event"] == "RunStarted"), {})
    if run.get("details", {}).get("strategy") == Strategy.SNAPSHOT:
        return []
    found: list[str] = []
    committed: dict[str, tuple[int, int]] = {}
    told: set[str] = set()
    for record in records:
        if record["event"] == "CheckpointCommitted":
            committed[record["name"]] = (record["incarnation"], record["step"])
            told.add(record["name"])
        elif record["event"] == "CheckpointRejected":
            committed.pop(record["name"], None)
        elif record["event"] == "CheckpointsFound" and committed and not record["error"]:
            newest = max(committed, key=committed.__getitem__)
            _, step = committed[newest]
            stored = {one["name"]: one["step"] for one in record["stored"]}
            untold = any(name not in told and reached >= step for name, reached in stored.items())
            if newest not in stored and not untold:
                found.append(f"I4 {newest} was committed, and is not found in incarnation {record['incarnation']}")
    return found


def _wrong_returns(records: Sequence[dict[str, Any]]) -> list[str]:
    """A recovery in which everybody went back begins with the newest checkpoint that could be loaded, of those that were found
    in one of its attempts, or that a run in which nobody has trained was to begin from; without any, with the beginning."""
    found: list[str] = []
    rejections = [record for record in records if record["event"] == "CheckpointRejected"]
    # what was committed just before a loss that was not finite is passed over, if there is another
    spoilt = {record["step"] for record in records if record["event"] == "TaskFailed" and record["kind"] == "non_finite"}
    looked = [record for record in records if record["event"] == "CheckpointsFound" and not record["error"]]
    begun = [record for record in records if record["event"] == "RunStarted" and record.get("stored")]
    trained = min((record["incarnation"] for record in records if record["event"] == "Resumed"), default=0)
    before = 0
    told = [Return(**one) for record in records if record["event"] == "RunStarted" for one in record.get("returns", ())]
    own = Returns()
    for record in records:
        own.take(record)
    for recovery in records:
        if recovery["event"] != "Recovery" or recovery["resumed"] is None:
            continue
        attempts = [one for one in looked if before < one["incarnation"] <= recovery["incarnation"]]
        before = recovery["incarnation"]
        if recovery["strategy"] not in GOING_BACK:
            continue
        if recovery["incarnation"] - recovery["attempts"] < trained:
            attempts = attempts or begun
        if not attempts:
            found.append(f"I4 everybody went back to step {recovery['step']}, and nobody had looked for checkpoints")
            continue
        steps: set[int] = set()
        rejected = {one["name"] for one in rejections if one["incarnation"] <= recovery["incarnation"]}
        for attempt in attempts:
            returns = [*told, *(one for one in own.all if one.incarnation < attempt["incarnation"])]
            standing = [one for one in attempt["stored"] if stands(one.get("incarnation", 0), one["step"], returns)]
            whole = [one["step"] for one in standing if one["name"] not in rejected]
            steps |= {next((step for step in whole if step not in spoilt), 0), *whole[:1]}
        # A loss just afterwards belongs to the same recovery, which may complete the first step instead of redoing it, and
        # after another one the next step, of which its last attempt says nothing.
        since = range(attempts[0]["incarnation"], recovery["incarnation"])
        steps |= {one["stop_step"] for one in records if one["event"] == "StepsCommitted" and one["incarnation"] in since}
        if recovery["step"] - recovery["completes"] not in steps:
            found.append(
                f"I4 everybody went back to step {recovery['step']}, and the newest whole checkpoint is of {sorted(steps)}"
            )
    return found


def _voices_of_the_lost(records: Sequence[dict[str, Any]]) -> list[str]:
    """Who was lost takes no part in an incarnation that begins after that."""
    found: list[str] = []
    lost: dict[str, int] = {}
    incarnation = 0
    for record in records:
        if record["event"] == "State":
            incarnation = record["incarnation"]
        elif record["event"] == "WorkerLost":
            lost[record["member"]] = incarnation
        elif record["event"] in VOICES and record["incarnation"] > lost.get(record["member"], record["incarnation"]):
            found.append(f"I5 {record['member']}, lost in incarnation {lost[record['member']]}: {record}")
    return found


def _unending(records: Sequence[dict[str, Any]], longest: float) -> list[str]:
    """Recoveries without an end, or with a late one, and runs without one. A run may fail in the midst of a recovery."""
    found: list[str] = []
    ends = [record["event"] for record in records if record["event"] in ENDS]
    for record in records:
        if record["event"] != "Recovery":
            continue
        if record["resumed"] is None and "RunFinished" in ends:
            found.append(f"I6 a recovery did not end, and the run finished: {record['cause']}")
        times = {mark: record[mark] for mark in MARKS if record[mark] is not None}
        if [*times.values()] != sorted(times.values()):
            found.append(f"I6 the phases of a recovery are not in order: {times}")
        if record["resumed"] is not None and record["resumed"] - record["detected"] > longest:
            found.append(f"I6 a recovery took {record['resumed'] - record['detected']:.1f} s: {record['cause']}")
    if len(ends) != 1:
        found.append(f"I6 the run has {len(ends)} ends")
    return found


def _unexplained(records: Sequence[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for record in records:
        if record["event"] in ("WorkerLost", "Recovery") and not record["cause"]:
            found.append(f"I8 it has no cause: {record}")
        elif record["event"] == "RunFailed" and not all(record["error"]):
            found.append(f"I8 the run failed and does not say why: {record}")
    return found
