"""What code blocks of the pages use and do not say. Workers import it too."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import ray.train.torch
import torch
import torch.nn.functional as F
from ray.job_submission import JobSubmissionClient
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy import Toy

import raytrain_ft as ft


class Layers(Toy):
    """One whose model can be cut into four stages."""

    def __init__(self) -> None:
        super().__init__(norm=False)


class Digits(Layers):
    """A task of that name."""


class Text(Toy):
    """The README's language model without its layers: which byte comes next?"""

    def dataset(self):
        text = torch.randint(256, (500, 10), generator=torch.Generator().manual_seed(1))
        return TensorDataset(text[:, :-1], text[:, 1:])

    def augment(self, sample, generator):
        return sample

    def loss(self, output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


class Embed(nn.Embedding):
    """A layer of it."""

    def __init__(self) -> None:
        super().__init__(256, 128)


class Block(nn.Linear):
    """Another."""

    def __init__(self) -> None:
        super().__init__(128, 128)


class Net(nn.Linear):
    """The model of who comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__(16, 4)


def digits() -> TensorDataset:
    """Their dataset."""
    return Toy().dataset()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> ray.train.Checkpoint:
    """Their checkpoint."""
    directory = tempfile.mkdtemp(prefix="save-")
    torch.save([model.state_dict(), optimizer.state_dict(), epoch], Path(directory) / "state.pt")
    return ray.train.Checkpoint.from_directory(directory)


def trainer(name: str, **more):
    """A run of that name."""
    workers, run = ft.ScalingConfig(num_workers=3), ft.RunConfig(name=name, storage_path="runs")
    return ft.Trainer(task, max_steps=40, global_batch_size=64, scaling_config=workers, run_config=run, **more)


task = Layers()

__all__ = [
    "Block",
    "DataLoader",
    "Digits",
    "Embed",
    "F",
    "JobSubmissionClient",
    "Net",
    "ScalingConfig",
    "Text",
    "TorchTrainer",
    "digits",
    "ft",
    "nn",
    "ray",
    "save",
    "task",
    "timedelta",
    "torch",
    "trainer",
]
