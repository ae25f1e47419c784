"""What raytrain_ft is for, in two minutes: the digits job three times on a local cluster of several nodes.

    make demo

1. undisturbed; 2. a node is killed with SIGKILL in the middle of an update; 3. a node is killed in the middle of the backward
pass while buckets are updated as soon as they are reduced (`update="wait_free"`), so that an undo is seen at work. Exits
non-zero unless the second run ends bit-equal to the first, and the third, after an undo, within its bound with all replicas
equal.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from torch import nn
from train_digits import Digits, accuracy

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.history import check
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.storage.arrow import read_tensors

STEPS = 60
KILLED_IN_BACKWARD = 40
BOUND = 1e-5
"""Greatest relative difference of any tensor of the final state that an undo, 20 steps before the end, may leave."""


class Paused(Digits):
    """Around the step of the kill its backward pass rests before its last gradients: by then everybody has updated the buckets
    before them, on a busy machine too. This changes no bit."""

    def model(self, stage: int) -> nn.Module:
        model, passes = super().model(stage), itertools.count()
        first = next(module for module in model.modules() if list(module.parameters(recurse=False)))
        first.register_full_backward_pre_hook(lambda *_: time.sleep(0.4 if abs(next(passes) - KILLED_IN_BACKWARD) < 2 else 0.0))
        return model


def train(
    storage: str, name: str, *, update: str = "barrier", faults: tuple[ft.FailAt, ...] = (), task: Digits | None = None
) -> ft.Result:
    print(f"\n--- {name}")
    return ft.Trainer(
        task or Digits(STEPS),
        max_steps=STEPS,
        global_batch_size=256,
        seed=0,
        bucket_bytes=32_768,  # the model is small: several buckets, so that there is something between them
        first_bucket_bytes=4_096,
        scaling_config=ft.ScalingConfig(num_workers=3),
        recovery_config=ft.RecoveryConfig(update=update),
        run_config=ft.RunConfig(name=name, storage_path=storage),
        faults=faults,
    ).fit()


def distance(result: ft.Result, reference: ft.Result) -> float:
    """Greatest relative difference (Frobenius norm) over the tensors of two final states."""
    ours, theirs = read_tensors(result.final_state)[0], read_tensors(reference.final_state)[0]
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    # Python's own max passes over a NaN
    return float(np.max([float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs]))


def main() -> int:
    storage = tempfile.mkdtemp(prefix="raytrain_ft-demo-")
    in_update = ft.FailAt(rank=1, step=25, phase="update", action="sigkill_node")
    in_backward = ft.FailAt(rank=1, step=KILLED_IN_BACKWARD, phase="backward", bucket=3, action="sigkill_node")
    print("starting a local Ray cluster: a head and 5 nodes, token authentication on")
    print('lines that begin with "(raylet)" are Ray\'s own: it tells of what is killed here on purpose')
    with LocalCluster(num_nodes=5):
        first = train(storage, "undisturbed")
        second = train(storage, "node-killed-in-the-update", faults=(in_update,))
        third = train(
            storage, "node-killed-in-the-backward-pass", update="wait_free", faults=(in_backward,), task=Paused(STEPS)
        )

    task = Digits(STEPS)
    verdicts = []
    head = ("run", "test accuracy", "recoveries", "parameters undone", "against the undisturbed run", "records")
    table = Table(*(Column(name, overflow="fold") for name in head))  # else a narrow terminal shows no whole name
    for result, bound in ((first, 0.0), (second, 0.0), (third, BOUND)):
        violations = check(read_records(Path(result.path) / "events.jsonl"))
        away = distance(result, first)
        same = result.digest == first.digest
        undone = sum(recovery.undone for recovery in result.recoveries)
        verdicts += [same or 0 < away <= bound, not violations, len(result.recoveries) == int(result is not first)]
        verdicts.append((undone > 0) == (result is third))  # what it is there to show
        table.add_row(
            Path(result.path).name,
            f"{accuracy(ft.load_model(task, result)):.2%}",
            ", ".join(f"{recovery.seconds:.2f} s" for recovery in result.recoveries) or "none",
            f"{undone:,}",
            "bit-equal" if same else f"differs by {away:.1e} (bound {bound:.0e}), all replicas equal",
            "; ".join(violations) or "sound",
        )
    print()
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    print(f"records, timelines and final states: {storage}")
    print("the promise was kept" if all(verdicts) else "THE PROMISE WAS NOT KEPT")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
