"""One training step of one worker, top to bottom. Start reading here.

A step is: read this rank's share of the global batch; forward and backward, once per micro-batch; reduce the gradients bucket
by bucket while the backward pass goes on; update; commit. Nothing is promised to anybody before `commit`, and no collective,
vote or device sync is there for the sake of failures. Whatever ends a step early (`FencedError`, `PeerLostError`) leaves it
between two of these lines, with marks on the buckets that say where.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from raytrain_ft.errors import NonFiniteLossError
from raytrain_ft.policy.sampling import GlobalBatch, Position
from raytrain_ft.training.buckets import Bucket, Probe, Reducer, only
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.data import Loader, MicroBatch
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.random import seed_all, step_seed
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.undo import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step depends on besides the task.

    Attributes:
        update: "barrier" updates when every bucket is reduced; "wait_free" each bucket as soon as it is.
        precision: "bf16" runs forward and loss under autocast; parameters stay fp32.
        on_non_finite: what to do when the loss of a step is NaN or infinite; whether a worker that raises means the end of the
            run or a way back is for the supervisor to say.
    """

    seed: int = 0
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    update: Literal["barrier", "wait_free"] = "barrier"
    on_non_finite: Literal["raise", "skip", "roll_back"] = "raise"
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20


@dataclass(frozen=True, slots=True)
class Attempt:
    """A step under way: what it reads, and what the world looks like."""

    step: int
    batch: GlobalBatch
    after: Position
    ids: tuple[Any, ...]
    rank: int
    world_size: int
    incarnation: int
    began: float


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that was committed on this worker, for the run's record."""

    attempt: Attempt
    loss: float
    seconds: float
    skipped: bool


