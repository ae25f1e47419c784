"""Dormant replicas: members of the world that contribute nothing for now, with weight zero.

A replica falls asleep, and wakes up, and nobody waits for a group to be rebuilt (Nicolae et al., III-B). In the tail of each
step's last bucket every rank says whether it sleeps from the next step on; the others then share out its samples, and it sends
zeros and goes on to update. A few steps later the others train without it (`apart.py`), and it is brought up to date as it
wakes. The first of those who are awake says as a step ends whether a sleeper sleeps on, and nobody waits for one: what it says
itself it says as the step begins, for it has nothing to compute, and wakes a step later. A replica that is told to sleep *at
once* does not finish its part of the step under way: the buckets that it has not launched are zeros, the mean is taken over the
samples that are there, and its own are listed as lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_ft.policy.sampling import GlobalBatch, Range, share

MOST_READY = 20
"""Steps. Who is not ready by then may never be: another one could not join."""
ASLEEP, SILENT, WAKES, JOINED = 1, 2, 4, 8
"""What is said of a rank in the tail, added up: it sleeps from the next step on; it contributed only a part to this one; it
sleeps no longer, whatever others say; it has joined the groups for those who are awake and who sleep now, and no checkpoint of
its own is under way."""


class Sleep:
    """Who sleeps, as of one replica.

    Attributes:
        wanted: this replica is to sleep. at_once: in the middle of a step too. See `ask`.
        waking: the replicas that are to wake; set by other threads, too, and cleared of who has woken.
        silent_from: in the step under way, the first bucket to which this replica contributes nothing.
        asleep: the replicas that sleep in the step under way: the same set on every rank.
        joined: whether this replica has joined the groups that are for them.
        apart: whether all have, and those who are awake train without the others: the same on every rank.
        ready: for how many steps this replica has been a member of the groups for that, until then.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.at_once = False
        self.waking: set[int] = set()
        self.silent_from: int | None = None
        self.asleep: frozenset[int] = frozenset()
        self.joined = False
        self.apart = False
        self.ready = 0

    @property
    def parts_soon(self) -> bool:
        """Whether a checkpoint that is due had better wait for a few steps: nobody parts while one is under way, and with one
        in every step nobody ever would."""
        return 0 < self.ready <= MOST_READY

    def ask(self, asleep: bool, at_once: bool) -> None:
        """This replica is to sleep, or to wake; on any thread."""
        self.at_once = at_once  # first: who sees that it is to sleep sees how
        self.wanted = asleep

    def begin(self) -> None:
        """A new incarnation: all take part in a step, and then sleep again."""
        self.asleep, self.joined, self.apart, self.ready = frozenset(), False, False, 0
        self.waking.clear()

    def is_silent(self, bucket: int) -> bool:
        """Asked before each bucket is launched. Who is silent stays so until the step's end."""
        if self.silent_from is None and self.wanted and self.at_once:
            self.silent_from = bucket
        return self.silent_from is not None

    def say(self, rank: int, samples: int, *, leads: bool) -> dict[int, int]:
        """What this replica, which has read so many samples, says at a step's end, by replica: of itself; and, if it leads the
        others, of those who sleep on."""
        words = dict.fromkeys(self.asleep - self.waking, ASLEEP) if leads else {}
        if rank in self.asleep:
            own = 0 if self.wanted else WAKES  # perhaps who leads did not hear of it
        else:
            own = (ASLEEP if self.wanted else 0) + (SILENT if self.silent_from is not None and samples else 0)
        own += JOINED if self.joined else 0
        return words | {rank: own} if own else words

    def weights(self, replicas: int) -> tuple[float, ...] | None:
        """Of the replicas' shares of a batch; None if all are equal."""
        return tuple(float(rank not in self.asleep) for rank in range(replicas)) if self.asleep else None

    def lost(self, said: Sequence[int], batch: GlobalBatch) -> tuple[Range, ...]:
        """The samples of those that fell silent in this step."""
        weights = self.weights(len(said))
        pieces = [share(batch, rank, len(said), weights) for rank, word in enumerate(said) if word & SILENT]
        return tuple((piece.start, piece.stop) for piece in pieces if len(piece))

    @staticmethod
    def next(said: Sequence[int]) -> frozenset[int]:
        """Who sleeps in the next step. If all want to, nobody does."""
        asleep = frozenset(rank for rank, word in enumerate(said) if word & ASLEEP and not word & WAKES)
        return asleep if len(asleep) < len(said) else frozenset()

    def settle(self, said: Sequence[int], *, checkpoint: bool = False) -> bool:
        """The step is committed. Returns whether others sleep from here on.

        Args:
            checkpoint: all begin one here, so nobody is left out from here on.
        """
        before, self.asleep = self.asleep, self.next(said)
        joined = self.apart or all(word & JOINED for word in said)  # who is left out says nothing
        self.apart = self.asleep == before and bool(before) and joined and (self.apart or not checkpoint)
        self.waking -= before - self.asleep
        if self.silent_from is not None:
            self.silent_from, self.at_once = None, False  # it has done so, once
        return self.asleep != before
