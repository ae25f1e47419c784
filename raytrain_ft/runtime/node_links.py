"""A connection to every node that hosts a worker of ours: nothing tells sooner that a node has died.

When a raylet dies, the kernel of its machine closes its connections at once. Ray waits for more: it tells of a killed raylet
after 1 to 14 s (Ray 2.60).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container
from typing import Any

import ray

from raytrain_ft.runtime import lifeline, placement


class NodeLinks:
    """Connections to raylets.

    Args:
        died: is told of a node whose raylet closed the connection and refuses another one.
    """

    def __init__(self, died: Callable[[str], None]) -> None:
        self._died = died
        self.nodes: list[dict[str, Any]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._forgiven_until = 0.0

    def follow(self, nodes: list[dict[str, Any]], ours: Container[str]) -> None:
        """These are the cluster's nodes now, in Ray's words. Those that host a worker of `ours` are watched, and no others."""
        self.nodes = nodes
        wanted = {node["NodeID"]: node for node in nodes if node["NodeID"] in ours}
        for gone in self._tasks.keys() - wanted.keys():
            self._tasks.pop(gone).cancel()
        for new in wanted.keys() - self._tasks.keys():
            self._tasks[new] = asyncio.get_running_loop().create_task(self._hold(wanted[new]))

    async def are_cut(self, silent: float) -> bool:
        """Whether it is this node's own cable: no other node gives as much as a refusal.

        Args:
            silent: seconds that nobody was heard, 0 if somebody is. TCP doubles its pauses meanwhile, so what was sent in this
                time may arrive as much later again.
        """
        if silent and await self._nobody_answers():
            self._forgiven_until = time.monotonic() + silent
        return time.monotonic() < self._forgiven_until

    async def _nobody_answers(self) -> bool:
        if not self.nodes:
            return False
        here = ray.get_runtime_context().get_node_id()
        others = [node for node in self.nodes if node["Alive"] and node["NodeID"] != here]
        return bool(others) and all(await asyncio.gather(*(placement.is_silent(node) for node in others)))

    async def _hold(self, node: dict[str, Any]) -> None:
        await lifeline.hold(node["NodeManagerAddress"], node["NodeManagerPort"])
        self._died(node["NodeID"])
