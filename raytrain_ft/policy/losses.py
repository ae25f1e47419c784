"""Workers go: each loss is charged to its budget and leads to a recovery, of those who trained; and what is treated as one."""

from __future__ import annotations

from dataclasses import replace

from raytrain_ft.policy import arrivals, finishing, leaving, phases
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import RECOVERING, TRAINING, State

IN_VAIN = 3
"""Recoveries in a row without a step after which a worker that is new, and says that it cannot join, is the reason perhaps."""
COMPUTING = TRAINING | {State.REPLACE, State.REBUILD}
"""Where a loss may turn out not to be finite: a recovery completes steps, too."""
AT_WORK = TRAINING | RECOVERING | {State.SHUTTING_DOWN}
"""Where who fails on a node that is about to go is lost like any other."""


def on_worker_lost(run: RunState, event: m.WorkerLost) -> list[c.Command]:
    return _lose(run, [event.member], event)


def _lose(run: RunState, members: list[str], event: m.WorkerLost, *, avoid: bool = False) -> list[c.Command]:
    """These members are gone, all in the way that the event tells. `avoid`: it may be for where they were."""
    savers = run.savers()
    leaving.lapse(run, event.at)
    preempted = {member: event.preempted or member in run.leaving for member in members}  # the end of a notice is no failure
    was = {
        member: run.roster.lose(member, replace(event, preempted=preempted[member]), trained=_has_trained(run, member))
        for member in members
    }
    if avoid:
        run.roster.could_not_join([member for member in members if was[member] != MemberState.STARTING], event.cause)
    for member in members:
        leaving.forget(run, member)
        if was[member] not in (MemberState.ACTIVE, MemberState.LEAVING) and member not in run.world:
            run.log.whole_again(member, run.step)  # what it could not log it sent before, if it had a seat
    kills: list[c.Command] = [c.Kill(member, avoid) for member in members]
    working = [member for member in members if was[member] in (MemberState.ACTIVE, MemberState.LEAVING)]
    waiting = [member for member in members if member not in working and run.state == State.REPLACE and member in run.world]
    if working and run.state == State.SHUTTING_DOWN:
        save = finishing.without(run, savers, event.cause)
        if save is not None:
            return kills + save
    trainers = working + waiting
    if trainers and (exhausted := _count_lost(run, trainers, preempted, event)):
        return kills + run.fail("RetryBudgetError", exhausted)
    if not working:
        return kills + _go_on_without(run, members, event.cause)
    _excuse(run, working, avoid=avoid)
    go_on = phases.take_stock if run.state == State.FENCE else phases.fence
    return kills + go_on(run, event.at)


def _go_on_without(run: RunState, members: list[str], cause: str) -> list[c.Command]:
    """None of them held state: others are started for them, if there is hope for that."""
    _wake(run, members)
    commands = run.provision() + arrivals.go_on_waiting(run)
    if run.state == State.SCHEDULING and run.roster.cannot_start() and not run.roster.any_starting():
        commands += run.fail("RecoveryError", f"workers cannot be started: {cause}")
    return commands


def _excuse(run: RunState, members: list[str], *, avoid: bool) -> None:
    """A recovery in the midst of which one who had trained is lost was not in vain: the nodes of a zone rarely go at once. This
    has an end, for those who have trained are only so many; and a step that brings its workers down is reached each time.
    Nor was one that a newcomer broke off that the others can do without: `Roster` counts how often somebody else is tried."""
    broken_off = run.state in (State.REPLACE, State.REBUILD) or (run.state == State.FENCE and run.seated != run.world)
    by_newcomers = avoid and run.state != State.FENCE  # of several who fail together, the first has broken it off
    if by_newcomers or (broken_off and any(_has_trained(run, member) for member in members)):
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


def _has_trained(run: RunState, member: str) -> bool:
    return member in run.world and member not in run.newcomers


def on_cause_found(run: RunState, event: m.CauseFound) -> list[c.Command]:
    run.history.explain(event.lost, event.cause)
    return []


def on_suspected(run: RunState, event: m.Suspected) -> list[c.Command]:
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


def _is_newcomer(run: RunState, member: str) -> bool:
    """Whether it has not trained yet, and is about to get what that takes, or in the midst of its first step; or was when the
    recovery under way began: what two of them lack on one node, the second tells when the first is lost already."""
    joins = member in run.joining and member not in run.world
    return run.state in RECOVERING and (joins or member in run.newcomers)


def on_task_failed(run: RunState, event: m.TaskFailed) -> list[c.Command]:
    starts = run.members.get(event.member) == MemberState.STARTING
    if run.world and (starts or _is_newcomer(run, event.member)) and event.kind != "non_finite":
        # The same could be done elsewhere, and those who train need not end for a node that lacks something.
        trains = event.member in run.newcomers and event.incarnation is None  # a command that it cannot do is of one
        what = "it failed in its first step" if trains else "it could not be set up"
        cause = f"{what}: {event.message}"
        lost = m.WorkerLost(at=event.at, member=event.member, cause=cause, noticed_by="supervisor")
        return _lose(run, [event.member], lost, avoid=True)
    if event.kind in ("task", "storage") and event.member in run.leaving and run.state in AT_WORK:
        # Perhaps its node takes its disks or its network away first: from all who are there, and the second of them says so
        # when the recovery has begun; from who is to hand its state over, or saves the final one. Is it the task, one elsewhere
        # will say so too.
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
        "storage": "StorageError",
    }
    world = run.joining or run.world
    rank = world.index(event.member) if event.rank is None and event.member in world else event.rank
    who = event.member if rank is None else f"rank {rank} ({event.member})"
    return run.fail(kinds[event.kind], f"{who}, step {event.step}: {event.message}")


def lose_silent(run: RunState, at: float, members: list[str], cause: str) -> list[c.Command]:
    return _lose(run, members, m.WorkerLost(at=at, member=members[0], cause=cause, noticed_by="deadline"))
