"""How a worker carries out its part of a recovery: make survivors consistent, copy state, fill replacements.

Received state (see `transfer`) is put aside until all of it is there and then taken over in one go: a recovery that is itself
interrupted leaves every bucket at a whole version, so it can begin again from wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrain_ft.errors import RecoveryError, StorageError
from raytrain_ft.policy.reconcile import Changed, Copy, Marks, Plan
from raytrain_ft.policy.sampling import Sampling, next_batch
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.runtime import holder
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.runtime.transfer import Transfer
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.manifest import Name
from raytrain_ft.storage.persister import Persister
from raytrain_ft.training import durable, mending
from raytrain_ft.training.attempt import WENT_DOWN, Commit
from raytrain_ft.training.build import Checkpointing
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.settings import Target
from raytrain_ft.training.state import Extras, TrainingState
from raytrain_ft.training.step import Replica


def marks(member: str, replica: Replica) -> Marks | None:
    """Where this worker stands, or None if it holds nothing that others could go on from."""
    state = replica.state
    if any(bucket.dirty for bucket in state.buckets):
        state.filled = False  # an update broke off in the middle: what is here is no version of anything
    if _may_be_left_behind(replica):
        state.filled = False
        if replica.undo is not None:
            replica.undo.forget()
    if not state.filled:
        return None
    versions = tuple(bucket.version for bucket in state.buckets)
    gradients = tuple(bucket.gradient for bucket in state.buckets)
    latest = (mending.share(replica), replica.lost, replica.left_out, replica.trained, replica.not_finite, replica.changed)
    return Marks(member, state.step, versions, gradients, replica.stage, state.agreed, *latest, restated=state.restated)


def _may_be_left_behind(replica: Replica) -> bool:
    """Whether this one sleeps and its step broke off after it had said that it has joined: others who knew that of everybody
    have gone on without it, and may be any number of steps ahead."""
    sleep, attempt = replica.state.tail.sleep, replica.attempt
    return attempt is not None and sleep.joined and attempt.replica in sleep.asleep


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a survivor's part of a plan: parameters undone, parameters whose update was kept, the step committed, and
    what to tell of a step that is left out and that this one had not begun."""

    undone: int
    kept: int
    commit: Commit | None
    lost: dict[str, Any] | None = None


@torch.no_grad()
def reconcile(replica: Replica, plan: Plan, transfer: Transfer, sampling: Sampling, incarnation: int) -> Outcome:
    """Carries out a survivor's part of the plan of this incarnation.

    The order matters: gradients first, then updates or undo, then states (which others may have just brought up to date).

    Raises:
        NonFiniteLossError: of the step that is completed.
    """
    state = replica.state
    base = plan.interrupted
    if plan.lost:
        replica.lost = (base, plan.lost)
    if replica.attempt is not None and not (plan.completes and replica.attempt.step == base):
        state.tail.restore()  # a step that is not completed; perhaps the next one, and others are to take this state
    for index, payload in transfer.copy(plan.gradients, lambda copy: state.buckets[copy.bucket].reduced()):
        bucket = state.buckets[index]
        bucket.take_reduced(payload)
        bucket.gradient = base
    if plan.mean:
        mending.reduce_alone(replica, plan.mean, transfer.group, leads=plan.speaker == transfer.member)
    if plan.completes:
        if plan.agreed and state.step == base:
            replica.take_agreed(plan.agreed)
        _update(replica, base)
    undone = sum(mending.undo_bucket(replica, state.buckets[index]) for index in plan.undo)
    if undone:  # at once: what comes next may be broken off
        replica.changed = Changed(incarnation, base, undone)
    take_states(replica, plan.states, transfer, version=base if plan.skips else plan.step)
    kept = sum(mending.keep_bucket(replica, state.buckets[index]) for index in plan.keep)
    if kept:
        replica.changed = Changed(incarnation, base, undone, kept)
    commit, lost = None, None
    if plan.skips and state.step == base:
        batch, after = next_batch(sampling, state.position)
        replica.trained = max(replica.trained, plan.trained)
        commit = mending.skip(replica, batch, after)
        if commit is None:  # nor will it ever have a record of that step
            where = {"incarnation": plan.trained, "step": base, "epoch": batch.epoch, "start": batch.start, "stop": batch.stop}
            lost = where | {"why": WENT_DOWN, "returned": replica.settings.returns_lost}
    elif plan.completes and state.step == base:
        behind = [bucket.index for bucket in state.buckets if bucket.version != plan.step]
        if behind:
            raise RecoveryError(f"step {base} would be committed without the update of buckets {behind}; the plan was {plan}")
        replica.check_loss()
        if plan.not_finite:
            replica.leave_out()
        commit = replica.commit()
    elif replica.attempt is not None:
        mending.discard(replica)
    return Outcome(undone, kept, commit, lost)


