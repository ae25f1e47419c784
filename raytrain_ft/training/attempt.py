"""What a step is about: its settings, the attempt at it, and its commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from raytrain_ft.policy.sampling import GlobalBatch, Position, Range
from raytrain_ft.training.pipeline import PipelineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step depends on besides the task.

    Attributes:
        update: "barrier" updates when every bucket is reduced; "wait_free" each bucket as soon as it is.
        precision: "bf16" runs forward and loss under autocast; parameters stay fp32.
        on_non_finite: what to do when the loss of a step is NaN or infinite; whether a worker that raises means the end of the
            run or a way back is for the supervisor to say.
        seats: the most replicas that there may be.
        returns_lost: samples that were lost, but for those whose loss was not finite, are read again at the end of their epoch.
        finishes_alone: a backward pass goes on to its end when a reduction fails, so that survivors can finish the step.
        pipeline: None if every worker hosts the whole model.
    """

    seed: int = 0
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    update: Literal["barrier", "wait_free"] = "barrier"
    on_non_finite: Literal["raise", "skip", "roll_back"] = "raise"
    returns_lost: bool = False
    finishes_alone: bool = False
    seats: int = 1
    pipeline: PipelineSettings | None = None
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20

    @property
    def micro_batches(self) -> int:
        """Of each step and replica."""
        return self.gradient_accumulation_steps if self.pipeline is None else self.pipeline.micro_batches

    @property
    def stages(self) -> int:
        """Of the pipeline; 1 without one."""
        return 1 if self.pipeline is None else self.pipeline.stages


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
    """

    attempt: Attempt
    loss: float
    seconds: float
    lost: tuple[Range, ...] = ()
    why: str = ""
    returned: bool = False


def keeps_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` leaves `p.grad` as it was. True of torch's own optimizers and ours, but for SGD with Nesterov, whose
    foreach variant overwrites it; nothing is known of others."""
    if isinstance(optimizer, torch.optim.SGD) and any(group["nesterov"] for group in optimizer.param_groups):
        return False
    return type(optimizer).__module__.startswith(("torch.optim.", "raytrain_ft."))
