"""While some replicas sleep: those who are awake reduce among themselves, and one of them tells the sleepers the sums.

In one group for all, every collective costs each member something for every other one, however little that one says, and a
ring takes it in. So two more groups are joined while training goes on: of those who are awake; and of the first of them, who
*leads*, with all who sleep. As a step begins, a sleeper sends who leads its tail, all that it has to say, to be added to the
leader's own; when all is reduced, it is sent the sums. Both are one message.

All use these groups from the step on before which everybody said that it has joined (`Sleep.settle`). At the boundary at which
somebody falls asleep or wakes up, all are back in the group of the incarnation, which nobody has left: nobody waits for one.

Who leads launches nothing before all who sleep have begun the step, so there is no sum of a step that somebody is not in: the
survivors of a loss are no further apart than one step (`policy/reconcile.py`). There must be two who are awake: of one alone,
whose sums are only its own, others could hear that it has committed a step, and lose it with its sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_ft.errors import FencedError
from raytrain_ft.training import process_group
from raytrain_ft.training.buckets import Bucket, Reduction
from raytrain_ft.training.fence import PeerLostError
from raytrain_ft.training.links import Links
from raytrain_ft.training.memory import move
from raytrain_ft.training.process_group import FencedGroup, FencedWork
from raytrain_ft.training.sleep import Sleep

LEAST_AWAKE = 2
"""For fewer no other groups are joined."""


class Apart:
    """One worker's part in it: it sums gradients in the place of the group of the incarnation.

    Args:
        awake: the group of those who are awake; None for who sleeps.
        followers: that of who leads and of all who sleep, in this order; None for the others.
        buckets: of this worker.

    Attributes:
        sent: the sums of the step under way, between who leads and who sleeps.
    """

    def __init__(self, awake: FencedGroup | None, followers: FencedGroup | None, buckets: Sequence[Bucket]) -> None:
        joined = awake if awake is not None else followers
        assert joined is not None
        self.fence = joined.fence
        self._awake, self._followers = awake, followers
        last, size = buckets[-1], sum(bucket.flat.nbytes for bucket in buckets) if followers is not None else 0
        self._said = torch.zeros(last.tail_size, dtype=last.flat.dtype)
        self._sums = torch.empty(size, dtype=torch.uint8)  # of a step, one after the other
        self._filled = 0
        self._words: Reduction | None = None
        self.sent: FencedWork | None = None

    def begin(self) -> Reduction | None:
        """A step begins.

        Returns:
            For who leads, what must have come before it launches anything.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a connection did.
        """
        self._filled, self.sent = 0, None
        if self._awake is None or self._followers is None:
            return None
        self._words = self._followers.all_reduce(self._said.zero_())
        return self._words

    def add_words(self, tail: Tensor) -> None:
        """Adds what the sleepers said to what this worker says, if it leads."""
        if self._awake is not None and self._words is not None:
            self._words.wait()
            tail.add_(self._said)

    def all_reduce(self, tensor: Tensor, silent: Collection[int] = (), said: int = 0) -> Reduction:
        """Starts to sum a tensor, in place: one bucket after the other, and the last of a step says something at its end.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it could not start.
        """
        del silent
        if self._awake is None:
            if said:
                self._follow(tensor[len(tensor) - said :])
            return _Told(self, tensor, self._next(tensor))
        work = self._awake.all_reduce(tensor)
        return work if self._followers is None else _PassedOn(work, self, tensor)

    def _next(self, tensor: Tensor) -> Tensor:
        """Where this step's next sum lies."""
        start, self._filled = self._filled, self._filled + tensor.nbytes
        return self._sums[start : self._filled]

    def _follow(self, words: Tensor) -> None:
        assert self._followers is not None
        if self._words is not None:
            self._words.wait()  # of the step before: others have them, but perhaps not this one
        self._words = self._followers.all_reduce(self._said.copy_(words))
        self.sent = self._broadcast()

    def pass_on(self, tensor: Tensor) -> None:
        """The next sum is there. Copied, for the update changes it; that the copy before was sent is what sleepers have said by
        beginning this step."""
        move(self._next(tensor).data_ptr(), tensor.data_ptr(), tensor.nbytes)
        if self._filled == len(self._sums):
            self.sent = self._broadcast()

    def _broadcast(self) -> FencedWork:
        assert self._followers is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._followers.start("broadcast", [self._sums], options)


