"""Stages of a pipeline that nobody holds compute again what was committed since the newest checkpoint, from what their
neighbours have logged (SWIFT, section 5): which ones, from where, by whom, and what is logged from then on."""

from __future__ import annotations

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.topology import (
    between,
    groups_by_node,
    groups_of,
    logged_edges,
    replay_teams,
    replicated,
    stage_of,
    to_replay,
    waits,
)


def find(run: RunState) -> None:
    """Survivors may hold some of the stages only: which ones are to be replayed, and from which checkpoint."""
    stages = run.rules.stages
    run.replaying = to_replay(groups_of(run.log.boundaries, stages), _held(run), stages)
    if run.replaying and not run.world:  # nobody has trained yet: what they hold is what the run begins from
        run.replaying = frozenset()
        run.give_up(list(run.survivors))
    else:
        until = min(marks.step for marks in run.survivors.values())
        run.source = run.log.source(run.stored, run.rejected, until) if run.rules.logging else None
        # a step that all agreed on is completed, and who is replayed does it again
        completes = any(marks.agreed is not None and marks.agreed[0] == until for marks in run.survivors.values())
        if run.source is not None and run.source.step < until + completes:
            _join_torn_ones(run, run.log.torn_since(run.source.step) | _struck(run))


def _struck(run: RunState) -> frozenset[int]:
    """Stages of which somebody who came together with the others last holds nothing now. Lost with it is what it had logged and
    not written; or it was still to log all of that again. What is missing of those before is known (`LogCover.torn`), or was
    replayed since."""
    left = run.recoveries[-1].left
    gone = [rank for rank, member in enumerate(run.seated) if member not in run.survivors and member not in left]
    return frozenset(stage_of(rank, run.rules.stages) for rank in gone)


def _join_torn_ones(run: RunState, torn: frozenset[int]) -> None:
    """Who is replayed cannot read what is missing of what a neighbour sent: that one is replayed with it, though it is held."""
    stages = run.rules.stages
    while more := {s for s in torn - run.replaying if waits(s, run.replaying | {s}, stages, run.rules.joined)}:
        held = frozenset(range(stages)) - run.replaying - more
        run.replaying = to_replay(groups_of(run.log.boundaries, stages), held, stages)


def why_not(run: RunState) -> str:
    """Why the stages that nobody holds cannot be replayed, in words; empty if they can, or if there are none."""
    held = _held(run)
    if run.replaying and (held <= run.replaying or run.source is None):
        missing = frozenset(range(run.rules.stages)) - held
        return f"nobody holds {_words(missing)}, and no log reaches back to a checkpoint of it"
    return ""


def _held(run: RunState) -> frozenset[int]:
    return frozenset(marks.stage for marks in run.survivors.values())


def _words(stages: frozenset[int]) -> str:
    names = ", ".join(str(stage) for stage in sorted(stages))
    return f"stage {names}" if len(stages) == 1 else f"stages {names}"


def log_from_now_on(run: RunState) -> None:
    """What is logged in the next world. If that is more than before, or another number of replicas, the log begins anew.

    Nothing between stages that are filled from replicas, unless somebody insists on it or there is no checkpoint for when all
    replicas of a stage are lost at once.
    """
    rules, nodes = run.rules, run.roster.nodes
    if not rules.logging:
        return
    boundaries = logged_edges(groups_by_node(run.joining, nodes, rules.stages))
    if run.groups:
        boundaries &= logged_edges(run.groups)
    if rules.strategy == "auto" and rules.checkpoints:
        boundaries -= between(replicated(run.joining, nodes, rules.stages))
    goes_on = run.plan is not None and len(run.joining) == len(run.world) and boundaries <= run.log.boundaries
    added: frozenset[int] = frozenset()
    if not goes_on:  # else a boundary within a node is logged further: the log stays as it is
        added, run.log.boundaries = boundaries - run.log.boundaries, boundaries
    if run.plan is not None and (goes_on or run.replaying):
        gone = {stage_of(run.world.index(member), rules.stages) for member in run.casualties()}
        beside = {stage for boundary in added for stage in (boundary, boundary + 1)}  # what crossed them before is not there
        there = run.members.keys() - set(run.givers.values())  # who hands its state over leaves right after
        run.log.goes_on(run.plan.step, (gone | beside) - run.replaying, run.replaying, there)
    else:
        run.log.begin(run.plan.step if run.plan is not None else run.step, run.incarnation)


