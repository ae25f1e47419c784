"""Which recovery for which loss, what it keeps, and the reason in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from raytrain_ft.policy.reconcile import Copy, Plan


class Strategy(StrEnum):
    """How lost state comes back (design, section 6, "Strategies")."""

    REPLICATION = "replication"


class Guarantee(StrEnum):
    """What a recovery kept of "as if nothing had happened"."""

    EXACT = "exact"
    """Every bit."""
    ROUNDING = "rounding"
    """The same samples and the same mathematics; sums in another order, or an undo, which is exact only up to rounding."""


@dataclass(slots=True)
class Recovery:
    """One recovery or planned resize, from the first sign to the first step committed afterwards.

    Attributes:
        cause: what went wrong, in words; empty parts are left out.
        noticed_by: how the first sign came.
        lost: members that were lost, those lost during the recovery included.
        incarnation: the incarnation that went on.
        attempts: how often it had to begin again because of a further loss.
        strategy, guarantee, reason: what was done, what it kept, and why.
        step: the step that training went on from.
        completes: whether the interrupted step was completed rather than redone.
        undone: parameters whose update was undone (on each survivor).
        repaired: buckets whose hash differed between survivors and that were copied from the majority.
        world_before, world_after: numbers of workers.
        detected, fenced, reconciled, filled, resumed: seconds since the run began.
    """

    cause: str
    noticed_by: str
    lost: list[str] = field(default_factory=list)
    incarnation: int = 0
    attempts: int = 1
    strategy: Strategy = Strategy.REPLICATION
    guarantee: Guarantee = Guarantee.EXACT
    reason: str = ""
    step: int = 0
    completes: bool = False
    undone: int = 0
    repaired: int = 0
    world_before: int = 0
    world_after: int = 0
    detected: float = 0.0
    fenced: float | None = None
    reconciled: float | None = None
    filled: float | None = None
    resumed: float | None = None

    @property
    def seconds(self) -> float | None:
        """From the first sign to the first step committed afterwards."""
        return None if self.resumed is None else self.resumed - self.detected


def guarantee_of(plan: Plan, world_before: int, world_after: int) -> Guarantee:
    """An undo is exact up to rounding; another number of workers adds the same gradients in another order."""
    return Guarantee.ROUNDING if plan.undo or world_before != world_after else Guarantee.EXACT


def repairs(world: Sequence[str], digests: Mapping[str, tuple[str, ...]]) -> tuple[Copy, ...]:
    """What must be copied so that all of `world` that hold state agree: for each bucket, the majority's version wins.

    Args:
        world: members in rank order; of two versions held by equally many, the lower rank's wins.
        digests: per member that holds state, the hash of each bucket.
    """
    holders = [member for member in world if member in digests]
    copies: list[Copy] = []
    for bucket in range(len(digests[holders[0]])):
        votes = Counter(digests[member][bucket] for member in holders)
        truth = votes.most_common(1)[0][0]
        wrong = tuple(member for member in holders if digests[member][bucket] != truth)
        if wrong:
            source = next(member for member in holders if digests[member][bucket] == truth)
            copies.append(Copy(bucket, "state", source, wrong))
    return tuple(copies)


def fills(sources: Sequence[str], targets: Sequence[str], num_buckets: int) -> tuple[Copy, ...]:
    """State for replacements, bucket by bucket, from all survivors in turn so that all of them send at once."""
    if not targets:
        return ()
    return tuple(Copy(bucket, "state", sources[bucket % len(sources)], tuple(targets)) for bucket in range(num_buckets))
