"""Operations in place on lists of tensors that run parallel.

They are torch's ``_foreach_`` functions, which a GPU runs as one kernel and which spare small tensors the interpreter. For a
list of one it is the plain operation, with the same bits: on a CPU to take a list apart costs as much as 10,000 elements do.
"""
# pyright: reportPrivateImportUsage=false
# (torch's stubs do not export its _foreach_ functions)

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


def copy_(to: Tensors, what: Tensors) -> None:
    """``to = what``."""
    if len(to) == 1:
        to[0].copy_(what[0])
    else:
        torch._foreach_copy_(to, what)


def zero_(to: Tensors) -> None:
    """``to = 0``."""
    if len(to) == 1:
        to[0].zero_()
    else:
        torch._foreach_zero_(to)


def add_(to: Tensors, what: Tensors, alpha: float = 1.0) -> None:
    """``to += alpha * what``."""
    if len(to) == 1:
        to[0].add_(what[0], alpha=alpha)
    else:
        torch._foreach_add_(to, what, alpha=alpha)


def addcmul_(to: Tensors, a: Tensors, b: Tensors, value: float) -> None:
    """``to += value * a * b``."""
    if len(to) == 1:
        to[0].addcmul_(a[0], b[0], value=value)
    else:
        torch._foreach_addcmul_(to, a, b, value=value)


def addcdiv_(to: Tensors, a: Tensors, b: Tensors, value: float) -> None:
    """``to += value * a / b``."""
    if len(to) == 1:
        to[0].addcdiv_(a[0], b[0], value=value)
    else:
        torch._foreach_addcdiv_(to, a, b, value=value)


def lerp_(to: Tensors, end: Tensors, weight: float) -> None:
    """``to += weight * (end - to)``."""
    if len(to) == 1:
        to[0].lerp_(end[0], weight)
    else:
        torch._foreach_lerp_(to, end, weight)


def clamp_min_(to: Tensors, least: float) -> None:
    """``to = max(to, least)``."""
    if len(to) == 1:
        to[0].clamp_min_(least)
    else:
        torch._foreach_clamp_min_(to, least)


def add_number_(to: Tensors, number: float) -> None:
    """``to += number``. torch would make a tensor of a bare number once for each."""
    one = constant(1.0, to[0].dtype, to[0].device)
    if len(to) == 1:
        to[0].add_(one, alpha=number)
    else:
        torch._foreach_add_(to, one, alpha=number)


@lru_cache(maxsize=64)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor without dimensions, made once."""
    return torch.tensor(value, dtype=dtype, device=device)
