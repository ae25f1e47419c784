"""Snapshots in memory, owned by an actor on another node: `strategy="snapshot"`, as Elastic Horovod commits and restores.

The parts of a snapshot lie in Ray's object store of the holder's node. An object dies with its owner, so the holder puts them
there itself, and they outlive the workers that they came from.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.runtime.spec import NAMESPACE, RunSpec
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.job import Job, Outcome
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.pieces import Pieces
from raytrain_ft.storage.shard import Piece, Rows, rows_of

ANSWER_SECONDS = 30.0
KEPT = 2
"""Complete snapshots. While everybody goes back to one, the last parts of another may arrive, of a world that is over."""


@dataclass
class Snapshot:
    """One snapshot, complete once all parts are there.

    Attributes:
        parts: by worker, the pieces and a reference to their bytes.
        head: what worker 0 says of the whole.
    """

    name: Name
    count: int
    parts: dict[int, tuple[list[Any], Any]] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Holder:
    """The actor. Keeps the newest complete snapshots, and those that are on their way."""

    def __init__(self) -> None:
        self._snapshots: dict[Name, Snapshot] = {}
        self._since = 0

    async def put(self, job: Job, data: np.ndarray) -> int:
        """Takes one worker's part: bytes, as a uint8 array. Worker 0 is answered when all parts are there.

        Returns:
            Bytes of the snapshot, as far as it is there.

        Raises:
            StorageError: it is of a world that is over.
        """
        if job.incarnation < self._since:
            raise StorageError(f"{job.name}: the world that was writing it is over")
        snapshot = self._snapshots.setdefault(job.name, Snapshot(job.name, job.count))
        snapshot.parts[job.number] = (job.pieces, ray.put(np.array(data)))
        if job.number == 0:
            snapshot.head = {"values": job.values, "size": job.size}
        if len(snapshot.parts) == snapshot.count:
            snapshot.complete.set()
            self._forget()
        if job.number == 0:
            await asyncio.wait_for(snapshot.complete.wait(), job.timeout_s)
        return job.size

    def _forget(self) -> None:
        """The newest complete ones stay; what is incomplete and older broke off."""
        complete = sorted((name for name, s in self._snapshots.items() if s.complete.is_set()), reverse=True)
        newest, oldest = complete[0], complete[:KEPT][-1]
        for name in [n for n, s in self._snapshots.items() if n < (oldest if s.complete.is_set() else newest)]:
            del self._snapshots[name]

    async def watch(self, seconds: float) -> None:
        """Answers after so long: before that, only the end of this process ends the call."""
        await asyncio.sleep(seconds)

    async def found(self, incarnation: int) -> list[tuple[str, int, int, list[dict[str, Any]]]]:
        """Complete snapshots, newest first: name, step, incarnation, and the records of steps that they hold. Of worlds before
        this incarnation none comes any more: one may be cut off, and not know that it is over."""
        self._since = max(self._since, incarnation)
        complete = sorted((name for name, s in self._snapshots.items() if s.complete.is_set()), reverse=True)
        records = [self._snapshots[name].head["values"].get("records", []) for name in complete]
        return [(str(name), name.step, name.incarnation, told) for name, told in zip(complete, records, strict=True)]

    async def get(self, name: str) -> tuple[dict[str, Any], list[tuple[list[Any], Any]]] | None:
        """What worker 0 said of the whole, and per worker the pieces and a reference to their bytes; None if there is none."""
        snapshot = next((s for key, s in self._snapshots.items() if str(key) == name and s.complete.is_set()), None)
        return None if snapshot is None else (snapshot.head, [snapshot.parts[number] for number in range(snapshot.count)])


def holder_of(spec: RunSpec) -> Any:
    """The run's holder.

    Raises:
        StorageError: it is gone.
    """
    try:
        return ray.get_actor(spec.member_name("holder"), namespace=NAMESPACE)
    except ValueError as error:
        raise StorageError("the holder of snapshots is gone, and with it the snapshots") from error


class HolderPersister:
    """Brings a worker's part to the holder: to a `Checkpointer`, a persister like the one that writes files."""

    def __init__(self, memory: SharedMemory, spec: RunSpec) -> None:
        self._memory = memory
        self._spec = spec
        self._pending: _Pending | None = None

    def start(self) -> None:
        """There is nothing to start."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Begins to bring it there. The future never fails: an outcome with an error says what went wrong."""
        pending = _Pending(job.name)
        self._pending = pending if job.count > 1 else None
        threading.Thread(target=self._bring, args=(job, pending), name="holder", daemon=True).start()
        return pending.future

    def _bring(self, job: Job, pending: _Pending) -> None:
        began = time.monotonic()
        data = np.frombuffer(self._memory.view[: sum(piece.size for piece in job.pieces)], dtype=np.uint8)
        try:
            answer = holder_of(self._spec).put.remote(job, data)
            pending.taken()
            size: Any = ray.get(answer, timeout=job.timeout_s)
            outcome = Outcome(None, time.monotonic() - began, int(size))
        except (RayError, StorageError, TimeoutError) as error:
            outcome = Outcome(f"the holder of snapshots: {error}", time.monotonic() - began, 0)
        pending.settle(outcome)

    def cancel(self, name: Name) -> None:
        """The parts of others, if any, will not come: an answer of the holder is not waited for, and counts for nothing.
        It forgets what is not complete with the next snapshot."""
        if self._pending is not None and self._pending.name == name:
            self._pending.cancel()

    def give_up(self, place: Place, name: Name, number: int, count: int) -> None:
        """Nobody is told: whoever waits gives up by its own time limit."""

    @property
    def is_tidy(self) -> bool:
        """See `await_tidy`."""
        return True

    def await_tidy(self, timeout_s: float) -> bool:
        """There is nothing to tidy here: the holder forgets by itself what it does not need."""
        return True

    def close(self, timeout_s: float) -> None:
        """There is nothing to end."""


