"""One training step of one worker, top to bottom. Start reading here.

A step is: read this rank's share of the global batch; forward and backward, once per micro-batch (in a pipeline: of this
stage, in turn with its neighbours); reduce the gradients bucket by bucket while the backward pass goes on; update; commit.
Nothing is promised to anybody before `commit`, and no collective, vote or device sync is there for the sake of failures.
Whatever ends a step early (`FencedError`, `PeerLostError`) leaves it between two of these lines, with marks on the buckets that
say where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from raytrain_ft.errors import LogGapError
from raytrain_ft.policy.reconcile import Changed
from raytrain_ft.policy.sampling import Range
from raytrain_ft.training.attempt import WENT_DOWN, Attempt, Commit, keeps_gradients
from raytrain_ft.training.buckets import Bucket, Reducer, check_kept, only, sample_of
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.data import Loader, MicroBatch
from raytrain_ft.training.finite import check_updated, may_update, norm_of
from raytrain_ft.training.kept import check_stored
from raytrain_ft.training.links import Agree, Links
from raytrain_ft.training.passes import Passes
from raytrain_ft.training.pipeline import Stage, chunks_of
from raytrain_ft.training.random import NO_REPLICA, seed_all, step_seed
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.tail import HEADER, Heard
from raytrain_ft.training.ties import Shared
from raytrain_ft.training.undo import Undo

AGREED = HEADER + 1
"""Numbers that the stages of a pipeline agree upon: the head of the tail, and the square of the gradients' norm."""
NOT_FINITE = "the loss or a gradient was not finite"
NOTHING_LEFT = "all workers that had samples of it were told to sleep at once"


