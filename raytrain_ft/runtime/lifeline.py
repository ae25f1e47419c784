"""Connections over which nothing is ever sent: their end tells, sooner than anything else, that the other side has died.

The kernel of a machine closes the connections of a process that dies. Ray waits for more: it tells of a killed raylet after 1
to 14 s (Ray 2.60), and of a killed worker when the kernel has given all of its memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

CONNECT_SECONDS = 0.5
RETRY_S = 1.0
SILENT_RETRY_S = 60.0
"""Where nobody ever answered, perhaps for a firewall, it is asked so rarely in the end: each time takes one of the threads, for
which others wait, for `CONNECT_SECONDS`."""
FIRST_RETRY_S = 0.005
"""After a connection that ended soon; doubled each time. A process that is being killed may yet take the next connection, for a
moment: its sockets are closed one by one."""
OFFER_SECONDS = 5.0
MOST_CALLERS = 16
ABOVE_ALL_CALLERS = 64
CLONE_FILES = 0x400
_KNOCKING = ThreadPoolExecutor(max_workers=16, thread_name_prefix="knocking")


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to who listens there.

    Raises:
        ConnectionRefusedError: nobody does any more; OSError, TimeoutError: the node cannot be reached, is frozen or unplugged.
    """
    # In a thread, where the kernel keeps the time: if this process is held up for longer than that, what came meanwhile counts,
    # and a node that answered is not taken for a dead one.
    knock = partial(socket.create_connection, (host, port), timeout=CONNECT_SECONDS)
    knocking = await asyncio.get_running_loop().run_in_executor(_KNOCKING, knock)
    knocking.setblocking(False)
    return await asyncio.open_connection(sock=knocking)


async def hold(host: str, port: int) -> None:
    """Returns when who listened there has died: a connection was taken, has ended, and the next one is refused. Who lives may
    close a connection that says nothing, but takes the next one; and no cut cable refuses anything."""
    known, pause, silence = False, FIRST_RETRY_S, RETRY_S
    while True:
        try:
            reader, writer = await connect(host, port)
        except ConnectionRefusedError:
            if known:
                return
            await asyncio.sleep(RETRY_S)
        except (OSError, TimeoutError):
            await asyncio.sleep(RETRY_S if known else silence)  # silent: that is for heartbeats to judge
            silence = min(2 * silence, SILENT_RETRY_S)
        else:
            known, began = True, time.monotonic()
            try:
                await _ended(reader)
            finally:  # also if nobody wants to know any more: whoever listens has room for a few
                writer.close()
            if time.monotonic() - began >= RETRY_S:
                pause = FIRST_RETRY_S
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S)


async def _ended(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except OSError:
        pass  # a connection that broke has ended, too


def offer(host: str) -> int:
    """Takes connections on this address for as long as this process lives, to be held by who must know of its death.

    Returns:
        The port, or 0 where the kernel lacks what it takes, or does not allow it (containers may lack the right to `unshare`).
    """
    port: Future[int] = Future()
    threading.Thread(target=_listen, args=(host, port), name="lifeline", daemon=True).start()
    try:
        return port.result(OFFER_SECONDS)
    except (OSError, TimeoutError):
        return 0


def _listen(host: str, port: Future[int]) -> None:
    """Until the process ends. What others say is not even read."""
    # A process that is killed gives its memory back before it closes its files. With torch in it that is 20 ms of processor
    # time, for which it competes with those who train: 50 to 200 ms. But each of its threads ends at once, and with this one
    # goes the table of files that no other thread shares.
    try:
        _leave_shared_files()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as low:
            # The kernel closes a dying thread's files from the highest number down. The listener must go first: whoever sees a
            # connection end calls again at once, to be refused.
            listener = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL_CALLERS))
    except OSError as error:
        port.set_exception(error)
        return
    port.set_result(listener.getsockname()[1])
    callers: deque[socket.socket] = deque(maxlen=MOST_CALLERS)  # whoever is pushed out calls again
    while True:
        try:
            callers.append(listener.accept()[0])
        except OSError:  # a caller that went away meanwhile
            time.sleep(FIRST_RETRY_S)


def _leave_shared_files() -> None:
    """From here on this thread has a table of files of its own, without those that other threads have opened: what they close
    would stay open in it."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None or unshare(CLONE_FILES) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_FILES)")  # another system than Linux, or it is forbidden
    for entry in Path("/proc/thread-self/fd").iterdir():
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(entry.name))
