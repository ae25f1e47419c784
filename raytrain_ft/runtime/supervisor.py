"""The supervisor actor: wait for an event, let the machine decide, carry its commands out.

It owns the run. Its own process outlives the driver's, and ends with the run: when the run is over, or when nobody has followed
it for too long.

Every event is written to the run's log before it is acted upon (`event_log` says when not). When this process is lost, Ray
starts it again (its workers live on, they are not its children), it reads the log, and the machine goes on from there.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from raytrain_ft.chaos.faults import Injector
from raytrain_ft.errors import ConfigError, FTError, IllegalEventError, LockedError, StorageError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.leaving import REQUEST
from raytrain_ft.policy.lineage import stands
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.measures import Measures
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.runtime import clock, health, metrics, placement, sealed
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.crew import Crew
from raytrain_ft.runtime.demand import Demand
from raytrain_ft.runtime.event_log import PATIENCE_S, EventLog
from raytrain_ft.runtime.leftovers import kill_named
from raytrain_ft.runtime.library import Library
from raytrain_ft.runtime.notes import Notes, details_of, draw, past_of
from raytrain_ft.runtime.notices.notice import Notice
from raytrain_ft.runtime.right import Right
from raytrain_ft.runtime.shared import sees_directory
from raytrain_ft.runtime.spec import Beat, Pace, RunSpec
from raytrain_ft.runtime.store_server import StoreServer
from raytrain_ft.storage.filesystem import within

FOLLOWED_CHECK_S = 0.5
LOG_RETRY_S = 1.0
LOG_SYNC_S = 1.0
"""How often the log is synced while there is news: about so much of it is lost with the machine."""
LINGER_S = 5.0
"""How long this process stays to tell the outcome to who follows the run; after that the records tell it."""
DRAFTS = (".timeline.json.*", ".report.html.*")
"""What `draw` leaves if it is killed meanwhile."""
OLD_DRAFT_S = 3600.0
"""Nobody draws for so long without writing."""

T = TypeVar("T")


class Supervisor:
    """One run's supervisor. Methods are called by who follows the run (`run`, `follow`), by workers (`beat`, `store_*`)."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._events: asyncio.Queue[m.Event] = asyncio.Queue()
        self._chaos = Injector(spec.faults, spec.directory / "faults", "supervisor")
        self._right = _patiently(self._take_right)
        self._contacts = Contacts(spec)
        try:
            written = _patiently(self._come_back)
            self._log = _patiently(lambda: EventLog(spec.directory / "events.jsonl", self.now))
        except (OSError, StorageError):
            self._right.release()  # Ray does not start it again: who comes next need not wait until its lease is over
            raise
        self._notes = Notes(spec, self._log, self._machine, self.now, written)
        self._metrics = metrics.Publisher(spec.name, self._measures)
        self._health.follow(self._machine)
        self._crew = Crew(spec, self.tell, self._contacts, self._health)
        self._store = StoreServer()
        self._library = Library(spec, self._counts)
        self._ended_at: float | None = None
        self._lost_at: dict[str, int] = {}  # who is lost and has logged something, and the step at which that was seen
        self._followed_at = time.monotonic()
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._leaving = asyncio.get_running_loop().create_task(self._leave())

    def _take_right(self) -> Right:
        """Nothing is made in the empty directory of a mount that is away, where nobody's right is seen: it would be taken anew,
        and with the mount comes the one that this run has had all the time."""
        _check_mount(self._spec)
        return Right(self._spec)

    def _come_back(self) -> Counter[str]:
        """To where the run's log ends: each event is taken in and let go of, for there may be more than fit into memory. Where
        there is none, the run begins. Returns how many notes of each name there are."""
        spec = self._spec
        _check_mount(spec)  # once more: it may have gone since
        self._machine, self._measures = RunState(spec.rules), Measures()
        self._health = health.Health(spec, self.tell, self.now, self._contacts)
        self._asleep: set[str] = set()  # who was asked to sleep, or said that it does
        written: Counter[str] = Counter()
        first: m.Event | None = None
        last = 0.0
        for name, event in past_of(spec):
            if event is None:
                written[name] += 1
                continue
            first, last = first or event, event.at
            handle(self._machine, event)
            self._measures.take(event, self._machine)
            self._note_sleep(event)
            self._health.recall(event)
        recorded = first.details.get("clock") if isinstance(first, m.RunStarted) else None
        self._start = time.monotonic() if first is None else clock.began(recorded, last, spec.lease)
        self._restarted = first is not None
        return written

    def now(self) -> float:
        """Seconds since the run began, monotonic, also across this actor's own restarts."""
        return time.monotonic() - self._start

    def tell(self, event: m.Event) -> None:
        """Hands an event to the machine, in order. It happened now."""
        self._events.put_nowait(replace(event, at=self.now()))

    # ---------------------------------------------------------------- for who follows the run

    async def run(self) -> dict[str, Any]:
        """Returns the account of the run's end, when that has come. Asked again by Ray after a restart."""
        return await asyncio.shield(self._life)

    async def follow(self, known: int = 0) -> dict[str, Any]:
        """How the run stands, but for so many of its first recoveries that are over. Whoever asks keeps it going."""
        self._followed_at = time.monotonic()
        return self.account(known)

    async def status(self) -> dict[str, Any]:
        """How the run stands."""
        return self.account()

    async def abort(self, reason: str) -> None:
        """The run is to end before its time, with a last checkpoint."""
        if self._machine.state not in ENDED:  # else nobody takes the request in, and who asks would wait for the drawings
            self.tell(m.AbortRequested(reason=reason))
            await self._recorded()

    async def notice(self, member: str, deadline_s: float, reason: str, replaced: bool = True) -> None:
        """Somebody asks that this worker leave within so many seconds; another takes its place, or there is one less.

        Raises:
            ConfigError: there is no such worker, or no such time, or there may not be one less.
        """
        if member not in self._machine.members:
            raise ConfigError(f"notice for {member!r}: the run has the workers {', '.join(self._machine.members)}")
        if not 0 <= deadline_s < math.inf:
            raise ConfigError(f"notice for {member!r}: deadline_s={deadline_s} is no number of seconds from now on")
        if not replaced and not self._machine.leaves_for_good(member) and (why := self._machine.why_not_fewer()):
            raise ConfigError(f"{member!r} cannot leave without a replacement: {why}")
        self._health.noticed(member, Notice(deadline_s, REQUEST, reason, replaced))
        await self._recorded()

    async def sleep(self, rank: int, asleep: bool, at_once: bool) -> None:
        """Somebody asks that a replica contribute nothing for now, or take part again.

        Raises:
            ConfigError: it cannot.
        """
        world = self._machine.world
        if self._spec.rules.stages > 1:
            raise ConfigError("a stage of a pipeline cannot sleep: the others need what it computes")
        if not 0 <= rank < len(world) or (asleep and len(world) < 2):
            raise ConfigError(f"rank {rank} of {len(world)} workers: give the rank of one that others can do without")
        if world[rank] not in self._machine.members:
            raise ConfigError(f"rank {rank} was lost, and another worker takes its place: ask again when that trains")
        if asleep and self._asleep.issuperset({*world} - {world[rank]}):
            raise ConfigError(f"rank {rank} of {len(world)} workers is the last that is awake: resume another one first")
        (self._asleep.add if asleep else self._asleep.discard)(world[rank])
        await asyncio.wait(self._crew.sleep((world[rank],), asleep, at_once))  # told, whatever becomes of this process then

    def _note_sleep(self, event: m.Event) -> None:
        if isinstance(event, m.Dormant):
            (self._asleep.add if event.asleep else self._asleep.discard)(event.member)

    async def _recorded(self) -> None:
        """Until what was told by now is in the log, which a supervisor that comes back reads; or the run is over. Who is not
        answered asks again."""
        joined = asyncio.ensure_future(self._events.join())
        await asyncio.wait([joined, self._life], return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()

    # ---------------------------------------------------------------- from the beginning to the end

    async def _live(self) -> dict[str, Any]:
        """The run, or what is left of it after a restart; returns the account of its end."""
        if self._restarted:  # before anything that workers tell meanwhile: to be acted upon, it needs workers that are watched
            self.tell(m.SupervisorRestarted())
        try:
            stored = await self._open_library()
        except FTError as error:
            failure = type(error).__name__, str(error)
            if self._restarted and not self._notes.was_over:  # else there is no run to tell of, or its end was told
                self._notes.failed(failure)
            await self._library.close()  # it may have the right to write, which whoever repairs the rest need not wait for
            if self._restarted:
                await self._remove_what_recovers()
            await self._release()
            return self.account() | {"failure": failure}
        self._crew.epoch = self._library.epoch
        demand = Demand(f"demand:{self._spec.run_id}:", placement.demand(self._spec.options))
        asking = demand.keep(self._missing, self._health.nodes.going, self._contacts.hold)
        work = (self._health.watch_cluster(), self._watch_driver(), self._watch_right(), self._publish(), asking)
        more = (self._sync_log(), self._library.keep_holder())
        watchers = [asyncio.create_task(one) for one in (*work, *more)]
        for watcher in watchers:
            watcher.add_done_callback(self._mind)
        try:
            if not self._restarted:
                self._begin(stored)
            while self._machine.state not in ENDED:
                self._step(await self._events.get())
                self._events.task_done()
            await self._crew.settled()
            self._ended_at = self.now()
            if not self._notes.was_over:
                # before what may take its time: who follows the run does not wait for it for ever
                self._notes.end()
                await self._draw()
        finally:
            self._ended_at = self._ended_at or self.now()
            for watcher in watchers:
                watcher.cancel()
            self._metrics.publish(self._ended_at, self._machine)
            await demand.close()
            await self._library.close()
            await self._remove_what_recovers()
            while self._machine.state in ENDED and self._log.flush() is not None and self.now() < self._ended_at + PATIENCE_S:
                await asyncio.sleep(LOG_RETRY_S)
            await self._release()
        return self.account()

    def _begin(self, stored: tuple[m.Stored, ...]) -> None:
        """Before whatever was told while the storage was looked through: who reads the log knows a run by its first line."""
        spec = self._spec
        shutil.rmtree(spec.logs, ignore_errors=True)  # of a run of this name that could not clean up: never replayed
        details = details_of(spec) | {"clock": clock.origin(self._start)}
        before = {"incarnation": spec.incarnation, "stored": stored, "returns": spec.returns}
        self._step(m.RunStarted(at=self.now(), run_id=spec.run_id, **before, details=details))

    async def _remove_what_recovers(self) -> None:
        """Nobody is left to recover. Where the run ends by an error of this process, its workers still write."""
        if self._machine.state not in ENDED:
            with suppress(TimeoutError, RayError, RuntimeError):
                await self._end_workers()
        if await self._right.is_kept():
            shutil.rmtree(self._spec.logs, ignore_errors=True)
            sealed.remove(self._spec)

    async def _end_workers(self) -> None:
        await asyncio.wait_for(asyncio.to_thread(kill_named, self._spec.member_name("")), LINGER_S)

    def _missing(self) -> int:
        """How many workers to ask the cluster for. Not while a place is looked for: what is asked for would take it first."""
        return 0 if self._contacts.any_seeks() else self._machine.lacking()

    async def _draw(self) -> None:
        """Of a long run that takes minutes, in which others ask how it stands."""
        if await self._right.is_kept():
            self._notes.drawn(await asyncio.to_thread(_draw_anew, self._spec.directory))

    async def _release(self) -> None:
        """The next run of this name need not wait; without this it would see that this process is gone, or silent."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._right.release), LINGER_S)

    def _counts(self, stored: m.Stored) -> bool:
        """Whether a checkpoint is one to go back to. Before the run has begun it knows of those before it only."""
        returns = self._machine.returns or self._spec.returns
        return stored.name not in self._machine.rejected and stands(stored.incarnation, stored.step, returns)

    async def _open_library(self) -> tuple[m.Stored, ...]:
        """After this process's own restart the storage may be away: the workers train on, for as long as their leases last. A
        run that has ended writes nothing more, and that it cannot must not be noted as its end."""
        if self._machine.state in ENDED:
            return ()
        deadline = time.monotonic() + (self._spec.lease if self._restarted else 0.0)
        while True:
            try:
                return await self._library.open()
            except StorageError as error:
                if isinstance(error, LockedError) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)

    def _mind(self, task: asyncio.Task[Any]) -> None:
        """What ought to go on for ever has failed, which is an error of ours: the run ends, with what it has come to."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            story = "".join(traceback.format_exception(error))
            self.tell(m.AbortRequested(reason=f"an error of raytrain_ft, please report it: {story}"))

    async def _publish(self) -> None:
        while True:
            self._metrics.publish(self.now(), self._machine)
            self._log.flush()  # what could not be written need not wait for another event
            await asyncio.sleep(metrics.PUBLISH_INTERVAL_S)

    async def _sync_log(self) -> None:
        """On another thread, for which nobody waits: storage that hangs hangs there. As long as it does, no other is begun."""
        while True:
            await asyncio.sleep(LOG_SYNC_S)
            if self._log.unsynced:
                await asyncio.to_thread(self._log.sync)

    async def _watch_right(self) -> None:
        """Another run writes to the same files now, or to where checkpoints are: this one ends, and leaves them alone."""
        rights = [asyncio.create_task(one.until_lost()) for one in (self._right, self._library)]
        try:
            lost, _ = await asyncio.wait(rights, return_when=asyncio.FIRST_COMPLETED)
            self.tell(m.RightLost(reason=lost.pop().result()))
        finally:
            for right in rights:
                right.cancel()

    async def _watch_driver(self) -> None:
        """A run that nobody follows comes to an end."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(FOLLOWED_CHECK_S)
            now = time.monotonic()
            self._followed_at += max(0.0, now - before - 2 * FOLLOWED_CHECK_S)  # while this process was held up itself
            before = now
            if now - self._followed_at > self._spec.driver_timeout:
                await self.abort(f"nobody has followed the run for {self._spec.driver_timeout:g} s: its driver is gone")
                return

    async def _leave(self) -> None:
        """When the run is over, so is this process; it need not be there for a driver that ends it."""
        await asyncio.wait([self._life])
        if time.monotonic() - self._followed_at < self._spec.driver_timeout:
            await asyncio.sleep(LINGER_S)
        try:
            await self._end_workers()
        finally:  # workers end by themselves without it; one that stayed would keep the run's name taken
            ray.kill(ray.get_runtime_context().current_actor)

    def account(self, known: int = 0) -> dict[str, Any]:
        """State, progress and recoveries as plain data; the first recoveries that are over may be known."""
        machine, spec = self._machine, self._spec
        recoveries = self._notes.recoveries(known)
        newest = machine.newest
        loss = self._health.tidings.loss
        if loss is None and machine.load is not None:
            loss = machine.load.loss  # no step was done since
        return {
            "name": spec.name,
            "run_id": spec.run_id,
            "directory": str(spec.directory),
            "max_steps": spec.rules.max_steps,
            "stop_timeout": spec.rules.stop_timeout,
            "lease": spec.lease,
            "unfollowed_s": time.monotonic() - self._followed_at,
            "checkpoint": str(within(spec.stored_in, newest.name)) if spec.stored_in is not None and newest else None,
            "state": str(machine.state),
            "step": machine.step,
            "loss": loss,
            "incarnation": machine.incarnation,
            "world_size": len(machine.world),
            "members": {name: str(what) for name, what in machine.members.items()},
            "nodes": {name: self._contacts.node_of(name) for name in machine.members},
            "pids": {name: self._contacts.pid_of(name) for name in machine.members},
            "world": list(machine.world),
            "holders": machine.holders(),
            "stored": [stored.name for stored in machine.stored],
            "recoveries": recoveries,
            "recoveries_before": len(machine.recoveries) - len(recoveries),
            "warnings": list(machine.warnings),
            "failure": machine.failure,
            "result": machine.result,
            "seconds": self.now() if self._ended_at is None else self._ended_at,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    # ---------------------------------------------------------------- for the workers

    async def beat(self, beat: Beat) -> Pace | None:
        """A worker's heartbeat. Returns when the next is due; None tells it that it is no longer a member and must end."""
        if beat.member not in self._machine.members and self._machine.state != State.INITIALIZING:
            return None
        self._health.heard(beat)
        if (beat.commits or beat.notes) and self._machine.state not in ENDED:
            await self._events.join()  # they are in the log before the worker forgets them
        return Pace(self._health.pace, self.now())

    async def store_set(self, incarnation: int, key: str, value: bytes) -> None:
        await self._store.set(incarnation, key, value)

    async def store_get(self, incarnation: int, keys: list[str], seconds: float) -> list[bytes] | None:
        return await self._store.get(incarnation, keys, seconds)

    async def store_add(self, incarnation: int, key: str, amount: int) -> int:
        return await self._store.add(incarnation, key, amount)

    # ---------------------------------------------------------------- one event

    def _step(self, event: m.Event) -> None:
        """Log, decide, carry out."""
        before = self._machine.state
        self._log.append(event)
        try:
            commands = handle(self._machine, event)
        except Exception as error:
            # A bug of ours. End the run with the story rather than going on from a state that nobody foresaw.
            story = str(error) if isinstance(error, IllegalEventError) else traceback.format_exc()
            self._machine.failure = ("IllegalEventError", story)
            self._machine.state = State.ERRORED
            commands = [*(c.Kill(member) for member in self._machine.members), c.End()]
        if self._machine.state != before:
            self._notes.state()
            self._chaos.probe(str(self._machine.state), step=self._machine.step)
        self._health.follow(self._machine)
        self._notes.finished_recoveries()
        self._metrics.take(event, self._machine)
        self._note_sleep(event)
        if isinstance(event, m.CauseFound):
            self._notes.explained(event.lost)
        for command in commands:
            if isinstance(command, c.Run):
                self._notes.resumed(command)
            elif isinstance(command, c.Reconcile):
                self._note_stored(command.load)
            elif isinstance(command, c.Trim):
                self._trim_logs_of_the_lost(command.step)
            elif isinstance(command, c.FindCheckpoints):
                self._library.find(command.incarnation, self._health.reached, self.tell)
            self._crew.carry_out(command)

    def _trim_logs_of_the_lost(self, step: int) -> None:
        """Who is lost cannot delete what it logged, and who took its place has not logged that again. It came no further
        than to the step at which it is first missed, which others may not have told of yet."""
        plan = self._machine.plan
        reached = max(self._machine.step, 0 if plan is None else plan.step)
        with suppress(OSError):  # what stays goes with the run's other logs at its end
            for path in self._spec.logs.glob("*.arrow"):
                member = path.name.split("-")[0]
                if member not in self._machine.members and self._lost_at.setdefault(member, reached) < step:
                    path.unlink(missing_ok=True)

    def _note_stored(self, name: str) -> None:
        """What a checkpoint says of the steps before it, if that has not been noted: its worker may have died untold."""
        for record in self._library.records.pop(name, []):
            self._notes.stored(name, record)
            self._health.tidings.samples_lost(record)


def _check_mount(spec: RunSpec) -> None:
    """Raises FileNotFoundError if this process has come back to the empty directory of a mount that is away: the run's workers
    train on, and it does not begin anew there."""
    if not (spec.directory / "events.jsonl").exists() and not sees_directory(spec) and _has_come_back():
        raise FileNotFoundError(errno.ENOENT, f"nothing of run {spec.run_id} is here: is it mounted?", str(spec.directory))


def _draw_anew(directory: Path) -> str:
    """As `draw`, after somebody who was killed in the midst of it. A draft that was just begun is of one who draws as well."""
    with suppress(OSError):  # they are in nobody's way
        for drafts in DRAFTS:
            for draft in directory.glob(drafts):
                if time.time() - draft.stat().st_mtime > OLD_DRAFT_S:
                    draft.unlink()
    return draw(directory)


def _patiently(work: Callable[[], T]) -> T:
    """Does what needs the run's directory. When this process comes back after its loss, it waits for a storage that is away as
    long as it would have while it ran: Ray does not start an actor again whose `__init__` has failed. At the run's start there
    is nothing to be lost, and an error is told at once."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return work()
        except OSError:
            if time.monotonic() > deadline or not _has_come_back():
                raise
        time.sleep(LOG_RETRY_S)


def _has_come_back() -> bool:
    """Whether this process takes the place of one that was lost."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
