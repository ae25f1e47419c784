"""LAMB: Adam, its step scaled to the size of each parameter, for training with large batches. torch.optim has none.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2, with the
bias correction of Adam and phi(z) = z. This module must know nothing of undo, but it leaves the trust ratios of its
latest step in `LAMB.trust_ratios`, where `undo` finds them.
"""
# pyright: reportPrivateImportUsage=false
# (torch's stubs do not export its _foreach_ functions)

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class LAMB(Optimizer):
    """Layer-wise adaptive moments.

    For each tensor x with gradient g::

        m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g**2
        r = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
        u = r + weight_decay * x
        x = x - lr * ratio * u                      ratio = |x| / |u|, or 1 where either norm is 0

    `foreach` chooses the batched implementation; None means: wherever the parameters are not on the CPU.
    A ratio is a norm over one whole tensor, so a tensor must not be cut up between ranks.

    Raises ValueError for a hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not eps >= 0:
            raise ValueError(f"eps must be at least 0, got {eps}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        self.trust_ratios: dict[Tensor, Tensor] = {}
        """The trust ratio of each tensor in its latest step, 0-dim. Not part of the state: no later step needs it."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trust_ratios = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient. Returns what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.is_complex():
                    raise RuntimeError("LAMB needs dense, real gradients: use torch.optim.SparseAdam for sparse ones")
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)  # on the CPU, so that reading it never waits for a device
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["step"] += 1
                alike[p.device, p.dtype, state["step"].item()].append(p)
            for (device, _, t), params in alike.items():
                foreach = device.type != "cpu" if group["foreach"] is None else group["foreach"]
                for some in [params] if foreach else [[p] for p in params]:
                    self._update(some, t, group)
        return loss

    def _update(self, params: list[Tensor], t: float, group: dict[str, Any]) -> None:
        """One update of tensors of the same device, dtype and step number. No synchronisation with the device."""
        beta1, beta2 = group["betas"]
        m = [self.state[p]["exp_avg"] for p in params]
        v = [self.state[p]["exp_avg_sq"] for p in params]
        g = [p.grad for p in params if p.grad is not None]
        if group["maximize"]:
            g = torch._foreach_neg(g)
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, value=1 - beta2)
        del g
        u = torch._foreach_sqrt(v)
        torch._foreach_div_(u, (1 - beta2**t) ** 0.5)
        torch._foreach_add_(u, group["eps"])
        torch._foreach_reciprocal_(u)  # in place: a quotient would be a second temporary of the parameters' size
        torch._foreach_mul_(u, m)
        torch._foreach_div_(u, 1 - beta1**t)
        if group["weight_decay"]:
            torch._foreach_add_(u, params, alpha=group["weight_decay"])
        size, length = torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(u))
        ratios = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size)).unbind()
        torch._foreach_mul_(u, ratios)
        torch._foreach_add_(params, u, alpha=-group["lr"])
        self.trust_ratios.update(zip(params, ratios, strict=True))
