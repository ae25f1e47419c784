"""RECOVERING, phase by phase: FENCE (everybody leaves the step and reports where it stands) -> REPLACE (get workers; join a new
group; make the survivors consistent) -> REBUILD (fill replacements, repair what differs) -> RESUME (until a step is committed).

There is one path for a loss, a suspicion and a planned resize. A disturbance in any phase goes back to FENCE with a new
incarnation, and answers of an older one are ignored. Who does not answer the fence in time is lost; whatever else takes too
long is a suspicion, which the next fence confirms or refutes: one worker that hangs holds up all who exchange state with it.
"""

from __future__ import annotations

from raytrain_ft.errors import RecoveryError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import leaving, replacing, replaying
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.forward import could_finish, instead, worth_finishing
from raytrain_ft.policy.lineage import Return
from raytrain_ft.policy.reconcile import Marks, Plan, reconcile, reconcile_stages
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import PATIENCE, RunState
from raytrain_ft.policy.states import ENDED, TRAINING, State
from raytrain_ft.policy.strategy import Strategy
from raytrain_ft.policy.units import counted
from raytrain_ft.policy.world import (
    differing_in_stages,
    filled_otherwise,
    rebuild_stages,
)


def suspect(run: RunState, at: float, reason: str, noticed_by: str) -> list[c.Command]:
    """Something is wrong with this incarnation, or a resize is due: it ends."""
    run.history.begin(at, reason, noticed_by, len(run.world))
    return fence(run, at)


# ---------------------------------------------------------------- FENCE: stop, report


def fence(run: RunState, at: float) -> list[c.Command]:
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
    return [c.Fence(members, run.incarnation), c.SetTimer("fence", seconds, run.incarnation)]


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


def on_fenced(run: RunState, event: m.Fenced) -> list[c.Command]:
    run.answers[event.member] = event
    told = _forsake(run, event) if run.rules.strategy == "lossy" else []
    return [*told, *take_stock(run, event.at)]


def _forsake(run: RunState, event: m.Fenced) -> list[c.Command]:
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
    return [c.Forsake(waited_for, run.incarnation, worth)]


def take_stock(run: RunState, at: float) -> list[c.Command]:
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
    why = replacing.why_go_back(run) or replaying.why_not(run)
    if why:
        return replacing.go_back(run, why)
    run.give_up([member for member, marks in run.survivors.items() if marks.stage in run.replaying])
    return _go_on(run, at)


def _count_changes(run: RunState) -> None:
    """What survivors undid or kept in an earlier attempt, unless they have gone back since to before it."""
    for marks in run.survivors.values():
        if marks.changed is not None and marks.changed.incarnation >= run.counts_from:
            run.history.had_carried_out(marks.changed, run.incarnation)


def _go_on(run: RunState, at: float) -> list[c.Command]:
    """From what the survivors hold; before anybody trained, from what the run began from."""
    if not run.survivors:
        ended = _begin_again(run)
        if ended:
            return ended
    else:
        try:
            run.plan = _reconciled(run, list(run.survivors.values()))
        except RecoveryError as error:
            return run.fail("RecoveryError", str(error))
    run.state = State.REPLACE
    departed = leaving.let_go(run, at)
    return departed if run.state in ENDED else departed + replacing.gather(run)


def _begin_again(run: RunState) -> list[c.Command]:
    """Nobody has trained. If what the run was to begin from cannot be loaded, it begins from a checkpoint before that, and does
    again what an earlier run of its name had done since: with as many workers, or to other bits."""
    ended, recovery = run.begin_from_stored(), run.recoveries[-1]
    recovery.step = run.step
    if run.load is not None and run.load != run.stored[0]:
        recovery.reason = f"{run.stored[0].name} cannot be loaded"
        made_by = [one.workers for one in run.stored[: run.stored.index(run.load) + 1] if one.workers]
        recovery.world_before = made_by[0] if made_by else 0
        _note_return(run, run.stored[0].step)
        if len(set(made_by)) > 1:  # what is done again was done by one number of workers, and then by another
            run.history.rounded(run.step)
    return ended


def _note_return(run: RunState, committed: int) -> None:
    """Everybody goes back to what is to be loaded, though so many steps were committed."""
    run.returns.append(Return(run.incarnation, run.step))
    strategy = Strategy.SNAPSHOT if run.rules.strategy == "snapshot" else Strategy.CHECKPOINT
    run.history.go_back(run.step, committed, run.load.name if run.load is not None else "the beginning", strategy)


