"""The file of a shard: an Arrow IPC file of pieces of tensors, written and read without copying their bytes.

A row is one piece: the tensor's name, dtype and shape, the piece's first byte in it, and its bytes. Consecutive pieces share a
record batch, so a thousand small tensors do not cost a thousand batches. The file is also a sequence of blocks of
`BLOCK_BYTES`, whose hashes stand in the checkpoint's manifest: they cover every byte, headers and padding too.

No torch here: the process that writes shards does not need it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.columns import bytes_column, integer_column, list_column, numpy_of, own, own_lists, text_column
from raytrain_ft.storage.cores import on_two
from raytrain_ft.storage.parts import Parts

FORMAT = "raytrain_ft-shard-1"
BLOCK_BYTES = 4 * 2**20
BATCH_BYTES = 64 * 2**20
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("start", pa.int64()),
        ("data", pa.large_binary()),
    ],
    metadata={"format": FORMAT},
)


class Piece(NamedTuple):
    """Bytes [start, start + size) of a tensor, in its contiguous order. A tensor without elements is a piece of size 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Part(NamedTuple):
    """A piece that was read. data: its bytes, which are not copied; address: where they begin."""

    piece: Piece
    data: memoryview
    address: int


# ---------------------------------------------------------------- writing


def encode(pieces: Sequence[Piece], data: memoryview) -> list[memoryview]:
    """The file, as parts in order. `data` holds the bytes of all pieces, one after the other; its parts are not copied."""
    sink = Parts()
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), SCHEMA) as writer:
        for run, offset in _batches(pieces):
            writer.write_batch(_batch(run, data, offset))
    return sink.parts


def _batches(pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], int]]:
    run: list[Piece] = []
    offset = size = 0
    for piece in pieces:
        if run and size + piece.size > BATCH_BYTES:
            yield run, offset
            run, offset, size = [], offset + size, 0
        run.append(piece)
        size += piece.size
    if run:
        yield run, offset


def _batch(pieces: list[Piece], data: memoryview, offset: int) -> pa.RecordBatch:
    sizes = [piece.size for piece in pieces]
    return pa.record_batch(
        [
            text_column([piece.name for piece in pieces]),
            *_kinds(pieces),
            integer_column([piece.start for piece in pieces]),
            bytes_column(data[offset : offset + sum(sizes)], sizes),
        ],
        schema=SCHEMA,
    )


def _kinds(pieces: Sequence[Piece]) -> tuple[pa.StringArray, pa.ListArray]:
    shapes = [piece.shape for piece in pieces]
    lengths = integer_column(list(itertools.chain.from_iterable(shapes)))
    return text_column([piece.dtype for piece in pieces]), list_column(shapes, lengths)


class Hashed:
    """Passes the parts of a file on in blocks, and hashes each on another thread while it is being written."""

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._parts = parts
        self._hashes: list[Future[str]] = []
        self.size = 0

    def __iter__(self) -> Iterator[memoryview]:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as pool:
            for block in _blocks(self._parts):
                self._hashes.append(pool.submit(_hash, block))
                for part in block:
                    self.size += len(part)
                    yield part

    def blocks(self) -> list[str]:
        """The hash of every block, once all parts are passed on."""
        return [hashed.result() for hashed in self._hashes]


def _blocks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    block: list[memoryview] = []
    room = BLOCK_BYTES
    small = bytearray()  # headers come in many parts of a few bytes: they are passed on together
    for part in parts:
        rest = part
        while len(rest):
            taken, rest = rest[:room], rest[room:]
            room -= len(taken)
            if len(taken) < 4096:
                small += taken
            else:
                if small:
                    block.append(memoryview(bytes(small)))
                    small.clear()
                block.append(taken)
            if room == 0:
                if small:
                    block.append(memoryview(bytes(small)))
                    small.clear()
                yield block
                block, room = [], BLOCK_BYTES
    if small:
        block.append(memoryview(bytes(small)))
    if block:
        yield block


def _hash(block: Sequence[memoryview]) -> str:
    hasher = xxhash.xxh3_64()
    for part in block:
        hasher.update(part)
    return hasher.hexdigest()


# ---------------------------------------------------------------- reading


