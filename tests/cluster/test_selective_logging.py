"""A budget for the log, or a target for the recovery: once the first steps have been timed, only some boundaries are logged,
and a lost stage takes its group back with it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import promise_kept, train
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records

pytestmark = pytest.mark.long

STEPS, EVERY, BATCH, MICRO_BATCHES = 22, 5, 32, 4
NARROW = 8
PER_STEP = 2 * BATCH * NARROW * 4
"""Bytes over the second boundary."""
REST_S = 0.05
"""Of the last stage in each micro-batch: by far the most of a step."""


class Waisted(Toy):
    """Its second boundary is an eighth as wide as its first, so that a budget may hold this one and not the other."""

    def model(self, stage: int) -> torch.nn.Module:
        layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, NARROW), torch.nn.Dropout(0.1)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(NARROW, 4))


CHOICES = {
    "a budget": ft.LogConfig(budget_bytes=EVERY * PER_STEP),
    # The last stage alone takes 0.2 s for a step, so the mean over three stages is 0.07 s as long as no other goes back with
    # it, and twice as much if one does: the others may.
    "a target": ft.LogConfig(recovery_target=timedelta(seconds=REST_S * MICRO_BATCHES / 2)),
}


def run(path: Path, name: str, **arguments: Any) -> ft.Result:
    how = ft.ParallelismConfig(pipeline_parallel_degree=3, num_pp_microbatches=MICRO_BATCHES, split=(2, 4))
    often = ft.CheckpointConfig(every=EVERY)
    settings = {"steps": STEPS, "drop_last": True, "global_batch_size": BATCH, "checkpoints": often, **arguments}
    return train(path, name, workers=3, parallelism_config=how, **settings)


@pytest.fixture(scope="module")
def calm(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return run(tmp_path_factory.mktemp("calm"), "run", task=Waisted(), log=ft.LogConfig(enabled=False))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_lost_stage_takes_its_group_back(calm: ft.Result, tmp_path: Path, choice: str) -> None:
    """Not yet in the first steps. Later, a second one has no other in its group, and goes back alone."""
    faults = [
        ft.FailAt(rank=0, step=2, phase="forward", micro_batch=2),
        ft.FailAt(rank=0, step=12, phase="forward", micro_batch=2),
        ft.FailAt(rank=2, step=18, phase="backward_pass"),
    ]
    result = run(tmp_path, "run", task=Waisted(REST_S), log=CHOICES[choice], faults=faults)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    early, first, second = result.recoveries
    assert {(r.strategy, r.guarantee, r.redone) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT, 0)}
    assert "stage 0 had no replica left" in early.reason, "nothing was decided yet"
    assert "stages 0, 1 had no replica left" in first.reason, "stage 1 lived, and went back with its group"
    assert "stage 2 had no replica left" in second.reason
    records = read_records(Path(result.path) / "events.jsonl")
    (started,) = [one for one in records if one["event"] == "RunStarted"]
    log = started["details"]["log"]
    assert (log["kept"], log["groups"], log["bytes_per_step"]) == (True, [[0, 1], [2]], PER_STEP)
    (choice,) = [one for one in records if one["event"] == "LogChosen"]
    assert (choice["groups"], choice["boundaries"], len(choice["seconds"])) == ([[0, 1], [2]], [1], 3)
    assert choice["seconds"][2] > REST_S * MICRO_BATCHES > choice["seconds"][0]
