"""A lost stage computes again what it had committed, from what its neighbours had sent to it (SWIFT, section 5.1).

A replayed step is a step: the same loop, the same order, the same random streams, the same update. Only the ends of its edges
are others: they read the log instead of waiting for a neighbour, and send to nobody who has it already. So there are no bubbles
in it, and its result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_ft.training import mending
from raytrain_ft.training.links import Links
from raytrain_ft.training.step import Replica


def replay(replica: Replica, links: Links, until: int, micro_batches: int) -> None:
    """Replays from where the replica stands until `until` steps are committed.

    Raises:
        LogGapError: a record is missing or damaged. The replica stands between two steps, and nothing is lost.
        FencedError: it broke off.
    """
    state = replica.state
    if replica.attempt is not None:
        mending.discard(replica)
    replica.abandon()
    replica.loader.start(state.position, links.replica, links.replicas, micro_batches)
    with _no_checkpoints(replica):
        while state.step < until:
            replica.at("replay")
            replica.train_step(links)


@contextmanager
def _no_checkpoints(replica: Replica) -> Iterator[None]:
    """What is replayed lies in the past: its checkpoints were taken, or were not."""
    checkpointer, replica.checkpointer = replica.checkpointer, None
    try:
        yield
    finally:
        replica.checkpointer = checkpointer
