"""The supervisor's decisions: events in, commands out, one table. No torch, no Ray, no clock, no file.

`handle(run, event)` takes an event into the state of the run and returns what to do next. The actor around it carries the
commands out and feeds each result back as an event, so every interleaving of losses can be tested without a cluster, and the
state is a fold of the run's event log.

What each event means is said by topic: `arrivals` and `losses` of workers, `news` of those who train, `phases` of a recovery
and `replacing` in it, `leaving` after a notice, `finishing` and `stopping`. `states` has the table of what may follow what.
Whatever is waited for has a deadline or is watched by the supervisor, so there is no state that a run cannot leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain_ft.errors import IllegalEventError
from raytrain_ft.policy import arrivals, finishing, leaving, losses, news, phases, replacing, replaying, stopping
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, TRANSITIONS, State

NEWS = (
    m.RunStarted,
    m.StepsCommitted,
    m.SamplesLost,
    m.CheckpointCommitted,
    m.CheckpointFailed,
    m.Dormant,
    m.LogFailed,
    m.LogWhole,
    m.LogWritten,
    m.Parted,
    m.SetAside,
    m.StateUnseen,
)
"""What counts whichever incarnation it is about."""


def handle(run: RunState, event: m.Event) -> list[c.Command]:
    """Takes one event and says what to do.

    Raises:
        IllegalEventError: the table does not allow the event in this state, and nothing was changed; or the event led to a
            state that the table lacks, which is an error of ours.
    """
    if run.state in ENDED:
        return []  # answers that were under way when the run ended
    line = f"{event.at:9.3f} {run.state:<13} {_short(event)}"
    before = run.state
    if _is_stale(run, event):
        run.story.append(f"{line}: ignored")
        return []
    allowed = TRANSITIONS.get(type(event), {}).get(before)
    if allowed is None:
        raise IllegalEventError(f"{_short(event)} cannot come in state {before}. Story:\n" + "\n".join([*run.story, line]))
    run.story.append(line)
    commands = _HANDLERS[type(event)](run, event)
    if run.state not in allowed:
        story = "\n".join(run.story)
        raise IllegalEventError(f"{_short(event)} led from {before} to {run.state}, which the table lacks. Story:\n{story}")
    return commands


def replay(rules: Rules, events: list[m.Event]) -> RunState:
    """The state after these events."""
    run = RunState(rules)
    for event in events:
        handle(run, event)
    return run


def _is_stale(run: RunState, event: m.Event) -> bool:
    """Whether it comes from who is no member any more, or is about an incarnation that is over. What was committed then is
    news nevertheless."""
    member = getattr(event, "member", None)
    if member is not None and member not in run.members:
        return True
    if isinstance(event, m.WorkerStarted):
        return run.members[event.member] != MemberState.STARTING
    if isinstance(event, NEWS):
        return False
    return getattr(event, "incarnation", None) not in (None, run.incarnation)


def _short(event: m.Event) -> str:
    names = ("member", "incarnation", "cause", "reason", "timer", "step", "slots")
    shown = [f"{name}={getattr(event, name)}" for name in names if hasattr(event, name)]
    return f"{type(event).__name__}({', '.join(shown)})"


# ---------------------------------------------------------------- deadlines, and the supervisor's own restart


def _on_timer_fired(run: RunState, event: m.TimerFired) -> list[c.Command]:
    """A deadline counts only for what it was set for: by now the run may be elsewhere."""
    savers = run.savers()
    silent = [member for member in run.joining or run.roster.taking_part() if member not in run.answers]
    match event.timer, run.state:
        case stopping.TIMER, _:
            return run.abort()
        case "schedule", State.SCHEDULING:
            return arrivals.begin(run, waited=True)
        case "fence", State.FENCE:
            return losses.lose_silent(run, event.at, silent, "it did not leave its step in time")
        case leaving.TIMER, State.RUNNING:
            return _leave(run, event.at)
        case "grow", State.RUNNING:
            return arrivals.resize(run, event.at)
        case timer, State.REPLACE if timer == replacing.timer_of(run) and not run.joining:
            return replacing.replace(run, waited=True)
        case ("reconcile", State.REPLACE) | ("fill", State.REBUILD):
            if event.timer == "fill":
                replaying.give_way(run, silent)
            return phases.suspect(run, event.at, f"{event.timer}: no answer from {', '.join(silent)} in time", "deadline")
        case timer, State.SHUTTING_DOWN if timer == f"save {savers}":
            late = [member for member in savers if member not in run.answers]
            return losses.lose_silent(run, event.at, late, "it did not save the final state in time")
    return []


def _leave(run: RunState, at: float) -> list[c.Command]:
    """The time has come to leave, or to stay for good."""
    stopped = leaving.stop(run, at)
    if stopped:
        return stopped
    leaving.lapse(run, at)
    return leaving.watch(run, at) + arrivals.resize(run, at)


def _on_right_lost(run: RunState, event: m.RightLost) -> list[c.Command]:
    """At once: what a last checkpoint or a last state would be written to may be another run's by now."""
    return run.fail("LockedError", event.reason)


