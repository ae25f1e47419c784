"""State dicts to files for use without raytrain_ft: what torch and safetensors read back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from raytrain_ft.cli import output
from raytrain_ft.storage.manifest import Manifest
from raytrain_ft.storage.tree import flatten, versions_of
from raytrain_ft.training import objects

READ_BACK = {type(None), bool, int, float, complex, str, bytes, bytearray, set, dict, OrderedDict, Counter, list, tuple}
READ_BACK |= {torch.Size, torch.dtype, torch.device}


def save_torch(state: dict[str, Any], path: Path) -> None:
    """Writes all of it, for `torch.load(path, weights_only=True)`.

    Raises:
        click.ClickException: that would not read it back; or it could not be written.
    """
    state = {name: _for_torch(value) for name, value in state.items() if name != objects.GENERATORS}
    for name, value in state.items():
        _check_read_back(value, name)
    try:
        with path.open("wb") as file:  # so that an error of the disk is one
            torch.save(state, file)
    except RuntimeError as error:  # torch ends the file all the same, which fails anew, and tells of that alone
        said = error.__context__ if isinstance(error.__context__, OSError) else str(error).partition("\n")[0]
        raise click.ClickException(f"{path.parent}: the state cannot be written: {said}") from error


def _check_read_back(value: Any, path: str) -> None:
    """Raises ClickException for what `torch.load(weights_only=True)` refuses."""
    if isinstance(value, dict | list | tuple | set) and type(value) in READ_BACK:
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in inner:
            _check_read_back(key, f"{path}/(key {key!r:.80})")
            _check_read_back(one, f"{path}/{key}")
    elif type(value) not in READ_BACK and not isinstance(value, torch.Tensor):
        raise click.ClickException(
            f"{path} is a {type(value).__name__}, which torch.load(weights_only=True) does not read back"
        )


def _for_torch(value: Any) -> Any:
    """What `torch.load(weights_only=True)` reads: numbers and arrays of numpy as those of Python and torch. A float that is
    longer than theirs stays as it is, and is refused afterwards."""
    match value:
        case np.generic():
            return value.item()
        case np.ndarray() if value.dtype.kind in "biufc":
            with suppress(TypeError):
                return torch.from_numpy(value)
        case dict():
            made = {_for_torch(key): _for_torch(one) for key, one in value.items()}
            found: Any = made if isinstance(value, defaultdict) else type(value)(made)  # a Counter would count pairs
            if (versions := getattr(value, "_metadata", None)) is not None:  # of a module's state
                found._metadata = versions
            return found
        case deque() | list():
            return [_for_torch(one) for one in value]
        case tuple() | set() if type(value) in (tuple, set):
            return type(value)(_for_torch(one) for one in value)
    return value


def save_safetensors(state: dict[str, Any], manifest: Manifest, path: Path, optimizer: bool) -> None:
    """Writes the tensors of the model, and with `optimizer` those of the optimizers.

    Raises:
        click.ClickException: there is no such model, or several; the format cannot hold its state; or it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    chosen = _model_of(state, manifest)
    tensors = {name: value for name, value in state[chosen].items() if isinstance(value, torch.Tensor)}
    if others := [str(name) for name in state[chosen] if name not in tensors]:
        output.warn(f"left out of {chosen}, for they are no tensors: {', '.join(others)} (--format torch writes all)")
    if optimizer:
        more = _of_optimizers(state, manifest)
        tensors |= more
        if not more:
            output.warn(f"{manifest.name} holds no tensors of an optimizer")
    seen: set[int] = set()
    for name, value in tensors.items():  # the format has no two names for one tensor, and a strict reader wants both
        tensors[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    try:
        save_file(tensors, path, {"format": "pt", "step": str(manifest.step), "checkpoint": str(manifest.name)})
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:  # KeyError: of a dtype
        if "I/O error" in str(error):  # it has no class of its own
            raise click.ClickException(f"{path.parent}: {error}") from error
        raise click.ClickException(f"safetensors cannot hold this state ({error}): use --format torch") from error


def _of_optimizers(state: dict[str, Any], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of all optimizers, by the paths of their state dicts."""
    found: dict[str, torch.Tensor] = {}
    for name in [name for name in state if _is_optimizer(name, manifest)]:
        inner = state[name]
        plain = _is_of_tensors(inner)
        found |= {f"{name}/{key}": value for key, value in inner.items()} if plain else flatten(inner, name)[1]
    return found


def _is_optimizer(name: str, manifest: Manifest) -> bool:
    """Whether this is the state of an optimizer. checkfreq's objects have any name, and it says which are torch's; of others,
    and of what the trainer wrote, the name alone tells."""
    about = manifest.values.get("objects", {}).get(name, {})
    return "groups" in about or (name.startswith("optimizer") and about.get("class") != "module")


def _model_of(state: dict[str, Any], manifest: Manifest) -> str:
    """The name of the model whose tensors are written: "model", whatever else there is and whatever it holds, or the only one.
    That several are there, or none, is no guess to make."""
    modules = [name for name, value in state.items() if _is_module(value) and not _is_optimizer(name, manifest)]
    if "model" in state:
        if not _holds_tensors(state["model"]):
            raise click.ClickException(f"model in {manifest.name} has no tensors; --format torch writes all that it holds")
        chosen = "model"
    elif len(modules) == 1:
        (chosen,) = modules
    else:
        held = f"several models ({', '.join(modules)}), and none of them is called model" if modules else "no model"
        raise click.ClickException(f"{manifest.name} holds {held}; --format torch writes all that it holds")
    if others := [name for name in modules if name != chosen]:
        output.warn(f"{chosen} is written; left out: {', '.join(others)} (--format torch writes all)")
    return chosen


def _is_module(value: Any) -> bool:
    """Whether it is the state of a module. What get_extra_state() returns may be no tensor: such state has the versions of the
    module's parts all the same."""
    return _is_of_tensors(value) or (_holds_tensors(value) and versions_of(value) is not None)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(one, torch.Tensor) for one in value.values())


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, torch.Tensor) for one in value.values())
