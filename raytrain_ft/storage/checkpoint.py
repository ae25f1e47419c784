"""Checkpoints in a directory: written shard by shard, committed by a manifest, verified before they are believed.

    checkpoints/
      writer.json                        who may write here (see `lock`)
      step-000000120-e1-i3/
        shard-00000-of-00002.arrow       one per worker
        shard-00000-of-00002.json        size and hashes of that file: it is whole and durable
        manifest.json                    written last: from here on it is a checkpoint

A kill or a power cut at any instruction leaves the checkpoint before this one untouched, because nothing is ever written into a
committed one, and it is deleted only after the next is committed (CheckFreq, sections 3.1 and 4.4). The last but one is what a
reader falls back to when the last is damaged.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from raytrain_ft.errors import AbsentError, StorageError, UnreachableError
from raytrain_ft.storage import manifest as manifests
from raytrain_ft.storage import shard as shards
from raytrain_ft.storage.filesystem import LocalStorage, Storage, check_size
from raytrain_ft.storage.manifest import Manifest, Name, ShardEntry, shard_file
from raytrain_ft.storage.pieces import Pieces
from raytrain_ft.storage.shard import Part
from raytrain_ft.storage.small import read_small

A = TypeVar("A")
T = TypeVar("T")
POLL_S, FAR_POLL_S = 0.01, 0.5
"""How often it is looked whether the shards of others are there. Elsewhere than on this machine a look is a request, which is
paid for, and of which an object store takes so many."""
AT_ONCE = 16
"""Questions to storage at one time, where there are many: an object store takes a tenth of a second for each."""
READ_S, AGAIN_S = 30.0, 1.0
"""How long storage that does not answer is asked again, and how often; less than any phase of a recovery may take. It counts
from the first failure: what takes long to read takes long to fail, and is read once more all the same."""
MARK_S = 5.0
"""A mark may be of an attempt that was left out, and its worker about to try again: from when its shard is waited for, it has
so long to take the mark back."""
NOTE = re.compile(r"shard-[0-9]+-of-[0-9]+\.json")


# ---------------------------------------------------------------- writing


def write_shard(storage: Storage, name: Name, number: int, count: int, parts: Sequence[memoryview]) -> ShardEntry:
    """Writes one worker's shard, and then the note that says that it is there.

    Args:
        parts: of the file (`shard.encode`).

    Raises:
        StorageError: it could not be written; nothing that was there before is changed. A mark says so to who waits for it,
            where that can be made: it is empty, for perhaps there is no room.
    """
    file = f"{name}/{shard_file(number, count)}"
    hashed = shards.Hashed(parts)
    if number != 0:
        with suppress(StorageError):  # of an attempt that was left out, as it may be at the end of a run, which tries again
            storage.delete(_mark(file))
    try:
        check_size(storage, sum(part.nbytes for part in parts))
        storage.put(file, hashed)
        entry = ShardEntry(hashed.size, hashed.blocks())
        note = asdict(entry) | {"hash": manifests.hash_of(entry)}
        storage.put(_note(file), [memoryview(json.dumps(note).encode())])
    except StorageError:
        mark_failed(storage, name, number, count)
        raise
    return entry


def mark_failed(storage: Storage, name: Name, number: int, count: int) -> None:
    """Says to who waits for this shard that it will not come, where that can be said. Nobody waits for number 0."""
    if number != 0:
        with suppress(StorageError):
            storage.claim(_mark(f"{name}/{shard_file(number, count)}"))


def await_shards(
    storage: Storage, name: Name, own: ShardEntry, count: int, timeout_s: float, check: Callable[[], None]
) -> list[ShardEntry]:
    """Waits until the other workers' shards are there; `own` is number 0.

    Args:
        check: called again and again while some are missing; may raise to leave the wait. Those that are all there make a
            checkpoint, whatever became of who wrote them.

    Raises:
        StorageError: they are not all there in time, or will not come; or storage did not answer for long.
    """
    entries = {0: own}
    pause = POLL_S if isinstance(storage, LocalStorage) else FAR_POLL_S
    began = time.monotonic()
    deadline = began + timeout_s
    while missing := [number for number in range(count) if number not in entries]:
        there = patiently(partial(storage.names, str(name)), check)
        for number in missing:
            file = shard_file(number, count)
            if _note(file) in there:
                entries[number] = patiently(partial(_read_note, storage, f"{name}/{_note(file)}"), check)
            elif _mark(file) in there and time.monotonic() > began + MARK_S:  # which has not been taken back
                raise StorageError(f"{name}: its worker could not write shard {number} of {count}")
        if len(entries) < count:
            check()
            if time.monotonic() > deadline:
                raise StorageError(f"{name}: shards {missing} of {count} did not come within {timeout_s:g} s")
            time.sleep(pause)
    return [entries[number] for number in range(count)]


def commit(storage: Storage, manifest: Manifest) -> None:
    """Makes it a checkpoint.

    Raises:
        StorageError: it could not be written; or it was given up meanwhile (see `give_up`) or is not as it was written, and is
            none.
    """
    file = f"{manifest.name}/{manifests.FILE}"
    storage.put(file, [memoryview(manifests.encode(manifest))])
    lacking = _lacking(storage, manifest)
    if lacking:
        storage.delete(file)
        raise StorageError(f"{manifest.name} is not committed: {lacking}")


def _lacking(storage: Storage, manifest: Manifest) -> str:
    """What it consists of and is not there as it was written, perhaps because somebody has begun to delete it, in words."""
    count = len(manifest.shards)
    files = [f"{manifest.name}/{shard_file(number, count)}" for number in range(count)]
    for file, entry in zip(files, manifest.shards, strict=True):
        size = storage.size(file)
        if size is not None and size != entry.size:
            return f"{file} has {size} bytes, and {entry.size} were written: it was cut short or replaced"
        if size is None:
            return f"{file} is gone: it was given up for a later one"
    return "" if storage.size(_note(files[0])) is not None else "it was given up for a later one"


def _note(file: str) -> str:
    return file.removesuffix(".arrow") + ".json"


def _mark(file: str) -> str:
    """What says that this shard could not be written."""
    return f"{file.removesuffix('.arrow')}.failed"


def _read_note(storage: Storage, note: str) -> ShardEntry:
    try:
        fields = json.loads(read_small(storage, note, manifests.LARGEST) or b"")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{note} is damaged: {error}") from error
    said = fields.pop("hash", None) if isinstance(fields, dict) else None  # earlier versions wrote none
    entry = manifests.decode_entry(fields, note)
    if said not in (None, manifests.hash_of(entry)):  # or the manifest would say it, and nobody could read the checkpoint
        raise StorageError(f"{note} is damaged: its hash differs")
    if shards.count_blocks(entry.size) != len(entry.blocks):
        raise StorageError(f"{note} is damaged: it has {len(entry.blocks)} hashes for {entry.size} bytes")
    return entry


# ---------------------------------------------------------------- finding


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's directory: complete if its manifest is there."""

    name: Name
    complete: bool


