"""How long training waits for storage that is slow, or hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.policy.frequency import Interval
from raytrain_ft.policy.messages import IntervalChosen
from raytrain_ft.policy.tuner import Decision, Tuner
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage.filesystem import LocalStorage, Storage
from raytrain_ft.storage.job import AnyPersister, Job, Outcome
from raytrain_ft.storage.manifest import Name, ShardEntry
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.storage.retention import KEEP_ALL
from raytrain_ft.training import checkpointer, snapshot, tuning
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.layout import share
from raytrain_ft.training.settings import Target
from raytrain_ft.training.snapshot import Copy


class Slow:
    """A persister that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def start(self) -> None: ...

    def submit(self, job: Job) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        timer = threading.Timer(self.seconds, lambda: future.set_result(Outcome(None, self.seconds, 1)))
        timer.daemon = True
        timer.start()
        return future

    def cancel(self, name: Name) -> None: ...

    def give_up(self, place: Place, name: Name, number: int, count: int) -> None: ...

    @property
    def is_tidy(self) -> bool:
        return self.await_tidy(0.0)

    def await_tidy(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> None: ...


class Held(Slow):
    """A persister whose jobs end when the test says so."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.jobs: SimpleQueue[Future[Outcome]] = SimpleQueue()

    def submit(self, job: Job) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.jobs.put(future)
        return future

    def end(self, seconds: float, error: str | None = None) -> None:
        """The job under way ends, after so many seconds as it says."""
        self.jobs.get(timeout=10).set_result(Outcome(error, seconds, 1))


class Untidy(Slow):
    """A persister that has much to delete after a commit."""

    left = 3

    def await_tidy(self, timeout_s: float) -> bool:
        self.left -= 1
        return self.left <= 0


Make = Callable[..., Checkpointer]


@pytest.fixture
def told() -> list[tuple[str, int]]:
    """What was told of checkpoints: the event, and the step that it is about."""
    return []


@pytest.fixture
def make(told: list[tuple[str, int]]) -> Iterator[Make]:
    made: list[Checkpointer] = []

    def begun(storage: float | AnyPersister, **target: Any) -> Checkpointer:
        found = Checkpointer(
            Target(place=Place("/nowhere"), owner="run", epoch=1, **target),
            lambda: ([("w", torch.zeros(8))], {}),
            lambda: Tuner(budget=0.035, window=4, fixed=5),
            lambda event, fields: told.append((event, fields["step"])) if event != "IntervalChosen" else None,
            persister=lambda memory: Slow(storage) if isinstance(storage, float) else storage,
        )
        found.begin(0, 1, 1, 0)
        made.append(found)
        return found

    yield begun
    for one in made:
        one.close(0.0)


def go_on() -> None: ...


def until(condition: Callable[[], bool]) -> None:
    deadline = real_time() + 20
    while not condition():
        assert real_time() < deadline
        time.sleep(0.01)


real_time = time.monotonic


def test_the_last_checkpoint_of_a_fresh_launch_is_waited_for(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows yet how long one takes, and nothing is held up."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.1)
    one = make(0.5, timeout_s=5.0)
    one.take(5, go_on)
    one.finish(9, go_on)
    assert told == [("CheckpointCommitted", 5), ("CheckpointCommitted", 9)]


def test_one_that_is_asked_for_does_not_wait_for_the_interval(make: Make, told: list[tuple[str, int]]) -> None:
    """But for the one before: there is one at a time."""
    one = make(0.2, timeout_s=5.0)
    assert not one.wants(3)
    one.asked = True
    assert one.wants(3)
    one.take(3, go_on)
    assert not one.wants(4)
    one.asked = True
    assert not one.wants(4), "the other is under way"
    one.await_durable(go_on, 5.0)
    assert one.wants(4)
    one.take(4, go_on)
    one.await_durable(go_on, 5.0)
    assert told == [("CheckpointCommitted", 3), ("CheckpointCommitted", 4)]


def test_what_could_not_be_deleted_is_told_with_the_next_checkpoint() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    held = Held()
    one = Checkpointer(
        Target(place=Place("/nowhere"), owner="run", epoch=1),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: Tuner(budget=0.035, window=4, fixed=5),
        lambda event, fields: told.append((event, fields)) if event != "IntervalChosen" else None,
        persister=lambda memory: held,
    )
    one.begin(0, 1, 1, 0)
    for step, error in ((5, None), (10, "No space left on device")):
        one.take(step, go_on)
        held.jobs.get(timeout=10).set_result(Outcome(error, 0.1, 1, "it could not be deleted"))
        one.await_durable(go_on, 5.0)
    one.close()
    (_, committed), (_, failed) = told
    assert committed["untidy"] == "it could not be deleted"
    assert failed["reason"] == "No space left on device. Of the one before, it could not be deleted"


def test_the_last_checkpoint_is_waited_for_where_those_before_it_were_too_slow_for_training(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.1)
    one = make(1.0, timeout_s=20.0)
    one.take(5, go_on)
    one.take(10, go_on)
    one.finish(12, go_on)
    assert told == [("CheckpointFailed", 10), ("CheckpointCommitted", 5), ("CheckpointCommitted", 12)]


def test_a_storage_that_has_hung_for_long_is_not_waited_for_in_the_end(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.1)
    one = make(1000.0, timeout_s=20.0)
    one.take(5, go_on)
    one.take(10, go_on)
    monkeypatch.setattr(checkpointer.time, "monotonic", lambda: real_time() + 20.0)
    began = real_time()
    one.finish(12, go_on)
    assert real_time() - began < 10
    assert told == [("CheckpointFailed", 10), ("CheckpointFailed", 12)]


def second_of_two(directory: Path) -> Checkpointer:
    one = Checkpointer(
        Target(place=Place(str(directory)), owner="run", epoch=1),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: Tuner(budget=0.035, window=4, fixed=5),
        lambda event, fields: None,
    )
    one.begin(1, 2, 1, 0)
    return one


@pytest.mark.parametrize("what", ["snapshot", "persister"])
def test_nobody_waits_for_a_shard_that_never_came_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """There is no memory for the snapshot; or the persister is killed, which says nothing more itself."""

    def no_memory(copy: Copy) -> None:
        raise OSError(12, "Cannot allocate memory")

    one = second_of_two(tmp_path)
    persister = one._persister
    assert isinstance(persister, Persister)
    assert persister.pid is not None
    if what == "snapshot":
        monkeypatch.setattr(Copy, "_copy", no_memory)
    else:
        os.kill(persister.pid, signal.SIGSTOP)
    one.take(5, go_on)
    if what == "persister":
        until(lambda: persister._pending is not None)
        os.kill(persister.pid, signal.SIGKILL)
    one.await_durable(go_on, 5.0)
    one.close(10.0)
    (name,) = checkpoint.names(LocalStorage(tmp_path))
    began = time.monotonic()
    with pytest.raises(StorageError, match="could not write shard 1 of 2"):
        checkpoint.await_shards(LocalStorage(tmp_path), name, ShardEntry(1, []), 2, 60.0, go_on)
    assert time.monotonic() - began < 30


def test_nobody_waits_for_a_shard_that_its_worker_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before hangs on this worker alone: the others have begun theirs."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.0)
    one = second_of_two(tmp_path)
    persister = one._persister
    assert isinstance(persister, Persister)
    assert persister.pid is not None
    os.kill(persister.pid, signal.SIGSTOP)
    assert one.take(5, go_on)
    assert not one.take(10, go_on)
    began = time.monotonic()
    with pytest.raises(StorageError, match="could not write shard 1 of 2"):
        checkpoint.await_shards(LocalStorage(tmp_path), Name(10, 1, 1), ShardEntry(1, []), 2, 60.0, go_on)
    assert time.monotonic() - began < 30
    os.kill(persister.pid, signal.SIGCONT)
    one.close(10.0)


def test_the_last_checkpoint_is_taken_though_shards_of_the_one_before_did_not_come(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That ends a little after the time that is allowed, which its persister counts from when its own shard is written."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 3.0)
    storage = Held()
    one = make(storage, timeout_s=3.5)
    one.take(5, go_on)
    late = threading.Timer(4.5, lambda: storage.end(3.6, "shards [1] of 2 did not come within 3.5 s"))
    late.start()
    last = threading.Timer(5.0, lambda: storage.end(0.1))
    last.start()
    one.finish(9, go_on)
    assert told == [("CheckpointFailed", 5), ("CheckpointCommitted", 9)]


@pytest.mark.parametrize(("error", "attempts"), [(None, 1), ("SlowDown", 2)])
def test_the_checkpoint_of_the_last_step_is_tried_again_if_it_failed(
    make: Make, told: list[tuple[str, int]], error: str | None, attempts: int
) -> None:
    storage = Held()
    one = make(storage)
    one.take(8, go_on)
    storage.end(0.1, error)
    one.await_durable(go_on, 5.0)
    if attempts == 2:
        threading.Thread(target=storage.end, args=(0.1,), daemon=True).start()
    one.finish(8, go_on)
    assert told == [("CheckpointFailed", 8), ("CheckpointCommitted", 8)][-attempts:]


def test_training_does_not_stand_still_while_checkpoints_fail(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of another worker is full: whoever waits for its shard finds out after minutes, each time anew."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.1)
    storage, waits = Held(), []
    one = make(storage)
    one.take(5, go_on)
    one.take(10, lambda: waits.append(10))
    storage.end(120.0, "no shard arrived")
    assert one._patience(10.0) == 10.0, "that it took so long says nothing of how long one takes"
    one.take(15, go_on)
    one.take(20, lambda: waits.append(20))
    one.take(25, lambda: waits.append(25))
    storage.end(120.0, "no shard arrived")
    one.take(30, go_on)
    storage.end(40.0)
    assert one._patience(10.0) == 120.0
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.0)
    one.take(35, go_on)
    one.take(40, lambda: storage.end(40.0))
    storage.end(40.0)
    assert set(waits) == {10}, "not at all from the first that is not in time until one is durable"
    assert [step for event, step in told if event == "CheckpointFailed"] == [10, 5, 20, 25, 15]
    assert [step for event, step in told if event == "CheckpointCommitted"] == [30, 35, 40]


def test_nobody_else_is_asked_for_a_checkpoint_that_would_be_left_out(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shards of it would fill the storage, for as long as that of worker 0 hangs."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.0)
    storage = Held()
    one = make(storage)
    assert one.wants(5)
    assert one.take(5, go_on)
    assert one.wants(10), "it is waited for"
    assert not one.take(10, go_on)
    assert [one.wants(step) for step in (14, 15, 16, 20)] == [False] * 4
    storage.end(0.1)
    one.await_durable(go_on, 5.0)
    assert one.wants(25)
    left_out = [("CheckpointFailed", step) for step in (10, 15, 20)]
    assert told == [*left_out, ("CheckpointCommitted", 5)], "it is told as before"


def test_that_a_checkpoint_was_broken_off_with_its_world_says_nothing_of_storage(
    make: Make, told: list[tuple[str, int]]
) -> None:
    storage = Held()
    one = make(storage)
    one.take(5, go_on)
    one.begin(0, 1, 2, 5)
    storage.end(1.0, "the world that was writing it is over")
    one.take(10, go_on)
    one.take(15, lambda: storage.end(1.0))
    storage.end(1.0)
    assert told == [("CheckpointFailed", 5), ("CheckpointCommitted", 10), ("CheckpointCommitted", 15)]


def test_where_others_wait_for_this_worker_its_patience_is_shorter_than_theirs(make: Make, told: list[tuple[str, int]]) -> None:
    one = make(20.0, timeout_s=30.0, most_patience_s=0.2)
    one.take(5, go_on)
    began = time.monotonic()
    one.take(10, go_on)
    assert time.monotonic() - began < 10
    assert told == [("CheckpointFailed", 10)]


class Deciding(Tuner):
    """Decides at every checkpoint, and notes what it is told of waits."""

    def __init__(self) -> None:
        super().__init__(budget=0.035, window=4)
        self.waits: list[float] = []

    def began(self, step: int) -> Decision:
        interval = Interval(k=step, mode="cpu", overhead=0.0, k_persist=0, k_overhead=0)
        return Decision(step=step, interval=interval, profile=None, observed=None, reason="moved")

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)


def test_a_checkpoint_that_is_left_out_is_judged_like_any_other() -> None:
    """What its interval decides is told, and the wait for the one before is no overhead of its own."""
    tuner, told = Deciding(), []
    one = Checkpointer(
        Target(place=Place("/nowhere"), owner="run", epoch=1, most_patience_s=0.2),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: tuner,
        lambda event, fields: told.append((event, fields["step"])),
        persister=lambda memory: Slow(20.0),
    )
    one.begin(0, 1, 1, 0)
    one.take(5, go_on)
    one.take(10, go_on)
    assert told == [("IntervalChosen", 5), ("CheckpointFailed", 10), ("IntervalChosen", 10)]
    assert len(tuner.waits) == 2
    assert tuner.waits[1] >= 0.2
    one.close(0.0)


def test_who_is_at_the_end_waits_until_the_persister_has_tidied_up(make: Make) -> None:
    """The end of the worker's process would be that of the persister too, in the midst of a deletion or of writing a file."""
    persister = Untidy(0.0)
    one, looks = make(persister), []
    one.begin(0, 1, incarnation=1, step=0)
    one.finish(15, lambda: looks.append(persister.left))
    assert persister.left == 0
    assert {2, 1} <= set(looks), "a fence ends this wait too"


def test_steps_beside_a_deletion_do_not_say_what_one_takes_by_itself() -> None:
    """What a checkpoint replaces is deleted after it is durable: that slows steps down, and is a part of what it costs."""
    tuner, persister = Tuner(budget=0.035, window=4, fixed=50), Untidy(0.0)
    one = Checkpointer(
        Target(place=Place("/nowhere"), owner="run", epoch=1),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: tuner,
        lambda event, fields: None,
        persister=lambda memory: persister,
    )
    one.begin(0, 1, 1, 0)
    assert one.take(1, go_on)
    until(lambda: not one.busy)
    persister.left = 4  # looks
    for step in range(1, 8):  # the first warms up; beside two there is something to delete, and in the third that ends
        one.stepped(step, 1.0 if step <= 4 else 0.1)
    stretch = tuner._stretch
    assert list(stretch.free) == pytest.approx([0.1, 0.1, 0.1], abs=0.05), "but for what went to looks like these"
    assert stretch.busy_s == pytest.approx(3.0, abs=0.05)
    assert stretch.looked_s > 0
    assert stretch.looked_s + stretch.busy_s + sum(stretch.free) == pytest.approx(3.3)
    one.close()


class Broken(Slow):
    """A persister for which there is no process at first, and then no thread."""

    refused = 0

    def start(self) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    def submit(self, job: Job) -> Future[Outcome]:
        self.refused += 1
        if self.refused == 1:
            raise RuntimeError("can't start new thread")
        return super().submit(job)


@pytest.mark.parametrize("what", ["persister", "snapshot", "memory", "telling", "measuring"])
def test_what_a_checkpoint_lacks_costs_that_one_and_neither_training_nor_those_after_it(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Processes and threads of a node are limited; and whatever else goes wrong, there is an end to it."""
    told: list[tuple[str, int, str]] = []

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError if what == "memory" else RuntimeError("can't start new thread")

    def tell(event: str, fields: dict[str, Any]) -> None:
        if event == "CheckpointCommitted" and fields["step"] == 5:
            raise RuntimeError("the journal's thread is gone")
        if event != "IntervalChosen":
            told.append((event, fields["step"], fields.get("reason", "")))

    one = Checkpointer(
        Target(place=Place("/nowhere"), owner="run", epoch=1),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: Tuner(budget=0.035, window=4, fixed=5),
        tell,
        persister=lambda memory: Broken(0.1) if what == "persister" else Slow(0.1),
    )
    with monkeypatch.context() as patch:
        if what in ("snapshot", "memory"):
            where, name = (snapshot._thread, "start_new_thread") if what == "snapshot" else (Copy, "_copy")
            patch.setattr(where, name, fails)
        elif what == "measuring":
            patch.setattr(one._tuning, "persisted", fails)
        one.begin(0, 1, 1, 0)
        assert one.take(5, go_on) is (what != "snapshot")
        one.await_durable(go_on, 10.0)
    assert one.take(10, go_on)
    one.await_durable(go_on, 10.0)
    one.close()
    assert told[-1] == ("CheckpointCommitted", 10, "")
    reasons = {
        "persister": 'the persister could not be given its job: RuntimeError("can\'t start new thread")',
        "snapshot": "the snapshot could not begin: [Errno 11] no thread can be started: can't start new thread",
        "memory": "the snapshot failed: MemoryError()",
    }
    assert told[:-1] == ([("CheckpointFailed", 5, reasons[what])] if what in reasons else [])


def test_a_snapshot_that_left_the_device_only_is_not_handed_on_when_its_world_is_over(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights may change as soon as it has, and so may the world, long before it is in the memory of the host."""
    held, arrives, real = Held(), threading.Event(), Copy.join

    def slow(copy: Copy) -> None:
        copy._done.set()
        arrives.wait(20)

    monkeypatch.setattr(Copy, "_copy", slow)
    monkeypatch.setattr(Copy, "join", lambda copy, timeout_s=0.1: real(copy, timeout_s))
    one = make(held)
    one.take(5, go_on)
    one.fenced()
    arrives.set()
    until(lambda: not one.busy)
    assert (held.jobs.empty(), told) == (True, [("CheckpointFailed", 5)])
    one.begin(0, 1, 2, 5)
    assert one.take(10, go_on)
    held.end(0.1)
    one.await_durable(go_on, 10.0)
    assert told[1:] == [("CheckpointCommitted", 10)]


def test_a_snapshot_that_is_interrupted_as_it_begins_holds_nobody_up(
    make: Make, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C in the midst of it: whoever closes the run afterwards would wait for a copy that never ends."""

    def interrupted(copy: Copy) -> None:
        raise KeyboardInterrupt

    one = make(0.0)
    one.take(5, go_on)
    with monkeypatch.context() as patch:
        patch.setattr(Copy, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.take(10, go_on)
    assert not one.busy
    one.take(15, go_on)
    one.finish(15, go_on)
    assert told == [("CheckpointCommitted", 5), ("CheckpointCommitted", 15)]


def test_a_device_without_room_does_not_cost_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was free when it began may be gone: then it is copied to the host at once, and the weights wait for that."""

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory, done, weights = SharedMemory(), [], torch.arange(1000.0)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    copy = Copy(share([("w", weights)], 0, 1), memory, done.append, "gpu")
    copy.start()
    copy.join()
    assert (copy.error, copy.device_seconds, done) == (None, None, [copy])
    assert bytes(memory.reserve(copy.size)) == weights.numpy().tobytes()
    memory.close()


MEASURED = {"k": 7, "profile": {"iteration": 1.0, "update": 0.1, "copy": 0.1, "persist": 40.0}}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[Checkpointer, list[dict[str, Any]]]]]:
    """A worker, not begun; and what it tells of intervals."""
    made: list[Checkpointer] = []

    def begun(fixed: int | None = None) -> tuple[Checkpointer, list[dict[str, Any]]]:
        told: list[dict[str, Any]] = []
        found = Checkpointer(
            Target(place=Place(str(tmp_path)), owner="run", epoch=1, profile_key="same"),
            lambda: ([], {}),
            lambda: Tuner(budget=0.035, window=4, fixed=fixed),
            lambda event, fields: told.append(fields) if event == "IntervalChosen" else None,
            persister=lambda memory: Slow(0.0),
        )
        made.append(found)
        return found, told

    yield begun
    for one in made:
        one.close(0.0)


def test_what_an_earlier_launch_measured_is_known_and_told(launch: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / tuning.PROFILE_FILE).write_text(json.dumps({"key": "same, 1 workers", **MEASURED}))
    one, told = launch()
    one.begin(0, 1, 3, 120, failure_s=500.0)
    assert one._patience(10.0) == 120.0
    (chosen,) = told
    assert (chosen["incarnation"], chosen["step"], chosen["k"], chosen["k_persist"]) == (3, 120, 7, 41)
    assert (chosen["persist_s"], chosen["budget"], chosen["failure_interval_s"]) == (40.0, 0.035, 500.0)
    assert chosen["reason"].startswith("recalled")
    again, _ = launch()
    (tmp_path / tuning.PROFILE_FILE).write_text(one._tuning.files()[tuning.PROFILE_FILE])
    again.begin(0, 1, 1, 0)
    assert again._tuning._tuner == replace(one._tuning._tuner, last=0, failure_s=None)


@pytest.mark.parametrize("key", ["same", "other, 1 workers", "same, 2 workers"])
def test_what_was_measured_of_something_else_is_left_alone(launch: Callable[..., Any], tmp_path: Path, key: str) -> None:
    """Also in a world of another size."""
    (tmp_path / tuning.PROFILE_FILE).write_text(json.dumps({"key": key, **MEASURED}))
    one, told = launch()
    one.begin(0, 1, 1, 0)
    assert one._patience(10.0) == 10.0
    assert told == []


def test_an_interval_that_was_asked_for_is_told_by_who_becomes_worker_0(launch: Callable[..., Any]) -> None:
    one, told = launch(fixed=5)
    one.begin(1, 2, 1, 0)
    assert told == [], "of which worker 0 tells"
    one.begin(0, 1, 2, 20)
    one.begin(0, 1, 3, 30)
    (chosen,) = told
    assert chosen.pop("reason").startswith("fixed")
    about = {"incarnation": 2, "step": 20, "k": 5, "observed": None, "budget": 0.035, "failure_interval_s": None}
    assert chosen == about, "nothing was measured"
    event = IntervalChosen(at=1.0, member="w0", **about, reason="fixed")
    assert event.update_s is None


def test_every_worker_measures_and_the_first_alone_says_when(tmp_path: Path) -> None:
    """Where its copies go first is each one's own affair; and who becomes the first knows what checkpoints take."""
    told: list[str] = []
    one = Checkpointer(
        Target(place=Place(str(tmp_path)), owner="run", epoch=1),
        lambda: ([("w", torch.zeros(8))], {}),
        lambda: Tuner(budget=0.035, window=4),
        lambda event, fields: told.append(event),
        persister=lambda memory: Slow(0.0),
    )
    one.begin(1, 2, 1, 0)
    for step in range(1, 7):
        assert not one.wants(step)
        one.stepped(step, 0.1)
    one.take(6, go_on)
    one.await_durable(go_on)
    one.stepped(7, 0.1)
    assert told == [], "of which worker 0 tells"
    one.begin(0, 2, 2, 6)
    assert one.wants(1000), "it does not measure everything anew"
    assert told == ["IntervalChosen"]
    one.close()


def test_training_does_not_begin_late_for_a_storage_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    def out_of_reach(place: Place) -> Storage:
        hangs.wait(30)
        raise StorageError(f"{place} is out of reach")

    monkeypatch.setattr(tuning, "open_storage", out_of_reach)
    monkeypatch.setattr(tuning, "PROFILE_S", 0.1)
    one = Checkpointer(
        Target(place=Place("/nowhere"), owner="run", epoch=1),
        lambda: ([], {}),
        lambda: Tuner(budget=0.035, window=4),
        lambda event, fields: None,
        persister=lambda memory: Slow(0.0),
    )
    began = time.monotonic()
    one.begin(0, 1, 1, 0)
    assert time.monotonic() - began < 5
    hangs.set()
    one.close(0.0)


@pytest.mark.parametrize(("keep", "parts"), [(1, 2), (2, 3), (KEEP_ALL, 2)])
def test_what_checkpoints_need_on_the_disk(make: Make, keep: int, parts: int) -> None:
    """Those that stay and the one under way; known after the first step. Two replicas of two stages share a stage's state."""
    one = make(0.1, keep=keep)
    one.begin(0, 4, 1, 0, stages=2)
    assert one.disk_bytes == 0
    one.stepped(1, 0.1)
    assert one.disk_bytes == parts * 8 * 4 // 2
    assert one._preparing is not None
    one._preparing.join(10)


def test_memory_is_left_alone_while_it_is_copied_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world may begin with a checkpoint, whose copy is perhaps under way when its first step ends."""
    go, copy_all = threading.Event(), snapshot.copy_all
    monkeypatch.setattr(snapshot, "copy_all", lambda *what: (go.wait(10), copy_all(*what)))
    one = make(0.1)
    try:
        one.take(5, go_on)
        one.stepped(6, 0.1)
        assert one._preparing is None
        assert one.disk_bytes
    finally:
        go.set()
    one.await_durable(go_on, 10.0)
