"""What `Trainer.fit` returns, and how to get the trained model back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from raytrain_ft.policy.strategy import Guarantee, Recovery, Strategy
from raytrain_ft.storage.arrow import read_tensors
from raytrain_ft.training.pipeline import build_stage
from raytrain_ft.training.settings import PipelineSettings


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run. `metrics`, `path` and `error` mean what they mean in `ray.train.Result`.

    Attributes:
        metrics: the latest "loss" and "step".
        path: the run's directory: event log, timeline, final state.
        recoveries: every recovery and planned resize: cause, strategy, guarantee kept, and when it was detected, fenced,
            reconciled, filled and resumed (seconds since the run began).
        digest: hash of the final training state, bucket by bucket: two runs are bit-identical if and only if it is equal.
        seconds: how long the run took.
        checkpoint: where the newest checkpoint is: the storage of the run's checkpoints, and its name there.
        error: None; a run that fails raises.
    """

    metrics: dict[str, Any]
    path: str
    recoveries: list[Recovery] = field(default_factory=list)
    digest: str = ""
    seconds: float = 0.0
    checkpoint: str | None = None
    error: Exception | None = None

    @property
    def final_state(self) -> str:
        """The file with the model's final state; of a pipeline, that of its first stage, and the others lie beside it."""
        one = Path(self.path) / "final.arrow"
        return str(one if one.exists() else one.with_name("final-stage-0.arrow"))


def recovery_of(fields: dict[str, Any]) -> Recovery:
    """A `Recovery` from plain data, as the supervisor and the event log give it."""
    known = {name: fields[name] for name in Recovery.__dataclass_fields__}
    known["strategy"], known["guarantee"] = Strategy(known["strategy"]), Guarantee(known["guarantee"])
    return Recovery(**known)


def load_model(task: Any, result: Result | str) -> torch.nn.Module:
    """The task's model with the final weights of a run; of a pipeline whose stages the task gives, a Sequential of the stages.

    Args:
        result: what `fit` returned, or the path of a `final.arrow` or `final-stage-0.arrow`.

    Raises:
        StorageError: a file is missing or damaged.
    """
    path = Path(result.final_state if isinstance(result, Result) else result)
    tensors, values = read_tensors(path)
    if "stages" not in values:
        model = task.model(0)
        model.load_state_dict(tensors)
        return model
    cuts = values["cuts"]
    settings = PipelineSettings(stages=values["stages"], micro_batches=1, cuts=None if cuts is None else tuple(cuts))
    parts = [build_stage(task, stage, settings) for stage in range(settings.stages)]
    for stage, part in enumerate(parts):
        part.load_state_dict(read_tensors(path.with_name(f"final-stage-{stage}.arrow"))[0])
    layers = parts if cuts is None else [layer for part in parts for layer in part.children()]
    return torch.nn.Sequential(*layers)
