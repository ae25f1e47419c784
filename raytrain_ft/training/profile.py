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
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ft.errors import FTError, TaskError
from raytrain_ft.policy.planning import Measured
from raytrain_ft.training.backward import backward, loss_of
from raytrain_ft.training.build import build_model
from raytrain_ft.training.pipeline import chunks_of, has_gradient, passed_on, taken_in
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.split import first_inputs

ROUNDS = 5
"""Micro-batches whose mean counts, after one to warm up."""
PATIENCE_S = 10.0
"""How long a stage is measured at most; one round is always finished."""
COPIES = 3
"""Of every weight in the state: itself, and the two moments of Adam. With plainer optimizers the state is smaller than that."""


@dataclass(frozen=True, slots=True)
class Costs:
    """One part of the model, for one micro-batch.

    Attributes:
        seconds: of a forward and a backward pass, the mean; 0 if it was not timed.
        crossing: bytes that go to the next part, and come back as gradients; 0 of the last part.
        state: bytes of weights, buffers and an optimizer like Adam.
    """

    seconds: float
    crossing: int
    state: int


def measure_pipeline(
    task: Any, step: StepSettings, samples: int, replicas: int = 1, *, rounds: int = ROUNDS, threads: int = 0
) -> Measured:
    """What the stages cost per step, from micro-batches of so many samples; see `measure_parts`."""
    assert step.pipeline is not None
    how = step.pipeline
    costs = measure_parts(task, step, samples, rounds=rounds, threads=threads)
    stages = [costs[stage :: how.stages] for stage in range(how.stages)]
    tied = [(*pair, 2.0 * tie.size) for tie in how.ties for pair in combinations(sorted(tie.names), 2)]
    if how.chunks > 1:  # from the last stage to the first one, for its next chunk
        tied.append((0, how.stages - 1, float(how.micro_batches * sum(one.crossing for one in stages[-1]))))
    return Measured(
        compute=tuple(how.micro_batches * sum(one.seconds for one in chunks) for chunks in stages),
        crossing=tuple(float(how.micro_batches * sum(one.crossing for one in chunks)) for chunks in stages[:-1]),
        state=tuple(sum(one.state for one in chunks) for chunks in stages),
        micro_batches=how.micro_batches,
        replicas=replicas,
        tied=tuple(tied),
    )


def measure_parts(task: Any, step: StepSettings, samples: int, *, rounds: int = ROUNDS, threads: int = 0) -> tuple[Costs, ...]:
    """Measures every part of the model with a micro-batch of so many samples: every stage, if each has one. Nothing of the task
    or of the random streams is changed.

    Args:
        rounds: how many micro-batches are timed; with 0, one goes forward only, and nothing is timed.
        threads: of torch, as many as a worker will have; 0 leaves them as they are.

    Raises:
        TaskError: the task fails on such a micro-batch. ConfigError: its dataset has none.
    """
    assert step.pipeline is not None
    part, count = 0, step.pipeline.stages * step.pipeline.chunks
    try:
        with as_before(threads):
            batch, inputs = first_inputs(task, samples)
            arguments: list[Any] = [inputs]
            found = []
            for part in range(count):
                chunk, stage = divmod(part, step.pipeline.stages)
                model = chunks_of(build_model(task, stage, step))[chunk]
                loss = (lambda out: loss_of(task, out, batch)) if part == count - 1 else None
                measure = _Measurement(model, part, arguments, loss, step)
                costs, arguments = measure.costs(rounds)
                found.append(costs)
        return tuple(found)
    except FTError:
        raise
    except Exception as error:  # the task's own code may raise anything
        name = "stage" if step.pipeline.chunks == 1 else "part"
        raise TaskError(
            f"{name} {part} fails on a micro-batch of {samples} samples, which was to be measured before the run: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Measurement:
    """One part of the model and its inputs.

    Attributes:
        loss: of the last part; None of the others.
    """

    model: nn.Module
    part: int
    arguments: Sequence[Any]
    loss: Callable[[Any], Tensor] | None
    step: StepSettings

    def costs(self, rounds: int) -> tuple[Costs, list[Tensor]]:
        """What the part costs, and what it passes on."""
        with torch.set_grad_enabled(rounds > 0):
            outputs = self._forward(with_loss=rounds > 0)
        if rounds:
            _backward(outputs)
        crossing = 0 if self.loss else _size(outputs) + _size(one for one in outputs if has_gradient(one))
        state = COPIES * _size(self.model.parameters()) + _size(self.model.buffers())
        return Costs(self._seconds(rounds), crossing, state), [one.detach() for one in outputs]

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
        if self.part:
            arguments = taken_in([tensor.detach().clone() for tensor in arguments])  # the next round needs them as they are
        with torch.autocast("cpu", torch.bfloat16) if self.step.precision == "bf16" else nullcontext():
            output = self.model(*arguments)
            if self.loss is None:
                return passed_on(output, self.part)
            return [self.loss(output)] if with_loss else []


def _backward(outputs: Sequence[Tensor]) -> None:
    roots = [one for one in outputs if one.requires_grad]
    backward(roots, [torch.ones_like(one) for one in roots])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def as_before(threads: int = 0) -> Iterator[None]:
    """Leaves random streams and threads as they were.

    Args:
        threads: of torch meanwhile; 0 leaves them, too.
    """
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
