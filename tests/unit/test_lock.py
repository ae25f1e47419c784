"""One run writes at a time; whoever was taken for dead and is not cannot commit any more."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.fs as pafs
import pytest
from store import OWNER, newest, own, save, state, step_of, two_checkpoints

from raytrain_ft.errors import LockedError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, filesystem, lock, selection
from raytrain_ft.storage.filesystem import LocalStorage, RemoteStorage
from raytrain_ft.storage.lock import Owner, WriterLock, acquire, holds, read_owner, take_over


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.8)
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    monkeypatch.setattr(lock, "POLL_S", 0.05)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def until_renewed(root: Path) -> None:
    """Somebody writes the file again."""
    before = _renewed(root)
    until(lambda: _renewed(root) > before)


def _renewed(root: Path) -> int:
    found = read_owner(LocalStorage(root))
    assert found is not None
    return found.renewed


def test_a_second_owner_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "first")
    with pytest.raises(LockedError, match=f"run first.*process {os.getpid()} on {socket.gethostname()}.*: this process has it"):
        acquire(LocalStorage(tmp_path), "second")
    held.release()
    second = acquire(storage, "second")  # at once: the first has left
    assert second.owner.epoch == held.owner.epoch + 1
    second.release()


@pytest.mark.parametrize("remote", [False, True])
def test_of_those_who_come_at_one_moment_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    """Also if none of them saw another before it wrote."""
    monkeypatch.setattr(filesystem, "SETTLE_S", 0.5)
    monkeypatch.setattr(lock, "LEASE_S", 20.0)
    together = threading.Barrier(6)

    def come(number: int) -> WriterLock | None:
        storage = RemoteStorage(Place("file://"), pafs.LocalFileSystem(), str(tmp_path)) if remote else LocalStorage(tmp_path)
        claim = storage.claim
        monkeypatch.setattr(storage, "claim", lambda name: (together.wait(20), claim(name))[1])
        with suppress(LockedError):
            return acquire(storage, f"run-{number}")
        return None

    with ThreadPoolExecutor(6) as pool:
        held = [one for one in pool.map(come, range(6)) if one is not None]
    assert len(held) == 1
    assert holds(LocalStorage(tmp_path), held[0].owner.owner, held[0].owner.epoch)
    held[0].release()


def test_who_was_killed_when_it_had_claimed_an_epoch_keeps_nobody_out(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    acquire(storage, "first").release()
    assert storage.claim("writer-2.claim")
    held = acquire(storage, "second")
    held.release()
    assert held.owner.epoch == 3
    assert [name for name in storage.names() if name.endswith(".claim")] == ["writer-3.claim"]


def test_the_epoch_exceeds_that_from_which_on_checkpoints_count(tmp_path: Path) -> None:
    """writer.json is lost: of an earlier epoch, what every launch writes would count for nothing, and the next begin anew."""
    storage = two_checkpoints(tmp_path)
    selection.begin_anew(storage, 7)
    (tmp_path / lock.FILE).unlink()
    taken = acquire(storage, "next")
    assert taken.owner.epoch == 8
    taken.release()
    (tmp_path / lock.FILE).unlink()
    (tmp_path / selection.BEGUN_FILE).write_text("{")
    damaged = acquire(storage, "after")
    assert damaged.owner.epoch > 1
    damaged.release()


@pytest.mark.parametrize("there", ["checkpoints", "."])
def test_a_directory_that_is_a_link_to_nothing_is_told_at_once(tmp_path: Path, there: str) -> None:
    """Scratch is not mounted. That nothing can be made there looked like claims of others, one epoch after the other."""
    (tmp_path / "run").symlink_to(tmp_path / "scratch" / "run")
    with pytest.raises(StorageError, match=r"run is a link to .*scratch/run, which is not there"):
        acquire(LocalStorage(tmp_path / "run" / there), "me")


def test_what_only_looks_like_a_claim_is_not_touched(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for name in ("writer-1.claim/notes.txt", "writer-2.claim"):
        storage.put(name, [memoryview(b"somebody else's, and worth more than a claim is. " * 3)])
    held = acquire(storage, "run")
    held.release()
    acquire(storage, "another").release()
    assert (tmp_path / "writer-1.claim" / "notes.txt").stat().st_size > 64
    assert (tmp_path / "writer-2.claim").stat().st_size > 64


def test_it_is_handed_over_to_another_process_of_the_same_owner(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    driver = acquire(storage, "run")
    supervisor = acquire(storage, "run")
    driver.hand_over()
    assert supervisor.owner.epoch == driver.owner.epoch
    with pytest.raises(LockedError, match="run run"):
        acquire(storage, "another")
    supervisor.release()
    acquire(storage, "another").release()


def test_one_that_was_held_up_in_a_renewal_takes_nothing_back(tmp_path: Path) -> None:
    """It writes what it had read before its successor came."""
    storage = LocalStorage(tmp_path)
    first = acquire(storage, "first")
    first.release()
    held = acquire(storage, "second")
    own(storage, replace(first.owner, renewed=7))
    until(lambda: holds(storage, "second", held.owner.epoch))
    held.release()


class HeldUp(LocalStorage):
    """Its next write of the file waits."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def put(self, name: str, parts: Iterable[memoryview]) -> None:
        if name == lock.FILE and not self.goes_on.is_set():
            self.waits.set()
            assert self.goes_on.wait(60)
        super().put(name, parts)


