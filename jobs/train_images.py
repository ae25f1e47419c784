"""Handwritten digits as image files, decoded and augmented by NVIDIA DALI: to more than 98 % in ten seconds.

    python jobs/train_images.py
    ray job submit --working-dir . -- python jobs/train_images.py --images /shared/digits-png --storage-path /shared/runs

The job writes scikit-learn's 1,797 scans out as a folder of PNG files, <images>/train/<digit>/<number>.png, and trains
on that; give `ft.DaliImages` a folder of your own instead. Kill a worker while it runs: the accuracy at the end is the
same, to the last digit, although every image is cut, resized and coloured at random. Needs scikit-learn and Pillow.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import raytrain_ft as ft

SIZE = 16  # the scans have 8 x 8 pixels; they are enlarged
# A digit seen in a mirror is another digit: no flip.
AUGMENT = ft.ImageAugmentation(scale=(0.7, 1.0), ratio=(0.8, 1.25), flip=0.0, brightness=0.2, contrast=0.2)


def write_digits(root: Path) -> None:
    """Writes root/train and root/test, unless they are there; a quarter of the scans is for the test."""
    if root.exists():
        return
    images, labels = load_digits(return_X_y=True)
    numbers = np.arange(len(labels))
    train, _ = train_test_split(numbers, test_size=0.25, random_state=0, stratify=labels)
    unfinished = root.with_name(f"{root.name}.{os.getpid()}")
    for number in numbers:
        part = "train" if number in train else "test"
        path = unfinished / part / str(labels[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[number].reshape(8, 8) * 15.9375).astype(np.uint8)).save(path)
    unfinished.rename(root)  # whoever sees the folder sees all of it


class DigitImages(ft.TrainTask):
    def __init__(self, images: str, max_steps: int) -> None:
        self.images = images
        self.max_steps = max_steps

    def model(self, stage: int) -> nn.Module:
        """[n, 3, 16, 16] -> [n, 10] logits; 24 thousand parameters."""
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.max_steps)

    def dataset(self) -> ft.DaliImages:
        return ft.DaliImages(Path(self.images) / "train", size=SIZE, augment=AUGMENT)

    def loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, images: Path) -> float:
    """Fraction of the test images that `model` gets right."""
    test = ft.DaliImages(images / "test", size=SIZE)
    pixels, labels = test.load_batch(np.arange(len(test)), epoch=0, seed=0)
    return (model.eval()(pixels).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2, help="copies of the model, each on its own worker")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="CPUs of each; a node's whole number keeps them apart")
    parser.add_argument("--max-steps", type=int, default=200, help="updates; one epoch is 11 of them")
    parser.add_argument("--images", type=Path, default=Path("~/digits-png"), help="the folder: a path that every node sees")
    parser.add_argument("--storage-path", default=None, help="where runs are kept: a path that every node sees")
    parser.add_argument("--node-minutes", type=float, default=1.0, help="how long the cluster may take to start a node")
    parser.add_argument("--name", default="digit-images", help="the name of the run")
    args = parser.parse_args()

    images = args.images.expanduser().absolute()
    write_digits(images)
    task, patience = DigitImages(str(images), args.max_steps), timedelta(minutes=args.node_minutes)
    result = ft.Trainer(
        task,
        max_steps=args.max_steps,
        global_batch_size=128,
        seed=0,
        scaling_config=ft.ScalingConfig(num_workers=args.num_workers, resources_per_worker={"CPU": args.cpus_per_worker}),
        recovery_config=ft.RecoveryConfig(schedule_timeout=2 * patience, replacement_timeout=patience),
        run_config=ft.RunConfig(name=args.name, storage_path=args.storage_path),
    ).fit()
    print(f"test accuracy: {accuracy(ft.load_model(task, result), images):.2%}")


if __name__ == "__main__":
    main()
