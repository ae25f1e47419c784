"""RECOVERING, phase by phase: FENCE (everybody leaves the step and reports where it stands) -> REPLACE (get workers; join a new
group; make the survivors consistent) -> REBUILD (fill replacements, repair what differs) -> RESUME (until a step is committed).

There is one path for a loss, a suspicion and a planned resize. A disturbance in any phase goes back to FENCE with a new
incarnation, and answers of an older one are ignored. Who does not answer the fence in time is lost; whatever else takes too
long is a suspicion, which the next fence confirms or refutes: one worker that hangs holds up all who exchange state with it.
"""

from __future__ import annotations

from raytrain_ft.errors import RecoveryError
from raytrain_ft.policy import leaving, replaying
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.forward import could_finish, instead, worth_finishing
from raytrain_ft.policy.lineage import Return
from raytrain_ft.policy.reconcile import Marks, Plan, reconcile, reconcile_stages
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, TRAINING, State
from raytrain_ft.policy.strategy import Strategy
from raytrain_ft.policy.topology import stage_of
from raytrain_ft.policy.units import counted
from raytrain_ft.policy.world import (
    by_node,
    differing_in_stages,
    filled_otherwise,
    rebuild_stages,
    seats,
    seats_in_stages,
    shall_wait,
)

PATIENCE = 3
"""Times the longest one so far that a step, a replayed step, or building a model may take."""
MOST_DOUBLINGS = 3
"""Of the time that moving the state may take, while recovery after recovery comes to nothing."""


def suspect(run: RunState, at: float, reason: str, noticed_by: str) -> list[m.Command]:
    """Something is wrong with this incarnation, or a resize is due: it ends."""
    run.history.begin(at, reason, noticed_by, len(run.world))
    return fence(run, at)


# ---------------------------------------------------------------- FENCE: stop, report


def fence(run: RunState, at: float) -> list[m.Command]:
    """Whoever trains, or was about to, leaves what it is doing and says where it stands."""
    recovery, seconds = run.recoveries[-1], _seconds_to_leave(run)
    recovery.begin_again()
    run.fruitless += 1
    if run.fruitless > run.rules.max_fruitless_recoveries:
        return run.fail(
            "RetryBudgetError",
            f"{counted(run.rules.max_fruitless_recoveries, 'recovery', 'recoveries')} in a row committed no step at "
            f"step {run.step}; last cause: {recovery.cause}",
        )
    run.state = State.FENCE
    run.incarnation += 1
    run.answers, run.survivors, run.joining = {}, {}, ()
    run.plan, run.load, run.seeking, run.replaying = None, None, False, frozenset()
    members = run.roster.taking_part()
    if not members:
        return take_stock(run, at)
    return [m.Fence(members, run.incarnation), m.SetTimer("fence", seconds, run.incarnation)]


def _seconds_to_leave(run: RunState) -> float:
    """How long a fence waits. Nothing interrupts a forward pass, which in the first step may take any time that is no hang; nor
    who builds a model: another stage than its own, the same one as new, or as a helper in a replay that of others; nor who has
    its own state back from the disk after that, or saves the final state."""
    late = [member for member in run.joining if member not in run.answers]
    anew = run.plan is None or run.rules.stages > 1
    joins = run.state == State.REPLACE and anew and any(member not in run.survivors for member in late)
    again = run.state == State.FENCE  # the supervisor was lost during one, and what came before it is not known any more
    builds = joins or again or (run.state == State.REBUILD and bool(run.replaying and late))
    first = not run.longest_step and (again or run.state in TRAINING)
    longest_pass = run.rules.hang_timeout if first else PATIENCE * run.longest_step
    helps = builds and not joins and run.rules.replay_workers > 1
    moving = run.rules.phase_timeout if helps or run.step >= run.rules.max_steps else 0.0
    return max(run.rules.fence_timeout, longest_pass, moving, PATIENCE * run.longest_build if builds else 0.0)


def on_fenced(run: RunState, event: m.Fenced) -> list[m.Command]:
    run.answers[event.member] = event
    told = _forsake(run, event) if run.rules.strategy == "lossy" else []
    return [*told, *take_stock(run, event.at)]


def _forsake(run: RunState, event: m.Fenced) -> list[m.Command]:
    """With "lossy" survivors compute their gradients to the end, which only this answer may show to be in vain: who has come
    back from a step that others had completed, say, finds them in the next one, and that will be redone."""
    others = (answer for answer in run.answers.values() if isinstance(answer, m.Fenced) and answer is not event)
    marks = (answer.marks for answer in others if answer.marks is not None)
    first = next(marks, None)
    if event.marks is None or (first is not None and could_finish(first) == could_finish(event.marks)):
        return []  # nothing is new. With thousands of workers, only an answer that differs is weighed against all others
    waited_for = tuple(member for member in run.roster.taking_part() if member not in run.answers)
    if not waited_for:
        return []
    known = [] if first is None else [first, *marks]
    gone = [rank for rank, member in enumerate(run.world) if member not in run.members]
    about = (gone, len(run.world), run.rules.quorum)
    worth = worth_finishing([*known, event.marks], *about)
    if known and worth == worth_finishing(known, *about):
        return []  # they have been told
    return [m.Forsake(waited_for, run.incarnation, worth)]


