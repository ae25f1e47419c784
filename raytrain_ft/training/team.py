"""Several workers that replay one lost stage together: each takes some of the micro-batches, and all make the same updates.

SWIFT, section 5.2. There gradients are summed by an all-reduce, so in another order than in training, and the result is another
by rounding. Here that is one of two ways; the other passes every micro-batch's gradient to everybody, and all add them in the
order in which a stage by itself would have: the same bits, for more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import Parameter

from raytrain_ft.training.fence import Fence
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.solo import Solo


class Team:
    """One worker's part in a replay by several.

    Args:
        group: of the team.
        micro_batches: of a step; worker number n of a team of d takes n, n + d, ...
        chunks: of the stage.
        exact: add gradients in the order of the micro-batches.

    Attributes:
        numbers: the micro-batches that this worker takes.
        leads: whether this is the one that speaks where one is enough.
        sums: the group that sums gradients while the backward pass goes on; with `exact`, nobody does.
    """

    def __init__(self, group: FencedGroup, micro_batches: int, *, exact: bool, chunks: int = 1) -> None:
        self._group = group
        self._count, self._chunks = micro_batches, chunks
        self.exact = exact
        self.numbers = tuple(range(group.rank(), micro_batches, group.size()))
        self.leads = group.rank() == 0
        self.sums: FencedGroup | Solo = Solo(group.fence) if exact else group
        self._collected: dict[int, Tensor] = {}

    @property
    def fence(self) -> Fence:
        return self._group.fence

    def collect(self, number: int, params: Sequence[Parameter]) -> None:
        """Puts the gradient of a pass aside, so that the next one begins from nothing.

        Args:
            params: of its chunk.
        """
        if self.exact:
            self._collected[number] = _pack([p.grad for p in params], params)
            for p in params:
                p.grad = None

    @torch.no_grad()
    def add_up(self, chunks: Sequence[Sequence[Parameter]]) -> None:
        """Gives every parameter, by chunk, the sum of its gradients over all micro-batches, in their order."""
        if not self.exact:
            return
        ranks = self._group.size()
        for chunk, first in product(range(self._chunks), range(0, self._count, ranks)):  # of all ranks, the next one of each
            params = chunks[chunk]
            mine = self._collected.pop(chunk * self._count + first + self._group.rank(), None)
            if mine is None:  # there are not as many left as ranks
                mine = _pack([None for _ in params], params)
            for packed in self._group.all_gather(mine):
                for p, gradient in zip(params, _unpack(packed, params), strict=True):
                    if gradient is not None:
                        p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def _pack(gradients: Sequence[Tensor | None], params: Sequence[Parameter]) -> Tensor:
    """Gradients as bytes: which there are, and then all of them."""
    there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params, gradients, strict=True)]
    return torch.cat([there, *(g.detach().contiguous().reshape(-1).view(torch.uint8) for g in filled)])


def _unpack(packed: Tensor, params: Sequence[Parameter]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    at = len(params)
    for there, p in zip(packed[:at].tolist(), params, strict=True):
        size = p.numel() * p.element_size()
        found.append(packed[at : at + size].clone().view(p.dtype).reshape(p.shape) if there else None)
        at += size
    return found
