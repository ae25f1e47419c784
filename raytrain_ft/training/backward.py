"""A backward pass that begins where another stage's has ended.

`torch.autograd.backward` given gradients compares their shapes by means of torch's symbolic shapes, and loads sympy to that
end: 0.3 s of CPU time, in the first step of every worker, and in that of a lost one's replacement, for which all wait. The
engine itself compares the shapes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Adds to the gradient of everything that the outputs were computed from.

    Args:
        outputs: those that need a gradient. gradients: theirs, of their shapes; None is that of one loss, which is 1.

    Raises:
        RuntimeError: a gradient has another shape than its output.
    """
    if gradients is None:
        torch.autograd.backward(list(outputs))
    elif outputs:
        _Given.apply(tuple(gradients), *outputs).backward()  # pyright: ignore


class _Given(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, *ctx.gradients
