"""What the inverses of all optimizers share: the tensors that they work on, and the inverses of single operations.

Each operation mirrors one of ``torch.optim``, because the same operation on the same bits makes the same rounding
error, which then cancels as far as it can.
"""
# pyright: reportPrivateImportUsage=false
# (torch's stubs do not export its _foreach_ functions)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.training.lists import Tensors, add_, add_number_, addcmul_, constant, lerp_


@dataclass(slots=True)
class Batch:
    """Tensors of parameters that were updated alike: same device, dtype, step number and hyper-parameters.

    Attributes:
        x: the parameters; `g`, `scalars` and each list in `state` run parallel to it.
        g: the gradients that the update consumed (where `overwritten`: what SGD left in their place).
        state: the optimizer's state by name, after the update.
        scalars: LAMB's trust ratio, the norm of an Adafactor parameter before its update, or NAdam's product of
            momenta after it.
        hyper: the parameter group as it was at the update, without its parameters.
        t: the number of updates including this one, 0 if the optimizer does not count.
        first: there was no state before, so only the parameter need be restored.
        scratch: memory for a temporary, if there is one parameter only; see `blocks`.
    """

    x: list[Tensor]
    g: list[Tensor]
    state: dict[str, list[Tensor]]
    scalars: list[float]
    hyper: Mapping[str, Any]
    t: int
    first: bool
    overwritten: bool
    scratch: Tensor | None


@lru_cache(maxsize=64)
def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as the forward operation saw it: torch rounds a Python scalar to the dtype of the tensor it meets."""
    return torch.tensor(value, dtype=dtype).item()


def unscale(tensors: Tensors, divisor: float) -> None:
    """Divides in place by adding ``(1/divisor - 1) * tensor``: as exact as a division near one, and faster.

    A product with the rounded reciprocal would be as fast, but wrong by up to half a unit in the last place in the same
    direction for every element, and so would drift when steps are undone and redone again and again.
    """
    add_(tensors, tensors, 1 / divisor - 1)


def unlerp(averages: Tensors, new: Tensors, weight: float) -> None:
    """Undoes ``averages.lerp_(new, weight)``; an average that was wholly replaced did not matter and becomes zero."""
    if weight >= 1:
        torch._foreach_zero_(averages)
    else:
        lerp_(averages, new, 1 - 1 / (1 - rounded(weight, averages[0].dtype)))


def unaverage_square(squares: Tensors, new: Tensors, beta: float) -> None:
    """Undoes ``squares = beta * squares + (1 - beta) * new**2``; rounding may leave small negative values."""
    if beta == 0:
        torch._foreach_zero_(squares)
    else:
        addcmul_(squares, new, new, -(1 - beta))
        unscale(squares, rounded(beta, squares[0].dtype))


def roots(b: Batch, squares: Tensors) -> Tensors:
    """Their square roots, in the scratch memory if there is any."""
    return torch._foreach_sqrt(squares) if b.scratch is None else [torch.sqrt(squares[0], out=b.scratch)]


def raise_to(b: Batch, squares: Tensors, averages: Tensors, factor: float) -> None:
    """Raises `squares` to at least ``factor * averages**2``, less a little so that rounding moves no true state. Overwrites the
    scratch memory."""
    least = factor * (1 - 1e-6)
    nothing = constant(0.0, squares[0].dtype, squares[0].device)
    if b.scratch is not None:
        torch.maximum(squares[0], torch.addcmul(nothing, averages[0], averages[0], value=least, out=b.scratch), out=squares[0])
    elif nothing.is_cpu:  # with the same bits
        torch._foreach_maximum_(squares, torch._foreach_addcmul([nothing] * len(averages), averages, averages, value=least))
    else:  # with kernels for all of them, which want tensors of one size
        floor = torch._foreach_mul(averages, averages)
        torch._foreach_mul_(floor, least)
        torch._foreach_maximum_(squares, floor)


def used_gradient(b: Batch, weight_decay: float = 0.0) -> Tensors:
    """``+-g + weight_decay * x``, the gradient as the update used it, once x is restored. Never changes `b.g`."""
    g: Tensors = torch._foreach_neg(b.g) if b.hyper["maximize"] else b.g
    return torch._foreach_add(g, b.x, alpha=weight_decay) if weight_decay else g


def undo_decoupled_decay(b: Batch, weight_decay: float) -> None:
    """Undoes ``x *= 1 - lr * weight_decay``."""
    if weight_decay:
        unscale(b.x, rounded(1 - b.hyper["lr"] * weight_decay, b.x[0].dtype))


def one_minus_quotient(numerators: list[float], denominators: Tensors) -> list[Tensor]:
    """``1 - numerator / denominator`` for each tensor, in new tensors."""
    result = torch._foreach_reciprocal(denominators)
    torch._foreach_mul_(result, [-n for n in numerators])
    add_number_(result, 1.0)
    return list(result)
