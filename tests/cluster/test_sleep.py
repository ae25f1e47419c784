"""Replicas that contribute nothing for a while: nobody waits, no group is rebuilt, and what is lost is listed."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import kill_the_sleeper, promise_kept, train
from toy import Toy

import raytrain_ft as ft
from raytrain_ft import FailAt, attaching
from raytrain_ft.cli.main import main
from raytrain_ft.errors import AbortedError, ConfigError
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.history import check
from raytrain_ft.policy.sampling import Sampling, next_batch, position_at, share
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage.filesystem import open_storage


def records(path: Path, event: str) -> list[dict[str, Any]]:
    log = path / "events.jsonl"
    return [record for record in read_records(log) if record["event"] == event] if log.exists() else []


def share_of_rank_2(step: int) -> int:
    """Samples, of three ranks: 10, and 6 in the last step of an epoch."""
    sampling = Sampling(500, 32, 7)
    batch, _ = next_batch(sampling, position_at(sampling, step))
    return len(share(batch, 2, 3))


def until(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_replica_sleeps_and_wakes_from_one_step_to_the_next(cluster, tmp_path: Path) -> None:
    outcome: list[Any] = []
    task = Toy(step_seconds=0.03)
    thread = threading.Thread(target=lambda: outcome.append(train(tmp_path, "sleep", task=task, steps=300)))
    thread.start()
    run = tmp_path / "sleep"
    until(lambda: records(run, "StepsCommitted"))
    for rank, words in ((3, "rank 3 of 3 workers"), (-1, "rank -1 of 3 workers")):
        with pytest.raises(ConfigError, match=words):
            ft.suspend(run, rank)
    assert "sleeps" in CliRunner().invoke(main, ["suspend", str(run), "1"]).output
    until(lambda: len(records(run, "Dormant")) == 1)
    until(lambda: records(run, "Parted"))
    assert "takes part" in CliRunner().invoke(main, ["resume", str(run), "1"]).output
    until(lambda: len(records(run, "Dormant")) == 2)
    assert "sleeps" in CliRunner().invoke(main, ["suspend", "sleep", "2", "--at-once"]).output
    until(lambda: len(records(run, "Dormant")) == 3)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    assert result.recoveries == []
    assert [(record["asleep"]) for record in records(run, "Dormant")] == [True, False, True]
    weights = {tuple(record["weights"] or ()) for record in records(run, "StepsCommitted")}
    assert weights == {(), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)}
    lost = sum(record["stop"] - record["start"] for record in records(run, "SamplesLost"))
    struck = {record["step"] for record in records(run, "SamplesLost")}  # none, if rank 2 was between two steps
    assert lost == sum(map(share_of_rank_2, struck))
    assert len(struck) <= 1
    proof = audit(read_records(run / "events.jsonl"))
    assert proof.ok
    assert proof.samples_lost == lost


@pytest.mark.long
def test_a_simulated_loss_is_a_real_one_to_the_bit(cluster, tmp_path: Path) -> None:
    """The rank that dies is replaced, and the one that is silent goes on. When it dies, the other buckets are reduced."""
    how: dict[str, Any] = {"task": Toy(backward_seconds=0.2), "steps": 12, "strategy": "lossy"}
    point = {"rank": 1, "step": 6, "phase": "backward", "bucket": 2}
    simulated = train(tmp_path, "simulated", faults=[FailAt(**point, action="silence")], **how)
    real = train(tmp_path, "real", faults=[FailAt(**point)], **how)
    assert promise_kept(simulated) == promise_kept(real) == []
    assert simulated.recoveries == []
    (recovery,) = real.recoveries
    lost = [
        [(r["step"], r["start"], r["stop"]) for r in records(Path(result.path), "SamplesLost")] for result in (simulated, real)
    ]
    assert lost[0] == lost[1]
    assert "1 of 3 buckets" in recovery.reason
    assert simulated.digest == real.digest


def begun(path: Path, name: str, **arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """A run under way, whose rank 2 is asleep and left alone."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(train(path, name, **arguments)))
    thread.start()
    until(lambda: records(path / name, "StepsCommitted"))
    ft.suspend(path / name, 2)
    until(lambda: records(path / name, "Parted"))
    return thread, outcome


