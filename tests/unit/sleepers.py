"""What replicas that sleep train, and how several of them live in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.training.step import Replica

SAMPLING = Sampling(32, 4, seed=0, shuffle=False)


class Task(ft.TrainTask):
    """A BatchNorm whose mean is over all batches so far, so that its count matters, and inputs that are drawn."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.5), nn.Linear(8, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator))

    def inputs(self, batch: Any) -> Any:
        return batch[0] + torch.randn_like(batch[0])

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


def one_generator_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in one process share the global generators; each step's draws are made one replica after the other."""
    lock = threading.Lock()

    def alone(self: Replica, *, work: Callable[[Replica], None]) -> None:
        with lock:
            work(self)

    for name in ("forward_backward", "update"):
        monkeypatch.setattr(Replica, name, partialmethod(alone, work=getattr(Replica, name)))
