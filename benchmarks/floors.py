"""What the numbers were measured on, and its raw floor: the machine's description and its loopback bandwidth."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the numbers were measured on. No host name, no path, no address."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "ray", "torchft", "pyarrow", "numpy")},
    }


def _cpu_model() -> str:
    """The processor's name, from the kernel where it says so."""
    with_name = Path("/proc/cpuinfo")
    if with_name.exists():
        for line in with_name.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """A package's installed version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def loopback_bandwidth(num_bytes: int = 256 << 20, buffer_bytes: int = 4 << 20, repeats: int = 5) -> float:
    """Bytes per second through one TCP connection on 127.0.0.1, one sender and one receiver: the best of `repeats`.

    The best, since this is a floor that others are measured against: what the machine can do when nothing disturbs it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30.0)
        with socket.create_connection(server.getsockname(), timeout=30.0) as out:
            into, _ = server.accept()
            with into:
                into.settimeout(30.0)
                return max(num_bytes / _transfer_s(out, into, num_bytes, buffer_bytes) for _ in range(repeats))


def _transfer_s(out: socket.socket, into: socket.socket, num_bytes: int, buffer_bytes: int) -> float:
    """Seconds from the first byte sent to the last one received. A thread suffices: both calls release the GIL."""
    source, sink = memoryview(bytearray(buffer_bytes)), memoryview(bytearray(buffer_bytes))

    def send() -> None:
        left = num_bytes
        while left > 0:
            left -= out.send(source[: min(left, buffer_bytes)])

    sender = threading.Thread(target=send, daemon=True)
    began = time.perf_counter()
    sender.start()
    left = num_bytes
    while left > 0:
        got = into.recv_into(sink, min(left, buffer_bytes))
        if got == 0:
            raise ConnectionError(f"the loopback connection closed with {left} of {num_bytes} bytes to go")
        left -= got
    sender.join()
    return time.perf_counter() - began
