"""Connections to raylets: a death is told at once, anything else is not one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from raytrain_ft.runtime import lifeline
from raytrain_ft.runtime.node_links import NodeLinks


def node_at(port: int) -> dict[str, Any]:
    return {"NodeID": f"node-{port}", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": True}


class Raylet:
    """A listener; `close` ends it as a SIGKILL would."""

    async def start(self) -> dict[str, Any]:
        self._connections: list[asyncio.StreamWriter] = []
        self.accepted = asyncio.Event()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return node_at(self._server.sockets[0].getsockname()[1])

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(writer)
        self.accepted.set()

    def hang_up(self) -> None:
        self.accepted.clear()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        self._server.close()
        self.hang_up()


def watched(body: Callable[[Raylet, NodeLinks, dict[str, Any], list[str]], Awaitable[None]]) -> list[str]:
    """Who was told to have died while the body ran, with a connection that stands."""
    died: list[str] = []

    async def run() -> None:
        raylet = Raylet()
        node = await raylet.start()
        links = NodeLinks(died.append)
        links.follow([node], {node["NodeID"]})
        await asyncio.wait_for(raylet.accepted.wait(), 2)
        await asyncio.sleep(0.01)
        await body(raylet, links, node, died)
        links.follow([], set())
        raylet.close()

    asyncio.run(run())
    return died


async def told_at_once(node: dict[str, Any], died: list[str]) -> None:
    """How soon is `benchmarks.detection`'s to say; Ray's own word took 1.6 s there."""
    began = time.monotonic()
    while not died and time.monotonic() - began < 1:
        await asyncio.sleep(0.001)
    assert died == [node["NodeID"]]


def test_a_death_is_told_at_once() -> None:
    async def body(raylet: Raylet, links: NodeLinks, node: dict[str, Any], died: list[str]) -> None:
        raylet.close()
        await told_at_once(node, died)

    assert len(watched(body)) == 1


def test_a_raylet_whose_sockets_close_one_by_one() -> None:
    """The established connection first: the next one is taken, and ends at once."""

    async def body(raylet: Raylet, links: NodeLinks, node: dict[str, Any], died: list[str]) -> None:
        raylet.hang_up()
        await asyncio.wait_for(raylet.accepted.wait(), 2)
        raylet.close()
        await told_at_once(node, died)

    assert len(watched(body)) == 1


def test_a_raylet_that_only_hangs_up_has_not_died(monkeypatch) -> None:
    monkeypatch.setattr(lifeline, "RETRY_S", 0.01)

    async def body(raylet: Raylet, links: NodeLinks, node: dict[str, Any], died: list[str]) -> None:
        for _ in range(3):
            raylet.hang_up()
            await asyncio.wait_for(raylet.accepted.wait(), 2)

    assert watched(body) == []


def test_a_node_without_workers_of_ours_is_not_watched() -> None:
    async def body(raylet: Raylet, links: NodeLinks, node: dict[str, Any], died: list[str]) -> None:
        links.follow([node], set())
        raylet.close()
        await asyncio.sleep(0.1)

    assert watched(body) == []


def test_where_connections_were_never_taken_a_refusal_says_nothing(monkeypatch) -> None:
    """A firewall that refuses them, for example."""
    monkeypatch.setattr(lifeline, "RETRY_S", 0.01)
    died: list[str] = []

    async def run() -> None:
        raylet = Raylet()
        node = await raylet.start()
        raylet.close()
        links = NodeLinks(died.append)
        links.follow([node], {node["NodeID"]})
        await asyncio.sleep(0.1)
        links.follow([], set())

    asyncio.run(run())
    assert died == []
