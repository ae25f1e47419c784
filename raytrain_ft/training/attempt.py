"""What a step is about: its settings, the attempt at it, and its commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raytrain_ft.policy.sampling import GlobalBatch, Position, Range

WENT_DOWN = "their gradients went down with a worker"
"""Why samples are lost."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A step under way: what it reads, and what the world looks like.

    Attributes:
        replica, replicas: which share of the batch is read here, and of how many. In a pipeline, all stages of a replica
            read the same.
        weights: of the replicas' shares; None if they are equal.
    """

    step: int
    batch: GlobalBatch
    after: Position
    ids: tuple[Any, ...]
    replica: int
    replicas: int
    incarnation: int
    began: float
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that was committed on this worker, for the run's record.

    Attributes:
        lost: positions of its batch whose gradients are missing in some or all of its update, and `why`.
        returned: they will be read again at the end of their epoch.
        stop, checkpoint: all ranks agreed to stop at this boundary, or that a checkpoint is due there.
        reads_change: what is read next is not what followed before: other replicas sleep, or lost samples are to come again.
    """

    attempt: Attempt
    loss: float
    seconds: float
    lost: tuple[Range, ...] = ()
    why: str = ""
    returned: bool = False
    stop: bool = False
    checkpoint: bool = False
    reads_change: bool = False


def keeps_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` leaves `p.grad` as it was. True of torch's own optimizers and ours, but for SGD with Nesterov, whose
    foreach variant overwrites it; nothing is known of others."""
    if isinstance(optimizer, torch.optim.SGD) and any(group["nesterov"] for group in optimizer.param_groups):
        return False
    return type(optimizer).__module__.startswith(("torch.optim.", "raytrain_ft."))
