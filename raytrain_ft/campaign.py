"""A seeded campaign of kills: real processes, real SIGKILL, at random moments.

    python -m raytrain_ft.campaign --kills 200 --mtbf 3 --seed 0 [--stages 3]

Every worker process is fair game at any moment, in whatever phase of a step or of a recovery it is, spares too; now and then
the supervisor or a whole node goes. Runs follow one another until the kills are used up; each must end bit-equal to the
undisturbed run, with a record that the history checker finds sound.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import ray
import torch
from ray.exceptions import RayError
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.config import ParallelismConfig, RecoveryConfig, RunConfig, ScalingConfig
from raytrain_ft.errors import FTError
from raytrain_ft.policy.history import check
from raytrain_ft.result import Result
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE
from raytrain_ft.task import TrainTask
from raytrain_ft.trainer import Trainer

STEP_S = 0.05
MICRO_BATCHES = 4
"""Of a step, in a pipeline."""
SHARES = {"worker": 0.85, "supervisor": 0.1, "node": 0.05}
"""How often each kind of victim is drawn."""


class Patient(TrainTask):
    """A small model whose step takes a fixed time, as on an accelerator that leaves the host idle."""

    def __init__(self, micro_batches: int) -> None:
        self.seconds = STEP_S / micro_batches

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(32, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)),
        )

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    def dataset(self) -> TensorDataset:
        inputs = torch.randn(4_000, 32, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs[:, :8].argmax(dim=1))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return cross_entropy(output, batch[1])


def wait(ended: Callable[[], bool], seconds: float) -> None:
    """Waits so long, but no longer than to the end of the run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not ended():
        time.sleep(0.02)


@dataclass
class Killer:
    """Kills one victim after another, at exponential intervals, while runs go on."""

    cluster: LocalCluster
    random: random.Random
    mtbf: float
    left: int
    killed: dict[str, int] = field(default_factory=dict)
    run: str = ""

    def work_until(self, ended: Callable[[], bool]) -> None:
        """Kills until the run has ended or the kills are used up. On the main thread: only there can Ray add nodes."""
        while not ended():
            wait(ended, self.random.expovariate(1 / self.mtbf))
            kind = self.random.choices(list(SHARES), list(SHARES.values()))[0]
            if self.left > 0 and not ended() and self._kill(kind):
                self.left -= 1
                self.killed[kind] = self.killed.get(kind, 0) + 1

    def _kill(self, kind: str) -> bool:
        account = self._account()
        holders = account["holders"] if account else []
        known = [member for member, pid in account["pids"].items() if pid] if account else []
        if (
            account is None
            or not known
            or account["state"] in ("INITIALIZING", "SCHEDULING", "SHUTTING_DOWN")
            or len(holders) < 2
        ):
            return False  # a kill of the last replica would end the run, and rightly so
        victim = self.random.choice(known)
        node = account["nodes"].get(victim)
        alone = all(account["nodes"].get(member) == node for member in holders)
        try:
            if kind == "supervisor":
                os.kill(account["pid"], signal.SIGKILL)
            elif kind == "node" and node in self.cluster.node_ids() and not alone:
                self.cluster.kill_node(node)
                self.cluster.add_node()
            else:
                os.kill(account["pids"][victim], signal.SIGKILL)
        except ProcessLookupError:
            return False  # it was gone before we came
        return True

    def _account(self) -> dict[str, Any] | None:
        try:
            supervisor = ray.get_actor(f"supervisor:{self.run}", namespace=NAMESPACE)
            account: Any = ray.get(supervisor.status.remote(), timeout=5)
            return account
        except (RayError, ValueError):
            return None


