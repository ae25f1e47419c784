"""An end before its time: everybody stops at a step boundary, stores it, and the run is over.

A recovery that is under way comes first, and a loss meanwhile is recovered from; one deadline bounds all of it. A run that has
nothing to store, or may not, ends at once.
"""

from __future__ import annotations

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State

TIMER = "stop"


def on_abort_requested(run: RunState, event: m.AbortRequested) -> list[c.Command]:
    if run.abort_reason:
        return []
    run.abort_reason = event.reason
    if run.state == State.SHUTTING_DOWN:
        return deadline(run)
    if not run.world or not run.rules.leaves_checkpoint:
        return run.abort()
    return [*deadline(run), *(stop(run) if run.state in (State.RUNNING, State.RESIZING) else [])]


def deadline(run: RunState) -> list[c.Command]:
    """It counts whatever the incarnation."""
    return [c.SetTimer(TIMER, run.rules.stop_timeout, None)] if run.abort_reason else []


def stop(run: RunState) -> list[c.Command]:
    """Asks for a stop at a boundary that all agree upon."""
    run.state = State.STOPPING
    return [c.StopAtBoundary(run.world)]


def on_stopped(run: RunState, event: m.Stopped) -> list[c.Command]:
    """Once everybody stands at the boundary, it is stored."""
    run.state = State.STOPPING
    run.answers[event.member] = event
    if not _all_say(run, m.Stopped):
        return []
    run.history.close(event.at)
    run.answers = {}
    return [c.Checkpoint(run.world, run.incarnation)]


def on_checkpointed(run: RunState, event: m.Checkpointed) -> list[c.Command]:
    run.answers[event.member] = event
    return run.abort() if _all_say(run, m.Checkpointed) else []


def ask_again(run: RunState) -> list[c.Command]:
    """After the supervisor's restart: everybody says once more that it has stopped."""
    run.answers = {}
    return [c.StopAtBoundary(run.world)]


def _all_say(run: RunState, answer: type[m.Event]) -> bool:
    return all(isinstance(run.answers.get(member), answer) for member in run.world)
