"""A local cluster whose nodes come when they are asked for: Ray's real autoscaler, with its provider of local nodes."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from raytrain_ft.chaos.cluster import OBJECT_STORE_BYTES, LocalCluster
from raytrain_ft.errors import ConfigError

HEAD = "ray.head.default"  # a name that the provider knows
WORKER = "worker"
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
NOTHING_TO_DO = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
)
END_SECONDS = 10.0


class AutoscalingCluster(LocalCluster):
    """A context: a head node without CPUs, and up to `max_nodes` more, each started by Ray's autoscaler (its version 2, as
    `ray up` uses it) when something waits to be placed, and taken back when it was idle.

    Args:
        max_nodes: the most nodes for workers that live at once.
        cpus_per_node: workers that each of them has room for, at one CPU each.
        idle_minutes: how long a node may do nothing.
    """

    def __init__(self, max_nodes: int = 4, cpus_per_node: int = 1, idle_minutes: float = 5.0) -> None:
        super().__init__(num_nodes=0, cpus_per_node=cpus_per_node)
        self._max_nodes = max_nodes
        self._idle_minutes = idle_minutes
        self._monitor: psutil.Process | None = None
        self._config: Path | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._monitor is not None:
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                self._end_autoscaler(self._monitor)
            self._monitor = None
        super().__exit__(kind, error, trace)
        if self._config is not None:
            self._config.unlink(missing_ok=True)

    def _head_options(self) -> dict[str, Any]:
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        self._set("RAY_FAKE_CLUSTER", "1")
        self._set("RAY_enable_autoscaler_v2", "1")
        self._set("AUTOSCALER_UPDATE_INTERVAL_S", "1")
        names = ("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_CLOUD_INSTANCE_ID")
        identity = {**dict.fromkeys(names, FAKE_HEAD_NODE_ID), "RAY_NODE_TYPE_NAME": HEAD}
        return {"no_monitor": True, "env_vars": identity}

    def _first_nodes(self) -> None:
        """Starts the autoscaler, now that the head's address is known.

        Private to Ray, whose own `AutoscalingCluster` ends every Ray process on the machine first, and reads a file that its
        wheel lacks.
        """
        handle, name = tempfile.mkstemp(prefix="raytrain-ft-autoscaling-", suffix=".json")
        self._config = Path(name)
        with os.fdopen(handle, "w") as file:
            json.dump(self._autoscaling_config(), file)
        head = self._cluster.head_node
        head._ray_params.autoscaling_config = str(self._config)
        head.start_monitor()
        self._monitor = psutil.Process(head.all_processes["monitor"][0].process.pid)

    def _autoscaling_config(self) -> dict[str, Any]:
        resources = {"CPU": self._cpus_per_node, "object_store_memory": OBJECT_STORE_BYTES}
        return {
            **{name: {} for name in ("file_mounts", "auth", "docker")},
            **{name: [] for name in NOTHING_TO_DO},
            "cluster_name": "local",
            "max_workers": self._max_nodes,
            "idle_timeout_minutes": self._idle_minutes,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "gcs_address": self.address,
                "launch_multiple": True,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "head_node_type": HEAD,
            "available_node_types": {
                HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                WORKER: {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": self._max_nodes},
            },
        }

    def _end_autoscaler(self, monitor: psutil.Process) -> None:
        """First the autoscaler, so that it brings no more nodes, then those that it brought: nobody else would end them."""
        monitor.suspend()
        ours = [*monitor.children(recursive=True), monitor]
        for process in ours:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(ours, END_SECONDS)

    # ---------------------------------------------------------------- its nodes

    def add_node(self, **options: Any) -> str:
        """Raises `ConfigError`: nodes come by themselves."""
        raise ConfigError("AutoscalingCluster: nodes come when something waits to be placed; LocalCluster takes them by hand")

    def node_ids(self) -> list[str]:
        """The nodes for workers that live, as they came."""
        return sorted(self._raylets())

    def processes(self, node_id: str) -> list[psutil.Process]:
        """A node's raylet and everything that it started."""
        raylet = self._raylets()[node_id]
        return [raylet, *raylet.children(recursive=True)]

    def _raylets(self) -> dict[str, psutil.Process]:
        """Node ids and raylets of all nodes that live."""
        found: dict[str, psutil.Process] = {}
        for process in self._monitor.children(recursive=True) if self._monitor is not None else []:
            try:
                if process.name() != "raylet" or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                arguments = dict(word.split("=", 1) for word in process.cmdline() if word.startswith("--") and "=" in word)
                found[arguments["--node-id" if "--node-id" in arguments else "--node_id"]] = process
            except psutil.NoSuchProcess:
                continue
        return found
