"""A local Ray cluster whose nodes are hosts with cables: to rehearse on one machine what happens to a network.

Linux only; needs root and iproute2 (`network.why_unavailable` says what is missing). See docs/noticing.md.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from raytrain_ft.chaos.cluster import OBJECT_STORE_BYTES, LocalCluster
from raytrain_ft.chaos.network import Host, Network

HEAD = "head"
"""Names the head node, where the driver and the supervisor are, in place of a node's id."""
DAYS = 86_400.0


class HostCluster(LocalCluster):
    """A `LocalCluster` whose nodes are separate hosts, each with an address, a cable, and a monotonic clock of its own.

    The head node and this process are on the machine itself, which is attached to the same switch: `HEAD` can be unplugged like
    any other. A node is named by its Ray id.

    Args:
        clocks: of each node's monotonic clock a random lead, as on machines that were booted at different times.
    """

    def __init__(self, num_nodes: int = 4, cpus_per_node: int = 1, *, clocks: bool = True) -> None:
        super().__init__(num_nodes, cpus_per_node)
        self._clocks = clocks
        self._hosts: dict[str, Host] = {}

    def __enter__(self) -> HostCluster:
        self._network = Network()
        self._network.__enter__()
        try:
            self._hosts[HEAD] = self._network.machine
            super().__enter__()
        except BaseException:
            self._network.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._network.__exit__(kind, error, trace)

    def _head_options(self) -> dict[str, Any]:
        return {"node_ip_address": self._network.machine.address}

    def add_node(self, **options: Any) -> str:
        """Adds a host with a Ray node for workers; returns its Ray id.

        Args:
            options: of Ray, for this node: `resources`, for example.
        """
        return self._add_nodes(1, **options)[0]

    def _add_nodes(self, number: int, **options: Any) -> list[str]:
        """All at once: each host starts its own."""
        clocks = [random.uniform(0, 100 * DAYS) if self._clocks else 0.0 for _ in range(number)]
        hosts = [self._network.add_host(f"node{len(self._hosts) + index}", clock) for index, clock in enumerate(clocks)]
        nodes = [node.result() for node in [host.submit(partial(self._start_node, host, options)) for host in hosts]]
        for host, node in zip(hosts, nodes, strict=True):
            self._cluster.worker_nodes.add(node)
            self._cluster._wait_for_node(node)
            self._nodes.append(node)
            self._hosts[node.node_id] = host
        return [node.node_id for node in nodes]

    def _start_node(self, host: Host, options: dict[str, Any]) -> Any:
        """As `ray.cluster_utils.Cluster.add_node` does it, which can only be called from the main thread. Private to Ray."""
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        sockets = Path(self._cluster.head_node.get_sockets_dir_path())  # names of our own: Ray's are not safe between threads
        usual = {
            "raylet_socket_name": str(sockets / f"raylet.{host.name}"),
            "plasma_store_socket_name": str(sockets / f"plasma_store.{host.name}"),
            "runtime_env_dir_name": f"runtime_resources_{host.name}",  # see `LocalCluster.add_node`
            "gcs_address": self._cluster.gcs_address,
            "redis_address": self._cluster.redis_address,
            "node_ip_address": host.address,
            "node_manager_port": 0,
            "num_cpus": self._cpus_per_node,
            "num_gpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "min_worker_port": 0,
            "max_worker_port": 0,
            "include_log_monitor": False,
            "dashboard_agent_listen_port": None,
        }
        params = RayParams(**usual | options)
        # a reaper means on Linux: the kernel ends these processes with the thread that started them, and that with this process
        return Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)

    # ---------------------------------------------------------------- the network

    def unplug(self, node: str) -> None:
        """Pulls a node's cable out: nobody reaches it, and it reaches nobody."""
        self._network.unplug(self._hosts[node])

    def plug(self, node: str) -> None:
        """Puts it in again."""
        self._network.plug(self._hosts[node])

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """What these send does not arrive at those any more; the other way goes on."""
        for source, target in self._pairs(sources, targets):
            self._network.cut(source, target)

    def join(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Ends a `cut`."""
        for source, target in self._pairs(sources, targets):
            self._network.join(source, target)

    def split(self, nodes: Iterable[str]) -> None:
        """Cuts the cluster in two halves: these nodes, and all others with the head."""
        half, others = self._halves(nodes)
        self.cut(half, others)
        self.cut(others, half)

    def unite(self, nodes: Iterable[str]) -> None:
        """Ends a `split`."""
        half, others = self._halves(nodes)
        self.join(half, others)
        self.join(others, half)

    def slow(self, node: str, bits_per_second: float, buffer_seconds: float = 1.0) -> None:
        """Lets a node's cable carry no more than this, each way, and keep up to `buffer_seconds` of it waiting."""
        self._network.slow(self._hosts[node], bits_per_second, buffer_seconds)

    def full_speed(self, node: str) -> None:
        """Ends `slow`."""
        self._network.full_speed(self._hosts[node])

    @contextmanager
    def flapping(self, node: str, down: float, up: float) -> Iterator[None]:
        """While the block runs, a node's cable has no contact for `down` seconds, then for `up` seconds it has, and so on."""
        over = threading.Event()

        def flap() -> None:
            while not over.is_set():
                self.unplug(node)
                over.wait(down)
                self.plug(node)
                over.wait(up)

        thread = threading.Thread(target=flap, name="flapping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _halves(self, nodes: Iterable[str]) -> tuple[list[str], list[str]]:
        half = list(nodes)
        return half, [node for node in self._hosts if node not in half]

    def _pairs(self, sources: Iterable[str], targets: Iterable[str]) -> Iterator[tuple[Host, Host]]:
        others = list(targets)
        return ((self._hosts[source], self._hosts[target]) for source in sources for target in others)
