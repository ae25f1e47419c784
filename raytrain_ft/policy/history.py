"""Was the promise kept? One checker for every run, healthy or not, that reads nothing but the run's own event log.

It asserts what can be read there of the invariants:

* I1: every sample was used exactly once or is listed as lost (`audit`).
* I2: all replicas of a stage had equal hashes after they were filled, and at the end of the run; not after each step, of which
  the log has no hashes.
* I5: nobody who was given up for lost joined, or was heard of, in a later incarnation; that nothing else of it arrived anywhere
  is not in the log.
* I6: every recovery of a run that finished came to its end, in bounded time, and every run has one end.
* I8: every loss, recovery and failure says why; not whether that names the place and the remedy.

Not in the log: I3, bit-equality with an undisturbed run, needs that run's digest; I4 is about what checkpoints hold; I7,
nothing left behind, is about processes and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_ft.policy.audit import audit

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
        *_voices_of_the_lost(records),
        *_unending(records, longest_recovery),
        *_unexplained(records),
    ]


def _differing_replicas(records: Sequence[dict[str, Any]]) -> list[str]:
    """All who hold the whole state of a stage in an incarnation, after filling and at the end, have the same hashes."""
    found: list[str] = []
    for event, field in (("Filled", "digests"), ("Completed", "digest")):
        seen: dict[tuple[int, int], tuple[str, Any]] = {}
        for record in records:
            if record["event"] != event:
                continue
            where = (record["incarnation"], record.get("stage", 0))
            member, value = seen.setdefault(where, (record["member"], record[field]))
            if value != record[field]:
                found.append(f"I2 {event} in incarnation {record['incarnation']}: {record['member']} differs from {member}")
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
