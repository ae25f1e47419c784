"""What is asked of the user's model before a run: how it is cut, whether it can be trained, and how it may be updated."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from raytrain_ft.config import ParallelismConfig, RecoveryConfig
from raytrain_ft.errors import ConfigError, UndoRefusedError
from raytrain_ft.settings import TrainSettings
from raytrain_ft.task import TrainTask
from raytrain_ft.training.build import HOOKED, check_model, check_undo
from raytrain_ft.training.calls import call
from raytrain_ft.training.pipeline import build_stage, chunks_of, model_of
from raytrain_ft.training.settings import PipelineSettings
from raytrain_ft.training.split import check_cuts, measure_cuts
from raytrain_ft.training.ties import check_alike, find_ties, ways
from raytrain_ft.training.undo_rules import has_step_hooks

Update = Literal["barrier", "wait_free"]
ALL_ASLEEP = (
    "TrainTask.model() returned a model in eval mode, as from_pretrained() does, and it would be trained in it: call .train(), "
    "and then .eval() on what is to stay so"
)
SEVERAL = "docs/configuration.md, section 'Several optimizers in one'"


def pipeline_of(task: TrainTask, parallelism: ParallelismConfig, settings: TrainSettings) -> PipelineSettings | None:
    """How the model is spread over stages; None if it is not.

    Raises:
        ConfigError: it cannot be cut as asked.
    """
    stages, chunks, split = parallelism.pipeline_parallel_degree, parallelism.num_pp_chunks, parallelism.split
    if stages == 1:
        return None
    cuts = layers = None
    if split != "task":
        cuts = (
            split
            if isinstance(split, tuple)
            else measure_cuts(task, stages * chunks, settings.global_batch_size // parallelism.micro_batches)
        )
        layers = check_cuts(task, cuts)
    return PipelineSettings(
        stages=stages,
        micro_batches=parallelism.micro_batches,
        schedule=parallelism.schedule,
        cuts=cuts,
        layers=layers,
        ties=find_ties(task, stages, cuts, chunks),
        chunks=chunks,
    )


def check_stages(task: TrainTask, pipeline: PipelineSettings) -> Any:
    """Builds every stage, its optimizer and its schedule once, so that what cannot work fails early; returns what measured
    times are of.

    Raises:
        ConfigError: see `check_chunks`, `check_optimizer`, `check_schedule` and `check_alike`; and `check_mode`, of what the
            task has returned.
    """
    key: list[Any] = [pipeline.stages, pipeline.micro_batches, pipeline.schedule, pipeline.chunks]
    found, trains, untrained = [], False, []
    for stage in range(pipeline.stages):
        model = build_stage(task, stage, pipeline)
        check_chunks(model, stage)
        for chunk in chunks_of(model):
            if pipeline.cuts is None:
                check_mode(chunk)
            else:  # a stage may have none but layers that are to stay in eval mode, and is a module of its own
                trains |= any(module.training for layer in chunk.children() for module in layer.modules())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = call(task, "optimizer", trained)
        check_optimizer(optimizer, trained)
        untrained += [f"{name} of stage {stage}" for name in left_out(model, optimizer)]
        key += [type(optimizer).__name__, *([name, str(p.dtype), list(p.shape)] for name, p in model.named_parameters())]
        found.append(ways(pipeline, stage, model, optimizer))
        check_schedule(task, optimizer)
    if pipeline.cuts is not None and not trains:
        raise ConfigError(ALL_ASLEEP)
    check_alike(pipeline, found)
    warn_of_untrained(untrained)
    return key


def check_chunks(model: torch.nn.Module, stage: int) -> None:
    """Refuses a stage one of whose chunks cannot be trained, or that has a parameter in two of them.

    Raises:
        ConfigError: see `check_model`.
    """
    owner: dict[int, int] = {}
    for number, chunk in enumerate(chunks_of(model)):
        check_model(chunk)
        for name, p in chunk.named_parameters():
            if p.requires_grad and owner.setdefault(id(p), number) != number:
                raise ConfigError(
                    f"chunks {owner[id(p)]} and {number} of stage {stage} share the parameter {name}: chunks of one stage "
                    "cannot. Choose another ParallelismConfig(num_pp_chunks=...) or split, so that it is in several stages, or "
                    "in one chunk"
                )


def check_mode(model: torch.nn.Module) -> None:
    """Refuses a model in eval mode: a loop of one's own calls train(), and nothing does so here, for it would wake what is to
    stay so. Warns of one that looks as if that was forgotten.

    Raises:
        ConfigError: no module of it is in training mode.
    """
    if not any(module.training for module in model.modules()):
        raise ConfigError(ALL_ASLEEP)
    if not model.training:
        warnings.warn(
            f"TrainTask.model() returned a {type(model).__name__} that is itself in eval mode, though parts of it are not: it "
            "is trained so. If that is not meant, call .train(), and then .eval() on what is to stay so",
            stacklevel=6,
        )
    elif (name := _without_dropout(model)) is not None:
        warnings.warn(
            f"TrainTask.model() returned a {type(model).__name__} whose {name} is in eval mode, as from_pretrained() leaves "
            "it, and has parameters to train: it is trained without dropout. If that is not meant, call .train()",
            stacklevel=6,
        )


def _without_dropout(model: torch.nn.Module) -> str | None:
    """The first part that is trained in eval mode, with dropout that does nothing there. (BatchNorm is often to stay so, and
    so is what is frozen.)"""
    dropout = torch.nn.modules.dropout._DropoutNd  # pyright: ignore[reportPrivateUsage]
    for name, part in model.named_modules():
        if part.training or not any(p.requires_grad for p in part.parameters()):
            continue
        if any(isinstance(inner, dropout) and inner.p > 0 and not inner.training for inner in part.modules()):
            return name
    return None


def check_optimizer(optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]) -> None:
    """Refuses an optimizer that would compute gradients itself, as LBFGS does: here that is the step's part, done once. And one
    that trains what is not in the model, which nobody reduces, stores or copies.

    Args:
        trained: the parameters that it was given.

    Raises:
        ConfigError: it is none, its `step` cannot be called without a closure, or it has other parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        parts = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
        several = isinstance(parts, list | tuple) and any(isinstance(part, torch.optim.Optimizer) for part in parts)
        advice = f"; one that is made of others is written so: {SEVERAL}" if several else ""
        raise ConfigError(
            f"TrainTask.optimizer() returned {_in_short(optimizer)}: it must return a torch.optim.Optimizer{advice}"
        )
    known = {id(p) for p in trained}
    strange = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in known]
    if strange:
        shapes = ", ".join(str(list(p.shape)) for p in strange[:3])
        raise ConfigError(
            f"TrainTask.optimizer() gives a {type(optimizer).__name__} that also trains {len(strange)} parameters (of shape "
            f"{shapes}) that are not among those that it was given. Their gradients would not be reduced, and a replacement "
            "would not have their values: make them parameters of the model, as one that only the loss needs can be, too"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"TrainTask.optimizer() gives a {type(optimizer).__name__}, whose step() cannot be called without a closure that "
            "computes loss and gradients again. Gradients are computed and reduced once per step here: use an optimizer whose "
            "step() needs none, such as torch.optim.SGD or AdamW"
        )


