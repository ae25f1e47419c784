"""Nodes, jobs and actors of a cluster, as a drill must know them before it takes a node down. Partly private to Ray."""

from __future__ import annotations

from typing import Any

import ray

INTERNAL = "_ray_internal_"
"""What namespaces of Ray's own jobs begin with."""
TIMEOUT_S = 10.0


def head_nodes() -> list[dict[str, Any]]:
    """The node on which the cluster's own services run."""
    return [node for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]


def driver_node() -> dict[str, Any] | None:
    """The node that this process is on, if it is one that workers may come to."""
    own = ray.get_runtime_context().get_node_id()
    return next((node for node in ray.nodes() if node["NodeID"] == own and node["Resources"].get("CPU", 0) > 0), None)


def other_jobs() -> list[str]:
    """Jobs that are alive on this cluster besides the one of this process, and Ray's own."""
    return [job for job, about in _foreign_jobs().items() if not about.is_dead]


def other_actors() -> list[str]:
    """What other jobs have alive apart from the head node: a detached actor, such as a run whose driver is gone, outlives its
    job. By name, or by class."""
    heads, jobs = {node["NodeID"] for node in head_nodes()}, _foreign_jobs()
    return [
        actor["Name"] or actor["ActorClassName"]
        for actor in _actors()
        if actor["State"] != "DEAD" and actor["JobID"] in jobs and actor["Address"]["NodeID"] not in heads
    ]


def _foreign_jobs() -> dict[str, Any]:
    """All jobs that there ever were but for that of this process, and Ray's own."""
    own = ray.get_runtime_context().get_job_id()
    return {job: about for job, about in _jobs().items() if job != own and not about.config.ray_namespace.startswith(INTERNAL)}


def _jobs() -> dict[str, Any]:
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    found: Any = gcs.get_all_job_info(timeout=TIMEOUT_S, skip_submission_job_info_field=True)
    return {job.hex(): about for job, about in found.items()}


def _actors() -> list[dict[str, Any]]:
    from ray._private.state import actors

    return list(actors().values())
