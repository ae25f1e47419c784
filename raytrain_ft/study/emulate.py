"""A group of data-parallel workers in one process: one copy of the model, and the gradients of every worker's share in turn.

All workers hold the same weights, so one copy stands for all of them. A mini-batch can be cut: before the cut its tensors are
updated with the mean over all N workers; after it the strategies differ (Nicolae et al., III-C):

* lossy forward: with the mean over the S survivors;
* rollback: not at all; then the same mini-batch runs once more, undisturbed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError
from raytrain_ft.study.cuts import backward_order
from raytrain_ft.training.random import seed_all

Loss = Callable[[nn.Module], Tensor]
"""The mean loss of one worker's share of a mini-batch."""
Lost = Literal["skip", "zero"]
"""What becomes of tensors whose gradient is lost: they are left alone, as by a worker that died, or updated with a gradient of
zeros, as in the paper. The two are equal for plain SGD only: with momentum, weight decay or Adam zeros move weights, too."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's part of a mini-batch.

    Attributes:
        loss: of its share. seed: of all that its forward pass draws (dropout).
    """

    loss: Loss
    seed: int


@dataclass(slots=True)
class Gradients:
    """Of one mini-batch, by worker. Tensors are in the order of back-propagation.

    Attributes:
        of: each worker's gradients. buffers: each worker's floating buffers after its forward pass (BatchNorm's statistics).
        losses: each worker's.
    """

    of: list[list[Tensor]] = field(default_factory=list)
    buffers: list[list[Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def lossy_mean(gradients: Sequence[Sequence[Tensor]], done: int, survivors: int) -> list[Tensor]:
    """What the group uses after some of it fell away: one tensor per parameter.

    Up to the cut everybody divides by the number of workers. From then on each survivor divides by the number of survivors, and
    the casualties, which are the last ranks, contribute zeros; all are summed (Nicolae et al., III-C).

    Args:
        gradients: of each worker, in the order of back-propagation.
        done: how many tensors come before the cut.
        survivors: 1 to the number of workers.

    Raises:
        ConfigError: nobody, or more than there are, survives.
    """
    workers = len(gradients)
    if not 1 <= survivors <= workers:
        raise ConfigError(f"survivors={survivors}: of {workers} workers 1 to {workers} can survive")
    means = []
    for number, parts in enumerate(zip(*gradients, strict=True)):
        count = workers if number < done else survivors
        shares = [part / count if rank < count else torch.zeros_like(part) for rank, part in enumerate(parts)]
        means.append(_sum(shares))
    return means


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Group:
    """Workers that train one model.

    Attributes:
        model: the weights that all workers hold. optimizer: over all of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def fork(self) -> Group:
        """Another group in the same state."""
        return Group(*copy.deepcopy((self.model, self.optimizer)))

    @property
    def params(self) -> list[nn.Parameter]:
        """In the order of back-propagation."""
        return [p for _, p in backward_order(self.model)]

    def gradients(self, workers: Sequence[Worker], done: int | None = None) -> Gradients:
        """Everybody's gradients of a mini-batch; with `done`, of a back-propagation that ends after so many tensors. The state
        of the group stays as it is."""
        found = Gradients()
        floating = self._buffers()
        every = list(self.model.buffers())
        before = [buffer.clone() for buffer in every]
        self.model.train()
        for worker in workers:
            seed_all(worker.seed)
            loss = worker.loss(self.model)
            wanted = self.params[:done]
            found.of.append(list(torch.autograd.grad(loss, wanted)) if wanted else [])
            found.buffers.append([buffer.clone() for buffer in floating])
            found.losses.append(loss.item())
            for buffer, value in zip(every, before, strict=True):
                buffer.copy_(value)
        return found

    def train(self, found: Gradients) -> None:
        """An undisturbed mini-batch: the mean over all workers."""
        self.lossy(found, len(self.params), len(found.of))

    def lossy(self, found: Gradients, done: int, survivors: int) -> None:
        """Lossy forward: a mini-batch cut after `done` tensors, which the survivors finish with their own mean. BatchNorm's
        statistics become the mean of the survivors'."""
        self._update(lossy_mean(found.of, done, survivors))
        for buffer, parts in zip(self._buffers(), zip(*found.buffers[:survivors], strict=True), strict=True):
            buffer.copy_(_sum(parts) / survivors)

    def interrupt(self, found: Gradients, done: int, lost: Lost = "skip") -> int:
        """The first half of a rollback: what one survivor holds when a mini-batch is cut and nobody goes on with it.

        Its buffers are those from before its forward pass, as a recovery puts them back. Returns how many parameters were
        updated, and will be again.
        """
        means = lossy_mean([of[:done] for of in found.of], done, len(found.of))
        rest = [None if lost == "skip" else torch.zeros_like(p) for p in self.params[done:]]
        self._update([*means, *rest])
        return sum(p.numel() for p in self.params[:done])

    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer leaves alone what has no gradient."""
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]


def distance(group: Group, other: Group) -> float:
    """Of the weights, by their Euclidean norm."""
    pairs = zip(group.params, other.params, strict=True)
    return float(torch.stack([(a.detach().double() - b.detach().double()).square().sum() for a, b in pairs]).sum().sqrt())


def norm(group: Group) -> float:
    """Of all weights."""
    return float(torch.stack([p.detach().double().square().sum() for p in group.params]).sum().sqrt())
