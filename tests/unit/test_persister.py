"""The persister process: what its worker hears of a job, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from commits import OWNER, SIZE, carry_out, commit, job, newest, prepare
from disks import small_file_system
from store import save, state, two_checkpoints

from raytrain_ft.errors import LockedError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, lock, selection
from raytrain_ft.storage import persister as persisters
from raytrain_ft.storage.filesystem import LocalStorage, open_storage
from raytrain_ft.storage.job import Job, Outcome
from raytrain_ft.storage.manifest import FILE, Name
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.storage.shard import Piece, encode


def test_what_was_done_to_a_mapping_is_undone_before_another_takes_its_place() -> None:
    memory, undone = SharedMemory(), []
    memory.reserve(1000)
    memory.unpin = lambda: undone.append("small")
    memory.reserve(500)
    assert undone == []
    memory.reserve(5000)
    assert (undone, memory.unpin) == (["small"], None)
    memory.unpin = lambda: undone.append("large")
    memory.close()
    assert undone == ["small", "large"]


def test_who_waits_for_shards_of_a_launch_that_is_over_leaves_when_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    lock.acquire(storage, "test").release()
    second = lock.acquire(storage, "test")
    monkeypatch.setattr(persisters, "RIGHT_S", 0.0)
    about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": second.owner.epoch - 1, "incarnation": 1}
    pieces = [Piece("t", "torch.uint8", (8,), 0, 8)]
    began = time.monotonic()
    with pytest.raises(LockedError, match="another run has taken the right to write"):
        carry_out(Job(step=1, number=0, count=2, pieces=pieces, timeout_s=60.0, **about), memoryview(bytes(8)), set())
    assert time.monotonic() - began < 30
    second.release()


def test_a_loss_does_not_cost_a_checkpoint_of_which_all_is_there(tmp_path: Path) -> None:
    """Worker 0 was told that its world is over while it wrote its own shard, the last of them."""
    root = tmp_path / "checkpoints"
    prepare(root)
    storage, last, data = LocalStorage(root), job(root, 30, 0), memoryview(bytes([30]) * 3 * SIZE)
    cancelled = {str(last.name)}
    with pytest.raises(StorageError, match="the world that was writing it is over"):
        carry_out(last, data, cancelled)
    assert newest(storage) == 20, "a shard is missing"
    carry_out(job(root, 30, 1), data, cancelled)
    carry_out(last, data, cancelled)
    assert newest(storage) == 30
    lock._write(storage, replace(OWNER, owner="another", epoch=2))
    carry_out(job(root, 40, 1), data, set())
    with pytest.raises(LockedError, match="not committed"):
        carry_out(job(root, 40, 0), data, set())


class Absent(LocalStorage):
    """Storage that answers nothing for a moment: from when it is first asked for this on."""

    def __init__(self, root: Path, trigger: str) -> None:
        super().__init__(root)
        self.trigger, self.until = trigger, 0.0

    def _ask(self, name: str) -> None:
        if name == self.trigger and not self.until:
            self.until = time.monotonic() + 0.5
        if time.monotonic() < self.until:
            raise UnreachableError(f"{name}: 503 Slow Down")

    def names(self, directory: str = "") -> list[str]:
        self._ask(directory)
        return super().names(directory)

    def size(self, name: str) -> int | None:
        self._ask(name)
        return super().size(name)


@pytest.mark.parametrize("when", ["while shards are waited for", "before the commit"])
def test_that_it_cannot_be_told_who_may_write_does_not_say_that_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Storage that is away for a moment answers no question: not the one for shards, and not this one."""
    root = tmp_path / "checkpoints"
    prepare(root)
    last, data = job(root, 30, 0), memoryview(bytes([30]) * 3 * SIZE)
    away = Absent(root, str(last.name) if when == "while shards are waited for" else lock.FILE)
    monkeypatch.setattr(persisters, "open_storage", lambda place: away)
    for module, name, seconds in ((persisters, "RIGHT_S", 0.0), (lock, "RENEW_S", 0.05), (checkpoint, "AGAIN_S", 0.05)):
        monkeypatch.setattr(module, name, seconds)
    carry_out(job(root, 30, 1), data, set())
    carry_out(last, data, set())
    assert (newest(LocalStorage(root)), away.until > 0) == (30, True)


