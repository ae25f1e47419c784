"""The checkpoints of a run as its supervisor handles them: the right to write them, and which there are to go back to."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raytrain_ft.errors import LockedError, NoCheckpointError, StorageError
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.news import MOST_STORED
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.holder import ANSWER_SECONDS, Holder, holder_of
from raytrain_ft.runtime.spec import NAMESPACE, RunSpec
from raytrain_ft.storage import lock, retention, selection
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.manifest import Manifest

FIND_SECONDS = 60.0
AGAIN_SECONDS = 2.0
"""Storage that could not be listed is asked again after so long."""
CLOSE_SECONDS = 60.0
WATCH_SECONDS = 600.0
"""A call that waits for the end of the holder of snapshots is made anew after so long."""


class Library:
    """Does nothing for a run without checkpoints.

    Args:
        counts: whether a checkpoint is one to go back to, by what is known so far; called by any thread. Of these `MOST_STORED`
            are looked for.

    Attributes:
        epoch: of the right to write; 0 before `open`.
        records: by checkpoint, the steps committed before it of which its worker may not have told anybody.
    """

    def __init__(self, spec: RunSpec, counts: Callable[[m.Stored], bool] = lambda stored: True) -> None:
        self._spec, self._counts = spec, counts
        self._lock: lock.WriterLock | None = None
        self._holder: Any = None
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
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._open), FIND_SECONDS)
        except TimeoutError as error:
            place = self._spec.checkpoints.place
            raise StorageError(f"CheckpointConfig: the storage {place} did not answer within {FIND_SECONDS:g} s") from error

    def _open(self) -> tuple[m.Stored, ...]:
        assert self._spec.checkpoints is not None
        if self._in_memory:
            self._start_holder()
            return ()
        storage = open_storage(self._spec.checkpoints.place)
        if self._lock is not None:  # of an attempt before, which has failed since: one of them renews it
            self._lock.hand_over()
        self._lock = lock.acquire(storage, self._spec.run_id)
        self.epoch = self._lock.owner.epoch
        retention.sweep(storage, self.epoch, new=self._lock.new)
        if self._spec.checkpoints.resume == "never":
            selection.begin_anew(storage, self.epoch)
        return self._stored()

    @property
    def _in_memory(self) -> bool:
        return self._spec.rules.strategy == "snapshot"

    def _start_holder(self) -> None:
        """On a node that hosts no worker, if there is one. It ends with this process; the next one starts another, and until
        its name is free has the one that is about to end.

        Raises:
            StorageError: Ray's state does not answer, which may pass; or the one that this process has started is out of reach.
        """
        assert self._spec.checkpoints is not None
        options = {"name": self._spec.member_name("holder"), "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 64}
        options["get_if_exists"] = self._holder is None  # without the handle that it was started with, Ray would end it
        try:
            node = placement.apart(placement.nodes(), placement.demand(self._spec.options))
            strategy = placement.pinned_to(node) if node is not None else "DEFAULT"
            self._holder = ray.remote(Holder).options(**options, scheduling_strategy=strategy).remote()
        except (ValueError, RayError, RuntimeError) as error:
            raise StorageError(f"the holder of snapshots cannot be started: {error}") from error

    async def keep_holder(self) -> None:
        """If the holder of snapshots is lost, another one is started. What it held is lost with it; what comes after is not."""
        while self._holder is not None:
            with suppress(RayError):
                await self._holder.watch.remote(WATCH_SECONDS)
                continue
            await asyncio.sleep(AGAIN_SECONDS)
            with suppress(StorageError):
                await asyncio.to_thread(self._start_holder)

    def find(self, incarnation: int, reached: int, tell: Callable[[m.Event], None]) -> None:
        """Begins to look what there is now; the answer is an event."""
        task = asyncio.get_running_loop().create_task(self._find(incarnation, reached, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, incarnation: int, reached: int, tell: Callable[[m.Event], None]) -> None:
        error, stored, deadline = "", (), time.monotonic() + FIND_SECONDS
        try:
            stored = await asyncio.wait_for(self._list(incarnation, deadline), FIND_SECONDS)
        except TimeoutError:
            error = f"the storage did not answer within {FIND_SECONDS:g} s"
        except Exception as failure:  # whatever it is: the run waits for this answer
            error = str(failure) if isinstance(failure, StorageError) else repr(failure)
        tell(m.CheckpointsFound(incarnation=incarnation, stored=stored, reached=reached, error=error))

    async def _list(self, incarnation: int, deadline: float) -> tuple[m.Stored, ...]:
        """Storage that fails once may answer when it is asked again; what is damaged stays so."""
        while True:
            try:
                return await asyncio.to_thread(self._look, incarnation)
            except (NoCheckpointError, LockedError):
                raise
            except StorageError:
                if time.monotonic() + AGAIN_SECONDS > deadline:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)

    def _look(self, incarnation: int) -> tuple[m.Stored, ...]:
        """What there is now and stays: worlds before this one add nothing to it any more, and take nothing away."""
        if self._in_memory:
            return self._held(incarnation)
        if self._lock is not None:
            try:
                self._lock.fence(incarnation)
            except LockedError:
                raise
            except StorageError as error:  # what cannot be written now can be read; it is said with the next renewal
                warnings.warn(f"going back to a checkpoint: {error}", stacklevel=1)
        return self._stored()

    def _stored(self) -> tuple[m.Stored, ...]:
        """The newest: there may be thousands, each of which takes storage some tenths of a second."""
        assert self._spec.checkpoints is not None
        storage = open_storage(self._spec.checkpoints.place)
        found: dict[m.Stored, list[dict[str, Any]]] = {}
        counting = 0
        for one in selection.select(storage, warnings.warn):
            if one.name.epoch > self.epoch:
                continue  # of another run, which has taken the right to write meanwhile: this one is about to end
            stored = m.Stored(str(one.name), one.step, one.name.incarnation, len(one.shards), _loss(one))
            found[stored] = _records(one)
            counting += self._counts(stored)
            if counting == MOST_STORED:
                break
        self.records = {stored.name: records for stored, records in found.items()}
        return tuple(found)

    def _held(self, incarnation: int) -> tuple[m.Stored, ...]:
        try:
            found = ray.get(holder_of(self._spec).found.remote(incarnation), timeout=ANSWER_SECONDS)
        except (ActorDiedError, StorageError):
            return ()  # it is gone, and with it the snapshots
        except RayError as error:
            raise StorageError(f"the holder of snapshots does not answer: {error}") from error
        self.records = {name: records for name, *_, records in found}
        return tuple(m.Stored(*about) for *about, _ in found)

    async def until_lost(self) -> str:
        """Returns when another run has the right to write, and says who that is."""
        while self._lock is None or not self._lock.lost:
            await asyncio.sleep(lock.RENEW_S)
        return self._lock.lost

    async def close(self) -> None:
        """Gives up the right to write. The end of a run does not wait for long: it also runs out by itself."""
        if self._lock is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._lock.release), CLOSE_SECONDS)


def _loss(manifest: Manifest) -> float | None:
    """Of the last step before a checkpoint, if its manifest tells it as we write it, and it is finite."""
    try:
        loss = float.fromhex(manifest.values["loss"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return loss if math.isfinite(loss) else None


def _records(manifest: Manifest) -> list[dict[str, Any]]:
    """The steps that a manifest tells of. None, if that is not as we write it: its worker will refuse what else it says."""
    try:
        for record in manifest.values.get("records", []):
            m.StepsCommitted(at=0.0, member="", **{name: value for name, value in record.items() if name != "lost"})
            for lost in record["lost"]:
                m.SamplesLost(at=0.0, incarnation=record["incarnation"], **lost)
    except (AttributeError, KeyError, TypeError):
        return []
    return manifest.values.get("records", [])
