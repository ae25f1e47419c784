"""The right to write a run's records, as its supervisor holds it.

The run's driver took it before it started the supervisor: a run of the same name on another cluster may see the same directory.
Nobody renews it where the directory cannot be written, and then another run may get it. Two must not write there, so the one
that has lost the right ends.
"""

from __future__ import annotations

import asyncio

from raytrain_ft.errors import LockedError, StorageError
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage

LOOK_S = 5.0
"""How long it may take to look whose the right is."""


class Right:
    """Of one run: taken over at once, or else as soon as the directory can be written, for which training does not wait.

    Raises:
        LockedError: another run has it.

    Attributes:
        lost: why this run has it no longer; empty as long as nobody else is known to have it.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._storage, self._run_id = LocalStorage(spec.directory), spec.run_id
        self._lock = self._take()
        self.lost = ""

    def _take(self) -> lock.WriterLock | None:
        try:
            return lock.take_over(self._storage, self._run_id)
        except LockedError:
            raise
        except StorageError:
            return None

    async def until_lost(self) -> str:
        """Returns when another run has it, and says who that is. Until then it is renewed, or it is tried to take it over."""
        while not self.lost:
            await asyncio.sleep(lock.RENEW_S)
            try:
                self._lock = self._lock or await asyncio.to_thread(self._take)
                self.lost = self._lock.lost if self._lock is not None else ""
            except LockedError as error:
                self.lost = str(error)
        return self.lost

    async def is_kept(self) -> bool:
        """Whether nobody else has it, as of now: looked up, because `lost` may be a few seconds late."""
        try:
            found = await asyncio.wait_for(asyncio.to_thread(lock.read_owner, self._storage), LOOK_S)
        except (StorageError, TimeoutError):
            return False
        return not self.lost and (found is None or found.owner == self._run_id)

    def release(self) -> None:
        """Gives it up; the next one need not wait."""
        if self._lock is not None:
            self._lock.release()
