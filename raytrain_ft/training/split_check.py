"""Whether the parts of a model can be trained with backward passes in two parts: tried out on a micro-batch before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError, FTError
from raytrain_ft.training import split_backward
from raytrain_ft.training.backward import backward, loss_of
from raytrain_ft.training.build import build_model
from raytrain_ft.training.pipeline import chunks_of, has_gradient, passed_on, taken_in
from raytrain_ft.training.profile import as_before
from raytrain_ft.training.random import seed_all
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.split import first_inputs

PASSES = 2
"""Gradients of one pass may be right, and those of the next be added to something else."""


def check_split(task: Any, step: StepSettings, samples: int) -> None:
    """Compares the gradients of whole backward passes with those of passes in two parts, for every part of the model.

    Args:
        samples: of a micro-batch.

    Raises:
        ConfigError: they differ, or torch cannot do it at all. TaskError: a part passes on what cannot be passed on; see also
            `first_inputs`.
    """
    assert step.pipeline is not None
    count = step.pipeline.stages * step.pipeline.chunks
    with as_before():
        batch, inputs = first_inputs(task, samples)
        arguments: list[Any] = [inputs]
        for part in range(count):
            chunk, stage = divmod(part, step.pipeline.stages)
            loss = (lambda output: loss_of(task, output, batch)) if part == count - 1 else None
            model = chunks_of(build_model(task, stage, step))[chunk]
            try:
                outputs = _compare(model, part, arguments, loss)
            except Exception as error:
                if isinstance(error, FTError):
                    raise
                raise ConfigError(_refusal(part, f"{type(error).__name__}: {error}")) from error
            arguments = [output.detach() for output in outputs]


def _compare(model: nn.Module, part: int, arguments: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """Raises ConfigError if gradients differ; returns what the part passes on."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = [p for _, p in named]
    outputs: list[Tensor] = []
    found: list[list[Tensor | None]] = []
    for split in (False, True) if part else (False,):  # whose inputs need no gradient has whole backward passes
        model.zero_grad()
        sent: list[Tensor | None] = []
        for number in range(PASSES):
            inputs = [a.detach().clone() for a in arguments] if part else arguments
            seed_all(number)
            output = model(*(taken_in(inputs) if part else inputs))
            outputs = [loss(output)] if loss is not None else passed_on(output, part)
            ends = [one for one in split_backward.separable(outputs) if one.requires_grad]
            gradients = None if loss is not None else [torch.ones_like(one) for one in ends]
            learned = [one for one in inputs if isinstance(one, Tensor) and has_gradient(one)]
            if split:
                rest = split_backward.of_inputs(ends, gradients, learned, params)
                sent += [None if one.grad is None else one.grad.clone() for one in learned]
                split_backward.of_weights(rest, params)
            else:
                backward(ends, gradients)
                sent += [one.grad for one in learned]
        found.append([*sent, *(None if p.grad is None else p.grad.clone() for p in params)])
    names = [*(f"input {number}" for number in range(len(found[0]) - len(params))), *(name for name, _ in named)]
    for name, *both in zip(names, *found, strict=True):
        whole, parts = both[0], both[-1]
        if (whole is None) != (parts is None) or (
            whole is not None and parts is not None and not torch.allclose(whole, parts, rtol=1e-3, atol=1e-6, equal_nan=True)
        ):
            raise ConfigError(_refusal(part, f"the gradient of {name} is another than that of a whole backward pass"))
    return outputs


def _refusal(part: int, why: str) -> str:
    return (
        f'ParallelismConfig(schedule="zero_bubble"): torch {torch.__version__} cannot do the backward pass of part {part} of '
        f'the model in two parts ({why}). Use schedule="1f1b"'
    )
