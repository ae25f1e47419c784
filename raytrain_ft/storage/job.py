"""What a persister is asked to do, how it is told, and how it ended."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytrain_ft.places import Place
from raytrain_ft.storage.manifest import Name
from raytrain_ft.storage.shard import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One worker's part of a checkpoint.

    Attributes:
        place: the directory of checkpoints.
        owner, epoch: whose right to write it is (see `lock`).
        number, count: of this shard; number 0 commits when all are there.
        pieces: what lies in the shared memory, one after the other. The same list as in the job before need not be told again,
            so nobody may change it.
        values, kept: for the manifest.
        keep: how many checkpoints stay.
        rejected: names of checkpoints that were found to be damaged; they do not count as ones that stay. unread: of
            others that could not be read, which stay all the same.
        begun: the step at which its incarnation began, if that is known.
        files: small files beside the checkpoints to write once it is committed ({name: content}).
        timeout_s: how long to wait for the shards of others.
    """

    place: Place
    owner: str
    epoch: int
    step: int
    incarnation: int
    number: int
    count: int
    pieces: list[Piece]
    values: dict[str, Any] = field(default_factory=dict)
    kept: bool = False
    keep: int = 1
    rejected: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    begun: int | None = None
    files: dict[str, str] = field(default_factory=dict)
    size: int = 0
    timeout_s: float = 120.0

    @property
    def name(self) -> Name:
        """Of the checkpoint."""
        return Name(self.step, self.epoch, self.incarnation)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        error: None, or why there is no such checkpoint.
        seconds: from the start of the job to its end.
        size: bytes of the whole checkpoint's files (of the shard, but for number 0).
        untidy: what could not be done after the job before had been told of as durable, such as deleting what it replaces.
    """

    error: str | None
    seconds: float
    size: int
    untidy: str = ""


class AnyPersister(Protocol):
    """Makes snapshots safe: see `storage.persister.Persister`, which writes them to files."""

    def start(self) -> None:
        """Gets ready."""
        ...

    def submit(self, job: Job) -> Future[Outcome]:
        """Begins a job; at most one is under way."""
        ...

    def cancel(self, name: Name) -> None:
        """Others will not write their parts any more."""
        ...

    def give_up(self, place: Place, name: Name, number: int, count: int) -> None:
        """This part of a checkpoint, of another number than 0, will not come: who waits for it is told so. Returns at once."""
        ...

    @property
    def is_tidy(self) -> bool:
        """Whether no job is under way, and nothing is left to delete after the last one. Asked after every step."""
        ...

    def await_tidy(self, timeout_s: float) -> bool:
        """Waits until nothing is left to delete after the last job; returns whether that is so."""
        ...

    def close(self, timeout_s: float) -> None:
        """Ends, once the job under way is done."""
        ...


class Teller:
    """Tells a job through memory, and its pieces only if they are others than before: they may be many."""

    def __init__(self) -> None:
        self._pieces: list[Piece] | None = None
        self._number = self._size = 0

    def tell(self, job: Job, descriptor: int) -> dict[str, Any]:
        """Writes it there; returns where it is. The job before is over, so nobody reads that any more.

        Raises:
            OSError: there is no memory. ValueError, TypeError: the job's values are no JSON.
        """
        about = {name: getattr(job, name) for name in Job.__slots__ if name != "pieces"}
        content = json.dumps(about | {"place": job.place.with_credentials}).encode()
        if job.pieces is not self._pieces:
            described, self._pieces = json.dumps(job.pieces).encode(), None
            _write(descriptor, described, 0)
            self._pieces, self._size, self._number = job.pieces, len(described), self._number + 1
        _write(descriptor, content, self._size)
        return {"job": len(content), "pieces": self._size, "number": self._number}


def _write(descriptor: int, content: bytes, offset: int) -> None:
    if os.pwrite(descriptor, content, offset) != len(content):
        raise OSError(errno.ENOSPC, f"there is no memory for a job of {len(content)} bytes")


class Hearer:
    """The other end, in the persister's process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: list[Piece] = []
        self._number = 0

    def hear(self, message: dict[str, Any]) -> Job:
        """The job of which a message tells where it is."""
        size, number = message["pieces"], message["number"]
        if number != self._number:
            described = json.loads(os.pread(self._descriptor, size, 0))
            self._pieces = [Piece(name, dtype, tuple(shape), *of) for name, dtype, shape, *of in described]
            self._number = number
        about = json.loads(os.pread(self._descriptor, message["job"], size))
        return Job(**about | {"place": Place(about["place"]), "pieces": self._pieces})
