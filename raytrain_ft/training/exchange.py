"""Small tensors of all ranks of a group, or their sum, in the time of one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 2**20
"""What a rank receives at most. Of more, an all-reduce moves less: twice the tensor, however many ranks there are."""


def is_small(tensor: Tensor, ranks: int) -> bool:
    """Whether an exchange is quicker than gloo's all-reduce, a ring: 2 (n - 1) messages one after the other."""
    return ranks > 1 and (ranks - 1) * tensor.nbytes <= MOST_BYTES


def exchange(start: Callable[..., Any], tensor: Tensor, parts: Tensor) -> Any:
    """Starts to send this rank's tensor to all, and to receive theirs.

    Args:
        start: of the group. parts: [ranks, elements], by rank.
    """
    own = tensor.reshape(1, -1).repeat(len(parts), 1)
    return start("alltoall_base", parts, own, [], [], dist.AllToAllOptions())


class Exchange:
    """Every rank sends its tensor to every other one, and adds all of them in the order of ranks: the same bits everywhere.

    Until it is waited for, the tensor holds this rank's own values, and nobody else writes to it.

    Args:
        start: of the group.
    """

    def __init__(self, start: Callable[..., Any], tensor: Tensor, ranks: int) -> None:
        self._tensor = tensor
        self._parts: Tensor | None = torch.empty((ranks, tensor.numel()), dtype=tensor.dtype)
        self._work = exchange(start, tensor, self._parts)

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
        parts, self._parts = self._parts, None
        first, *others = parts.unbind()
        total = self._tensor.view(-1).copy_(first)
        for part in others:
            total.add_(part)
