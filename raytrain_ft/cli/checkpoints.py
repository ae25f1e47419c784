"""`raytrain-ft checkpoints`: lists, verifies, shows and exports checkpoints, whoever wrote them."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import click
import numpy as np
import torch
import xxhash
from rich.table import Table

from raytrain_ft import output
from raytrain_ft.errors import ConfigError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.policy.units import in_bytes
from raytrain_ft.progress import printable
from raytrain_ft.storage import checkpoint, selection
from raytrain_ft.storage.checkpoint import Content, Found
from raytrain_ft.storage.filesystem import Storage, open_storage, within
from raytrain_ft.storage.manifest import FILE as MANIFEST
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.tree import flatten, versions_of
from raytrain_ft.training import objects
from raytrain_ft.training.export import state_dicts, state_of

console = output.console()
LONGEST_VALUE = 200
DAMAGED, UNREAD = 1, 3
"""Exit codes; 2 is click's, of arguments that cannot be used."""
PLACE = click.argument("place", type=Place)
WHICH = click.option("--name", "which", help="Name or step of the checkpoint; default: the newest valid one.")
READ_BACK = {type(None), bool, int, float, complex, str, bytes, bytearray, set, dict, OrderedDict, Counter, list, tuple}
READ_BACK |= {torch.Size, torch.dtype, torch.device}
Command = TypeVar("Command", bound=Callable[..., None])


@click.group()
def checkpoints() -> None:
    """Looks into checkpoints. PLACE is a run's directory, a directory of checkpoints, or a URI of either."""


class _Unread(click.ClickException):
    exit_code = UNREAD


def _clearly(command: Command) -> Command:
    """Errors of the storage are told in a line, without a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (StorageError, ConfigError, OSError) as error:
            kind = _Unread if isinstance(error, UnreachableError) else click.ClickException
            raise kind(printable(str(error))) from error

    return wrapped  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------- the commands


@checkpoints.command("list")
@PLACE
@click.option("--verify", is_flag=True, help="Read them all, and say which are damaged or cannot be read.")
@_clearly
def list_(place: Place, verify: bool) -> None:
    """Lists checkpoints, newest first, with those that broke off or are under way. "abandoned": a later run began anew
    (resume="never"), so none goes on from it."""
    storage = _storage(place)
    counting = selection.counting(storage)
    table = Table("name", "step", "size", "age", "shards", "kept", "state")
    for found in _found(storage):
        manifest, looked = _looked_at(storage, found, whole=verify)
        state = looked.verdict if looked.verdict in ("ok", "incomplete") else str(looked)
        state = "" if state == "ok" and not verify else state
        if found.complete and found.name not in counting:
            state = ", ".join(filter(None, (state, "abandoned")))
        if manifest is None:
            output.row(table, str(found.name), f"{found.name.step:,}", "", "", "", "", state)
        else:
            about = checkpoint.describe(manifest)
            kept = "yes" if manifest.kept else ""
            size, age = in_bytes(about["bytes"]), _age(time.time() - manifest.created)
            output.row(table, str(found.name), f"{found.name.step:,}", size, age, str(about["shards"]), kept, state)
    console.print(table)


@checkpoints.command()
@PLACE
@_clearly
def verify(place: Place) -> None:
    """Reads every byte of every checkpoint. The exit code is 1 if one is damaged; else 3 if storage did not answer for one."""
    storage = _storage(place)
    verdicts: set[str] = set()
    for found in _found(storage):
        looked = _looked_at(storage, found, whole=True)[1]
        shown = looked._replace(verdict="DAMAGED") if looked.verdict == "damaged" else looked
        console.print(f"{found.name}  {shown}", markup=False)
        verdicts.add(looked.verdict)
    sys.exit(DAMAGED if "damaged" in verdicts else UNREAD if "could not be read" in verdicts else 0)


@checkpoints.command()
@PLACE
@WHICH
@_clearly
def show(place: Place, which: str | None) -> None:
    """Shows the tensors of a checkpoint, with a digest (XXH3, 64 bits) of each one's bytes, and its other values."""
    content = _content(_storage(place), which)
    table = Table("tensor", "dtype", "shape", "size", "digest")
    for name, parts in sorted(content.pieces.items()):
        hasher, first = xxhash.xxh3_64(), parts[0].piece
        for part in parts:
            hasher.update(part.data)
        size = sum(len(part.data) for part in parts)
        output.row(table, name, first.dtype.removeprefix("torch."), str(list(first.shape)), in_bytes(size), hasher.hexdigest())
    console.print(str(content.manifest.name), markup=False)
    console.print(table)
    for key, value in content.manifest.values.items():
        text = json.dumps(value)
        shown = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text):,} characters)"
        console.print(f"{printable(key)}: {printable(shown)}", markup=False)


