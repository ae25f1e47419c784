"""What a step, a pipeline and checkpoints depend on besides the task. Plain data: who only passes it on need not load torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ft.places import Place
from raytrain_ft.policy.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages share.

    Attributes:
        names: what it is called in each of them, by stage.
        size: its bytes.
    """

    names: dict[int, str]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How a model is spread over stages.

    Attributes:
        stages: how many.
        micro_batches: of a step and replica.
        cuts: where a sequential model is cut: the first layer of every part but the first; None if the task gives the parts.
        layers: what the layers of such a model are called in it; None if by their numbers.
        ties: what stages share.
        chunks: how many parts of the model a stage has: number s, s + stages, ...
    """

    stages: int
    micro_batches: int
    schedule: Schedule = "1f1b"
    cuts: tuple[int, ...] | None = None
    layers: tuple[str, ...] | None = None
    ties: tuple[Tie, ...] = ()
    chunks: int = 1

    @property
    def spread(self) -> dict[str, Any]:
        """What the names of the whole model depend on, and which of them are one: for files."""
        ties = [sorted([stage, name] for stage, name in tie.names.items()) for tie in self.ties]
        cuts, layers = (None if one is None else list(one) for one in (self.cuts, self.layers))
        return {"stages": self.stages, "chunks": self.chunks, "cuts": cuts, "layers": layers, "ties": sorted(ties)}

    @property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """The stages that share something, for each that is shared."""
        return tuple(tuple(sorted(tie.names)) for tie in self.ties)

    @property
    def joined(self) -> tuple[tuple[int, ...], ...]:
        """Stages that wait for each other though they are no neighbours: they share something, or the first is fed by the
        last."""
        return self.sharing + (((0, self.stages - 1),) if self.chunks > 1 else ())


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
        finishes_alone: a backward pass goes on when a reduction fails, so that survivors can finish the step.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where checkpoints go, and by whose right.

    Attributes:
        place: the directory of checkpoints; owner, epoch: see `storage.lock`.
        keep: how many stay.
        keep_epochs: there is also to be one at the end of every epoch, and these stay.
        profile_key: what k and the measurements that it comes of depend on, but for the number of workers; those of another
            key, or of other workers, are not used.
        timeout_s: how long to wait for the shards of others, and for the last checkpoint.
        most_patience_s: how long training waits at most for a checkpoint that is under way; where others wait for this worker
            meanwhile, less than what they allow it.
    """

    place: Place
    owner: str
    epoch: int
    keep: int = 1
    keep_epochs: bool = False
    profile_key: str = ""
    timeout_s: float = 120.0
    most_patience_s: float = math.inf
