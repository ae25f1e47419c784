"""A stage of a pipeline dies inside the agreement at a step's end: some have what it said, and others never will.

It waits until a second stage has come to the agreement as well, for long enough to send each other their numbers, while a third
one has not. Then it kills itself, and the third goes on when all of its threads are gone. In four of the six cases the second
one then knows what was agreed, and may have updated; the third never will. In the others nobody does.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import STAGES, pipeline, promise_kept, until
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.training.links import Switchboard, of_step

pytestmark = pytest.mark.long

STEP = 7
UNDER_WAY_S = 0.5
"""Long enough for a message of a few bytes between two who are both there."""
COMES_S = 20.0


def look_into_agreements(victim: int, late: int, notes: Path) -> None:
    """In this process, from now on. Each notes what it has reached, the first time."""
    agree = Switchboard._agree
    if agree.__name__ != "_agree":
        return  # the model is built once more

    def note(what: str, rank: int) -> None:
        (notes / f"{what}-{rank}").touch(exist_ok=True)

    def watched(self: Switchboard, edges: Any, step: int, numbers: torch.Tensor, sample: Any) -> torch.Tensor:
        rank, struck = self._world.rank(), notes / f"struck-{victim}"
        if step != STEP or struck.exists():
            return agree(self, edges, step, numbers, sample)
        if rank == victim:
            computed = numbers.new_zeros(self._world.size())
            computed[self._own] = of_step(edges, sample())
            self._world.all_reduce(torch.cat([numbers, computed]))
            others = [other for other in range(STAGES) if other not in (victim, late)]
            until(lambda: all((notes / f"came-{other}").exists() for other in others), COMES_S)
            time.sleep(UNDER_WAY_S)
            struck.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        note("came", rank)
        if rank == late:
            until(lambda: struck.exists() and not psutil.pid_exists(int(struck.read_text() or os.getpid())), COMES_S)
        agreed = agree(self, edges, step, numbers, sample)
        note("agreed", rank)
        return agreed

    Switchboard._agree = watched


class Agreeing(Toy):
    """The bits do not depend on who looks at it."""

    def __init__(self, victim: int = -1, late: int = -1, notes: Path | None = None) -> None:
        super().__init__()
        self.victim, self.late, self.notes = victim, late, notes
        self.driver = os.getpid()

    def model(self, stage: int) -> torch.nn.Module:
        if self.notes is not None and os.getpid() != self.driver:  # where the model is built as well, to look at it
            look_into_agreements(self.victim, self.late, self.notes)
        return super().model(stage)


@pytest.mark.parametrize(("victim", "late"), list(itertools.permutations(range(STAGES), 2)))
def test_a_stage_dies_inside_the_agreement(undisturbed_pipeline: ft.Result, tmp_path: Path, victim: int, late: int) -> None:
    task, never = Agreeing(victim, late, tmp_path), ft.CheckpointConfig(every=100)
    result = pipeline(tmp_path, "run", task=task, num_spares=1, checkpoints=never)
    assert (tmp_path / f"struck-{victim}").exists()
    (other,) = {0, 1, 2} - {victim, late}
    assert (tmp_path / f"came-{other}").exists(), "it was there, and the late one was not"
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert len(recovery.lost) == 1
    assert (recovery.strategy, recovery.guarantee) == (Strategy.LOGGING, Guarantee.EXACT)
    assert (recovery.undone, recovery.redone, recovery.repaired) == (0, 0, 0)
    agreed = [rank for rank in range(STAGES) if (tmp_path / f"agreed-{rank}").exists()]
    assert late not in agreed, "it never heard what the lost stage had said"
    assert recovery.step == (STEP + 1 if agreed else STEP), "whoever knows what was agreed may have updated"
