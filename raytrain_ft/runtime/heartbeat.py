"""A worker's heartbeat: shows that it lives, carries what it has committed, and ends the process when nobody answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError

from raytrain_ft.policy.sampling import digest_of_ids
from raytrain_ft.runtime.notices.notice import Notice
from raytrain_ft.runtime.spec import Beat, RunSpec

if TYPE_CHECKING:
    from raytrain_ft.training.attempt import Commit

TOLD_POLL_S = 0.005
BEATS_PER_S = 200
"""About so many reach the supervisor at most, from all workers together: each costs it a good part of a millisecond."""
RECORD_INTERVAL_S = 1.0
"""Committed steps are merged into one record per this time; the first of an incarnation goes out at once."""
RECORDS_PER_S = 8
"""No more than so many reach the supervisor from all workers together: of many, each merges more steps into a record."""
LONGEST_INTERVAL_S = 10.0
KEPT_S = 5.0
"""How long records are kept that the supervisor has acknowledged: by then its log has been synced, unless storage hangs."""
SHARE_OF_AGE = 1 / 3600
"""Of the run's age, up to `LONGEST_INTERVAL_S`: a supervisor that was lost reads all records to come back, and a run of weeks
must not be too long to be read, however often its workers are lost."""


class Heartbeat:
    """One thread that tells the supervisor how this worker is."""

    def __init__(self, member: str, spec: RunSpec, supervisor: Any, notices: Callable[[], tuple[Notice, ...]]) -> None:
        self._member = member
        self._spec = spec
        self._supervisor = supervisor
        self._notices = notices  # what stands of this process's end, told again with every beat
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._status, self._detail, self._kind = "idle", "", ""
        self._incarnation = 0
        self._rank = -1
        self._where, self._step, self._since = "setup", 0, time.monotonic()
        self._open: list[Commit] = []
        self._closed: list[dict[str, Any]] = []
        self._told: list[tuple[float, dict[str, Any]]] = []  # records that were acknowledged of late, and when
        self._notes: list[tuple[str, dict[str, Any]]] = []
        self._last_record = 0.0
        self._run_began = time.monotonic()
        self._pause = spec.heartbeat_interval
        self._thread = threading.Thread(target=self._beat_until_the_end, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def at(self, where: str, step: int) -> None:
        """The training thread has come to this place. Called many times a step, hence no lock."""
        self._where, self._step, self._since = where, step, time.monotonic()

    def idle(self, incarnation: int) -> None:
        """Parked, in this incarnation."""
        with self._lock:
            self._close_record()
            self._status, self._detail, self._kind = "idle", "", ""
            self._incarnation = incarnation
        self._wake.set()  # what was committed before is told before anything else can happen to this worker

    def running(self, incarnation: int, rank: int) -> None:
        """Training has begun in this incarnation."""
        with self._lock:
            self._close_record()  # what a recovery completed belongs to the incarnation before
            self._status, self._detail, self._kind = "running", "", ""
            self._incarnation, self._rank = incarnation, rank
            self._last_record = 0.0
            self.at("run", self._step)

    def is_running(self, incarnation: int) -> bool:
        """Whether training was begun in this incarnation already (a command that came twice)."""
        return self._incarnation == incarnation and self._status != "idle"

    def ended(self, status: str, detail: str, kind: str = "") -> None:
        """The run of steps has ended in this way; said at once, and again until the supervisor has heard it."""
        with self._lock:
            self._close_record()
            self._status, self._detail, self._kind = status, detail, kind
        self._wake.set()

    def committed(self, commit: Commit) -> None:
        """A step was committed."""
        with self._lock:
            if self._open and _shared_out(self._open[-1]) != _shared_out(commit):
                self._close_record()
            self._open.append(commit)
            if not self._is_due():
                return
            self._close_record()
        self._wake.set()

    def tell_all(self, seconds: float) -> None:
        """Tells at once of every step that was committed so far, and waits until that is acknowledged, but no longer than
        this."""
        with self._lock:
            self._close_record()
        self.await_told(seconds)

    def note(self, event: str, fields: dict[str, Any]) -> None:
        """Something that the supervisor must know. Any thread may call it."""
        with self._lock:
            self._notes.append((event, fields))
        self._wake.set()

    def untold(self) -> list[dict[str, Any]]:
        """Records of the steps of which the supervisor may not know yet, or its log on the disk. A checkpoint holds them: then
        they are not lost with this worker, or with the supervisor's machine."""
        with self._lock:
            now = time.monotonic()
            told = [record for at, record in self._told if now - at < KEPT_S]
            return [*told, *self._closed, *([_record(self._open)] if self._open else [])]

    def await_told(self, seconds: float) -> None:
        """Waits until the supervisor has acknowledged everything that there was to tell, but no longer than this."""
        deadline = time.monotonic() + seconds
        self._wake.set()
        while time.monotonic() < deadline and (self._notes or self._closed):
            time.sleep(TOLD_POLL_S)

    def _is_due(self) -> bool:
        """Whether there are open commits, and the last record is old enough for another."""
        if not self._open:
            return False
        now = time.monotonic()
        return now - self._last_record >= record_interval(self._open[-1].attempt.replicas, now - self._run_began)

    def _close_record(self) -> None:
        """Merges the open commits into one record."""
        commits, self._open = self._open, []
        self._last_record = time.monotonic()
        if commits:
            self._closed.append(_record(commits))

    # ---------------------------------------------------------------- on the thread

    def _beat_until_the_end(self) -> None:
        reached = time.monotonic()
        while True:
            self._wake.wait(self._pause)
            self._wake.clear()
            try:
                beat = self._beat()
                pace: Any = ray.get(self._supervisor.beat.remote(beat), timeout=self._spec.lease)
            except ActorDiedError:
                os._exit(0)  # the supervisor is gone for good: the run is over, or its driver is
            except Exception:  # it restarts; training goes on meanwhile. Whatever else it is: a run whose beats end never ends
                if time.monotonic() - reached > self._spec.lease:
                    os._exit(0)
                continue
            if pace is None:
                os._exit(0)  # this worker is no longer a member: it was given up for lost, and must not go on
            reached, self._pause = time.monotonic(), pace.pause
            self._run_began = reached - pace.age
            with self._lock:
                self._told = [(at, record) for at, record in self._told if reached - at < KEPT_S]
                self._told += [(reached, record) for record in beat.commits]
                self._closed = self._closed[len(beat.commits) :]
                self._notes = self._notes[len(beat.notes) :]

    def _beat(self) -> Beat:
        with self._lock:
            if self._is_due():  # no step has ended since: it is a long one, or hangs
                self._close_record()
            return Beat(
                self._member,
                self._incarnation,
                self._rank,
                self._status,
                self._detail,
                self._kind,
                self._step,
                self._where,
                time.monotonic() - self._since,
                tuple(self._closed),
                tuple(self._notes),
                self._notices(),
                time.time(),
            )


