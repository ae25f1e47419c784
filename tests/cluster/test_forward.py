"""Going on without redoing: what the record says was lost is what was lost, and the survivors stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records


def lost_samples(result) -> list[dict]:
    return [r for r in read_records(Path(result.path) / "events.jsonl") if r["event"] == "SamplesLost"]


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_survivors_finish_the_step_with_their_own_gradients(update: str, cluster, tmp_path: Path) -> None:
    faults = [FailAt(rank=1, step=10, phase="reduce", bucket=1), FailAt(rank=0, step=17, phase="backward", bucket=2)]
    result = train(tmp_path, "lossy", strategy="lossy", update=update, faults=faults)
    assert promise_kept(result) == []
    assert [recovery.strategy for recovery in result.recoveries] == [Strategy.LOSSY] * 2
    assert all(recovery.guarantee == Guarantee.LOSSY and recovery.completes for recovery in result.recoveries)
    assert [recovery.samples_lost for recovery in result.recoveries] == [11, 11]  # of 32 over 3 ranks
    assert [(lost["step"], lost["stop"] - lost["start"]) for lost in lost_samples(result)] == [(10, 11), (17, 11)]
    assert audit(read_records(Path(result.path) / "events.jsonl")).samples_lost == 22


def test_too_few_left_redo_the_step_exactly(undisturbed, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="reduce", bucket=1)
    result = train(tmp_path, "quorum", strategy="lossy", quorum=0.9, faults=[fault])
    assert result.digest == undisturbed().digest
    (recovery,) = result.recoveries
    assert recovery.guarantee == Guarantee.EXACT
    assert "quorum is 90%" in recovery.reason


def test_a_partial_update_stays_and_is_counted(cluster, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="backward", bucket=2)
    task = Toy(backward_seconds=0.1)  # so that everybody has updated the other buckets when the last one is reduced
    result = train(tmp_path, "rollback", strategy="rollback", update="wait_free", task=task, steps=20, faults=[fault])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee) == (Strategy.ROLLBACK, Guarantee.LOSSY)
    assert recovery.updated_twice > 0
    assert recovery.undone == 0
    assert lost_samples(result) == []


def test_an_interrupted_step_is_left_out(cluster, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="reduce", bucket=1)
    result = train(tmp_path, "skip", strategy="skip", faults=[fault])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee, recovery.samples_lost) == (Strategy.SKIP, Guarantee.LOSSY, 32)
    assert [(lost["step"], lost["stop"] - lost["start"]) for lost in lost_samples(result)] == [(10, 32)]
