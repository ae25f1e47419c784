"""Ray Train's answer to a lost worker: restart the whole worker group from the last checkpoint.

    python -m benchmarks.peers.ray_train --quick

A `TorchTrainer` as its user guide has it, with unlimited retries, on a local cluster of one-worker nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

from benchmarks.harness import Options, Report, main
from benchmarks.models import RECOVERY, Work, batch_of
from benchmarks.peers.cluster import fitting, local_cluster, one_worker_per_node, run_config, why_ended
from benchmarks.peers.kills import Journal, Kill, Killer, summary


@dataclass(frozen=True, slots=True)
class Restarts:
    """What Ray Train's restarts cost, kill by kill."""

    kills: list[Kill]

    @property
    def full_strength_s(self) -> list[float]:
        """Seconds from each kill until a step was completed by all workers again."""
        return [kill.full_strength_s for kill in self.kills]


def train_loop(config: dict[str, Any]) -> None:
    """What runs in every worker: plain DDP, a checkpoint now and then, a journal of the steps."""
    work: Work = config["work"]
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = prepare_model(work.model(), parallel_strategy_kwargs={"bucket_cap_mb": work.bucket_mb})
    optimizer = work.optimizer(model)
    dataset = work.dataset()
    step = _restore(model, optimizer)
    with Journal(config["directory"]) as journal:
        while (end := journal.stop_at()) is None or step < end:
            inputs, targets = batch_of(dataset, step, rank, world_size, work.batch_per_worker)
            optimizer.zero_grad()
            work.loss(model(inputs), targets).backward()
            optimizer.step()
            journal.ended(step, world_size)
            step += 1
            if config["checkpoint_every"] and step % config["checkpoint_every"] == 0:
                _checkpoint(step, rank, model, optimizer)


def _restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load Ray Train's latest checkpoint, if there is one. Returns the step to go on from."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory) / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _checkpoint(step: int, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Report to Ray Train, as every worker must; rank 0 brings the checkpoint."""
    if rank != 0:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as directory:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(directory) / "state.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def measure_restart(
    num_kills: int,
    num_workers: int = 4,
    work: Work = RECOVERY,
    checkpoint_every: int | None = 20,
    seed: int = 0,
    timeout_s: float = 120.0,
) -> Restarts:
    """SIGKILL a worker `num_kills` times, at random phases, and time Ray Train's way back to full strength.

    `checkpoint_every`: steps between checkpoints; None writes none, and every restart begins at step 0. With them, each kill
    comes at a random step between two checkpoints. `timeout_s` bounds the start and each recovery.

    Raises:
        RuntimeError: a restart did not go on from a checkpoint, although there was one.
    """
    with local_cluster(num_workers), tempfile.TemporaryDirectory(prefix="ray-train-") as directory:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"work": work, "directory": directory, "checkpoint_every": checkpoint_every},
            scaling_config=one_worker_per_node(num_workers),
            run_config=run_config(directory),
        )
        with fitting(trainer) as running:
            killer = Killer(directory, num_workers, lambda: why_ended(running), seed, timeout_s, checkpoint_every or 0)
            kills = [killer.kill_one() for _ in range(num_kills)]
            killer.stop()
            ray.wait([running], timeout=timeout_s)
    if checkpoint_every and not all(kill.resumed_from for kill in kills):
        raise RuntimeError(f"restarts that went on from step {[kill.resumed_from for kill in kills]}: a checkpoint was there")
    return Restarts(kills)


def measure(options: Options) -> Report:
    """The restarts alone."""
    report = Report("Ray Train restart")
    restarts = measure_restart(2 if options.quick else 6, seed=options.seed)
    report.add("ray_train_full_strength_s", restarts.full_strength_s)
    report.add("ray_train_caught_up_s", [kill.caught_up_s for kill in restarts.kills])
    report.add("ray_train_step_s", statistics.median(kill.step_s for kill in restarts.kills))
    report.note(summary("Ray Train", restarts.kills))
    return report


if __name__ == "__main__":
    main(measure, __doc__)
