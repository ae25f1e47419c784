"""Who has notice leaves before its time: nobody else restarts, no step is done twice, and the bits are the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import kill_the_sleeper, pipeline, promise_kept, train, trainer_of
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.cli.steer import leave_command
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records


def notice(rank: int, step: int) -> ft.FailAt:
    return ft.FailAt(rank=rank, step=step, phase="forward", action="sigterm")


def steps_committed_twice(result: ft.Result) -> int:
    records = read_records(Path(result.path) / "events.jsonl")
    seen = [
        (r["rank"], step) for r in records if r["event"] == "StepsCommitted" for step in range(r["first_step"], r["stop_step"])
    ]
    return len(seen) - len(set(seen))


@pytest.mark.long
def test_replicas_that_leave_one_after_the_other(undisturbed, tmp_path: Path) -> None:
    task = Toy(step_seconds=0.1)  # time for the next spare to start
    result = train(tmp_path, "leave", task=task, steps=60, faults=[notice(0, 5), notice(2, 40)])
    assert promise_kept(result) == []
    assert [(recovery.lost, len(recovery.left)) for recovery in result.recoveries] == [([], 1), ([], 1)]
    assert all(recovery.guarantee == Guarantee.EXACT and recovery.world_after == 3 for recovery in result.recoveries)
    assert steps_committed_twice(result) == 0
    assert result.digest == undisturbed(steps=60).digest


def test_a_stage_that_nobody_else_holds_is_handed_over(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    result = pipeline(tmp_path, "handed", task=Toy(step_seconds=0.05), faults=[notice(1, 6)])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, len(recovery.left), recovery.replayed, recovery.redone) == ([], 1, 0, 0)
    assert recovery.guarantee == Guarantee.EXACT
    assert result.digest == undisturbed_pipeline.digest


def test_the_only_worker_hands_over_to_its_spare(cluster, tmp_path: Path) -> None:
    result = train(tmp_path, "alone", task=Toy(step_seconds=0.05), workers=1, faults=[notice(0, 5)])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, len(recovery.left), recovery.world_after) == ([], 1, 1)
    assert result.digest == train(tmp_path, "calm", workers=1).digest


def test_who_sleeps_until_it_leaves_takes_no_samples_with_it_if_that_is_too_soon(cluster, tmp_path: Path) -> None:
    """All nodes are taken, so nobody can replace it before; and it is gone before its time. Its place is free then."""
    outcome: list[ft.Result] = []
    how = {
        "task": Toy(step_seconds=0.05),
        "workers": (2, 5),
        "steps": 150,
        "strategy": "lossy",
        "num_spares": 0,
        "replacement": "shrink",
        "on_notice": "sleep",
    }
    thread = threading.Thread(target=lambda: outcome.append(train(tmp_path, "gone", faults=[notice(1, 5)], **how)))
    thread.start()
    log = tmp_path / "gone" / "events.jsonl"
    until(lambda: log.exists() and any(record["event"] == "Parted" for record in read_records(log)))
    sleeper = kill_the_sleeper(tmp_path / "gone")
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    loss, *grown = result.recoveries
    assert (loss.lost, loss.samples_lost, loss.world_after) == ([sleeper], 0, 4)
    assert [one.lost for one in grown] == [[]] * len(grown), "somebody else may come there"
    records = read_records(log)
    assert [record["asleep"] for record in records if record["event"] == "Dormant"] == [True]
    proof = audit(records)
    assert proof.ok
    assert proof.samples_lost == 0


@pytest.mark.long
def test_who_slept_takes_part_again_when_nothing_comes_of_a_request(cluster, tmp_path: Path) -> None:
    """Nobody can replace it, and the number of workers is fixed."""
    outcome: list[ft.Result] = []
    how = {"task": Toy(step_seconds=0.05), "workers": 5, "steps": 200, "num_spares": 0}
    thread = threading.Thread(target=lambda: outcome.append(train(tmp_path, "lapsed", on_notice="sleep", **how)))
    thread.start()
    log = tmp_path / "lapsed" / "events.jsonl"
    until(lambda: log.exists() and any(record["event"] == "StepsCommitted" for record in read_records(log)))
    ft.leave("lapsed", rank=1, within_s=3)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    assert result.recoveries == []
    assert [record["asleep"] for record in read_records(log) if record["event"] == "Dormant"] == [True, False]


@pytest.mark.long
def test_who_sleeps_and_then_leaves_for_good_makes_the_run_smaller(cluster, tmp_path: Path) -> None:
    """Planned downsizing (Nicolae et al., III-B), although the cluster has room for another."""
    outcome: list[ft.Result] = []
    how = {"task": Toy(step_seconds=0.05), "workers": (2, 3), "steps": 200, "num_spares": 0}
    trainer = trainer_of(tmp_path, "fewer", **how)
    thread = threading.Thread(target=lambda: outcome.append(trainer.fit()))
    thread.start()
    log = tmp_path / "fewer" / "events.jsonl"
    until(lambda: log.exists() and any(record["event"] == "StepsCommitted" for record in read_records(log)))
    said = [True, True, False]
    for request, rank, known in ((trainer.suspend, 0, 1), (trainer.suspend, 1, 2), (trainer.resume, 1, 3)):
        request(rank)
        until(lambda n=known: [record["asleep"] for record in read_records(log) if record["event"] == "Dormant"] == said[:n])
    asked = CliRunner().invoke(leave_command, [str(tmp_path / "fewer"), "0", "--within", "60", "--no-replacement"])
    assert (asked.exit_code, asked.output) == (0, "rank 0 was asked to leave within 60 s without a replacement\n")
    with pytest.raises(ConfigError, match="at least 2, and there are no more than 2"):
        trainer.leave(1, within_s=60, replace=False)
    thread.join(120)
    (result,) = outcome
    assert promise_kept(result) == []
    (resize,) = result.recoveries
    assert (resize.lost, len(resize.left), resize.world_after, resize.redone) == ([], 1, 2, 0)
    assert resize.resumed - resize.detected < 5, "there was nothing to wait for"
    records = read_records(log)
    assert audit(records).ok
    assert {record["world_size"] for record in records if record["event"] == "StepsCommitted"} == {3, 2}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
