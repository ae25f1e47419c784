"""Hosts on one machine, without Ray: what is cut, what is slow, what is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from raytrain_ft.chaos import network
from raytrain_ft.chaos.network import Host, Network

pytestmark = pytest.mark.skipif(network.why_unavailable() is not None, reason=f"several hosts: {network.why_unavailable()}")
PORT = 7000


@pytest.fixture
def net() -> Iterator[Network]:
    with Network() as net:
        yield net


class Server:
    """Takes whatever datagrams come to a host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.socket = host.submit(self._open).result()

    def _open(self) -> socket.socket:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((self.host.address, PORT))
        return server

    def hears(self, source: Host, seconds: float = 5.0) -> bool:
        """Whether what `source` sends arrives in time: on a busy machine the kernel delivers late."""

        def send() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                out.sendto(b"hello", (self.host.address, PORT))

        source.submit(send).result()
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(16) == b"hello"
        except TimeoutError:
            return False


def test_cables(net: Network) -> None:
    a, b = net.add_host("a"), net.add_host("b")
    at_a, at_b, here = Server(a), Server(b), Server(net.machine)
    try:
        assert at_a.hears(b)
        assert at_b.hears(a)
        assert here.hears(a)
        net.unplug(a)
        assert not at_b.hears(a, seconds=0.2)
        assert not at_a.hears(b, seconds=0.2)
        assert here.hears(b)
        net.plug(a)
        assert at_b.hears(a)
        net.cut(a, b)
        assert not at_b.hears(a, seconds=0.2)
        assert at_a.hears(b)
        assert here.hears(a)
        net.join(a, b)
        assert at_b.hears(a)
        net.unplug(net.machine)
        assert not here.hears(a, seconds=0.2)
        assert at_b.hears(a)
    finally:
        for server in (at_a, at_b, here):
            server.socket.close()


def test_a_slow_cable(net: Network) -> None:
    a, b = net.add_host("a"), net.add_host("b")
    data = b"x" * 100_000

    def listen() -> socket.socket:
        return socket.create_server((b.address, PORT))

    def send() -> None:
        with socket.create_connection((b.address, PORT), timeout=10) as out:
            out.sendall(data)

    def seconds() -> float:
        began = time.monotonic()
        sending = a.submit(send)
        connection, _ = server.accept()
        with connection:
            got = 0
            while got < len(data):
                got += len(connection.recv(65536))
        sending.result()
        return time.monotonic() - began

    with b.submit(listen).result() as server:
        at_1_megabit = 0.9 * len(data) * 8 / 1e6 - 0.15  # 16 KB pass at once
        assert min(seconds() for _ in range(3)) < at_1_megabit, "on a busy machine one may take long all the same"
        net.slow(a, bits_per_second=1e6)
        assert seconds() > at_1_megabit
        net.full_speed(a)
        assert min(seconds() for _ in range(3)) < at_1_megabit


def test_clocks_differ(net: Network) -> None:
    ahead = net.add_host("ahead", clock=1_000_000.0)
    code = "import time; print(time.monotonic())"
    assert float(ahead.tell(sys.executable, "-c", code)) - time.monotonic() == pytest.approx(1_000_000, abs=5)


OWNER = """
import time
from raytrain_ft.chaos.network import Network
with Network() as net:
    net.add_host("a")
    print("up", flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "raise SystemExit", "killed"])
def test_nothing_is_left(end: str) -> None:
    code = OWNER.format(end="time.sleep(60)" if end == "killed" else end)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    if end == "killed":
        assert f"hosts{owner.pid}" in psutil.net_if_addrs()
        owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    deadline = time.monotonic() + 5
    while f"hosts{owner.pid}" in psutil.net_if_addrs() and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel takes namespaces down in the background
    assert f"hosts{owner.pid}" not in psutil.net_if_addrs()
