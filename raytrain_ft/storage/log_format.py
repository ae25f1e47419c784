"""The format of the tensor log: what a record is, and one file of records as its writer makes it.

A file is an Arrow IPC stream with one record batch of one row per record. All columns but the last are its head: the key, what
the tensors are, and two checksums. The last column holds the bytes of all its tensors, one after the other, at the very end of
the batch. The head has a checksum of its own, so that a reader can make a list of what there is without reading the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import xxhash
from torch import Tensor

from raytrain_ft.storage.parts import Parts
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


@dataclass(frozen=True, slots=True, order=True)
class Key:
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

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the record's tensors are these, to the bit; as far as a checksum tells, so none is read."""
        return (self.dtypes, self.shapes, self.checksum) == (*_layout_of(tensors), _checksum(map(_array_of, tensors)))


def _array_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's bytes; it must lie in the CPU's memory."""
    return bytes_of(tensor).numpy()


def _layout_of(tensors: Sequence[Tensor]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return tuple(str(t.dtype) for t in tensors), tuple(tuple(t.shape) for t in tensors)


def _checksum(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    hasher = xxhash.xxh3_64()
    for array in arrays:
        hasher.update(array.data)
    return hasher.intdigest()


# ---------------------------------------------------------------- writing


class Encoder:
    """One file's records, as parts to be written in order."""

    def __init__(self, member: str, compression: Compression | None) -> None:
        metadata = {"format": FORMAT, "member": member, "compression": compression or ""}
        self._schema = SCHEMA.with_metadata(metadata)
        self._compressed = compression is not None
        self._sink = Parts()
        # one thread: the others are the training's
        options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), self._schema, options=options)

    def encode(self, key: Key, incarnation: int, tensors: Sequence[Tensor]) -> list[memoryview]:
        """The parts of a record; the file's own head comes before the first.

        The tensors' bytes are not copied, unless they are compressed or not contiguous.

        Raises:
            ValueError: a record that no reader would take.
        """
        arrays = [_array_of(tensor) for tensor in tensors]
        dtypes, shapes = _layout_of(tensors)
        if key.kind not in get_args(Kind) or any(dtype not in DTYPES for dtype in dtypes):
            raise ValueError(f"{key} with tensors of {dtypes} cannot be logged")
        if len(shapes) + sum(map(len, shapes)) > MAXNUMBERS or sum(map(len, arrays)) > MAX_RECORD_BYTES:
            raise ValueError(f"{key} has too many tensors ({len(shapes)}), or too large ones ({sum(map(len, arrays))} bytes)")
        values = self._write(Head(key, incarnation, dtypes, shapes, _checksum(arrays)), arrays)
        parts = self._sink.taken()  # no reference to a tensor stays here
        if len(arrays) > 1 and not self._compressed and values.nbytes:
            at = next(number for number, part in enumerate(parts) if _address(part) == _address(values))
            parts[at : at + 1] = [array.data for array in arrays if len(array)]
        return parts

    def _write(self, head: Head, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        size = sum(map(len, arrays))
        if len(arrays) == 1:
            values = arrays[0]
        elif self._compressed:
            values = np.concatenate([np.empty(0, np.uint8), *arrays])
        else:
            values = np.empty(size, np.uint8)  # takes the place of the tensors' bytes, which are written instead; never touched
        key = head.key
        numbers = np.array([key.step, key.micro_batch, key.sender, key.receiver, key.replica, head.incarnation], np.int64)
        checksums = np.array([head.checksum, head.digest()], np.uint64)
        ends = pa.py_buffer(np.array([0, size], np.int64))
        columns = [
            *_rows(pa.int64(), numbers),
            *_layout(key.kind, head.dtypes, head.shapes),
            *_rows(pa.uint64(), checksums),
            pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(values)]),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        return values


def _rows(kind: pa.DataType, numbers: np.ndarray[Any, Any]) -> list[pa.Array]:
    """A column of one row for each number. Ten times as fast as `pa.array`, of which each record would need eight."""
    buffer = pa.py_buffer(numbers)
    return [pa.Array.from_buffers(kind, 1, [None, buffer.slice(start, 8)]) for start in range(0, 8 * len(numbers), 8)]


@lru_cache(maxsize=256)
def _layout(kind: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> list[pa.Array]:
    """The columns that are the same in every step."""
    return [
        pa.array([value], HEAD.field(name).type) for name, value in (("kind", kind), ("dtypes", dtypes), ("shapes", shapes))
    ]


def _address(part: memoryview | np.ndarray[Any, Any]) -> int:
    return pa.py_buffer(part).address


# ---------------------------------------------------------------- reading


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
