"""Are a step's loss and gradients finite? They are looked at when they are reduced, so all ranks answer alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from raytrain_ft.errors import NonFiniteLossError
from raytrain_ft.training.buckets import Bucket


def norm_of(buckets: Sequence[Bucket]) -> Tensor:
    """The norm of all gradients in these buckets."""
    return torch.nn.utils.get_total_norm([p.grad for bucket in buckets for p in bucket.params if p.grad is not None])


def may_update(step: int, loss: float, norm: Tensor | None, on_non_finite: Literal["raise", "skip", "roll_back"]) -> bool:
    """Before an update: whether it is made, or left out.

    Args:
        norm: of the gradients, where it is needed: to look at them in every step would cost a pass over all of them.

    Raises:
        NonFiniteLossError: something is not finite, and such an update is not to be left out.
    """
    finite = math.isfinite(loss)
    if finite and (norm is None or math.isfinite(norm)):
        return True
    if on_non_finite != "skip":
        what = "loss" if not finite else "norm of the gradients"
        raise NonFiniteLossError(
            f"the {what} of step {step} is {norm if finite else loss}. Nothing was updated. Look at the "
            'learning rate and at this batch, or leave such steps out with Trainer(on_non_finite="skip").'
        )
    return False


def check_updated(step: int, loss: float, buckets: Sequence[Bucket]) -> None:
    """After updates that were made bucket by bucket, before the end of the step.

    Args:
        buckets: all of them if the loss is without some samples whose gradients are in them; else none.

    Raises:
        NonFiniteLossError: something is not finite.
    """
    what, found = "loss", loss
    if math.isfinite(found) and buckets:
        what, found = "norm of the gradients", float(norm_of(buckets))
    if not math.isfinite(found):
        raise NonFiniteLossError(
            f"the {what} of step {step} is {found}, and wait-free updates have applied it. Look at "
            'the learning rate and at this batch; RecoveryConfig(update="barrier") would have seen it first.'
        )
