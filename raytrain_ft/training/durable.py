"""The training state as a checkpoint holds it: tensors by name, everything else as JSON; and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.errors import MismatchError
from raytrain_ft.policy.sampling import Position, samples_in
from raytrain_ft.policy.sketch import of_records, unlike
from raytrain_ft.storage.checkpoint import Content, differences
from raytrain_ft.storage.manifest import Manifest
from raytrain_ft.storage.tree import flatten, json_tensor, unflatten
from raytrain_ft.training.placing import on_devices_of
from raytrain_ft.training.restore import allocate, described, fill
from raytrain_ft.training.settings import PipelineSettings
from raytrain_ft.training.state import TrainingState, at_home, kept, plain
from raytrain_ft.training.stored import UNKNOWN, Stored, check_optimizer, decode, own_values, stages_of


def capture(
    state: TrainingState, data: dict[str, Any], records: list[dict[str, Any]], pipeline: PipelineSettings | None = None
) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """All tensors by name, and everything else: what a checkpoint holds.

    What the next forward pass may change (buffers) is copied here; what only an update changes is not.

    Args:
        data: what the position of the data refers to (`Loader.data`).
        records: kept as they are.
        pipeline: of which `state` is a stage.

    Raises:
        ConfigError: the optimizer or the schedule keeps something that cannot be stored.
    """
    params, buffers = list(state.model.named_parameters()), list(state.model.named_buffers())
    tensors: list[tuple[str, Tensor]] = [(f"model/{name}", p) for name, p in params]
    tensors += [(f"buffer/{name}", buffer.detach().clone()) for name, buffer in buffers]
    numbers: dict[str, Any] = {}
    for name, p in params:
        for key, value in kept(state.optimizer, name, p):
            path = f"optimizer/{name}/{key}"
            if isinstance(value, Tensor):
                tensors.append((path, value))
            else:
                numbers[path] = plain(value, path)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    scheduler = state.scheduler.state_dict() if state.scheduler else None
    settings, more = flatten({"groups": groups, "scheduler": scheduler})
    tensors += [(path, value.detach().clone()) for path, value in more.items()]
    own = {
        "optimizer": type(state.optimizer).__name__,
        "scheduler": _kind(state.scheduler),
        "params": _params(state.optimizer, params),
        "numbers": numbers,
        "settings": settings,
    }
    shown = state.model.state_dict(keep_vars=True)
    own |= {"aliases": found} if (found := _aliases(shown, [*params, *buffers])) else {}
    own |= {"left_out": names} if (names := _left_out(shown, buffers)) else {}
    values = {
        "step": state.step,
        "position": [state.position.epoch, state.position.consumed],
        "owed": state.position.owed,
        "data": data,
        "loss": state.loss.hex(),
        "records": records,
    }
    if pipeline is None:
        return tensors, values | own
    # every stage's names bear its number, and so do its values, which are not the same on all workers
    tensors.append((OWN_VALUES, json_tensor(own)))
    return [(f"{_prefix(state.stage)}{name}", tensor) for name, tensor in tensors], values | pipeline.spread


def _kind(scheduler: Any) -> str | None:
    """Of what class a schedule is, and of what classes are those that it is put together of."""
    if scheduler is None:
        return None
    parts = getattr(scheduler, "_schedulers", None)
    inner = f"({', '.join(str(_kind(part)) for part in parts)})" if isinstance(parts, list | tuple) else ""
    return f"{type(scheduler).__name__}{inner}"


def _params(optimizer: torch.optim.Optimizer, params: Sequence[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups; "" for what is not of the model."""
    names = {id(p): name for name, p in params}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _aliases(shown: Mapping[str, Any], stored: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    """Other names that a state dict has for a tensor: tied weights are stored once."""
    names = {id(tensor): name for name, tensor in stored}
    of = ((alias, names.get(id(tensor), alias)) for alias, tensor in shown.items())
    return {alias: name for alias, name in of if alias != name}


def _left_out(shown: Mapping[str, Any], buffers: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Buffers that a state dict does not have (`persistent=False`). They are stored: the next step may depend on them."""
    tensors = {id(tensor) for tensor in shown.values()}
    return [name for name, buffer in buffers if name not in shown and id(buffer) not in tensors]


OWN_VALUES = "values"
"""In a pipeline, what a stage alone knows, as JSON in bytes."""


def _prefix(stage: int | None) -> str:
    return "" if stage is None else f"stage-{stage}/"


def holds(manifest: Manifest, stage: int | None) -> Callable[[int], bool]:
    """Which shards of a checkpoint hold the state of this stage, by number; all of them without a pipeline."""
    stages = stages_of(manifest)
    return lambda number: stage is None or number % stages == stage


def of_stage(content: Content, stage: int | None) -> tuple[Content, Stored]:
    """What a checkpoint holds of a stage, by the stage's own names, or of a model in one piece (None); and its values.

    Raises:
        MismatchError: it is of another number of stages, or not of the trainer. StorageError: it is damaged.
    """
    prefix, values = _prefix(stage), content.manifest.values
    if "kind" in values:
        raise _mismatch(content.manifest, [f"it is of another kind, {values['kind']}: only the program that wrote it reads it"])
    if not prefix:
        if "stages" in values:
            raise _mismatch(content.manifest, [f"{values['stages']} stages of a pipeline in the checkpoint, none here"])
        return content, decode(content.manifest, values)
    if f"{prefix}{OWN_VALUES}" not in content.pieces:
        there = values.get("stages", "no")
        raise _mismatch(
            content.manifest, [f"{there} stages of a pipeline in the checkpoint, and not number {stage} of this run"]
        )
    if not content.verified:
        content.verify()
    own = own_values(content, f"{prefix}{OWN_VALUES}")
    part = Content(content.manifest, content.pieces.under(prefix, but=OWN_VALUES), content.files, content.check)
    part.verified = True
    return part, decode(content.manifest, values | own)


def _weights(state: TrainingState) -> list[tuple[str, Tensor]]:
    return [(f"model/{name}", p.data) for name, p in state.model.named_parameters()]


def _buffers(state: TrainingState) -> list[tuple[str, Tensor]]:
    return [(f"buffer/{name}", buffer.detach()) for name, buffer in state.model.named_buffers()]


@torch.no_grad()
def restore(
    state: TrainingState,
    content: Content,
    data: dict[str, Any],
    override: Sequence[str] = (),
    pipeline: PipelineSettings | None = None,
) -> None:
    """Takes over the state of a checkpoint.

    Args:
        data: what the position of the data refers to in this run (`Loader.data`).
        override: "optimizer" keeps this run's optimizer and schedule as they are, both of them, if one of the checkpoint's is
            of another kind, or the parameters are in other groups there; "dataset" goes on with other data, from its
            beginning if the position does not exist there.
        pipeline: of which `state` is a stage.

    Raises:
        MismatchError: it is of another model, optimizer, schedule or dataset, every difference is listed; or a pipeline would
            get a smaller batch at the end of its epoch. Nothing was changed.
        StorageError: it is damaged, or lacks something. Unless the state is still `filled`, its tensors may hold anything by
            now: it is to be restored from another checkpoint, filled by another worker, or built anew.
    """
    content, stored = of_stage(content, state.stage)
    own = dict([*_weights(state), *_buffers(state)])
    theirs = {name: what for name, what in content.pieces.described().items() if name.startswith(("model/", "buffer/"))}
    other_optimizer, other_data = _other_optimizer(state, stored, theirs), _other_data(stored, data)
    lines = [*_otherwise_spread(stored, pipeline), *differences(described(own), theirs)]
    lines += other_optimizer if "optimizer" not in override else []
    lines += other_data if "dataset" not in override else []
    if lines:
        content.verify()  # damage is no difference
        raise _mismatch(content.manifest, lines)
    position = _position(stored.position, data)
    if pipeline is not None and (smaller := _smaller_batch(position, stored, data)):
        content.verify()
        raise MismatchError(f"checkpoint {content.manifest.name} does not go with this run; nothing was loaded: {smaller}")
    if not other_optimizer:
        check_optimizer(stored, content)
    more = {} if other_optimizer else {name: allocate(content, name) for name in content.pieces if name not in own}
    state.filled = False
    fill(own | more, content)
    if not other_optimizer:
        _restore_optimizer(state, stored, more)
    state.step, state.position, state.loss = stored.step, position, stored.loss
    state.agreed = None
    for bucket in state.buckets:
        bucket.version, bucket.gradient, bucket.dirty = state.step, None, False
    state.filled, state.restated = True, False


def _position(stored: Position, data: dict[str, Any]) -> Position:
    exists = all(stop <= data["dataset_size"] for _, stop in stored.owed)
    exists &= stored.consumed <= data["dataset_size"] + samples_in(stored.owed)
    return stored if exists else Position(stored.epoch)


def _smaller_batch(position: Position, stored: Stored, data: dict[str, Any]) -> str:
    """Why the epoch of this position ends with a batch that a pipeline cannot take; empty if it does not. `prepare` has looked
    at whole epochs: that is not enough where the batches before the position had another size."""
    size, batch = data["dataset_size"], data["global_batch_size"]
    left = size + samples_in(position.owed) - position.consumed
    if data["drop_last"] or left % batch == 0:
        return ""
    return (
        f"it is of the midst of an epoch, of which {left} samples are left. global_batch_size={batch} does not divide them, "
        "and a pipeline needs micro-batches of one size, also in the last batch of an epoch. Set drop_last=True, choose a "
        f"batch that divides both {left} and the {size} samples of a whole epoch, or go on as the checkpoint was made "
        f"(global_batch_size={stored.data.get('global_batch_size')}) until the epoch ends, and change it there"
    )


def _mismatch(manifest: Manifest, lines: list[str]) -> MismatchError:
    shown = "\n  ".join(lines[:100])
    return MismatchError(
        f"checkpoint {manifest.name} does not belong to this run; nothing was loaded:\n  {shown}\n"
        'Use another run name, CheckpointConfig(resume="never"), or say what may differ: override=("optimizer", "dataset").'
    )


def _other_optimizer(state: TrainingState, stored: Stored, theirs: Container[str]) -> list[str]:
    """What of the optimizer and the schedule is of another kind. `theirs`: of what model it is, by its tensors' names."""
    kinds = [("optimizer", stored.optimizer, type(state.optimizer).__name__)]
    kinds += [("scheduler", stored.scheduler, _kind(state.scheduler))] if stored.scheduler != UNKNOWN else []
    lines = [f"{what} {there} in the checkpoint, {here} here" for what, there, here in kinds if there != here]
    there, here = len(stored.groups), len(state.optimizer.param_groups)
    if there != here:
        return [*lines, f"{there} parameter groups in the checkpoint, {here} here"]
    if not stored.params:
        return lines
    before, now = _group_of(stored.params), _group_of(_params(state.optimizer, list(state.model.named_parameters())))
    names = [name for name, _ in state.model.named_parameters() if f"model/{name}" in theirs]  # others differ anyway
    return lines + [
        f"{name} is of parameter group {before.get(name)} in the checkpoint, {now.get(name)} here"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _group_of(params: list[list[str]]) -> dict[str, int]:
    return {name: number for number, names in enumerate(params) for name in names}


def _otherwise_spread(stored: Stored, pipeline: PipelineSettings | None) -> list[str]:
    """Stages that are cut otherwise, or share something else, may have the same names."""
    if pipeline is None:
        return []
    here = pipeline.spread
    there = {"layers": here["layers"]} | stored.spread  # an earlier version did not store what they are called
    return [
        f"{name} of the pipeline: {there.get(name)} in the checkpoint, {value} here"
        for name, value in here.items()
        if there.get(name) != value
    ]


def _other_data(stored: Stored, data: dict[str, Any]) -> list[str]:
    lines = [
        f"{name} {stored.data.get(name)} in the checkpoint, {data.get(name)} here"
        for name in sorted((stored.data.keys() | data.keys()) - {"samples"})
        if stored.data.get(name) != data.get(name)
    ]
    if lines:
        return lines  # in another order, other samples were looked at
    found = unlike(of_records(stored.data.get("samples", [])), of_records(data.get("samples", [])))
    return [f"dataset of the same length with other content: {found}"] if found else []


def _restore_optimizer(state: TrainingState, stored: Stored, tensors: dict[str, Tensor]) -> None:
    by_name = {f"optimizer/{name}": p for name, p in state.model.named_parameters()}
    state.optimizer.state.clear()
    settings = unflatten(stored.settings, tensors.__getitem__)
    for group, there in zip(state.optimizer.param_groups, settings["groups"], strict=True):
        group.update(on_devices_of(there, group))  # first: they say where a counter belongs (see `at_home`)
    for path in [*(name for name in tensors if name.startswith("optimizer/")), *stored.numbers]:
        prefix, _, key = path.rpartition("/")
        p = by_name[prefix]
        if path in stored.numbers:
            state.optimizer.state[p][key] = unflatten(stored.numbers[path], tensors.__getitem__)
        else:
            state.optimizer.state[p][key] = at_home(state.optimizer, p, key, tensors[path])
    if state.scheduler is not None and settings["scheduler"] is not None:
        state.scheduler.load_state_dict(settings["scheduler"])