def test_one_that_was_held_up_until_its_successor_had_left_finds_out(tmp_path: Path) -> None:
    """By then the file says its own name again, because it has just written it."""
    storage = HeldUp(tmp_path)
    held = acquire(storage, "first")
    storage.goes_on.clear()
    assert storage.waits.wait(20)
    second = acquire(LocalStorage(tmp_path), "second")
    second.release()
    storage.goes_on.set()
    until(lambda: held.lost != "")
    assert "has taken the right to write" in held.lost
    held.release()
    third = acquire(LocalStorage(tmp_path), "third")
    assert third.owner.epoch == 3
    third.release()


def test_one_whose_machine_was_suspended_until_its_successor_had_left_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its monotonic clock stood still meanwhile."""
    monkeypatch.setattr(lock, "LEASE_S", 20.0)
    suspended = [0.0]
    clocks = {name: getattr(time, name) for name in ("monotonic", "sleep", "CLOCK_BOOTTIME")}
    monkeypatch.setattr(
        lock, "time", SimpleNamespace(clock_gettime=lambda clock: time.clock_gettime(clock) + suspended[0], **clocks)
    )
    storage = HeldUp(tmp_path)
    held = acquire(storage, "first")
    storage.goes_on.clear()
    assert storage.waits.wait(20)
    suspended[0] = 60.0
    storage.delete("writer-1.claim")  # as a successor does
    storage.goes_on.set()
    until(lambda: held.lost != "")
    assert "has taken the right to write" in held.lost
    held.release()


def test_one_that_was_held_up_and_has_no_successor_keeps_the_right(tmp_path: Path) -> None:
    """Somebody has claimed the next epoch, and then saw that this owner lives, or was killed."""
    storage = HeldUp(tmp_path)
    held = acquire(storage, "first")
    storage.goes_on.clear()
    assert storage.waits.wait(20)
    assert LocalStorage(tmp_path).claim("writer-2.claim")
    time.sleep(2 * lock.LEASE_S)
    storage.goes_on.set()
    until_renewed(tmp_path)
    until_renewed(tmp_path)
    assert held.lost == ""
    assert holds(storage, "first", 1)
    held.release()


def test_one_that_was_held_up_while_it_took_the_right_has_not_got_it(tmp_path: Path) -> None:
    storage = HeldUp(tmp_path)
    storage.goes_on.clear()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(acquire, storage, "first")
        assert storage.waits.wait(20)
        acquire(LocalStorage(tmp_path), "second").release()
        storage.goes_on.set()
        with pytest.raises(LockedError, match="at the same moment"):
            late.result(20)
    assert [name for name in storage.names() if name.endswith(".claim")] == ["writer-2.claim"]


def test_a_start_that_fails_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk an empty file can still be made. The next start would wait for whoever has claimed that epoch."""
    storage = LocalStorage(tmp_path)
    acquire(storage, "run").release()
    monkeypatch.setattr(lock, "LEASE_S", 60.0)

    def full(name: str, parts: Iterable[memoryview]) -> None:
        raise StorageError("no space left on device")

    for number in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "put", full)
            with pytest.raises(StorageError, match="no space left"):
                acquire(storage, f"another {number}")
        assert [name for name in storage.names() if name.endswith(".claim")] == ["writer-1.claim"]
    held = acquire(storage, "another")
    assert held.owner.epoch == 2
    held.release()


