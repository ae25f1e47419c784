"""What the stages of a pipeline cost, measured in one process before a run: seconds, bytes that cross between them, state.

A micro-batch goes through the stages one after the other, forward and backward, as often as it takes to have a mean (SWIFT,
appendix C). One stage is in memory at a time. Times depend on this machine and serve to compare groupings, never to cut a
model: two runs of one job are cut alike, but may log different boundaries, which changes no bit of the result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ft.errors import FTError, TaskError
from raytrain_ft.policy.planning import Measured
from raytrain_ft.training.build import build_model
from raytrain_ft.training.pipeline import passed_on
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.split import sample

ROUNDS = 5
"""Micro-batches whose mean counts, after one to warm up."""
PATIENCE_S = 10.0
"""How long a stage is measured at most; one round is always finished."""
COPIES = 3
"""Of every weight in the state: itself, and the two moments of Adam. With plainer optimizers the state is smaller than that."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage, for one micro-batch.

    Attributes:
        seconds: of a forward and a backward pass, the mean; 0 if it was not timed.
        crossing: bytes that go to the next stage, and come back as gradients; 0 of the last stage.
        state: bytes of weights, buffers and an optimizer like Adam.
    """

    seconds: float
    crossing: int
    state: int


def measure_pipeline(
    task: Any, step: StepSettings, samples: int, replicas: int = 1, *, rounds: int = ROUNDS, threads: int = 0
) -> Measured:
    """What the stages cost per step, from micro-batches of so many samples; see `measure_stages`."""
    assert step.pipeline is not None
    costs, micro_batches = measure_stages(task, step, samples, rounds=rounds, threads=threads), step.pipeline.micro_batches
    return Measured(
        compute=tuple(micro_batches * one.seconds for one in costs),
        crossing=tuple(float(micro_batches * one.crossing) for one in costs[:-1]),
        state=tuple(one.state for one in costs),
        micro_batches=micro_batches,
        replicas=replicas,
    )


def measure_stages(
    task: Any, step: StepSettings, samples: int, *, rounds: int = ROUNDS, threads: int = 0
) -> tuple[StageCosts, ...]:
    """Measures every stage with a micro-batch of so many samples. Nothing of the task or of the random streams is changed.

    Args:
        rounds: how many micro-batches are timed; with 0, one goes forward only, and nothing is timed.
        threads: of torch, as many as a worker will have; 0 leaves them as they are.

    Raises:
        TaskError: the task fails on such a micro-batch.
    """
    assert step.pipeline is not None
    stage = 0
    try:
        with _as_before(threads):
            batch = sample(task, samples)
            arguments: list[Any] = [task.inputs(batch)]
            found = []
            for stage in range(step.pipeline.stages):
                is_last = stage == step.pipeline.stages - 1
                model = build_model(task, stage, step)
                measure = _Measurement(model, stage, arguments, (lambda out: task.loss(out, batch)) if is_last else None, step)
                costs, arguments = measure.costs(rounds)
                found.append(costs)
        return tuple(found)
    except FTError:
        raise
    except Exception as error:  # the task's own code may raise anything
        raise TaskError(
            f"stage {stage} fails on a micro-batch of {samples} samples, which was to be measured before the run: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One stage and its inputs.

    Attributes:
        loss: of the last stage; None of the others.
    """

    model: nn.Module
    stage: int
    arguments: Sequence[Any]
    loss: Callable[[Any], Tensor] | None
    step: StepSettings

    def costs(self, rounds: int) -> tuple[StageCosts, list[Tensor]]:
        """What the stage costs, and what it passes on."""
        with torch.set_grad_enabled(rounds > 0):
            outputs = self._forward(with_loss=rounds > 0)
        if rounds:
            _backward(outputs)
        crossing = 0 if self.loss else _size(outputs) + _size(one for one in outputs if one.is_floating_point())
        state = COPIES * _size(self.model.parameters()) + _size(self.model.buffers())
        return StageCosts(self._seconds(rounds), crossing, state), [one.detach() for one in outputs]

    def _seconds(self, rounds: int) -> float:
        began = time.perf_counter()
        for done in range(1, rounds + 1):
            _backward(self._forward(with_loss=True))
            seconds = time.perf_counter() - began
            if done == rounds or seconds > PATIENCE_S:
                return seconds / done
        return 0.0

    def _forward(self, *, with_loss: bool) -> list[Tensor]:
        arguments = self.arguments
        if self.stage:
            arguments = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in arguments]
        with torch.autocast("cpu", torch.bfloat16) if self.step.precision == "bf16" else nullcontext():
            output = self.model(*arguments)
            if self.loss is None:
                return passed_on(output, self.stage)
            return [self.loss(output)] if with_loss else []


def _backward(outputs: Sequence[Tensor]) -> None:
    roots = [one for one in outputs if one.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _as_before(threads: int) -> Iterator[None]:
    """Leaves random streams and threads as they were."""
    before, python, legacy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if threads:
                torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)
            random.setstate(python)
            np.random.set_state(legacy)
