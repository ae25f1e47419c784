"""The work that is timed: a residual MLP of a given size, data it makes itself, and steps of a given length.

Every peer trains exactly this (`Work`), so a ratio compares fault tolerance and not models. Everything is a function
of the seed, so that nothing has to be downloaded and two runs see the same numbers. Knows torch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 16


class Block(nn.Module):
    """The feed-forward half of a transformer layer: norm, widen fourfold, GELU, back, and add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp(num_parameters: int, features: int = 64, num_blocks: int = 6) -> nn.Sequential:
    """A residual MLP of about `num_parameters` (to within a few per cent) in `num_blocks` blocks.

    Several blocks, so that the gradients fall into several buckets and their reduction overlaps the backward pass.
    """
    # blocks * 8 w^2, plus w (features + classes + 7 blocks) for the ends, norms and biases: solve for w
    linear = features + NUM_CLASSES + 7 * num_blocks
    width = int((math.sqrt(linear**2 + 32 * num_blocks * num_parameters) - linear) / (16 * num_blocks))
    if width < 4:
        raise ValueError(f"{num_parameters} parameters are too few for {num_blocks} blocks: ask for more")
    blocks = [Block(width) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES))


@dataclass(frozen=True, slots=True)
class Work:
    """A training job: model size in parameters, samples per worker and step, and the seed of everything."""

    num_parameters: int
    batch_per_worker: int
    features: int = 64
    num_blocks: int = 6
    bucket_mb: float = 25.0  # torch DDP's own default; give a peer the same
    seed: int = 0

    def model(self) -> nn.Module:
        """The model, its initial parameters a function of the seed; torch's global stream is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return mlp(self.num_parameters, self.features, self.num_blocks)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with torch's defaults."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def dataset(self, num_samples: int = 16_384) -> TensorDataset:
        """Inputs and the classes that a fixed random linear map gives them, so that there is something to learn."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        inputs = torch.randn(num_samples, self.features, generator=draws)
        teacher = torch.randn(self.features, NUM_CLASSES, generator=draws)
        return TensorDataset(inputs, (inputs @ teacher).argmax(dim=1))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, averaged over the batch."""
        return nn.functional.cross_entropy(output, target)


def batch_of(dataset: TensorDataset, step: int, rank: int, world_size: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step: the next `size * world_size` in order, wrapping round, shared out evenly."""
    first = (step * world_size + rank) * size
    rows = (first + torch.arange(size)) % len(dataset)
    inputs, targets = dataset.tensors
    return inputs[rows], targets[rows]


# Batches chosen for steps of 60 to 100 ms where two workers have a core each (4M), and of at least 0.2 s with four
# workers on two cores (recovery): long enough that a pause of "n steps" means something.
SMALL = Work(num_parameters=4_000_000, batch_per_worker=256)
MEDIUM = Work(num_parameters=10_000_000, batch_per_worker=64)
RECOVERY = Work(num_parameters=4_000_000, batch_per_worker=384)
