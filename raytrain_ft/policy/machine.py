"""The supervisor's decisions: events in, commands out, one table. No torch, no Ray, no clock, no file.

`handle(run, event)` takes an event into the state of the run and returns what to do next. The actor around it carries the
commands out and feeds each result back as an event, so every interleaving of losses can be tested without a cluster, and the
state is a fold of the run's event log.

This file says what each event means; `phases` says what a recovery does, `states` has the table. Whatever is waited for has a
deadline or is watched by the supervisor, so there is no state that a run cannot leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raytrain_ft.errors import IllegalEventError
from raytrain_ft.policy import leaving, phases, replaying, stopping
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import MOST_HELPED, MOST_UNSAVED, RunState
from raytrain_ft.policy.states import ENDED, TRAINING, TRANSITIONS, State
from raytrain_ft.policy.world import differing_in_stages

NEWS = (
    m.RunStarted,
    m.StepsCommitted,
    m.SamplesLost,
    m.CheckpointCommitted,
    m.CheckpointFailed,
    m.Dormant,
    m.LogFailed,
    m.LogWritten,
    m.Parted,
    m.SetAside,
    m.StateUnseen,
)
"""What counts whichever incarnation it is about."""
FORGETTING = 0.9
"""With every record of committed steps, what was a long step before counts by so much less."""
FORGETTING_SLOWLY = 0.999
"""The same of what is a reason to be patient with who hangs perhaps: a rare step may take long."""
IN_VAIN = 3
"""Recoveries in a row without a step after which a worker that is new, and says that it cannot join, is the reason perhaps."""
COMPUTING = TRAINING | {State.REPLACE, State.REBUILD}
"""Where a loss may turn out not to be finite: a recovery completes steps, too."""
PAUSES_APART = 4
"""Times what it took everybody to take newcomers in: so long they train before it is done again. Nodes that come back one by
one would else hold all others up once for each of them."""
MOST_STORED = 16
"""Checkpoints that are remembered to go back to."""
UNTIDY = "when a checkpoint was durable, "
"""How the warning begins that something was left to be done then; told once, for it is rarely another reason."""


def handle(run: RunState, event: m.Event) -> list[m.Command]:
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


# ---------------------------------------------------------------- workers come


def _on_run_started(run: RunState, event: m.RunStarted) -> list[m.Command]:
    run.incarnation, run.returns = event.incarnation, list(event.returns)
    run.stored = run.standing(event.stored)
    if event.stored and not run.stored and run.returns[-1].step:
        run.rejected.clear()
        run.stored = list(event.stored)
        run.warn(
            f"begins from {run.stored[0].name}, for the checkpoint that an earlier run had gone back to is gone: what a "
            "recovery of that one cost before is part of it, and no longer of its record"
        )
    run.state = State.SCHEDULING
    return [m.SetTimer("schedule", run.rules.schedule_timeout, run.incarnation), *run.provision()]


def _on_capacity_changed(run: RunState, event: m.CapacityChanged) -> list[m.Command]:
    run.roster.resized(event.slots, event.last_resort)
    return run.provision() + _go_on_waiting(run)


def _on_worker_started(run: RunState, event: m.WorkerStarted) -> list[m.Command]:
    run.roster.ready(event.member, event.node)
    run.longest_build = max(run.longest_build, event.build_s)
    return _resize(run, event.at) if run.state == State.RUNNING else _go_on_waiting(run)


def _go_on_waiting(run: RunState) -> list[m.Command]:
    """There are other workers than before, ready or to be hoped for: whoever waits for some looks again."""
    if run.state == State.SCHEDULING:
        return _begin(run)
    return phases.replace(run) if run.state == State.REPLACE and not run.joining else []


def _begin(run: RunState, *, waited: bool = False) -> list[m.Command]:
    """Forms the first world, of as many as the cluster has room for; after the deadline, of as many as there are."""
    spares, rules = phases.to_seat(run), run.rules
    hoped_for = rules.whole(min(rules.max_workers, run.roster.slots or 0)) if run.roster.any_starting() and not waited else 0
    if len(spares) >= max(hoped_for, rules.min_workers):
        run.incarnation += 1
        run.begin_from_stored()  # nobody has tried to load any yet
        if run.load is not None:
            run.warn(f"goes on from {run.load.name}, with what it holds of the optimizer's settings and of the schedule")
        return phases.join(run, tuple(spares[: rules.whole(min(rules.max_workers, len(spares)))]))
    if not waited:
        return []
    under_way = len(run.roster.of(MemberState.STARTING))
    remedy = (
        f"{under_way} more were still being set up: raise RecoveryConfig(schedule_timeout=...), or have TrainTask.model() and "
        "dataset() take less time"
        if under_way
        else "Add nodes, lower num_workers or resources_per_worker"
    )
    return run.fail(
        "ConfigError",
        f"{len(spares)} workers could be placed within {rules.schedule_timeout:g} s, num_workers asks for at least "
        f"{rules.min_workers}. {remedy}.",
    )


def _resize(run: RunState, at: float) -> list[m.Command]:
    """Who had notice leaves, if there is a replacement now; or else the world grows; or else all stay for now."""
    return leaving.stop(run, at) or _grow(run, at) or leaving.stay(run, at)


def _grow(run: RunState, at: float) -> list[m.Command]:
    """A planned resize: everybody stops at a step boundary that all agree upon."""
    if not _may_grow(run):
        return []
    if (wait := _grows_at(run) - at) > 0:
        return [m.SetTimer("grow", wait, run.incarnation)]
    run.state = State.RESIZING
    run.history.begin(at, f"{len(run.roster.lasting())} more workers are ready", "supervisor", len(run.world))
    return [m.StopAtBoundary(run.world)]


def _may_grow(run: RunState) -> bool:
    spares = len(run.roster.lasting())
    return len(run.world) < run.rules.max_workers and spares >= run.rules.stages and run.step < run.rules.max_steps


def _grows_at(run: RunState) -> float:
    """From when on others may be taken in: right after a loss, but some time after others were."""
    last = run.recoveries[-1] if run.recoveries else None
    if last is None or last.resumed is None or last.lost or last.left or last.world_after <= last.world_before:
        return 0.0
    return last.resumed + PAUSES_APART * (last.resumed - last.detected)


def _on_stopped(run: RunState, event: m.Stopped) -> list[m.Command]:
    """Some rank heard a call to stop, so all of them stop: the call of this resize, or a late one of a resize before."""
    if run.abort_reason:
        return stopping.on_stopped(run, event)
    if run.state != State.RESIZING:
        run.history.begin(event.at, "a call to stop came late", "supervisor", len(run.world))
    run.state = State.RESIZING
    return phases.fence(run, event.at) if run.all_answered(event, run.world) else []


# ---------------------------------------------------------------- workers go


def _on_worker_lost(run: RunState, event: m.WorkerLost) -> list[m.Command]:
    return _lose(run, [event.member], event)


def _lose(run: RunState, members: list[str], event: m.WorkerLost, *, avoid: bool = False) -> list[m.Command]:
    """These members are gone, all in the way that the event tells. `avoid`: it may be for where they were."""
    savers = run.savers()
    leaving.lapse(run, event.at)
    preempted = {member: event.preempted or member in run.leaving for member in members}  # the end of a notice is no failure
    was = {member: run.roster.lose(member, replace(event, preempted=preempted[member])) for member in members}
    for member in members:
        leaving.forget(run, member)
    kills: list[m.Command] = [m.Kill(member, avoid) for member in members]
    working = [member for member in members if was[member] in (MemberState.ACTIVE, MemberState.LEAVING)]
    waiting = [member for member in members if member not in working and run.state == State.REPLACE and member in run.world]
    if not working:
        exhausted = _count_lost(run, waiting, preempted, event) if waiting else ""
        if exhausted:
            return kills + run.fail("RetryBudgetError", exhausted)
        _wake(run, members)
        commands = kills + run.provision() + _go_on_waiting(run)
        if run.state == State.SCHEDULING and run.roster.cannot_start() and not run.roster.any_starting():
            commands += run.fail("RecoveryError", f"workers cannot be started: {event.cause}")
        return commands
    if run.state == State.SHUTTING_DOWN and len(run.savers()) == run.rules.stages:
        return kills + (_save(run, savers) if run.savers() != savers else [])  # else a stage must be had from elsewhere first
    if run.state == State.SHUTTING_DOWN:
        run.unsaved += 1
        if run.unsaved >= MOST_UNSAVED:
            who = "every worker" if run.rules.stages == 1 else "every worker of a stage"
            why = f"{run.unsaved} times, {who} was lost before the final state was saved"
            return kills + run.fail("NoSurvivorError", f"{why}; last cause: {event.cause}")
    if exhausted := _count_lost(run, working + waiting, preempted, event):
        return kills + run.fail("RetryBudgetError", exhausted)
    _excuse(run, working)
    go_on = phases.take_stock if run.state == State.FENCE else phases.fence
    return kills + go_on(run, event.at)


def _excuse(run: RunState, members: list[str]) -> None:
    """A recovery in the midst of which one who had trained is lost was not in vain: the nodes of a zone rarely go at once. This
    has an end, for those who have trained are only so many; and a step that brings its workers down is reached each time."""
    broken_off = run.state in (State.REPLACE, State.REBUILD) or (run.state == State.FENCE and run.seated != run.world)
    if broken_off and any(member in run.world and member not in run.newcomers for member in members):
        run.fruitless = max(0, run.fruitless - 1)


def _wake(run: RunState, members: list[str]) -> None:
    """Those of them that slept do so no longer: they are lost. After the recovery began, which it counts for as well."""
    for member in members:
        run.history.slept(member, run.step, asleep=False)


def _count_lost(run: RunState, trainers: list[str], preempted: dict[str, bool], event: m.WorkerLost) -> str:
    """That these, who trained, are lost is recorded, and charged. Returns why no more may be, in words; empty if more may."""
    recovery = run.history.begin(event.at, event.cause, event.noticed_by, len(run.world))
    _wake(run, trainers)
    recovery.lost += trainers
    exhausted = [words for words in [run.roster.charge(preempted[member]) for member in trainers] if words]
    return f"{exhausted[-1]}; last cause: {event.cause}" if exhausted else ""


def _on_cause_found(run: RunState, event: m.CauseFound) -> list[m.Command]:
    run.history.explain(event.lost, event.cause)
    return []


def _on_suspected(run: RunState, event: m.Suspected) -> list[m.Command]:
    if run.state in (State.FENCE, State.SHUTTING_DOWN) or (run.state == State.REPLACE and not run.joining):
        return []  # nobody computes anything
    if strangers := _strangers(run, event.noticed_by):
        cause = f"it could not join the others in {run.fruitless} recoveries: {event.reason}"
        lost = m.WorkerLost(at=event.at, member=strangers[0], cause=cause, noticed_by=event.noticed_by)
        return _lose(run, strangers, lost, avoid=True)
    return phases.suspect(run, event.at, event.reason, event.noticed_by)


def _strangers(run: RunState, noticed_by: str) -> list[str]:
    """Newcomers that are perhaps why recovery after recovery comes to nothing: who reports it itself, and, before the run would
    be given up, all of them. Those who have trained together can do without."""
    world = run.joining or run.world
    new = [member for member in world if _is_newcomer(run, member)]
    if len(new) == len(world):
        return []  # nobody is left who has trained: it may be for anybody
    if run.fruitless >= IN_VAIN and noticed_by in new:
        return [noticed_by]
    return new if 2 * run.fruitless >= max(2 * IN_VAIN, run.rules.max_fruitless_recoveries) else []


# ---------------------------------------------------------------- training, and its end


def _on_steps_committed(run: RunState, event: m.StepsCommitted) -> list[m.Command]:
    is_first = event.incarnation >= run.counts_from and event.stop_step > run.step  # to tell of these steps
    if is_first:
        _advance(run, event.stop_step)
    if event.incarnation != run.incarnation:
        return []  # a step that a recovery completed, for example: its time says nothing
    run.longest_step = max(event.longest_s, (FORGETTING_SLOWLY if is_first else 1.0) * run.longest_step)
    run.long_step = max(event.longest_s, FORGETTING * run.long_step)
    run.fruitless, run.help_left, run.slow_replays, run.newcomers = 0, MOST_HELPED, 0, frozenset()
    if run.state != State.RESUME:
        return []
    run.history.close(event.at)
    if run.abort_reason:
        return stopping.stop(run)
    run.state = State.RUNNING
    return run.provision() + leaving.watch(run, event.at) + _resize(run, event.at)


def _advance(run: RunState, step: int) -> None:
    """Somebody has committed all steps before this one. A recovery that has completed one of them is not fruitless, though its
    incarnation commit none; and what is told only now of training before it shows that it is the first in a row at most. A step
    that was left out is no progress."""
    run.step = step
    if run.plan is None or step <= run.plan.interrupted:
        run.fruitless = min(run.fruitless, 1)
    elif run.plan.completes:
        run.fruitless = 0


def _on_checkpoint_committed(run: RunState, event: m.CheckpointCommitted) -> list[m.Command]:
    if event.untidy and not any(words.startswith(UNTIDY) for words in run.warnings):
        run.warn(f"{UNTIDY}{event.untidy}. Training goes on, but the storage may fill up: look at its permissions")
    stored = m.Stored(event.name, event.step, event.incarnation)
    standing = run.standing([stored])
    if event.incarnation < run.counts_from:
        return []  # everybody has gone back to before it, or to it: it is no part of what is logged since
    run.stored = [*standing, *run.stored][:MOST_STORED]
    run.persist_s, run.unstored = event.persist_s, 0
    if not run.rules.logging or run.state not in TRAINING:
        return []  # in a recovery, the log may be being replayed from an older checkpoint: the next one trims it
    run.log.trimmed(event.step, run.step)
    return [m.Trim(tuple(member for member in run.world if member in run.members), event.step)]


def _on_checkpoint_failed(run: RunState, event: m.CheckpointFailed) -> list[m.Command]:
    """Told of the first in a row: what follows is rarely another reason, and each of many workers tells of it."""
    if event.incarnation == run.incarnation:
        if not run.unstored:
            run.warn(f"the checkpoint of step {event.step} could not be written: {event.reason}")
        run.unstored += 1
    return []


def _on_samples_lost(run: RunState, event: m.SamplesLost) -> list[m.Command]:
    if not any(event.why in words for words in run.warnings):
        run.warn(f"samples of step {event.step} were lost: {event.why}. Further ones are listed by raytrain-ft audit")
    return []


def _on_state_unseen(run: RunState, event: m.StateUnseen) -> list[m.Command]:
    run.warn(
        f"{event.names}: changed in the forward pass, and neither stored nor given to a replacement. If a result depends on "
        "it, keep it in a buffer of the model (register_buffer)"
    )
    return []


def _on_noted(
    run: RunState,
    event: m.IntervalChosen | m.LogChosen | m.LogWritten | m.NoticesUnavailable | m.Parted | m.SetAside,
) -> list[m.Command]:
    del run, event  # for the record
    return []


def _on_dormant(run: RunState, event: m.Dormant) -> list[m.Command]:
    run.history.slept(event.member, event.step, asleep=event.asleep)
    if not event.asleep and run.state != State.RESUME:  # else perhaps all take part in one step, and then sleep again
        leaving.woke(run, event.member)
    return []


def _on_log_failed(run: RunState, event: m.LogFailed) -> list[m.Command]:
    if event.incarnation < run.log.incarnation:
        return []  # it has begun anew since
    run.log.broke_off()
    run.warn(
        f"{event.member} cannot log what it sends to other stages ({event.reason}): training goes on, but until the log is "
        "whole again, a lost stage takes everybody back to the newest checkpoint"
    )
    return []


def _on_completed(run: RunState, event: m.Completed) -> list[m.Command]:
    if run.state == State.SHUTTING_DOWN or not run.all_answered(event, run.world):
        return []
    digests = {e.member: (e.digest,) for e in run.answers.values() if isinstance(e, m.Completed)}
    if differing_in_stages(run.world, digests, run.rules.stages):
        return run.fail("RecoveryError", f"the replicas differ at the end of the run: {digests}")
    run.history.close(event.at, run.rules.max_steps)
    run.result["digest"] = ":".join(digests[member][0] for member in run.world[: run.rules.stages])
    run.step = run.rules.max_steps
    run.state = State.SHUTTING_DOWN
    return _save(run)


def _save(run: RunState, asked: tuple[str, ...] = ()) -> list[m.Command]:
    """A stage that has been saved is in storage, whatever becomes of who saved it. Who was `asked` before is still at it: asked
    again it would write twice, and the end of the run would break the second one off."""
    run.answers = {member: answer for member, answer in run.answers.items() if isinstance(answer, m.Saved)}
    savers = run.savers()
    others = tuple(member for member in savers if member not in run.answers and member not in asked)
    return [m.Save(others, run.world, run.incarnation), m.SetTimer(f"save {savers}", run.rules.phase_timeout, run.incarnation)]


def _on_saved(run: RunState, event: m.Saved) -> list[m.Command]:
    run.result["path"] = event.path
    return run.end(State.FINISHED) if run.all_answered(event, run.savers()) else []


def _on_task_failed(run: RunState, event: m.TaskFailed) -> list[m.Command]:
    starts = run.members.get(event.member) == MemberState.STARTING
    if run.world and (starts or _is_newcomer(run, event.member)) and event.kind != "non_finite":
        # The same could be done elsewhere, and those who train need not end for a node that lacks something.
        what = "it failed in its first step" if run.state == State.RESUME and not starts else "it could not be set up"
        cause = f"{what}: {event.message}"
        lost = m.WorkerLost(at=event.at, member=event.member, cause=cause, noticed_by="supervisor")
        return _lose(run, [event.member], lost, avoid=True)
    if event.kind == "task" and event.member in run.leaving and run.state in TRAINING:
        # Perhaps its node takes its disks or its network away first. Is it the task, another one will say so too.
        cause = f"it failed on a node that is about to be taken away: {event.message}"
        return _lose(run, [event.member], m.WorkerLost(at=event.at, member=event.member, cause=cause, noticed_by="supervisor"))
    if event.kind == "non_finite" and run.rules.roll_back and event.step not in run.rolled_back and run.state in COMPUTING:
        run.rolled_back.add(event.step)
        run.going_back, run.spoilt = "the loss or a gradient was not finite", event.step
        return phases.suspect(run, event.at, f"the loss of step {event.step} is not finite", event.member)
    kinds = {
        "task": "TaskError",
        "non_finite": "NonFiniteLossError",
        "config": "ConfigError",
        "mismatch": "MismatchError",
    }
    world = run.joining or run.world
    rank = world.index(event.member) if event.rank is None and event.member in world else event.rank
    who = event.member if rank is None else f"rank {rank} ({event.member})"
    return run.fail(kinds[event.kind], f"{who}, step {event.step}: {event.message}")


# ---------------------------------------------------------------- deadlines, and the supervisor's own restart


def _is_newcomer(run: RunState, member: str) -> bool:
    """Whether it has not trained yet, and is about to get what that takes, or in the midst of its first step."""
    if run.state == State.RESUME:
        return member in run.newcomers
    joins = run.state in (State.REPLACE, State.REBUILD) and member in run.joining
    return joins and (member not in run.world or member in run.newcomers)


def _on_timer_fired(run: RunState, event: m.TimerFired) -> list[m.Command]:
    """A deadline counts only for what it was set for: by now the run may be elsewhere."""
    savers = run.savers()
    silent = [member for member in run.joining or run.roster.taking_part() if member not in run.answers]
    match event.timer, run.state:
        case stopping.TIMER, _:
            return run.abort()
        case "schedule", State.SCHEDULING:
            return _begin(run, waited=True)
        case "fence", State.FENCE:
            return _lose_silent(run, event.at, silent, "it did not leave its step in time")
        case leaving.TIMER, State.RUNNING:
            return _leave(run, event.at)
        case "grow", State.RUNNING:
            return _resize(run, event.at)
        case "replacement", State.REPLACE if not run.joining:
            return phases.replace(run, waited=True)
        case ("reconcile", State.REPLACE) | ("fill", State.REBUILD):
            if event.timer == "fill":
                replaying.give_way(run, silent)
            return phases.suspect(run, event.at, f"{event.timer}: no answer from {', '.join(silent)} in time", "deadline")
        case timer, State.SHUTTING_DOWN if timer == f"save {savers}":
            late = [member for member in savers if member not in run.answers]
            return _lose_silent(run, event.at, late, "it did not save the final state in time")
    return []


def _leave(run: RunState, at: float) -> list[m.Command]:
    """The time has come to leave, or to stay for good."""
    stopped = leaving.stop(run, at)
    if stopped:
        return stopped
    leaving.lapse(run, at)
    return leaving.watch(run, at) + _resize(run, at)


def _lose_silent(run: RunState, at: float, members: list[str], cause: str) -> list[m.Command]:
    return _lose(run, members, m.WorkerLost(at=at, member=members[0], cause=cause, noticed_by="deadline"))


def _on_right_lost(run: RunState, event: m.RightLost) -> list[m.Command]:
    """At once: what a last checkpoint or a last state would be written to may be another run's by now."""
    return run.fail("LockedError", event.reason)


