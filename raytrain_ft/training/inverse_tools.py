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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


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
        scratch: memory for a temporary of each, which one batch takes over from the other, so that the cache still holds it:
            what an allocator gives comes from anywhere. None: there is no such memory.
    """

    x: list[Tensor]
    g: list[Tensor]
    state: dict[str, list[Tensor]]
    scalars: list[float]
    hyper: Mapping[str, Any]
    t: int
    first: bool
    overwritten: bool
    scratch: list[Tensor] | None


_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")  # as "2048K"
_USUAL_CACHE = 2**20


@lru_cache(maxsize=1)
def _own_cache() -> int:
    """Bytes of the cache that a core has for itself (level 2), or what is usual where the system does not tell."""
    try:
        return int(_CACHE_SIZE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _USUAL_CACHE


@lru_cache(maxsize=64)
def block_size(tensors: int, itemsize: int) -> int:
    """How many elements of each of so many tensors fit together into a core's cache.

    A power of two, so that whole vectors fill a block of any size: an element's rounding does not depend on the cache (torch
    with three threads or more may cut a block elsewhere).
    """
    fit = _own_cache() // (tensors * itemsize)
    return 1 << min(max(fit.bit_length() - 1, 14), 18)


@lru_cache(maxsize=64)
def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as the forward operation saw it: torch rounds a Python scalar to the dtype of the tensor it meets."""
    return torch.tensor(value, dtype=dtype).item()


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def add_number(tensors: Tensors, number: float) -> None:
    """Adds a number in place. torch would make a tensor of a bare number once for each of `tensors`."""
    torch._foreach_add_(tensors, _constant(1.0, tensors[0].dtype, tensors[0].device), alpha=number)


def unscale(tensors: Tensors, divisor: float) -> None:
    """Divides in place by adding ``(1/divisor - 1) * tensor``: as exact as a division near one, and faster.

    A product with the rounded reciprocal would be as fast, but wrong by up to half a unit in the last place in the same
    direction for every element, and so would drift when steps are undone and redone again and again.
    """
    torch._foreach_add_(tensors, tensors, alpha=1 / divisor - 1)


def unlerp(averages: Tensors, new: Tensors, weight: float) -> None:
    """Undoes ``averages.lerp_(new, weight)``; an average that was wholly replaced did not matter and becomes zero."""
    if weight >= 1:
        torch._foreach_zero_(averages)
    else:
        torch._foreach_lerp_(averages, new, 1 - 1 / (1 - rounded(weight, averages[0].dtype)))


def unaverage_square(squares: Tensors, new: Tensors, beta: float) -> None:
    """Undoes ``squares = beta * squares + (1 - beta) * new**2``; rounding may leave small negative values."""
    if beta == 0:
        torch._foreach_zero_(squares)
    else:
        torch._foreach_addcmul_(squares, new, new, value=-(1 - beta))
        unscale(squares, rounded(beta, squares[0].dtype))


def roots(b: Batch, squares: Tensors) -> Tensors:
    """Their square roots, in the scratch memory if there is any."""
    if b.scratch is None:
        return torch._foreach_sqrt(squares)
    return [torch.sqrt(square, out=root) for square, root in zip(squares, b.scratch, strict=True)]


def raise_to(b: Batch, squares: Tensors, averages: Tensors, factor: float) -> None:
    """Raises `squares` to at least ``factor * averages**2``, less a little so that rounding moves no true state. Overwrites the
    scratch memory."""
    least = factor * (1 - 1e-6)
    if b.scratch is None:
        floor = torch._foreach_mul(averages, averages)
        torch._foreach_mul_(floor, least)
    else:
        nothing = _constant(0.0, squares[0].dtype, squares[0].device)
        rows = zip(averages, b.scratch, strict=True)
        floor = [torch.addcmul(nothing, average, average, value=least, out=into) for average, into in rows]
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
    add_number(result, 1.0)
    return list(result)