def test_who_has_lost_it_finds_out_and_who_has_it_now(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "first")
    until(lambda: held.owner.renewed > 2)
    assert held.lost == ""

    def found_out() -> bool:
        own(storage, replace(held.owner, owner="second", epoch=2))  # again: a renewal that was under way took its place
        return held.lost != ""

    until(found_out)
    assert f"{tmp_path}: run second (process {os.getpid()} on {socket.gethostname()}) has taken the right" in held.lost
    held.release()
    assert holds(storage, "second", 2)


def test_it_is_taken_over_from_the_same_owner_only(tmp_path: Path) -> None:
    """Also if the other one has left: what it wrote stands, and what this one would go on from is gone."""
    storage = LocalStorage(tmp_path)
    first = acquire(storage, "first")
    first.hand_over()
    again = take_over(storage, "first")
    assert (again.owner.epoch, again.new) == (1, False)
    again.release()
    acquire(storage, "second").release()
    with pytest.raises(LockedError, match="run second"):
        take_over(storage, "first")


def test_a_dead_process_is_succeeded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 20.0)
    storage = LocalStorage(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own(storage, Owner("first", 4, socket.gethostname(), child.pid, lock.began(child.pid)))
    child.kill()
    child.wait()
    began = time.monotonic()
    held = acquire(storage, "second")
    assert time.monotonic() - began < lock.LEASE_S, "its lease is not waited for"
    assert held.owner.epoch == 5
    held.release()


def test_a_clock_that_is_set_meanwhile_makes_no_owner_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a process's beginning in seconds since 1970 moves with the clock."""
    monkeypatch.setattr(lock, "LEASE_S", 1.0)
    storage = LocalStorage(tmp_path)
    own(storage, Owner("first", 4, socket.gethostname(), os.getpid(), lock.began(os.getpid()), machine=lock._machine()))
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 3600)
    began = time.monotonic()
    acquire(storage, "second").release()
    assert time.monotonic() - began >= lock.LEASE_S, "it lives: its lease has to run out"


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage, Owner("first", 4, socket.gethostname(), os.getpid(), started=1.0))
    held = acquire(storage, "second")
    held.release()
    assert held.owner.epoch == 5


def test_the_same_owner_takes_it_over_with_the_same_epoch(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first = acquire(storage, "run")
    again = acquire(storage, "run")
    assert again.owner.epoch == first.owner.epoch
    for held in (first, again):
        held.release()


def test_an_owner_elsewhere_that_falls_silent_is_succeeded_after_the_lease(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage, replace(OWNER, owner="far", epoch=2, host="elsewhere"))
    began = time.monotonic()
    held = acquire(storage, "near")
    assert lock.LEASE_S <= time.monotonic() - began < lock.LEASE_S + 5
    assert held.owner.epoch == 3
    held.release()


def test_an_owner_of_another_container_of_this_host_is_elsewhere(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "first")
    assert held.owner.machine
    held.release()
    own(storage, replace(held.owner, pid=2**22 - 1, machine=f"{held.owner.machine}, another"))
    began = time.monotonic()
    acquire(storage, "second").release()
    assert time.monotonic() - began > 0.7, "it may live: here, its process cannot be seen"


@pytest.mark.parametrize("later", [False, True])
def test_a_lock_of_another_version_is_read(tmp_path: Path, later: bool) -> None:
    """Else its owner, who lives, would be taken for nobody."""
    storage = LocalStorage(tmp_path)
    fields = asdict(OWNER)
    if later:
        fields["zone"] = "a"
    else:
        del fields["machine"]
    storage.put(lock.FILE, [memoryview(json.dumps(fields).encode())])
    assert read_owner(storage) == OWNER


def test_an_owner_elsewhere_that_renews_is_not_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 20.0)
    storage = LocalStorage(tmp_path)
    far = replace(OWNER, owner="far", host="elsewhere")
    own(storage, far)
    over = threading.Event()

    def renew() -> None:
        for renewed in itertools.count(1):
            if over.wait(0.1):
                return
            own(LocalStorage(tmp_path), replace(far, renewed=renewed))

    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew)
        with pytest.raises(LockedError, match="far"):
            acquire(storage, "near")
        over.set()
        renewing.result(20)


