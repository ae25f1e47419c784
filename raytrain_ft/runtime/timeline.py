"""The run's timeline: a file that Perfetto or chrome://tracing opens, made from the event log."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from raytrain_ft.runtime.event_log import read_records

MICROSECONDS = 1e6


def build(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trace events: the machine's states, each worker's committed steps, losses, and the phases of each recovery."""
    trace: list[dict[str, Any]] = [_name(1, 0, "supervisor"), _name(1, 1, "recoveries")]
    rows: dict[str, int] = {}
    states = [r for r in records if r["event"] == "State"]
    for state, after in itertools.zip_longest(states, states[1:]):
        end = after["at"] if after else records[-1].get("at", state["at"])
        trace.append(_span(state["state"], 0, state["at"], end, {"incarnation": state["incarnation"]}))
    for record in records:
        member = record.get("member")
        if member is not None and member not in rows:
            rows[member] = 10 + len(rows)
            trace.append(_name(1, rows[member], f"worker {member}"))
        if record["event"] == "StepsCommitted":
            first, stop = record["first_step"], record["stop_step"]
            seconds = record["longest_s"] * (stop - first)
            trace.append(_span(f"steps {first}-{stop - 1}", rows[record["member"]], record["at"] - seconds, record["at"], {}))
        elif record["event"] in ("WorkerLost", "Suspected", "TaskFailed", "WorkerStarted", "SupervisorRestarted"):
            trace.append(_instant(record["event"], rows.get(record.get("member", ""), 0), record))
        elif record["event"] == "Recovery":
            trace += _phases(record)
    return trace


def _phases(recovery: dict[str, Any]) -> list[dict[str, Any]]:
    marks = [(name, recovery[name]) for name in ("detected", "fenced", "reconciled", "filled", "resumed")]
    known = [(name, at) for name, at in marks if at is not None]
    names = {"fenced": "fence", "reconciled": "replace", "filled": "rebuild", "resumed": "resume"}
    return [
        _span(names[name], 1, before, at, {"cause": recovery["cause"], "step": recovery["step"]})
        for (_, before), (name, at) in itertools.pairwise(known)
    ]


def _span(name: str, row: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    length = max(0.0, end - start) * MICROSECONDS
    return {"name": name, "ph": "X", "pid": 1, "tid": row, "ts": start * MICROSECONDS, "dur": length, "args": args}


def _instant(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": 1, "tid": row, "ts": args["at"] * MICROSECONDS, "args": args}


def _name(pid: int, row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": name}}


def write(directory: Path) -> Path:
    """Writes `timeline.json` beside the event log; a reader sees the old one or the new one, never half of it."""
    path, draft = directory / "timeline.json", directory / f".timeline-{os.getpid()}.tmp"
    with draft.open("w") as file:
        file.write('{"traceEvents": [')
        # one by one, for no other thread runs in the midst of `dumps`
        for number, one in enumerate(build(read_records(directory / "events.jsonl"))):
            file.write(("," if number else "") + "\n" + json.dumps(one))
        file.write("\n]}\n")
    draft.replace(path)
    return path
