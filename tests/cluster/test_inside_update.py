"""A worker dies inside the update itself: its optimizer has stepped half of the parameters, and the others not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft.policy.strategy import Guarantee
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
        self.rank = rank
        self.place = 0

    def optimizer(self, params):
        return InHalves(params, self._between)

    def loss(self, output, batch):
        self.place = torch.initial_seed()  # a task is not told where it is, but for this
        return super().loss(output, batch)

    def _between(self, changed: int, of: int) -> None:
        if self.notes is None or self.place != step_seed(SEED, STEP, self.rank, 0):
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
