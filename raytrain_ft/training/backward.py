"""What a backward pass begins with: the loss, or where another stage's pass has ended.

`torch.autograd.backward` given gradients compares their shapes by means of torch's symbolic shapes, and loads sympy to that
end: 0.3 s of CPU time, in the first step of every worker, and in that of a lost one's replacement, for which all wait. The
engine itself compares the shapes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.errors import TaskError


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


def loss_of(task: Any, output: Any, batch: Any) -> Tensor:
    """What the task makes of the model's output.

    Raises:
        TaskError: it is no scalar that a backward pass can begin with. Torch says so without a word of the task.
    """
    loss = task.loss(output, batch)
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "a tensor without a gradient (was it made from numbers, of a detached output, or are all weights frozen?)"
    else:
        return loss.reshape(())
    raise TaskError(
        f"{type(task).__name__}.loss() returned {found}: it has to return the mean loss over the samples of a batch, a scalar "
        "tensor that torch can differentiate, such as torch.nn.functional.cross_entropy(output, target)"
    )


class _Given(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, *ctx.gradients
