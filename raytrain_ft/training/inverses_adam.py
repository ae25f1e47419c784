"""The inverses of the optimizers with Adam's two moments: Adam, AdamW, LAMB, NAdam and RAdam. See `inverses`."""
# pyright: reportPrivateImportUsage=false
# (torch's stubs do not export its _foreach_ functions)

from __future__ import annotations

import math

import torch
from torch import Tensor

from raytrain_ft.training.inverse_tools import (
    Batch,
    one_minus_quotient,
    raise_to,
    roots,
    unaverage_square,
    undo_decoupled_decay,
    unlerp,
    used_gradient,
)
from raytrain_ft.training.lists import Tensors, add_, add_number_, addcdiv_


def _denominator(b: Batch, key: str = "exp_avg_sq") -> tuple[Tensors, float]:
    """(``sqrt(v') + eps * k``, k) with ``k = sqrt(1 - beta2**t)``: Adam's denominator times k, without an operation for k."""
    k = (1 - b.hyper["betas"][1] ** b.t) ** 0.5
    d = roots(b, b.state[key])
    add_number_(d, b.hyper["eps"] * k)
    return d, k


def undo_moments(b: Batch, weight_decay: float) -> None:
    """Restores Adam's two moments. `weight_decay` is 0 where the decay is decoupled.

    A gradient far larger than its history cancels v away (relative error about eps * R**2 * (1 - beta2) for a spike of
    R times), and a v that is too small would make the next update too large. So v is raised to the least value that any
    true state with this first moment can have, by the Cauchy-Schwarz inequality over the t gradients so far:
    ``v >= m**2 (1 - beta2) (1 - q) / ((1 - beta1)**2 (1 - q**t))`` with ``q = beta1**2 / beta2``.
    """
    if b.first:
        return
    beta1, beta2 = b.hyper["betas"]
    g = used_gradient(b, weight_decay)
    m, v = b.state["exp_avg"], b.state["exp_avg_sq"]
    unlerp(m, g, 1 - beta1)
    unaverage_square(v, g, beta2)
    raise_to(b, v, m, (1 - beta2) / ((1 - beta1) ** 2 * _series(beta1**2 / beta2 if beta2 else 0.0, b.t - 1)))


def _series(q: float, terms: int) -> float:
    """``1 + q + q**2 + ...``; of a long one with q > 1, which no float may hold, infinity."""
    if abs(1 - q) < 1e-9:
        return float(terms)
    try:
        return (1 - q**terms) / (1 - q)
    except OverflowError:
        return math.inf


def _split_decay(b: Batch) -> tuple[float, float]:
    """(decoupled, L2): the weight decay under the one name or the other."""
    wd = b.hyper["weight_decay"]
    return (wd, 0.0) if b.hyper.get("decoupled_weight_decay") else (0.0, wd)


def undo_adam(b: Batch) -> None:
    """Adam and AdamW. With `amsgrad` the running maximum is kept: then x, m and v are restored, and the maximum is the
    one that the same gradient would lead to again."""
    decoupled, l2 = _split_decay(b)
    d, k = _denominator(b, "max_exp_avg_sq" if b.hyper["amsgrad"] else "exp_avg_sq")
    addcdiv_(b.x, b.state["exp_avg"], d, b.hyper["lr"] * k / (1 - b.hyper["betas"][0] ** b.t))
    undo_decoupled_decay(b, decoupled)
    undo_moments(b, l2)


def undo_lamb(b: Batch) -> None:
    """LAMB. The trust ratio of each tensor was recorded: with weight decay it cannot be had from norms afterwards."""
    lr, wd = b.hyper["lr"], b.hyper["weight_decay"]
    d, k = _denominator(b)
    steps = [lr * ratio / (1 - lr * ratio * wd) for ratio in b.scalars]
    r = torch._foreach_mul(b.x, [wd * step for step in steps])
    torch._foreach_addcdiv_(r, b.state["exp_avg"], d, [step * k / (1 - b.hyper["betas"][0] ** b.t) for step in steps])
    add_(b.x, r)
    del r
    undo_moments(b, 0.0)


def undo_radam(b: Batch) -> None:
    """RAdam: a plain momentum step while the variance is not tractable (rho_t <= 5), then a rectified Adam step."""
    beta1, beta2 = b.hyper["betas"]
    decoupled, l2 = _split_decay(b)
    bc1, bc2 = 1 - beta1**b.t, 1 - beta2**b.t
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * b.t * beta2**b.t / bc2
    if rho > 5:
        rectifier = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        d = roots(b, b.state["exp_avg_sq"])
        add_number_(d, b.hyper["eps"])
        addcdiv_(b.x, b.state["exp_avg"], d, b.hyper["lr"] * rectifier * bc2**0.5 / bc1)
    else:
        add_(b.x, b.state["exp_avg"], b.hyper["lr"] / bc1)
    undo_decoupled_decay(b, decoupled)
    undo_moments(b, l2)


def _nadam_steps(b: Batch) -> tuple[list[float], list[float]]:
    """NAdam's step sizes for the gradient and for the first moment, one of each per tensor."""
    beta1, lr, psi = b.hyper["betas"][0], b.hyper["lr"], b.hyper["momentum_decay"]
    mu = beta1 * (1 - 0.5 * 0.96 ** (b.t * psi))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((b.t + 1) * psi))
    return [lr * (1 - mu) / (1 - p) for p in b.scalars], [lr * mu_next / (1 - p * mu_next) for p in b.scalars]


def nadam_kept(b: Batch) -> list[Tensor] | None:
    """``1 - a * lambda / d``, with L2 decay, where x itself is in the gradient that is divided by d."""
    l2 = _split_decay(b)[1]
    if not l2:
        return None
    d, k = _denominator(b)
    return one_minus_quotient([a * k * l2 for a in _nadam_steps(b)[0]], d)


def undo_nadam(b: Batch) -> None:
    """NAdam. The product of momenta itself is put back by the caller, who knows what it was."""
    decoupled, l2 = _split_decay(b)
    d, k = _denominator(b)
    for_gradient, for_moment = ([step * k for step in steps] for steps in _nadam_steps(b))
    torch._foreach_addcdiv_(b.x, b.state["exp_avg"], d, for_moment)
    g = used_gradient(b, l2)
    if l2:
        torch._foreach_add_(d, [-a * l2 for a in for_gradient])
    torch._foreach_addcdiv_(b.x, g, d, for_gradient)
    del g
    undo_decoupled_decay(b, decoupled)
    undo_moments(b, l2)