class Replica:
    """One copy of the model, or of one of its stages, and the step that trains it.

    Attributes:
        stage: the stage of a pipeline that this is a copy of; 0 without one.
        attempt: the step under way, or None between steps.
        checkpointer: None writes none.
        lost: the latest step that went on without some samples, and their positions.
        left_out: the step that a recovery left out, unless another one was begun since.
        trained: the incarnation in which it trained last.
        not_finite: the latest step whose update was left out, because its loss or a gradient was not finite.
        changed: what it has undone or kept last to carry out the plan of a recovery.
        passes: what is computed of each micro-batch of the step under way.
        heard: what the replicas agreed upon in the latest step; nothing is known if its state came from another one.
        step_s: seconds of the latest step that this one committed itself.
        leads: of those who reduce the step under way, this one speaks for what is the same everywhere.
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
    ) -> None:
        self.stage = state.stage or 0
        self.state = state
        self.passes = Passes(task, state, settings, self.stage)
        self.loader = loader
        self.settings = settings
        self.attempt: Attempt | None = None
        self.checkpointer = checkpointer
        self._probe = probe
        self._last_commit: float | None = None
        self._updated = False
        self._skip = ""  # why the update of the step under way is left out
        self.lost: tuple[int, tuple[Range, ...]] | None = None
        self.left_out: int | None = None
        self.not_finite: int | None = None
        self.trained = 0
        self.changed: Changed | None = None
        self.heard = Heard()
        self.step_s = 0.0
        self._samples = 0
        self.leads = False
        # What the flat buffers hold after an update may be passed to others as the step's gradient only if it still is that.
        self._gradients_survive = settings.max_grad_norm is None and keeps_gradients(state.optimizer)
        wait_free = settings.update == "wait_free"
        # Only wait-free updates can ever need an undo: recording anything else would cost for nothing.
        self.undo = Undo(state.optimizer, undo_mode) if wait_free else None
        self.reducer = Reducer(
            state.buckets,
            on_reduced=self.update_bucket if wait_free else (lambda _: None),
            eager=wait_free,
            fill_tail=self._fill_tail,
            ending=state.tail,
            probe=self._at_bucket,
            finishes_alone=settings.finishes_alone,
            # Wait-free, a bucket is used before it is known who is missing in it: who is to sleep finishes the step.
            is_silent=(lambda _: False) if wait_free else state.tail.sleep.is_silent,
        )
        self._norm: Tensor | None = None
        self._pipeline, self._shared = None, None
        if settings.pipeline is not None:
            self._shared = Shared(self.stage, settings.pipeline, state)
            self._pipeline = Stage(
                self.stage,
                settings.pipeline,
                [[p for p in chunk.parameters() if p.requires_grad] for chunk in chunks_of(state.model)],
                forward=self.passes.forward,
                first_inputs=self.passes.inputs,
                loss=self.passes.weighted_loss,
                arm=self._arm,
                probe=self._at_bucket,
            )

    @property
    def computed_s(self) -> float:
        """Seconds of the passes of the last step of a pipeline's stage."""
        return 0.0 if self._pipeline is None else self._pipeline.computed_s

    def train_step(self, links: Links) -> Commit:
        """Runs one step to its commit.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a collective failed. The marks say how far the step came.
        """
        began = time.monotonic()
        self.at("data")
        links.fence.check()  # nobody begins a step alone: done together, it loses nothing and takes hardly longer
        self.begin(self.loader.next(links.fence.check), links, began)
        if self._pipeline is not None:
            self._pipeline.run(self.state.step, links)
            if links.team is not None and self.state.tail.changed():
                raise LogGapError(  # going back instead is exact
                    f"stage {self.stage} changes a buffer in its forward pass, which depends on the order of micro-batches, so "
                    "several workers cannot replay it together: use RecoveryConfig(replay_workers=1)"
                )
        else:
            self.forward_backward()
        self.passes.check_parameters()
        self.reducer.finish()
        if links.agree is not None and self._shared is not None:
            self._shared.add_up(self.state.step, links.ties, self.at)
            self._agree(links.agree, self._shared)
        if self.settings.update == "barrier":
            self.update()
        self.check_loss()
        self.at("commit")
        return self.commit()

    def follow(self, lost: tuple[int, tuple[Range, ...]] | None, not_finite: int | None) -> None:
        """The state is what another replica came to, between two steps, and so is what was lost, or not finite."""
        self.lost, self.not_finite, self.left_out, self._last_commit = lost, not_finite, None, None

    def abandon(self) -> None:
        """Takes stock after a fence, and lets go of what only the rest of the step would have needed."""
        self.reducer.abandon()
        if self._pipeline is not None:
            self._pipeline.forget()

    @property
    def epoch_to_keep(self) -> bool:
        """Whether the state is that of the end of an epoch, and these are kept."""
        return self.checkpointer is not None and self.checkpointer.keeps_epochs and self.state.position.consumed == 0

    def checkpoint(self, check: Callable[[], None]) -> None:
        """Begins a checkpoint of the state between two steps.

        Args:
            check: called in every wait; may raise to leave it.
        """
        if self.checkpointer is not None:
            self.at("checkpoint")
            self.checkpointer.take(self.state.step, check, kept=self.epoch_to_keep)

    def finish(self, check: Callable[[], None]) -> None:
        """The run's last checkpoint, which is waited for."""
        if self.checkpointer is not None:
            self.at("checkpoint")
            self.checkpointer.finish(self.state.step, check, kept=self.epoch_to_keep)

    def begin(self, micro_batches: list[MicroBatch], links: Links, began: float) -> None:
        """Starts an attempt: from here on the buffers may change, so they are saved."""
        first = micro_batches[0]
        self.heard, self._skip, self.left_out = Heard(), "", None
        if self.lost is not None and self.lost[0] == self.state.step:
            self.lost = None  # of an attempt that came to nothing: this one has all of its samples again
        if self.not_finite == self.state.step:
            self.not_finite = None  # perhaps with other sums, or after a way back
        self.state.tail.begin()
        ids = tuple(micro_batch.ids for micro_batch in micro_batches)
        leads = links.team is None or links.team.leads  # of a team, one speaks for all of what none of them changes
        self._samples = sum(len(i) for i in ids) if leads else 0
        sleep = self.state.tail.sleep
        self.reducer.group = links.group
        self.reducer.begin(self.state.step, self._samples, () if sleep.apart else sleep.asleep)
        weights = sleep.weights(links.replicas)
        world = (links.replica, links.replicas, links.fence.incarnation)
        self.attempt = Attempt(self.state.step, first.batch, first.after, ids, *world, began, weights)
        self.passes.begin(self.attempt, micro_batches)
        # Who sleeps runs no forward pass, and could not say what that changes.
        self.leads = links.replica == min(set(range(links.replicas)) - sleep.asleep, default=0)

    def forward_backward(self) -> None:
        """All micro-batches, one after the other."""
        passes = self.passes
        for number, micro_batch in enumerate(passes.micro_batches):
            if number == len(passes.micro_batches) - 1:
                self.reducer.arm(True)
            if micro_batch.data is None:
                continue  # fewer samples than micro-batches at the end of an epoch: it contributes nothing
            self.reducer.check()
            self._at_bucket("forward", number)
            loss = passes.weighted_loss(number, passes.forward(number, [passes.inputs(number)]))
            passes.check_forward()
            self.reducer.check()
            loss.backward()

    def _arm(self, final: bool) -> None:
        """Before each backward pass of a pipeline; the final one comes after all forward passes of this stage."""
        if final:
            self.passes.check_forward()
        self.reducer.arm(final)

    @torch.no_grad()
    def _agree(self, agree: Agree, shared: Shared) -> None:
        """The end of a pipeline's backward pass: what was summed over each stage's replicas is now summed over the stages. Who
        has the answer knows that nobody lacks a gradient any more."""
        assert self.attempt is not None
        numbers = torch.zeros(AGREED, dtype=torch.float64)
        if self.attempt.replica == 0:  # each stage speaks once
            numbers[:HEADER] = self.state.buckets[-1].tail[:HEADER].double()
            if self.settings.max_grad_norm is not None:
                numbers[HEADER] = torch.nn.utils.get_total_norm(shared.counted()).double() ** 2
        self.at("wait")
        self.take_agreed(agree(self.state.step, numbers, lambda: sample_of(self.state.buckets)).tolist())

    def take_agreed(self, numbers: Sequence[float]) -> None:
        """Takes over what all stages agreed upon in the step under way: loss, stop, checkpoint, square of the gradient norm."""
        self.state.buckets[-1].tail[:HEADER] = torch.tensor(numbers[:HEADER], dtype=torch.float64)
        self._norm = torch.tensor(numbers[HEADER], dtype=torch.float64).sqrt().float()
        self.state.agreed = (self.state.step, tuple(numbers))

    @torch.no_grad()
    def update(self) -> None:
        """Updates all buckets that are not yet at the next version, at once (`update="barrier"`)."""
        self._await_copy()  # the last wait, which a fence may end: what comes now changes gradients in place
        behind = [bucket for bucket in self.state.buckets if bucket.version == self.state.step]
        for bucket in behind:
            bucket.accept()
        missing = self._missing_in(behind)
        if not self._make_up(behind, missing):
            self._skip = NOTHING_LEFT
        norm = self._gradient_norm(behind, lacks_samples=self._went_without or any(missing))
        self._hear()  # before the update, or the device would be waited for until that is done
        if not self._skip and not may_update(self.state.step, self.heard.loss, norm, self.settings.on_non_finite):
            self.leave_out()
        if self._skip:
            self._mark(behind)
            return
        if self.settings.max_grad_norm is not None and norm is not None:
            params = [p for bucket in behind for p in bucket.params]
            torch.nn.utils.clip_grads_with_norm_(params, self.settings.max_grad_norm, norm)
        for bucket in behind:
            bucket.dirty = True
        self.at("update")
        began = time.monotonic()
        # What an optimizer draws is the same on all replicas, whose last passes have left the generators elsewhere.
        seed_all(step_seed(self.settings.seed, self.state.step, NO_REPLICA, 0, self.state.stage or 0))
        self.state.optimizer.step()
        if not self._updated:  # of a launch, whose optimizer may be another than that of the one before
            check_kept(self.state.optimizer, behind)
            check_stored(self.state.optimizer, self.state.model)
            self._updated = True
        if self.checkpointer is not None:
            self.checkpointer.updated(time.monotonic() - began)
        self._mark(behind)

    def _hear(self) -> None:
        replicas = self.attempt.replicas if self.attempt is not None else 0
        self.heard = self.state.tail.hear(self.state.buckets[-1].tail, replicas)

    def _missing_in(self, buckets: list[Bucket]) -> list[float]:
        """How many of the batch's samples each bucket lacks, of replicas that fell silent."""
        return torch.stack([bucket.missing.to(self.state.device, torch.float32) for bucket in buckets]).tolist()

    @property
    def _went_without(self) -> bool:
        """Whether a recovery has let go of samples of the step under way."""
        return self.lost is not None and self.lost[0] == self.state.step

    def _make_up(self, buckets: list[Bucket], missing: list[float]) -> bool:
        """The mean is over the samples that are there; whether there are any in each bucket."""
        batch = len(self.attempt.batch) if self.attempt is not None else 0
        if batch and max(missing) >= batch:
            return False
        for bucket, lost in zip(buckets, missing, strict=True):
            if lost:
                bucket.scale(batch / (batch - lost))
                if bucket.tail_size:
                    self.state.tail.scale(bucket.tail, batch / (batch - lost), bucket.more)
        return True

    def _gradient_norm(self, buckets: list[Bucket], *, lacks_samples: bool) -> Tensor | None:
        """The norm of the whole model's gradients, if they are to be clipped by it, or are of more samples than the loss.

        Args:
            lacks_samples: what was reduced last is without some: their gradients are in what was reduced before, and their loss
                is nowhere.
        """
        needed = self.settings.max_grad_norm is not None or lacks_samples
        if not needed or self._norm is not None:  # in a pipeline it was agreed upon
            return self._norm
        return norm_of(buckets)

    def _await_copy(self) -> None:
        """A snapshot that is under way reads what an update would change."""
        if self.checkpointer is not None:
            self.at("wait")
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
        with only(self.state.optimizer, bucket.selection):
            self.state.optimizer.step()
        if bucket.tail_size:
            self._hear()
        self._mark([bucket])

    def check_loss(self) -> None:
        """Before the commit of a step whose buckets were updated one by one. `update` has looked before it did anything.

        Raises:
            NonFiniteLossError: its loss is NaN or infinite, or is without some samples whose gradients are.
        """
        if self.settings.update == "wait_free":
            check_updated(self.state.step, self.state.loss, self.state.buckets if self._went_without else ())

    def _mark(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.tail_size:
                if self._skip:
                    self.state.tail.restore()  # a step that is left out leaves nothing behind in the buffers either
                else:
                    self.state.tail.apply(bucket.tail, bucket.more)
                if self._skip != NOTHING_LEFT:  # else nobody has seen one
                    self.state.loss = self.heard.loss
            bucket.version += 1
            bucket.dirty = False
            if not self._gradients_survive:
                bucket.gradient = None
        self._at_bucket("updated", buckets[-1].index if len(buckets) == 1 else None)

    def commit(self) -> Commit:
        """The step is done on this worker: schedules advance, and the data has been used."""
        assert self.attempt is not None
        state, attempt = self.state, self.attempt
        self.advance_schedule()
        state.step += 1
        state.tail.settled()
        self.attempt = None
        if self.undo is not None:
            self.undo.forget()  # a committed step is never undone; its records would keep old buffers alive
        lost, why = self._lost(attempt)
        returned = bool(lost) and self.returns_lost()
        state.position = self.loader.position_after(attempt.batch, lost) if returned else attempt.after
        heard = self.heard
        commit = Commit(
            attempt,
            state.loss,
            time.monotonic() - attempt.began,
            lost,
            why,
            returned,
            stop=heard.stop,
            checkpoint=heard.checkpoint,
            reads_change=state.tail.sleep.settle(heard.said, checkpoint=heard.checkpoint) or returned,
        )
        self.step_s = commit.seconds
        if self.checkpointer is not None:
            now = time.monotonic()
            self.checkpointer.stepped(state.step, now - (self._last_commit or attempt.began))
            self._last_commit = now
        return commit

    def _lost(self, attempt: Attempt) -> tuple[tuple[Range, ...], str]:
        """The samples that the step's update went without, and why."""
        if self._skip:
            lost, why = ((attempt.batch.start, attempt.batch.stop),), self._skip
        elif self.lost is not None and self.lost[0] == attempt.step and self.lost[1]:
            return self.lost[1], WENT_DOWN
        elif any(self.heard.said):
            lost, why = self.state.tail.sleep.lost(self.heard.said, attempt.batch), "a worker was told to sleep at once"
        else:
            return (), ""
        if why != NOT_FINITE:  # whose samples are never read again: their position is that of a step that lost none
            self.lost = (attempt.step, lost)  # for survivors that were not told, if the step's end was interrupted
        return lost, why

    def returns_lost(self) -> bool:
        """Whether what the step lost is read again. What made the loss infinite would do so again."""
        return self.settings.returns_lost and self._skip != NOT_FINITE

    def advance_schedule(self) -> None:
        """Raises `TaskError` if that, or what came before it in the step, has changed the optimizer's parameter groups."""
        scheduler = self.state.scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(self.state.loss)
        elif scheduler is not None:
            scheduler.step()
        self.state.check_groups()

    def leave_out(self) -> None:
        """The step under way has no update, on all replicas: its loss or a gradient is not finite."""
        self._skip, self.not_finite = NOT_FINITE, self.state.step

    def _fill_tail(self, tail: Tensor) -> None:
        assert self.attempt is not None
        if self.checkpointer is not None:
            epoch_ends = self.leads and self.checkpointer.keeps_epochs and self.attempt.after.consumed == 0
            soon_enough = self.checkpointer.asked or not self.state.tail.sleep.parts_soon
            self.state.tail.checkpoint_wanted = epoch_ends or (soon_enough and self.checkpointer.wants(self.state.step + 1))
        self.state.tail.fill(tail, self._samples, len(self.attempt.batch), self.attempt.replica, leads=self.leads)

    def at(self, phase: str) -> None:
        """Tells the probe where this replica is."""
        self._at_bucket(phase, None)

    def _at_bucket(self, phase: str, bucket: int | None) -> None:
        if self._probe is not None:
            self._probe(phase, self.state.step, bucket)
