"""Notices on a real cluster, from a metadata service, Ray's drain, SIGTERM and a request, down to the run's event log."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import SMALL_BUCKETS, promise_kept
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.notices.metadata import ENDPOINT_VARIABLE
from raytrain_ft.runtime.spec import NAMESPACE

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from clouds import Ec2


@pytest.fixture(scope="module")
def machines(cluster: LocalCluster) -> Iterator[dict[str, Ec2]]:
    """Nodes of their own, each with a metadata service of its own, by Ray id."""
    services = [Ec2() for _ in range(4)]
    nodes: dict[str, Ec2] = {}
    try:
        for service in services:
            os.environ[ENDPOINT_VARIABLE] = service.__enter__().url
            nodes[cluster.add_node(resources={"machine": 1})] = service
        yield nodes
    finally:
        os.environ.pop(ENDPOINT_VARIABLE, None)
        for node in nodes:
            if node in cluster.node_ids():
                cluster.kill_node(node)
        for service in services:
            service.__exit__(None, None, None)


def train(path: Path, name: str, **recovery: Any) -> ft.Result:
    return ft.Trainer(
        Toy(step_seconds=0.05),
        max_steps=200,
        global_batch_size=36,
        seed=7,
        quiet=True,
        scaling_config=ft.ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1, "machine": 1}),
        recovery_config=ft.RecoveryConfig(**recovery),
        run_config=ft.RunConfig(name=name, storage_path=str(path)),
        **SMALL_BUCKETS,
    ).fit()


class Watched:
    """A run that goes on in a thread, and what it says of itself."""

    def __init__(self, path: Path, name: str) -> None:
        self._log = path / name / "events.jsonl"
        self._name = name

    def records(self, event: str) -> list[dict[str, Any]]:
        return [r for r in read_records(self._log) if r["event"] == event] if self._log.exists() else []

    def until(self, condition: Callable[[], object], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.02)

    def supervisor(self) -> Any:
        return ray.get_actor(f"supervisor:{self._name}", namespace=NAMESPACE)

    def account(self) -> dict[str, Any]:
        return ray.get(self.supervisor().status.remote(), timeout=10)


def test_every_source_reaches_the_supervisor(cluster: LocalCluster, machines: dict[str, Ec2], tmp_path: Path) -> None:
    run = Watched(tmp_path, "noticed")
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, tmp_path, "noticed", preemption=("aws", "ray", "sigterm"))
        run.until(lambda: run.records("StepsCommitted"))
        account = run.account()
        first, second, third = account["world"]
        machines[account["nodes"][first]].spot = json.dumps(
            {"action": "terminate", "time": (datetime.now(UTC) + timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")}
        )
        os.kill(account["pids"][second], signal.SIGTERM)
        cluster.drain_node(account["nodes"][third], 60)
        run.until(lambda: len(run.records("Noticed")) == 3)
        spare = next(member for member in account["members"] if member not in account["world"])
        ray.get(run.supervisor().notice.remote(spare, 45.0, "a person wants it"))
        run.until(lambda: len(run.records("Noticed")) == 4)
        result = training.result(timeout=60)
    noticed = {r["member"]: r for r in run.records("Noticed")}
    sources = {first: ("aws spot", 90), second: ("sigterm", 30), third: ("ray drain", 60), spare: ("request", 45)}
    assert {member: r["source"] for member, r in noticed.items()} == {member: source for member, (source, _) in sources.items()}
    for member, (_, seconds) in sources.items():
        assert seconds - 6 < noticed[member]["deadline_s"] <= seconds, member
    assert promise_kept(result) == []