def train(storage: str, name: str, steps: int, workers: int, stages: int) -> Result:
    """One run."""
    micro_batches = MICRO_BATCHES if stages > 1 else 1
    return Trainer(
        Patient(micro_batches),
        max_steps=steps,
        global_batch_size=48,
        drop_last=stages > 1,
        parallelism_config=ParallelismConfig(
            pipeline_parallel_degree=stages, num_pp_microbatches=micro_batches, split="auto" if stages > 1 else "task"
        ),
        bucket_bytes=32_768,
        first_bucket_bytes=8_192,
        quiet=True,
        scaling_config=ScalingConfig(num_workers=workers),
        recovery_config=RecoveryConfig(num_spares=2, lease=timedelta(seconds=60)),
        run_config=RunConfig(name=name, storage_path=storage),
    ).fit()


@click.command()
@click.option("--kills", default=200, show_default=True, help="Victims in all.")
@click.option("--mtbf", default=3.0, show_default=True, help="Mean time between kills, seconds.")
@click.option("--seed", default=0, show_default=True, help="Of the victims and moments.")
@click.option("--steps", default=400, show_default=True, help="Steps of each run.")
@click.option("--workers", default=3, show_default=True, help="Workers of a run.")
@click.option("--stages", default=1, show_default=True, help="Stages of a pipeline; divides the workers.")
def main(kills: int, mtbf: float, seed: int, steps: int, workers: int, stages: int) -> None:
    """A seeded campaign of kills; exits non-zero at any violation."""
    storage = tempfile.mkdtemp(prefix="raytrain_ft-campaign-")
    violations: list[str] = []
    shares: list[float] = []
    with LocalCluster(num_nodes=workers + 3) as cluster:
        reference = train(storage, "undisturbed", steps, workers, stages)
        ideal = _training_seconds(reference)
        print(f"undisturbed: {steps} steps in {ideal:.1f} s; records in {storage}", flush=True)
        killer = Killer(cluster, random.Random(seed), mtbf, kills)
        number = 0
        while killer.left > 0:
            number += 1
            killer.run = f"run-{number}"
            violations += _one_run(storage, killer, (steps, workers, stages), reference, ideal, shares)
    print(f"{sum(killer.killed.values())} kills ({killer.killed}) in {number} runs; {len(violations)} violations")
    if shares:
        print(
            f"committed steps, as a share of what an undisturbed run commits in the same time: {sum(shares) / len(shares):.1%}"
        )
    sys.exit(1 if violations else 0)


def _one_run(
    storage: str, killer: Killer, shape: tuple[int, int, int], reference: Result, ideal: float, shares: list[float]
) -> list[str]:
    try:
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train, storage, killer.run, *shape)
            killer.work_until(training.done)
            result = training.result()
    except FTError as error:
        print(f"{killer.run}: {type(error).__name__}: {error}", flush=True)
        return [f"{killer.run} ended with {type(error).__name__}: {error}"]
    found = [f"{killer.run}: {v}" for v in check(read_records(Path(result.path) / "events.jsonl"))]
    if result.digest != reference.digest and all(r.world_after == r.world_before for r in result.recoveries):
        found.append(f"{killer.run}: I3 the final state differs from the undisturbed run's")
    shares.append(min(1.0, ideal / _training_seconds(result)))
    exact = "bit-equal" if result.digest == reference.digest else "NOT bit-equal"
    pauses = sorted(r.seconds for r in result.recoveries if r.seconds is not None)
    median = f"{pauses[len(pauses) // 2]:.2f} s" if pauses else "none"
    print(f"{killer.run}: {len(pauses)} recoveries (median {median}), {exact}, {killer.left} kills left", flush=True)
    for violation in found:
        print(f"  VIOLATION {violation}", flush=True)
    return found


def _training_seconds(result: Result) -> float:
    """From the first step to the end, without the start of the workers."""
    records = read_records(Path(result.path) / "events.jsonl")
    running = next(r["at"] for r in records if r["event"] == "State" and r["state"] == "RUNNING")
    ended = next(r["at"] for r in records if r["event"] == "State" and r["state"] == "SHUTTING_DOWN")
    return ended - running


if __name__ == "__main__":
    main()
