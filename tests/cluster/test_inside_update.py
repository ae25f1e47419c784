"""A worker, or a stage of a pipeline, dies inside the update itself: its optimizer has stepped half of the parameters, and the
others not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MICRO_BATCHES, STAGES, pipeline, promise_kept, train
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.training.buckets import only
from raytrain_ft.training.random import step_seed

SEED, STEP = 7, 12


class InHalves(torch.optim.AdamW):
    """Steps the first half of its parameters, then the others. `between` is told how many of all have changed by then."""

    def __init__(self, params: Any, between: Callable[[int, int], None]) -> None:
        super().__init__(params, lr=1e-2, weight_decay=0.1)
        self.between = between

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        half = len(params) // 2
        with only(self, params[:half]):
            super().step()
        self.between(sum(not torch.equal(p, old) for p, old in zip(params, before, strict=True)), len(params))
        with only(self, params[half:]):
            super().step()


class Halved(Toy):
    """The process of `rank` kills itself between the two halves of the update of one step, once in a run: who takes its place
    finds its note.

    Args:
        notes: where that is; None, nobody dies. The bits do not depend on it.
    """

    def __init__(self, notes: Path | None = None, rank: int = 1) -> None:
        super().__init__()
        self.notes = notes
        self.where = step_seed(SEED, STEP, rank, 0)
        self.place = 0

    def optimizer(self, params):
        return InHalves(params, self._between)

    def loss(self, output, batch):
        self.place = torch.initial_seed()  # a task is not told where it is, but for this
        return super().loss(output, batch)

    def _between(self, changed: int, of: int) -> None:
        if self.notes is None or self.place != self.where:
            return
        try:
            note = os.open(self.notes / "died", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        os.write(note, f"{changed} of {of}".encode())
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_worker_dies_between_the_halves_of_its_update(rank: int, undisturbed, tmp_path: Path) -> None:
    """What it leaves half done goes down with it: the others, who have the same gradients, come to the end of the step."""
    result = train(tmp_path, "halves", task=Halved(tmp_path, rank), seed=SEED, num_spares=1)
    assert (tmp_path / "died").read_text() == "3 of 7"
    assert result.digest == undisturbed(task=Halved(), seed=SEED).digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert len(recovery.lost) == 1
    assert (recovery.guarantee, recovery.undone, recovery.repaired) == (Guarantee.EXACT, 0, 0)
    assert recovery.step == STEP + 1, "everybody had contributed to all of the step"


class HalvedStage(Halved):
    """The same of a stage of a pipeline: its last forward pass of a step tells it where it is."""

    def __init__(self, notes: Path | None = None, stage: int = 1) -> None:
        super().__init__(notes)
        self.where = step_seed(SEED, STEP, 0, MICRO_BATCHES - 1, stage)

    def model(self, stage: int) -> torch.nn.Sequential:
        model = super().model(stage)
        for layer in model:
            layer.register_forward_pre_hook(self._look_around)
        return model

    def _look_around(self, *_: Any) -> None:
        self.place = torch.initial_seed()


CUT = {"split": (4, 6), "seed": SEED, "max_grad_norm": 0.5}
CHANGED = ["1 of 3", "1 of 2", "1 of 2"]


@pytest.fixture(scope="module")
def calm_stages(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return pipeline(tmp_path_factory.mktemp("calm"), "run", task=HalvedStage(), **CUT)


@pytest.mark.long
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_dies_between_the_halves_of_its_update(calm_stages: ft.Result, tmp_path: Path, stage: int) -> None:
    """Nobody updates before all agree, so the others come to the end of the step; who takes its place does it from the log."""
    never = ft.CheckpointConfig(every=100)
    how = {**CUT, "num_spares": 1, "checkpoints": never}
    result = pipeline(tmp_path, "halves", task=HalvedStage(tmp_path, stage), **how)
    assert (tmp_path / "died").read_text() == CHANGED[stage]
    assert result.digest == calm_stages.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert len(recovery.lost) == 1
    assert (recovery.strategy, recovery.guarantee) == (Strategy.LOGGING, Guarantee.EXACT)
    assert (recovery.undone, recovery.redone, recovery.repaired) == (0, 0, 0)
    assert (recovery.step, recovery.replayed) == (STEP + 1, STEP + 1), "the step in which it died is over for all others"
