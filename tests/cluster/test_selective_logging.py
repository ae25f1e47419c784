"""A budget for the log: only some boundaries are logged, and a lost stage takes its group back with it."""

from __future__ import annotations

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

STEPS, EVERY, BATCH = 12, 5, 32
NARROW = 8


class Waisted(Toy):
    """Its second boundary is an eighth as wide as its first, so that a budget may hold this one and not the other."""

    def model(self, stage: int) -> torch.nn.Module:
        layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, NARROW), torch.nn.Dropout(0.1)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(NARROW, 4))


def run(path: Path, name: str, **arguments: Any) -> ft.Result:
    how = ft.ParallelismConfig(pipeline_parallel_degree=3, num_pp_microbatches=4, split=(2, 4))
    often = ft.CheckpointConfig(every=EVERY)
    settings = {"steps": STEPS, "drop_last": True, "global_batch_size": BATCH, "checkpoints": often, **arguments}
    return train(path, name, task=Waisted(), workers=3, parallelism_config=how, **settings)


def test_a_lost_stage_takes_its_group_back(cluster: Any, tmp_path: Path) -> None:
    calm = run(tmp_path, "calm", log=ft.LogConfig(enabled=False))
    per_step = 2 * BATCH * NARROW * 4
    faults = [ft.FailAt(rank=0, step=8, phase="forward", micro_batch=2)]
    result = run(tmp_path, "run", log=ft.LogConfig(budget_bytes=EVERY * per_step), faults=faults)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee, recovery.redone) == (Strategy.LOGGING, Guarantee.EXACT, 0)
    assert "stages 0, 1 had no replica left" in recovery.reason, "stage 1 lived, and went back with its group"
    (started,) = [one for one in read_records(Path(result.path) / "events.jsonl") if one["event"] == "RunStarted"]
    choice = started["details"]["log"]
    assert (choice["kept"], choice["groups"], choice["bytes_per_step"]) == (True, [[0, 1], [2]], per_step)