def test_without_a_word_of_who_may_write_no_other_run_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    prepare(root)
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    data = memoryview(bytes([30]) * 3 * SIZE)
    carry_out(job(root, 30, 1), data, set())
    (root / lock.FILE).unlink()
    with pytest.raises(StorageError, match=r"checkpoints/writer\.json is gone or damaged.*-i1 is not committed"):
        carry_out(job(root, 30, 0), data, set())


def test_a_world_that_is_over_commits_nothing_and_deletes_nothing(tmp_path: Path) -> None:
    """Its nodes may be cut off from all others, but not from this storage: it trains on, and what the others have gone back to
    would be the oldest of its checkpoints soon."""
    storage = two_checkpoints(tmp_path)
    right = lock.acquire(storage, "test")
    data = memoryview(bytes(SIZE))
    one = Job(
        place=Place(str(tmp_path)),
        owner="test",
        epoch=right.owner.epoch,
        step=30,
        incarnation=1,
        number=0,
        count=1,
        pieces=[Piece("t", "torch.uint8", (SIZE,), 0, SIZE)],
        keep=1,
    )
    partial = tmp_path / str(Name(25, right.owner.epoch, 2))
    partial.mkdir()
    right.fence(2)
    with pytest.raises(StorageError, match="the world that was writing it is over"):
        carry_out(one, data, set())
    assert [found.name.step for found in checkpoint.found(storage) if found.complete] == [20, 10]
    assert partial.exists(), "the new world is about to write it"
    carry_out(replace(one, incarnation=2), data, set())
    assert [found.name.step for found in checkpoint.found(storage) if found.complete] == [30]
    right.release()


def test_a_world_that_is_over_as_it_commits_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may be about to load what it would replace."""
    storage = two_checkpoints(tmp_path)
    right = lock.acquire(storage, "test")
    commit = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda *about: (commit(*about), right.fence(2)))
    about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1, "keep": 1}
    pieces = [Piece("t", "torch.uint8", (SIZE,), 0, SIZE)]
    one = Job(step=30, number=0, count=1, pieces=pieces, **about)
    untidy = persisters.carry_out(one, encode(pieces, memoryview(bytes(SIZE))), set())
    assert untidy.startswith("what it replaces could not be deleted: ")
    assert [found.name.step for found in checkpoint.found(storage) if found.complete] == [30, 20, 10]
    right.release()


def test_a_disk_on_which_nothing_can_be_written_beside_a_checkpoint_is_made_room_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Were the older ones left there for it, nothing would ever be freed."""
    storage, put = two_checkpoints(tmp_path), LocalStorage.put

    def full(storage: LocalStorage, name: str, parts: Iterable[memoryview]) -> None:
        if name == "profile.json":
            raise StorageError("no space left on device")
        put(storage, name, parts)

    monkeypatch.setattr(LocalStorage, "put", full)
    save(storage.uri, 30, state(30), files={"profile.json": "{}"})
    assert [found.name.step for found in checkpoint.found(storage)] == [30, 20]
    assert "no space left" in capsys.readouterr().err


