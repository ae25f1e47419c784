"""REPLACE: who takes which seat, how long workers are waited for, and when everybody goes back to a checkpoint instead."""

from __future__ import annotations

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import replaying
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import PATIENCE, RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.topology import stage_of
from raytrain_ft.policy.units import counted
from raytrain_ft.policy.world import by_node, seats, seats_in_stages, shall_wait

MOST_DOUBLINGS = 3
"""Of the time that moving the state may take, while recovery after recovery comes to nothing."""


def gather(run: RunState) -> list[c.Command]:
    """Forms the next world, or waits for workers, but not for ever. New ones are started now only if there are too few."""
    ready, rules = len(run.survivors) + len(run.roster.spares()), run.rules
    needed = run.wanted if rules.wait_for_replacement else rules.min_workers
    timer = c.SetTimer(timer_of(run), rules.replacement_timeout, run.incarnation)
    return [timer, *(run.provision() if ready < needed else []), *replace(run)]


def timer_of(run: RunState) -> str:
    """The timer for how long workers are waited for. If there are too few for the plan, and everybody goes back instead, they
    are waited for anew, in the same incarnation: what was set before is not to cut that short."""
    return "replacement" if run.plan is not None else "return"


def replace(run: RunState, *, waited: bool = False) -> list[c.Command]:
    """Forms the next world, or waits for workers to come."""
    if run.seeking:
        return []
    all_is_computed = run.plan is not None and run.plan.step >= run.rules.max_steps
    if all_is_computed and run.rules.stages == 1:  # nobody needs to be replaced; of a pipeline, every stage must be saved
        return join(run, tuple(member for member in run.world if member in run.survivors) or tuple(run.survivors))
    spares = to_seat(run)
    ready = len(run.survivors) + len(spares)
    more_may_come = run.roster.any_starting() and not waited and not _in_danger(run)
    if not shall_wait(run.rules, len(run.world), ready, more_may_come=more_may_come):
        world = _seated(run, spares)
        if run.replaying and len(world) != len(run.world):
            return go_back(run, f"there are workers for {len(world)} ranks only, and the log is of {len(run.world)}")
        return join(run, world)
    if not waited:
        return []
    in_vain, slow = run.roster.in_vain, too_slow(run, "replacement_timeout")
    remedy = f"The last one that was started was lost: {in_vain}" if in_vain else slow or "Add nodes, or lower the minimum."
    return run.fail(
        "RecoveryError",
        f"{ready} workers are left and none came within {run.rules.replacement_timeout:g} s, but num_workers asks "
        f"for at least {run.rules.min_workers}. {remedy}",
    )


def too_slow(run: RunState, timeout: str) -> str:
    """What to do about workers that were still being set up as this timeout ended; empty if none were."""
    under_way = len(run.roster.of(MemberState.STARTING))
    if not under_way:
        return ""
    return (
        f"{under_way} more {'was' if under_way == 1 else 'were'} still being set up: raise RecoveryConfig({timeout}=...), or "
        "have TrainTask.model() and dataset() take less time."
    )


def _in_danger(run: RunState) -> bool:
    """Whether all who hold some stage are to leave: others take over at once, for there is a time when it is gone."""
    if run.replaying:  # of as many as wrote the log, or the state is lost in any case
        return False
    held = {marks.stage for marks in run.survivors.values()}
    stays = {marks.stage for member, marks in run.survivors.items() if member not in run.leaving}
    return bool(run.givers) or held != stays


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


def why_go_back(run: RunState) -> str:
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


def go_back(run: RunState, why: str) -> list[c.Command]:
    """Workers are gathered while it is being looked what there is to load."""
    recovery = run.recoveries[-1]
    if not run.may_go_back():
        way = (
            'with strategy="replication" nobody goes back to a checkpoint. Run it again under the same name, which resumes '
            'from the newest, or use strategy="auto"'
            if run.rules.checkpoints
            else "there is no checkpoint to go back to. Spread the workers over more nodes, or allow checkpoints "
            "(CheckpointConfig)"
        )
        return run.fail("NoSurvivorError", f"{why} ({recovery.cause}) and {way}.")
    recovery.reason = why
    run.state, run.seeking = State.REPLACE, True
    return [c.FindCheckpoints(run.incarnation), *run.provision()]


def join(run: RunState, world: tuple[str, ...]) -> list[c.Command]:
    """The members of the next world come together in a new group, and those who hold state carry out the plan."""
    run.state = State.REPLACE
    _tell_what_is_loaded(run, len(world))
    run.joining, run.seated, run.answers, run.timed = world, world, {}, {}
    stages = {member: stage_of(rank, run.rules.stages) for rank, member in enumerate(world)}
    run.give_up([member for member, marks in run.survivors.items() if stages.get(member) != marks.stage])
    for member in world:
        run.members[member] = MemberState.ACTIVE
    if run.plan is not None:
        run.history.follow(run.plan)
    replaying.log_from_now_on(run)
    seconds = seconds_to_move(run) + PATIENCE * run.longest_build  # who takes another stage builds it
    timer = c.SetTimer("reconcile", seconds, run.incarnation)
    load = run.load.name if run.load is not None else ""
    holders = tuple(run.survivors)
    log = (tuple(sorted(run.log.boundaries)), run.log.incarnation)
    return [c.Reconcile(world, run.incarnation, run.plan, load, holders, *log), timer]


def _tell_what_is_loaded(run: RunState, workers: int) -> None:
    """Where a later run of a name begins. Said again of what it loads instead, if that cannot be loaded."""
    load = run.load
    if load is None or run.world:  # who has trained goes back, which a recovery's account says
        return
    instead = "" if load == run.stored[0] else f", for {run.stored[0].name} cannot be loaded"
    words = f"goes on from {load.name}{instead}, with what it holds of the optimizer's settings and of the schedule"
    if load.workers not in (0, workers) and load.step < run.rules.max_steps:  # else no sum is left to be done
        words += f"; with {counted(workers, 'worker')} where {load.workers} trained: same samples, other bits"
    run.warn(words)


def seconds_to_move(run: RunState) -> float:
    """How long it may take until all have their state. The rule for it knows how large that is, but not how many read it from
    one storage at once, or have it sent through one network card: an attempt too slow for that would be so each time."""
    return run.rules.phase_timeout * 2 ** min(max(0, run.fruitless - 1), MOST_DOUBLINGS)