def take_stock(run: RunState, at: float) -> list[m.Command]:
    """Goes on to REPLACE once every active member has answered or is lost."""
    if not run.roster.all_take_part_in(run.answers):
        return []
    run.givers = {}
    for member in run.roster.taking_part():
        answer = run.answers[member]
        if isinstance(answer, m.Fenced) and answer.marks is not None and member not in run.void:
            run.survivors[member] = answer.marks
            run.members[member] = MemberState.ACTIVE
        else:  # a replacement whose filling was interrupted holds nothing: it is a spare again
            run.members[member] = MemberState.SPARE
    run.recoveries[-1].fenced = at
    _count_changes(run)
    if run.survivors and run.rules.stages > 1:
        replaying.find(run)
    why = _why_go_back(run) or replaying.why_not(run)
    if why:
        return _go_back(run, why)
    run.give_up([member for member, marks in run.survivors.items() if marks.stage in run.replaying])
    return _go_on(run, at)


def _count_changes(run: RunState) -> None:
    """What survivors undid or kept in an earlier attempt, unless they have gone back since to before it."""
    for marks in run.survivors.values():
        if marks.changed is not None and marks.changed.incarnation >= run.counts_from:
            run.history.had_carried_out(marks.changed, run.incarnation)


def _go_on(run: RunState, at: float) -> list[m.Command]:
    """From what the survivors hold; before anybody trained, from what the run began from."""
    if not run.survivors:
        ended = run.begin_from_stored()
        if ended:
            return ended
        run.recoveries[-1].step = run.step
    else:
        try:
            run.plan = _reconciled(run, list(run.survivors.values()))
        except RecoveryError as error:
            return run.fail("RecoveryError", str(error))
    run.state = State.REPLACE
    departed = leaving.let_go(run, at)
    return departed if run.state in ENDED else departed + _gather(run)


def _reconciled(run: RunState, marks: list[Marks]) -> Plan:
    rules = run.rules
    if rules.stages > 1:
        return reconcile_stages(marks)
    plan = reconcile(marks, whole_update=rules.whole_update)
    return instead(plan, marks, rules.strategy, rules.quorum) if run.casualties() else plan


def _gather(run: RunState) -> list[m.Command]:
    """Forms the next world, or waits for workers, but not for ever. New ones are started now only if there are too few."""
    ready, rules = len(run.survivors) + len(run.roster.spares()), run.rules
    needed = run.wanted if rules.wait_for_replacement else rules.min_workers
    timer = m.SetTimer("replacement", rules.replacement_timeout, run.incarnation)
    return [timer, *(run.provision() if ready < needed else []), *replace(run)]


# ---------------------------------------------------------------- REPLACE: get workers, make survivors consistent


def replace(run: RunState, *, waited: bool = False) -> list[m.Command]:
    """Forms the next world, or waits for workers to come."""
    if run.seeking:
        return []
    all_is_computed = run.plan is not None and run.plan.step >= run.rules.max_steps
    if all_is_computed and run.rules.stages == 1:  # nobody needs to be replaced; of a pipeline, every stage must be saved
        return join(run, tuple(member for member in run.world if member in run.survivors) or tuple(run.survivors))
    spares = to_seat(run)
    ready = len(run.survivors) + len(spares)
    more_may_come = run.roster.any_starting() and not waited
    if not shall_wait(run.rules, len(run.world), ready, more_may_come=more_may_come):
        world = _seated(run, spares)
        if run.replaying and len(world) != len(run.world):
            return _go_back(run, f"there are workers for {len(world)} ranks only, and the log is of {len(run.world)}")
        return join(run, world)
    if not waited:
        return []
    in_vain = run.roster.in_vain
    remedy = f"The last one that was started was lost: {in_vain}" if in_vain else "Add nodes, or lower the minimum."
    return run.fail(
        "RecoveryError",
        f"{ready} workers are left and none came within {run.rules.replacement_timeout:g} s, but num_workers asks "
        f"for at least {run.rules.min_workers}. {remedy}",
    )


def to_seat(run: RunState) -> list[str]:
    """Spares in the order in which they take seats; those that had notice last."""
    spares, lasting = run.roster.spares(), run.roster.lasting()
    if run.rules.stages == 1:
        return spares
    return [*by_node(lasting, run.roster.nodes), *(member for member in spares if member not in lasting)]


