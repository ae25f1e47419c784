"""Two runs share a cluster: each takes the room that the other leaves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from click.testing import CliRunner
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft.cli import main
from raytrain_ft.follow import alive


def test_two_runs_at_once(cluster, undisturbed, tmp_path: Path) -> None:
    assert len(cluster.node_ids()) >= 4
    alone = undisturbed(workers=2).digest
    task = Toy(step_seconds=0.02)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(train, tmp_path, name, task=task, workers=2, num_spares=0) for name in ("one", "two")]
        deadline = time.monotonic() + 60
        while (seen := {account["name"] for account in alive()}) != {"one", "two"}:
            assert time.monotonic() < deadline, f"only {seen} are listed"
            time.sleep(0.1)
        listed = CliRunner().invoke(main, ["list"]).output
        results = [run.result(timeout=120) for run in runs]
    assert "one" in listed
    assert "two" in listed
    assert [result.digest for result in results] == [alone, alone]
    assert [promise_kept(result) for result in results] == [[], []]
