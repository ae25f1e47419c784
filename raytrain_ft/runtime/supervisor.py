"""The supervisor actor: wait for an event, let the machine decide, carry its commands out.

It owns the run. Its own process outlives the driver's, and ends with the run: when the run is over, or when nobody has followed
it for too long.

Every event is written to the run's log before it is acted upon. When this process is lost, Ray starts it again (its workers
live on, they are not its children), it reads the log, and the machine goes on from there.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import time
import traceback
from dataclasses import asdict
from typing import Any

import ray

from raytrain_ft.chaos.faults import Injector
from raytrain_ft.errors import ConfigError, FTError, IllegalEventError
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.measures import Measures
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.runtime import health, metrics, report, timeline
from raytrain_ft.runtime.crew import Crew
from raytrain_ft.runtime.event_log import EventLog, read_events
from raytrain_ft.runtime.leftovers import kill_named
from raytrain_ft.runtime.library import Library
from raytrain_ft.runtime.notices.notice import REQUEST, Notice
from raytrain_ft.runtime.rendezvous import StoreServer
from raytrain_ft.runtime.spec import Beat, RunSpec

FOLLOWED_CHECK_S = 0.5
LINGER_S = 5.0
"""How long this process stays to tell the outcome to who follows the run; after that the records tell it."""


class Supervisor:
    """One run's supervisor. Methods are called by who follows the run (`run`, `follow`), by workers (`beat`, `store_*`)."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._events: asyncio.Queue[m.Event] = asyncio.Queue()
        self._chaos = Injector(spec.faults, spec.directory / "faults", "supervisor")
        past = _past(spec)
        self._log = EventLog(spec.directory / "events.jsonl")
        self._start = time.monotonic() - (past[-1].at if past else 0.0)
        self._machine, measures = RunState(spec.rules), Measures()
        for event in past:
            handle(self._machine, event)
            measures.take(event, self._machine)
        self._metrics = metrics.Publisher(spec.name, measures)
        self._health = health.Health(spec, self.tell, self.now)
        self._health.recall(past)
        self._health.follow(self._machine)
        self._crew = Crew(spec, self.tell, self.now, self._health)
        self._store = StoreServer()
        self._library = Library(spec)
        self._restarted = bool(past)
        self._ended_at: float | None = None
        self._lost_at: dict[str, int | None] = {}  # who was lost, and the step that others went on from
        self._was_over = self._machine.state in ENDED
        self._followed_at = time.monotonic()
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._leaving = asyncio.get_running_loop().create_task(self._leave())

    def now(self) -> float:
        """Seconds since the run began, monotonic, also across this actor's own restarts."""
        return time.monotonic() - self._start

    def tell(self, event: m.Event) -> None:
        """Hands an event to the machine, in order."""
        self._events.put_nowait(event)

    # ---------------------------------------------------------------- for who follows the run

    async def run(self) -> dict[str, Any]:
        """Returns the account of the run's end, when that has come. Asked again by Ray after a restart."""
        return await asyncio.shield(self._life)

    async def follow(self) -> dict[str, Any]:
        """How the run stands. Whoever asks keeps it going."""
        self._followed_at = time.monotonic()
        return self.account()

    async def status(self) -> dict[str, Any]:
        """How the run stands."""
        return self.account()

    async def abort(self, reason: str) -> None:
        """The run is to end before its time, with a last checkpoint."""
        self.tell(m.AbortRequested(at=self.now(), reason=reason))

    async def notice(self, member: str, deadline_s: float, reason: str) -> None:
        """Somebody asks that this worker leave within so many seconds.

        Raises:
            ConfigError: there is no such worker, or no such time.
        """
        if member not in self._machine.members:
            raise ConfigError(f"notice for {member!r}: the run has the workers {', '.join(self._machine.members)}")
        if not 0 <= deadline_s < math.inf:
            raise ConfigError(f"notice for {member!r}: deadline_s={deadline_s} is no number of seconds from now on")
        self._health.noticed(member, Notice(deadline_s, REQUEST, reason))

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
        self._crew.ask(world[rank], "sleep", asleep, at_once)

    # ---------------------------------------------------------------- from the beginning to the end

    async def _live(self) -> dict[str, Any]:
        """The run, or what is left of it after a restart; returns the account of its end."""
        try:
            stored = await self._library.open()
        except FTError as error:
            return self.account() | {"failure": (type(error).__name__, str(error))}
        self._crew.epoch = self._library.epoch
        if self._restarted:
            self.tell(m.SupervisorRestarted(at=self.now()))
        else:
            shutil.rmtree(self._spec.logs, ignore_errors=True)  # of a run of this name that could not clean up: never replayed
            started = {"incarnation": self._spec.incarnation, "stored": stored, "details": _details(self._spec)}
            self.tell(m.RunStarted(at=0.0, run_id=self._spec.run_id, **started))
        work = (self._health.watch_cluster(self._crew), self._watch_driver(), self._publish())
        watchers = [asyncio.create_task(one) for one in work]
        try:
            while self._machine.state not in ENDED:
                self._step(await self._events.get())
                self._events.task_done()
            await self._crew.settled()
        finally:
            self._ended_at = self.now()
            for watcher in watchers:
                watcher.cancel()
            self._metrics.publish(self._ended_at, self._machine)
            await self._library.close()
            shutil.rmtree(self._spec.logs, ignore_errors=True)  # nobody is left to recover
        if not self._was_over:
            self._note_end()
        return self.account()

    async def _publish(self) -> None:
        while True:
            self._metrics.publish(self.now(), self._machine)
            await asyncio.sleep(metrics.PUBLISH_INTERVAL_S)

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
