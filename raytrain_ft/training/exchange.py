"""Small tensors of all ranks of a group, or their sum, in the time of one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 2**20
"""What a rank receives at most. Of more, an all-reduce moves less: twice the tensor, however many ranks there are."""


def is_small(tensor: Tensor, ranks: int) -> bool:
    """Whether an exchange is quicker than gloo's all-reduce, a ring: 2 (n - 1) messages one after the other."""
    return ranks > 1 and (ranks - 1) * tensor.nbytes <= MOST_BYTES


class Buffers:
    """Memory for one group's exchanges, used again and again: to touch that of a new one takes longer than to fill it."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, int, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def take(self, sent: int, received: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two of so many elements. Whoever does not give them back gives them up."""
        free = self._free[sent, received, dtype]
        return free.pop() if free else (torch.empty(sent, dtype=dtype), torch.empty(received, dtype=dtype))

    def give_back(self, sent: Tensor, received: Tensor) -> None:
        """Nothing reads or writes them any more."""
        self._free[len(sent), len(received), sent.dtype].append((sent, received))


def exchange(start: Callable[..., Any], sent: Tensor, received: Tensor, sizes: Sequence[int]) -> Any:
    """Starts to send to all ranks, and to receive from them.

    Args:
        start: of the group. sent, received: by rank, one after the other. sizes: by rank, how many elements come from it; as
            many go to each.
    """
    each = [len(sent) // len(sizes)] * len(sizes)
    return start("alltoall_base", received, sent, list(sizes), each, dist.AllToAllOptions())


class Exchange:
    """Every rank sends its tensor to every other one, and adds all of them in the order of ranks: the same bits everywhere.

    Until it is waited for, the tensor holds this rank's own values, and nobody else writes to it.

    Args:
        start: of the group, to which the buffers belong. rank: this one.
        silent: ranks of whose tensors all but the last `said` elements are zeros: those alone are sent.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        buffers: Buffers,
        tensor: Tensor,
        rank: int,
        ranks: int,
        silent: Collection[int] = (),
        said: int = 0,
    ) -> None:
        self._tensor = tensor.view(-1)
        size = tensor.numel()
        self._sizes = [said if other in silent else size for other in range(ranks)]
        mine = self._tensor[size - self._sizes[rank] :]
        self._buffers = buffers
        self._parts: tuple[Tensor, Tensor] | None = buffers.take(ranks * len(mine), sum(self._sizes), tensor.dtype)
        sent, received = self._parts
        sent.view(ranks, len(mine)).copy_(mine)
        self._work = exchange(start, sent, received, self._sizes)

    def wait(self) -> bool:
        """Waits for the sum.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it failed.
        """
        self._work.wait()
        self._add()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return, or raise, at once."""
        return self._work.is_completed()

    def succeeded(self) -> bool:
        """Whether the tensor holds the sum. Never waits, and looks past the fence."""
        if self._work.succeeded():
            self._add()
        return self._parts is None

    @torch.no_grad()
    def _add(self) -> None:
        if self._parts is None:
            return
        (sent, received), self._parts = self._parts, None
        first, *others = sorted(received.split(self._sizes), key=len, reverse=True)  # who says little last, else by rank
        total = self._tensor.copy_(first)
        for part in others:
            total[len(total) - len(part) :].add_(part)
        self._buffers.give_back(sent, received)
