"""Several hosts on one machine: network namespaces, joined by veth pairs and a bridge, whose cables can be cut.

A host is a thread that has entered a network namespace of its own and has, like a machine, a monotonic clock of its own. What
the thread starts is on that host. Nothing of it has a name outside of this process, so the kernel itself removes all of it with
the last process in it, whatever the end, SIGKILL included. Linux only; needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from raytrain_ft.errors import ConfigError

T = TypeVar("T")
CLONE_NEWNET, CLONE_NEWTIME = 0x40000000, 0x00000080
SUBNETS = [f"198.{18 + number // 256}.{number % 256}" for number in range(512)]
"""Addresses for tests between networks (RFC 2544), which no real network uses."""
NOBODY = "02:00:00:00:00:00"
"""A hardware address that no interface has: what is sent there is lost without a word."""
COMMAND_SECONDS = 20.0


def why_unavailable() -> str | None:
    """Why there can be no `Network` here; None if there can."""
    if not Path("/proc/self/ns/net").exists():
        return "this system has no network namespaces (Linux has)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    try:
        Host("probe", 0.0).close()
    except OSError as error:
        return f"the kernel refuses a new namespace: {error.strerror}"
    return None


class Host:
    """A namespace, or the machine itself.

    Args:
        clock: seconds that its monotonic clock is ahead of this machine's.

    Attributes:
        address: its IPv4 address, once it is attached.

    Raises:
        OSError: the kernel refuses the namespace.
    """

    def __init__(self, name: str, clock: float | None) -> None:
        self.name = name
        self.address = ""
        self.port = ""  # of the switch
        self.interface = "eth0"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"host-{name}")
        self.path = self._thread.submit(_enter, clock).result() if clock is not None else f"/proc/{os.getpid()}/ns/net"

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on this host, after what was submitted before. A process that it starts is on this host, too."""
        return self._thread.submit(function)

    def tell(self, *command: str) -> str:
        """Runs a command on this host; returns what it prints.

        Raises:
            OSError: it fails.
        """
        return self.submit(lambda: _run(*command)).result()

    def close(self) -> None:
        """The thread ends; the namespace goes with the last process in it."""
        self._thread.shutdown()


def _enter(clock: float) -> str:
    """Takes this thread into new namespaces. A clock is set for the processes that it will start."""
    tid = threading.get_native_id()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWTIME) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path(f"/proc/{tid}/timens_offsets").write_text(f"monotonic {int(clock)} 0\nboottime {int(clock)} 0\n")
    _run("ip", "link", "set", "lo", "up")
    return f"/proc/{os.getpid()}/task/{tid}/ns/net"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode != 0:
        raise OSError(done.returncode, f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """A context: a switch, this machine attached to it, and hosts.

    Raises:
        ConfigError: there can be none here; it says why.
    """

    def __init__(self) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise ConfigError(f"several hosts on this machine: {reason}")

    def __enter__(self) -> Network:
        with ExitStack() as self._end:
            self._subnet = _free_subnet()
            self._hosts: list[Host] = []
            self._switch = self._open("switch", 0.0)
            self._switch.tell("ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
            self._switch.tell("ip", "link", "set", "bridge", "up")
            self.machine = self._open("machine", None)
            self.machine.interface = f"hosts{os.getpid() % 10_000_000}"
            self._attach(self.machine)
            self._end.callback(_run, "ip", "link", "del", self.machine.interface)
            self._end = self._end.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.close()

    def _open(self, name: str, clock: float | None) -> Host:
        host = Host(name, clock)
        self._end.callback(host.close)
        return host

    def add_host(self, name: str, clock: float = 0.0) -> Host:
        """A further host, with its cable plugged in. `clock`: seconds that its monotonic clock is ahead of this machine's."""
        host = self._open(name, clock)
        self._attach(host)
        return host

    def _attach(self, host: Host) -> None:
        self._hosts.append(host)
        host.port, host.address = f"port{len(self._hosts)}", f"{self._subnet}.{len(self._hosts)}"
        end = ("peer", "name", host.interface, "netns", host.path)
        self._switch.tell("ip", "link", "add", host.port, "type", "veth", *end)
        self._switch.tell("ip", "link", "set", host.port, "master", "bridge", "up")
        host.tell("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
        host.tell("ip", "link", "set", host.interface, "up")

    # ---------------------------------------------------------------- what can happen to a cable

    def unplug(self, host: Host) -> None:
        """Pulls its cable out of the switch. (The port stays up: a kernel takes a second to believe in a new carrier.)"""
        self._switch.tell("ip", "link", "set", host.port, "nomaster")

    def plug(self, host: Host) -> None:
        """Puts its cable in again."""
        self._switch.tell("ip", "link", "set", host.port, "master", "bridge")

    def cut(self, source: Host, target: Host) -> None:
        """From now on nothing that `source` sends arrives at `target`. The other way is as it was."""
        source.tell("ip", "neigh", "replace", target.address, "lladdr", NOBODY, "nud", "permanent", "dev", source.interface)

    def join(self, source: Host, target: Host) -> None:
        """Ends a `cut`."""
        source.tell("ip", "neigh", "del", target.address, "dev", source.interface)

    def slow(self, host: Host, bits_per_second: float, buffer_seconds: float = 1.0) -> None:
        """Lets no more through than this, each way. What waits longer than `buffer_seconds` is dropped, as by a real switch."""
        rate = ("rate", f"{bits_per_second:.0f}bit", "burst", "16kb", "latency", f"{buffer_seconds * 1000:.0f}ms")
        for at, interface in ((host, host.interface), (self._switch, host.port)):
            at.tell("tc", "qdisc", "replace", "dev", interface, "root", "tbf", *rate)

    def full_speed(self, host: Host) -> None:
        """Ends `slow`."""
        for at, interface in ((host, host.interface), (self._switch, host.port)):
            at.tell("tc", "qdisc", "del", "dev", interface, "root")


def _free_subnet() -> str:
    """One that this machine has no address in; two processes at once begin to look at different ones."""
    taken = {a["local"] for link in json.loads(_run("ip", "-json", "address")) for a in link["addr_info"]}
    begin = os.getpid() % len(SUBNETS)
    for subnet in (*SUBNETS[begin:], *SUBNETS[:begin]):
        if not any(address.startswith(f"{subnet}.") for address in taken):
            return subnet
    raise ConfigError("several hosts on this machine: no subnet of 198.18.0.0/15 is free")
