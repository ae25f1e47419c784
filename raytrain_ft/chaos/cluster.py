"""Several real Ray nodes on one machine, with token authentication on: to rehearse the loss of nodes on a laptop."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray

from raytrain_ft.chaos.faults import ChaosError
from raytrain_ft.errors import ConfigError

OBJECT_STORE_BYTES = 80 * 2**20


class LocalCluster:
    """A context: a head node without CPUs (the driver and the supervisor live there), and nodes that can be lost.

    Args:
        num_nodes: nodes for workers.
        cpus_per_node: workers that each of them has room for, at one CPU each.
    """

    def __init__(self, num_nodes: int = 4, cpus_per_node: int = 1) -> None:
        self._num_nodes = num_nodes
        self._cpus_per_node = cpus_per_node
        self._cluster: Any = None
        self._nodes: list[Any] = []
        self._environment: dict[str, str | None] = {}
        self._directory: str | None = None

    def __enter__(self) -> LocalCluster:
        if ray.is_initialized():
            raise ConfigError("LocalCluster: this process is connected to a Ray cluster already; call ray.shutdown() first")
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        # Token authentication as Ray wants it: a token of this cluster alone, in the environment that its nodes inherit.
        self._set("RAY_AUTH_MODE", "token")
        self._set("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Every node has an agent that looks at the machine for Ray's dashboard, by default every 5 s: six of them took 15 % of
        # a processor.
        self._set("REPORTER_UPDATE_INTERVAL_MS", "60000")
        _refresh_authentication()
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        head["temp_dir"] = str(_rays_directory())  # its logs are kept where those of any cluster are
        self._hide_address()
        head["dashboard_agent_listen_port"] = None  # any: Ray's own choice may be that of another cluster on this machine
        self._cluster = Cluster()
        self._cluster.add_node(**head | self._head_options())
        self._first_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with ExitStack() as whatever_fails:
            whatever_fails.callback(self._restore)
            if self._cluster is not None:
                whatever_fails.callback(self._cluster.shutdown)
            ray.shutdown()
            for node_id in self.node_ids():
                with suppress(psutil.NoSuchProcess):  # its raylet ends just now
                    self.thaw_node(node_id)  # a frozen worker would not notice the end of its raylet

    def _hide_address(self) -> None:
        """Ray writes where the cluster is into a file for everybody's `ray.init()`, and deletes that file in the end: those of
        others on this machine would be sent here meanwhile, and not find their own cluster afterwards. So this process, and
        those that it starts, have a file of their own. The link `session_latest` to the newest cluster's logs is still
        everybody's."""
        self._directory = tempfile.mkdtemp(prefix="raytrain_ft-cluster-")
        self._set("RAY_TMPDIR", self._directory)
        _rays_directory().mkdir()

    def _restore(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _refresh_authentication()

    def _head_options(self) -> dict[str, Any]:
        """Of Ray, for the head node, besides the usual ones."""
        return {}

    def _set(self, name: str, value: str) -> None:
        self._environment[name] = os.environ.get(name)
        os.environ[name] = value

    def _first_nodes(self) -> None:
        """The nodes to begin with."""
        self._add_nodes(self._num_nodes)

    @property
    def address(self) -> str:
        """What `ray.init(address=...)` takes."""
        return self._cluster.address

    @contextmanager
    def job_server(self) -> Iterator[str]:
        """Ray's job server and dashboard while this context lasts, on 127.0.0.1 alone; gives what `ray job submit --address`
        takes. About a dozen processes, hence not from the start. Private to Ray, like the cluster."""
        from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD

        head = self._cluster.head_node
        _end_dashboard(head)  # a smaller one, which serves nothing
        head.get_gcs_client().internal_kv_del(DASHBOARD_ADDRESS.encode(), False, KV_NAMESPACE_DASHBOARD)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        head._ray_params.dashboard_host, head._ray_params.dashboard_port = "127.0.0.1", port
        try:
            head.start_api_server(include_dashboard=True, raise_on_failure=True)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end_dashboard(head)

    def _add_nodes(self, number: int) -> list[str]:
        return [self.add_node() for _ in range(number)]

    def add_node(self, **options: Any) -> str:
        """Adds a node for workers; returns its Ray id.

        Args:
            options: of Ray, for this node: `resources`, for example.
        """
        settings = {"num_cpus": self._cpus_per_node, "object_store_memory": OBJECT_STORE_BYTES, **options}
        # Else all unpack a job's working directory at one place, each over what the processes of the others stand in.
        settings["runtime_env_dir_name"] = f"runtime_resources_{len(self._nodes)}"
        node = self._cluster.add_node(**settings)
        self._nodes.append(node)
        return node.node_id

    def node_ids(self) -> list[str]:
        """The nodes for workers that live, as they were added."""
        return [node.node_id for node in self._nodes if psutil.pid_exists(self._raylet(node)) and not self._is_zombie(node)]

    @staticmethod
    def _raylet(node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def _is_zombie(self, node: Any) -> bool:
        try:
            return psutil.Process(self._raylet(node)).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def processes(self, node_id: str) -> list[psutil.Process]:
        """A node's raylet and everything that it started."""
        node = next(n for n in self._nodes if n.node_id == node_id)
        raylet = psutil.Process(self._raylet(node))
        return [raylet, *raylet.children(recursive=True)]

    def kill_node(self, node_id: str) -> None:
        """SIGKILLs a whole node at once."""
        self._signal(node_id, signal.SIGKILL)

    def drain_node(self, node_id: str, seconds: float) -> None:
        """Has Ray drain a node; see the function of this name."""
        drain_node(self.address, node_id, seconds)

    def freeze_node(self, node_id: str) -> None:
        """SIGSTOPs a whole node."""
        self._signal(node_id, signal.SIGSTOP)

    def thaw_node(self, node_id: str) -> None:
        """SIGCONTs a frozen node."""
        self._signal(node_id, signal.SIGCONT)

    def _signal(self, node_id: str, number: int) -> None:
        for process in self.processes(node_id):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _rays_directory() -> Path:
    """Where Ray puts all of a cluster's files in this environment. Private to Ray."""
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir())


def _end_dashboard(head: Any) -> None:
    """Ends the dashboard's processes. The key is private to Ray."""
    for info in head.all_processes.pop("dashboard", []):
        try:
            process = psutil.Process(info.process.pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for one in family:
            one.kill()
        info.process.wait()
        psutil.wait_procs(family[1:], timeout=10)


def drain_node(address: str, node_id: str, seconds: float) -> None:
    """Has Ray drain a node of the cluster at this address, as `ray drain-node` and autoscalers do. Private to Ray, like the
    command.

    Args:
        seconds: until its deadline.

    Raises:
        ChaosError: Ray refuses.
    """
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]

    preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + seconds) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node_id, preempted, "a rehearsal", deadline_ms)
    if not accepted:
        raise ChaosError(f"Ray refuses to drain node {node_id}: {why}")


def _refresh_authentication() -> None:
    """Lets this process see what the environment now says of authentication. Private to Ray, which reads it at import."""
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
