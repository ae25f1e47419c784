"""Where a rank stands: replicas of a pipeline's stages, and who must be replayed together. Pure choices.

Rank r of a world hosts stage ``r % stages`` of replica ``r // stages``; without a pipeline there is one stage. Stages whose
boundary is not logged form a *group*: if one of them has no replica left, all of them go back together (SWIFT, section 5.3).
A boundary between two stages with replicas on other nodes needs no log: whichever node is lost, both are filled (section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Groups = tuple[tuple[int, ...], ...]
"""Stages in order, cut into groups of neighbours. Only what crosses from one group to the next is logged."""


def stage_of(rank: int, stages: int) -> int:
    """The stage that a rank hosts."""
    return rank % stages


def replica_of(rank: int, stages: int) -> int:
    """The replica of its stage that a rank hosts."""
    return rank // stages


def members_of(world: Sequence[str], stage: int, stages: int) -> tuple[str, ...]:
    """Who hosts this stage, by replica."""
    return tuple(world[stage::stages])


def groups_by_node(world: Sequence[str], nodes: Mapping[str, str], stages: int) -> Groups:
    """One group per failure domain: neighbours share one if in every replica they are on the same node, and are lost with it.

    Args:
        nodes: the node of each member; a member whose node is not known is on one of its own.
    """
    groups: list[list[int]] = [[0]]
    for stage in range(1, stages):
        pairs = zip(members_of(world, stage - 1, stages), members_of(world, stage, stages), strict=True)
        together = all(nodes.get(left) is not None and nodes.get(left) == nodes.get(right) for left, right in pairs)
        if together:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return tuple(tuple(group) for group in groups)


def replicated(world: Sequence[str], nodes: Mapping[str, str], stages: int) -> frozenset[int]:
    """The stages that outlive the loss of any one node: their replicas are on several. One on the same node counts for nothing.

    Args:
        nodes: see `groups_by_node`.
    """
    hosts = [{nodes.get(member, member) for member in members_of(world, stage, stages)} for stage in range(stages)]
    return frozenset(stage for stage, of_stage in enumerate(hosts) if len(of_stage) > 1)


def between(some: frozenset[int]) -> frozenset[int]:
    """The boundaries between two of these stages, each named by the stage before it."""
    return frozenset(stage for stage in some if stage + 1 in some)


def logged_edges(groups: Groups) -> frozenset[int]:
    """The boundaries that are logged, each named by the stage before it."""
    return frozenset(group[-1] for group in groups[:-1])


def groups_of(logged: frozenset[int], stages: int) -> Groups:
    """The groups that these logged boundaries make."""
    groups: list[list[int]] = [[0]]
    for stage in range(1, stages):
        if stage - 1 in logged:
            groups.append([stage])
        else:
            groups[-1].append(stage)
    return tuple(tuple(group) for group in groups)


def to_replay(groups: Groups, held: frozenset[int], stages: int) -> frozenset[int]:
    """The stages that must be replayed: those that nobody holds, and all that share a group with one of these.

    Args:
        held: stages of which somebody holds the state.
    """
    lost = frozenset(range(stages)) - held
    return frozenset(stage for group in groups if lost & frozenset(group) for stage in group) | lost


def waits(stage: int, replaying: frozenset[int], stages: int, joined: Groups = ()) -> bool:
    """Whether who replays a stage sends to, and receives from, somebody who replays another one, as they do in training:
    neighbours do.

    Args:
        joined: others that do.
    """
    pairs = [(other, other + 1) for other in range(stages - 1)]
    return any(stage in those and len(replaying.intersection(those)) > 1 for those in (*pairs, *joined))


def replay_teams(
    world: Sequence[str], replaying: frozenset[int], stages: int, helpers: int, joined: Groups = ()
) -> tuple[tuple[str, ...], ...]:
    """Who replays: each who hosts a stage that is replayed, followed by up to `helpers` survivors that take micro-batches of it
    (SWIFT, section 5.2).

    Those who wait for each other have no helpers.

    Args:
        joined: see `waits`.
    """
    leaders = [member for rank, member in enumerate(world) if stage_of(rank, stages) in replaying]
    if any(waits(stage, replaying, stages, joined) for stage in replaying):
        helpers = 0
    free = [member for member in world if member not in leaders]
    share = min(helpers, len(free) // len(leaders))
    return tuple((leader, *free[number * share : (number + 1) * share]) for number, leader in enumerate(leaders))
