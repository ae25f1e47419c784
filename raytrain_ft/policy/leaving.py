"""Members whose node will be taken away at a known time: they leave at a step boundary, before that time, and nothing is lost.

A notice is no loss. Who is told to leave trains on until a replacement is ready, or until waiting for one any longer would
miss the deadline; then everybody stops at one boundary, as for any planned resize. The state is where the others hold it too.
Where nobody else does (a stage without a replica, a run of one), it is *handed over*. If the deadline comes first, or anything
goes wrong on the way, there was a loss, and it is met as any other. A person may also ask that nobody take its place: then the
run has a worker less from that moment on, and there is nothing to wait for.

Until then a member may sleep, by choice (`sleeps_on_notice`; Nicolae et al., III-B): it has no samples then, so that
the strategy "lossy" loses none with it if its node goes sooner than was said.

Where all who hold some stage are to leave and nobody could take over, they train on, and what was trained since the last
checkpoint is in danger: so there is another one, as late as is safe.

What does not come true lapses, and the member keeps its place: a person's request that could not be met by its deadline, and
what a cloud said of a node that lives on. Ray's word of a drain is never taken back.
"""

from __future__ import annotations

import math

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Plan
from raytrain_ft.policy.roster import Leave, MemberState
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.topology import members_of

SHORTEST_MARGIN_S = 2.0
"""The least time between the stop at a boundary and the deadline."""
IDLE = (MemberState.STARTING, MemberState.SPARE)
LAPSE_AFTER_S = 60.0
"""How long after its deadline a node may still be taken away: clouds are late at times. One that lives on then stays."""
TIMER = "leave"
REQUEST, SIGTERM, DRAIN = "request", "sigterm", "ray drain"
"""Sources that are no clouds: a person, a signal to the worker, Ray. What they say is sure, and a cloud's word may be false."""
MAINTENANCE = "gcp maintenance"
"""Google gives a machine with GPUs an hour, and any other a minute, by the same word."""
HOUR_S = 3600.0


def lapses_after(source: str) -> float:
    """How long after its deadline what this source said may yet come true."""
    return {REQUEST: 0.0, MAINTENANCE: HOUR_S}.get(source, LAPSE_AFTER_S)


def noticed(run: RunState, event: m.Noticed) -> list[c.Command]:
    """This member will be gone. One that does not train is let go at once, if that is sure."""
    if run.state == State.SHUTTING_DOWN:
        return []
    fewer = run.leaving[event.member].fewer if event.member in run.leaving else 0
    if not event.replaced and not fewer:
        if why := run.why_not_fewer():
            run.warn(f"{event.member} stays, although it was asked to leave without a replacement: {why}")
            return []
        fewer = run.one_less()
    is_sure = event.source in (REQUEST, SIGTERM, DRAIN)
    if run.members[event.member] in IDLE and is_sure and (fewer or not _is_waited_for(run)):
        return [*_dismiss(run, [event.member]), *run.provision()]
    deadline, why = event.at + event.deadline_s, f"{event.source}: {event.reason}"
    leave = Leave(deadline, why, deadline + (math.inf if event.source == DRAIN else lapses_after(event.source)))
    known = run.leaving.get(event.member, leave)
    first = min(leave, known, key=lambda leave: leave.deadline)
    lapses = max(leave.lapses, known.lapses)  # what takes it away does so whatever else is said
    run.leaving[event.member] = Leave(first.deadline, first.why, lapses, fewer)
    run.roster.leaving = frozenset(run.leaving)
    if run.state != State.RUNNING:
        return run.provision()
    return [*run.provision(), *watch(run, event.at), *(stop(run, event.at) or stay(run, event.at))]


def _is_waited_for(run: RunState) -> bool:
    """Whether a world is being gathered, or will be once everybody is fenced, and there are not more who are ready than it
    needs: all leave once it trains."""
    if run.state == State.FENCE:
        there = len(run.roster.taking_part())
    elif run.state == State.REPLACE and not run.joining:
        there = len(run.survivors)
    else:
        return False
    return there + len(run.roster.spares()) <= run.wanted