def test_worlds_that_are_over_stay_so_when_it_is_renewed_and_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    storage = LocalStorage(tmp_path)
    first = acquire(storage, "a")
    first.fence(3)
    until_renewed(tmp_path)
    first.hand_over()
    second = acquire(storage, "a")
    until_renewed(tmp_path)
    second.fence(2)
    found = read_owner(storage)
    assert found is not None
    assert found.since == 3
    second.release()
    other = acquire(storage, "b")
    assert other.owner.since == 0, "its own worlds"
    first.fence(4)
    found = read_owner(storage)
    assert found is not None
    assert (found.owner, found.since) == ("b", 0), "who has given it up says no more"
    other.release()


def test_who_looks_for_checkpoints_does_not_wait_for_a_renewal_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = acquire(LocalStorage(tmp_path), "a")
    monkeypatch.setattr(lock, "LEASE_S", 0.05)
    with held._writing, pytest.raises(UnreachableError, match=r"writer\.json has been being written"):
        held.fence(3)
    held.fence(3)
    assert held.owner.since == 3
    monkeypatch.undo()
    held.release()


def test_whoever_lost_the_right_to_write_cannot_commit(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    own(storage, replace(OWNER, owner="another", epoch=2))
    with pytest.raises(LockedError, match="not committed"):
        save(storage.uri, 30, state(30))
    own(storage, replace(OWNER, epoch=2))
    with pytest.raises(LockedError):
        save(storage.uri, 40, state(40))  # the same owner, but of before
    content = newest(storage, [])
    assert content is not None
    assert step_of(content) == 20


def test_a_renewal_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    failures = [StorageError("the network is down")] * 3

    def view(name: str) -> object:
        if failures:
            raise failures.pop()
        return LocalStorage.view(storage, name)

    held = acquire(storage, "run")
    monkeypatch.setattr(storage, "view", view)
    until(lambda: not failures)
    until_renewed(tmp_path)
    held.release()


def test_a_lock_that_is_gone_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 20.0)
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "run")
    storage.delete(lock.FILE)
    until(lambda: holds(storage, "run", held.owner.epoch))
    held.release()


def test_a_lock_that_is_away_while_it_is_replaced_is_held_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move onto a file of hdfs deletes it first; who commits just then is not refused."""
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "run")
    sizes = [None, None]
    monkeypatch.setattr(storage, "size", lambda name: sizes.pop() if sizes else LocalStorage(tmp_path).size(name))
    assert holds(storage, "run", held.owner.epoch)
    held.release()


def test_a_lock_that_was_out_of_sight_for_the_lease_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile there may have been another owner, whose file is the one that is gone."""
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "run")
    looked = threading.Event()

    def size(name: str) -> int | None:
        looked.set()
        raise StorageError("the network is down")

    with monkeypatch.context() as away:
        away.setattr(storage, "size", size)
        assert looked.wait(20)
        time.sleep(lock.LEASE_S)
        LocalStorage(tmp_path).delete(lock.FILE)
    until(lambda: held.lost != "")
    assert read_owner(storage) is None
    assert "a run that has left no name has taken the right to write" in held.lost
    held.release()


