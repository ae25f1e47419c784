"""Nodes and jobs of a cluster, as a drill must know them before it takes a node down. Partly private to Ray."""

from __future__ import annotations

import time
from typing import Any

import ray

from raytrain_ft.errors import ConfigError

INTERNAL = "_ray_internal_"
"""What namespaces of Ray's own jobs begin with."""
TIMEOUT_S = 10.0


def head_nodes() -> list[dict[str, Any]]:
    """The node on which the cluster's own services run."""
    return [node for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]


def other_jobs() -> list[str]:
    """Jobs that are alive on this cluster besides the one of this process, and Ray's own."""
    own = ray.get_runtime_context().get_job_id()
    found: Any = _gcs().get_all_job_info(timeout=TIMEOUT_S, skip_submission_job_info_field=True)
    return [
        job.hex()
        for job, about in found.items()
        if not about.is_dead and job.hex() != own and not about.config.ray_namespace.startswith(INTERNAL)
    ]


def drain(node: str, seconds: float) -> None:
    """Tells Ray that a node will be taken away, as a spot node is.

    Raises:
        ConfigError: Ray does not accept it.
    """
    from ray.core.generated import autoscaler_pb2

    reasons: Any = autoscaler_pb2
    reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + seconds) * 1000)
    accepted, why = _gcs().drain_node(node, reason, "a drill: this node will be taken away", deadline)
    if not accepted:
        raise ConfigError(f"Ray does not accept that node {node} is drained: {why}")


def _gcs() -> Any:
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    return GcsClient(address=ray.get_runtime_context().gcs_address)