def test_what_was_measured_is_stored_also_where_nothing_can_be_deleted(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    (tmp_path / str(Name(10, 1, 1)) / "directory").mkdir()
    save(storage.uri, 30, state(30), files={"profile.json": "{}"})
    assert storage.view("profile.json").to_pybytes() == b"{}"
    assert [found.name.step for found in checkpoint.found(storage) if found.complete] == [30, 20]
    assert (tmp_path / str(Name(10, 1, 1)) / "directory").exists()


def test_what_cannot_be_deleted_is_told_with_the_next_checkpoint(tmp_path: Path) -> None:
    """Else nobody would know why the storage fills up."""
    storage = two_checkpoints(tmp_path)
    stays = tmp_path / str(Name(10, 1, 1)) / "directory"
    stays.mkdir()
    right = lock.acquire(storage, "test")
    memory = SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1, "keep": 2}
    pieces = [Piece("t", "torch.uint8", (8,), 0, 8)]
    told: list[str] = []
    try:
        for step in (30, 40, 50):
            outcome = persister.submit(Job(step=step, number=0, count=1, pieces=pieces, **about)).result(timeout=30)
            assert outcome.error is None
            told.append(outcome.untidy)
            assert persister.await_tidy(30.0)
            if step == 30:
                stays.rmdir()
    finally:
        persister.close(10)
        memory.close()
        right.release()
    assert (told[0], told[2]) == ("", "")
    assert told[1].startswith("what it replaces could not be deleted: ")
    assert str(Name(10, 1, 1)) in told[1]


@pytest.mark.parametrize("name", ["secrets", "sitecustomize"])
def test_it_imports_what_its_worker_does_and_says_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A script's own directory is on its path, and the one that it was started in is not. And what a library prints is no
    answer."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / f"{name}.py").write_text("API_KEY = 1\nprint('welcome')\n")
    monkeypatch.chdir(tmp_path / "project")
    if name == "sitecustomize":
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "project")])
    storage = open_storage(str(tmp_path / "run"))
    right = lock.acquire(storage, "test")
    memory = SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    try:
        about = {"place": Place(str(tmp_path / "run")), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1}
        pieces = [Piece("t", "torch.uint8", (8,), 0, 8)]
        outcome = persister.submit(Job(step=1, number=0, count=1, pieces=pieces, **about)).result(timeout=30)
        assert outcome.error is None
        assert persister.await_tidy(30.0)
    finally:
        persister.close(10)
        memory.close()
        right.release()


def test_it_says_when_it_has_tidied_up(tmp_path: Path) -> None:
    """Whoever ends its process before leaves what was to be deleted, or half a file."""
    storage = two_checkpoints(tmp_path)
    right, old = lock.acquire(storage, "test"), tmp_path / str(Name(10, 1, 1))
    for number in range(20_000):
        (old / f"file-{number}").touch()
    memory = SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    try:
        assert persister.await_tidy(0.0), "it has not begun"
        about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1}
        pieces = [Piece("t", "torch.uint8", (8,), 0, 8)]
        made = Job(step=30, number=0, count=1, pieces=pieces, keep=2, files={"profile.json": "{}"}, **about)
        assert persister.submit(made).result(timeout=30).error is None
        assert not persister.await_tidy(0.0), "of a directory of 20,000 files more than a moment is needed"
        assert persister.await_tidy(30.0)
        assert (old.exists(), storage.view("profile.json").to_pybytes()) == (False, b"{}")
        pid = persister.pid
        assert pid is not None
        persister.submit(replace(made, step=40, count=2))  # the other half never comes
        assert not persister.await_tidy(0.0)
        os.kill(pid, signal.SIGKILL)
        assert persister.await_tidy(30.0), "nobody is there who could"
    finally:
        persister.close(10)
        memory.close()
        right.release()


