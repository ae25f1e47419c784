"""The format of the tensor log: what a file and a record in it are, and what the head of one says.

A file is an Arrow IPC stream with one record batch of one row per record. All columns but the last are its head: the key, what
the tensors are, and two checksums. The last column holds the bytes of all its tensors, one after the other, at the very end of
the batch. The head has a checksum of its own, so that a reader can make a list of what there is without reading the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import xxhash
from torch import Tensor

from raytrain_ft.storage.tensors import DTYPES, bytes_of

FORMAT = "raytrain_ft-log-1"
NAME = re.compile(
    r"(?P<member>[A-Za-z0-9][A-Za-z0-9._-]{0,63})-(?P<incarnation>[0-9]{1,18})-(?P<sequence>[0-9]{1,18})"
    r"-(?P<step>[0-9]{1,18})-(?P<receiver>[0-9]{1,18}|all)\.arrow"
)
"""The step is that of the first record. The receiver is that of all: who replays a stage looks at what was sent to it alone."""
FILE_STEPS = 4
"""A file holds records of so many consecutive steps at most: they are deleted together, and found without looking elsewhere."""
HEAD_BYTES = 16 * 2**10
"""All columns but the last fit into it, because of the next bound."""
MAXNUMBERS = 256
"""How many tensors and dimensions a record may have, together."""
MAX_RECORD_BYTES = 16 * 2**30
"""Whoever promises more is not believed."""
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Arrow's mark of the end of a stream: the file was closed, not broken off."""

Kind = Literal["activation", "gradient", "agreed", "tied"]
Compression = Literal["lz4", "zstd"]
NUMBERS = ("step", "micro_batch", "sender", "receiver", "replica", "incarnation")
CHECKSUMS = ("data_xxh3_64", "head_xxh3_64")
HEAD = pa.schema(
    [
        *((name, pa.int64()) for name in NUMBERS),
        ("kind", pa.string()),
        ("dtypes", pa.list_(pa.string())),
        ("shapes", pa.list_(pa.list_(pa.int64()))),
        *((name, pa.uint64()) for name in CHECKSUMS),
    ]
)
SCHEMA = HEAD.append(pa.field("data", pa.large_binary()))


class Key(NamedTuple):
    """What a record is: one crossing of a boundary.

    Attributes:
        micro_batch: -1 for what belongs to the whole step.
        kind: "agreed" is a small float64 vector that all ranks agreed upon (its receiver is -1); "tied" belongs to a parameter
            that several stages share.
        sender, receiver: Stages.
    """

    step: int
    micro_batch: int
    kind: Kind
    sender: int
    receiver: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """All of a record but the bytes of its tensors, and the checksum over those."""

    key: Key
    incarnation: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksum: int

    @property
    def size(self) -> int:
        """Bytes of all the tensors."""
        return sum(math.prod(s) * DTYPES[d].itemsize for d, s in zip(self.dtypes, self.shapes, strict=True))

    def digest(self) -> int:
        """The checksum over this head."""
        key = self.key
        numbers = (key.step, key.micro_batch, key.sender, key.receiver, key.replica, self.incarnation, self.checksum)
        # plain numbers, strings and tuples: each head has one text, and each text is of one head
        return xxhash.xxh3_64_intdigest(repr((*map(int, numbers), key.kind, self.dtypes, self.shapes)).encode())

    def is_of(self, tensors: Sequence[Tensor], checksum: int) -> bool:
        """Whether the record's tensors are these, of this checksum, to the bit; as far as that tells, so none is read."""
        return (self.dtypes, self.shapes, self.checksum) == (*layout_of(tensors), checksum)


def array_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's bytes; it must lie in the CPU's memory."""
    return bytes_of(tensor).numpy()


def layout_of(tensors: Sequence[Tensor]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Their dtypes and shapes."""
    return tuple(str(t.dtype) for t in tensors), tuple(tuple(t.shape) for t in tensors)


def checksum_of(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    """Over their bytes, one after the other."""
    hasher = xxhash.xxh3_64()
    for array in arrays:
        hasher.update(array.data)
    return hasher.intdigest()


class Checksum:
    """That of some tensors, of the CPU, made by whichever thread asks first."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._value: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether it was made."""
        return self._value is not None

    def __call__(self) -> int:
        tensors = self._tensors  # before the look: another thread lets go of them once it has the value
        if self._value is None:
            self._value = checksum_of(map(array_of, tensors))
            self._tensors = ()
        return self._value


def padded(size: int) -> int:
    """Arrow's buffers end at a multiple of 8."""
    return -(-size // 8) * 8


def decode_head(batch: pa.RecordBatch) -> Head:
    """The head of a record, if it is what a writer would have written.

    Raises:
        ValueError: it is not.
    """
    batch.validate(full=True)
    if batch.num_rows != 1 or batch.num_columns < len(HEAD):
        raise ValueError("it is not of one row")
    row = {name: batch.column(number)[0].as_py() for number, name in enumerate(HEAD.names)}
    numbers = [row[name] for name in NUMBERS]
    dtypes, shapes = row["dtypes"], row["shapes"]
    if not all(isinstance(number, int) for number in (*numbers, row["data_xxh3_64"])) or row["kind"] not in get_args(Kind):
        raise ValueError("its key is none")
    if not isinstance(dtypes, list) or not isinstance(shapes, list) or len(dtypes) != len(shapes):
        raise ValueError("it does not say what its tensors are")
    if not all(dtype in DTYPES for dtype in dtypes) or not all(map(_is_shape, shapes)):
        raise ValueError("its tensors are of no dtype or shape that there is")
    key = Key(**{name: row[name] for name in NUMBERS[:-1]}, kind=row["kind"])
    head = Head(key, row["incarnation"], tuple(dtypes), tuple(map(tuple, shapes)), row["data_xxh3_64"])
    if head.digest() != row["head_xxh3_64"]:
        raise ValueError("the checksum of its head differs")
    if head.size > MAX_RECORD_BYTES:
        raise ValueError(f"it promises {head.size} bytes")
    return head


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(n, int) and 0 <= n < 2**62 for n in shape)
