"""Handwritten digits: a small residual network on scikit-learn's real scans, to more than 98 % in half a minute.

    python jobs/train_digits.py
    ray job submit --working-dir . -- python jobs/train_digits.py --num-workers 4 --storage-path /shared/runs

Kill a worker while it runs: the accuracy at the end is the same, to the last digit. Needs scikit-learn, which brings
the 1,797 images (8 x 8 pixels) with it, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft

# ---------------------------------------------------------------- the model


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut around them: [n, channels, h, w] -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def small_resnet() -> nn.Module:
    """[n, 1, 8, 8] -> [n, 10] logits; 28 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


# ---------------------------------------------------------------- the data


def digits(part: str) -> TensorDataset:
    """Images float32 [n, 1, 8, 8] from 0 to 1, and labels int64 [n]; a quarter of them is kept for the test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    images, labels = (split[0], split[2]) if part == "train" else (split[1], split[3])
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(pixels, torch.tensor(labels, dtype=torch.int64))


# ---------------------------------------------------------------- the task


class Digits(ft.TrainTask):
    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def model(self, stage: int) -> nn.Module:
        return small_resnet()

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.max_steps)

    def dataset(self) -> TensorDataset:
        return digits("train")

    def augment(self, sample: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Shifts the image by up to one pixel each way. What it draws depends on the epoch and the sample alone."""
        image, label = sample
        down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
        return F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8], label

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Fraction of the test images that `model` gets right."""
    images, labels = digits("test").tensors
    return (model.eval()(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2, help="copies of the model, each on its own worker")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="CPUs of each; a node's whole number keeps them apart")
    parser.add_argument("--max-steps", type=int, default=200, help="updates; one epoch is 6 of them")
    parser.add_argument("--storage-path", default=None, help="where runs are kept: a path that every node sees")
    parser.add_argument("--node-minutes", type=float, default=1.0, help="how long the cluster may take to start a node")
    parser.add_argument("--name", default="digits", help="the name of the run")
    args = parser.parse_args()

    task, patience = Digits(args.max_steps), timedelta(minutes=args.node_minutes)
    result = ft.Trainer(
        task,
        max_steps=args.max_steps,
        global_batch_size=256,
        seed=0,
        scaling_config=ft.ScalingConfig(num_workers=args.num_workers, resources_per_worker={"CPU": args.cpus_per_worker}),
        recovery_config=ft.RecoveryConfig(schedule_timeout=2 * patience, replacement_timeout=patience),
        run_config=ft.RunConfig(name=args.name, storage_path=args.storage_path),
    ).fit()
    print(f"test accuracy: {accuracy(ft.load_model(task, result)):.2%}")


if __name__ == "__main__":
    main()