def test_a_process_that_dies_settles_its_job_also_if_another_is_started_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may be started before the thread that listens to the first has told of its end."""
    right = lock.acquire(open_storage(str(tmp_path)), "test")
    memory = SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    told, real = threading.Event(), persister._settle

    def late(process: subprocess.Popen[bytes] | None, outcome: Outcome) -> None:
        if "ended (exit code" in (outcome.error or ""):
            told.wait(20)
        real(process, outcome)

    monkeypatch.setattr(persister, "_settle", late)
    try:
        about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1}
        pieces = [Piece("t", "torch.uint8", (8,), 0, 8)]
        waiting = persister.submit(Job(step=1, number=0, count=2, pieces=pieces, **about))  # the other half never comes
        first = persister.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while persister.pid in (first, None) and time.monotonic() < deadline:
            persister.start()
        told.set()
        outcome = waiting.result(timeout=10)
        assert outcome.error is not None
        assert "persister process ended" in outcome.error
        again = persister.submit(Job(step=2, number=0, count=1, pieces=pieces, **about))
        assert again.result(timeout=30).error is None
    finally:
        told.set()
        persister.close(10)
        memory.close()
        right.release()


@pytest.mark.parametrize("what", ["process", "thread"])
def test_where_it_cannot_be_started_nothing_is_left_and_the_next_job_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if what == "process":
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)
            started.append(self)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    right, memory = lock.acquire(open_storage(str(tmp_path)), "test"), SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1, "count": 1}
    one = Job(step=1, number=0, pieces=[Piece("t", "torch.uint8", (8,), 0, 8)], **about)
    pipes = len(open_pipes())
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Watched)
        if what == "thread":
            patch.setattr(threading.Thread, "start", refuse)
        error = persister.submit(one).result(timeout=10).error
        persister.give_up(one.place, one.name, 1, 2)
    assert error is not None
    assert error.startswith("the persister could not be given its job: ")
    assert (len(open_pipes()), [process.poll() is not None for process in started]) == (pipes, [True] * (what == "thread"))
    try:
        assert persister.submit(one).result(timeout=30).error is None
    finally:
        persister.close(10)
        memory.close()
        right.release()


def open_pipes() -> list[str]:
    """Descriptors of pipes."""
    found: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += [path.name] if str(path.readlink()).startswith("pipe:") else []
    return found


def test_a_process_that_is_killed_in_the_midst_of_a_word_settles_its_job() -> None:
    memory = SharedMemory()
    persister = Persister(memory)
    persister._process = process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    persister._pending = waiting = Future[Outcome]()
    reading, writing = os.pipe()
    os.write(writing, b'{"error": "Traceba')
    os.close(writing)
    persister._listen(process, os.fdopen(reading))
    assert "what it said last makes no sense" in (waiting.result(timeout=0).error or "")
    persister.close(10)
    memory.close()
    assert process.stdin is not None
    process.stdin.close()


def test_it_ends_though_a_process_that_was_forked_here_lives_on() -> None:
    """Which has inherited the pipe that jobs are sent through, as loader workers do: the end of the file never comes."""
    memory = SharedMemory()
    persister = Persister(memory)
    persister.start()
    process = persister._process
    assert process is not None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        persister.close(20)
        assert process.returncode == 0, "it was not killed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        memory.close()


def test_who_is_closed_gives_its_memory_back() -> None:
    before = snapshots()
    memory = SharedMemory()
    memory.reserve(2**20)
    assert snapshots() - before
    memory.close()
    assert not snapshots() - before


def snapshots() -> set[str]:
    """Descriptors of snapshots: threads of this process may open and close others at any time."""
    found: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found |= {path.name} if "memfd:raytrain_ft-snapshot" in str(path.readlink()) else set()
    return found


def test_pieces_that_were_told_before_need_not_be_told_again(tmp_path: Path) -> None:
    """Nor to a process that takes the place of one that was lost, which has heard nothing."""
    storage = open_storage(str(tmp_path))
    right, memory = lock.acquire(storage, "test"), SharedMemory()
    persister = Persister(memory)
    about: dict[str, Any] = {"place": Place(str(tmp_path)), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1}
    small, large = ([Piece(name, "torch.uint8", (size,), 0, size) for name in "ab"] for size in (1000, 100_000))
    lost = False
    try:
        for step, pieces in enumerate((small, small, large, large, small, small, [*small], small), start=1):
            size = sum(piece.size for piece in pieces)
            memory.reserve(size)[:] = bytes(range(step, step + 2)) * (size // 2)
            if step == 5 and persister.pid is not None:
                os.kill(persister.pid, signal.SIGKILL)
                until(lambda: persister.pid is None)
                lost = True
            outcome = persister.submit(Job(step=step, number=0, count=1, pieces=pieces, **about)).result(timeout=60)
            assert outcome.error is None
            content = checkpoint.read(storage, next(selection.select(storage, pytest.fail)))
            found = b"".join(bytes(part.data) for name in "ab" for part in content.pieces[name])
            assert (content.manifest.step, found) == (step, bytes(memory.reserve(size)))
            assert [len(content.pieces[name][0].data) for name in "ab"] == [size // 2] * 2
        assert lost
    finally:
        persister.close(10)
        memory.close()
        right.release()


def test_a_mark_that_comes_late_is_not_left_beside_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard was left out, and is tried again while storage still takes its time for saying so."""
    mark, memory = persisters._mark, SharedMemory()

    def late(*arguments: Any) -> None:
        time.sleep(2.0)
        mark(*arguments)

    monkeypatch.setattr(persisters, "_mark", late)
    memory.reserve(8)
    persister = Persister(memory)
    persister.start()
    about = {"place": Place(str(tmp_path)), "owner": "test", "epoch": 1, "incarnation": 1}
    again = Job(step=1, number=1, count=2, pieces=[Piece("t", "torch.uint8", (8,), 0, 8)], **about)
    try:
        persister.give_up(again.place, again.name, 1, 2)
        assert persister.submit(again).result(timeout=30).error is None
    finally:
        persister.close(10)
        memory.close()
    assert open_storage(str(tmp_path)).names(str(again.name)) == ["shard-00001-of-00002.arrow", "shard-00001-of-00002.json"]


