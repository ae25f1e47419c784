"""Two runs share a cluster: each takes the room that the other leaves. Two that share a directory: one ends."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import promise_kept, train
from toy import Leisurely, Toy

from raytrain_ft.cli import main
from raytrain_ft.errors import LockedError
from raytrain_ft.follow import alive
from raytrain_ft.policy.history import check
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage


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


@pytest.mark.long
@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_whose_directory_another_has_taken_ends_and_leaves_it_alone(cluster, tmp_path: Path, restarted: bool) -> None:
    """A run of this name on another cluster, which came when nobody had renewed the right to write for long."""
    path, pace = tmp_path / "run", tmp_path / "pace"
    pace.touch()
    theirs = '{"event":"RunStarted","run_id":"another"}\n'
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(train, tmp_path, "run", task=Leisurely(pace), workers=2)
        deadline = time.monotonic() + 60
        while not (accounts := [account for account in alive() if account.get("step")]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if restarted:
            os.kill(accounts[0]["pid"], signal.SIGKILL)
        storage = LocalStorage(path)
        (path / "events.jsonl").rename(path / "events-001.jsonl")
        (path / "events.jsonl").write_text(theirs)
        mine = lock.read_owner(storage)
        assert mine is not None
        while not run.done():  # a renewal that was under way may have overwritten it
            lock._write(storage, replace(mine, owner="another", epoch=mine.epoch + 1, host="elsewhere"))
            time.sleep(0.5)
        with pytest.raises(LockedError, match=r"run another .* has taken the right to write"):
            run.result()
    assert (path / "events.jsonl").read_text() == theirs
    assert not [name for name in ("report.html", "timeline.json") if (path / name).exists()]
    assert lock.holds(storage, "another", mine.epoch + 1)
    if not restarted:
        records = read_records(path / "events-001.jsonl")
        assert [record["error"][0] for record in records if record["event"] == "RunFailed"] == ["LockedError"]
        assert check(records) == []