class _PassedOn:
    """A sum of those who are awake, which the sleepers are told."""

    def __init__(self, work: Reduction, apart: Apart, tensor: Tensor) -> None:
        self._work, self._apart, self._tensor = work, apart, tensor

    def wait(self) -> bool:
        self._work.wait()
        self._apart.pass_on(self._tensor)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def succeeded(self) -> bool:
        return self._work.succeeded()


class _Told:
    """A sum that a sleeper is told.

    Args:
        told: where it comes.
    """

    def __init__(self, apart: Apart, tensor: Tensor, told: Tensor) -> None:
        self._apart, self._tensor, self._told = apart, tensor.view(torch.uint8), told

    def await_parts(self) -> None:
        assert self._apart.sent is not None, "waited for before the last bucket was launched"
        self._apart.sent.wait()

    def wait(self) -> bool:
        self.await_parts()
        self._tensor.copy_(self._told)
        return True

    def is_completed(self) -> bool:
        return self._apart.sent is not None and self._apart.sent.is_completed()

    def succeeded(self) -> bool:
        if self._apart.sent is None or not self._apart.sent.succeeded():
            return False
        self._tensor.copy_(self._told)
        return True


class Parting:
    """Joins the groups of an incarnation's sleepers and of those who are awake, in the background.

    Args:
        join: builds a group, given its name, this worker's rank in it, and its size; raises `FencedError` or `PeerLostError`.
        rank, size: of this worker, in the incarnation.
        buckets: of this worker.
    """

    def __init__(self, join: Callable[[str, int, int], FencedGroup], rank: int, size: int, buckets: Sequence[Bucket]) -> None:
        self._join, self._rank, self._size, self._buckets = join, rank, size, buckets
        self._lock = threading.Lock()
        self._asleep: frozenset[int] = frozenset()
        self._groups: list[FencedGroup | None] = []
        self._apart: Apart | None = None
        self._served = False  # whether all have joined these: the same on every rank

    def begin(self, asleep: frozenset[int], step: int) -> None:
        """From this step on, these sleep. The groups for who slept last time are there, if all have come to use them."""
        if not self._served:
            self.leave()
        awake = [rank for rank in range(self._size) if rank not in asleep]
        if not asleep or len(awake) < LEAST_AWAKE or asleep == self._asleep:
            return
        self.leave()
        self._asleep, self._served = asleep, False
        members = {"awake": awake, "followers": [awake[0], *sorted(asleep)]}
        threading.Thread(target=self._join_all, args=(members, step, self._groups), name="parting", daemon=True).start()

    def _join_all(self, members: dict[str, list[int]], step: int, groups: list[FencedGroup | None]) -> None:
        """Where that fails, all stay in the group of the incarnation; which is at its end, or soon notices what is wrong."""
        for name, ranks in members.items():
            group = None
            if self._rank in ranks:
                try:
                    group = self._join(f"{name}-{step}/", ranks.index(self._rank), len(ranks))
                except (FencedError, PeerLostError):
                    return
            with self._lock:
                if groups is self._groups:
                    groups.append(group)
                    continue
            process_group.leave(group)  # others sleep by now
            return

    def connect(self, links: Links, sleep: Sleep) -> Links:
        """The connections for the step that begins, and for `sleep` to say whether this worker has joined."""
        with self._lock:
            if self._apart is None and len(self._groups) == 2:
                awake, followers = self._groups
                self._apart = Apart(awake, followers, self._buckets)
        self._served |= sleep.apart
        sleep.joined = self._apart is not None and sleep.asleep == self._asleep
        return replace(links, apart=self._apart) if sleep.apart else links

    def leave(self) -> None:
        """These groups are not used any more."""
        with self._lock:
            groups, self._groups = self._groups, []
            self._asleep, self._apart = frozenset(), None
        for group in groups:
            process_group.leave(group)