def watch(run: RunState, at: float) -> list[c.Command]:
    """For the next moment when somebody is to leave whether there is a replacement or not, or when a notice lapses; or when
    there must be a checkpoint."""
    moments = [due if (due := _due(run, leave)) > at else leave.lapses for leave in run.leaving.values()]
    if (last := _last_moment(run)) > at:
        moments.append(last)
    first = min(moments, default=math.inf)
    return [] if first == math.inf else [c.SetTimer(TIMER, max(0.0, first - at), run.incarnation)]


def _due(run: RunState, leave: Leave) -> float:
    """Until when a replacement can be waited for."""
    return leave.deadline - _margin(run)


def _margin(run: RunState) -> float:
    return max(SHORTEST_MARGIN_S, 3 * run.long_step)


def stop(run: RunState, at: float) -> list[c.Command]:
    """Asks for a stop at a boundary, if those who leave can be done without; not before it must be, if that is so of some only,
    for perhaps others come. For who leaves for good there is nothing to wait for."""
    going = [member for member in run.world if member in run.leaving]
    too_many = max(0, len(run.world) - run.rules.max_workers)
    all_can = len(run.roster.lasting()) + too_many >= len(going)
    some_must = too_many > 0 or any(_due(run, run.leaving[member]) <= at for member in going)
    leave = _dispensable(run, going, len(run.world), at) if all_can or some_must else []
    if not leave or run.step >= run.rules.max_steps:
        return []
    why = "; ".join(f"{member} leaves ({run.leaving[member].why})" for member in leave)
    run.state = State.RESIZING
    run.history.begin(at, why, "notice", len(run.world))
    return [c.StopAtBoundary(run.world)]


def _dispensable(run: RunState, going: list[str], there: int, at: float) -> list[str]:
    """Of so many, these are to leave now. Each takes a spare, or a place that is to be empty; those who leave for good come
    first, and then the most urgent. Who must leave by now, or in a moment, for each pause costs, goes without, as far as there
    are workers enough left, and some of them have more time."""
    lasting, rules = len(run.roster.lasting()), run.rules
    urgent = sorted(going, key=lambda member: (not run.leaves_for_good(member), run.leaving[member].deadline))
    free = lasting + max(0, there - rules.max_workers)
    due, soon = ({one for one in going if _due(run, run.leaving[one]) <= by} for by in (at, at + _margin(run)))
    leave = [member for number, member in enumerate(urgent) if number < free or member in soon]
    while leave:
        left = there - len(leave) + lasting
        if rules.whole(left) >= rules.min_workers and left - len(due.difference(leave)) >= rules.stages:
            break
        leave.pop()
    return leave


def stay(run: RunState, at: float) -> list[c.Command]:
    """Nobody can leave now."""
    return [*doze(run), *relieve(run), *secure(run, at)]


def secure(run: RunState, at: float) -> list[c.Command]:
    """Asks for a checkpoint, if one must be begun by now: once for each first deadline, and again in another incarnation."""
    if _last_moment(run) > at:
        return []
    run.secured = run.incarnation, _first_deadline(run)
    return [c.Secure(run.world)]


def _last_moment(run: RunState) -> float:
    """When a checkpoint must be begun because nobody could stay; infinite if none must."""
    stages, absent = run.rules.stages, {*run.leaving, *run.history.sleepers}  # what a sleeper holds may be old
    held = all({*members_of(run.world, stage, stages)} - absent for stage in range(stages))
    if (
        held
        or run.leaving.keys().isdisjoint(run.world)
        or not run.rules.leaves_checkpoint
        or run.secured == (run.incarnation, _first_deadline(run))
    ):
        return math.inf
    first = min(_due(run, run.leaving[one]) for one in run.world if one in run.leaving)
    return first - max(SHORTEST_MARGIN_S, 2 * run.persist_s)


