"""What `Trainer.fit` returns, and how to get the trained model back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from raytrain_ft.errors import MismatchError
from raytrain_ft.places import Place
from raytrain_ft.policy.audit import Audit, audit
from raytrain_ft.policy.strategy import Guarantee, Recovery, Strategy
from raytrain_ft.runtime.event_log import read_run
from raytrain_ft.storage.arrow import read_tensors
from raytrain_ft.storage.filesystem import local_path
from raytrain_ft.storage.tree import versions_of, with_versions
from raytrain_ft.training.export import open_checkpoint, state_of
from raytrain_ft.training.pipeline import name_in_one_piece, sequential
from raytrain_ft.training.stored import spread_of


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run. `metrics`, `path` and `error` mean what they mean in `ray.train.Result`.

    Attributes:
        metrics: the latest "loss" and "step"; of a run that had no step left to do, the loss is the checkpoint's (None, if
            that does not tell it).
        path: the run's directory: event log, timeline, final state.
        recoveries: every recovery and planned resize: cause, strategy, guarantee kept, and when it was detected, fenced,
            reconciled, filled and resumed (seconds since the run began).
        digest: hash of the final training state, bucket by bucket, and of the optimizer's hyper-parameters, the schedule and
            the position in the data: two runs of a task are bit-identical if and only if it is equal.
        seconds: how long the run took.
        checkpoint: where the newest checkpoint is: the storage of the run's checkpoints, and its name there. Of a URI that held
            credentials, without them: they are then taken from the environment.
        final_state: the file with the model's final state; of a pipeline, that of its first stage; the others lie beside it.
        error: None; a run that fails raises.
    """

    metrics: dict[str, Any]
    path: str
    recoveries: list[Recovery] = field(default_factory=list)
    digest: str = ""
    seconds: float = 0.0
    checkpoint: str | None = None
    final_state: str = ""
    error: Exception | None = None

    def audit(self) -> Audit:
        """What the run's records prove: how many samples were used, exactly once each, and how many were not, for any reason
        (a lossy recovery, a step whose loss is not finite). Where this process does not see `path`, nothing is proven: `ok` is
        False.

        Raises:
            StorageError: the records are damaged, so that they prove nothing.
        """
        return audit(read_run(Path(self.path)))


def first_of(saved: str) -> str:
    """The file of a final state that tells of all of them, from any one of them."""
    path = Path(saved)
    return str(path.with_name("final-stage-0.arrow") if path.name.startswith("final-stage-") else path)


def recovery_of(fields: dict[str, Any]) -> Recovery:
    """A `Recovery` from plain data, as the supervisor and the event log give it; an older log lacks what came later."""
    known = {name: fields[name] for name in Recovery.__dataclass_fields__ if name in fields}
    known["strategy"], known["guarantee"] = Strategy(known["strategy"]), Guarantee(known["guarantee"])
    return Recovery(**known)


def load_model(task: Any, result: Result | str) -> torch.nn.Module:
    """The task's model with the weights of a run; of a pipeline whose stages the task gives, a Sequential of the stages.

    Args:
        result: what `fit` returned; or the path of a `final.arrow` or `final-stage-0.arrow`; or the path or URI of a
            checkpoint, such as `Result.checkpoint`.

    Raises:
        StorageError: a file is missing or damaged. MismatchError: it is of another model, be it only smaller or
            larger; what is missing, or is too many, is named.
    """
    place = Place(str(result.final_state if isinstance(result, Result) else result))
    file = local_path(place)
    tensors, spread = _final(file) if file is not None and file.suffix == ".arrow" else _stored(place)
    model = _whole(task, spread)
    wanted = model.state_dict(keep_vars=True)
    stored = {id(wanted[name]): tensor for name, tensor in tensors.items() if name in wanted}  # tied weights, by one name
    # A checkpoint also has what the model's state dict leaves out, such as buffers that are not persistent. What the model
    # does not have at all is handed to it too, so that torch names it along with what is missing.
    known = {*wanted, *dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers(remove_duplicate=False))}
    surplus = {name: tensor for name, tensor in tensors.items() if name not in known}
    found = {name: stored[id(own)] for name, own in wanted.items() if id(own) in stored} | surplus
    # The trainer, which resumes without load_state_dict, stores no versions of the parts of a model: the present ones are taken
    versions = versions_of(tensors) or versions_of(wanted)
    try:
        model.load_state_dict(with_versions(found, versions))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # of the model's own conversions, too
        raise MismatchError(f"{place} is not of this task's model: {error}") from error
    return model


def _final(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """The tensors of a run's final state, by the names of the whole model; and how it was spread, if it was."""
    tensors, values = read_tensors(path)
    spread = spread_of(values, str(path))
    if spread is None:
        return tensors, None
    whole: dict[str, torch.Tensor] = {}
    for stage in range(spread["stages"]):
        file = path.with_name(f"final-stage-{stage}.arrow")
        whole |= {name_in_one_piece(name, stage, spread, str(file)): tensor for name, tensor in read_tensors(file)[0].items()}
    return whole, spread


def _stored(place: Place) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """The same of a checkpoint."""
    content = open_checkpoint(place)
    return state_of(content).get("model", {}), spread_of(content.manifest.values, str(place))


def _whole(task: Any, spread: dict[str, Any] | None) -> torch.nn.Module:
    """The task's model in one piece."""
    if spread is None:
        return task.model(0)
    if spread["cuts"] is None:
        return torch.nn.Sequential(*map(task.model, range(spread["stages"] * spread["chunks"])))
    model = sequential(task.model(0))
    return model if "layers" in spread else torch.nn.Sequential(*model)  # an earlier version knew layers by their numbers only
