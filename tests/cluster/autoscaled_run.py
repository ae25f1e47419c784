"""A run on a cluster that Ray's autoscaler scales, in a process of its own: `autoscaled_run.py DIRECTORY STEPS wait|shrink`.

The cluster begins without a node for workers, and in the middle a node is lost. Prints what became of the cluster as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from conftest import promise_kept, train
from ray.util import placement_group_table
from toy import Leisurely

from raytrain_ft import FailAt, Result
from raytrain_ft.chaos.autoscaling import AutoscalingCluster
from raytrain_ft.runtime.event_log import read_records

NODE_S = 90.0
"""How long a node and the worker on it may take to come: the autoscaler looks once a second, and the rest is starting up."""


def waits(directory: Path, steps: int, cluster: AutoscalingCluster) -> Result:
    """With two workers; the node of one dies with all its processes at a third of the way."""
    del cluster
    fault = FailAt(rank=1, step=steps // 3, phase="backward", bucket=1, action="sigkill_node")
    return train(directory, "scaled", workers=2, steps=steps, num_spares=0, faults=[fault])


def shrinks(directory: Path, steps: int, cluster: AutoscalingCluster) -> Result:
    """With one worker or two; the node of one dies once two train. That is no step known beforehand: the second worker joins
    when its node has come. The run takes its time until it is of two again."""
    pace = directory / "pace"
    pace.touch()
    arguments = {"workers": (1, 2), "steps": steps, "num_spares": 0, "replacement": "shrink"}
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, directory, "scaled", task=Leisurely(pace), **arguments)
        try:
            until(training, lambda: 2 in sizes(directory, "StepsCommitted"), "a step of two workers")
            before = len(sizes(directory, "Resumed"))
            cluster.kill_node(cluster.node_ids()[-1])
            until(training, lambda: {1, 2} <= {*sizes(directory, "Resumed")[before:]}, "one worker, and two again")
        finally:
            pace.unlink()
        return training.result(timeout=NODE_S)


def sizes(directory: Path, event: str) -> list[int]:
    """Of the worlds that the run's records of this kind tell of so far."""
    log = directory / "scaled" / "events.jsonl"
    return [record["world_size"] for record in read_records(log) if record["event"] == event] if log.exists() else []


def until(training: Future[Result], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + NODE_S
    while not condition():
        if training.done():
            raise AssertionError(f"the run ended before {what}: {training.result()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {NODE_S:g} s: {what}")
        time.sleep(0.1)


def main(directory: Path, steps: int, story: str) -> dict[str, Any]:
    """Trains until the end, through the loss of a node."""
    with AutoscalingCluster(max_nodes=2) as cluster:
        nodes_before = cluster.node_ids()
        result = {"wait": waits, "shrink": shrinks}[story](directory, steps, cluster)
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
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
