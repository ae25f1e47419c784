"""The states of a run and the one table that says what may happen in each: what `docs/architecture.md` draws."""

from __future__ import annotations

from enum import StrEnum

from raytrain_ft.policy import messages as m


class State(StrEnum):
    """States of a run. FENCE, REPLACE, REBUILD and RESUME together are the field's RECOVERING."""

    INITIALIZING = "INITIALIZING"
    SCHEDULING = "SCHEDULING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
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

# {event: {state in which it may come: states that it may lead to}}. Whatever is absent is illegal.
# An event of an incarnation that is over, or a timer of a state that is over, is ignored in any live state.
TRANSITIONS: dict[type[m.Event], dict[State, set[State]]] = {
    m.RunStarted: {S.INITIALIZING: {S.SCHEDULING}},
    m.CapacityChanged: {state: {state} for state in LIVE - {S.SCHEDULING, S.REPLACE}}
    | {S.SCHEDULING: {S.SCHEDULING, S.REPLACE}, S.REPLACE: {S.REPLACE}},
    m.WorkerStarted: {state: {state} for state in LIVE - {S.SCHEDULING, S.RUNNING}}
    | {S.SCHEDULING: {S.SCHEDULING, S.REPLACE}, S.RUNNING: {S.RUNNING, S.RESIZING}},
    m.WorkerLost: {
        S.SCHEDULING: {S.SCHEDULING, S.ERRORED},
        S.RUNNING: {S.RUNNING, S.FENCE, S.ERRORED},
        S.RESIZING: {S.RESIZING, S.FENCE, S.ERRORED},
        S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED},
        S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED},
        S.REBUILD: {S.REBUILD, S.FENCE, S.ERRORED},
        S.RESUME: {S.RESUME, S.FENCE, S.ERRORED},
        S.SHUTTING_DOWN: {S.SHUTTING_DOWN, S.ERRORED},
    },
    m.Suspected: {state: {S.FENCE, S.ERRORED} for state in (S.RUNNING, S.RESIZING, S.REPLACE, S.REBUILD, S.RESUME)}
    | {S.FENCE: {S.FENCE}, S.SHUTTING_DOWN: {S.SHUTTING_DOWN}},
    m.Fenced: {S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED}},
    m.Reconciled: {S.REPLACE: {S.REPLACE, S.REBUILD, S.RESUME}},
    m.Filled: {S.REBUILD: {S.REBUILD, S.RESUME, S.FENCE}},
    m.StepsCommitted: {
        S.RESUME: {S.RUNNING},
        S.RUNNING: {S.RUNNING, S.RESIZING},
        S.RESIZING: {S.RESIZING},
        S.FENCE: {S.FENCE},
        S.REPLACE: {S.REPLACE},
        S.REBUILD: {S.REBUILD},
        S.SHUTTING_DOWN: {S.SHUTTING_DOWN},
    },
    m.SamplesLost: {state: {state} for state in LIVE},
    m.Stopped: {S.RESUME: {S.RESUME}, S.RUNNING: {S.RUNNING}, S.RESIZING: {S.RESIZING, S.FENCE}},
    m.Completed: {state: {state, S.SHUTTING_DOWN, S.ERRORED} for state in (S.RESUME, S.RUNNING, S.RESIZING)},
    m.Saved: {S.SHUTTING_DOWN: {S.FINISHED}},
    m.TaskFailed: {state: {S.ERRORED} for state in LIVE},
    m.TimerFired: {
        S.SCHEDULING: {S.SCHEDULING, S.REPLACE, S.ERRORED},
        S.FENCE: {S.FENCE, S.REPLACE, S.ERRORED},
        S.REPLACE: {S.REPLACE, S.FENCE, S.ERRORED},
        S.REBUILD: {S.REBUILD, S.FENCE, S.ERRORED},
        S.SHUTTING_DOWN: {S.SHUTTING_DOWN, S.ERRORED},
    }
    | {state: {state} for state in (S.RUNNING, S.RESIZING, S.RESUME)},
    m.AbortRequested: {state: {S.ABORTED} for state in LIVE},
    m.SupervisorRestarted: {state: {state} for state in LIVE - {S.REPLACE, S.REBUILD}}
    | {S.REPLACE: {S.FENCE, S.REPLACE}, S.REBUILD: {S.FENCE}},
}
