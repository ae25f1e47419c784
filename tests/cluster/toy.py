"""A small task with everything that could go wrong in it: BatchNorm, dropout, weight decay, a schedule, several buckets."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.training.random import step_seed


class Toy(ft.TrainTask):
    """About 6,000 parameters in several buckets when `bucket_bytes` is small."""

    def __init__(
        self, step_seconds: float = 0.0, optimizer: str = "AdamW", norm: bool = True, backward_seconds: float = 0.0
    ) -> None:
        """`backward_seconds`: how long the backward pass rests before the gradients of each layer but the last one, which come
        first."""
        self.step_seconds = step_seconds
        self.backward_seconds = backward_seconds
        self.optimizer_name = optimizer
        self.norm = norm

    def model(self, stage: int) -> nn.Module:
        model = nn.Sequential(
            *(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64) if self.norm else nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
        )
        if self.backward_seconds:
            for layer in (model[4], model[0]):
                layer.register_full_backward_pre_hook(lambda *_: time.sleep(self.backward_seconds))
        return model

    def optimizer(self, params):
        kinds = {
            "AdamW": lambda: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
            "SGD": lambda: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=1e-3),
            "plain": lambda: torch.optim.SGD(params, lr=0.1),
            "AMSGrad": lambda: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
        }
        return kinds[self.optimizer_name]()

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(500, 16, generator=generator)
        return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))

    def augment(self, sample, generator):
        inputs, label = sample
        return inputs + 0.05 * torch.randn(inputs.shape, generator=generator), label

    def loss(self, output, batch):
        time.sleep(self.step_seconds)
        return cross_entropy(output, batch[1])


class Leisurely(Toy):
    """Takes its time as long as a file is there: a run lasts as long as it is disturbed, and its bits do not depend on it."""

    def __init__(self, pace: Path) -> None:
        super().__init__()
        self.pace = pace

    def loss(self, output, batch):
        if self.pace.exists():
            time.sleep(0.4)
        return super().loss(output, batch)


class Apart(Toy):
    """Rank 2 rests a second in the update of step 10; in the next one, rank 0 rests before each layer's gradients, six seconds
    in all. A run of three with seed 7. Its bits do not depend on whether it rests."""

    def __init__(self, rests: bool = True) -> None:
        super().__init__(optimizer="plain")
        self.rests = rests
        self.place = 0

    def model(self, stage: int) -> nn.Module:
        layers = [nn.Linear(16, 16) for _ in range(24)]
        for layer in layers:
            layer.register_full_backward_pre_hook(lambda *_: self._rest(0.25, step=11, rank=0))
        return nn.Sequential(*layers, nn.Linear(16, 4))

    def optimizer(self, params):
        optimizer = super().optimizer(params)
        optimizer.register_step_pre_hook(lambda *_: self._rest(1.0, step=10, rank=2))
        return optimizer

    def _rest(self, seconds: float, *, step: int, rank: int) -> None:
        if self.rests and self.place == step_seed(7, step, rank, 0):
            time.sleep(seconds)

    def loss(self, output, batch):
        self.place = torch.initial_seed()  # a task is not told where it is, but for this
        return super().loss(output, batch)
