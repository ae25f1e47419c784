"""What a user writes: the model, its optimizer, its data and its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError

REQUIRED = ("model", "optimizer", "dataset", "loss")


class TrainTask:
    """Subclass this and write `model`, `optimizer`, `dataset` and `loss`; the other functions have defaults.

    Every worker calls the functions itself, with the same random seed, so they must depend on nothing but the task: no
    rank, no time of day, no file that only one node has.
    """

    def model(self, stage: int) -> nn.Module:
        """The whole model, or its part number `stage` in a pipeline (0 without one)."""
        raise NotImplementedError

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Any torch optimizer over these (or over groups made of these) parameters."""
        raise NotImplementedError

    def dataset(self) -> Any:
        """A map-style dataset: `__len__` and `__getitem__`. For Arrow or Parquet: `ArrowDataset`; for images: `DaliImages`."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The mean loss over the samples of this batch: a scalar."""
        raise NotImplementedError

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None:
        """A learning-rate scheduler that is advanced once per step, or None."""
        del optimizer
        return None

    def inputs(self, batch: Any) -> Any:
        """What of a batch the model is called with. By default its first part."""
        if isinstance(batch, Mapping):
            return batch["input"] if "input" in batch else next(iter(batch.values()))
        return batch[0] if isinstance(batch, list | tuple) else batch

    def tied(self) -> Sequence[Sequence[str]]:
        """In a pipeline whose stages `model(stage)` gives: the parameters that several of them share, such as an embedding that
        is the output layer as well. Each is a list of names, one for each stage that has it: ``[("0.token.weight",
        "3.head.weight")]``; the number is what `model` was asked for. What a cut tears apart is found by itself."""
        return ()

    # Two more are optional: that they are absent here is how the loader knows that there is nothing to do.
    #
    # def augment(self, sample, generator): a random change of one sample, drawn from `generator` alone.
    #
    # def collate(self, samples): a batch from a list of samples, such as texts of different lengths padded to the longest.
    # Draws nothing. By default torch's `default_collate`.


def check_task(task: Any) -> None:
    """Refuses a task that lacks a function, before any worker starts.

    Raises:
        ConfigError: naming each missing function.
    """
    if not isinstance(task, TrainTask):
        raise ConfigError(
            f"the task is a {type(task).__name__}; it must be an instance of a subclass of raytrain_ft.TrainTask"
            + (" (you passed the class: add parentheses)" if isinstance(task, type) else "")
        )
    missing = [name for name in REQUIRED if getattr(type(task), name) is getattr(TrainTask, name)]
    if missing:
        raise ConfigError(f"{type(task).__name__} lacks {', '.join(missing)}: write these functions of TrainTask")
