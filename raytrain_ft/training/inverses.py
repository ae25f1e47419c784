"""The inverse of one update, for each optimizer that has one (SWIFT, section 4; its formulas corrected).

`INVERSES` is the table. Every inverse takes a `Batch` of tensors that were updated alike and turns them, in place, into
what they were before: first the parameter, then the gradient that the update really used (with weight decay it depends
on the restored parameter), then the optimizer's state. All but Adafactor's work element by element.

Where weight decay puts x into the gradient, ``x' = x - h * (g + lambda * x)``, the inverse has the same form,
``x = x' + h / (1 - h * lambda) * (g + lambda * x')``. A quotient of x itself would be off by up to half a unit in the
last place of x, always in the same direction, however small the update was.

In comments a prime marks a value after the update, ``eta`` is the learning rate and ``lambda`` the weight decay.
This module knows nothing of hooks, records or refusals: those are in `undo` and `undo_rules`.
"""
# pyright: reportPrivateImportUsage=false
# (torch's stubs do not export its _foreach_ functions)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from raytrain_ft.training.inverse_tools import (
    Batch,
    one_minus_quotient,
    raise_to,
    roots,
    rounded,
    unaverage_square,
    undo_decoupled_decay,
    unlerp,
    unscale,
    used_gradient,
)
from raytrain_ft.training.inverses_adam import nadam_kept, undo_adam, undo_lamb, undo_nadam, undo_radam
from raytrain_ft.training.lamb import LAMB
from raytrain_ft.training.lists import Tensors, add_, add_number_, addcdiv_, addcmul_, clamp_min_


@dataclass(frozen=True, slots=True)
class Inverse:
    """How the update of one optimizer is undone.

    Attributes:
        undo: turns a batch, in place, into what it was before the update.
        state: the names of the tensors in the optimizer's state that an update changes.
        kept: the factor by which the update itself multiplied each element of x before it added anything, where that
            depends on the data, or None. No element may be close to zero: the caller makes sure of it beforehand.
        before: reads, before a step and without waiting for a device, the number per tensor that is lost afterwards.
        after: the same, after the step.
        temporaries: how many tensors as large as x the undo needs at a time; see `blocks`.
        whole: tensors must not be cut.
    """

    undo: Callable[[Batch], None]
    state: tuple[str, ...]
    kept: Callable[[Batch], list[Tensor] | None] | None = None
    before: Callable[[Tensor, Mapping[str, Any]], Tensor | float] | None = None
    after: Callable[[Any, Tensor], Tensor] | None = None
    temporaries: int = 1
    whole: bool = False


def undo_sgd(b: Batch) -> None:
    """SGD, plain or with momentum, dampening or Nesterov's momentum. The first momentum buffer is the bare gradient.

    ``SGD(foreach=True, nesterov=True, weight_decay=0)`` leaves ``g + mu * buf'`` in ``p.grad``: there the gradient is
    restored too, so that the step can be taken again.
    """
    lr, mu, wd = b.hyper["lr"], b.hyper["momentum"], b.hyper["weight_decay"]
    buf = b.state["momentum_buffer"] if mu else []
    if b.overwritten:
        add_(b.x, b.g, lr)
        add_(b.g, buf, -mu)
    elif mu and not b.hyper["nesterov"]:
        add_(b.x, buf, lr)
    else:
        u = used_gradient(b, wd)
        add_(b.x, torch._foreach_add(u, buf, alpha=mu) if mu else u, lr / (1 - lr * wd))
        del u
    if mu and not b.first:
        add_(buf, used_gradient(b, wd), -(1 - b.hyper["dampening"]))
        unscale(buf, rounded(mu, buf[0].dtype))


def _rmsprop_denominator(b: Batch) -> Tensors:
    q = b.state["square_avg"]
    if b.hyper["centered"]:
        means = b.state["grad_avg"]
        d: Tensors = torch._foreach_addcmul(q, means, means, value=-1)
        torch._foreach_sqrt_(d)
    else:
        d = roots(b, q)
    add_number_(d, b.hyper["eps"])
    return d


def rmsprop_kept(b: Batch) -> list[Tensor] | None:
    """``1 - eta * lambda / a``; with momentum x is not multiplied by anything."""
    if b.hyper["momentum"] > 0 or not b.hyper["weight_decay"]:
        return None
    return one_minus_quotient([b.hyper["lr"] * b.hyper["weight_decay"]] * len(b.x), _rmsprop_denominator(b))


def undo_rmsprop(b: Batch) -> None:
    """RMSprop, centered or not, with momentum or not.

    The floor of the centered second moment, ``mean**2 / (1 - alpha**t)``, is Cauchy-Schwarz again: see `undo_moments`.
    """
    lr, alpha, mu, wd = (b.hyper[name] for name in ("lr", "alpha", "momentum", "weight_decay"))
    d = _rmsprop_denominator(b)
    if mu > 0:
        add_(b.x, b.state["momentum_buffer"], lr)
    else:
        if wd:
            add_number_(d, -lr * wd)
        addcdiv_(b.x, used_gradient(b, wd), d, lr)
    if b.first:
        return
    g = used_gradient(b, wd)
    if mu > 0:
        addcdiv_(b.state["momentum_buffer"], g, d, -1)
        unscale(b.state["momentum_buffer"], rounded(mu, b.x[0].dtype))
    unaverage_square(b.state["square_avg"], g, alpha)
    if b.hyper["centered"]:
        unlerp(b.state["grad_avg"], g, 1 - alpha)
        raise_to(b, b.state["square_avg"], b.state["grad_avg"], 1 / (1 - alpha ** (b.t - 1)))
    else:
        clamp_min_(b.state["square_avg"], 0.0)