def _seated(run: RunState, spares: list[str]) -> tuple[str, ...]:
    rules = run.rules
    if rules.stages > 1:
        stages = {member: marks.stage for member, marks in run.survivors.items()}
        return seats_in_stages(run.world, stages, spares, rules.max_workers, rules.stages, run.seated)
    # who gave its state up keeps its rank
    stay = list(run.survivors) or [member for member in run.world if member in spares]
    others = sorted((one for one in spares if one not in stay), key=lambda one: (one in run.leaving, one not in run.world))
    return seats(run.world, stay, others, rules.max_workers)


def _why_go_back(run: RunState) -> str:
    """Why what the survivors hold is no use, in words; empty if they go on from it."""
    if not run.world:
        return ""  # nobody has trained yet: what the run begins from is known
    if not run.survivors:
        return f"nobody holds the state of step {run.step} any more"
    if run.going_back:
        return run.going_back
    if run.rules.strategy in ("checkpoint", "snapshot") and run.casualties() and run.stored:
        return f'strategy="{run.rules.strategy}"'
    return ""


def _go_back(run: RunState, why: str) -> list[m.Command]:
    """Workers are gathered while it is being looked what there is to load."""
    recovery = run.recoveries[-1]
    if not run.may_go_back():
        return run.fail(
            "NoSurvivorError",
            f"{why} ({recovery.cause}) and there is no checkpoint to go back to. Spread the workers over more nodes, or allow "
            "checkpoints (CheckpointConfig).",
        )
    recovery.reason = why
    run.state, run.seeking = State.REPLACE, True
    return [m.FindCheckpoints(run.incarnation), *run.provision()]


def on_checkpoints_found(run: RunState, event: m.CheckpointsFound) -> list[m.Command]:
    """What anybody holds is given up, and everybody loads the newest. If there is none, survivors go on as they are; without
    any, the run begins anew, which is exact as well. If there are some and none can be loaded, it ends."""
    recovery, run.seeking = run.recoveries[-1], False
    found = run.standing(event.stored)
    if run.survivors and not run.going_back and not run.replaying and not found:
        recovery.reason = ""
        return _go_on(run, event.at)
    if event.error:
        return run.fail("RecoveryError", f"{recovery.reason}, and the checkpoints cannot be listed: {event.error}")
    if run.stored and not found and run.rules.strategy != "snapshot":  # a holder's are gone with its node
        return run.fail(
            "NoCheckpointError",
            f"{recovery.reason}, and no checkpoint is there any more, though {run.stored[0].name} was: is the storage mounted, "
            "or does a rule of it delete files? Bring them back and submit the run again under the same name; without them it "
            "begins anew",
        )
    for member in run.roster.active():
        run.members[member] = MemberState.SPARE
        run.void.add(member)
    committed, run.survivors, run.stored = max(run.step, event.reached), {}, found
    spoilt = [stored.name for stored in run.stored if stored.step == run.spoilt]
    if any(stored.name not in run.rejected and stored.name not in spoilt for stored in run.stored):
        # perhaps the update before was the one that went wrong; if this is all that there is, it is tried once more
        run.rejected |= dict.fromkeys(spoilt, f"step {run.spoilt} began with it, and {run.going_back}")
    run.plan, run.replaying = None, frozenset()
    ended = run.begin_from_stored()
    if ended:
        return ended
    run.returns.append(Return(run.incarnation, run.step))
    strategy = Strategy.SNAPSHOT if run.rules.strategy == "snapshot" else Strategy.CHECKPOINT
    run.history.go_back(run.step, committed, run.load.name if run.load is not None else "the beginning", strategy)
    return _gather(run)


def on_rejected(run: RunState, event: m.CheckpointRejected) -> list[m.Command]:
    """The next one is the checkpoint before; whoever could load this one may be a survivor, which is as good."""
    run.rejected[event.name] = event.reason
    if not event.damaged:
        run.unread.add(event.name)
    return suspect(run, event.at, f"checkpoint {event.name} cannot be loaded: {event.reason}", event.member)


def on_undo_refused(run: RunState, event: m.UndoRefused) -> list[m.Command]:
    """Survivors cannot return to where the step began: everybody goes back to the checkpoint instead."""
    if not run.may_go_back():
        return run.fail("UndoRefusedError", f"{event.reason}. There is no checkpoint to go back to instead (CheckpointConfig)")
    run.going_back = event.reason
    return suspect(run, event.at, "an update cannot be undone", event.member)


