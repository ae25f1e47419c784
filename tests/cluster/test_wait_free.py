"""Wait-free updates (SWIFT's setting): a loss in the backward pass finds early buckets updated, and they are undone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import promise_kept, train
from torch import nn
from toy import Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.storage.arrow import read_tensors
from raytrain_ft.training.lamb import LAMB
from raytrain_ft.training.random import step_seed

STEP = 15
BOUND = 1e-5
"""Greatest relative difference of a parameter tensor (Frobenius norm) that an undo may leave 15 steps later."""


def distance(a: str, b: str) -> float:
    """Greatest relative difference over all tensors of two final states."""
    ours, theirs = read_tensors(a)[0], read_tensors(b)[0]
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    # Python's own max passes over a NaN
    return float(np.max([float((x - y).norm() / y.norm().clamp_min(1e-12)) for x, y in pairs]))


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


class Folded(nn.Module):
    """A layer that is frozen, and two whose weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(16, 64)
        self.fold = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.fold.weight
        self.last = nn.Linear(64, 4)
        self.rest = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.tanh(self.frozen(x))))
        return self.last(self.rest(torch.tanh(self.again(torch.tanh(self.fold(x))))))


class Unlike(Toy):
    """Another model and another optimizer, with a learning rate and a weight decay for each kind of parameter. Three buckets:
    the last layer, what is tied, the first layer. Before the gradients of the latter two, every rank rests in step `STEP`, if
    it `rests`."""

    def __init__(self, optimizer: str, rests: bool = False) -> None:
        super().__init__(optimizer=optimizer)
        self.rests = rests
        self.place = 0

    def model(self, stage: int) -> nn.Module:
        model = Folded()
        for layer in (model.again, model.first):
            layer.register_full_backward_pre_hook(lambda *_: self._rest())
        return model

    def _rest(self) -> None:
        if self.rests and self.place in [step_seed(7, STEP, rank, 0) for rank in range(3)]:
            time.sleep(0.3)

    def loss(self, output, batch):
        self.place = torch.initial_seed()  # a task is not told where it is, but for this
        return super().loss(output, batch)

    def optimizer(self, params):
        kind: Any = {"LAMB": LAMB, "NAdam": torch.optim.NAdam}[self.optimizer_name]
        matrices, vectors = ([p for p in params if (p.dim() == 2) == wanted] for wanted in (True, False))
        return kind([{"params": matrices, "lr": 3e-3, "weight_decay": 0.05}, {"params": vectors, "lr": 1e-2}])


@pytest.mark.parametrize("optimizer", ["LAMB", pytest.param("NAdam", marks=pytest.mark.long)])
def test_an_undo_of_groups_beside_a_frozen_and_tied_weights(undisturbed, tmp_path: Path, optimizer: str) -> None:
    """As above, and what is undone are the last layer and the tied weight."""
    task, fault = Unlike(optimizer, rests=True), FailAt(rank=1, step=STEP, phase="backward", bucket=2)
    result = train(tmp_path, "undo", update="wait_free", faults=[fault], task=task)
    expected = undisturbed(update="wait_free", task=Unlike(optimizer))
    (recovery,) = result.recoveries
    assert promise_kept(result) == []
    assert recovery.guarantee == Guarantee.ROUNDING
    assert recovery.undone == 64 * 64 + 2 * 64 + 64 * 4 + 4
    assert 0 < distance(result.final_state, expected.final_state) <= BOUND
    ours, theirs = read_tensors(result.final_state)[0], read_tensors(expected.final_state)[0]
    assert torch.equal(ours["again.weight"], ours["fold.weight"])
    assert torch.equal(ours["frozen.weight"], theirs["frozen.weight"])
