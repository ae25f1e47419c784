"""Members whose node will be taken away at a known time: they leave at a step boundary, before that time, and nothing is lost.

A notice is no loss. Who is told to leave trains on until a replacement is ready, or until waiting for one any longer would
miss the deadline; then everybody stops at one boundary, as for any planned resize. The state is where the others hold it too.
Where nobody else does (a stage without a replica, a run of one), it is *handed over*. If the deadline comes first, or anything
goes wrong on the way, there was a loss, and it is met as any other. Only a person's request that could not be met by its
deadline lapses: nobody takes that member away, and it keeps its place.
"""

from __future__ import annotations

from dataclasses import replace

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Plan
from raytrain_ft.policy.roster import Leave, MemberState
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.topology import members_of

SHORTEST_MARGIN_S = 2.0
"""The least time between the stop at a boundary and the deadline."""
TIMER = "leave"
REQUEST = "request"
"""The source of a notice that a person gave."""


def noticed(run: RunState, event: m.Noticed) -> list[m.Command]:
    """This member will be gone. One that does not train is let go at once."""
    if run.state == State.SHUTTING_DOWN:
        return []
    if run.members[event.member] in (MemberState.STARTING, MemberState.SPARE):
        run.roster.lose(event.member)
        return [m.Kill(event.member), *run.provision()]
    wish = event.source == REQUEST
    leave = Leave(event.at + event.deadline_s, f"{event.source}: {event.reason}", wish)
    known = run.leaving.get(event.member, leave)
    first = min(leave, known, key=lambda leave: leave.deadline)
    run.leaving[event.member] = replace(first, wish=wish and known.wish)  # what takes it away does so whatever is wished
    run.roster.leaving = frozenset(run.leaving)
    return [*run.provision(), *(watch(run, event.at) + stop(run, event.at) if run.state == State.RUNNING else [])]


def watch(run: RunState, at: float) -> list[m.Command]:
    """A deadline for waiting: then they leave whether there is a replacement or not."""
    if not run.leaving:
        return []
    margin = max(SHORTEST_MARGIN_S, 3 * run.longest_step)
    first = min(leave.deadline for leave in run.leaving.values())
    return [m.SetTimer(TIMER, max(0.0, first - margin - at), run.incarnation)]


def stop(run: RunState, at: float, *, waited: bool = False) -> list[m.Command]:
    """Asks for a stop at a boundary, if those who leave can be done without; if not, a wish has come to nothing in the end."""
    going = [member for member in run.world if member in run.leaving]
    replaced = len(run.roster.spares()) >= len(going)
    fewer = run.rules.whole(len(run.world) - len(going) + len(run.roster.spares()))
    possible = replaced or (waited and fewer >= run.rules.min_workers)
    if not going or not possible or run.step >= run.rules.max_steps:
        return _lapse(run, at) if waited else []
    why = "; ".join(f"{member} leaves ({run.leaving[member].why})" for member in going)
    run.state = State.RESIZING
    run.history.begin(at, why, "notice", len(run.world))
    return [m.StopAtBoundary(run.world)]


def _lapse(run: RunState, at: float) -> list[m.Command]:
    """Wishes lapse with their deadline; those that are left are looked at again then."""
    wishes = {member: leave.deadline for member, leave in run.leaving.items() if leave.wish}
    for member in [member for member, deadline in wishes.items() if deadline <= at]:
        forget(run, member)
    later = [deadline for deadline in wishes.values() if deadline > at]
    return [m.SetTimer(TIMER, min(later) - at, run.incarnation)] if later else []


def let_go(run: RunState) -> list[m.Command]:
    """Everybody is fenced, and the plan is made: those who leave take no seat any more, if the others can go on. Who alone
    holds what is needed stays for as long as it takes to hand it over.

    They stay members for now if something must be completed or undone with their help; then they leave at the next boundary.
    """
    going = [member for member in run.leaving if member in run.survivors]
    stay = [member for member in run.survivors if member not in run.leaving]
    enough = run.rules.whole(len(stay) + len(run.roster.spares())) >= run.rules.min_workers
    if not going or not enough or run.plan is None or run.replaying or not _is_boundary(run, run.plan):
        return []
    commands: list[m.Command] = []
    held = {run.survivors[member].stage for member in stay}
    for member in going:
        marks = run.survivors.pop(member)
        if marks.stage in held:
            commands += depart(run, member)
        else:  # of several, the first hands over
            held.add(marks.stage)
            run.members[member] = MemberState.LEAVING
            run.givers[marks.stage] = member
    return commands


def _is_boundary(run: RunState, plan: Plan) -> bool:
    """Whether all survivors stand between the same two steps, so that nobody's help is needed."""
    untouched = not (plan.completes or plan.skips or plan.undo or plan.states or plan.keep)
    return untouched and plan.step < run.rules.max_steps and all(marks.step == plan.step for marks in run.survivors.values())


def hand_over(run: RunState) -> tuple[tuple[str, str], ...]:
    """(receiver, giver) for everybody who hosts a stage whose holders all leave."""
    givers = sorted(run.givers.items())
    return tuple((member, giver) for stage, giver in givers for member in members_of(run.joining, stage, run.rules.stages))


def gone(run: RunState) -> list[m.Command]:
    """What was to be handed over is."""
    commands = [command for giver in run.givers.values() for command in depart(run, giver)]
    run.givers = {}
    return commands


def depart(run: RunState, member: str) -> list[m.Command]:
    """This member has left, as it was told."""
    run.recoveries[-1].left.append(member)
    forget(run, member)
    run.roster.lose(member)
    words = run.roster.charge(preempted=True)
    end = run.fail("RetryBudgetError", f"{words}; last notice: {run.recoveries[-1].cause}") if words else []
    return [m.Kill(member), *end]


def forget(run: RunState, member: str) -> None:
    """This member leaves no more: it has left, was lost before, or may stay."""
    run.leaving.pop(member, None)
    run.roster.leaving = frozenset(run.leaving)
