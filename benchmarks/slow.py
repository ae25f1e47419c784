"""Models that take their time without needing a core for it: several workers share two cores as if each had its own."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Work

SAMPLE_S = 0.02  # of computation: a step of twelve takes 0.24 s and what it costs to keep together
FORWARD_SHARE = 1 / 3


class _Slow(torch.autograd.Function):
    """The identity; its backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """A layer of which each sample takes so long: a share of it forward, the rest backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """As it is, later."""
        seconds = self.seconds * len(inputs)
        time.sleep(seconds * FORWARD_SHARE)
        return _Slow.apply(inputs, seconds * (1 - FORWARD_SHARE))  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class SlowWork(Work):
    """A small model whose layers take their time: `sample_s` seconds per sample, all of them together."""

    sample_s: float = SAMPLE_S

    def model(self) -> nn.Module:
        """The model of `Work`, with a slow layer after each of its own."""
        layers = list(Work.model(self).children())
        slow = [Slow(self.sample_s / len(layers)) for _ in layers]
        return nn.Sequential(*itertools.chain.from_iterable(zip(layers, slow, strict=True)))