def join(run: RunState, world: tuple[str, ...]) -> list[m.Command]:
    """The members of the next world come together in a new group, and those who hold state carry out the plan."""
    run.state = State.REPLACE
    run.joining, run.seated, run.answers, run.timed = world, world, {}, {}
    stages = {member: stage_of(rank, run.rules.stages) for rank, member in enumerate(world)}
    run.give_up([member for member, marks in run.survivors.items() if stages.get(member) != marks.stage])
    for member in world:
        run.members[member] = MemberState.ACTIVE
    if run.plan is not None:
        run.history.follow(run.plan)
    replaying.log_from_now_on(run)
    seconds = _seconds_to_move(run) + PATIENCE * run.longest_build  # who takes another stage builds it
    timer = m.SetTimer("reconcile", seconds, run.incarnation)
    load = run.load.name if run.load is not None else ""
    holders = tuple(run.survivors)
    log = (tuple(sorted(run.log.boundaries)), run.log.incarnation)
    return [m.Reconcile(world, run.incarnation, run.plan, load, holders, *log), timer]


def on_reconciled(run: RunState, event: m.Reconciled) -> list[m.Command]:
    run.void.discard(event.member)
    recovery = run.history.open
    if run.plan is not None:
        run.history.carried_out(run.plan, undone=event.undone, kept=event.kept)
    if not run.all_answered(event, run.joining):
        return []
    world = run.joining
    answers = {e.member: e.digests for e in run.answers.values() if isinstance(e, m.Reconciled)}
    # without a plan, everybody has built the same model from the same seed
    held = {member: answers[member] for member in world if run.plan is None or member in run.survivors}
    if recovery is not None:
        recovery.reconciled, recovery.incarnation, recovery.world_after = event.at, run.incarnation, len(world)
        recovery.repaired += differing_in_stages(world, held, run.rules.stages)
    copies, whole = rebuild_stages(world, held, run.rules.stages)
    handed = leaving.hand_over(run)
    if not copies and not run.replaying and not handed:
        return resume(run, event.at)
    run.state = State.REBUILD
    run.answers = {}
    commands: list[m.Command] = [replaying.replay(run)] if run.replaying else []
    busy = {member for command in commands if isinstance(command, m.Replay) for team in command.teams for member in team}
    fill = m.Fill(world, run.incarnation, tuple(member for member in world if member not in busy), copies, whole, handed)
    seconds = PATIENCE * (run.longest_build + run.longest_step * run.recoveries[-1].replayed) if busy else 0.0
    timer = m.SetTimer("fill", _seconds_to_move(run) + seconds, run.incarnation)
    return [fill, *commands, timer]


def _seconds_to_move(run: RunState) -> float:
    """How long it may take until all have their state. The rule for it knows how large that is, but not how many read it from
    one storage at once, or have it sent through one network card: an attempt too slow for that would be so each time."""
    return run.rules.phase_timeout * 2 ** min(max(0, run.fruitless - 1), MOST_DOUBLINGS)


def on_log_missing(run: RunState, event: m.LogMissing) -> list[m.Command]:
    """A replay with a gap would be another training: everybody goes back to the checkpoint instead. If the model is not
    deterministic, what is done again is another training as well, and the run's record says so. Perhaps only the step after the
    replay shows it, and other replicas of the stage, which replayed it too, do not know."""
    run.log.broke_off()
    if event.diverged:
        run.history.rounded(-1)
        run.going_back = "a replay computed something else than before"
    return suspect(run, event.at, f"the log cannot be replayed: {event.reason}", event.member)


# ---------------------------------------------------------------- REBUILD and RESUME


def on_filled(run: RunState, event: m.Filled) -> list[m.Command]:
    if not run.all_answered(event, run.joining):
        return []
    digests = {e.member: e.digests for e in run.answers.values() if isinstance(e, m.Filled)}
    if differing_in_stages(run.joining, digests, run.rules.stages):
        run.void |= filled_otherwise(run.joining, run.survivors, digests, run.rules.stages)
        return suspect(run, event.at, "the state still differs between replicas after filling", "hash")
    return resume(run, event.at)


def resume(run: RunState, at: float) -> list[m.Command]:
    """Training goes on; the recovery ends with the first step that is committed."""
    if run.history.open is not None:
        run.history.open.filled = at
    run.history.trains(len(run.joining))
    departed = leaving.gone(run)
    if run.state in ENDED:
        return departed
    run.state = State.RESUME
    veterans = (frozenset(run.world) - run.newcomers).intersection(run.joining)
    run.newcomers = frozenset(run.joining) - veterans if veterans else frozenset()
    run.world, run.answers, run.going_back, run.spoilt = run.joining, {}, "", None
    return [*departed, train(run, at)]


def train(run: RunState, at: float) -> m.Run:
    """What tells the workers of this world to train: also how often workers were lost so far, where that is to be regarded."""
    losses = sum(len(recovery.lost) for recovery in run.recoveries) if run.rules.measure_failures else 0
    failure_s = at / losses if losses else None
    rejected = tuple(sorted(run.rejected.keys() - run.unread))
    return m.Run(run.world, run.incarnation, failure_s, rejected, run.log.rounded, tuple(sorted(run.unread)))
