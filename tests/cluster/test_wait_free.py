"""Wait-free updates (SWIFT's setting): a loss in the backward pass finds early buckets updated, and they are undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.storage.arrow import read_tensors

BOUND = 1e-5
"""Greatest relative difference of a parameter tensor (Frobenius norm) that an undo may leave 15 steps later."""


def distance(a: str, b: str) -> float:
    """Greatest relative difference over all tensors of two final states."""
    ours, theirs = read_tensors(a)[0], read_tensors(b)[0]
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    return max(float((x - y).norm() / y.norm().clamp_min(1e-12)) for x, y in pairs)


def test_without_failures_wait_free_is_bit_equal_to_barrier(undisturbed) -> None:
    assert undisturbed(update="wait_free").digest == undisturbed().digest


@pytest.mark.parametrize("action", ["sigkill", pytest.param("sigkill_node", marks=pytest.mark.long)])
def test_an_unavoidable_undo_is_within_its_bound_and_equal_on_all_replicas(
    cluster, undisturbed, tmp_path: Path, action
) -> None:
    """Rank 1 is lost before it contributes to the last bucket, when the others have long updated the first ones: its backward
    pass rests in between."""
    fault = FailAt(rank=1, step=15, phase="backward", bucket=2, action=action)
    result = train(tmp_path, "undo", update="wait_free", faults=[fault], task=Toy(backward_seconds=0.3))
    if action == "sigkill_node":
        cluster.add_node()
    (recovery,) = result.recoveries
    assert promise_kept(result) == []
    assert recovery.undone > 0
    assert recovery.guarantee == Guarantee.ROUNDING
    assert distance(result.final_state, undisturbed(update="wait_free").final_state) <= BOUND


def test_when_everything_was_reduced_nothing_is_undone(undisturbed, tmp_path: Path) -> None:
    faults = [FailAt(rank=0, step=8, phase="reduced", bucket=2), FailAt(rank=2, step=16, phase="commit")]
    result = train(tmp_path, "complete", update="wait_free", faults=faults)
    assert sum(len(recovery.lost) for recovery in result.recoveries) == 2
    assert promise_kept(result) == []
    assert all(recovery.undone == 0 for recovery in result.recoveries)
    assert result.digest == undisturbed(update="wait_free").digest
    assert torch.isfinite(torch.tensor(result.metrics["loss"]))
