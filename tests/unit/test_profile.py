"""What the stages of a pipeline cost, and that measuring them changes nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import TaskError
from raytrain_ft.training import profile
from raytrain_ft.training.profile import measure_parts, measure_pipeline
from raytrain_ft.training.settings import PipelineSettings, StepSettings


class Layers(ft.TrainTask):
    """16 -> 64 -> 8 -> 4; augmentation doubles what a sample is."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self):
        return TensorDataset(torch.randn(32, 8), torch.zeros(32, dtype=torch.int64))

    def augment(self, sample, generator):
        return torch.cat([sample[0], torch.randn(8, generator=generator)]), sample[1]

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])


class Pairs(Layers):
    """Its first stage passes on integers too, and an input that nothing is learned from."""

    def model(self, stage: int) -> nn.Module:
        return First() if stage == 0 else Second()


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x), torch.arange(len(x)), x


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, numbers, raw):
        assert numbers.dtype == torch.int64
        return self.layer(x) + raw[:, :4]


def settings(stages: int = 3, cuts: tuple[int, ...] | None = (1, 3), **more) -> StepSettings:
    return StepSettings(pipeline=PipelineSettings(stages=stages, micro_batches=4, cuts=cuts), **more)


@pytest.mark.parametrize("rounds", [0, 3])
def test_sizes_are_what_crosses_and_what_a_checkpoint_holds(rounds: int) -> None:
    first, middle, last = measure_parts(Layers(), settings(), 4, rounds=rounds)
    assert [one.crossing for one in (first, middle, last)] == [2 * 4 * 64 * 4, 2 * 4 * 8 * 4, 0], "there and back"
    weights = [16 * 64 + 64, 64 * 8 + 8 + 8 + 8, 8 * 4 + 4]
    statistics = [0, 8 + 8, 0]
    assert [one.state for one in (first, middle, last)] == [
        3 * 4 * count + 4 * more + 8 * (more > 0) for count, more in zip(weights, statistics, strict=True)
    ]
    assert all((one.seconds > 0) == (rounds > 0) for one in (first, middle, last))


def test_half_precision_halves_what_crosses() -> None:
    (first, *_) = measure_parts(Layers(), settings(precision="bf16"), 4, rounds=0)
    assert first.crossing == 2 * 4 * 64 * 2


def test_integers_cross_in_one_direction_only() -> None:
    (first, _) = measure_parts(Pairs(), settings(2, None), 4, rounds=1)
    assert first.crossing == 2 * 4 * 4 * 4 + 4 * 8 + 2 * 4 * 16 * 4


def test_per_step_and_replica() -> None:
    measured = measure_pipeline(Layers(), settings(), 4, 2, rounds=1)
    assert measured.crossing == (4 * 2048.0, 4 * 256.0)
    assert measured.replicas == 2
    assert measured.compute[0] > 0


def test_random_streams_and_threads_stay_as_they_were() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads())
    measure_parts(Layers(), settings(), 4, rounds=1, threads=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()) == before[1:]


def test_patience_ends_with_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PATIENCE_S", 0.0)
    assert all(one.seconds > 0 for one in measure_parts(Layers(), settings(), 4, rounds=10**9))


class InPlace(Layers):
    """The second stage fails on what it has changed itself."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), InverseRoot(), nn.Linear(64, 4))


class InverseRoot(nn.Module):
    def forward(self, x):
        assert (x < 1).all()
        return x.rsqrt_()


def test_every_round_measures_the_same() -> None:
    assert len(measure_parts(InPlace(), settings(2, (2,)), 4, rounds=3)) == 2


class Bad(Layers):
    def loss(self, output, batch):
        raise KeyError("labels")


def test_a_task_that_fails_is_told_with_its_stage() -> None:
    with pytest.raises(TaskError, match=r"stage 2 fails on a micro-batch of 4 samples.*KeyError: 'labels'"):
        measure_parts(Bad(), settings(), 4, rounds=1)
    assert len(measure_parts(Bad(), settings(), 4, rounds=0)) == 3, "sizes need no loss"