def _first_deadline(run: RunState) -> float:
    return min(run.leaving[one].deadline for one in run.world if one in run.leaving)


def doze(run: RunState) -> list[c.Command]:
    """Who leaves sleeps until then, if that is wanted and others are there to take its samples; who stays after all takes part
    again. Who sleeps because a person asked for it is let be. Said again and again, for it may have been lost."""
    going = [member for member in run.world if member in run.leaving]
    if run.rules.sleeps_on_notice and len(going) < len(run.world):
        run.dozing.update(member for member in going if member not in run.history.sleepers)
    dozing = [member for member in run.world if member in run.dozing]
    asleep, awake = (tuple(member for member in dozing if (member in run.leaving) == leaves) for leaves in (True, False))
    run.dozing.difference_update(member for member in awake if member not in run.history.sleepers)
    return [c.Sleep(members, way) for members, way in ((asleep, True), (awake, False)) if members]


def woke(run: RunState, member: str) -> None:
    """It takes part again."""
    if member not in run.leaving:
        run.dozing.discard(member)


def relieve(run: RunState) -> list[c.Command]:
    """Spares that had notice are let go once there are others; the last one is not, for perhaps nothing comes of the notice."""
    going = [member for member in run.world if member in run.leaving]
    return _dismiss(run, _idle(run)) if len(run.roster.lasting()) > len(going) else []


def _idle(run: RunState) -> list[str]:
    """Who had notice and does not train."""
    return [member for member in run.leaving if run.members[member] in IDLE]


def _dismiss(run: RunState, members: list[str]) -> list[c.Command]:
    for member in members:
        run.history.slept(member, run.step, asleep=False)  # if it did
        forget(run, member)
        run.roster.lose(member, None)
        run.log.whole_again(member, run.step)  # what it could not log it sent before, if it had a seat
    return [c.Kill(member) for member in members]


def lapse(run: RunState, at: float) -> None:
    """Nothing came of what was to come by now."""
    for member in [member for member, leave in run.leaving.items() if leave.lapses <= at]:
        run.limit(run.leaving[member].fewer)
        forget(run, member)


def let_go(run: RunState, at: float) -> list[c.Command]:
    """Everybody is fenced, and the plan is made: those who leave take no seat any more, as far as the others can go on. Who
    alone holds what is needed stays for as long as it takes to hand it over.

    They stay members for now if something must be completed or undone with their help; then they leave at the next boundary.
    """
    going = _dispensable(run, [member for member in run.leaving if member in run.survivors], len(run.survivors), at)
    if not going or run.plan is None or run.replaying or not _is_boundary(run, run.plan):
        return []
    stay = [member for member in run.survivors if member not in going]
    # a spare that had notice would take a free seat only to leave it again
    commands = _dismiss(run, _idle(run)) if len(stay) + len(run.roster.lasting()) < run.rules.max_workers else []
    held = {run.survivors[member].stage for member in stay}
    for member in going:
        marks = run.survivors.pop(member)
        if marks.unwritten:  # and nobody writes the rest
            run.log.torn[marks.stage] = marks.step
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


def gone(run: RunState) -> list[c.Command]:
    """What was to be handed over is."""
    commands = [command for giver in run.givers.values() for command in depart(run, giver)]
    run.givers = {}
    return commands


def depart(run: RunState, member: str) -> list[c.Command]:
    """This member has left, as it was told."""
    run.recoveries[-1].left.append(member)
    run.history.slept(member, run.step, asleep=False)  # if it did
    forget(run, member)
    run.roster.lose(member, None)
    words = run.roster.charge(preempted=True)
    end = run.fail("RetryBudgetError", f"{words}; last notice: {run.recoveries[-1].cause}") if words else []
    return [c.Kill(member), *end]


def forget(run: RunState, member: str) -> None:
    """This member leaves no more: it has left, was lost before, or may stay."""
    run.leaving.pop(member, None)
    run.roster.leaving = frozenset(run.leaving)