def _on_supervisor_restarted(run: RunState, event: m.SupervisorRestarted) -> list[m.Command]:
    """Answers, timers, and commands that were not yet carried out went down with the old process: asks again."""
    again: list[m.Command] = [m.Kill(member) for member in run.roster.gone]
    again += [m.Watch(member, run.roster.nodes.get(member, "")) for member in run.members]
    again += stopping.deadline(run)
    match run.state:
        case State.SCHEDULING:
            return [*again, m.SetTimer("schedule", run.rules.schedule_timeout, run.incarnation)]
        case State.FENCE | State.REPLACE | State.REBUILD:
            return again + phases.suspect(run, event.at, "the supervisor was lost", "supervisor")
        case State.RESIZING:
            return [*again, m.StopAtBoundary(run.world)]
        case State.RUNNING:
            run.secured = None
            if _may_grow(run):
                again.append(m.SetTimer("grow", max(0.0, _grows_at(run) - event.at), run.incarnation))
            return again + leaving.watch(run, event.at) + leaving.stay(run, event.at) + replaying.log_only_again(run)
        case State.STOPPING:
            return again + stopping.ask_again(run)
        case State.RESUME:
            return [*again, phases.train(run, event.at), *replaying.log_only_again(run)]
        case State.SHUTTING_DOWN:
            return again + _save(run)
    return again