@torch.no_grad()
def lend(replica: Replica, plan: Plan, transfer: Transfer) -> None:
    """Takes part, with nothing, in what the survivors reduce once more: the group is of all, so that a replacement sits where
    those sat whom it replaces and sums keep their order."""
    for index in plan.mean:
        bucket = replica.state.buckets[index]
        flat = torch.zeros_like(bucket.flat)
        transfer.group.all_reduce(flat).wait()
        replica.reducer.reduce_more(flat[len(flat) - bucket.tail_size :], transfer.group, speaks=False)


def _update(replica: Replica, base: int) -> None:
    """Brings every bucket whose gradient is here to the next version, in the way that the step itself would have."""
    behind = [bucket for bucket in replica.state.buckets if bucket.version == base]
    if not behind or (any(bucket.gradient != base for bucket in behind) and replica.settings.update == "barrier"):
        return  # nothing to do, or the whole state comes from a survivor that completed the step
    if replica.settings.update == "barrier":
        replica.update()
        return
    for bucket in behind:
        if bucket.gradient == base:
            bucket.accept()
            replica.update_bucket(bucket)


@torch.no_grad()
def take_states(replica: Replica, copies: Sequence[Copy], transfer: Transfer, version: int) -> None:
    """Sends and receives bucket states; what came is taken over only when all of it is here."""
    buckets = replica.state.buckets
    for index, payload in transfer.copy(copies, lambda copy: replica.state.pack(buckets[copy.bucket])):
        replica.state.restated = True
        replica.state.unpack(buckets[index], payload)
        if replica.undo is not None:
            replica.undo.forget(buckets[index].params)  # their update led to the state that was here before
        buckets[index].version = version
        buckets[index].dirty = False


@dataclass(frozen=True, slots=True)
class Packed:
    """The whole state of a worker that leaves: per bucket its bytes (uint8), and its hash."""

    extras: Extras
    digests: tuple[str, ...]
    buckets: tuple[np.ndarray, ...]


def pack(replica: Replica) -> Packed:
    """The whole state between two steps, for who takes it over. A step under way is given up."""
    if replica.attempt is not None:
        mending.discard(replica)
    state = replica.state
    return Packed(state.extras(), state.digests(), tuple(state.pack(bucket).numpy() for bucket in state.buckets))


def unpack(state: TrainingState, packed: Packed) -> None:
    """Takes over the whole state of another worker.

    Raises:
        PeerLostError: it did not arrive as it was.
    """
    for bucket, values in zip(state.buckets, packed.buckets, strict=True):
        state.unpack(bucket, torch.from_numpy(values.copy()))
    state.take(packed.extras)
    if state.digests() != packed.digests:
        state.filled = False
        raise PeerLostError("what was handed over has other hashes than where it came from")


# ---------------------------------------------------------------- checkpoints


def checkpointing(spec: RunSpec, epoch: int, heartbeat: Heartbeat) -> Checkpointing | None:
    """How the workers of this run write checkpoints; None if they do not."""
    how = spec.checkpoints
    if how is None:
        return None
    target = Target(
        place=how.place,
        owner=spec.run_id,
        epoch=epoch,
        keep=how.keep,
        keep_epochs=how.keep_epochs,
        profile_key=how.profile_key,
    )
    tuner = Tuner(budget=how.overhead, window=how.window, fixed=how.every, failure_s=how.failure_s)
    in_memory = spec.rules.strategy == "snapshot"
    return Checkpointing(
        target=target,
        tuner=tuner,
        tell=heartbeat.note,
        records=heartbeat.untold,
        persister=(lambda memory: holder.HolderPersister(memory, spec)) if in_memory else Persister,
    )


def load(replica: Replica, spec: RunSpec, name: str, fence: Fence) -> None:
    """Takes over a checkpoint's state.

    Raises:
        FencedError: it broke off.
        StorageError: it is damaged; unless the state is still `filled`, the replica is of no use until it is loaded, filled or
            built anew. MismatchError: it does not belong to this run.
    """
    assert spec.checkpoints is not None
    parsed = Name.parse(name)
    if parsed is None:
        raise StorageError(f"{name!r} is no name of a checkpoint")
    if spec.rules.strategy == "snapshot":
        content = holder.load(spec, parsed)
    else:
        storage = open_storage(spec.checkpoints.place)
        manifest = checkpoint.patiently(lambda: checkpoint.read_manifest(storage, parsed), fence.check)
        content = checkpoint.map_shards(storage, manifest, durable.holds(manifest, replica.state.stage), fence.check)
    if replica.attempt is not None:
        mending.discard(replica)
    durable.restore(replica.state, content, replica.loader.data, spec.checkpoints.override, spec.step.pipeline)
