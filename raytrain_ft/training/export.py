"""A checkpoint as state dicts, by the names that the whole model has, whoever wrote it."""

from __future__ import annotations

import re
from typing import Any

from raytrain_ft.errors import StorageError
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import open_storage, parent
from raytrain_ft.storage.manifest import Name
from raytrain_ft.training import durable, objects, restore
from raytrain_ft.training.pipeline import name_in_one_piece
from raytrain_ft.training.stored import own_values

_STAGE = re.compile(r"stage-(?P<number>[0-9]{1,4})/(?P<path>.+)")
_OF_LAYERS = ("model", "buffer", "optimizer")
"""What is stored by the names of a model's layers."""


def open_checkpoint(place: str) -> Content:
    """The verified content of one checkpoint.

    Args:
        place: the path or URI of its directory, as `Result.checkpoint` has it.

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
    """{"model": state dict, "optimizer": ..., ...} of a checkpoint of either writer."""
    if objects.own_name(0, "skeletons") in content.pieces:  # written by raytrain_ft.checkfreq
        skeletons = objects.stored_skeletons(content, 0)
        return {name: objects.put_together(content, skeleton, 0) for name, skeleton in skeletons.items()}
    state: dict[str, Any] = {}
    aliases = dict(content.manifest.values.get("aliases", {}))
    for path in content.pieces:  # the trainer's: model/NAME, buffer/NAME, optimizer/NAME/KEY; of a pipeline, stage-N/...
        stage = _STAGE.fullmatch(path)
        group, _, rest = (path if stage is None else stage["path"]).partition("/")
        if stage is not None:
            number, spread = int(stage["number"]), content.manifest.values
            if group not in _OF_LAYERS:
                own = own_values(content, path) if stage["path"] == durable.OWN_VALUES else {}
                for alias, name in own.get("aliases", {}).items():
                    aliases[name_in_one_piece(alias, number, spread)] = name_in_one_piece(name, number, spread)
                continue
            rest = name_in_one_piece(rest, number, spread)
        state.setdefault({"buffer": "model"}.get(group, group), {})[rest] = restore.make(content, path)
    for alias, name in aliases.items():
        state["model"][alias] = state["model"][name]
    return state
