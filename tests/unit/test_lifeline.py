"""A killed process is known to be dead before the kernel has ended it, and only if it is."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_ft.runtime import lifeline

BIG = """
import sys, threading, time
import numpy as np
from raytrain_ft.runtime import lifeline
filled = np.ones(100 << 20, dtype=np.uint8)  # what the kernel has to give back
before = open("/dev/null")
print(lifeline.offer("127.0.0.1"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process() -> subprocess.Popen[str]:
    with subprocess.Popen([sys.executable, "-c", BIG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    port = int(process.stdout.readline())
    if not port:
        pytest.skip("this kernel does not allow unshare(CLONE_FILES)")
    return port


def test_a_killed_process_is_known_to_be_dead(process: subprocess.Popen[str]) -> None:
    port = port_of(process)

    async def seconds_until_known() -> float:
        holding = asyncio.create_task(lifeline.hold("127.0.0.1", port))
        await asyncio.to_thread(until, lambda: sockets_of(process) == 2)
        assert not holding.done()
        process.kill()
        began = time.monotonic()
        await asyncio.wait_for(holding, 10)
        return time.monotonic() - began

    assert asyncio.run(seconds_until_known()) < 1.0


def test_the_line_is_in_a_table_of_files_of_its_own(process: subprocess.Popen[str]) -> None:
    """So it is closed when its thread ends, and not when the last one has given the memory back. What others have opened must
    not be there: it would stay open when they close it."""
    port = port_of(process)
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        until(lambda: sockets_of(process) == 2)  # the listener, and the connection
        tables = tables_of(process)
        (own,) = [table for table in tables if any("socket:" in name for name in table)]
        assert "/dev/null" not in own
        assert sum("/dev/null" in table for table in tables) == len(tables) - 1


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tables_of(process: subprocess.Popen[str]) -> list[list[str]]:
    """What each of its threads has open."""
    return [files_of(thread) for thread in Path(f"/proc/{process.pid}/task").iterdir()]


def sockets_of(process: subprocess.Popen[str]) -> int:
    return sum("socket:" in name for table in tables_of(process) for name in table)


def files_of(thread: Path) -> list[str]:
    """What it has open, but for the standard streams."""
    return [str(entry.readlink()) for entry in (thread / "fd").iterdir() if int(entry.name) > 2]


def test_strangers_push_out_who_holds_the_line_and_it_is_held_again() -> None:
    port = lifeline.offer("127.0.0.1")
    assert port

    async def flood() -> bool:
        holding = asyncio.create_task(lifeline.hold("127.0.0.1", port))
        await asyncio.sleep(0.1)
        strangers = [await lifeline.connect("127.0.0.1", port) for _ in range(3 * lifeline.MOST_CALLERS)]
        for _, writer in strangers:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.3)
        alive = not holding.done()
        for _, writer in strangers:
            writer.close()
        holding.cancel()
        return alive

    assert asyncio.run(flood())


def test_a_line_that_is_held_no_longer_is_closed() -> None:
    """Not when Python happens to look for garbage."""

    async def hold_for_a_moment() -> None:
        taken, ended = asyncio.Event(), asyncio.Event()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.set()
            await reader.read()
            ended.set()
            writer.close()

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        holding = asyncio.create_task(lifeline.hold(*server.sockets[0].getsockname()))
        await asyncio.wait_for(taken.wait(), 10)
        await asyncio.sleep(0.1)
        holding.cancel()
        await asyncio.wait_for(ended.wait(), 10)
        assert holding.cancelled()
        server.close()

    asyncio.run(hold_for_a_moment())


def test_where_nobody_ever_answers_it_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall drops what comes, for each node and each worker: all threads would be taken by that, again and again. Who has
    answered once is asked as often as ever."""
    pauses: list[float] = []
    answers = iter([*[TimeoutError()] * 9, None, TimeoutError(), TimeoutError(), ConnectionRefusedError()])

    async def connect(host: str, port: int) -> tuple[Any, Any]:
        if (error := next(answers)) is not None:
            raise error
        reader = asyncio.StreamReader()
        reader.feed_eof()
        return reader, SimpleNamespace(close=lambda: None)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(lifeline, "connect", connect)
    monkeypatch.setattr(lifeline.asyncio, "sleep", sleep)
    asyncio.run(lifeline.hold("10.0.0.1", 1))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, lifeline.FIRST_RETRY_S, 1.0, 1.0]


@pytest.mark.parametrize("libc", [SimpleNamespace(unshare=lambda flags: -1), SimpleNamespace()], ids=["forbidden", "absent"])
def test_where_the_kernel_does_not_allow_it_there_is_no_line(libc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    assert lifeline.offer("127.0.0.1") == 0
    until(lambda: threading.active_count() <= before)
