"""What a checkpoint of the trainer holds that is no tensor, checked before any of it is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.errors import StorageError, UnknownFormatError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.policy.sketch import of_records
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.manifest import Manifest
from raytrain_ft.storage.tree import unflatten

UNKNOWN = ""
"""The kind of the schedule in a checkpoint of an earlier version, which does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The values of a checkpoint, read and checked.

    Attributes:
        data: what the position refers to.
        optimizer: the name of its class; groups: its hyper-parameters, in which tensors are empty.
        params: for each of these groups, the names of its parameters; empty if an earlier version did not store them.
        scheduler: the name of the schedule's class; None without one, `UNKNOWN` if that is not stored.
        numbers: what it keeps of a parameter that is no tensor, as skeletons by path.
        settings: skeleton of its groups and of the schedule.
        spread: of which pipeline it is a stage.
    """

    step: int
    position: Position
    loss: float
    data: dict[str, Any]
    optimizer: str
    groups: list[dict[str, Any]]
    params: list[list[str]]
    scheduler: str | None
    numbers: dict[str, Any]
    settings: Any
    spread: dict[str, Any]


def decode(manifest: Manifest, values: Mapping[str, Any]) -> Stored:
    """Reads a checkpoint's values: those of the manifest, and in a pipeline those of the stage.

    Raises:
        UnknownFormatError: they are not what the trainer writes.
    """
    try:
        match values:
            case {
                "step": int(step),
                "position": [int(epoch), int(consumed)],
                "loss": str(loss),
                "data": dict(data),
                "optimizer": str(optimizer),
                "numbers": dict(numbers),
                "settings": dict(settings),
            } if min(step, epoch, consumed) >= 0:
                of_records(data.get("samples", []))
                found = unflatten(settings, lambda path: torch.empty(0))
                groups, _ = found["groups"], found["scheduler"]
                if all(isinstance(group, dict) for group in groups):
                    spread = {"chunks": 1, "ties": []} | {name: values[name] for name in _SPREAD if name in values}
                    return Stored(
                        step=step,
                        position=Position(epoch, consumed, _ranges(values.get("owed", ()))),
                        loss=float.fromhex(loss),
                        data=data,
                        optimizer=optimizer,
                        groups=groups,
                        params=_names(values.get("params", [])),
                        scheduler=_kind(values.get("scheduler", UNKNOWN)),
                        numbers={path: _checked(skeleton) for path, skeleton in numbers.items()},
                        settings=settings,
                        spread=spread,
                    )
    except (StorageError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _unknown(manifest, repr(error)) from error
    raise _unknown(manifest, f"they are {sorted(values)}")


def _unknown(manifest: Manifest, why: str) -> UnknownFormatError:
    """The manifest's hash is right, so nothing is damaged."""
    return UnknownFormatError(
        f"{manifest.name} does not have the values of a training state as this version knows them: {why}. Was it written by "
        "another version?"
    )


_SPREAD = ("stages", "chunks", "cuts", "layers", "ties")


def _ranges(owed: Any) -> tuple[tuple[int, int], ...]:
    ranges = tuple((start, stop) for start, stop in owed)
    if not all(isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop for start, stop in ranges):
        raise ValueError(f"{owed} are no ranges of samples")
    return ranges


def _names(params: Any) -> list[list[str]]:
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in params):
        raise ValueError(f"{params!r:.200} are no names of parameters")
    return list(params)


def _kind(scheduler: Any) -> str | None:
    if not isinstance(scheduler, str | None):
        raise ValueError(f"{scheduler} is no class of a schedule")
    return scheduler


def _checked(skeleton: Any) -> Any:
    unflatten(skeleton, lambda path: torch.empty(0))
    return skeleton


def check_optimizer(stored: Stored, content: Content) -> None:
    """Whether what it keeps is of the parameters in the checkpoint, and all tensors that its values name are there.

    Raises:
        StorageError: not so; a damaged file is named.
    """
    paths = [*(name for name in content.pieces if name.startswith("optimizer/")), *stored.numbers]
    lacking = [path for path in paths if "model" + path.removeprefix("optimizer").rpartition("/")[0] not in content.pieces]

    def look_up(path: str) -> Tensor:
        lacking.extend([path] if path not in content.pieces else [])
        return torch.empty(0)

    for skeleton in (stored.settings, *stored.numbers.values()):
        unflatten(skeleton, look_up)
    if lacking:
        content.verify()  # which says where the damage is, if it is damage
        raise StorageError(f"{content.manifest.name}: the optimizer's {lacking[0]} is not there, or of no parameter")


def stages_of(manifest: Manifest) -> int:
    """How many stages wrote it.

    Raises:
        StorageError: it does not say.
    """
    stages = manifest.values.get("stages", 1)
    if not isinstance(stages, int) or stages < 1:
        raise StorageError(f"{manifest.name} is of {stages!r} stages")
    return stages


def spread_of(values: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """How the model of a file is spread over the stages of a pipeline (see `PipelineSettings.spread`); None if it is not.

    Raises:
        StorageError: its values do not say it; `where` they are.
    """
    if "stages" not in values:
        return None
    found = {"chunks": 1} | {name: values[name] for name in _SPREAD if name in values}
    match found:
        case {"stages": int(stages), "chunks": int(chunks), "cuts": None} if min(stages, chunks) > 0:
            return found
        case {"stages": int(stages), "chunks": int(chunks), "cuts": list(cuts)} if min(stages, chunks) > 0:
            numbers = len(cuts) == stages * chunks - 1 and all(isinstance(cut, int) for cut in cuts)
            if numbers and _are_names(found.get("layers")):
                return found
    raise StorageError(f"{where} does not say how the model is spread over stages: {found!r:.200}")


def _are_names(layers: Any) -> bool:
    """Of the layers of a model that was cut; also none, where they have numbers."""
    return layers is None or (isinstance(layers, list) and all(isinstance(name, str) for name in layers))


def aliases_of(values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Other names of tied weights: {other name: stored name}.

    Raises:
        StorageError: these are no names; `where` they are.
    """
    found = values.get("aliases", {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise StorageError(f"{where}: aliases={found!r:.200} has no names of tensors by other names")
    return dict(found)


def left_out_of(values: Mapping[str, Any], where: str) -> list[str]:
    """The buffers that are stored, and that a state dict of the model does not have.

    Raises:
        StorageError: these are no names; `where` they are.
    """
    found = values.get("left_out", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise StorageError(f"{where}: left_out={found!r:.200} is no list of names")
    return found


def own_values(content: Content, path: str) -> dict[str, Any]:
    """What a stage alone knows, from its piece of a checkpoint that was verified.

    Raises:
        StorageError: it is not there.
    """
    try:
        found = json.loads(b"".join(bytes(part.data) for part in content.pieces[path]))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{content.manifest.name}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{content.manifest.name}: {path} holds no values by name")
    return found
