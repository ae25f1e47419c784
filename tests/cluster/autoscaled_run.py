"""A run on a cluster that Ray's autoscaler scales, in a process of its own: `autoscaled_run.py DIRECTORY STEPS`.

The cluster begins without a node for workers, and in the middle a node is lost. Prints what became of the cluster as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from conftest import promise_kept, train
from ray.util import placement_group_table

from raytrain_ft import FailAt
from raytrain_ft.chaos.autoscaling import AutoscalingCluster


def main(directory: Path, steps: int) -> dict[str, Any]:
    """Trains with two workers; the node of one dies with all its processes at a third of the way."""
    fault = FailAt(rank=1, step=steps // 3, phase="backward", bucket=1, action="sigkill_node")
    with AutoscalingCluster(max_nodes=2) as cluster:
        nodes_before = cluster.node_ids()
        result = train(directory, "scaled", workers=2, steps=steps, num_spares=0, faults=[fault])
        return {
            "digest": result.digest,
            "violations": promise_kept(result),
            "nodes_before": nodes_before,
            "nodes_after": cluster.node_ids(),
            "waiting": [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"],
            "auth": os.environ["RAY_AUTH_MODE"],
            "session": ray.get_runtime_context().get_session_name(),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
