"""The manifest of a checkpoint: the JSON file that is written last and makes it one. Whatever has no valid manifest is none."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import xxhash

from raytrain_ft.errors import StorageError

FORMAT = "raytrain_ft-checkpoint-1"
FILE = "manifest.json"
LARGEST = 256 * 2**20
"""Bytes. A longer manifest is refused unread."""
NAME = re.compile(r"step-(\d{9,18})-e(\d{1,9})-i(\d{1,9})")
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


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A checkpoint's name, ordered by age: the step; the writer's epoch (how many have held the lock before); incarnation."""

    step: int
    epoch: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:09d}-e{self.epoch}-i{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name, or None if it is none."""
        found = NAME.fullmatch(text)
        return cls(*map(int, found.groups())) if found else None


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
    """The file's content. Its first field is the hash of all the rest."""
    fields = asdict(manifest)
    return json.dumps({"format": FORMAT, "hash": _digest(fields), **fields}, separators=(",", ":")).encode()


def decode(content: pa.Buffer, where: str) -> Manifest:
    """Reads and verifies a manifest.

    Raises:
        StorageError: it is damaged, or none.
    """
    if content.size > LARGEST:
        raise StorageError(f"{where} has {content.size} bytes: no manifest is that long")
    try:
        fields = json.loads(content.to_pybytes())
        kind, digest = fields.pop("format"), fields.pop("hash")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StorageError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if kind != FORMAT:
        raise StorageError(f"{where} is of format {kind!r}, not {FORMAT}: was it written by another version?")
    if digest != _digest(fields):
        raise StorageError(f"{where} is damaged: its hash differs")
    if fields.keys() != KINDS.keys() or not all(isinstance(fields[name], kind) for name, kind in KINDS.items()):
        raise StorageError(f"{where} does not have the fields of a {FORMAT}")
    try:
        shards = [ShardEntry(int(shard["size"]), [str(block) for block in shard["blocks"]]) for shard in fields.pop("shards")]
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{where} does not describe its shards: {error}") from error
    return Manifest(shards=shards, **fields)


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, separators=(",", ":"), sort_keys=True).encode())
