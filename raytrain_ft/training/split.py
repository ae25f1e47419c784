"""Where to cut a sequential model into pipeline stages of about equal cost.

The cost of a layer is counted while samples run through it, not timed: two runs of one job must be cut alike, or they could not
be equal to the bit, and one could not resume from a checkpoint of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from raytrain_ft.errors import ConfigError, FTError, TaskError
from raytrain_ft.training.calls import call
from raytrain_ft.training.data import augment_of, collate_of, fetch, loads_batches, task_size
from raytrain_ft.training.pipeline import layers_of, sequential
from raytrain_ft.training.reads import inputs_of

OPERATIONS_PER_BYTE = 4
"""What moving a byte costs, in floating-point operations: layers without a product are not for free."""


def cut_evenly(costs: Sequence[float], trained: Sequence[bool], stages: int) -> tuple[int, ...]:
    """The first layer of every stage but the first, so that the dearest stage is as cheap as can be.

    Dynamic programming over prefixes: O(layers^2 * stages).

    Args:
        trained: whether a layer has something to train; every stage gets such a layer, for there must be as many as stages.
    """
    count = len(costs)
    sums, before = [0.0], [0]
    for cost, some in zip(costs, trained, strict=True):
        sums.append(sums[-1] + cost)
        before.append(before[-1] + some)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    begins = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                if before[stop] == before[start]:
                    continue
                dearest = max(best[stage - 1][start], sums[stop] - sums[start])
                if dearest < best[stage][stop]:
                    best[stage][stop], begins[stage][stop] = dearest, start
    cuts, stop = [], count
    for stage in range(stages, 1, -1):
        stop = begins[stage][stop]
        cuts.append(stop)
    return tuple(reversed(cuts))


def measure_cuts(task: Any, stages: int, samples: int) -> tuple[int, ...]:
    """Runs some samples through each layer, counts what that costs, and cuts evenly.

    Args:
        samples: of a micro-batch of all replicas together: how many these are must not count, for that may change.

    Raises:
        TaskError: the model is not sequential, or a layer fails; see also `first_inputs`. ConfigError: it has fewer layers to
            train than there are stages.
    """
    layers = list(sequential(task.model(0)))
    trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    if sum(trained) < stages:
        raise ConfigError(
            f"ParallelismConfig: {stages} parts of a model were asked for that has {sum(trained)} layers to train"
        )
    samples = max(1, samples)
    _, value = first_inputs(task, samples)
    costs: list[float] = []
    for number, layer in enumerate(layers):
        try:
            cost, value = _cost(layer, value)
        except Exception as error:  # the task's own code may raise anything
            raise _failure(f"layer {number} ({type(layer).__name__}) fails on it", samples, error) from error
        costs.append(cost)
    return cut_evenly(costs, trained, stages)


def check_cuts(task: Any, cuts: Sequence[int]) -> tuple[str, ...] | None:
    """What the layers of the model are called; see `layers_of`.

    Raises:
        ConfigError: a stage would have no layer. TaskError: the model is not sequential.
    """
    model = sequential(task.model(0))
    count = len(model)
    if cuts and cuts[-1] >= count:
        raise ConfigError(f"ParallelismConfig(split={tuple(cuts)!r}): the model has {count} layers only, numbered from 0")
    return layers_of(model)


def first_inputs(task: Any, count: int) -> tuple[Any, Any]:
    """A batch of the first samples of a task's dataset, to measure with, and what the first layer gets of it.

    Raises:
        ConfigError: the dataset is empty or not map-style. TaskError: the task's own code fails, or changes the batch (see
            `inputs_of`).
    """
    where = "it cannot be read from the dataset"
    try:
        batch = _sample(task, count)
        where = "TrainTask.inputs() fails on it"
        return batch, inputs_of(task, batch)
    except FTError:
        raise
    except Exception as error:  # the task's own code may raise anything
        raise _failure(where, count, error) from error


def _failure(what: str, samples: int, error: Exception) -> TaskError:
    return TaskError(
        f"a micro-batch of {samples} samples was to be measured before the run: {what}: {type(error).__name__}: {error}"
    )


def _sample(task: Any, count: int) -> Any:
    """Of the form that a worker reads."""
    dataset = call(task, "dataset")
    size = task_size(dataset)
    ids = [number % size for number in range(count)]
    if loads_batches(dataset):
        return dataset.load_batch(np.array(ids), 0, 0)
    samples = fetch(dataset, ids)
    augment = augment_of(task)
    if augment is not None:
        generator = torch.Generator().manual_seed(0)
        samples = [augment(one, generator) for one in samples]
    return collate_of(task)(samples)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of an attention, by the shapes of what it is given."""
    return sdpa_flop_count(query, key, value)


FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""Of what torch counts as nothing: it knows how to count the attention of GPUs only, and cuts are measured on a CPU."""


@torch.no_grad()
def _cost(layer: nn.Module, value: Any) -> tuple[float, Any]:
    """Operations of a forward pass, the bytes that it moves included, and what comes out."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        output = layer(value)
    tensors = [*layer.parameters(), *(output if isinstance(output, tuple) else (output,))]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
    return counter.get_total_flops() + OPERATIONS_PER_BYTE * moved, output
