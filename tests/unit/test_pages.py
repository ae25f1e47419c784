"""Threads go on while a mapping's pages are brought into memory: those that beat, answer and renew are among them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