_HANDLERS: dict[type[m.Event], Callable[[RunState, Any], list[m.Command]]] = {
    m.RunStarted: _on_run_started,
    m.CapacityChanged: _on_capacity_changed,
    m.WorkerStarted: _on_worker_started,
    m.WorkerLost: _on_worker_lost,
    m.CauseFound: _on_cause_found,
    m.Noticed: leaving.noticed,
    m.Suspected: _on_suspected,
    m.Fenced: phases.on_fenced,
    m.Reconciled: phases.on_reconciled,
    m.Filled: phases.on_filled,
    m.StepsCommitted: _on_steps_committed,
    m.SamplesLost: _on_samples_lost,
    m.CheckpointCommitted: _on_checkpoint_committed,
    m.CheckpointFailed: _on_checkpoint_failed,
    m.CheckpointRejected: phases.on_rejected,
    m.CheckpointsFound: phases.on_checkpoints_found,
    m.IntervalChosen: _on_noted,
    m.Dormant: _on_dormant,
    m.Parted: _on_noted,
    m.StageTimed: replaying.on_stage_timed,
    m.LogChosen: _on_noted,
    m.LogFailed: _on_log_failed,
    m.LogWritten: _on_noted,
    m.SetAside: _on_noted,
    m.StateUnseen: _on_state_unseen,
    m.NoticesUnavailable: _on_noted,
    m.LogMissing: phases.on_log_missing,
    m.UndoRefused: phases.on_undo_refused,
    m.Stopped: _on_stopped,
    m.Checkpointed: stopping.on_checkpointed,
    m.Completed: _on_completed,
    m.Saved: _on_saved,
    m.TaskFailed: _on_task_failed,
    m.TimerFired: _on_timer_fired,
    m.AbortRequested: stopping.on_abort_requested,
    m.RightLost: _on_right_lost,
    m.SupervisorRestarted: _on_supervisor_restarted,
}
