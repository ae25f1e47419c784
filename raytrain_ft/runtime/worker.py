"""The worker actor: answers commands, which are jobs for its training thread (`runtime/trainee.py`).

A fence alone does not queue: it wakes whatever the training thread waits for. The worker never waits without a deadline, and it
stops itself when it has not reached the supervisor for its lease, so that a node that was cut off does not go on alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray

from raytrain_ft.errors import FencedError, StorageError
from raytrain_ft.policy.commands import Fill, Reconcile, Replay, Run
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.runtime import lifeline, placement
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.preemption import Preemption
from raytrain_ft.runtime.shared import check_checkpoints, check_directory
from raytrain_ft.runtime.software import same_bits, unpack
from raytrain_ft.runtime.spec import Introduction
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.lazy_compiler import load_compiler_late

if TYPE_CHECKING:
    from raytrain_ft.runtime.recovery import Packed
    from raytrain_ft.training.state import Extras

TELL_S = 5.0
"""How long a worker that is about to end tries to tell the supervisor what is left to tell."""
SAVE_AGAIN_S = 1.0
"""Until the final state is written again that could not be."""
JOB_DEADLINE_S = 24 * 3600.0
"""How long a command waits for the training thread. A backstop: the supervisor's own deadline comes before, that of the replay
of many long steps after hours."""


class Worker:
    """One replica. `member` is its name for life, `rank` its number in the present incarnation.

    Args:
        code: of raytrain_ft, that the supervisor has in memory.
        packed: by the supervisor, the run's `RunSpec`.
    """

    def __init__(self, code: str, packed: bytes, member: str, supervisor: Any, epoch: int) -> None:
        self._title = member  # first: if it cannot begin, Ray asks for a name before it passes on why
        spec = unpack(code, packed, "the supervisor of the run")
        self._title = f"{spec.name} {member}"
        self._member, self._spec = member, spec
        load_compiler_late()
        with _without_garbage_collection():
            # Not at the top: the supervisor loads this module, too, and would take another second to come back with torch.
            from raytrain_ft.runtime.trainee import Trainee

        self._supervisor = supervisor
        self._epoch = epoch
        self._host = ray.util.get_node_ip_address()
        self._training = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._lock = threading.RLock()
        self._fence = self._trains = Fence(0)  # the latest one; the one of the latest steps
        self._ready: Future[Introduction] | None = None
        self._parking: dict[int, Future[Marks | None]] = {}  # of the latest fence
        self._preemption = Preemption(spec.notices, self._note_no_notices)
        self._heartbeat = Heartbeat(member, spec, supervisor, self._preemption.notices)
        self._trainee = Trainee(member, spec, supervisor, epoch, self._heartbeat, self._host)
        self._heartbeat.start()  # from now on: if nobody is left who could ask for more, it ends this process

    def __repr__(self) -> str:
        """What Ray calls it, in logs and in its dashboard."""
        return self._title

    # ---------------------------------------------------------------- becoming ready

    def setup(self) -> Introduction:
        """Builds the model. Safe to call again: the answer is the same."""
        with self._lock:
            if self._ready is None:
                self._ready = self._training.submit(self._build)
        return self._ready.result(timeout=JOB_DEADLINE_S)

    def _build(self) -> Introduction:
        check_directory(self._spec, self._host)
        check_checkpoints(self._spec, self._epoch, self._host)
        began = time.monotonic()
        self._trainee.build()
        took = time.monotonic() - began
        self._preemption.start()
        buckets = self._trainee.replica.state.buckets
        return Introduction(
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._host,
            lifeline.offer(self._host),
            sum(p.numel() for bucket in buckets for p in bucket.params),
            len(buckets),
            same_bits(),
            self._trainee.replica.loader.sketches,
            took,
        )

    def _note_no_notices(self, source: str, reason: str) -> None:
        self._heartbeat.note("NoticesUnavailable", {"source": source, "reason": reason})

    # ---------------------------------------------------------------- answered at once

    def ping(self) -> int:
        """Shows that this process lives."""
        return os.getpid()

    def watch(self, seconds: float) -> None:
        """Returns after a while. Ray fails the call the moment this process dies, which is what it is for."""
        threading.Event().wait(seconds)

    def unreached(self, places: dict[str, dict[str, Any]]) -> list[str]:
        """Those of the other workers whose nodes, in Ray's words, take no connection from here."""

        async def look() -> list[bool]:
            return await asyncio.gather(*(placement.is_silent(node) for node in places.values()))

        return [member for member, silent in zip(places, asyncio.run(look()), strict=True) if silent]

    def stop_at_boundary(self) -> None:
        """Asks for a stop at the next step boundary that all ranks agree upon."""
        self._trainee.replica.state.tail.stop_requested = True

    def secure(self) -> None:
        """Asks for a checkpoint at the next step boundary that all ranks agree upon."""
        checkpointer = self._trainee.replica.checkpointer
        if checkpointer is not None:
            checkpointer.asked = True

    def sleep(self, asleep: bool, at_once: bool) -> None:
        """Asks for a replica that contributes nothing, or does again, from the next step on; `at_once`, from where it is."""
        sleep = self._trainee.replica.state.tail.sleep
        sleep.ask(asleep, at_once)

    def speak_for(self, member: str, asleep: bool) -> None:
        """Another one, which may sleep, is asked for the one or the other."""
        self._trainee.speak_for(member, asleep)

    # ---------------------------------------------------------------- the phases of a recovery

    def fence(self, incarnation: int) -> Marks | None:
        """Ends every earlier incarnation here: leaves the step and the group, and says where this worker stands. Safe to call
        again: the answer is the same."""
        with self._lock:
            old = self._fence
            if incarnation > old.incarnation:
                self._fence = Fence(incarnation)
                old.trip()
                self._parking = {incarnation: self._training.submit(self._trainee.park, incarnation, old.incarnation)}
            parking = self._parking.get(incarnation)
        if parking is None:
            raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
        return parking.result(timeout=JOB_DEADLINE_S)

    def forsake(self, incarnation: int, worth: int | None) -> None:
        """What is still computed of a step that the fence of this incarnation has ended is of no use, unless it is `worth`."""
        with self._lock:
            if incarnation == self._fence.incarnation and self._trains is not self._fence:
                self._trains.forsake(worth)

    def reconcile(self, command: Reconcile) -> tuple[tuple[str, ...], int, int]:
        """Joins the group of this incarnation and carries out its part; returns (hash per bucket, parameters undone, parameters
        whose update was kept)."""
        fence = self._enter(command.incarnation)
        return self._training.submit(self._trainee.reconcile, fence, command).result(timeout=JOB_DEADLINE_S)

    def _enter(self, incarnation: int) -> Fence:
        with self._lock:
            if incarnation > self._fence.incarnation:  # a newcomer that was never fenced
                self._fence.trip()
                self._fence = Fence(incarnation)
            if incarnation != self._fence.incarnation:
                raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
            return self._fence

    def extras(self, incarnation: int) -> tuple[ray.ObjectRef]:
        """What replacements need besides the buckets, in the object store: the supervisor only passes it on."""
        self._enter(incarnation)
        return (ray.put(self._training.submit(self._trainee.extras).result(timeout=JOB_DEADLINE_S)),)

    def hand_over(self, incarnation: int) -> tuple[ray.ObjectRef]:
        """This worker leaves, and nobody else holds its state: the whole of it, in the object store."""
        self._enter(incarnation)
        return (ray.put(self._training.submit(self._trainee.pack).result(timeout=JOB_DEADLINE_S)),)

    def fill(self, command: Fill, extras: Extras | None, handed: Packed | None = None) -> tuple[str, ...]:
        """Copies state bucket by bucket, and takes over `extras` or what was handed over; returns the hash per bucket."""
        fence = self._enter(command.incarnation)
        return self._training.submit(self._trainee.fill, fence, command, extras, handed).result(timeout=JOB_DEADLINE_S)

    def replay(self, command: Replay) -> tuple[str, ...]:
        """Computes again, from the log, what a lost stage committed since a checkpoint: this worker's own stage, or as a helper
        that of the first of its team. Returns the hash per bucket of its own state.

        Raises:
            LogGapError: a record is missing or damaged. ReplayDivergedError: it computes something else than before.
        """
        fence = self._enter(command.incarnation)
        job = self._trainee.replay if command.team_of(self._member)[0] == self._member else self._trainee.help
        return self._training.submit(job, fence, command).result(timeout=JOB_DEADLINE_S)

    def trim(self, step: int, since: int) -> None:
        """A checkpoint of this step is durable: what was logged before it, since this incarnation, is not needed any more."""
        if self._trainee.log is not None:
            self._trainee.log.trim(step, since)

    def log_only(self, incarnation: int, boundaries: tuple[int, ...]) -> None:
        """Of the boundaries that are logged in this incarnation, these are enough from now on."""
        self._trainee.log_only(incarnation, frozenset(boundaries))

    def run(self, command: Run) -> None:
        """Goes on training. Returns at once; the heartbeat tells how it goes."""
        with self._lock:  # a fence comes before all of it, or after: else who stands still might say that it trains
            fence = self._enter(command.incarnation)
            if not self._heartbeat.is_running(command.incarnation):
                self._trains = fence
                self._heartbeat.running(command.incarnation, self._trainee.rank)
                self._training.submit(self._trainee.run, fence, command)

    # ---------------------------------------------------------------- the end

    def checkpoint(self, incarnation: int) -> int:
        """The last checkpoint of a run that is to end, of the boundary at which everybody has stopped. Returns the step when it
        is durable, or will never be, and the supervisor has been told which of the two."""
        fence = self._enter(incarnation)
        self._training.submit(self._trainee.finish, fence).result(timeout=JOB_DEADLINE_S)
        self._heartbeat.await_told(TELL_S)
        return self._trainee.replica.state.step

    def save(self, path: str) -> str:
        """Writes the model's final state as an Arrow file; returns its path. A disk that is full may have room again: tries for
        half as long as the supervisor waits, which leaves as much for the writing.

        Raises:
            StorageError: it still could not be written.
        """
        fence, deadline = self._fence, time.monotonic() + self._spec.rules.phase_timeout / 2
        while True:
            with self._lock:  # a fence comes before it, or after: what is saved is the end of these steps, and of no others
                fence.check()
                saving = self._training.submit(self._trainee.save, path)
            try:
                return saving.result(timeout=JOB_DEADLINE_S)
            except StorageError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(SAVE_AGAIN_S)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What is loaded meanwhile stays as long as the process: no garbage is looked for in it, neither now, which would take a
    seventh of the time, nor ever after, which would hold up a step by a tenth of a second now and then."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
