"""Small tensors of all ranks of a group, or their sum, in the time of one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SUM_TAG = 1
"""Of the messages that bring a sum to who is silent, one after the other."""
MOST_BYTES = 2**20
"""What a rank receives at most. Of more, an all-reduce moves less: twice the tensor, however many ranks there are."""


def is_small(tensor: Tensor, ranks: int) -> bool:
    """Whether an exchange is quicker than gloo's all-reduce, a ring: 2 (n - 1) messages one after the other."""
    return ranks > 1 and (ranks - 1) * tensor.nbytes <= MOST_BYTES


class Group(Protocol):
    """What an exchange needs of a process group."""

    def start(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A collective, or a message, whose end can be waited for."""
        ...

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """A message of whose end nothing tells."""
        ...


class Buffers:
    """Memory for one group's exchanges, used again and again: to touch that of a new one takes longer than to fill it."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, int, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._lent: dict[int, tuple[Tensor, Tensor, list[Any]]] = {}

    def take(self, sent: int, received: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two of so many elements. Whoever does not give them back gives them up."""
        free = self._free[sent, received, dtype]
        return free.pop() if free else (torch.empty(sent, dtype=dtype), torch.empty(received, dtype=dtype))

    def give_back(self, sent: Tensor, received: Tensor) -> None:
        """Nothing reads or writes them any more."""
        self._free[len(sent), len(received), sent.dtype].append((sent, received))

    def lend(self, summed: Tensor, sent: Tensor, received: Tensor) -> list[Any]:
        """Keeps two, and the messages of this tensor's sum that are added to the list, until they have arrived."""
        messages: list[Any] = []
        self._lent[summed.data_ptr()] = sent, received, messages
        return messages

    def reclaim(self, summed: Tensor) -> None:
        """The messages of this tensor's sum before have arrived."""
        if (lent := self._lent.pop(summed.data_ptr(), None)) is not None:
            sent, received, messages = lent
            messages.clear()  # before the memory that they read is used again
            self.give_back(sent, received)


def exchange(group: Group, sent: Tensor, received: Tensor, to: Sequence[int], of: Sequence[int]) -> Any:
    """Starts to send to all ranks, and to receive from them.

    Args:
        sent, received: by rank, one after the other. to, of: by rank, how many elements go to it, and come from it. Where there
            are none, it is still heard of that the other has begun.
    """
    return group.start("alltoall_base", received, sent, list(of), list(to), dist.AllToAllOptions())


class Exchange:
    """Every rank sends its tensor to every other one, and adds all of them in the order of ranks: the same bits everywhere.

    Until it is waited for, the tensor holds this rank's own values, and nobody else writes to it.

    Ranks that are silent are sent the sum alone, by the first of the others, when they wait for it: until then it costs nobody
    anything but one copy. That a silent rank begins the next exchange of the tensor tells the sender that it has the sum.

    Args:
        group: to which the buffers belong. rank: this one.
        silent: ranks of whose tensors all but the last `said` elements are zeros: those alone are sent. Not all are.
    """

    def __init__(
        self,
        group: Group,
        buffers: Buffers,
        tensor: Tensor,
        rank: int,
        ranks: int,
        silent: Collection[int] = (),
        said: int = 0,
    ) -> None:
        self._group = group
        self._tensor = tensor.view(-1)
        size = tensor.numel()
        self._sizes = [said if other in silent else size for other in range(ranks)]
        mine = self._tensor[size - self._sizes[rank] :]
        others = [other for other in range(ranks) if other not in silent]
        self._first = others[0]
        self._hears = sorted(silent) if rank == self._first else []
        self._waits = rank in silent
        self._sum: Any = None
        to = [0 if other in silent else len(mine) for other in range(ranks)]
        of = [0] * ranks if self._waits else self._sizes
        self._buffers = buffers
        self._parts: tuple[Tensor, Tensor] | None = buffers.take(sum(to), sum(of), tensor.dtype)
        sent, received = self._parts
        sent.view(len(others), len(mine)).copy_(mine)
        self._work = exchange(group, sent, received, to, of)

    def await_parts(self) -> None:
        """Waits until all ranks have sent theirs. Raises as `wait` does."""
        self._work.wait()

    def wait(self) -> bool:
        """Waits for the sum.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it failed.
        """
        self.await_parts()
        if self._waits and self._parts is not None:
            self._sum = self._sum or self._group.start("recv", [self._tensor], self._first, SUM_TAG)
            self._sum.wait()
        self._settle(self._hears)
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return, or raise, at once."""
        return self._work.is_completed() and not (self._waits and self._parts is not None)

    def succeeded(self) -> bool:
        """Whether the tensor holds the sum. Never waits, and looks past the fence."""
        if self._work.succeeded() and (not self._waits or (self._sum is not None and self._sum.succeeded())):
            self._settle(())  # there is nobody any more to pass it on to
        return self._parts is None

    @torch.no_grad()
    def _settle(self, hears: Sequence[int]) -> None:
        """Everything that this rank waited for is here."""
        if self._parts is None:
            return
        (sent, received), self._parts = self._parts, None
        if not self._waits:
            self._add(received)
            self._buffers.reclaim(self._tensor)
        if not hears:
            self._buffers.give_back(sent, received)
            return
        whole = sent[: len(self._tensor)].copy_(self._tensor)  # the tensor may be changed before they have it
        messages = self._buffers.lend(self._tensor, sent, received)
        for other in hears:
            messages.append(self._group.post_send(whole, other, SUM_TAG))

    def _add(self, received: Tensor) -> None:
        first, *others = sorted(received.split(self._sizes), key=len, reverse=True)  # who says little last, else by rank
        total = self._tensor.copy_(first)
        for part in others:
            total[len(total) - len(part) :].add_(part)
