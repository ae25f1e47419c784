"""Several workers that replay one lost stage together: each takes some of the micro-batches, and all make the same updates.

SWIFT, section 5.2. There gradients are summed by an all-reduce, so in another order than in training, and the result is another
by rounding. Here that is one of two ways. In the other each worker gets its part of every micro-batch's gradient, adds these in
the order in which a stage by itself would have, and passes the sums on: the same bits, for more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from raytrain_ft.training.placing import laid_out_like
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.solo import Solo


class Team:
    """One worker's part in a replay by several.

    Args:
        group: of the team.
        micro_batches: of a step; worker number n of a team of d takes n, n + d, ...
        exact: add gradients in the order of the micro-batches.

    Attributes:
        numbers: the micro-batches that this worker takes.
        leads: whether this is the one that speaks where one is enough.
        sums: the group that sums gradients while the backward pass goes on; with `exact`, nobody does.
    """

    def __init__(self, group: FencedGroup, micro_batches: int, *, exact: bool) -> None:
        self._group = group
        self._count = micro_batches
        self.exact = exact
        self.numbers = tuple(range(group.rank(), micro_batches, group.size()))
        self.leads = group.rank() == 0
        self.sums: FencedGroup | Solo = Solo(group.fence) if exact else group
        self._collected: dict[int, list[Tensor | None]] = {}

    def total(self, number: int) -> int:
        """Of a number of each member, of 48 bits at most, the sum in 48 bits."""
        return int(self._group.all_gather(torch.tensor([number])).sum()) % 2**48

    def collect(self, number: int, params: Sequence[Parameter]) -> None:
        """Puts the gradient of a pass aside, so that the next one begins from nothing.

        Args:
            params: of its chunk.
        """
        if self.exact:
            self._collected[number] = [p.grad for p in params]
            for p in params:
                p.grad = None

    @torch.no_grad()
    def add_up(self, chunks: Sequence[Sequence[Parameter]]) -> None:
        """Gives every parameter, by chunk, the sum of its gradients over all micro-batches, in their order."""
        if not self.exact:
            return
        rounds = range(0, self._count, self._group.size())  # of all ranks, the next one of each
        for chunk, params in enumerate(chunks):
            places = [chunk * self._count + first + self._group.rank() for first in rounds]
            # fewer may be left at the end than there are ranks
            mine = [self._collected.pop(place, [None] * len(params)) for place in places]
            there = self._all_there(mine)
            for dtype in dict.fromkeys(p.dtype for p in params):
                which = [i for i, p in enumerate(params) if p.dtype == dtype]
                self._add([params[i] for i in which], [[one[i] for i in which] for one in mine], there[:, which].tolist())

    def _all_there(self, mine: list[list[Tensor | None]]) -> Tensor:
        """Of every micro-batch, in order, and every parameter: whether it has a gradient. bool [rounds * ranks, params]."""
        flags = torch.tensor([[gradient is not None for gradient in one] for one in mine], dtype=torch.uint8)
        found = self._group.all_gather(flags.view(-1)).view(self._group.size(), *flags.shape)
        return found.transpose(0, 1).flatten(0, 1).bool()

    def _add(self, params: list[Parameter], mine: list[list[Tensor | None]], there: list[list[bool]]) -> None:
        """Adds gradients of one dtype. Each rank does so for one part of all elements, whatever tensors that cuts through.

        Args:
            mine: by round, this rank's. there: of every micro-batch, which there are.
        """
        ranks, rank = self._group.size(), self._group.rank()
        sizes = [p.numel() for p in params]
        part = -(-sum(sizes) // ranks)
        pieces = _pieces(sizes, part * rank, part * (rank + 1))
        sums, begun = torch.zeros(part, dtype=params[0].dtype), [False] * len(params)
        micro_batches = iter(there)
        for gradients in mine:
            flat = torch.zeros(part * ranks, dtype=params[0].dtype)
            for view, gradient in zip(flat[: sum(sizes)].split(sizes), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient.reshape(-1))
            for theirs, has in zip(self._group.all_to_all(flat), micro_batches, strict=False):
                for i, start, stop in pieces:
                    if has[i]:  # a sum begins with a copy: zero and -0.0 are not the same bits
                        place = sums[start:stop]
                        place.add_(theirs[start:stop]) if begun[i] else place.copy_(theirs[start:stop])
                        begun[i] = True
        whole = self._group.all_gather(sums).view(-1)[: sum(sizes)]
        for p, total, used in zip(params, whole.split(sizes), zip(*there, strict=True), strict=True):
            p.grad = laid_out_like(total.view_as(p), p) if any(used) else None


def _pieces(sizes: Sequence[int], first: int, last: int) -> list[tuple[int, int, int]]:
    """What lies in [first, last) of tensors of these sizes, one after the other: number, beginning and end, from `first` on."""
    found, offset = [], 0
    for number, size in enumerate(sizes):
        start, stop = max(offset, first), min(offset + size, last)
        if start < stop:
            found.append((number, start - first, stop - first))
        offset += size
    return found
