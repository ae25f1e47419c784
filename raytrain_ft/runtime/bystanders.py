"""Nodes and jobs of a cluster, as a drill must know them before it takes a node down. Partly private to Ray."""

from __future__ import annotations

from typing import Any

import ray

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


def _gcs() -> Any:
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    return GcsClient(address=ray.get_runtime_context().gcs_address)
