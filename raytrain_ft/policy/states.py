"""The states of a run and the one table that says what may happen in each.

``python -m raytrain_ft.policy.states`` prints the diagram in `docs/architecture.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from raytrain_ft.policy import messages as m


class State(StrEnum):
    """States of a run. FENCE, REPLACE, REBUILD and RESUME together are the field's RECOVERING."""

    INITIALIZING = "INITIALIZING"
    SCHEDULING = "SCHEDULING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    STOPPING = "STOPPING"
    FENCE = "FENCE"
    REPLACE = "REPLACE"
    REBUILD = "REBUILD"
    RESUME = "RESUME"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"


S = State
ENDED = frozenset({S.FINISHED, S.ERRORED, S.ABORTED})
LIVE = frozenset(S) - ENDED - {S.INITIALIZING}
RECOVERING = frozenset({S.FENCE, S.REPLACE, S.REBUILD, S.RESUME})
TRAINING = frozenset({S.RUNNING, S.RESIZING, S.STOPPING, S.RESUME})


def _stay(states: Iterable[State]) -> dict[State, set[State]]:
    return {state: {state} for state in states}


# {event: {state in which it may come: states that it may lead to}}. Whatever is absent is illegal.
# Ignored in any live state: what concerns an incarnation that is over, or comes from who is no member any more.
TRANSITIONS: dict[type[m.Event], dict[State, set[State]]] = {
    m.RunStarted: {S.INITIALIZING: {S.SCHEDULING}},
    m.CapacityChanged: _stay(LIVE) | {S.SCHEDULING: {S.SCHEDULING, S.REPLACE}},
    m.WorkerStarted: _stay(LIVE)
    | {S.SCHEDULING: {S.SCHEDULING, S.REPLACE}, S.RUNNING: {S.RUNNING, S.RESIZING}, S.REPLACE: {S.REPLACE, S.ERRORED}},
    m.WorkerLost: {
        S.SCHEDULING: {S.SCHEDULING, S.REPLACE, S.ERRORED},
        S.RUNNING: {S.RUNNING, S.FENCE, S.REPLACE, S.ERRORED},
        S.RESIZING: {S.RESIZING, S.FENCE, S.REPLACE, S.ERRORED},
        S.STOPPING: {S.STOPPING, S.FENCE, S.REPLACE, S.ERRORED},
        S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED},
        S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED},
        S.REBUILD: {S.REBUILD, S.FENCE, S.ERRORED},
        S.RESUME: {S.RESUME, S.FENCE, S.REPLACE, S.ERRORED},
        S.SHUTTING_DOWN: {S.SHUTTING_DOWN, S.FENCE, S.REPLACE, S.ERRORED},
    },
    m.CauseFound: _stay(LIVE),
    m.Noticed: _stay(LIVE) | {S.RUNNING: {S.RUNNING, S.RESIZING}},
    m.Suspected: _stay({S.FENCE, S.SHUTTING_DOWN})
    | {state: {S.FENCE, S.ERRORED} for state in TRAINING | {S.REBUILD}}
    | {S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED}},
    m.Fenced: {S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED}},
    m.Reconciled: {S.REPLACE: {S.REPLACE, S.REBUILD, S.RESUME}},
    m.Filled: {S.REBUILD: {S.REBUILD, S.RESUME, S.FENCE, S.ERRORED}},
    m.StepsCommitted: _stay(LIVE - {S.SCHEDULING}) | {S.RESUME: {S.RESUME, S.RUNNING, S.RESIZING, S.STOPPING}},
    m.SamplesLost: _stay(LIVE - {S.SCHEDULING}),
    m.CheckpointCommitted: _stay(LIVE - {S.SCHEDULING}),
    m.CheckpointFailed: _stay(LIVE - {S.SCHEDULING}),
    m.IntervalChosen: _stay(LIVE - {S.SCHEDULING}),
    m.Dormant: _stay(LIVE - {S.SCHEDULING}),
    m.Parted: _stay(LIVE - {S.SCHEDULING}),
    m.StageTimed: _stay(LIVE - {S.SCHEDULING}),
    m.LogChosen: _stay(LIVE - {S.SCHEDULING}),
    m.LogFailed: _stay(LIVE - {S.SCHEDULING}),
    m.LogWhole: _stay(LIVE - {S.SCHEDULING}),
    m.LogWritten: _stay(LIVE - {S.SCHEDULING}),
    m.SetAside: _stay(LIVE - {S.SCHEDULING}),
    m.StateUnseen: _stay(LIVE - {S.SCHEDULING}),
    m.NoticesUnavailable: _stay(LIVE),
    m.LogMissing: {state: {S.FENCE, S.ERRORED} for state in (S.REBUILD, S.RESUME)},
    m.UndoRefused: {S.REPLACE: {S.FENCE, S.ERRORED}},
    m.CheckpointsFound: {S.REPLACE: {S.REPLACE, S.ERRORED}},
    m.CheckpointRejected: {S.REPLACE: {S.FENCE, S.ERRORED}, S.REBUILD: {S.FENCE, S.ERRORED}},
    m.Stopped: {state: {S.RESIZING, S.FENCE, S.ERRORED} for state in TRAINING}
    | {S.RESUME: {S.RESIZING, S.STOPPING, S.FENCE, S.ERRORED}, S.STOPPING: {S.STOPPING}},
    m.Checkpointed: {S.STOPPING: {S.STOPPING, S.ABORTED}},
    m.Completed: {state: {state, S.SHUTTING_DOWN, S.ERRORED} for state in TRAINING} | _stay({S.SHUTTING_DOWN}),
    m.Saved: {S.SHUTTING_DOWN: {S.SHUTTING_DOWN, S.FINISHED}},
    m.TaskFailed: {S.SCHEDULING: {S.ERRORED}}
    | {state: {state, S.ERRORED} for state in LIVE - {S.SCHEDULING}}
    | {state: {state, S.FENCE, S.ERRORED} for state in (S.REPLACE, S.REBUILD)}
    | {state: {state, S.FENCE, S.REPLACE, S.ERRORED} for state in TRAINING | {S.FENCE, S.SHUTTING_DOWN}},
    m.TimerFired: _stay(TRAINING)
    | {
        S.RUNNING: {S.RUNNING, S.RESIZING},
        S.STOPPING: {S.STOPPING, S.ABORTED},
        S.RESUME: {S.RESUME, S.ABORTED},
        S.SCHEDULING: {S.REPLACE, S.ERRORED},
        S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED, S.ABORTED},
        S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED, S.ABORTED},
        S.REBUILD: {S.REBUILD, S.FENCE, S.ERRORED, S.ABORTED},
        S.SHUTTING_DOWN: {S.SHUTTING_DOWN, S.FENCE, S.REPLACE, S.ERRORED, S.ABORTED},
    },
    m.AbortRequested: {state: {state, S.ABORTED} for state in LIVE - {S.SCHEDULING}}
    | {S.INITIALIZING: {S.ABORTED}, S.SCHEDULING: {S.ABORTED}}
    | {S.RUNNING: {S.STOPPING, S.ABORTED}, S.RESIZING: {S.STOPPING, S.ABORTED}}
    | {S.STOPPING: {S.STOPPING}, S.SHUTTING_DOWN: {S.SHUTTING_DOWN}},
    m.RightLost: {state: {S.ERRORED} for state in LIVE},
    m.SupervisorRestarted: _stay(TRAINING | {S.SCHEDULING, S.SHUTTING_DOWN})
    | {S.RUNNING: {S.RUNNING, S.RESIZING}}
    | {state: {S.FENCE, S.ERRORED} for state in (S.FENCE, S.REBUILD)}
    | {S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED}},
}


def diagram() -> str:
    """The table as a Mermaid state diagram. Left out: events that change nothing, and which phase of a recovery it is that
    a run ends in."""
    edges: dict[tuple[str, State], set[str]] = {}
    for event, by_state in TRANSITIONS.items():
        for source, targets in by_state.items():
            for target in targets - {source}:
                drawn = "RECOVERING" if source in RECOVERING and target in ENDED else source
                edges.setdefault((drawn, target), set()).add(event.__name__)
    order = [*S, "RECOVERING"]
    inner, outer = ["    state RECOVERING {"], ["    [*] --> INITIALIZING"]
    for source, target in sorted(edges, key=lambda edge: (order.index(edge[0]), order.index(edge[1]))):
        line = f"    {source} --> {target} : {', '.join(sorted(edges[source, target]))}"
        if source in RECOVERING and target in RECOVERING:
            inner.append(f"    {line}")
        else:
            outer.append(line)
    ends = [f"    {state} --> [*]" for state in S if state in ENDED]
    return "\n".join(["stateDiagram-v2", *inner, "    }", *outer, *ends]) + "\n"


if __name__ == "__main__":
    print(diagram(), end="")
