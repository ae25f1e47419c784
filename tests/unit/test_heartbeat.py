"""How often a worker beats, and tells of committed steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_ft.runtime import heartbeat, worker
from raytrain_ft.runtime.heartbeat import Heartbeat, beat_interval, record_interval
from raytrain_ft.runtime.notices.notice import NoticeSpec
from raytrain_ft.runtime.software import CODE, pack
from raytrain_ft.runtime.spec import Beat, Pace

HOUR = 3600.0


def heard_by(hear: Callable[[Beat], Pace], interval_s: float, monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """One that has begun; of its steps the numbers are told alone."""
    monkeypatch.setattr(heartbeat, "_record", lambda commits: [commit.step for commit in commits])
    monkeypatch.setattr(heartbeat, "_shared_out", lambda commit: commit.attempt.replicas)
    monkeypatch.setattr(heartbeat.ray, "get", lambda beat, timeout: hear(beat))
    supervisor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda beat: beat))
    spec: Any = SimpleNamespace(heartbeat_interval=interval_s, lease=5.0)
    beating = Heartbeat("w0", spec, supervisor, tuple)
    beating.start()
    return beating


@pytest.mark.parametrize(
    ("replicas", "age_s", "seconds"),
    [
        (1, 0, 1),
        (8, 0, 1),
        (64, 0, 8),
        (4, HOUR, 1),
        (4, 5 * HOUR, 5),
        (4, 1000 * HOUR, 10),
        (64, HOUR, 8),
        (640, 9 * HOUR, 80),
    ],
)
def test_records_become_rarer_with_many_workers_and_with_time(replicas: int, age_s: float, seconds: float) -> None:
    assert record_interval(replicas, age_s) == seconds


def test_a_supervisor_that_comes_back_after_weeks_has_not_too_much_to_read() -> None:
    """A record takes 12 us to be read."""
    for workers in (4, 16, 64):
        weeks = 2 if workers == 64 else 4
        records = workers * weeks * 7 * 24 * HOUR / record_interval(workers, 7 * 24 * HOUR)
        assert records * 12e-6 < 120, "the workers' lease"


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.25), (50, 0.25), (64, 0.32), (400, 2.0)])
def test_of_many_workers_each_beats_less_often(workers: int, seconds: float) -> None:
    assert beat_interval(0.25, workers) == seconds


def test_a_worker_beats_as_often_as_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []

    def hear(beat: Beat) -> Pace:
        heard.append(time.monotonic())
        return Pace(0.01 if len(heard) < 5 else 1e6, 0.0)

    monkeypatch.setattr(heartbeat.ray, "get", lambda beat, timeout: hear(beat))
    supervisor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda beat: beat))
    spec: Any = SimpleNamespace(heartbeat_interval=0.01, lease=5.0)
    Heartbeat("w0", spec, supervisor, tuple).start()
    deadline = time.monotonic() + 10.0
    while len(heard) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(heard) == 5


def test_a_worker_that_was_never_asked_for_anything_ends_when_the_supervisor_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor was lost between the two, and its driver too: nobody else would end it."""
    ended, never = threading.Event(), threading.Event()

    def end(code: int) -> None:
        ended.set()
        never.wait()

    def gone(beat: Any, timeout: float) -> None:
        raise ActorDiedError

    monkeypatch.setattr(heartbeat.ray, "get", gone)
    monkeypatch.setattr(heartbeat, "os", SimpleNamespace(_exit=end))
    monkeypatch.setattr(worker, "load_compiler_late", lambda: None)
    supervisor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda beat: beat))
    notices = NoticeSpec(clouds=(), detect=False, drain=False, grace_s=None)
    about = {"notices": notices, "heartbeat_interval": 0.01, "lease": 5.0}
    spec: Any = SimpleNamespace(name="run", directory=tmp_path, faults=(), log=None, **about)
    worker.Worker(CODE, pack(spec), "w0", supervisor, epoch=1)
    assert ended.wait(30)


