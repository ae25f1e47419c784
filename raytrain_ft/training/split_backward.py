"""A backward pass in two parts: the gradients of the inputs now, those of the weights later.

The two functions of torch that do this are private, and treat some models wrongly (torch 2.13; the clone below mends what can
be mended here). They are used here and nowhere else, and `training/split_check.py` tries them out on every model before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import TaskError


def _of_torch(name: str) -> Any:
    """One of the two. Imported when it is needed: what comes with it takes every worker a second of its start."""
    return getattr(import_module("torch.distributed.pipelining._backward"), name)


def separable(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of a stage as `of_inputs` can take them: it cuts them off their graph, for good, which a view does not allow and
    a parameter would not survive."""
    return [output.clone() if output._is_view() or output.is_leaf else output for output in outputs]


def of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor], params: Sequence[nn.Parameter]
) -> Any:
    """Gives every input its gradient. Returns what `of_weights` needs.

    Args:
        outputs: of the stage, from `separable`; they are cut off their graph. gradients: theirs; None is that of a loss.

    Raises:
        TaskError: the gradient of a weight would be computed more than once.
    """
    grads = None if gradients is None else list(gradients)
    rest = _of_torch("stage_backward_input")(list(outputs), grads, list(inputs), iter(params))[1]
    _check_groups([group["params"] for group in rest])
    return rest


def _check_groups(groups: Sequence[set[Any]]) -> None:
    """Each weight belongs into one group. One that is used twice torch puts into two of them or not, as the order of a set has
    it, which is that of addresses: in one pass it does, and in another it does not. So no trial before the run would tell."""
    seen: set[Any] = set()
    for group in groups:
        for node in seen & group:
            raise TaskError(
                f"torch {torch.__version__} cannot do the backward pass in two parts of a weight of shape "
                f"{tuple(node.variable.shape)} that is used more than once: it would compute its gradient twice. Use "
                'ParallelismConfig(schedule="1f1b")'
            )
        seen |= group


@torch.no_grad()
def of_weights(rest: Any, params: Sequence[nn.Parameter]) -> None:
    """Adds to the gradient of every parameter. `rest`: what `of_inputs` returned, which is used up."""
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    with torch.enable_grad():
        _of_torch("stage_backward_weight")(iter(params), rest)
    for p, sum_so_far in zip(params, before, strict=True):
        if p.grad is None:
            p.grad = sum_so_far
        elif sum_so_far is None:
            p.grad = p.grad.clone()  # torch gives one tensor to several parameters, or one that was sent, and would add to it
        else:
            p.grad = sum_so_far.add_(p.grad)
