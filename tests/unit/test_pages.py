"""Threads go on while a mapping's pages are brought into memory: those that beat, answer and renew are among them. And a page
that cannot be had is an error, not the end of the process."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import small_file_system

from raytrain_ft.errors import StorageError
from raytrain_ft.storage import pages
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.persister import SharedMemory

SIZE = 2**29
LEAST = 10


def ticks_during(work: Callable[[], object]) -> int:
    """How often another thread had its turn, a millisecond after the turn before."""
    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        began = time.monotonic()
        work()
        ended = time.monotonic()
    finally:
        over.set()
        ticking.join()
    return sum(began < at < ended for at in ticks)


def ends(work: Callable[[], object]) -> int:
    """How a process ends that does this: 0, 1 after an error, or the signal that killed it, negative."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refuses(address: int, size: int, advice: int) -> int:
    """What madvise says to an advice that the kernel does not know."""
    pages.ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize("known", [True, False])
def test_threads_go_on_while_memory_for_snapshots_is_touched(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(pages, "_madvise", refuses)
    memory = SharedMemory()
    assert ticks_during(lambda: memory.reserve(SIZE)) >= LEAST
    assert os.fstat(memory.descriptor).st_blocks * 512 >= SIZE, "every page is there"
    memory.close()


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_grows_keeps_what_it_holds(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(pages, "_madvise", refuses)
    memory = SharedMemory()
    memory.reserve(5000)[:] = b"x" * 5000
    grown = memory.reserve(100_000)
    assert bytes(grown) == b"x" * 5000 + bytes(95_000)
    grown.release()
    memory.close()


def test_threads_go_on_while_a_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "shard").open("wb") as file:
        file.truncate(SIZE)  # the kernel makes its pages when they are asked for
    storage = LocalStorage(tmp_path)
    assert ticks_during(lambda: storage.view("shard")) >= LEAST


def test_a_kernel_that_cannot_fetch_pages_leaves_it_to_who_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", refuses)
    (tmp_path / "shard").write_bytes(b"content")
    assert LocalStorage(tmp_path).view("shard").to_pybytes() == b"content"


# ---------------------------------------------------------------- pages that cannot be had


@pytest.mark.parametrize("known", [True, False])
def test_bytes_that_the_disk_does_not_give_back_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The pages of a file that became shorter cannot be read, like those of a bad sector."""
    path, real = tmp_path / "shard", mmap.mmap
    path.write_bytes(bytes(10 * mmap.PAGESIZE))

    def mapped(*args: Any) -> mmap.mmap:
        mapping = real(*args)
        os.truncate(path, mmap.PAGESIZE)
        return mapping

    def read() -> None:
        monkeypatch.setattr(mmap, "mmap", mapped)
        if not known:
            monkeypatch.setattr(pages, "_madvise", refuses)
        with pytest.raises(StorageError, match="shard cannot be read"):
            LocalStorage(tmp_path).view("shard").to_pybytes()

    assert ends(read) == 0


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_nobody_grants_is_an_error_and_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A memfd where memory is not promised before it is there, and a tmpfs, grant a page when it is touched, or refuse it."""

    def reserve() -> None:
        if not known:
            monkeypatch.setattr(pages, "_madvise", refuses)
        descriptor = os.open(disk / "memory", os.O_RDWR | os.O_CREAT)
        monkeypatch.setattr(os, "memfd_create", lambda *_: descriptor)
        memory = SharedMemory()
        memory.reserve(5000)[:] = b"x" * 5000
        free = os.statvfs(disk).f_bfree
        with pytest.raises(OSError, match=r"memory|space"):
            memory.reserve(2**22)
        assert os.statvfs(disk).f_bfree == free
        assert bytes(memory.reserve(6000)) == b"x" * 5000 + bytes(1000)

    with small_file_system(tmp_path / "disk", "1M") as disk:
        assert ends(reserve) == 0
