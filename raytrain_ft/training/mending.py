"""What a recovery does to a replica that was interrupted in a step: finish it, undo it, keep or leave out what it did.

Nothing here decides, and nothing communicates but `reduce_alone`: the plan of a recovery (`policy/reconcile.py`) says which of
these is to be done to which bucket, and `runtime/recovery.py` does it in an order in which nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from raytrain_ft.errors import UndoRefusedError
from raytrain_ft.policy.reconcile import Share
from raytrain_ft.policy.sampling import GlobalBatch, Position, samples_in
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.buckets import Bucket
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.step import Replica


def share(replica: Replica) -> Share | None:
    """This replica's part in the step under way; None between steps."""
    if replica.attempt is None:
        return None
    batch, pieces = replica.attempt.batch, [one.positions for one in replica.passes.micro_batches]
    mine = (pieces[0].start, pieces[-1].stop)
    whole = replica.reducer.complete and replica.state.tail.sleep.silent_from is None
    return Share(replica.attempt.step, (batch.start, batch.stop), mine, whole)


@torch.no_grad()
def undo_bucket(replica: Replica, bucket: Bucket) -> int:
    """Undoes the update of one bucket; returns the number of parameters undone (SWIFT, section 4)."""
    assert replica.undo is not None
    updated = _updated(replica, bucket)
    bucket.dirty = True  # if this breaks off in the middle, what is here is no version of anything
    try:
        replica.undo.undo(updated)
    except UndoRefusedError:
        bucket.dirty = False  # nothing was changed
        raise
    bucket.version -= 1
    bucket.dirty = False
    return sum(p.numel() for p in updated)


def _updated(replica: Replica, bucket: Bucket) -> list[Parameter]:
    """What an update of this bucket changed: not what no rank used, nor what the optimizer was not given."""
    known = {id(p) for group in replica.state.optimizer.param_groups for p in group["params"]}
    return [p for p in bucket.params if p.grad is not None and id(p) in known]


@torch.no_grad()
def reduce_alone(replica: Replica, indices: Sequence[int], group: FencedGroup, *, leads: bool) -> None:
    """Reduces these buckets over survivors alone: their mean, by samples (Nicolae et al., III-B, "lossy forward").

    Args:
        leads: of the survivors, this one speaks for all of what is the same everywhere.
    """
    assert replica.attempt is not None
    batch, lost = len(replica.attempt.batch), replica.lost
    # Nothing is lost with a replica that slept, or whose share of a short batch was empty.
    factor = batch / (batch - samples_in(lost[1])) if lost is not None and lost[0] == replica.attempt.step else 1.0
    replica.leads = leads
    for index in indices:
        bucket = replica.state.buckets[index]
        replica.reducer.reduce_alone(bucket, group, factor)
        if bucket.tail_size:
            replica.state.tail.scale(bucket.tail, factor, bucket.more)


@torch.no_grad()
def keep_bucket(replica: Replica, bucket: Bucket) -> int:
    """The update of one bucket stays although its step is redone; returns the number of parameters that will be updated
    twice (Nicolae et al., III-B, "immediate mini-batch rollback")."""
    if replica.undo is not None:
        replica.undo.forget(bucket.params)
    bucket.version = replica.state.step
    return sum(p.numel() for p in _updated(replica, bucket))


def skip(replica: Replica, batch: GlobalBatch, after: Position) -> Commit | None:
    """The step under way is left out: it counts as committed, and nothing is updated. None if it was not begun here."""
    replica.left_out = replica.state.step
    replica.state.tail.restore()
    for bucket in replica.state.buckets:
        bucket.version, bucket.gradient = replica.state.step + 1, None
    if replica.attempt is not None:
        return replica.commit()
    replica.advance_schedule()
    replica.state.step += 1
    whole = [(batch.start, batch.stop)]
    returned = replica.settings.returns_lost  # as those that began it have it: they have not seen its loss either
    replica.state.position = replica.loader.position_after(batch, whole) if returned else after
    return None


def discard(replica: Replica) -> None:
    """Gives up the attempt: what the forward pass changed is put back, what was reduced is forgotten."""
    replica.state.tail.restore()
    replica.state.tail.settled()
    replica.attempt = None
    if replica.undo is not None:
        replica.undo.forget()  # what was updated was undone, kept, or replaced by another state
    for bucket in replica.state.buckets:
        bucket.gradient = None