class _Pending:
    """A part on its way. Whoever is told of its outcome may write to the memory that it comes from: so nobody is, also if it is
    cancelled, before Ray has taken its bytes."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.future: Future[Outcome] = Future()
        self._lock = threading.Lock()
        self._taken = self._cancelled = False

    def taken(self) -> None:
        """Ray has the bytes."""
        with self._lock:
            self._taken = True
            if self._cancelled:
                self._give_up()

    def cancel(self) -> None:
        """It is not wanted any more."""
        with self._lock:
            self._cancelled = True
            if self._taken:
                self._give_up()

    def _give_up(self) -> None:
        self.settle(Outcome(f"{self.name}: the world that was writing it is over", 0.0, 0))

    def settle(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        with suppress(InvalidStateError):
            self.future.set_result(outcome)


def load(spec: RunSpec, name: Name) -> Content:
    """A snapshot, as a checkpoint's content. It may take as long as an exchange of a recovery, which grows with the model.

    Raises:
        StorageError: it is gone.
    """
    try:
        found = ray.get(holder_of(spec).get.remote(str(name)), timeout=ANSWER_SECONDS)
        if found is None:
            raise StorageError(f"the holder has no snapshot {name} any more")
        head, parts = found
        arrays = ray.get([reference for _, reference in parts], timeout=spec.rules.phase_timeout)
    except RayError as error:
        raise StorageError(f"the holder of snapshots: {error}") from error
    rows: list[Rows] = []
    for (described, _), data in zip(parts, arrays, strict=True):
        pieces = [Piece(tensor, dtype, tuple(shape), *where) for tensor, dtype, shape, *where in described]
        rows.append(rows_of(pieces, memoryview(data), data.ctypes.data))
    values, size = head["values"], int(head["size"])
    manifest = Manifest(step=name.step, epoch=name.epoch, incarnation=name.incarnation, shards=[], values=values, size=size)
    return Content(manifest, Pieces(rows))
