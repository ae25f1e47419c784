"""From a task to a replica: the same on every worker, because everything is drawn from the run's seed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import ConfigError, UndoRefusedError
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.storage.job import AnyPersister
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.training.calls import call
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.data import Loader, alone_inside, augment_of, collate_of
from raytrain_ft.training.determinism import check_deterministic
from raytrain_ft.training.durable import capture
from raytrain_ft.training.layout import check_own_memory, check_plain
from raytrain_ft.training.pipeline import build_stage
from raytrain_ft.training.random import seed_all, step_seed
from raytrain_ft.training.settings import StepSettings, Target
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.step import Replica
from raytrain_ft.training.ties import begin_alike
from raytrain_ft.training.tuning import Tell
from raytrain_ft.training.undo import refusals
from raytrain_ft.training.undo_rules import has_own_hooks, has_step_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """How a replica writes checkpoints.

    Attributes:
        tuner: with nothing measured yet.
        records: what else a checkpoint is to hold: the records of steps that nobody else may know of yet.
        tell: see `Checkpointer`.
    """

    target: Target
    tuner: Tuner
    tell: Tell
    records: Callable[[], list[dict[str, Any]]]
    persister: Callable[[SharedMemory], AnyPersister] = Persister


HALF = (torch.float16, torch.bfloat16)
HOOKED = "it has hooks, which would be called for each bucket, before the gradients of others are there"


def build_replica(
    task: Any,
    sampling: Sampling,
    settings: StepSettings,
    *,
    use_gpu: bool,
    undo_mode: Any,
    probe: Any,
    checkpoints: Checkpointing | None = None,
    stage: int = 0,
) -> Replica:
    """Builds model, optimizer, schedule and loader: of all of the model, or of one stage of a pipeline.

    Raises:
        ConfigError: the model has nothing to train, parameters of a kind that cannot be handled, or the dataset is not
            deterministic.
        UndoRefusedError: updates are to be wait-free, and the schedule has given the optimizer hooks.
    """
    if use_gpu:  # before the task builds anything: it may decide otherwise
        torch.use_deterministic_algorithms(True, warn_only=True)
        # else it fills the output of every kernel beforehand
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    model = build_model(task, stage, settings)
    device = torch.device("cuda") if use_gpu else torch.device("cpu")
    model.to(device)
    check_model(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = call(task, "optimizer", params)
    state = TrainingState(
        model,
        optimizer,
        call(task, "scheduler", optimizer),
        bucket_bytes=settings.bucket_bytes,
        first_bucket_bytes=settings.first_bucket_bytes,
        stage=stage if settings.pipeline is not None else None,
        seats=settings.seats,
    )
    if settings.update == "wait_free" and has_own_hooks(optimizer):  # registered since `check_undo`
        raise UndoRefusedError(f'RecoveryConfig(update="wait_free"): {HOOKED}. Use update="barrier".')
    seed_all(settings.seed)  # else stages whose models drew more, or less, would read other data if that is drawn as well
    loader = build_loader(task, sampling, reads=settings.pipeline is None or stage in (0, settings.pipeline.stages - 1))
    checkpointer = None
    if checkpoints is not None:
        how, data = checkpoints, loader.data
        capture(state, data, [], settings.pipeline)  # what cannot be stored is told now, not at the first checkpoint
        checkpointer = Checkpointer(
            how.target,
            lambda: capture(state, data, how.records(), settings.pipeline),
            lambda: deepcopy(how.tuner),
            how.tell,
            persister=how.persister,
        )
    return Replica(task, state, loader, settings, probe, undo_mode, checkpointer)


def build_model(task: Any, stage: int, settings: StepSettings) -> torch.nn.Module:
    """The model, or a stage of it, with its first weights: those of a stage that the task gives are drawn from a stream of
    their own, those of a model that is split are the weights that it has in one piece."""
    pipeline = settings.pipeline
    given = pipeline is not None and pipeline.cuts is None  # by the task

    def build(stage: int) -> torch.nn.Module:
        seed_all(step_seed(settings.seed, 0, 0, 0, stage) if given and stage > 0 else settings.seed)
        return build_stage(task, stage, pipeline)

    model = build(stage)
    if pipeline is not None and given:
        begin_alike(model, stage, pipeline, build)
    return model


def build_loader(task: Any, sampling: Sampling, *, reads: bool) -> Loader:
    """A stage in the middle knows what its step is about, and needs none of it."""
    if not reads:
        return Loader(_Unread(sampling.dataset_size), sampling)
    dataset = call(task, "dataset")
    augment, collate = augment_of(task), collate_of(task)
    with alone_inside(dataset):  # a task may give the same one again, which the loader before has not left yet
        sketches = check_deterministic(dataset, sampling, augment, collate)
    return Loader(dataset, sampling, augment, collate, sketches=sketches)


class _Unread:
    """A dataset of which nothing is read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> Any:
        del ids, epoch, seed
        return ()


def check_model(model: torch.nn.Module) -> None:
    """Refuses parameters that cannot be trained here, and state that would be lost.

    Raises:
        ConfigError: nothing requires a gradient, a trained parameter is half precision or complex, a buffer is one, or the
            state dict holds more than parameters and buffers.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train")
    for name, p in trained:
        if p.dtype in HALF or p.is_complex():
            raise ConfigError(
                f"parameter {name} is {p.dtype}: keep parameters in fp32 and use Trainer(precision='bf16'), which computes "
                "in bf16 and updates in fp32"
            )
    for name, value in model.state_dict(keep_vars=True).items():
        # What get_extra_state() returns, a tensor too, is neither in a checkpoint nor sent to a replacement.
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            raise ConfigError(
                f"{type(model).__name__}.state_dict() holds {name}, a {type(value).__name__}: only parameters and buffers are "
                "stored, and given to a worker that replaces another. Keep such state in a buffer (register_buffer), or, if it "
                "never changes, in the task"
            )
        check_plain(name, value)
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in trained:
        by_memory.setdefault(p.untyped_storage().data_ptr(), []).append((name, p))
    for name, buffer in model.named_buffers():
        check_plain(name, buffer)  # one that is not persistent is in no state dict
        check_own_memory(f"buffer {name}", buffer)
        there = by_memory.get(buffer.untyped_storage().data_ptr(), [])
        if (owner := next((name for name, p in there if _overlap(buffer, p)), None)) is not None:
            raise ConfigError(
                f"buffer {name} is the memory of the trained parameter {owner}, so each would be written over by the other: "
                "register a copy (.detach().clone()), or an attribute that is no buffer"
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they lie in the same memory."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (begin, end), (first, last) = _span(one), _span(other)
    return begin < last and first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + length * tensor.element_size()


def check_undo(optimizer: torch.optim.Optimizer, mode: str) -> list[str]:
    """The reasons why this optimizer cannot update bucket by bucket, or such updates cannot be undone; empty if they can."""
    own = [HOOKED] if has_step_hooks(optimizer) else []
    return [*own, *refusals(optimizer, mode)]  # type: ignore[arg-type]