@pytest.mark.parametrize("how", ["parked", "completed by a recovery"])
def test_a_step_is_told_of_long_before_the_next_heartbeat_is_due(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be in no record if all who completed it died, while those whom they have filled go on."""
    heard: list[Beat] = []

    def hear(beat: Beat) -> Pace:
        time.sleep(0.05)
        heard.append(beat)
        return Pace(1e6, 0.0)

    monkeypatch.setattr(heartbeat, "_record", lambda commits: {"steps": [commit.step for commit in commits]})
    monkeypatch.setattr(heartbeat, "_shared_out", lambda commit: commit.attempt.replicas)
    monkeypatch.setattr(heartbeat.ray, "get", lambda beat, timeout: hear(beat))
    supervisor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda beat: beat))
    spec: Any = SimpleNamespace(heartbeat_interval=1e6, lease=5.0)
    beating = Heartbeat("w0", spec, supervisor, tuple)
    beating.start()
    beating.running(1, 0)

    def told(seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not any(beat.commits for beat in heard):
            time.sleep(0.001)
        return [step for beat in heard for record in beat.commits for step in record["steps"]]

    beating._last_record = time.monotonic()  # so that another record is not due for a second
    commit: Any = SimpleNamespace(step=10, attempt=SimpleNamespace(replicas=2))
    beating.committed(commit)
    assert told(0.2) == []
    if how == "parked":
        beating.idle(2)
    else:
        beating.tell_all(10.0)
        assert (beating._closed, beating._open) == ([], [])
    assert told(10.0) == [10]


def test_records_of_an_old_run_are_rare_also_after_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run of weeks that often loses workers would have too many of them for a supervisor that must read all."""
    heard: list[Any] = []

    def hear(beat: Beat) -> Pace:
        heard.append(beat)
        return Pace(1e6, 5 * HOUR)

    beating = heard_by(hear, 0.01, monkeypatch)
    deadline = time.monotonic() + 10.0
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    beating.running(2, 0)
    times = iter([now := time.monotonic(), *(now + seconds for seconds in (0.1, 3.0, 4.9, 5.2))])
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: next(times)))
    began, due = heartbeat.time.monotonic(), []
    for step in range(4):
        beating._open = [SimpleNamespace(step=step, attempt=SimpleNamespace(replicas=2))]  # pyright: ignore
        due.append(beating._is_due())
        beating._last_record = beating._last_record or began
    monkeypatch.setattr(heartbeat, "time", time)
    assert due == [True, False, False, True], "the first at once, then every five seconds"


def test_a_step_is_told_of_although_the_next_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the step at which a run stands still would be shown as one of a second before."""
    heard: list[Any] = []

    def hear(beat: Beat) -> Pace:
        heard.extend(beat.commits)
        return Pace(
            0.01 if sum(map(len, heard)) < 3 else 1e6, 0.0
        )  # no further beat: nobody would answer it when the test is over

    monkeypatch.setattr(heartbeat, "_record", lambda commits: [commit.step for commit in commits])
    monkeypatch.setattr(heartbeat, "_shared_out", lambda commit: commit.attempt.replicas)
    monkeypatch.setattr(heartbeat.ray, "get", lambda beat, timeout: hear(beat))
    supervisor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda beat: beat))
    spec: Any = SimpleNamespace(heartbeat_interval=0.01, lease=5.0)
    beating = Heartbeat("w0", spec, supervisor, tuple)
    beating.running(1, 0)
    beating.start()
    for step in (10, 11, 12):  # the first of an incarnation goes out at once
        beating.committed(SimpleNamespace(step=step, attempt=SimpleNamespace(replicas=2)))  # pyright: ignore
    deadline = time.monotonic() + 10.0
    while sum(map(len, heard)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [step for steps in heard for step in steps] == [10, 11, 12]


def test_a_checkpoint_holds_what_was_told_a_moment_ago_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's log may not have been synced since, and be lost with its machine."""
    heard: list[Any] = []

    def hear(beat: Beat) -> Pace:
        heard.extend(beat.commits)
        return Pace(1e6, 0.0)

    beating = heard_by(hear, 1e6, monkeypatch)
    beating.running(1, 0)
    steps: list[Any] = [SimpleNamespace(step=step, attempt=SimpleNamespace(replicas=2)) for step in (10, 11)]
    beating.committed(steps[0])  # the first of an incarnation goes out at once
    deadline = time.monotonic() + 10.0
    while not beating._told and time.monotonic() < deadline:
        time.sleep(0.001)  # and no further beat is asked for: nobody would answer it when the test is over
    beating.committed(steps[1])
    assert (heard, beating.untold()) == ([[10]], [[10], [11]])
    monkeypatch.setattr(heartbeat, "KEPT_S", 0.0)
    assert beating.untold() == [[11]]
