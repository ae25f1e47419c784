"""Two runs share a cluster: each takes the room that the other leaves. Two that share a directory: one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import LEFT_S, left, promise_kept, train, until
from toy import Leisurely, Toy

from raytrain_ft.attaching import alive
from raytrain_ft.cli.main import main
from raytrain_ft.errors import LockedError
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


DRIVER = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
import ray
from conftest import train
from toy import Leisurely
ray.init(address={address!r}, log_to_driver=False)
path = Path({path!r})
(path / "ready-{number}").touch()
while len(list(path.glob("ready-*"))) < 2:
    time.sleep(0.001)
try:
    outcome = train(path, "run", task=Leisurely(path / "pace"), workers=2).digest
except Exception as error:
    outcome = type(error).__name__
(path / "outcome-{number}").write_text(outcome)
"""


def test_of_two_drivers_that_start_one_name_at_once_one_trains(cluster, undisturbed, tmp_path: Path) -> None:
    """The other is refused, whichever it is: the run lasts until that is so."""
    pace = tmp_path / "pace"
    pace.touch()
    about = {"here": str(Path(__file__).parent), "address": cluster.address, "path": str(tmp_path)}
    drivers = [
        subprocess.Popen([sys.executable, "-c", DRIVER.format(**about, number=number)], stdout=subprocess.DEVNULL)
        for number in range(2)
    ]
    try:
        assert until(lambda: any(path.read_text() for path in tmp_path.glob("outcome-*")), 90)
        (refused,) = [path.read_text() for path in tmp_path.glob("outcome-*")]
        assert refused in ("RunActiveError", "LockedError")
        pace.unlink()
        assert [driver.wait(90) for driver in drivers] == [0, 0]
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    outcomes = {path.read_text() for path in tmp_path.glob("outcome-*")}
    assert outcomes == {refused, undisturbed(workers=2).digest}
    records = read_records(tmp_path / "run" / "events.jsonl")
    assert [record["event"] for record in records if record["event"].startswith("Run")] == ["RunStarted", "RunFinished"]
    assert check(records) == []
    assert until(lambda: not left(), LEFT_S), left()


@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.long), True])
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