def on_stage_timed(run: RunState, event: m.StageTimed) -> list[c.Command]:
    """When all have told, it is decided which boundaries are logged from now on (SWIFT, section 5.3, by a profile of the first
    steps). What is logged already stays, so fewer boundaries are never a gap."""
    selective, stages = run.rules.selective, run.rules.stages
    if selective is None or run.groups:
        return []
    run.timed[event.member] = event.seconds
    if not all(member in run.timed for member in run.world):
        return []
    try:
        run.groups, reason = selective.groups_of(_timed(run)), "by what the first steps took"
    except ConfigError as error:
        run.groups, reason = tuple((stage,) for stage in range(stages)), f"every boundary between nodes is logged: {error}"
        run.warn(reason)
    run.log.boundaries &= logged_edges(run.groups)
    return _log_only(run, reason)


def log_only_again(run: RunState) -> list[c.Command]:
    """What was decided since the world began, if anything, for those who may not have heard: the supervisor was lost."""
    decided = run.groups and run.world and all(member in run.timed for member in run.world)
    return _log_only(run, "as was decided before the supervisor was lost") if decided else []


def _timed(run: RunState) -> tuple[float, ...]:
    """By stage, seconds of the slowest replica."""
    stages = run.rules.stages
    return tuple(max(run.timed[member] for member in run.world[stage::stages]) for stage in range(stages))


def _log_only(run: RunState, reason: str) -> list[c.Command]:
    return [c.LogOnly(run.world, run.incarnation, tuple(sorted(run.log.boundaries)), run.groups, _timed(run), reason)]


def replay(run: RunState) -> c.Replay:
    """They do so now."""
    plan, source, recovery, rules = run.plan, run.source, run.recoveries[-1], run.rules
    assert plan is not None
    assert source is not None
    helpers = _helpers(run, plan.step - source.step)
    teams = replay_teams(run.joining, run.replaying, rules.stages, helpers, rules.joined)
    most = max(len(team) for team in teams)
    if most > 1:
        run.help_left -= 1
        # nobody stores anything of a step before its commit
        run.log.rounded = run.log.rounded if rules.exact_sums else plan.step + 1
    exact = source.step >= run.log.rounded
    if not exact:
        run.history.rounded(source.step)
    recovery.replay(_words(run.replaying), source.step, source.name or "the beginning", most)
    stages = tuple(sorted(run.replaying))
    nodes = tuple(run.roster.nodes.get(member, member) for member in run.joining)
    return c.Replay(run.joining, run.incarnation, teams, stages, source.name, plan.step, run.log.incarnation, exact, nodes)


def _helpers(run: RunState, steps: int) -> int:
    """How many survivors may help each who replays so many steps. Nobody if one alone has done that by the time that they have
    built the stage."""
    rules = run.rules
    is_long = steps * run.longest_step > run.longest_build
    return rules.replay_workers - 1 if is_long and run.help_left and len(run.joining) == rules.stages else 0


def give_way(run: RunState, silent: list[str]) -> None:
    """Who was silent held up REBUILD. If that was a replay, the next is one without helpers, which goes on where it stood if it
    can. If that is too slow as well, everybody goes back: several who replay together begin at the checkpoint each time, and
    would be as slow again."""
    if not any(stage_of(run.joining.index(member), run.rules.stages) in run.replaying for member in silent):
        return
    run.help_left, run.slow_replays = 0, run.slow_replays + 1
    if run.slow_replays > 1 and run.may_go_back():
        run.going_back = f"the replay of {_words(run.replaying)} was too slow"