def _reconciled(run: RunState, marks: list[Marks]) -> Plan:
    rules = run.rules
    if rules.stages > 1:
        return reconcile_stages(marks)
    plan = reconcile(marks, whole_update=rules.whole_update)
    return instead(plan, marks, rules.strategy, rules.quorum) if run.casualties() else plan


# ---------------------------------------------------------------- REPLACE: what comes of it (`replacing` gets the workers)


def on_checkpoints_found(run: RunState, event: m.CheckpointsFound) -> list[c.Command]:
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
    _note_return(run, committed)
    return replacing.gather(run)


def on_rejected(run: RunState, event: m.CheckpointRejected) -> list[c.Command]:
    """The next one is the checkpoint before; whoever could load this one may be a survivor, which is as good."""
    run.rejected[event.name] = event.reason
    if not event.damaged:
        run.unread.add(event.name)
    return suspect(run, event.at, f"checkpoint {event.name} cannot be loaded: {event.reason}", event.member)


def on_undo_refused(run: RunState, event: m.UndoRefused) -> list[c.Command]:
    """Survivors cannot return to where the step began: everybody goes back to the checkpoint instead."""
    if not run.may_go_back():
        why = 'strategy="replication" forbids that' if run.rules.checkpoints else "there is none (CheckpointConfig)"
        return run.fail("UndoRefusedError", f"{event.reason}. Nobody can go back to a checkpoint instead: {why}")
    run.going_back = event.reason
    return suspect(run, event.at, "an update cannot be undone", event.member)


def on_reconciled(run: RunState, event: m.Reconciled) -> list[c.Command]:
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
    states = run.plan.states if run.plan is not None else ()
    restated = {member for copy in states for member in copy.targets}
    restated |= {member for member, marks in run.survivors.items() if marks.restated}
    copies, whole = rebuild_stages(world, held, run.rules.stages, restated)
    handed = leaving.hand_over(run)
    if not copies and not whole and not run.replaying and not handed:
        return resume(run, event.at)
    run.state = State.REBUILD
    run.answers = {}
    commands: list[c.Command] = [replaying.replay(run)] if run.replaying else []
    busy = {member for command in commands if isinstance(command, c.Replay) for team in command.teams for member in team}
    fill = c.Fill(world, run.incarnation, tuple(member for member in world if member not in busy), copies, whole, handed)
    seconds = PATIENCE * (run.longest_build + run.longest_step * run.recoveries[-1].replayed) if busy else 0.0
    timer = c.SetTimer("fill", replacing.seconds_to_move(run) + seconds, run.incarnation)
    return [fill, *commands, timer]


def on_log_missing(run: RunState, event: m.LogMissing) -> list[c.Command]:
    """A replay with a gap would be another training: everybody goes back to the checkpoint instead. If the model is not
    deterministic, what is done again is another training as well, and the run's record says so. Perhaps only the step after the
    replay shows it, and other replicas of the stage, which replayed it too, do not know."""
    if run.plan is not None:
        run.log.begins_with(run.plan.step)  # what was to be replayed is not all there
    if event.diverged:
        run.history.rounded(-1)
        run.going_back = "a replay computed something else than before"
    return suspect(run, event.at, f"the log cannot be replayed: {event.reason}", event.member)


# ---------------------------------------------------------------- REBUILD and RESUME


def on_filled(run: RunState, event: m.Filled) -> list[c.Command]:
    if not run.all_answered(event, run.joining):
        return []
    digests = {e.member: e.digests for e in run.answers.values() if isinstance(e, m.Filled)}
    if differing_in_stages(run.joining, digests, run.rules.stages):
        run.void |= filled_otherwise(run.joining, run.survivors, digests, run.rules.stages)
        return suspect(run, event.at, "the state still differs between replicas after filling", "hash")
    return resume(run, event.at)


def resume(run: RunState, at: float) -> list[c.Command]:
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


def train(run: RunState, at: float) -> c.Run:
    """What tells the workers of this world to train: also how often workers were lost so far, where that is to be regarded."""
    losses = sum(len(recovery.lost) for recovery in run.recoveries) if run.rules.measure_failures else 0
    failure_s = at / losses if losses else None
    rejected = tuple(sorted(run.rejected.keys() - run.unread))
    return c.Run(run.world, run.incarnation, failure_s, rejected, run.log.rounded, tuple(sorted(run.unread)))
