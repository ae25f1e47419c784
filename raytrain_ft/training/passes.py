"""What a replica, or one stage of it, computes of a micro-batch: what it reads, the forward pass, and the loss.

Whatever is drawn meanwhile (dropout, augmentation) is a function of the micro-batch's place alone, so that who does it again
gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from raytrain_ft.errors import TaskError
from raytrain_ft.storage.log_files import versions_of
from raytrain_ft.storage.tensors import hash_of
from raytrain_ft.training.attempt import Attempt
from raytrain_ft.training.backward import loss_of
from raytrain_ft.training.data import MicroBatch
from raytrain_ft.training.pipeline import chunks_of
from raytrain_ft.training.random import seed_all, step_seed
from raytrain_ft.training.reads import inputs_of
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.unseen import Watch

LOOKS_EVERY = 64
"""Steps. Whether a frozen parameter is to be trained, which would do no harm but be in vain, is looked at so often."""


class Passes:
    """The parts of a step that are the task's.

    Attributes:
        micro_batches: of the step under way.
        first_incarnation: of the launch. What the task's functions do is looked at closely in its first step: later, a
            recovery would wait for it.
        tell_unseen: told of what the passes change and nothing stores, once, by the first replica; of no use if it is None.
    """

    def __init__(self, task: Any, state: TrainingState, settings: StepSettings, stage: int) -> None:
        self._task = task
        self._state = state
        self._settings = settings
        self._stage = stage
        self._attempt: Attempt | None = None
        self.micro_batches: list[MicroBatch] = []
        self.first_incarnation, self._looked, self._looks = 1, False, False
        self.tell_unseen: Callable[[list[str]], None] | None = None
        self._watch: Watch | None = None
        self._moved: tuple[int, Any] | None = None
        named = list(state.model.named_parameters())
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Wait-free, those that are trained are updated while the last backward pass still goes on, which moves on the versions
        # of all that are cut out of the same tensor.
        early = {p.untyped_storage().data_ptr() for _, p in named if p.requires_grad and settings.update == "wait_free"}
        self._early = _Unchanged([(name, p) for name, p in named if p.untyped_storage().data_ptr() in early])
        self._late = _Unchanged([(name, p) for name, p in named if p.untyped_storage().data_ptr() not in early])

    def begin(self, attempt: Attempt, micro_batches: list[MicroBatch]) -> None:
        """These are computed next.

        Raises:
            TaskError: a parameter was frozen when the optimizer was made, and is no longer.
        """
        self._moved, self._looks = None, not self._looked and attempt.incarnation == self.first_incarnation
        look = self._looks or attempt.step % LOOKS_EVERY == 0
        if look and (thawed := [name for name, p in self._frozen if p.requires_grad]):
            raise TaskError(
                f"the parameter {thawed[0]} requires a gradient now, and did not when the optimizer was made: nobody would "
                "reduce that, nor update it. Train it from the start, in a group of its own whose learning rate the scheduler "
                "keeps at 0 for as long as it is to stand still"
            )
        self._attempt, self.micro_batches = attempt, micro_batches
        self._early.begin(look=self._looks)
        self._late.begin(look=self._looks)
        self._begin_watch(attempt)

    def check_forward(self) -> None:
        """After a forward pass, before the backward pass in which buckets may be updated.

        Raises:
            TaskError: as `check_parameters` does.
        """
        self._early.check()

    def check_parameters(self) -> None:
        """After the passes, before any update that waits for all of them.

        Raises:
            TaskError: one of them changed a parameter. Done again it would do so twice, and a snapshot, for which updates alone
                wait, would hold some of it from before and some from after.
        """
        self._late.check()
        self._looked = True
        found = self._watch.end() if self._watch is not None else None
        if found is not None:
            self._watch = None
            if found and self.tell_unseen is not None:
                self.tell_unseen(found)

    def _begin_watch(self, attempt: Attempt) -> None:
        if self._looks and attempt.replica == 0 and self.tell_unseen is not None:
            self._watch = Watch(self._task, self._state.model)
        elif attempt.incarnation != self.first_incarnation:
            self._watch = None
        if self._watch is not None:
            self._watch.begin()

    def inputs(self, number: int) -> Any:
        """What the model, or its first stage, reads of a micro-batch; the task may draw, too.

        Raises:
            TaskError: as `inputs_of` does, in a pipeline.
        """
        self._seed(number)
        data = self._on_device(self.micro_batches[number].data)
        if self._settings.pipeline is not None:
            return inputs_of(self._task, data) if self._looks else self._task.inputs(data)
        self._moved = number, data  # what `inputs` changes in it is for the loss, too, wherever it is
        return self._task.inputs(data)

    def forward(self, number: int, arguments: Sequence[Any]) -> Any:
        """The output of pass `number`: of a micro-batch, or in a pipeline of one of the stage's chunks over a micro-batch."""
        chunk = number // self._settings.micro_batches if self._settings.pipeline is not None else 0
        if self._stage > 0 or chunk > 0:  # else `inputs` began the same stream
            self._seed(number)
        with self._autocast():
            return chunks_of(self._state.model)[chunk](*arguments)

    def weighted_loss(self, number: int, output: Any) -> Tensor:
        """The loss of a micro-batch, weighted by its samples, so that gradients only need to be summed over replicas.

        Raises:
            TaskError: it is none.
        """
        assert self._attempt is not None
        micro_batch, batch = self.micro_batches[number], self._attempt.batch
        there, moved = self._moved or (None, None)
        data, self._moved = moved if there == number else self._on_device(micro_batch.data), None
        with self._autocast():
            loss = loss_of(self._task, output, data)
        weighted = loss * (len(micro_batch.ids) / (batch.stop - batch.start))
        self._state.tail.losses.append(weighted.detach())
        return weighted

    def _seed(self, number: int) -> None:
        assert self._attempt is not None
        seed_all(step_seed(self._settings.seed, self._attempt.step, self._attempt.replica, number, self._stage))

    def _on_device(self, data: Any) -> Any:
        device = self._state.buckets[0].flat.device
        if device.type == "cpu":
            return data
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, data)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._state.buckets[0].flat.device.type, dtype=torch.bfloat16)


class _Unchanged:
    """Parameters that the passes must leave alone."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._params = [p for _, p in named]
        self._versions: list[int] = []
        self._bytes: list[int] = []

    def begin(self, *, look: bool) -> None:
        """Their versions are those of now; and if one is to `look`, their bytes: a change through `.data` has no version."""
        self._versions = versions_of(self._params)
        self._bytes = [hash_of(p) for p in self._params] if look else []

    def check(self) -> None:
        """Raises `TaskError` if one was changed; its bytes are looked at once, after the first forward pass or later."""
        before, now = self._versions, versions_of(self._params)
        if now == before and self._bytes:
            before, now = self._bytes, [hash_of(p) for p in self._params]
            self._bytes = []
        if now != before:
            changed = next(name for name, old, new in zip(self._names, before, now, strict=True) if old != new)
            raise TaskError(
                f"the forward or backward pass changed the parameter {changed} in place: a step that is redone would change "
                "it twice, and a checkpoint might hold half of it. An average of weights (a teacher, an EMA) belongs in "
                "buffers (register_buffer), which are put back, or in the step() of an optimizer of your own. An "
                "Embedding's max_norm scales its weights by what this rank alone has read: leave it out"
            )