def found(storage: Storage) -> list[Found]:
    """The checkpoints of a directory, newest first, those that are under way or broke off included. Anything else that lies
    there is passed over."""
    return list(looked_at(storage, names(storage)))


def looked_at(storage: Storage, names: Sequence[Name]) -> Iterator[Found]:
    """What these directories are, in order. There may be thousands, and whoever needs no more of them leaves off."""

    def look(name: Name) -> Found:
        return Found(name, storage.size(f"{name}/{manifests.FILE}") is not None)

    return map(look, names) if len(names) < AT_ONCE else side_by_side(look, names)


def side_by_side(ask: Callable[[A], T], of: Sequence[A]) -> Iterator[T]:
    """What storage answers, in order. It is asked for the first one alone, for mostly no other is wanted; then for some at a
    time, and for ever more."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="questions")
    try:
        yield from map(ask, of[:1])
        begin, count = 1, AT_ONCE
        while begin < len(of):
            yield from pool.map(ask, of[begin : begin + count])
            begin, count = begin + count, 2 * count
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def names(storage: Storage) -> list[Name]:
    """Theirs, newest first."""
    return sorted(filter(None, map(Name.parse, storage.names())), reverse=True)


def read_manifest(storage: Storage, name: Name) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        AbsentError: it is not there. StorageError: it is damaged, or of another checkpoint.
    """
    where = f"{name}/{manifests.FILE}"
    size = storage.size(where)
    if size is None:
        raise AbsentError(f"{where} is not there, or no file")
    if size > manifests.LARGEST:
        raise StorageError(f"{where} has {size} bytes, and {manifests.LARGEST} at most if raytrain_ft wrote it")
    manifest = manifests.decode(storage.view(where), where)
    if manifest.name != name:
        raise StorageError(f"{where} is of {manifest.name}: files were moved")
    return manifest


# ---------------------------------------------------------------- reading


