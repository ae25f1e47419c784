"""Tasks to rehearse with, where no job of one's own is given."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raytrain_ft.task import TrainTask

STEP_S = 0.05


class Tiny(TrainTask):
    """A small model whose step takes a fixed time, as on an accelerator that leaves the host idle.

    Args:
        step_seconds: of a replica's step. micro_batches: that it is cut into.
    """

    def __init__(self, step_seconds: float = STEP_S, micro_batches: int = 1) -> None:
        self.seconds = step_seconds / micro_batches

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(32, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)),
        )

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    def dataset(self) -> TensorDataset:
        inputs = torch.randn(4_000, 32, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs[:, :8].argmax(dim=1))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return cross_entropy(output, batch[1])
