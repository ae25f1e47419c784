"""The next world: whether to wait for workers, who takes which rank, and which state must be sent to whom. Pure choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raytrain_ft.policy.reconcile import Copy
from raytrain_ft.policy.roster import Rules

Digests = Mapping[str, tuple[str, ...]]
"""Per member that holds state, the hash of each bucket."""


def shall_wait(rules: Rules, world_size: int, ready: int, *, more_may_come: bool) -> bool:
    """Whether to wait for workers: with too few to go on there is no choice; with fewer than before, it is the user's."""
    if ready < rules.min_workers:
        return True
    return rules.wait_for_replacement and more_may_come and ready < (world_size or rules.max_workers)


def seats(world: Sequence[str], survivors: Sequence[str], spares: Sequence[str], most: int) -> tuple[str, ...]:
    """The next world in rank order: survivors, and spares up to `most`.

    A replacement takes the rank of who it replaces, so that sums keep their order and the result its bits. A survivor that is
    not of `world` is a replacement that was filled, but did not come to train before the next disturbance.
    """
    pool = [*(member for member in survivors if member not in world), *spares]
    taken = [member if member in survivors else (pool.pop(0) if pool else None) for member in world]
    return tuple([*(member for member in taken if member is not None), *pool][: max(most, len(survivors))])


def rebuild(world: Sequence[str], digests: Digests) -> tuple[Copy, ...]:
    """What must be copied so that all of `world` hold the same state; nothing if they do.

    Whoever holds nothing is filled, and where holders differ, the majority is right (of two versions held by equally many,
    the lower rank's). Only who is right sends a bucket, and all of these take turns, so that they send at once.
    """
    holders = [member for member in world if member in digests]
    copies: list[Copy] = []
    for bucket in range(len(digests[holders[0]])):
        right = Counter(digests[member][bucket] for member in holders).most_common(1)[0][0]
        sources = [member for member in holders if digests[member][bucket] == right]
        targets = tuple(member for member in world if member not in sources)
        if targets:
            copies.append(Copy(bucket, "state", sources[bucket % len(sources)], targets))
    return tuple(copies)


def differing(digests: Digests) -> int:
    """In how many buckets those who hold state do not agree."""
    return sum(len(set(hashes)) > 1 for hashes in zip(*digests.values(), strict=True))
