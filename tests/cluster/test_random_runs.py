"""Random configurations beside random failures: whatever a run is told to be and wherever it is struck, it ends, its record is
sound, and where that says "exact" it has the bits of the undisturbed run."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL_BUCKETS, promise_kept
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.strategy import Guarantee

STEPS = 24
SEEDS = range(12)
IN_A_STEP = ("data", "forward", "backward", "reduce", "reduced", "update", "updated", "commit")
IN_A_STAGE = ("forward", "receive", "backward_pass", "send", "update", "commit")
IN_A_RECOVERY = ("fence", "reconcile", "transfer_source", "transfer_receiver", "join", "first_step")
OF_THE_SUPERVISOR = ("RUNNING", "FENCE", "REPLACE", "REBUILD", "RESUME", "SHUTTING_DOWN")
ACTIONS = (*["sigkill"] * 5, "sigstop", "sigterm", "exit", "hang")


def trainer_of(draws: random.Random, path: Path) -> tuple[ft.Trainer, ft.Trainer]:
    """A run that is struck, and the same undisturbed; raises ConfigError if such a run cannot be."""
    pick, is_pipeline = draws.choice, draws.random() < 0.5
    stages = pick((2, 3)) if is_pipeline else 1
    workers = stages * pick((1, 2) if stages == 2 else (1,)) if is_pipeline else pick((2, 3, 4))
    spread = ft.ParallelismConfig(
        pipeline_parallel_degree=stages,
        num_pp_microbatches=pick((None, 2, 4, 5)),
        schedule=pick(("1f1b", "gpipe", "zero_bubble")),
        split="auto",
    )
    recovery: dict[str, Any] = {
        "strategy": pick(("auto", "auto", "auto", "logging" if is_pipeline else "lossy", "checkpoint", "snapshot", "rollback")),
        "update": pick(("barrier", "wait_free")),
        "replacement": pick(("wait", "wait", "shrink")),
        "lost_samples": pick(("drop", "return")),
        "on_notice": pick(("train", "sleep")),
        "replay_workers": pick((1, 2, 3)),
        "log": ft.LogConfig(compression=pick((None, "lz4", "zstd")), quota_bytes=pick((None, None, 400_000))),
        "hang_timeout": timedelta(seconds=6),
        "heartbeat_timeout": timedelta(seconds=3),  # more processes than cores
        "sigterm_grace": timedelta(seconds=pick((1, 5))),
    }
    settings: dict[str, Any] = {
        "global_batch_size": pick((16, 30, 48)),
        "drop_last": is_pipeline or pick((True, False)),
        "seed": draws.randrange(1000),
        "gradient_accumulation_steps": 1 if is_pipeline else pick((1, 2)),
        "max_grad_norm": pick((None, None, 0.5)),
        "precision": pick(("fp32", "bf16")),
        "on_non_finite": pick(("raise", "skip")),
        **SMALL_BUCKETS,
    }
    checkpoints = ft.CheckpointConfig(every=pick(("auto", 1, 3, 7)), num_to_keep=pick((1, 2, None)))
    task = Toy(optimizer=pick(("AdamW", "SGD", "plain")), norm=pick((True, False)))
    elastic = not is_pipeline and draws.random() < 0.3
    faults = [fault_of(draws, workers, is_pipeline) for _ in range(pick((1, 2, 3)))]
    spares = pick((0, 1, 2))

    def trainer(name: str, *, struck: bool) -> ft.Trainer:
        return ft.Trainer(
            task,
            max_steps=STEPS,
            quiet=True,
            scaling_config=ft.ScalingConfig(num_workers=(1, workers) if elastic else workers),
            recovery_config=ft.RecoveryConfig(**recovery, num_spares=spares if struck else 0),
            parallelism_config=spread if is_pipeline else None,
            run_config=ft.RunConfig(name=name, storage_path=str(path), checkpoint_config=checkpoints),
            faults=faults if struck else [],
            **settings,
        )

    return trainer("struck", struck=True), trainer("undisturbed", struck=False)


def fault_of(draws: random.Random, workers: int, is_pipeline: bool) -> ft.FailAt:
    """One failure, which may find that its point is never reached."""
    if draws.random() < 0.12:
        return ft.FailAt(role="supervisor", phase=draws.choice(OF_THE_SUPERVISOR))
    rank, action = draws.choice([None, *range(workers)]), draws.choice(ACTIONS)
    if draws.random() < 0.35:
        return ft.FailAt(phase=draws.choice(IN_A_RECOVERY), action=action, rank=rank)
    phase = draws.choice(IN_A_STAGE if is_pipeline else IN_A_STEP)
    return ft.FailAt(phase=phase, action=action, rank=rank, step=draws.randrange(1, STEPS))


def drawn(seed: int, path: Path) -> tuple[ft.Trainer, ft.Trainer]:
    """The runs of a seed: the first of its draws that can be."""
    draws = random.Random(seed)
    while True:
        try:
            return trainer_of(draws, path)
        except ConfigError:
            continue


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_that_is_struck_at_random_keeps_what_it_says(cluster, seed: int, tmp_path: Path) -> None:
    struck, undisturbed = drawn(seed, tmp_path)
    result = struck.fit()
    assert promise_kept(result) == []
    if all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries):
        assert result.audit().ok
        assert result.digest == undisturbed.fit().digest
