"""A small vision transformer on image files that NVIDIA DALI decodes and augments, in one piece or as a pipeline.

    python jobs/train_vit.py
    python jobs/train_vit.py --stages 3 --lose-stage 1     # a pipeline that loses a stage, rehearsed on this machine
    ray job submit --working-dir . -- python jobs/train_vit.py --stages 4 --images /shared/png --storage-path /shared/runs

The images are those of train_images.py, which writes them out on first use. In a pipeline two stages read the data: the first
for the images, the last for the labels; those between read nothing. Whichever stage is lost, the accuracy at the end is the
same, to the last digit: which part of an image is seen depends on (seed, epoch, image) alone. Needs scikit-learn and Pillow.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_images import AUGMENT, SIZE, accuracy, write_digits

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster

PATCH = 4  # pixels; an image of 16 x 16 becomes 16 tokens
WIDTH, HEADS, LAYERS, DROPOUT = 64, 4, 6, 0.1

# ---------------------------------------------------------------- the model


class Patches(nn.Module):
    """Images [n, 3, SIZE, SIZE] -> one token for each patch and one for all of the image, [n, 1 + patches, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.whole = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.place = nn.Parameter(0.02 * torch.randn(1, 1 + (SIZE // PATCH) ** 2, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat([self.whole.expand(len(images), -1, -1), patches], dim=1) + self.place


class Head(nn.Module):
    """The token of the whole image -> [n, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x[:, 0]))


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", batch_first=True, norm_first=True)


# ---------------------------------------------------------------- the task


class DigitViT(ft.TrainTask):
    def __init__(self, images: str, max_steps: int) -> None:
        self.images = images
        self.max_steps = max_steps

    def model(self, stage: int) -> nn.Module:
        """All of it; `split="auto"` cuts it between two of these layers. 0.3 million parameters."""
        return nn.Sequential(Patches(), *(block() for _ in range(LAYERS)), Head())

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Up in the first third of the run, then down along a cosine. A function, so that a longer run may go on from this one:
        OneCycleLR keeps its length in its state, and refuses any step beyond."""
        warm_up = max(1, self.max_steps // 3)

        def factor(step: int) -> float:
            progress = min(1.0, (step - warm_up) / max(1, self.max_steps - warm_up))
            return (step + 1) / warm_up if step < warm_up else 0.5 + 0.5 * math.cos(math.pi * progress)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def dataset(self) -> ft.DaliImages:
        return ft.DaliImages(Path(self.images) / "train", size=SIZE, augment=AUGMENT)

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=None, help="workers (2); with stages a multiple of them (one each)")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="CPUs of each; a node's whole number keeps them apart")
    parser.add_argument("--max-steps", "--steps", type=int, default=200, help="updates; one epoch is 10 of them")
    parser.add_argument("--stages", type=int, default=1, help="cut the model into so many stages, each on its own worker")
    parser.add_argument("--micro-batches", type=int, default=None, help="of a step (twice the stages)")
    parser.add_argument("--lose-stage", type=int, help="rehearse: a local cluster; kill this stage half way")
    parser.add_argument("--images", type=Path, default=Path("~/digits-png"), help="the folder: a path that every node sees")
    parser.add_argument("--storage-path", default=None, help="where runs are kept: a path that every node sees")
    parser.add_argument("--node-minutes", type=float, default=1.0, help="how long the cluster may take to start a node")
    parser.add_argument("--name", default=None, help="the name of the run")
    args = parser.parse_args()
    if args.lose_stage is not None and not 0 <= args.lose_stage < args.stages:
        parser.error(f"--lose-stage {args.lose_stage}: stages are numbered from 0 to {args.stages - 1}")
    if args.stages == 1 and args.micro_batches is not None:
        parser.error("--micro-batches are of a pipeline: give --stages, too")
    workers = args.num_workers if args.num_workers is not None else 2 if args.stages == 1 else args.stages
    if workers < 1 or args.stages < 1 or workers % args.stages:
        parser.error(f"--num-workers {workers}: {args.stages} stages need a multiple of {args.stages}")
    if args.lose_stage is not None and workers != args.stages:
        parser.error(f"--lose-stage: of {workers} workers, others have the same stage; use as many as stages ({args.stages})")

    images = args.images.expanduser().absolute()
    write_digits(images)
    task, patience = DigitViT(str(images), args.max_steps), timedelta(minutes=args.node_minutes)
    name = "vit" if args.stages == 1 else f"vit-{args.stages}-stages"
    micro_batches = args.micro_batches or 2 * args.stages
    pieces = workers // args.stages * micro_batches if args.stages > 1 else 1
    cluster, faults, resume = nullcontext(), [], "auto"
    if args.lose_stage is not None:
        cluster = LocalCluster(workers + 1, cpus_per_node=args.cpus_per_worker)  # a node for each worker, and one for a spare
        faults = [ft.FailAt(rank=args.lose_stage, step=args.max_steps // 2, phase="forward")]
        # A rehearsal begins anew each time: under the name of a real run, it would in time delete the checkpoints of that one,
        # or that one would go on from those of the rehearsal.
        resume, name = "never", f"{name}-rehearsal"

    trainer = ft.Trainer(
        task,
        max_steps=args.max_steps,
        # Micro-batches of a pipeline are of one size. So the batch is a multiple of them all, about 128. Without stages it is
        # 128 with however many workers, so that a run may go on with others. The rest of an epoch that does not fill a batch
        # is left out: other images in each epoch.
        global_batch_size=max(1, round(128 / pieces)) * pieces,
        drop_last=True,
        seed=0,
        max_grad_norm=1.0,
        scaling_config=ft.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": args.cpus_per_worker}),
        parallelism_config=ft.ParallelismConfig(
            pipeline_parallel_degree=args.stages, num_pp_microbatches=micro_batches, split="auto"
        ),
        recovery_config=ft.RecoveryConfig(schedule_timeout=2 * patience, replacement_timeout=patience),
        run_config=ft.RunConfig(
            name=args.name or name, storage_path=args.storage_path, checkpoint_config=ft.CheckpointConfig(resume=resume)
        ),
        faults=faults,
    )
    with cluster:
        result = trainer.fit()
    print(f"test accuracy: {accuracy(ft.load_model(task, result), images):.2%}")


if __name__ == "__main__":
    main()
