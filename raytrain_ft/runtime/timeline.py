"""The run's timeline: a file that Perfetto or chrome://tracing opens, made from the event log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from raytrain_ft.policy.strategy import spans
from raytrain_ft.runtime.event_log import each_record
from raytrain_ft.storage.draft import draft_of

MICROSECONDS = 1e6
MOST_SPANS = 200_000
"""Of committed steps: a run of weeks has millions of records, and no viewer would open as many."""


def build(records: Iterable[dict[str, Any]], merged: int = 1) -> Iterator[dict[str, Any]]:
    """Trace events: the machine's states, each worker's committed steps, losses, and the phases of each recovery.

    Args:
        merged: so many records of a worker's steps, one after the other, become one span.
    """
    yield from (_name(1, 0, "supervisor"), _name(1, 1, "recoveries"))
    rows: dict[str, int] = {}
    steps: dict[str, list[dict[str, Any]]] = {}  # of each worker, those that are not in a span yet
    state: dict[str, Any] | None = None
    last = 0.0
    for record in records:
        member, last = record.get("member"), record.get("at", last)
        if member is not None and member not in rows and record["event"] != "StepsStored":  # there it is a checkpoint's name
            rows[member] = 10 + len(rows)
            yield _name(1, rows[member], f"worker {member}")
        if record["event"] == "State":
            if state is not None:
                yield _span(state["state"], 0, state["at"], record["at"], {"incarnation": state["incarnation"]})
            state = record
        elif record["event"] == "StepsCommitted":
            before = steps.setdefault(record["member"], [])
            if before and (len(before) == merged or not _follows(before[-1], record)):
                yield _steps(before, rows[record["member"]])
                before.clear()
            before.append(record)
        elif record["event"] in ("WorkerLost", "Suspected", "TaskFailed", "WorkerStarted", "SupervisorRestarted"):
            yield _instant(record["event"], rows.get(record.get("member", ""), 0), record)
        elif record["event"] == "Recovery":
            yield from _phases(record)
    yield from (_steps(left, rows[member]) for member, left in steps.items() if left)
    if state is not None:
        yield _span(state["state"], 0, state["at"], max(last, state["at"]), {"incarnation": state["incarnation"]})


def _follows(before: dict[str, Any], record: dict[str, Any]) -> bool:
    return (before["incarnation"], before["stop_step"]) == (record["incarnation"], record["first_step"])


def _steps(records: list[dict[str, Any]], row: int) -> dict[str, Any]:
    """Steps, one after the other, as one span."""
    first, last = records[0], records[-1]
    seconds = first["longest_s"] * (first["stop_step"] - first["first_step"])
    return _span(f"steps {first['first_step']}-{last['stop_step'] - 1}", row, first["at"] - seconds, last["at"], {})


def _phases(recovery: dict[str, Any]) -> list[dict[str, Any]]:
    about = {"cause": recovery["cause"], "step": recovery["step"]}
    return [_span(name, 1, begin, end, about) for name, begin, end in spans(recovery.__getitem__)]


def _span(name: str, row: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    length = max(0.0, end - start) * MICROSECONDS
    return {"name": name, "ph": "X", "pid": 1, "tid": row, "ts": start * MICROSECONDS, "dur": length, "args": args}


def _instant(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": 1, "tid": row, "ts": args["at"] * MICROSECONDS, "args": args}


def _name(pid: int, row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": name}}


def write(directory: Path) -> Path:
    """Writes `timeline.json` beside the event log; a reader sees the old one or the new one, never half of it."""
    path, log = directory / "timeline.json", directory / "events.jsonl"
    with log.open("rb") as lines:  # one may be damaged, and what comes before it is drawn
        merged = max(1, -(-sum(line.startswith(b'{"event":"StepsCommitted"') for line in lines) // MOST_SPANS))
    with draft_of(path) as file:
        file.write('{"traceEvents": [')
        # one by one, for no other thread runs in the midst of `dumps`
        for number, one in enumerate(build(each_record(log), merged)):
            file.write(("," if number else "") + "\n" + json.dumps(one))
        file.write("\n]}\n")
    return path