def count_blocks(size: int) -> int:
    """How many blocks a file of this size has."""
    return -(-size // BLOCK_BYTES)


def verify(buffer: pa.Buffer, blocks: Sequence[str], hashed: Callable[[int, int], None] | None = None) -> int | None:
    """Hashes a whole file; returns the number of the first block that is not what it was, or None.

    Args:
        hashed: is told of each block that is right, by the addresses where it begins and ends; by several threads. It finds the
            bytes in the processor's cache.
    """
    view, address = memoryview(buffer).cast("B"), pa.py_buffer(buffer).address
    count = count_blocks(len(view))
    if count != len(blocks):
        return min(count, len(blocks))
    bad: list[int] = []
    numbers = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        while not bad:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            start, stop = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, len(view))
            if _hash([view[start:stop]]) != blocks[number]:
                bad.append(number)
            elif hashed is not None:
                hashed(address + start, address + stop)

    if count > 1:
        on_two(work)
    else:
        work()
    return min(bad, default=None)


class Rows(NamedTuple):
    """Pieces that were read, in columns: of thousands, an object for each takes as long to make as its bytes to read, and has
    Python look for garbage, which takes longer than both.

    Attributes:
        dtypes, shapes: columns of text and of lists of integers.
        data: the bytes of all, where they were read; all else is a copy, for a file may change.
        ends: where the bytes of each begin, and the last one's end; address: of the first.
    """

    names: list[str]
    dtypes: pa.StringArray
    shapes: pa.ListArray
    starts: npt.NDArray[np.int64]
    data: memoryview
    ends: npt.NDArray[np.int64]
    address: int

    def part(self, number: int) -> Part:
        """One of them."""
        begin, end = self.ends[number : number + 2].tolist()
        dtype, shape = self.dtypes[number].as_py(), tuple(self.shapes[number].as_py())
        piece = Piece(self.names[number], dtype, shape, int(self.starts[number]), end - begin)
        return Part(piece, self.data[begin:end], self.address + begin)

    def kinds(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of all, dtype and shape of the tensor."""
        return list(zip(self.dtypes.to_pylist(), _shapes(self.shapes), strict=True))


def decode(buffer: pa.Buffer, name: str) -> list[Rows]:
    """The pieces of a file and their bytes, without copying them: each lies in the file, after the one before.

    Raises:
        StorageError: it is no shard.
    """
    buffer = pa.py_buffer(buffer)
    try:
        with pa.ipc.open_file(buffer) as reader:
            if (reader.schema.metadata or {}).get(b"format") != FORMAT.encode() or not reader.schema.equals(SCHEMA):
                raise StorageError(f"{name} is not a {FORMAT} file")
            found, reached = [], buffer.address
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                reached = _check_within(
                    batch, reached, buffer
                )  # now, so that of a file that is compressed no more than one batch is unpacked
                found += [_rows(batch)] if len(batch) else []
        return found
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"{name} cannot be read as a shard: {error}") from error


def _check_within(batch: pa.RecordBatch, reached: int, buffer: pa.Buffer) -> int:
    """Looks whether all of a batch lies in the file, and what it has of tensors after the address that was reached. Returns up
    to where that is."""
    for column in batch.columns:
        for part in column.buffers():
            if (
                part is not None
                and part.size
                and not buffer.address <= part.address <= buffer.address + buffer.size - part.size
            ):
                raise ValueError("it is compressed")
    batch.validate(full=True)
    values = batch.column(4).buffers()[2]
    if values is None or not values.size:
        return reached
    if values.address < reached:
        raise ValueError("its tensors' bytes are not in order")
    return values.address + values.size


def _rows(batch: pa.RecordBatch) -> Rows:
    if any(column.null_count for column in (*batch.columns, batch.column(2).values)):
        raise ValueError("a row lacks a value")
    names, dtypes, shapes, starts, data = batch.columns
    _, offsets, values = data.buffers()  # a value that is asked for by its row would be a copy
    return Rows(
        names.to_pylist(),
        own(dtypes),
        own_lists(shapes),
        numpy_of(starts).copy(),
        memoryview(values or b"").cast("B"),
        np.frombuffer(offsets, np.int64)[data.offset : data.offset + len(data) + 1].copy(),
        values.address if values else 0,
    )


def _shapes(column: pa.ListArray) -> list[tuple[int, ...]]:
    """One tuple for all tensors of a shape: there are few shapes, and Python looks at each new object for garbage."""
    lengths, cuts = column.values.to_pylist(), column.offsets.to_pylist()
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = (tuple(lengths[here:there]) for here, there in pairwise(cuts))
    return [known.setdefault(shape, shape) for shape in shapes]


def rows_of(pieces: Sequence[Piece], data: memoryview, address: int) -> Rows:
    """Pieces whose bytes lie one after the other, from an address on."""
    starts, ends = np.array([piece.start for piece in pieces], np.int64), np.cumsum([0, *(piece.size for piece in pieces)])
    return Rows([piece.name for piece in pieces], *_kinds(pieces), starts, data, ends, address)
