"""A sequential model that is cut computes what it computes in one piece, whatever goes from layer to layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.pipeline import build_stage, passed_on
from raytrain_ft.training.profile import measure_parts
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.split import _cost, cut_evenly, measure_cuts
from raytrain_ft.training.split_check import check_split


class Fork(nn.Module):
    """One tensor in, two out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Join(nn.Module):
    """A pair in, one tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(14, 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(torch.cat(pair, dim=1))


class Task(ft.TrainTask):
    def model(self, stage: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Fork(), Join(), nn.Linear(3, 2))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(8, 4), torch.zeros(8, 2))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tuples_may_cross_a_cut(stages: int) -> None:
    cuts = measure_cuts(Task(), stages, 4)
    settings = PipelineSettings(stages=stages, micro_batches=1, cuts=cuts)
    inputs = torch.randn(5, 4)
    passed = [inputs]
    for stage in range(stages):
        passed = passed_on(build_stage(Task(), stage, settings)(*passed), stage)
    assert torch.equal(passed[0], Task().model(0)(inputs))
    names = {name for stage in range(stages) for name, _ in build_stage(Task(), stage, settings).named_parameters()}
    assert all(name[0].isdigit() for name in names), "as in a plain Sequential"


class Wrap(nn.Module):
    """Some models return a tuple whatever is in it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.kind([self.layer(x)])


class First(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given[0]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_of_one_is_refused_where_it_would_become_a_tensor(kind: type) -> None:
    """A layer that takes the first of a tuple would take the first sample of a tensor."""
    task = Task()
    model = nn.Sequential(Wrap(kind), First(), Wrap(kind))
    task.model = lambda stage: model  # type: ignore[method-assign]
    inputs = torch.randn(5, 4)
    first = build_stage(task, 0, PipelineSettings(stages=2, micro_batches=1, cuts=(1,)))
    with pytest.raises(
        TaskError, match=rf"last layer before a cut \(Wrap\) returns a {kind.__name__} of one.*return the tensor"
    ):
        first(inputs)
    passed = inputs
    for stage in range(2):
        passed = build_stage(task, stage, PipelineSettings(stages=2, micro_batches=1, cuts=(2,)))(passed)
    assert type(passed) is kind, "within a part, and at the end of the model, it may be one"
    assert torch.equal(passed[0], model(inputs)[0])


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 layers to train"):
        measure_cuts(Task(), 4, 4)


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    assert cut_evenly([1, 1, 1, 9, 1, 1], [True] * 6, 3) == (3, 4)
    assert cut_evenly([5, 1, 1, 1, 1, 1], [True] * 6, 2) == (1,)
    assert cut_evenly([1, 1, 8, 1], [False, False, True, True], 2) == (3,), "each has something to train"


class Attention(nn.Module):
    """Nothing but attention: what it is given is query, key and value side by side."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_attention_costs_as_much_as_the_square_of_its_length() -> None:
    """On a CPU torch has a kernel for it that its counter does not know, unless the heads are not apart: two products then."""

    def cost(length: int, *heads: int) -> float:
        return _cost(Attention(), torch.randn(2, *heads, length, 3 * 16))[0]

    products = 2 * (2 * (2 * 4) * 64 * 64 * 16)  # two, of 2 samples x 4 heads; to multiply, and to add
    assert cost(128, 4) - 2 * cost(64, 4) == 2 * products, "what is moved grows with the length only"
    assert cost(64, 4) == 4 * cost(64, 1)
    assert cost(64, 1) == pytest.approx(cost(64), rel=0.01)


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


class Failing(Task):
    """Its method or layer `where` does what the user did not mean."""

    def __init__(self, where: str) -> None:
        self.where = where

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(Fork(), Join(), nn.Linear(3, 2), nn.Linear(7 if self.where == "layer" else 2, 2))

    def dataset(self) -> Any:
        match self.where:
            case "empty":
                return TensorDataset(torch.zeros(0, 4))
            case "no length":
                return NoLength()
            case "unreadable":
                return [None] * 8
        return super().dataset()

    def inputs(self, batch: Any) -> Any:
        return batch["x"] if self.where == "inputs" else batch[0]


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("empty", ConfigError, r"TrainTask.dataset\(\): TensorDataset is empty"),
        ("no length", ConfigError, r"TrainTask.dataset\(\): NoLength is not map-style"),
        ("unreadable", TaskError, "micro-batch of 4 samples was to be measured.*cannot be read from the dataset: TypeError: "),
        ("inputs", TaskError, r"micro-batch of 4 samples was to be measured.*TrainTask.inputs\(\) fails on it: TypeError: "),
    ],
)
@pytest.mark.parametrize("measure", ["cuts", "parts", "split"])
def test_data_that_cannot_be_measured_with(where: str, error: type[Exception], words: str, measure: str) -> None:
    step = StepSettings(pipeline=PipelineSettings(stages=2, micro_batches=1, cuts=(1,), schedule="zero_bubble"))
    call = {
        "cuts": lambda: measure_cuts(Failing(where), 2, 4),
        "parts": lambda: measure_parts(Failing(where), step, 4),
        "split": lambda: check_split(Failing(where), step, 4),
    }
    with pytest.raises(error, match=words):
        call[measure]()


def test_a_layer_that_fails_while_cuts_are_measured_is_named() -> None:
    with pytest.raises(TaskError, match=r"measured before the run: layer 3 \(Linear\) fails on it: RuntimeError: mat1"):
        measure_cuts(Failing("layer"), 2, 4)


class Changing(Task):
    """Its `inputs` changes the batch in one way or another."""

    def __init__(self, how: str) -> None:
        self.how = how

    def collate(self, samples: Any) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return {"x": batch[0], "y": batch[1]} if self.how == "taken" else batch

    def inputs(self, batch: Any) -> Any:
        match self.how:
            case "in place":
                batch[1].lerp_(batch[1].flip(0) + 1, 0.3)
            case "replaced":
                batch[1] = batch[1] + 1
            case "its own":
                return batch[0].div_(2).flatten(1)
            case "taken":
                return batch.pop("x")
        return batch[0]


def reads(task: Changing) -> Any:
    """What the first stage reads in its first step."""
    step, sampling = StepSettings(pipeline=PipelineSettings(stages=2, micro_batches=2, cuts=(1,))), Sampling(8, 4, 0)
    passes = build_replica(task, sampling, step, use_gpu=False, undo_mode="exact", probe=None).passes
    attempt: Any = SimpleNamespace(incarnation=1, step=0, replica=0)
    micro_batch: Any = SimpleNamespace(data=task.collate([(torch.randn(4), torch.zeros(2)) for _ in range(2)]))
    passes.begin(attempt, [micro_batch])
    return passes.inputs(0)


@pytest.mark.parametrize("look", [reads, lambda task: measure_cuts(task, 2, 4)], ids=["first step", "driver"])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_labels_that_inputs_changes_are_refused_where_the_loss_has_others(how: str, look: Any) -> None:
    """The last stage reads the batch anew."""
    with pytest.raises(TaskError, match=r"Changing\.inputs\(\) changes batch\[1\], which it does not return"):
        look(Changing(how))


@pytest.mark.parametrize("how", ["its own", "taken", "none"])
def test_inputs_may_change_what_it_returns(how: str) -> None:
    assert measure_cuts(Changing(how), 2, 4)
    assert reads(Changing(how)) is not None
