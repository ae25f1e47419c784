"""Ray Train's answer to a lost pipeline stage: restart all of them from the last checkpoint.

    python -m benchmarks.peers.ray_pipeline --quick

A `TorchTrainer` with a stage in each worker: torch's own 1F1B schedule, and a checkpoint to which every stage adds its part.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness import Options, Report, main
from benchmarks.peers.cluster import FINISHED, fitting, local_cluster, one_worker_per_node, run_config, why_ended
from benchmarks.peers.kills import Journal, read_journals
from benchmarks.stages import STAGES, Block, Shape, Staged, paced

LOST = 1
"""The stage that is killed."""


def train_loop(config: dict[str, Any]) -> None:
    """What runs in every worker: its stage, one checkpoint, a journal of the steps."""
    shape: Shape = config["shape"]
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    task = Staged(shape)
    torch.manual_seed(1)
    block = Block(shape)
    optimizer = task.optimizer(block.parameters())
    stage = PipelineStage(block, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, shape.micro_batches, loss_fn=task.loss)
    (data,) = task.dataset().tensors
    step = _restore(rank, block, optimizer)
    struck = Path(config["directory"], "struck")
    with Journal(config["directory"]) as journal:
        while step <= config["kill"]:
            if rank == LOST and step == config["kill"] and not struck.exists():
                struck.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            batch = data[torch.arange(step * shape.batch, (step + 1) * shape.batch) % len(data)]
            optimizer.zero_grad()
            schedule.step(*((batch,) if rank == 0 else ()), **({"target": batch} if rank == STAGES - 1 else {}))
            optimizer.step()
            journal.ended(step, STAGES)
            step += 1
            if step == config["checkpoint"]:
                _checkpoint(step, rank, block, optimizer)


def _restore(rank: int, block: Block, optimizer: torch.optim.Optimizer) -> int:
    """Loads this stage's part of Ray Train's latest checkpoint, if there is one; returns the step to go on from."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory) / f"stage-{rank}.pt", weights_only=True)
    block.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _checkpoint(step: int, rank: int, block: Block, optimizer: torch.optim.Optimizer) -> None:
    """Every stage brings its part."""
    with tempfile.TemporaryDirectory() as directory:
        state = {"step": step, "model": block.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(directory) / f"stage-{rank}.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def measure_pipeline_restart(shape: Shape, checkpoint: int, kill: int, repeats: int, timeout_s: float = 300.0) -> list[float]:
    """Seconds from the SIGKILL of a stage at the beginning of step `kill` until that step is completed, of so many runs with a
    checkpoint at step `checkpoint`. `timeout_s`: of a whole run.

    Raises:
        RuntimeError: a run failed, or did not come to its end in time.
    """
    found = []
    with local_cluster(STAGES):
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="ray-train-") as directory:
                trainer = TorchTrainer(
                    train_loop,
                    train_loop_config={"shape": shape, "directory": directory, "checkpoint": checkpoint, "kill": kill},
                    scaling_config=one_worker_per_node(STAGES),
                    run_config=run_config(directory),
                )
                with fitting(trainer) as running:
                    ray.wait([running], timeout=timeout_s)
                    why = why_ended(running)
                if why != FINISHED:
                    raise RuntimeError(f"Ray Train's run of {kill} steps: {why or f'not at its end after {timeout_s:g} s'}")
                struck = float(Path(directory, "struck").read_text())
                ended = [entry for entries in read_journals(directory).values() for entry in entries if entry.step == kill]
                found.append(min(entry.when for entry in ended) - struck)
    return found


def measure(options: Options) -> Report:
    """The restarts alone."""
    report = Report("Ray Train restart of a pipeline")
    checkpoint, kill = (40, 75) if options.quick else (100, 149)
    seconds = measure_pipeline_restart(paced(4), checkpoint, kill, 1 if options.quick else 5)
    report.add("ray_train_pipeline_restart_s", seconds)
    return report


if __name__ == "__main__":
    main(measure, __doc__)
