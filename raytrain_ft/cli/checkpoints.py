"""`raytrain-ft checkpoints`: lists, verifies, shows and exports checkpoints, whoever wrote them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import click
import xxhash
from rich.table import Table

from raytrain_ft.cli import output
from raytrain_ft.cli.exporting import save_safetensors, save_torch
from raytrain_ft.errors import MAY_BE_WHOLE, ConfigError, StorageError
from raytrain_ft.places import Place
from raytrain_ft.policy.units import in_bytes
from raytrain_ft.progress import printable
from raytrain_ft.storage import checkpoint, selection
from raytrain_ft.storage.checkpoint import Content, Found
from raytrain_ft.storage.filesystem import Storage, open_storage, within
from raytrain_ft.storage.manifest import FILE as MANIFEST
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.training.export import state_dicts, state_of

console = output.console()
LONGEST_VALUE = 200
DAMAGED, UNUSABLE, UNREAD = 1, 2, 3
"""Exit codes; the second is click's, of arguments that cannot be used."""
PLACE = click.argument("place", type=Place)
WHICH = click.option("--name", "which", help="Name or step of the checkpoint; default: the newest valid one.")
Command = TypeVar("Command", bound=Callable[..., None])


@click.group()
def checkpoints() -> None:
    """Looks into checkpoints. PLACE is a run's directory, a directory of checkpoints, or a URI of either."""


class _Unread(click.ClickException):
    exit_code = UNREAD


class _Unusable(click.ClickException):
    exit_code = UNUSABLE


def _clearly(command: Command) -> Command:
    """Errors of the storage are told in a line, without a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (StorageError, ConfigError, OSError) as error:
            others = _Unusable if isinstance(error, ConfigError) else click.ClickException
            kind = _Unread if isinstance(error, MAY_BE_WHOLE) else others
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
    """Reads every byte of every checkpoint. The exit code is 1 if one is damaged; else 3 if one could not be read: storage
    did not answer, or another version of raytrain_ft wrote it. It is 2 if PLACE holds none."""
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
@click.option("--optimizer", is_flag=True, help="With safetensors: the optimizer's tensors too, under its name/...")
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
            save_torch(state_dicts(content), partial)
        else:
            save_safetensors(state_of(content), content.manifest, partial, optimizer)
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
    raise _Unusable(f"{place} holds no checkpoints: give a run's directory, or the directory of its checkpoints")


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
    except MAY_BE_WHOLE as error:
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
        for manifest in selection.select(storage, output.warn):
            try:
                return checkpoint.read(storage, manifest)
            except StorageError as error:
                output.warn(f"checkpoint {manifest.name} is passed over: {error}")
        raise click.ClickException(f"{storage.uri} holds no checkpoint that can be read")
    for found in _found(storage):
        if found.complete and which in (str(found.name), str(found.name.step)):
            return checkpoint.read(storage, checkpoint.read_manifest(storage, found.name))
    wanted = "no step or name of a checkpoint" if Name.parse(which) is None and not which.isdigit() else "not there"
    raise click.ClickException(f"--name {which} is {wanted}: see `raytrain-ft checkpoints list`")


# ---------------------------------------------------------------- printing


def _age(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
