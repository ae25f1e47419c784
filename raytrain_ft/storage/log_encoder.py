"""The records of a tensor log's file, as its writer makes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from torch import Tensor

from raytrain_ft.storage.columns import bytes_column, integer_column, list_column, text_column
from raytrain_ft.storage.log_format import (
    FORMAT,
    MAX_RECORD_BYTES,
    MAXNUMBERS,
    SCHEMA,
    Checksum,
    Compression,
    Head,
    Key,
    Kind,
    array_of,
    checksum_of,
    layout_of,
    padded,
)
from raytrain_ft.storage.log_pattern import MOST_PATTERNS, Pattern, pattern_of
from raytrain_ft.storage.parts import Parts
from raytrain_ft.storage.tensors import DTYPES

Layout = tuple[Kind, tuple[str, ...], tuple[tuple[int, ...], ...]]
"""What records have in common that differ in their numbers alone."""
MOST_BYTES = 64 * 2**20
"""Of a larger record pyarrow's part is nothing, and a file holds one of them."""


class Encoder:
    """One file's records, as parts to be written in order."""

    def __init__(self, member: str, compression: Compression | None) -> None:
        metadata = {"format": FORMAT, "member": member, "compression": compression or ""}
        self._schema = SCHEMA.with_metadata(metadata)
        self._compressed = compression is not None
        self._sink = Parts()
        self._patterns: dict[Layout, Pattern] = {}
        # one thread: the others are the training's
        options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), self._schema, options=options)

    def encode(
        self, key: Key, incarnation: int, tensors: Sequence[Tensor], checksum: Checksum | None = None
    ) -> list[memoryview]:
        """The parts of a record; the file's own head comes before the first.

        The tensors' bytes are not copied, unless they are compressed or not contiguous.

        Args:
            checksum: of the tensors, if the caller needs it too.

        Raises:
            ValueError: a record that no reader would take.
        """
        arrays = [array_of(tensor) for tensor in tensors]
        dtypes, shapes = layout_of(tensors)
        pattern = self._patterns.get((key.kind, dtypes, shapes))
        if pattern is None:
            _check(key, dtypes, shapes, sum(map(len, arrays)))
        head = Head(key, incarnation, dtypes, shapes, checksum() if checksum is not None else checksum_of(arrays))
        if pattern is None:
            return self._encode_first(head, arrays)
        rest = bytes(pattern.length - pattern.size - sum(map(len, arrays)))
        return [memoryview(pattern.write(head)), *(array.data for array in arrays if len(array)), memoryview(rest)]

    def _encode_first(self, head: Head, arrays: list[np.ndarray[Any, Any]]) -> list[memoryview]:
        """A record as pyarrow writes it. Those after it that look like it are written by their pattern."""
        values = self._write(head, arrays)
        parts = self._sink.taken()  # no reference to a tensor stays here
        if self._compressed:
            return parts
        if len(arrays) > 1 and values.nbytes:
            at = next(number for number, part in enumerate(parts) if _address(part) == _address(values))
            parts[at : at + 1] = [array.data for array in arrays if len(array)]
        if values.nbytes <= MOST_BYTES and len(self._patterns) < MOST_PATTERNS:
            pattern = _pattern(parts, head, padded(values.nbytes))
            if pattern is not None:
                self._patterns[head.key.kind, head.dtypes, head.shapes] = pattern
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
        numbers = (key.step, key.micro_batch, key.sender, key.receiver, key.replica, head.incarnation)
        columns = [
            *(integer_column([number]) for number in numbers),
            *_layout(key.kind, head.dtypes, head.shapes),
            *(integer_column([checksum], pa.uint64()) for checksum in (head.checksum, head.digest())),
            bytes_column(values, [size]),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        return values


@lru_cache(maxsize=256)
def _layout(kind: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> list[pa.Array]:
    """The columns that are the same in every step."""
    sizes = list_column(shapes, integer_column(list(itertools.chain.from_iterable(shapes))))
    return [text_column([kind]), list_column([dtypes], text_column(dtypes)), list_column([shapes], sizes)]


def _address(part: memoryview | np.ndarray[Any, Any]) -> int:
    return pa.py_buffer(part).address


def _check(key: Key, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], size: int) -> None:
    """Raises ValueError: no reader would take this."""
    if key.kind not in get_args(Kind) or any(dtype not in DTYPES for dtype in dtypes):
        raise ValueError(f"{key} with tensors of {dtypes} cannot be logged")
    if len(shapes) + sum(map(len, shapes)) > MAXNUMBERS or size > MAX_RECORD_BYTES:
        raise ValueError(f"{key} has too many tensors ({len(shapes)}), or too large ones ({size} bytes)")


def _pattern(parts: Sequence[memoryview], head: Head, size: int) -> Pattern | None:
    """The pattern of the record that ends with the last of these parts, of which `size` bytes are its tensors'."""
    whole = np.zeros(sum(map(len, parts)), np.uint8)  # where the tensors would be, nothing is ever touched
    reached = 0
    for part in parts:
        stop = max(reached, min(reached + len(part), len(whole) - size))
        whole[reached:stop] = np.frombuffer(part, np.uint8)[: stop - reached]
        reached += len(part)
    source, start = pa.BufferReader(pa.py_buffer(whole)), 0
    message = pa.ipc.read_message(source)
    if message.type == "schema":  # it is the file's first
        start, message = source.tell(), pa.ipc.read_message(source)
    batch = pa.ipc.read_record_batch(message, SCHEMA)
    raw, address = whole[start : len(whole) - size].tobytes(), _address(whole) + start
    return pattern_of(raw, batch, message.body.address, message.body.address - address, head, len(whole) - start)