def left_out(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters that require a gradient, and that the optimizer does not have."""
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in has]


def warn_of_untrained(names: Sequence[str]) -> None:
    """They would keep their first values, as where one optimizer takes the matrices, and none the rest."""
    if names:
        warnings.warn(
            f"TrainTask.optimizer() leaves out {len(names)} parameters that require a gradient, the first is {names[0]}: they "
            "are not trained. Give them to the optimizer, or freeze them in TrainTask.model(): requires_grad_(False). Of "
            f"several optimizers: {SEVERAL}",
            stacklevel=6,
        )


def _in_short(value: Any) -> str:
    """What a function returned in place of what it should, in a line: of an optimizer, or a list of some, Python's own words
    are many lines."""
    if isinstance(value, type):
        return f"the class {value.__name__} (add parentheses and arguments)"
    if isinstance(value, list | tuple) and value:
        return f"a {type(value).__name__} of {', '.join(dict.fromkeys(type(part).__name__ for part in value))}"
    return "None" if value is None else f"a {type(value).__name__}"


def check_schedule(task: TrainTask, optimizer: torch.optim.Optimizer) -> None:
    """Builds the learning-rate schedule once. It changes its optimizer's groups and `step`, of which nothing may be read after.

    Raises:
        ConfigError: it is none.
    """
    if not callable(task.scheduler):
        raise ConfigError(
            f"TrainTask.scheduler is {_in_short(task.scheduler)}: it must be a function, scheduler(self, optimizer); without a "
            "schedule leave it out"
        )
    schedule = call(task, "scheduler", optimizer)
    lacks = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(schedule, name, None))]
    if schedule is not None and (lacks or isinstance(schedule, type)):
        raise ConfigError(
            f"TrainTask.scheduler() returned {_in_short(schedule)}: it must return None or a learning-rate scheduler of this "
            "optimizer, as torch.optim.lr_scheduler has them: with step(), state_dict() and load_state_dict()"
        )


def has_statistics(task: TrainTask, pipeline: PipelineSettings) -> bool:
    """Whether a stage keeps statistics of the micro-batches that it sees, as BatchNorm does."""
    parts = [build_stage(task, stage, pipeline) for stage in range(pipeline.stages)]
    kind = torch.nn.modules.batchnorm._NormBase  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(module, kind) and module.track_running_stats for part in parts for module in part.modules())


def choose_update(task: TrainTask, recovery: RecoveryConfig) -> tuple[Update, Any]:
    """Builds model, optimizer and schedule once, here, so that what cannot work fails early, and says how to update; and what
    measured times depend on of model and optimizer.

    `strategy="auto"` falls back to "barrier" where wait-free updates could not be undone.

    Raises:
        ConfigError: see `check_model`, `check_mode`, `check_optimizer` and `check_schedule`; UndoRefusedError: wait-free
            updates were insisted on.
    """
    model = model_of(task, 0)
    check_model(model)
    check_mode(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = call(task, "optimizer", trained)
    check_optimizer(optimizer, trained)
    warn_of_untrained(left_out(model, optimizer))
    key = [type(optimizer).__name__, *([name, str(p.dtype), list(p.shape)] for name, p in model.named_parameters())]
    found = [] if recovery.update == "barrier" else check_undo(optimizer, recovery.undo)
    check_schedule(task, optimizer)
    if not found and has_step_hooks(optimizer):  # which the schedule has given it
        found = [HOOKED]
    return _choose(found, recovery), key


def _choose(found: list[str], recovery: RecoveryConfig) -> Update:
    if recovery.update == "barrier":
        return "barrier"
    reasons = "; ".join(found)
    if not reasons:
        return "wait_free"
    if recovery.strategy != "auto":
        raise UndoRefusedError(
            f'RecoveryConfig(update="wait_free"): {reasons}. Use update="barrier", which never needs an undo.'
        )
    warnings.warn(
        f'update="wait_free" would need undo, but {reasons}. Falling back to update="barrier", which never needs it.',
        stacklevel=6,
    )
    return "barrier"
