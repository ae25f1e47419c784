"""Reading and writing the head of a record that looks like one before it, without pyarrow.

The records of an edge differ in their numbers alone. To read the head of each pyarrow takes 0.13 ms, this 0.02 ms, and a replay
looks at the heads of everything that all stages logged in the steps that it computes again. To write one it takes as much, in
which nothing else of the training process runs.
"""

from __future__ import annotations

import itertools
import struct
from operator import itemgetter

import pyarrow as pa

from raytrain_ft.storage.log_format import CHECKSUMS, HEAD, HEAD_BYTES, NUMBERS, Head, Key

MOST_PATTERNS = 8
"""An edge needs two, and what is agreed upon a third."""


class Pattern:
    """How the head of a record lies in its file: where its numbers are, and the bytes around them.

    It is made from a record that pyarrow has read and found valid. Another one with the same bytes around its numbers has the
    same dtypes, shapes and size.

    Args:
        raw: the record's bytes up to its tensors.
        places: where in them its numbers are, each of 8 bytes: `NUMBERS` and `CHECKSUMS`.
        length: of the whole record, bytes.
    """

    def __init__(self, raw: bytes, places: dict[str, int], head: Head, length: int) -> None:
        self.size, self.length = len(raw), length
        self._head = head
        layout, position, names = "<", 0, sorted(places, key=lambda name: places[name])
        for name in names:
            layout += f"{places[name] - position}s{'Q' if name in CHECKSUMS else 'q'}"
            position = places[name] + 8
        self._struct = struct.Struct(f"{layout}{self.size - position}s")
        self._around = itemgetter(*range(0, 2 * len(names) + 1, 2))
        self._at = [2 * names.index(name) + 1 for name in (*NUMBERS, *CHECKSUMS)]
        self._numbers = itemgetter(*self._at)
        self._values = self._struct.unpack(raw)
        self._expected = self._around(self._values)

    def read(self, raw: bytes) -> Head | None:
        """The head that begins here; None if it does not look like this, or its checksum differs: pyarrow may say why."""
        if len(raw) < self.size:
            return None
        values = self._struct.unpack_from(raw)
        if self._around(values) != self._expected:
            return None
        step, micro_batch, sender, receiver, replica, incarnation, checksum, digest = self._numbers(values)
        like = self._head
        key = Key(step, micro_batch, like.key.kind, sender, receiver, replica)
        head = Head(key, incarnation, like.dtypes, like.shapes, checksum)
        return head if head.digest() == digest else None

    def write(self, head: Head) -> bytes:
        """A record up to its tensors, of the same dtypes, shapes and kind."""
        key, values = head.key, list(self._values)
        numbers = (key.step, key.micro_batch, key.sender, key.receiver, key.replica, head.incarnation)
        for at, number in zip(self._at, (*numbers, head.checksum, head.digest()), strict=True):
            values[at] = number
        return self._struct.pack(*values)


def pattern_of(raw: bytes, batch: pa.RecordBatch, body: int, body_start: int, head: Head, length: int) -> Pattern | None:
    """The pattern of a record that is not compressed; None if it is laid out in another way than `log_format` writes it.

    Args:
        raw: see `Pattern`.
        body: the address in memory of what pyarrow read after the record's metadata; body_start: where that is in `raw`.
    """
    places = {}
    for name in (*NUMBERS, *CHECKSUMS):
        column = batch.column(HEAD.get_field_index(name))
        values = column.buffers()[1]
        if values is None or column.offset:
            return None
        places[name] = values.address - body + body_start
    ordered = sorted(places.values())
    apart = all(b - a >= 8 for a, b in itertools.pairwise(ordered))
    if not apart or ordered[0] < body_start or ordered[-1] + 8 > min(len(raw), body_start + HEAD_BYTES):
        return None
    return Pattern(raw, places, head, length)