@checkpoints.command()
@PLACE
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@WHICH
@click.option("--format", "kind", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True)
@click.option("--optimizer", is_flag=True, help="With safetensors: the optimizer's tensors too, under optimizer/...")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@_clearly
def export(place: Place, file: Path, which: str | None, kind: str, optimizer: bool, force: bool) -> None:
    """Writes the state to FILE for use without raytrain_ft.

    safetensors: the model's tensors by the names of its state_dict(), and with --optimizer those of the optimizer. The format
    holds tensors only: neither an optimizer nor a scheduler can go on from it.

    torch: all state dicts, {"model": ..., "optimizer": ..., "scheduler": ...}, for torch.load(FILE, weights_only=True) and
    load_state_dict. Each stage of a pipeline has its own optimizer: {"model": ..., "stage-0": {"optimizer": ..., ...}, ...}.
    """
    if file.exists() and not force:
        raise click.ClickException(f"{file} exists: choose another file, or overwrite it with --force")
    if not file.parent.is_dir():
        raise click.ClickException(f"{file.parent} is no directory: make it first, or choose another file")
    content = _content(_storage(place), which)
    partial = file.with_name(f".{uuid4().hex}.partial")  # no longer than most names may be: FILE's may be as long as any
    try:
        if kind == "torch":
            _save_torch(state_dicts(content), partial)
        else:
            _save_safetensors(state_of(content), content.manifest, partial, optimizer)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    console.print(f"{content.manifest.name}: {in_bytes(file.stat().st_size)} to {file}", markup=False)


# ---------------------------------------------------------------- finding


def _storage(place: Place) -> Storage:
    """The directory of checkpoints at a place, or within it."""
    for one in (place, within(place, "checkpoints")):
        storage = open_storage(one)
        if checkpoint.found(storage):
            return storage
    raise click.ClickException(f"{place} holds no checkpoints: give a run's directory, or the directory of its checkpoints")


def _found(storage: Storage) -> list[Found]:
    return checkpoint.found(storage)


class Looked(NamedTuple):
    """What was seen of a checkpoint: in a word (damaged, say), and more about it."""

    verdict: str
    about: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {printable(self.about)}" if self.about else self.verdict


def _looked_at(storage: Storage, found: Found, *, whole: bool) -> tuple[Manifest | None, Looked]:
    """Its manifest, if there is one that can be read, and what is to be said of it.

    Args:
        whole: read all of it, not the manifest alone.
    """
    if not found.complete:
        return None, Looked("incomplete", "it broke off, or is under way")
    manifest = None
    try:
        manifest = checkpoint.read_manifest(storage, found.name)
        if whole:
            checkpoint.read(storage, manifest)
        return manifest, Looked("ok")
    except UnreachableError as error:
        return manifest, Looked("could not be read", str(error))
    except StorageError as error:
        try:  # a run that goes on deletes its old ones, the manifest first
            is_there = storage.size(f"{found.name}/{MANIFEST}") is not None
        except StorageError:
            is_there = True
        return manifest, Looked("damaged", str(error)) if is_there else Looked("gone", "it was deleted meanwhile")


def _content(storage: Storage, which: str | None) -> Content:
    """A checkpoint by its name or step; by default the newest that is whole."""
    if which is None:
        for manifest in selection.select(storage, _warn):
            try:
                return checkpoint.read(storage, manifest)
            except StorageError as error:
                _warn(f"checkpoint {manifest.name} is passed over: {error}")
        raise click.ClickException(f"{storage.uri} holds no checkpoint that can be read")
    for found in _found(storage):
        if found.complete and which in (str(found.name), str(found.name.step)):
            return checkpoint.read(storage, checkpoint.read_manifest(storage, found.name))
    wanted = "no step or name of a checkpoint" if Name.parse(which) is None and not which.isdigit() else "not there"
    raise click.ClickException(f"--name {which} is {wanted}: see `raytrain-ft checkpoints list`")


def _warn(message: str) -> None:
    click.echo(printable(message), err=True)


# ---------------------------------------------------------------- exporting


def _save_torch(state: dict[str, Any], path: Path) -> None:
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


def _save_safetensors(state: dict[str, Any], manifest: Manifest, path: Path, optimizer: bool) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    chosen = _model_of(state, manifest)
    tensors = {name: value for name, value in state[chosen].items() if isinstance(value, torch.Tensor)}
    if others := [str(name) for name in state[chosen] if name not in tensors]:
        _warn(f"left out of {chosen}, for they are no tensors: {', '.join(others)} (--format torch writes all)")
    for name in [name for name in state if optimizer and name.startswith("optimizer")]:
        inner = state[name]
        plain = _is_of_tensors(inner)
        tensors |= {f"{name}/{key}": value for key, value in inner.items()} if plain else flatten(inner, name)[1]
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


def _model_of(state: dict[str, Any], manifest: Manifest) -> str:
    """The name of the model whose tensors are written: "model", whatever else there is and whatever it holds, or the only one.
    That several are there, or none, is no guess to make."""
    modules = [name for name, value in state.items() if _is_module(value) and not name.startswith("optimizer")]
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
        _warn(f"{chosen} is written; left out: {', '.join(others)} (--format torch writes all)")
    return chosen


def _is_module(value: Any) -> bool:
    """Whether it is the state of a module. What get_extra_state() returns may be no tensor: such state has the versions of the
    module's parts all the same."""
    return _is_of_tensors(value) or (_holds_tensors(value) and versions_of(value) is not None)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(one, torch.Tensor) for one in value.values())


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, torch.Tensor) for one in value.values())


# ---------------------------------------------------------------- printing


def _age(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
