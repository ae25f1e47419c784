"""A sequential model that is cut computes what it computes in one piece, whatever goes from layer to layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError
from raytrain_ft.training.pipeline import build_stage, passed_on
from raytrain_ft.training.settings import PipelineSettings
from raytrain_ft.training.split import cut_evenly, measure_cuts


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


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 layers to train"):
        measure_cuts(Task(), 4, 4)


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    assert cut_evenly([1, 1, 1, 9, 1, 1], [True] * 6, 3) == (3, 4)
    assert cut_evenly([5, 1, 1, 1, 1, 1], [True] * 6, 2) == (1,)
    assert cut_evenly([1, 1, 8, 1], [False, False, True, True], 2) == (3,), "each has something to train"