@pytest.mark.long
@pytest.mark.parametrize("update", ["barrier", "wait_free"])
@pytest.mark.parametrize(("rank", "phase"), [(0, "update"), (0, "backward"), (1, "reduced")])
def test_a_loss_while_the_others_train_without_a_sleeper(cluster, tmp_path: Path, rank: int, phase: str, update: Any) -> None:
    """Of the one that leads the others, and of another one: the sleeper is brought up to date by the recovery."""
    faults = [FailAt(rank=rank, step=150, phase=phase)]
    thread, outcome = begun(tmp_path, "apart", task=Toy(step_seconds=0.03), steps=350, update=update, faults=faults)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (len(recovery.lost), recovery.world_after, recovery.samples_lost) == (1, 3, 0)
    parted = records(tmp_path / "apart", "Parted")
    assert parted[0]["step"] < 150, "it came too late for this test"
    assert len(parted) == 2, "who slept sleeps again"
    (sleeper,) = {record["member"] for record in records(tmp_path / "apart", "Dormant")}
    committed = records(tmp_path / "apart", "StepsCommitted")
    assert {record["rank"] for record in committed if record["member"] == sleeper} == {2}, "who wakes it names its rank"


@pytest.mark.long
def test_a_sleeper_dies(cluster, tmp_path: Path) -> None:
    run = tmp_path / "dies"
    thread, outcome = begun(tmp_path, "dies", task=Toy(step_seconds=0.03), steps=250)
    sleeper = kill_the_sleeper(run)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, recovery.world_after, recovery.samples_lost) == ([sleeper], 3, 0)
    assert records(run, "StepsCommitted")[-1]["weights"] is None, "the replacement was not told to sleep"


@pytest.mark.long
@pytest.mark.parametrize(("rank", "phase"), [(0, "transfer_source"), (2, "transfer_receiver")])
def test_a_loss_while_a_sleeper_is_brought_up_to_date(cluster, tmp_path: Path, rank: int, phase: str) -> None:
    """It holds a part of the state by then."""
    run, faults = tmp_path / "wakes", [FailAt(rank=rank, phase=phase, nth=3)]
    thread, outcome = begun(tmp_path, "wakes", task=Toy(step_seconds=0.03), steps=250, faults=faults)
    ft.resume(run, 2)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (len(recovery.lost), recovery.world_after, recovery.samples_lost) == (1, 3, 0)
    assert records(run, "StepsCommitted")[-1]["weights"] is None


def test_checkpoints_are_written_by_those_who_are_awake(cluster, tmp_path: Path) -> None:
    """The sleeper is who decides on them otherwise. The run is stopped while it sleeps: all write the last one, and go on."""
    run = tmp_path / "stored"
    how: dict[str, Any] = {"task": Toy(step_seconds=0.02), "checkpoints": ft.CheckpointConfig(every=10, num_to_keep=1000)}
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(train, tmp_path, "stored", steps=100_000, **how)
        until(lambda: records(run, "StepsCommitted"))
        ft.suspend(run, 0)
        until(lambda: records(run, "Parted"))
        parted = records(run, "Parted")[0]["step"]
        until(lambda: [one for one in records(run, "CheckpointCommitted") if one["step"] > parted + 40])
        ft.resume(run, 0)
        until(lambda: len(records(run, "Dormant")) == 2)
        ft.suspend(run, 0)
        until(lambda: len(records(run, "Parted")) == 2)
        attaching.stop(run, "a test", quiet=True)
        with pytest.raises(AbortedError, match="a test"):
            stopped.result(60)
    assert records(run, "CheckpointFailed") == []
    written = [one["step"] for one in records(run, "CheckpointCommitted")]
    assert {b - a for a, b in itertools.pairwise(written[:-1])} == {10}, "one was left out"
    storage = open_storage(str(run / "checkpoints"))
    shards = {one.name.step: len(checkpoint.read_manifest(storage, one.name).shards) for one in checkpoint.found(storage)}
    assert shards[written[-1]] == 3
    assert [shards[step] for step in written if parted < step <= parted + 40] == [2] * 4
    assert check(read_records(run / "events.jsonl")) == []
    train(tmp_path, "stored", steps=written[-1] + 20, **how)
    assert records(run, "Resumed")[-1]["step"] == written[-1]
