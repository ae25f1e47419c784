"""Which updates cannot be undone, and what to do instead. Each reason says where, the value found, and the remedy.

There are two times to refuse: before training (`refusals`: everything that the optimizer's class and settings show),
and before an undo (`hyper_reasons` again, since schedules and users change settings; `reasons_now` and `scaled_decay`:
what only the tensors show).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adafactor, Adamax, AdamW, Muon, Optimizer, Rprop, SparseAdam
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from raytrain_ft.errors import ConfigError, UndoRefusedError
from raytrain_ft.training.inverses import INVERSES

Mode = Literal["exact", "replay"]

TRAINED_IN = (torch.float32, torch.float64)
_MIN_DIVISOR = 1e-3  # dividing by less than this loses three digits or more
_MIN_BETA = 0.05  # dividing by less than this loses more than one digit

_WHY_NOT: dict[type[Optimizer], str] = {
    ASGD: "its running average is changed by the parameter after the step",
    Adadelta: "its two averages depend on each other",
    LBFGS: "it evaluates the model several times per step and keeps a history",
    Muon: "its orthogonalised update cannot be repeated exactly",
    Rprop: "it keeps only the sign of a change and clamps its step sizes",
    SparseAdam: "it updates some rows only",
}
_OTHERWISE = 'or do without undo: update parameters only when the whole step is reduced (update="barrier")'


def refusal(optimizer: Optimizer, reasons: Sequence[str]) -> UndoRefusedError:
    """The error that names all the reasons."""
    lines = "".join(f"\n  - {reason}" for reason in reasons)
    return UndoRefusedError(f"the update of {type(optimizer).__name__} cannot be undone:{lines}")


def refusals(optimizer: Optimizer, mode: Mode = "exact") -> list[str]:
    """Every reason why updates of this optimizer, as it is set now, cannot be undone; empty if they can."""
    if mode not in ("exact", "replay"):
        raise ConfigError(f'mode is {mode!r}: choose "exact" or "replay"')
    kind = type(optimizer)
    if kind not in INVERSES:
        why = _WHY_NOT.get(kind, "its class is unknown, and a subclass may override the update")
        known = ", ".join(sorted(known.__name__ for known in INVERSES))
        return [f"{kind.__module__}.{kind.__qualname__}: {why}. Use one of {known} itself, {_OTHERWISE}"]
    reasons: list[str] = []
    for i, group in enumerate(optimizer.param_groups):
        where = f"param_groups[{i}]"
        reasons += hyper_reasons(kind, group, mode, where)
        params: list[Tensor] = group["params"]
        if len(set(params)) < len(params):
            reasons.append(f"{where}: a parameter is listed twice and so updated twice per step. List each one once")
        if kind is Adafactor and group["eps"][0] is None and len({p.dtype for p in params}) > 1:
            reasons.append(f"{where}: eps[0]=None is taken from the first of several dtypes. Give eps[0], or split the group")
        for j, p in enumerate(params):
            if p.requires_grad:
                reasons += _kind_of_parameter(p, f'{where}["params"][{j}]')
    return reasons


def hyper_reasons(kind: type[Optimizer], hyper: Mapping[str, Any], mode: Mode, where: str) -> list[str]:
    """Why an update with these hyper-parameters (a parameter group) cannot be undone. `where` begins each reason."""
    betas = hyper.get("betas", ())
    numbers = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
    numbers |= {f"betas[{i}]": beta for i, beta in enumerate(betas)}
    tensors = [name for name, value in numbers.items() if isinstance(value, Tensor)]
    if tensors:
        return [f"{where}: {', '.join(tensors)} is a tensor, which may change unnoticed. Use a float"]
    reasons: list[str] = []
    for flag, why in (
        ("differentiable", "the step belongs to an autograd graph"),
        ("capturable", "a replayed graph does not run the hooks that record the update"),
    ):
        if hyper.get(flag):
            reasons.append(f"{where}: {flag}=True: {why}. Use {flag}=False, {_OTHERWISE}")
    if mode == "exact" and (hyper.get("amsgrad") or kind is Adamax):
        what = "amsgrad=True" if hyper.get("amsgrad") else "Adamax"
        reasons.append(
            f"{where}: {what}: a running maximum forgets the value it replaced. Use Adam or AdamW without amsgrad, "
            'or mode="replay" if the same gradient will be applied again'
        )
    decays = numbers | {name: hyper[name] for name in ("momentum", "alpha") if name in hyper}
    for name, value in decays.items():
        if name not in ("lr", "weight_decay") and 0 < value < _MIN_BETA:
            reasons.append(f"{where}: {name}={value} divides rounding errors. Use 0 or at least {_MIN_BETA}, {_OTHERWISE}")
    if _decay_divides(kind, hyper) and abs(1 - hyper["lr"] * hyper["weight_decay"]) < _MIN_DIVISOR:
        reasons.append(
            f"{where}: lr={hyper['lr']} with weight_decay={hyper['weight_decay']} shrinks the parameter to nothing: "
            f"|1 - lr * weight_decay| must be at least {_MIN_DIVISOR}. Lower one of them"
        )
    return reasons


def _decay_divides(kind: type[Optimizer], hyper: Mapping[str, Any]) -> bool:
    """Whether the undo divides the whole parameter by ``1 - lr * weight_decay``."""
    if kind is SGD:
        return hyper["momentum"] == 0 or hyper["nesterov"]
    return kind in (AdamW, Adafactor) or bool(hyper.get("decoupled_weight_decay"))


def _kind_of_parameter(p: Tensor, where: str) -> list[str]:
    if is_traceable_wrapper_subclass(p):
        return [f"{where} is a {type(p).__name__}: its pieces live elsewhere. Use plain tensors, {_OTHERWISE}"]
    if p.dtype not in TRAINED_IN:
        return [f"{where} is {p.dtype}: rounding leaves too little to invert. Keep float32 masters, {_OTHERWISE}"]
    return []


def reasons_now(p: Tensor, gradient: Tensor, parameter_changed: bool, gradient_changed: bool) -> list[str]:
    """Why the update of this parameter cannot be undone any more."""
    alike = gradient.dtype == p.dtype and gradient.layout == torch.strided
    if alike and p.dtype in TRAINED_IN and not parameter_changed and not gradient_changed:
        return []
    where = f"a parameter of shape {tuple(p.shape)}"
    reasons = _kind_of_parameter(p, where)
    if reasons:
        return reasons
    if gradient.layout != torch.strided:
        return [f"{where} has a gradient of layout {gradient.layout}. Use dense gradients (sparse=False), {_OTHERWISE}"]
    if gradient.dtype != p.dtype:
        return [f"{where} is {p.dtype} with a gradient in {gradient.dtype}. Use gradients of the parameter's dtype"]
    if parameter_changed:
        return [f"{where} was changed after the step. Undo before anything else writes to it"]
    return [
        f"the gradient of {where} was changed after the step. Undo before the next backward pass, "
        "and clear gradients with zero_grad(set_to_none=True)"
    ]


def scaled_decay(kept: Iterable[Tensor]) -> list[str]:
    """Refuses a weight decay that, scaled by the data, left nothing of a parameter. `kept`: absolute factors, 0-dim."""
    smallest = min((factor.item() for factor in kept), default=1.0)
    if smallest >= _MIN_DIVISOR:
        return []
    return [
        f"the latest step: weight decay, scaled by the data, left {smallest:.1g} of an element's value (at least "
        f"{_MIN_DIVISOR} is needed). Use decoupled weight decay (AdamW) or a smaller lr * weight_decay, {_OTHERWISE}"
    ]


def overwrites_gradient(hyper: Mapping[str, Any], params: list[Tensor]) -> bool:
    """Whether SGD leaves ``g + momentum * buffer`` in ``p.grad``, as its foreach variant does for Nesterov's momentum
    unless weight decay or `maximize` made it copy the gradient first (torch 2.13, ``_multi_tensor_sgd``)."""
    if not (hyper["momentum"] and hyper["nesterov"]) or hyper["weight_decay"] or hyper["maximize"] or hyper["fused"]:
        return False
    if hyper["foreach"] is None and hyper["fused"] is None:
        return _default_to_fused_or_foreach(params, False, use_fused=False)[1]
    return bool(hyper["foreach"])


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether anything is called before or after each of its steps: registered with it, or with all optimizers."""
    return has_own_hooks(optimizer) or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def has_own_hooks(optimizer: Optimizer) -> bool:
    """Whether anything is that was registered with it."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def call_first(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Has it called after each step, before whatever else is: torch calls hooks in the order in which they were registered."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


__all__ = [
    "TRAINED_IN",
    "Mode",
    "call_first",
    "has_own_hooks",
    "has_step_hooks",
    "hyper_reasons",
    "overwrites_gradient",
    "reasons_now",
    "refusal",
    "refusals",
    "scaled_decay",
]
