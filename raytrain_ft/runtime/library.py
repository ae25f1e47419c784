"""The checkpoints of a run as its supervisor handles them: the right to write them, and which there are to go back to."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

from raytrain_ft.errors import StorageError
from raytrain_ft.policy import messages as m
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage import checkpoint, lock
from raytrain_ft.storage.filesystem import open_storage

FIND_SECONDS = 60.0


class Library:
    """Does nothing for a run without checkpoints.

    Attributes:
        epoch: of the right to write; 0 before `open`.
        records: by checkpoint, the steps committed before it of which its worker may not have told anybody.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._lock: lock.WriterLock | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.epoch = 0
        self.records: dict[str, list[dict[str, Any]]] = {}

    async def open(self) -> tuple[m.Stored, ...]:
        """Takes the right to write; returns what the run may begin from, newest first.

        Raises:
            LockedError: another run has it; StorageError: the storage cannot be used.
        """
        if self._spec.checkpoints is None:
            return ()
        return await asyncio.wait_for(asyncio.to_thread(self._open), FIND_SECONDS)

    def _open(self) -> tuple[m.Stored, ...]:
        assert self._spec.checkpoints is not None
        storage = open_storage(self._spec.checkpoints.uri)
        self._lock = lock.acquire(storage, self._spec.run_id)
        self.epoch = self._lock.owner.epoch
        checkpoint.sweep(storage)
        return () if self._spec.checkpoints.resume == "never" else self._stored()

    def find(self, incarnation: int, reached: int, tell: Callable[[m.Event], None], now: Callable[[], float]) -> None:
        """Begins to look what there is now; the answer is an event."""
        task = asyncio.get_running_loop().create_task(self._find(incarnation, reached, tell, now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, incarnation: int, reached: int, tell: Callable[[m.Event], None], now: Callable[[], float]) -> None:
        error, stored = "", ()
        try:
            stored = await asyncio.wait_for(asyncio.to_thread(self._stored), FIND_SECONDS)
        except StorageError as failure:
            error = str(failure)
        except TimeoutError:
            error = f"the storage did not answer within {FIND_SECONDS:g} s"
        tell(m.CheckpointsFound(at=now(), incarnation=incarnation, stored=stored, reached=reached, error=error))

    def _stored(self) -> tuple[m.Stored, ...]:
        """Of a run that may not resume, only its own."""
        assert self._spec.checkpoints is not None
        storage = open_storage(self._spec.checkpoints.uri)
        mine = self._spec.checkpoints.resume != "never"
        found = [one for one in checkpoint.select(storage, warnings.warn) if mine or one.epoch == self.epoch]
        self.records = {str(one.name): one.values.get("records", []) for one in found}
        return tuple(m.Stored(str(one.name), one.step) for one in found)

    async def close(self) -> None:
        """Gives up the right to write."""
        if self._lock is not None:
            await asyncio.to_thread(self._lock.release)
