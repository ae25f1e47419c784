"""A small training script with `raytrain_ft.checkfreq`, for tests that kill it: alone, or as ranks of gloo (RANK, WORLD_SIZE).

    python checkfreq_job.py DIRECTORY --until 40 [--every 3] [--quiet] [--total-steps 200] [--timeout 120] [--reading 0]
                            [--device cpu]

Prints the number of each step; writes the ids it read to DIRECTORY/ids-*.jsonl and its final state to DIRECTORY/final-RANK.pt.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.storage.checkpoint import Content

SAMPLES = 60
BATCH = 8  # 60 / 8: the last batch of an epoch is short, and 4 samples are shared out evenly by 2 ranks


class Noisy(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples with noise drawn from the global generator, as augmentations do."""

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.noise = noise
        self.inputs = torch.randn(SAMPLES, 32, generator=generator)
        self.labels = torch.randint(0, 5, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index] + self.noise * torch.randn(32), self.labels[index]


def build(quiet: bool) -> nn.Sequential:
    """A model with dropout and BatchNorm; `quiet`: without, so that it does not depend on how a batch is shared out."""
    inner = [nn.ReLU()] if quiet else [nn.BatchNorm1d(400), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(32, 400), *inner, nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 5))


def read_slowly(seconds: float) -> None:
    """As if a checkpoint were so large that it takes so long to verify."""
    verify = Content.verify

    def slowly(content: Content, hashed: Callable[[int, int], None] | None = None) -> None:
        time.sleep(seconds)
        verify(content, hashed)

    Content.verify = slowly  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--total-steps", type=int, default=200, help="of the learning rate's schedule")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that ranks wait for each other")
    parser.add_argument("--reading", type=float, default=0.0, help="seconds that it takes to verify a checkpoint")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    read_slowly(args.reading)

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(100 + rank)  # a restart begins with the same draws: they must be overridden
    model: nn.Module = build(args.quiet).to(args.device)
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=args.total_steps)
    loader = checkfreq.Loader(Noisy(0.0 if args.quiet else 0.1), global_batch_size=BATCH, seed=3)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with checkfreq.open(args.directory, every=args.every, timeout=timedelta(seconds=args.timeout), **objects) as run:
        path = args.directory / f"ids-{rank}-{world}-from-{run.step}-{os.getpid()}.jsonl"
        with path.open("w") as ids_file:
            for ids, inputs, labels in run.batches(loader, until_step=args.until):
                optimizer.zero_grad()
                (F.cross_entropy(model(inputs.to(args.device)), labels.to(args.device)) * loader.share).backward()
                optimizer.step()
                scheduler.step()
                epoch = loader.position.epoch - (loader.position.consumed == 0)
                ids_file.write(json.dumps({"step": run.step, "epoch": epoch, "ids": ids.tolist()}) + "\n")
                ids_file.flush()
                print(run.step, flush=True)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    final = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    drawn = torch.rand(3), torch.rand(3, device=args.device)
    torch.save(final | {"drawn": drawn, "position": loader.state_dict()}, args.directory / f"final-{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