def _adagrad_step(b: Batch) -> tuple[float, Tensors]:
    d = roots(b, b.state["sum"])
    add_number_(d, b.hyper["eps"])
    return b.hyper["lr"] / (1 + (b.t - 1) * b.hyper["lr_decay"]), d


def adagrad_kept(b: Batch) -> list[Tensor] | None:
    """``1 - clr * lambda / std``, with torch's names."""
    if not b.hyper["weight_decay"]:
        return None
    clr, d = _adagrad_step(b)
    return one_minus_quotient([clr * b.hyper["weight_decay"]] * len(b.x), d)


def undo_adagrad(b: Batch) -> None:
    """Adagrad. A sum that the last gradient dominates loses its old digits, as any sum does."""
    wd = b.hyper["weight_decay"]
    clr, d = _adagrad_step(b)
    if wd:
        add_number_(d, -clr * wd)
    addcdiv_(b.x, used_gradient(b, wd), d, clr)
    del d
    if not b.first:
        g = used_gradient(b, wd)
        addcmul_(b.state["sum"], g, g, -1)
        clamp_min_(b.state["sum"], 0.0)


def undo_adamax(b: Batch) -> None:
    """Adamax, for a replay only: where the new gradient won the maximum, the old value is gone.

    ``u' / beta2`` is the largest value that leads to u' again.
    """
    beta1, beta2 = b.hyper["betas"]
    value = b.hyper["lr"] / (1 - beta1**b.t)
    addcdiv_(b.x, b.state["exp_avg"], b.state["exp_inf"], value)
    if not b.first:
        unlerp(b.state["exp_avg"], used_gradient(b, b.hyper["weight_decay"]), 1 - beta1)
        if beta2:
            unscale(b.state["exp_inf"], rounded(beta2, b.x[0].dtype))


def _mean_square(g: Tensor, dim: int) -> Tensor:
    return torch.norm(g, dim=dim, keepdim=True).square_().div_(g.size(dim))


def undo_adafactor(b: Batch) -> None:
    """Adafactor, tensor by tensor, because its update is clipped by its own norm.

    All of it is recomputed from the state after the step; only the norm of the parameter before it was recorded.
    """
    h = b.hyper
    eps2 = h["eps"][1]
    eps1 = torch.finfo(b.x[0].dtype).eps if h["eps"][0] is None else h["eps"][0]
    weight = b.t ** h["beta2_decay"]
    names = [name for name in ("row_var", "col_var", "variance") if name in b.state]
    for i, (x, raw, norm) in enumerate(zip(b.x, b.g, b.scalars, strict=True)):
        g = -raw if h["maximize"] else raw
        averages = [b.state[name][i] for name in names]
        if len(averages) == 2:
            row, col = averages
            u = (row @ col).div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            u = averages[0].clone()
        u.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
        clip = max(1.0, u.norm(2).item() / (u.numel() ** 0.5 * h["d"]))
        size = max(eps2, norm / x.numel() ** 0.5) * min(h["lr"], b.t**-0.5)
        x.add_(u, alpha=size / clip)
        del u
        if not b.first:
            unlerp(averages, [_mean_square(g, -1), _mean_square(g, -2)] if len(averages) == 2 else [g * g], weight)
            clamp_min_(averages, 0.0)
    undo_decoupled_decay(b, h["weight_decay"])


_MOMENTS = ("exp_avg", "exp_avg_sq")

INVERSES: dict[type[Optimizer], Inverse] = {
    SGD: Inverse(undo_sgd, ("momentum_buffer",), temporaries=0),
    Adam: Inverse(undo_adam, (*_MOMENTS, "max_exp_avg_sq")),
    AdamW: Inverse(undo_adam, (*_MOMENTS, "max_exp_avg_sq")),
    LAMB: Inverse(undo_lamb, _MOMENTS, after=lambda optimizer, p: optimizer.trust_ratios[p], temporaries=2),
    NAdam: Inverse(undo_nadam, _MOMENTS, nadam_kept, before=lambda _, state: state["mu_product"].item() if state else 1.0),
    RAdam: Inverse(undo_radam, _MOMENTS),
    RMSprop: Inverse(undo_rmsprop, ("square_avg", "momentum_buffer", "grad_avg"), rmsprop_kept),
    Adagrad: Inverse(undo_adagrad, ("sum",), adagrad_kept),
    Adamax: Inverse(undo_adamax, ("exp_avg", "exp_inf")),
    Adafactor: Inverse(undo_adafactor, ("row_var", "col_var", "variance"), before=lambda p, _: p.detach().norm(2), whole=True),
}
"""What can be undone, by the exact class: a subclass may override `step`, and then none of this holds."""
