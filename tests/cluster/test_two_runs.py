"""Two runs share a cluster: each takes the room that the other leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import promise_kept, train
from toy import Toy


def test_two_runs_at_once(cluster, undisturbed, tmp_path: Path) -> None:
    assert len(cluster.node_ids()) >= 4
    alone = undisturbed(workers=2).digest
    task = Toy(step_seconds=0.02)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(train, tmp_path, name, task=task, workers=2, num_spares=0) for name in ("one", "two")]
        results = [run.result(timeout=120) for run in runs]
    assert [result.digest for result in results] == [alone, alone]
    assert [promise_kept(result) for result in results] == [[], []]
