"""Small tensors of all ranks of a group, or their sum, in the time of one message."""

from __future__ import annotations

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


def exchange(start: Callable[..., Any], tensor: Tensor, parts: Tensor, sizes: Sequence[int]) -> Any:
    """Starts to send this rank's tensor to all, and to receive theirs.

    Args:
        start: of the group. parts: for what comes, by rank, one after the other. sizes: by rank, how many elements it sends.
    """
    own = tensor.reshape(-1).repeat(len(sizes))
    return start("alltoall_base", parts, own, list(sizes), [tensor.numel()] * len(sizes), dist.AllToAllOptions())


class Exchange:
    """Every rank sends its tensor to every other one, and adds all of them in the order of ranks: the same bits everywhere.

    Until it is waited for, the tensor holds this rank's own values, and nobody else writes to it.

    Args:
        start: of the group. rank: this one.
        silent: ranks of whose tensors all but the last `said` elements are zeros: those alone are sent.
    """

    def __init__(
        self, start: Callable[..., Any], tensor: Tensor, rank: int, ranks: int, silent: Collection[int] = (), said: int = 0
    ) -> None:
        self._tensor = tensor.view(-1)
        size = tensor.numel()
        self._sizes = [said if other in silent else size for other in range(ranks)]
        self._parts: Tensor | None = torch.empty(sum(self._sizes), dtype=tensor.dtype)
        self._work = exchange(start, self._tensor[size - self._sizes[rank] :], self._parts, self._sizes)

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
        parts, self._parts = self._parts.split(self._sizes), None
        first, *others = sorted(parts, key=len, reverse=True)  # who says all before who says little, else by rank
        total = self._tensor.copy_(first)
        for part in others:
            total[len(total) - len(part) :].add_(part)