def _on_supervisor_restarted(run: RunState, event: m.SupervisorRestarted) -> list[c.Command]:
    """Answers, timers, and commands that were not yet carried out went down with the old process: asks again."""
    again: list[c.Command] = [c.Kill(member) for member in run.roster.gone]
    again += [c.Watch(member, run.roster.nodes.get(member, "")) for member in run.members]
    again += stopping.deadline(run)
    match run.state:
        case State.SCHEDULING:
            return [*again, c.SetTimer("schedule", run.rules.schedule_timeout, run.incarnation)]
        case State.FENCE | State.REPLACE | State.REBUILD:
            return again + phases.suspect(run, event.at, "the supervisor was lost", "supervisor")
        case State.RESIZING:
            return [*again, c.StopAtBoundary(run.world)]
        case State.RUNNING:
            run.secured = None
            return again + replaying.log_only_again(run) + _leave(run, event.at)  # its moment may have passed meanwhile
        case State.STOPPING:
            return again + stopping.ask_again(run)
        case State.RESUME:
            return [*again, phases.train(run, event.at), *replaying.log_only_again(run)]
        case State.SHUTTING_DOWN:
            return again + finishing.save(run)
    return again


_HANDLERS: dict[type[m.Event], Callable[[RunState, Any], list[c.Command]]] = {
    m.RunStarted: arrivals.on_run_started,
    m.CapacityChanged: arrivals.on_capacity_changed,
    m.WorkerStarted: arrivals.on_worker_started,
    m.WorkerLost: losses.on_worker_lost,
    m.CauseFound: losses.on_cause_found,
    m.Noticed: leaving.noticed,
    m.Suspected: losses.on_suspected,
    m.Fenced: phases.on_fenced,
    m.Reconciled: phases.on_reconciled,
    m.Filled: phases.on_filled,
    m.StepsCommitted: news.on_steps_committed,
    m.SamplesLost: news.on_samples_lost,
    m.CheckpointCommitted: news.on_checkpoint_committed,
    m.CheckpointFailed: news.on_checkpoint_failed,
    m.CheckpointRejected: phases.on_rejected,
    m.CheckpointsFound: phases.on_checkpoints_found,
    m.IntervalChosen: news.on_noted,
    m.Dormant: news.on_dormant,
    m.Parted: news.on_noted,
    m.StageTimed: replaying.on_stage_timed,
    m.LogChosen: news.on_noted,
    m.LogFailed: news.on_log_failed,
    m.LogWhole: news.on_log_whole,
    m.LogWritten: news.on_noted,
    m.SetAside: news.on_noted,
    m.StateUnseen: news.on_state_unseen,
    m.NoticesUnavailable: news.on_noted,
    m.LogMissing: phases.on_log_missing,
    m.UndoRefused: phases.on_undo_refused,
    m.Stopped: arrivals.on_stopped,
    m.Checkpointed: stopping.on_checkpointed,
    m.Completed: finishing.on_completed,
    m.Saved: finishing.on_saved,
    m.TaskFailed: losses.on_task_failed,
    m.TimerFired: _on_timer_fired,
    m.AbortRequested: stopping.on_abort_requested,
    m.RightLost: _on_right_lost,
    m.SupervisorRestarted: _on_supervisor_restarted,
}
