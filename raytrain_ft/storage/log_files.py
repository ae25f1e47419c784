"""The files of one tensor log: begun, appended to, ended and deleted."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from raytrain_ft.storage.log_encoder import Encoder
from raytrain_ft.storage.log_format import END, FILE_STEPS, Checksum, Compression, Key

FILE_BYTES = 64 * 2**20
_PARTS_PER_CALL = 512  # Linux takes at most 1024


@dataclass(slots=True)
class Record:
    """What waits to be written: tensors of `size` bytes, what `version_of` said of each when it was handed over, and their
    checksum if the caller needs it too."""

    key: Key
    incarnation: int
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    size: int
    checksum: Checksum | None = None


def version_of(tensor: Tensor) -> int:
    """Counts the changes to a tensor's memory; those that do not pass through PyTorch are not noticed."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The same of many, quickly."""
    try:
        return list(map(attrgetter("_version"), tensors))
    except RuntimeError:  # those of inference mode have none
        return list(map(version_of, tensors))


def on_cpu(tensor: Tensor) -> Tensor:
    """It, or a copy if it lies elsewhere; without its graph."""
    return tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()


class _OpenFile:
    """A file that is being written, or was."""

    def __init__(self, path: Path, descriptor: int, incarnation: int, encoder: Encoder) -> None:
        self.path = path
        self.descriptor = descriptor
        self.incarnation = incarnation
        self.encoder: Encoder | None = encoder
        self.size = 0
        self.first, self.last = 2**63, -1  # steps

    def takes(self, record: Record) -> bool:
        first, last = min(self.first, record.key.step), max(self.last, record.key.step)
        return (
            self.incarnation == record.incarnation and self.size < FILE_BYTES and last - first < FILE_STEPS
        ) or not self.size


class LogFiles:
    """This life's files. Used by one thread at a time.

    Args:
        beside: what else counts towards the quota now, bytes.
    """

    def __init__(
        self,
        directory: Path,
        member: str,
        quota_bytes: int | None,
        compression: Compression | None,
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        self.directory = directory
        self.size = 0
        self._member = member
        self._quota_bytes = quota_bytes
        self._beside = beside
        self._compression: Compression | None = compression
        self._current: dict[int, _OpenFile] = {}  # by receiver
        self._all: list[_OpenFile] = []
        self._sequence = 0

    def write(self, record: Record) -> None:
        """Appends a record.

        Raises:
            OSError: the disk, or the quota; the caller must `delete` the log.
            ValueError: a tensor that cannot be logged, or was changed.
        """
        receiver = record.key.receiver
        file = self._current.get(receiver)
        if file is None or not file.takes(record):
            self._end(receiver)
            file = self._current[receiver] = self._begin(record.incarnation, record.key.step, receiver)
        assert file.encoder is not None
        parts = file.encoder.encode(record.key, record.incarnation, record.tensors, record.checksum)
        if tuple(map(version_of, record.tensors)) != record.versions:  # after its checksum was made; later a reader sees it
            raise ValueError(f"a tensor of {record.key} was changed before it was written")
        size = sum(map(len, parts))
        self._check_quota(size + len(END))
        write_all(file.descriptor, parts)
        file.size += size
        self.size += size
        file.first, file.last = min(file.first, record.key.step), max(file.last, record.key.step)

    def _check_quota(self, size: int) -> None:
        if self._quota_bytes is None:
            return
        beside = self._beside()
        if self.size + size + beside > self._quota_bytes:
            others = f", of which checkpoints need {beside}" if beside else ""
            raise OSError(errno.EDQUOT, f"the quota of {self._quota_bytes} bytes is used up{others}")

    def _begin(self, incarnation: int, step: int, receiver: int) -> _OpenFile:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        encoder = Encoder(self._member, self._compression)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            whom = "all" if receiver < 0 else receiver
            path = self.directory / f"{self._member}-{incarnation}-{self._sequence}-{step}-{whom}.arrow"
            self._sequence += 1
            with suppress(FileExistsError):  # of an earlier life of this member
                file = _OpenFile(path, os.open(path, flags, 0o600), incarnation, encoder)
                self._all.append(file)
                return file

    def end(self) -> None:
        """Closes the files that are open; the next record begins a new one.

        Raises:
            OSError: some of what was written is not there: NFS says so only now. The caller must `delete` the log.
        """
        for receiver in list(self._current):
            self._end(receiver)

    def _end(self, receiver: int) -> None:
        file = self._current.get(receiver)
        if file is None:
            return
        with suppress(OSError):  # the mark only tells that nothing was broken off
            if file.size and os.write(file.descriptor, END) == len(END):
                file.size += len(END)
                self.size += len(END)
        self._close(receiver)

    def delete(self) -> None:
        """Deletes all files. One that cannot be deleted is tried again by `trim`."""
        for receiver in list(self._current):
            with suppress(OSError):
                self._close(receiver)
        self._remove(self._all)

    def _close(self, receiver: int) -> None:
        file = self._current.pop(receiver)
        file.encoder = None
        os.close(file.descriptor)

    def trim(self, step: int, incarnation: int = 0) -> None:
        """Deletes the files that hold nothing of `step` or later, and those of earlier incarnations. One that cannot be deleted
        is tried again next time."""
        old = [file for file in self._all if file.last < step or file.incarnation < incarnation]
        for receiver, file in list(self._current.items()):
            if file in old:
                with suppress(OSError):  # whatever did not reach the disk is not missed
                    self._end(receiver)
        self._remove(file for file in old if file.encoder is None)

    def _remove(self, files: Iterable[_OpenFile]) -> None:
        for file in list(files):
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                self._all.remove(file)
                self.size -= file.size


def write_all(descriptor: int, parts: Iterable[memoryview]) -> None:
    """Writes parts one after the other, in few calls.

    Raises:
        OSError: not everything was written.
    """
    left = deque(part for part in parts if len(part))
    while left:
        written = os.writev(descriptor, [left[number] for number in range(min(len(left), _PARTS_PER_CALL))])
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]