def test_giving_it_up_does_not_wait_for_a_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    held = acquire(storage, "run")
    hangs, over = threading.Event(), threading.Event()

    def size(name: str) -> int | None:
        hangs.set()
        over.wait(60)
        return LocalStorage.size(storage, name)

    with monkeypatch.context() as away:
        away.setattr(storage, "size", size)
        assert hangs.wait(20)
        leaving = threading.Thread(target=held.release, daemon=True)
        leaving.start()
        leaving.join(20)
        left = not leaving.is_alive()
        over.set()
    held._thread.join(20)
    assert left


class Upload:
    """Is shown when it is complete, in place of what was there."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._file = self._partial.open("wb")

    def write(self, part: memoryview) -> None:
        self._file.write(part)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, *about: object) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self._path)


class ObjectStore:
    """Shows a file when it is whole, as object stores do; and refuses an upload, the next one of the thread `refused`."""

    type_name = "s3"

    def __init__(self) -> None:
        self._files = pafs.LocalFileSystem()
        self.refused: threading.Thread | None = None

    def open_output_stream(self, path: str) -> Any:
        if self.refused is threading.current_thread():
            self.refused = None
            raise OSError("AWS Error SLOW_DOWN: Please reduce your request rate")
        return Upload(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def test_a_renewal_that_an_object_store_refuses_leaves_the_lock_as_it_was(tmp_path: Path) -> None:
    store = ObjectStore()
    storage = RemoteStorage(Place("s3://bucket/run"), store, str(tmp_path))
    held = acquire(storage, "run")
    store.refused = threading.current_thread()
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        storage.put(lock.FILE, [memoryview(b"{}")])
    assert holds(storage, "run", held.owner.epoch)
    store.refused = held._thread
    until(lambda: store.refused is None)
    assert holds(storage, "run", held.owner.epoch)
    until_renewed(tmp_path)
    held.release()


def test_the_epoch_exceeds_that_of_every_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage, replace(OWNER, epoch=7))
    save(storage.uri, 1, state(1), epoch=7)
    storage.delete(lock.FILE)
    held = acquire(storage, "run")
    assert held.owner.epoch == 8
    held.release()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"[" * 50_000,
        b"[]",
        b"null",
        b"\xff\xfe",
        b"x" * 70_000,
        json.dumps(asdict(OWNER) | {"epoch": "7"}).encode(),
        json.dumps(asdict(OWNER) | {"epoch": 10**12}).encode(),
        json.dumps(asdict(OWNER) | {"epoch": -1}).encode(),
        json.dumps(asdict(OWNER) | {"renewed": None}).encode(),
        json.dumps(asdict(OWNER) | {"more": 1}).encode(),
        json.dumps(asdict(OWNER) | {"host": socket.gethostname(), "pid": 10**30}).encode(),
        json.dumps(asdict(OWNER) | {"host": socket.gethostname(), "pid": -5, "started": float("nan")}).encode(),
    ],
    ids=lambda _: "",  # the contents bear this process's number
)
def test_a_damaged_lock_is_nobodys(tmp_path: Path, content: bytes) -> None:
    storage = two_checkpoints(tmp_path)
    (tmp_path / lock.FILE).write_bytes(content)
    held = acquire(storage, "run")
    assert held.owner.epoch == 2
    assert holds(storage, "run", 2)
    held.release()


def test_an_epoch_that_no_name_can_hold_is_a_typed_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage, replace(OWNER, owner="first", epoch=lock.LATEST_EPOCH, renewed=-1))
    with pytest.raises(StorageError, match="remove it"):
        acquire(storage, "second")


def test_a_lock_that_is_no_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / lock.FILE).mkdir()
    with pytest.raises(StorageError):
        acquire(LocalStorage(tmp_path), "run")


def test_a_link_in_place_of_the_lock_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / lock.FILE).symlink_to(target)
    held = acquire(LocalStorage(tmp_path / "runs"), "run")
    held.release()
    assert target.read_text() == "mine"
    assert checkpoint.found(LocalStorage(tmp_path / "runs")) == []
