"""Who has notice leaves before its time: nobody else restarts, no step is done twice, and the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import promise_kept, train
from test_pipeline import pipeline
from toy import Toy

import raytrain_ft as ft
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


def test_a_stage_that_nobody_else_holds_is_handed_over(cluster, tmp_path: Path) -> None:
    result = pipeline(tmp_path, "handed", task=Toy(step_seconds=0.02), steps=40, faults=[notice(1, 6)])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, len(recovery.left), recovery.replayed, recovery.redone) == ([], 1, 0, 0)
    assert recovery.guarantee == Guarantee.EXACT
    calm = pipeline(tmp_path, "calm", steps=40)
    assert result.digest == calm.digest


def test_the_only_worker_hands_over_to_its_spare(cluster, tmp_path: Path) -> None:
    result = train(tmp_path, "alone", task=Toy(step_seconds=0.05), workers=1, faults=[notice(0, 5)])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, len(recovery.left), recovery.world_after) == ([], 1, 1)
    assert result.digest == train(tmp_path, "calm", workers=1).digest
