"""The manifest of a checkpoint: the JSON file that is written last and makes it one. Whatever has no valid manifest is none."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import total_ordering
from typing import Any

import pyarrow as pa
import xxhash

from raytrain_ft.errors import StorageError, UnknownFormatError

FORMAT = "raytrain_ft-checkpoint-1"
FILE = "manifest.json"
LARGEST = 256 * 2**20
"""Bytes. A longer manifest is refused unread."""
MOST = 2**63
"""Of bytes, and of seconds since 1970: none that is true is that large."""
NAME = re.compile(r"step-([0-9]{9,18})-e([0-9]{1,9})-i([0-9]{1,9})")
KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "epoch": int,
    "incarnation": int,
    "shards": list,
    "values": dict,
    "size": int,
    "kept": bool,
    "created": (int, float),
}


@total_ordering
@dataclass(frozen=True, slots=True)
class Name:
    """A checkpoint's name: steps committed; the writer's epoch (how many have held the lock before); its incarnation.

    Ordered by age: a later run, and a later world of it, may have gone back to an earlier step, and what it wrote then counts.
    """

    step: int
    epoch: int = 0
    incarnation: int = 0

    def __lt__(self, other: Name) -> bool:
        return (self.epoch, self.incarnation, self.step) < (other.epoch, other.incarnation, other.step)

    def __str__(self) -> str:
        return f"step-{self.step:09d}-e{self.epoch}-i{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name, or None if it is none. Every name is written in one way only."""
        found = NAME.fullmatch(text)
        name = cls(*map(int, found.groups())) if found else None
        return name if str(name) == text else None


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as the manifest has it: bytes of the file, and the hash (XXH3, 64 bits) of each of its blocks."""

    size: int
    blocks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: steps committed.
        epoch, incarnation: of the writer's lock, and of its world.
        shards: in order; their number is that of the workers that wrote them.
        values: everything that is no tensor, as JSON.
        size: bytes of tensors.
        kept: whether retention leaves it alone (the end of an epoch).
        created: seconds since 1970 by the writer's clock. For people: nothing is decided by it.
    """

    step: int
    epoch: int
    incarnation: int
    shards: list[ShardEntry]
    values: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    kept: bool = False
    created: float = 0.0

    @property
    def name(self) -> Name:
        """The directory's name."""
        return Name(self.step, self.epoch, self.incarnation)


def shard_file(number: int, count: int) -> str:
    """Name of a shard's file. Never taken from a manifest, so a manifest cannot point elsewhere."""
    return f"shard-{number:05d}-of-{count:05d}.arrow"


def encode(manifest: Manifest) -> bytes:
    """The file's content. Its second field is the hash of every byte that comes after it."""
    rest = json.dumps(asdict(manifest), separators=(",", ":")).removeprefix("{").encode()
    return _head(rest) + rest


def decode(content: pa.Buffer, where: str) -> Manifest:
    """Reads and verifies a manifest.

    Raises:
        StorageError: it is damaged, or none; UnknownFormatError: it is whole, and another version wrote it.
    """
    data = content.to_pybytes()
    try:
        fields = json.loads(data)
        kind, _ = fields.pop("format"), fields.pop("hash")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StorageError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(kind, str) or not data.startswith(_head(data[len(_head(b"", kind)) :], kind)):
        raise StorageError(f"{where} is damaged: its hash differs")
    if kind != FORMAT:
        raise UnknownFormatError(
            f"{where} is of format {kind[:80]!r}, not {FORMAT}: another version of raytrain_ft can read it"
        )
    if fields.keys() != KINDS.keys() or not all(isinstance(fields[name], kind) for name, kind in KINDS.items()):
        raise StorageError(f"{where} does not have the fields of a {FORMAT}")
    if not 0 <= fields["created"] < MOST:
        raise StorageError(f"{where} says that it was written at {str(fields['created'])[:80]} s since 1970")
    return Manifest(shards=[decode_entry(shard, where) for shard in fields.pop("shards")], **fields)


def decode_entry(fields: Any, where: str) -> ShardEntry:
    """What describes a shard, from JSON.

    Raises:
        StorageError: it does not.
    """
    match fields:
        case {"size": int(size), "blocks": list(blocks), **rest} if not rest and 0 <= size < MOST:
            if all(isinstance(block, str) for block in blocks):
                return ShardEntry(size, blocks)
    raise StorageError(f"{where} does not describe its shards")


def hash_of(entry: ShardEntry) -> str:
    """XXH3, 64 bits, of what is said of a shard."""
    return xxhash.xxh3_64_hexdigest(json.dumps(asdict(entry)).encode())


def _head(rest: bytes, kind: str = FORMAT) -> bytes:
    return f'{{"format":{json.dumps(kind)},"hash":"{xxhash.xxh3_128_hexdigest(rest)}",'.encode()