def patiently(read: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """What is read, for which storage that fails is asked again and again: it may answer soon, and what is damaged stays so. Of
    what has several parts, each is to be read so by itself: else none of those that came counts when one has failed.

    Args:
        check: called between two attempts; may raise to leave.

    Raises:
        StorageError: of the last attempt.
    """
    deadline: float | None = None
    while True:
        try:
            return read()
        except UnreachableError:
            now = time.monotonic()
            deadline = now + READ_S if deadline is None else deadline
            if now + AGAIN_S > deadline:
                raise
        check()
        time.sleep(AGAIN_S)


def nothing() -> None:
    """Nobody wants to leave."""


class Mapped(NamedTuple):
    """A shard's file, and the hashes of its blocks."""

    file: str
    buffer: pa.Buffer
    blocks: list[str]


class Content:
    """The tensors of one checkpoint. Bytes are mapped, and copied only where the caller puts them.

    Attributes:
        pieces: by tensor, its pieces in order, each with its bytes.
        files: what they lie in; none if they lie in memory.
        check: called again and again while they are read; may raise to leave that.
        verified: whether all of `files` is as it was written. Before that nothing here may be believed.
    """

    def __init__(
        self,
        manifest: Manifest,
        pieces: Pieces,
        files: Sequence[Mapped] = (),
        check: Callable[[], None] = nothing,
    ) -> None:
        self.manifest = manifest
        self.pieces = pieces
        self.files = files
        self.check = check
        self.verified = not files

    def verify(self, hashed: Callable[[int, int], None] | None = None) -> None:
        """Hashes every byte of the files.

        Args:
            hashed: see `shard.verify`: may copy what it is told of, which is of use only if this does not raise.

        Raises:
            StorageError: naming the file, and where in it the first damaged block begins.
        """

        def seen(start: int, stop: int) -> None:
            self.check()
            if hashed is not None:
                hashed(start, stop)

        for file, buffer, blocks in self.files:
            bad = shards.verify(buffer, blocks, seen)
            if bad is not None:
                raise StorageError(f"{file} is damaged at or after byte {bad * shards.BLOCK_BYTES}: its hash differs")
        self.verified = True


def read(storage: Storage, manifest: Manifest) -> Content:
    """Maps and verifies all shards of a checkpoint.

    Raises:
        StorageError: naming the file, and where in it the first damaged block begins.
    """
    content = map_shards(storage, manifest)
    content.verify()
    return content


def map_shards(
    storage: Storage,
    manifest: Manifest,
    wanted: Callable[[int], bool] = lambda number: True,
    check: Callable[[], None] = nothing,
) -> Content:
    """Maps the shards of a checkpoint, for `restore.fill` to verify while it copies them. Storage that fails is asked again.

    Args:
        wanted: whether to look at a shard, by its number. Each tensor must be in these shards, or in the others.
        check: see `Content`.

    Raises:
        AbsentError: a file is not there. StorageError: naming the file, if it was cut short or what it says of its tensors
            cannot be read.
    """
    count = len(manifest.shards)
    files: list[Mapped] = []
    for number in filter(wanted, range(count)):
        check()
        file, entry = f"{manifest.name}/{shard_file(number, count)}", manifest.shards[number]
        files.append(patiently(partial(_mapped, storage, file, entry), check))
    content = Content(manifest, Pieces([]), files, check)
    try:
        content.pieces = _find_pieces(content)
    except StorageError:
        content.verify()  # which says where the damage is, if it is damage
        raise
    return content


def _mapped(storage: Storage, file: str, entry: ShardEntry) -> Mapped:
    size = storage.size(file)
    if size is None:
        raise AbsentError(f"{file} is not there, or no file")
    if size != entry.size:
        raise StorageError(f"{file} has {size} bytes, its manifest says {entry.size}: it was cut short or replaced")
    if shards.count_blocks(entry.size) != len(entry.blocks):
        raise StorageError(f"{file}: its manifest has {len(entry.blocks)} hashes for {entry.size} bytes")
    return Mapped(file, storage.view(file), entry.blocks)


def _find_pieces(content: Content) -> Pieces:
    found = Pieces([rows for file, buffer, _ in content.files for rows in shards.decode(buffer, file)])
    for name in found.cut():
        _check_whole(content.manifest, name, found[name])
    return found


def _check_whole(manifest: Manifest, name: str, parts: list[Part]) -> None:
    """A tensor's pieces must follow each other without a gap and agree on what it is."""
    parts.sort(key=lambda part: part.piece.start)
    first, reached = parts[0].piece, 0
    for piece, _, _ in parts:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape) or piece.start != reached:
            raise StorageError(f"{manifest.name}: the pieces of tensor {name} do not fit together")
        reached += piece.size


# ---------------------------------------------------------------- telling of one


Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""{name: (dtype, shape)}"""


def differences(wanted: Described, there: Described) -> list[str]:
    """Every way in which the tensors of a checkpoint are not those that are wanted."""
    lines = [f"{name} is missing in the checkpoint" for name in wanted.keys() - there.keys()]
    lines += [f"{name} is in the checkpoint only" for name in there.keys() - wanted.keys()]
    lines += [
        f"{name} is {there[name][0]} {list(there[name][1])} in the checkpoint, {wanted[name][0]} {list(wanted[name][1])} here"
        for name in wanted.keys() & there.keys()
        if wanted[name] != there[name]
    ]
    return sorted(lines)


def describe(manifest: Manifest) -> dict[str, Any]:
    """A line of a listing."""
    return {
        "name": str(manifest.name),
        "step": manifest.step,
        "bytes": sum(shard.size for shard in manifest.shards),
        "shards": len(manifest.shards),
        "kept": manifest.kept,
        "created": manifest.created,
    }
