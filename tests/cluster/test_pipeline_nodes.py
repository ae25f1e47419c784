"""A machine hosts two stages of a pipeline: what crosses between machines is logged, and with a machine both are lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import PIPELINE_STEPS, pipeline, promise_kept

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records

pytestmark = [pytest.mark.own_cluster, pytest.mark.long]
STAGES = 4


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[LocalCluster]:
    with LocalCluster(num_nodes=2, cpus_per_node=2) as cluster:
        yield cluster


def records(run: Path, event: str) -> list[dict]:
    log = run / "events.jsonl"
    return [record for record in read_records(log) if record["event"] == event] if log.exists() else []


def test_a_machine_with_two_stages_is_lost(machines: LocalCluster, tmp_path: Path) -> None:
    """They replay together: what goes from one to the other was not logged."""
    how = {"stages": STAGES, "workers": STAGES, "num_spares": 0, "checkpoints": ft.CheckpointConfig(every=100)}
    calm = pipeline(tmp_path, "calm", **how)
    agreed = PIPELINE_STEPS * (4 + STAGES) * 8
    logged = sorted(record["payload_bytes"] - agreed for record in records(tmp_path / "calm", "LogWritten"))
    assert logged[:2] == [0, 0], "one boundary of three crosses, which two stages log"
    assert min(logged[2:]) > 0
    fault = ft.FailAt(rank=1, step=9, phase="forward", micro_batch=1, action="sigkill_node")
    with ThreadPoolExecutor(1) as pool:  # Ray adds nodes from the main thread only
        training = pool.submit(pipeline, tmp_path, "run", **how, faults=[fault])
        deadline = time.monotonic() + 60
        while not records(tmp_path / "run", "WorkerLost") and time.monotonic() < deadline:
            time.sleep(0.05)
        machines.add_node()
        result = training.result(timeout=120)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (len(recovery.lost), recovery.strategy, recovery.guarantee) == (2, Strategy.LOGGING, Guarantee.EXACT)
    assert recovery.redone == 0
