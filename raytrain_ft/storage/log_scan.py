"""Finding the records of a tensor log's file without reading their tensors, while its writer may still append to it."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from raytrain_ft.storage.log_format import (
    END,
    FILE_STEPS,
    FORMAT,
    HEAD,
    HEAD_BYTES,
    SCHEMA,
    Head,
    Key,
    decode_head,
    padded,
)
from raytrain_ft.storage.log_pattern import MOST_PATTERNS, Pattern, pattern_of
from raytrain_ft.storage.tensors import DTYPES, bytes_of

UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, EOFError, MemoryError, RuntimeError)
"""What damaged bytes may raise, by way of pyarrow or torch."""


@dataclass(slots=True)
class LogFile:
    """A file, and how far it is known.

    Attributes:
        step: Of its first record, by its name: no record's is as far from that as `FILE_STEPS`.
        receiver: Of all its records; -1 if they are for all.
        position: All before it was looked at.
        records: How many were found, damaged ones too.
        preamble: What precedes the first record; empty while it is not known.
        broken: Why what comes at `position` cannot be read; empty if nothing comes, or not all of it yet.
        damaged: Which records have a damaged head.
    """

    path: Path
    incarnation: int
    sequence: int
    step: int
    receiver: int
    position: int = 0
    records: int = 0
    size: int = -1
    ended: bool = False
    compressed: bool = False
    preamble: bytes = b""
    broken: str = ""
    damaged: list[str] = field(default_factory=list)

    def may_hold(self, key: Key) -> bool:
        """Whether records of this step for this receiver may be in it."""
        return abs(key.step - self.step) < FILE_STEPS and key.receiver == self.receiver

    def trouble(self) -> list[str]:
        """What is wrong with it, in words."""
        found = [f"{self.path.name}: {what}" for what in self.damaged[:3]]
        if self.broken:
            found.append(f"{self.path.name}: damaged at record {self.records} ({self.broken}); what follows cannot be read")
        elif self.size > self.position:
            found.append(f"{self.path.name}: breaks off within record {self.records}")
        return found


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a record lies. The greater one counts."""

    incarnation: int
    sequence: int
    number: int
    start: int
    end: int
    head: Head = field(compare=False)
    file: LogFile = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file.path.name}, record {self.number}"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file; links are not followed.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def scan(file: LogFile) -> Iterator[Place]:
    """The records that a file has more than when it was looked at last.

    Raises:
        OSError: it cannot be opened.
    """
    with opened(file.path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size == file.size or file.ended:
            return
        file.size, file.broken = size, ""
        source = _Heads(descriptor, file.preamble, file.position, size)
        try:
            yield from _records(file, source)
        except UNREADABLE as error:
            if not source.short:  # else the rest is not there yet, or was never written
                file.broken = str(error) or type(error).__name__


def _records(file: LogFile, source: _Heads) -> Iterator[Place]:
    options = pa.ipc.IpcReadOptions(included_fields=list(range(len(HEAD))), use_threads=False)
    with pa.ipc.open_stream(pa.PythonFile(source, mode="r"), options=options) as reader:
        metadata = reader.schema.metadata or {}
        if metadata.get(b"format") != FORMAT.encode() or not reader.schema.equals(HEAD):
            raise ValueError(f"it is not a {FORMAT} file")
        if not file.preamble:
            if source.position > HEAD_BYTES:
                raise ValueError("its schema is too long")
            file.preamble = os.pread(source.descriptor, source.position, 0)
            file.compressed = metadata.get(b"compression") != b""
            file.position = source.position
        patterns: list[Pattern] = []
        while True:
            start = file.position
            try:
                head = source.skip_alike(patterns)
                batch = reader.read_next_batch() if head is None else None
            except StopIteration:
                _end(file, source)
                return
            file.position, number = source.position, file.records
            file.records += 1
            try:
                if batch is not None:
                    head = decode_head(batch)
                assert head is not None
                _check(head, file, file.position - start)
            except UNREADABLE as error:  # the next one begins where it should: a pity only for this one
                file.damaged.append(f"damaged at record {number} ({error})")
                continue
            if batch is not None and not file.compressed and len(patterns) < MOST_PATTERNS:
                patterns += source.pattern(start, batch, head)
            yield Place(file.incarnation, file.sequence, number, start, file.position, head, file)


def _check(head: Head, file: LogFile, length: int) -> None:
    """Raises ValueError: the record is not of this file, or too short."""
    if head.incarnation != file.incarnation:
        raise ValueError(f"it is of incarnation {head.incarnation}")
    if not file.may_hold(head.key):
        raise ValueError(f"it is of step {head.key.step} for {head.key.receiver}")
    if not file.compressed and padded(head.size) > length:
        raise ValueError(f"it promises {head.size} bytes and has {length}")


def _end(file: LogFile, source: _Heads) -> None:
    """The stream says that it has ended; or there is nothing more, which is the same to pyarrow."""
    if source.short:
        return
    if os.pread(source.descriptor, len(END) + 1, file.position) != END:
        raise ValueError("no record begins here")
    file.position += len(END)
    file.ended = True


def load(place: Place) -> tuple[Tensor, ...]:
    """Reads a record's tensors, each into memory of its own, and verifies them.

    Raises:
        ValueError: they are not what was written.
        OSError: the file cannot be read.
    """
    head = place.head
    with opened(place.file.path) as descriptor:
        data = _decompressed(descriptor, place) if place.file.compressed else None
        # memory of torch's own: its alignment, on which some kernels' last bits depend, is that of the tensors that were sent
        pairs = zip(head.shapes, head.dtypes, strict=True)
        tensors = tuple(torch.empty(shape, dtype=DTYPES[dtype]) for shape, dtype in pairs)
        position = place.end - padded(head.size)  # the tensors' bytes are the last in the batch
        hasher = xxhash.xxh3_64()
        for tensor in tensors:
            target = bytes_of(tensor).numpy()
            if data is not None:
                target[:], data = data[: len(target)], data[len(target) :]
            else:
                _read_into(descriptor, target.data, position)
                position += len(target)
            hasher.update(target.data)
    if hasher.intdigest() != head.checksum:
        raise ValueError("the checksum of its tensors differs")
    return tensors


def _decompressed(descriptor: int, place: Place) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    source = _Heads(descriptor, place.file.preamble, place.start, place.end, whole=True)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_stream(pa.PythonFile(source, mode="r"), options=options) as reader:
        if not reader.schema.equals(SCHEMA):
            raise ValueError("its columns are not those of a log")
        batch = reader.read_next_batch()
    batch.validate(full=True)
    data = np.frombuffer(batch.column(len(HEAD)).buffers()[2] or b"", np.uint8)
    if len(data) != place.head.size:
        raise ValueError(f"it promises {place.head.size} bytes and has {len(data)}")
    return data


def _read_into(descriptor: int, target: memoryview, position: int) -> None:
    while len(target):
        count = os.preadv(descriptor, [target], position)
        if not count:
            raise ValueError("the file has become shorter")
        target, position = target[count:], position + count


class _Heads:
    """A file for pyarrow's reader, in which only the beginnings of long stretches are read: the rest is tensors.

    First comes the file's preamble, then what begins at `position`. What would reach beyond `size` is not given at all.
    """

    closed = False

    def __init__(self, descriptor: int, preamble: bytes, position: int, size: int, whole: bool = False) -> None:
        self.descriptor = descriptor
        self.position = position
        self.short = False
        self._preamble = preamble
        self._size = size
        self._whole = whole
        self._body: bytes | mmap.mmap = b""

    def read(self, count: int) -> bytes | mmap.mmap:
        if self._preamble:
            part, self._preamble = self._preamble[:count], self._preamble[count:]
            return part
        if not 0 <= count <= self._size - self.position:
            self.short = True
            return b""
        if count > HEAD_BYTES:
            part = mmap.mmap(-1, count)  # costs nothing where it is not touched
            view = memoryview(part)
            _read_into(self.descriptor, view if self._whole else view[:HEAD_BYTES], self.position)
        else:
            part = os.pread(self.descriptor, count, self.position)
        self.position += count
        self._body = part  # if it is the last that is read of a record
        return part

    def skip_alike(self, patterns: list[Pattern]) -> Head | None:
        """Goes on behind the next record, if it looks like one before; its head."""
        if not patterns or self._preamble:
            return None
        raw = os.pread(self.descriptor, max(pattern.size for pattern in patterns), self.position)
        for pattern in patterns:
            if pattern.length <= self._size - self.position and (head := pattern.read(raw)) is not None:
                self.position += pattern.length
                return head
        return None

    def pattern(self, start: int, batch: pa.RecordBatch, head: Head) -> list[Pattern]:
        """That of the record that began at `start` and was read last, if it has one."""
        length = self.position - start
        raw = os.pread(self.descriptor, min(length - padded(head.size), 2 * HEAD_BYTES), start)
        found = pattern_of(raw, batch, pa.py_buffer(self._body).address, length - len(self._body), head, length)
        return [] if found is None else [found]

    def close(self) -> None:
        """The descriptor is the caller's."""