def test_one_that_is_frozen_holds_nobody_up(tmp_path: Path) -> None:
    """Also with the job of a large model, of which a pipe takes only the beginning."""
    right = lock.acquire(open_storage(str(tmp_path)), "test")
    memory = SharedMemory()
    memory.reserve(8)
    persister = Persister(memory)
    place = Place(str(tmp_path))
    about = {"place": place, "owner": "test", "epoch": right.owner.epoch, "incarnation": 1, "number": 0, "count": 1}
    names = [f"encoder.layer.{number}.attention.output.dense.weight" for number in range(10_000)]
    many = [Piece(name, "torch.uint8", (0,), 0, 0) for name in names]
    first = Job(step=1, pieces=[*many, Piece("t", "torch.uint8", (8,), 0, 8)], **about)
    outcomes: list[Outcome] = []

    def use() -> None:
        waiting = persister.submit(first)
        for _ in range(10_000):  # far more than the pipe takes
            persister.cancel(first.name)
        persister.close(0.5)
        outcomes.append(waiting.result(timeout=10))

    try:
        assert persister.submit(replace(first, step=0)).result(timeout=60).error is None
        assert persister.pid is not None
        os.kill(persister.pid, signal.SIGSTOP)
        using = threading.Thread(target=use, daemon=True)
        using.start()
        using.join(30)
        assert not using.is_alive(), "it waits for the frozen process"
        assert persister.pid is None
        assert "exit code -9" in (outcomes[0].error or "")
    finally:
        if persister.pid is not None:
            os.kill(persister.pid, signal.SIGKILL)
        memory.close()
        right.release()


WORKER = """
import os, sys, time
from raytrain_ft.places import Place
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage, open_storage
from raytrain_ft.storage.job import Job
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.storage.shard import Piece

right = lock.acquire(open_storage(sys.argv[1]), "test")
memory = SharedMemory()
memory.reserve(8)
persister = Persister(memory)
about = {"place": Place(sys.argv[1]), "owner": "test", "epoch": right.owner.epoch, "incarnation": 1}
persister.submit(Job(step=1, number=0, count=2, pieces=[Piece("t", "torch.uint8", (8,), 0, 8)], **about))
child = os.fork()
if not child:
    os.setsid()
else:
    print(right.owner.epoch, persister.pid, child, flush=True)
time.sleep(600)
"""


