"""A checkpoint as state dicts, by the names that the whole model has, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from itertools import chain, count
from typing import Any

from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import open_storage, parent
from raytrain_ft.storage.manifest import FILE, Name
from raytrain_ft.storage.tree import unflatten
from raytrain_ft.training import durable, objects, restore
from raytrain_ft.training.pipeline import name_in_one_piece
from raytrain_ft.training.stored import Stored, aliases_of, check_optimizer, left_out_of, own_values, spread_of

_STAGE = re.compile(r"stage-(?P<number>[0-9]{1,4})/(?P<path>.+)")
_OF_MODEL = ("model", "buffer")
_OF_LAYERS = (*_OF_MODEL, "optimizer")
"""What is stored by the names of a model's layers."""


def open_checkpoint(place: Place) -> Content:
    """The verified content of one checkpoint.

    Args:
        place: its directory, as `Result.checkpoint` names it.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    directory, last = parent(place)
    name, storage = Name.parse(last), open_storage(directory)
    if name is None:
        raise StorageError(
            f"{place} is no checkpoint: give Result.checkpoint, or RUN/checkpoints/ and a name that `raytrain-ft checkpoints "
            "list RUN` shows"
        )
    return checkpoint.read(storage, checkpoint.read_manifest(storage, name))


def state_of(content: Content) -> dict[str, Any]:
    """{"model": state dict, "optimizer": ..., ...} of a checkpoint of either writer. Of the trainer's optimizer it has only the
    tensors, by NAME/KEY.

    Raises:
        StorageError: what it says of its tensors does not fit them.
    """
    if objects.own_name(0, "skeletons") in content.pieces:  # written by raytrain_ft.checkfreq
        skeletons = objects.stored_skeletons(content, 0)
        skeletons.pop(objects.LEFT_OUT, None)  # no load_state_dict would take them
        return {name: objects.put_together(content, skeleton, 0) for name, skeleton in skeletons.items()}
    return _tensors(content, _OF_LAYERS)


def state_dicts(content: Content) -> dict[str, Any]:
    """What `load_state_dict` takes: {"model": ..., "optimizer": ..., "scheduler": ...}, the last if there is one. Each stage of
    a pipeline has an optimizer of its own: {"model": ..., "stage-0": {"optimizer": ..., ...}, "stage-1": ...}.

    Raises:
        StorageError: it lacks something, or what it says of its tensors does not fit them. MismatchError: it is of a kind that
            is not known here.
    """
    if objects.own_name(0, "skeletons") in content.pieces:
        return state_of(content)
    state: dict[str, Any] = {"model": {}} | _tensors(content, _OF_MODEL)
    stages = {int(found["number"]) for path in content.pieces if (found := _STAGE.fullmatch(path))}
    for stage in sorted(stages) or [None]:
        own = _updating(*durable.of_stage(content, stage))
        state |= own if stage is None else {f"stage-{stage}": own}
    return state


def _tensors(content: Content, wanted: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """What the trainer stored by the names of layers, of these kinds; of the model, what a state dict of it has."""
    where = f"{content.manifest.name}/{FILE}"
    spread, aliases = spread_of(content.manifest.values, where), aliases_of(content.manifest.values, where)
    left_out = set(left_out_of(content.manifest.values, where))
    state: dict[str, dict[str, Tensor]] = {}
    for path in content.pieces:  # model/NAME, buffer/NAME, optimizer/NAME/KEY; of a pipeline, stage-N/...
        found = _STAGE.fullmatch(path)
        stage, own = (int(found["number"]), found["path"]) if found else (0, path)
        if found and own == durable.OWN_VALUES:
            values, there = own_values(content, path), f"{content.manifest.name}: {path}"
            for alias, name in aliases_of(values, there).items():
                aliases[name_in_one_piece(alias, stage, spread, there)] = name_in_one_piece(name, stage, spread, there)
            left_out |= {name_in_one_piece(name, stage, spread, there) for name in left_out_of(values, there)}
            continue
        kind, _, name = own.partition("/")
        if kind in wanted:
            tensors = state.setdefault("model" if kind in _OF_MODEL else kind, {})
            tensors[name_in_one_piece(name, stage, spread, where)] = restore.make(content, path)
    model = state.get("model", {})
    for name in left_out:
        model.pop(name, None)
    for alias, name in aliases.items():
        if name not in model:
            raise StorageError(f"{where}: {alias!r} is said to be another name of {name!r}, which is not there")
        model[alias] = model[name]
    return state


def _updating(content: Content, stored: Stored) -> dict[str, Any]:
    """The state dicts of the optimizer, which numbers parameters in the order of its groups, and of the schedule."""
    check_optimizer(stored, content)
    tensor = partial(restore.make, content)
    if len(stored.params) != len(stored.groups):
        raise StorageError(
            f"{content.manifest.name} has {len(stored.groups)} parameter groups, and names the parameters of "
            f"{len(stored.params)}: an earlier version did not store them. Export its tensors: --format safetensors --optimizer"
        )
    numbers = {name: number for number, name in enumerate(chain.from_iterable(stored.params))}
    state: dict[int, dict[str, Any]] = {}
    for path in [*(path for path in content.pieces if path.startswith("optimizer/")), *stored.numbers]:
        name, _, key = path.removeprefix("optimizer/").rpartition("/")
        if name not in numbers:
            raise StorageError(f"{content.manifest.name}: {path} is of no parameter that the optimizer has")
        skeleton = stored.numbers.get(path, {"tensor": path})
        state.setdefault(numbers[name], {})[key] = unflatten(skeleton, tensor)
    settings = unflatten(stored.settings, tensor)
    number = count()
    pairs = zip(settings["groups"], stored.params, strict=True)
    groups = [group | {"params": [next(number) for _ in names]} for group, names in pairs]
    found = {"optimizer": {"state": dict(sorted(state.items())), "param_groups": groups}}
    return found if settings["scheduler"] is None else found | {"scheduler": settings["scheduler"]}
