"""The next world: whether to wait for workers, who takes which rank, and which state must be sent to whom. Pure choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from raytrain_ft.policy.reconcile import Copy
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.topology import members_of

Digests = Mapping[str, tuple[str, ...]]
"""Per member that holds state, the hash of each bucket."""


def shall_wait(rules: Rules, world_size: int, ready: int, *, more_may_come: bool) -> bool:
    """Whether to wait for workers: with too few to go on there is no choice; with fewer than before, it is the user's."""
    if ready < rules.min_workers:
        return True
    return rules.wait_for_replacement and more_may_come and ready < min(world_size or rules.max_workers, rules.max_workers)


def seats(world: Sequence[str], survivors: Sequence[str], spares: Sequence[str], most: int) -> tuple[str, ...]:
    """The next world in rank order: survivors, and spares up to `most`.

    A replacement takes the rank of who it replaces, so that sums keep their order and the result its bits. A survivor that is
    not of `world` is a replacement that was filled, but did not come to train before the next disturbance. A spare that is of
    `world` has lost its state, or slept, and keeps its rank.
    """
    room = max(0, most - len(survivors))  # there may be less than before
    seated, before = [*survivors, *spares[:room]], set(world)
    stay, pool = set(seated), [member for member in seated if member not in before]
    taken = [member if member in stay else (pool.pop(0) if pool else None) for member in world]
    return (*(member for member in taken if member is not None), *pool)


def seats_in_stages(
    world: Sequence[str],
    survivors: Mapping[str, int],
    spares: Sequence[str],
    most: int,
    stages: int,
    seated: Sequence[str] = (),
) -> tuple[str, ...]:
    """The next world of a pipeline in rank order: as many whole replicas as there are workers for.

    Survivors stay at their stage, and at their seat where they can; whoever else sat at an empty seat returns to it. With fewer
    replicas than before, a stage may have more survivors than seats: they are spares then, for other stages too.

    Args:
        survivors: the stage of each.
        seated: the world that came together after `world`, but did not come to train: a replay goes on where it stood if who
            began it stays.
    """
    replicas = min(most, len(survivors) + len(spares)) // stages
    seats: list[str | None] = [None] * (replicas * stages)
    for rank, member in enumerate(world[: len(seats)]):
        if survivors.get(member) == rank % stages:
            seats[rank] = member
    free: list[str] = []
    for member in [member for member in survivors if member not in seats]:
        empty = [rank for rank in range(survivors[member], len(seats), stages) if seats[rank] is None]
        if empty:
            seats[empty[0]] = member
        else:
            free.append(member)
    pool = [*spares, *free]
    for rank, member in [*enumerate(world[: len(seats)]), *enumerate(seated[: len(seats)])]:
        if seats[rank] is None and member in pool and member not in seats:
            seats[rank] = member
    pool = [member for member in pool if member not in seats]
    return tuple(member if member is not None else pool.pop(0) for member in seats)


def by_node(members: Sequence[str], nodes: Mapping[str, str]) -> list[str]:
    """Those of one node in a row, and otherwise in their order. Seated like this, neighbouring stages share a node where they
    can, and what they send to each other needs no log."""
    first: dict[str, int] = {}
    for number, member in enumerate(members):
        first.setdefault(nodes.get(member, member), number)
    return sorted(members, key=lambda member: first[nodes.get(member, member)])


def rebuild_stages(
    world: Sequence[str], digests: Digests, stages: int, restated: Container[str] = ()
) -> tuple[tuple[Copy, ...], tuple[tuple[str, str], ...]]:
    """What must be copied within each stage that somebody holds, and who receives from whom what belongs to no bucket, too.

    Args:
        restated: who has taken another's state bucket by bucket, instead of making an update: a number that an optimizer counts
            in its parameter groups is of no bucket.
    """
    copies: list[Copy] = []
    whole: list[tuple[str, str]] = []
    for stage in range(stages):
        members = members_of(world, stage, stages)
        held = {member: digests[member] for member in members if member in digests}
        if held:
            copied = rebuild(members, held)
            copies += copied
            behind = {member for copy in copied for member in copy.targets} | {one for one in held if one in restated}
            source = next((member for member in held if member not in behind), next(iter(held)))
            whole += [(member, source) for member in members if member in behind and member != source]
    return tuple(copies), tuple(whole)


def differing_in_stages(world: Sequence[str], digests: Digests, stages: int) -> int:
    """In how many buckets those who hold the state of one stage do not agree."""
    found = 0
    for stage in range(stages):
        held = {member: digests[member] for member in members_of(world, stage, stages) if member in digests}
        found += differing(held) if held else 0
    return found


def rebuild(world: Sequence[str], digests: Digests) -> tuple[Copy, ...]:
    """What must be copied so that all of `world` hold the same state; nothing if they do.

    Whoever holds nothing is filled, and where holders differ, the majority is right (of two versions held by equally many,
    the lower rank's). Only who is right sends a bucket, and all of these take turns: one packs while another sends, and
    to different targets they send at once.
    """
    holders = [member for member in world if member in digests]
    copies: list[Copy] = []
    for bucket in range(len(digests[holders[0]])):
        right = Counter(digests[member][bucket] for member in holders).most_common(1)[0][0]
        sources = [member for member in holders if digests[member][bucket] == right]
        right_ones = set(sources)
        targets = tuple(member for member in world if member not in right_ones)
        if targets:
            copies.append(Copy(bucket, "state", sources[bucket % len(sources)], targets))
    return tuple(copies)


def differing(digests: Digests) -> int:
    """In how many buckets those who hold state do not agree."""
    return sum(len(set(hashes)) > 1 for hashes in zip(*digests.values(), strict=True))


def filled_otherwise(world: Sequence[str], holders: Container[str], digests: Digests, stages: int) -> set[str]:
    """Who was filled, and holds something else now than `holders`, who held the state of its stage before: it is wrong, however
    few they are. Where a stage had no holders, nobody can tell who is right."""
    found: set[str] = set()
    for stage in range(stages):
        members = members_of(world, stage, stages)
        right = {digests[member] for member in members if member in holders}
        if right:
            found.update(member for member in members if member not in holders and digests[member] not in right)
    return found