def beat_interval(least_s: float, workers: int) -> float:
    """Seconds between two heartbeats of each of so many workers, if they are to be `least_s` where few would do."""
    return max(least_s, workers / BEATS_PER_S)


def record_interval(replicas: int, age_s: float = 0.0) -> float:
    """Seconds between two records of one worker in a run of this age."""
    return max(RECORD_INTERVAL_S, replicas / RECORDS_PER_S, min(age_s * SHARE_OF_AGE, LONGEST_INTERVAL_S))


def _shared_out(commit: Commit) -> tuple[Any, ...]:
    return commit.attempt.weights, commit.attempt.batch.owed


def _record(commits: list[Commit]) -> dict[str, Any]:
    """These commits as one record. All are of one incarnation, one after the other."""
    first, last = commits[0].attempt, commits[-1].attempt
    return {
        "rank": first.replica,  # who draws which samples; all stages of a pipeline draw the same
        "world_size": first.replicas,
        "incarnation": first.incarnation,
        "first_step": first.step,
        "stop_step": last.step + 1,
        "epoch": first.batch.epoch,
        "start": first.batch.start,
        "owed": first.batch.owed,
        "weights": first.weights,
        "ids_digest": digest_of_ids(ids for c in commits for ids in c.attempt.ids),
        "loss": commits[-1].loss,
        "longest_s": max(c.seconds for c in commits),
        "lost": [
            {"step": c.attempt.step, "epoch": c.attempt.batch.epoch, "start": start, "stop": stop, "why": c.why}
            | {"returned": c.returned}
            for c in commits
            for start, stop in c.lost
        ],
    }