def test_it_outlives_who_is_ended_with_all_his_processes_and_ends_after_its_job(tmp_path: Path) -> None:
    """As torchrun does it when another rank fails. And though a process that the worker forked holds the pipe open."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert worker.stdout is not None
    epoch, persister, child = map(int, worker.stdout.readline().split())
    try:
        storage, name = open_storage(str(tmp_path)), Name(1, epoch, 1)
        until(lambda: storage.size(f"{name}/shard-00000-of-00002.json"))
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(10) == -signal.SIGTERM
        os.kill(persister, signal.SIGTERM)
        checkpoint.write_shard(storage, name, 1, 2, encode([Piece("u", "torch.uint8", (8,), 0, 8)], memoryview(bytes(8))))
        until(lambda: storage.size(f"{name}/{FILE}"))
        assert lives(child)
        until(lambda: not lives(persister))
    finally:
        for pid in filter(lives, (worker.pid, child, persister)):
            os.kill(pid, signal.SIGKILL)
        worker.communicate()


def test_it_does_not_wait_long_for_shards_that_only_the_living_could_write(tmp_path: Path) -> None:
    """Its worker is killed while it waits for another one's shard, which never comes: nothing may be left of a run."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    epoch, persister, child = map(int, worker.stdout.readline().split())
    try:
        storage, name = open_storage(str(tmp_path)), Name(1, epoch, 1)
        until(lambda: storage.size(f"{name}/shard-00000-of-00002.json"))
        worker.kill()
        worker.wait()
        assert lives(persister), "it waits for what may be under way"
        until(lambda: not lives(persister))
        assert storage.size(f"{name}/{FILE}") is None
    finally:
        for pid in filter(lives, (worker.pid, child, persister)):
            os.kill(pid, signal.SIGKILL)
        worker.communicate()


def test_without_its_worker_it_waits_as_long_as_its_own_shard_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the others are as large, and were begun at about the same time: they may be under way."""
    root = tmp_path / "checkpoints"
    prepare(root)
    monkeypatch.setattr(persisters, "ORPHAN_S", 0.0)
    data, write = memoryview(bytes([30]) * 3 * SIZE), checkpoint.write_shard
    other = threading.Timer(2.5, write, shard_of(job(root, 30, 1), data))

    def slowly(*arguments: Any) -> Any:
        other.start()
        time.sleep(2.0)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write_shard", slowly)
    try:
        carry_out(replace(job(root, 30, 0), timeout_s=60.0), data, set(), lives=lambda: False)
    finally:
        other.cancel()
    assert newest(LocalStorage(root)) == 30


def shard_of(job: Job, data: memoryview) -> tuple[Any, ...]:
    """What `write_shard` is given for a job."""
    return open_storage(job.place), job.name, job.number, job.count, encode(job.pieces, data)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_nobody_waits_for_a_shard_that_could_not_be_written(tmp_path: Path) -> None:
    """On a full disk, the end of a run would wait for it as long as for one that is slow."""
    with small_file_system(tmp_path / "disk", "480k") as disk:
        root = disk / "checkpoints"
        prepare(root)
        data = memoryview(bytes(3 * SIZE))
        with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        with pytest.raises(StorageError, match="Free some space"):
            carry_out(job(root, 30, 1), data, set())
        (disk / "ballast").unlink()
        began = time.monotonic()
        with pytest.raises(StorageError, match="its worker could not write shard 1 of 2"):
            carry_out(replace(job(root, 30, 0), timeout_s=60.0), data, set())
        assert time.monotonic() - began < 30
        commit(root, 40)
        assert newest(open_storage(str(root))) == 40