class Replica:
    """One copy of the model and the step that trains it.

    Attributes:
        attempt: the step under way, or None between steps.
        stop_agreed: all ranks agreed, in the last step, to stop at this boundary.
        checkpoint_agreed: all ranks agreed, in the last step, that a checkpoint is due at this boundary.
        checkpointer: None writes none.
    """

    def __init__(
        self,
        task: Any,
        state: TrainingState,
        loader: Loader,
        settings: StepSettings,
        probe: Callable[[str, int, int | None], None] | None = None,
        undo_mode: Literal["exact", "replay"] = "exact",
        checkpointer: Checkpointer | None = None,
        keep_epochs: bool = False,
    ) -> None:
        self.task = task
        self.state = state
        self.loader = loader
        self.settings = settings
        self.attempt: Attempt | None = None
        self.stop_agreed = False
        self.checkpoint_agreed = False
        self.checkpointer = checkpointer
        self._keep_epochs = keep_epochs
        self._probe = probe
        self._last_commit: float | None = None
        self._skip = False
        self._weight = 0.0
        # What the flat buffers hold after an update may be passed to others as the step's gradient only if it still is that.
        self._gradients_survive = settings.max_grad_norm is None and keeps_gradients(state.optimizer)
        wait_free = settings.update == "wait_free"
        # Only wait-free updates can ever need an undo: recording anything else would cost for nothing.
        self.undo = Undo(state.optimizer, undo_mode) if wait_free else None
        self.reducer = Reducer(
            state.buckets,
            on_reduced=self.update_bucket if wait_free else _do_nothing,
            eager=wait_free,
            fill_tail=self._fill_tail,
            probe=self._at_bucket,
        )

    def train_step(self, group: FencedGroup) -> Commit:
        """Runs one step to its commit.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a collective failed. The marks say how far the step came.
        """
        began = time.monotonic()
        self.stop_agreed = False
        self._at("data")
        micro_batches = self.loader.next(group.fence.check)
        self.begin(micro_batches, group, began)
        for number, micro_batch in enumerate(micro_batches):
            if number == len(micro_batches) - 1:
                self.reducer.arm()
            self.forward_backward(number, micro_batch)
        self.reducer.finish()
        if self.settings.update == "barrier":
            self.update()
        elif not math.isfinite(self.state.loss):
            raise NonFiniteLossError(
                f"the loss of step {self.state.step} is {self.state.loss}, and wait-free updates have applied it. Look at "
                'the learning rate and at this batch; RecoveryConfig(update="barrier") would have seen it first.'
            )
        self._at("commit")
        return self.commit()

    def checkpoint(self, check: Callable[[], None]) -> None:
        """Begins a checkpoint of the state between two steps, if that was agreed upon.

        Args:
            check: called in every wait; may raise to leave it.
        """
        if self.checkpointer is not None and self.checkpoint_agreed:
            self._at("checkpoint")
            self.checkpoint_agreed = False
            self.checkpointer.take(self.state.step, check, kept=self._keep_epochs and self.state.position.consumed == 0)

    def finish(self, check: Callable[[], None]) -> None:
        """The run's last checkpoint, which is waited for."""
        if self.checkpointer is not None:
            self._at("checkpoint")
            self.checkpointer.finish(self.state.step, check)

    def begin(self, micro_batches: list[MicroBatch], group: FencedGroup, began: float) -> None:
        """Starts an attempt: from here on the buffers may change, so they are saved."""
        first = micro_batches[0]
        self.reducer.group = group
        self.reducer.begin(self.state.step)
        self.state.tail.begin()
        ids = tuple(micro_batch.ids for micro_batch in micro_batches)
        self._weight = sum(len(i) for i in ids) / (first.batch.stop - first.batch.start)
        self.attempt = Attempt(
            self.state.step, first.batch, first.after, ids, group.rank(), group.size(), group.fence.incarnation, began
        )

    def forward_backward(self, number: int, micro_batch: MicroBatch) -> None:
        """One micro-batch. Its loss is weighted by its samples, so that gradients only need to be summed over ranks."""
        assert self.attempt is not None
        if micro_batch.data is None:
            return  # fewer samples than micro-batches at the end of an epoch: it contributes nothing
        batch = self.attempt.batch
        seed_all(step_seed(self.settings.seed, self.state.step, self.attempt.rank, number))
        self._at("forward")
        data = self._on_device(micro_batch.data)
        with self._autocast():
            output = self.state.model(self.task.inputs(data))
            loss = self.task.loss(output, data)
        weighted = loss * (len(micro_batch.ids) / (batch.stop - batch.start))
        self.state.tail.losses.append(weighted)
        weighted.backward()

    def _on_device(self, data: Any) -> Any:
        device = self.state.buckets[0].flat.device
        if device.type == "cpu":
            return data
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, data)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.state.buckets[0].flat.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def update(self) -> None:
        """Updates all buckets that are not yet at the next version, at once (`update="barrier"`)."""
        behind = [bucket for bucket in self.state.buckets if bucket.version == self.state.step]
        for bucket in behind:
            bucket.accept()
        if self._must_skip():
            self._mark(behind)
            return
        self._await_copy()
        if self.settings.max_grad_norm is not None:
            params = [p for bucket in behind for p in bucket.params]
            torch.nn.utils.clip_grad_norm_(params, self.settings.max_grad_norm, error_if_nonfinite=False)
        for bucket in behind:
            bucket.dirty = True
        self._at("update")
        began = time.monotonic()
        self.state.optimizer.step()
        if self.checkpointer is not None:
            self.checkpointer.updated(time.monotonic() - began)
        self._mark(behind)

    def _await_copy(self) -> None:
        """A snapshot that is under way reads what an update would change."""
        if self.checkpointer is not None:
            self._at("wait")
            self.checkpointer.await_copy(self._check)

    def _check(self) -> None:
        if self.reducer.group is not None:
            self.reducer.group.fence.check()

    @torch.no_grad()
    def update_bucket(self, bucket: Bucket) -> None:
        """Updates one bucket as soon as it is reduced (`update="wait_free"`). Once begun, it runs to its end."""
        self._await_copy()
        bucket.dirty = True
        self._at_bucket("update", bucket.index)
        with only(self.state.optimizer, bucket.params):
            self.state.optimizer.step()
        self._mark([bucket])

    def _mark(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.tail_size:
                self.state.tail.apply(bucket.tail)
                self.state.loss = self.state.tail.loss(bucket.tail)
            bucket.version += 1
            bucket.dirty = False
            if not self._gradients_survive:
                bucket.gradient = None
        self._at_bucket("updated", buckets[-1].index if len(buckets) == 1 else None)

    @torch.no_grad()
    def undo_bucket(self, bucket: Bucket) -> int:
        """Undoes the update of one bucket; returns the number of parameters undone (SWIFT, section 4)."""
        assert self.undo is not None
        used = [p for p in bucket.params if p.grad is not None]
        self.undo.undo(used)
        bucket.version -= 1
        return sum(p.numel() for p in used)

    def commit(self) -> Commit:
        """The step is done on this worker: schedules advance, and the data has been used."""
        assert self.attempt is not None
        state, attempt = self.state, self.attempt
        if state.scheduler is not None:
            if isinstance(state.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                state.scheduler.step(state.loss)
            else:
                state.scheduler.step()
        state.step += 1
        state.position = attempt.after
        state.tail.settled()
        self.attempt = None
        tail = state.buckets[-1].tail
        self.stop_agreed, self.checkpoint_agreed = state.tail.stop_agreed(tail), state.tail.checkpoint_agreed(tail)
        if self.undo is not None:
            self.undo.forget()  # a committed step is never undone; its records would keep old buffers alive
        commit = Commit(attempt, state.loss, time.monotonic() - attempt.began, self._skip)
        self._skip = False
        if self.checkpointer is not None:
            now = time.monotonic()
            self.checkpointer.stepped(state.step, now - (self._last_commit or attempt.began))
            self._last_commit = now
        return commit

    def discard(self) -> None:
        """Gives up the attempt: what the forward pass changed is put back, what was reduced is forgotten."""
        self.state.tail.restore()
        self.state.tail.settled()
        self.attempt = None
        for bucket in self.state.buckets:
            bucket.gradient = None

    def _must_skip(self) -> bool:
        """Whether this step's update is left out. Every rank sees the same reduced loss, so all decide alike."""
        loss = self.state.tail.loss(self.state.buckets[-1].tail)
        if math.isfinite(loss):
            return False
        if self.settings.on_non_finite != "skip":
            raise NonFiniteLossError(
                f"the loss of step {self.state.step} is {loss}. Nothing was updated. Look at the learning rate and at this "
                'batch, or leave such steps out with Trainer(on_non_finite="skip").'
            )
        self._skip = True
        return True

    def _fill_tail(self, tail: Tensor) -> None:
        assert self.attempt is not None
        if self.checkpointer is not None:
            epoch_ends = self._keep_epochs and self.attempt.rank == 0 and self.attempt.after.consumed == 0
            self.state.tail.checkpoint_wanted = epoch_ends or self.checkpointer.wants(self.state.step + 1)
        self.state.tail.fill(tail, self._weight, self.attempt.rank)

    def _at(self, phase: str) -> None:
        self._at_bucket(phase, None)

    def _at_bucket(self, phase: str, bucket: int | None) -> None:
        if self._probe is not None:
            self._probe(phase, self.state.step, bucket)


def keeps_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` leaves `p.grad` as it was. True of torch's own optimizers and ours, but for SGD with Nesterov, whose
    foreach variant overwrites it; nothing is known of others."""
    if isinstance(optimizer, torch.optim.SGD) and any(group["nesterov"] for group in optimizer.param_groups):
        return False
    return type(optimizer).__module__.startswith(("torch.optim.", "raytrain_ft."))


def _do_nothing(bucket: Bucket) -> None:
    del bucket


__all__ = ["Attempt", "Commit", "Probe", "Replica", "StepSettings"]
