"""While some replicas sleep: those who are awake train without them, and the first of them brings them up to date as they wake.

In one group for all, every collective costs each member something for every other one, however little that one says, and a
ring takes it in. So two more groups are joined while training goes on: of those who are awake; and of the first of them, who
*leads*, with all who sleep. All use these groups from the step on before which everybody said that it has joined
(`Sleep.settle`): from then on a sleeper does nothing at all, and is sent nothing. What it holds grows old, so it counts as a
replica without state (`TrainingState.filled`): if somebody is lost meanwhile, it is filled as a replacement is.

At the boundary at which somebody falls asleep or wakes up, or training stops, who leads sends all who sleep the state of that
boundary, and everybody is back in the group of the incarnation, which nobody has left: nobody waits for one. The others begin
the next step meanwhile, in whose reductions they wait for who is not there yet.

There must be two who are awake: of the state of one alone the sleepers stay copies, in the group of all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_ft.errors import ConfigError, FencedError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.storage.tree import flatten, unflatten
from raytrain_ft.training import process_group
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.fence import WAIT_DEADLINE, PeerLostError
from raytrain_ft.training.fenced_work import FencedWork
from raytrain_ft.training.links import Links
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.sleep import Sleep
from raytrain_ft.training.state import Extras, packed, unpacked
from raytrain_ft.training.step import Replica

LEAST_AWAKE = 2
"""For fewer no other groups are joined."""
REASSURE_S = WAIT_DEADLINE.total_seconds() / 10
"""How often sleepers are told that they sleep on: gloo gives up a message that does not come for so much longer."""
LOOK_S = 0.5
UNHEARD_S, UNHEARD_STEPS = 600.0, 10
"""After so long a sleeper that was told to wake takes it that no other one has heard of it. Storage may hold the others up,
and data, as long as a hang takes to be one."""


@dataclass(frozen=True, slots=True)
class Woken:
    """What is agreed upon at the boundary at which a sleeper is up to date again; as of a `Commit`."""

    stop: bool
    checkpoint: bool
    reads_change: bool = True


class Apart:
    """One worker's part in it.

    Args:
        awake: the group of those who are awake; None for who sleeps.
        followers: that of who leads and of all who sleep, in this order; None for the others.

    Attributes:
        group: sums the gradients of who is awake; None for who sleeps.
    """

    def __init__(self, awake: FencedGroup | None, followers: FencedGroup | None) -> None:
        self.group = awake
        self._followers = followers
        self._reassured = time.monotonic()

    def reassure(self) -> None:
        """Tells the sleepers, from time to time, that they sleep on; of who leads.

        Raises:
            FencedError: the incarnation ended; PeerLostError: it could not start.
        """
        if self._followers is not None and time.monotonic() > self._reassured + REASSURE_S:
            self._reassured = time.monotonic()
            self._broadcast(_size(0))

    def wake(self, replica: Replica, commit: Commit) -> None:
        """Sends the sleepers the state after this step, if this worker leads.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a message failed.
        """
        if self._followers is None:
            return
        state = replica.state
        try:
            content = _pack(replica, stop=commit.stop, checkpoint=commit.checkpoint)
        except ConfigError as error:  # what cannot be sent has come since
            raise PeerLostError(f"sleepers cannot be brought up to date but by a recovery: {error}") from error
        self._send(replica, content)
        for bucket in state.buckets:
            self._send(replica, state.pack(bucket))
        self._followers.forget()

    def _send(self, replica: Replica, content: Tensor) -> None:
        replica.at("transfer_source")
        works = [self._broadcast(_size(len(content))), self._broadcast(content)]
        replica.at("wait")
        for work in works:
            work.wait()

    def doze(self, replica: Replica) -> Woken:
        """Does nothing until this worker is to be up to date again, and takes over the state then.

        Raises:
            FencedError: the incarnation ended. PeerLostError: a message failed, or nobody heard that this one is to wake.
        """
        state, sleep = replica.state, replica.state.tail.sleep
        state.filled = False
        replica.at("wait")
        size = self._await_word(sleep, replica.step_s)
        about = dict(unpacked(self._receive(replica, size)))
        for bucket in state.buckets:
            state.unpack(bucket, self._receive(replica, self._await_size()))
        settings = unflatten(about["settings"], about.__getitem__)
        state.take(Extras(about["step"], Position(**about["position"]), tuple(settings["groups"]), settings["scheduler"]))
        replica.follow(about["lost"], about["not_finite"])
        sleep.settle(about["said"])
        if replica.checkpointer is not None:
            replica.checkpointer.catch_up(about["checkpointed"])
        assert self._followers is not None
        self._followers.forget()
        return Woken(about["stop"], about["checkpoint"])

    def _await_word(self, sleep: Sleep, step_s: float) -> int:
        """The size of what is said next, once it is not that this worker sleeps on."""
        while True:
            message = _size(0)
            work, told = self._broadcast(message), None
            deadline = time.monotonic() + WAIT_DEADLINE.total_seconds()
            while not work.came(LOOK_S):
                now = time.monotonic()
                told = None if sleep.wanted else told or now
                if now > deadline or (told is not None and now > told + UNHEARD_S + UNHEARD_STEPS * step_s):
                    raise PeerLostError("a replica that sleeps was told to wake, and who leads the others did not hear of it")
            work.wait()
            if int(message):
                return int(message)

    def _await_size(self) -> int:
        message = _size(0)
        self._broadcast(message).wait()
        return int(message)

    def _receive(self, replica: Replica, size: int) -> Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        replica.at("transfer_receiver")
        work = self._broadcast(content)
        replica.at("wait")
        work.wait()
        return content

    def _broadcast(self, tensor: Tensor) -> FencedWork:
        """From who leads."""
        assert self._followers is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._followers.start("broadcast", [tensor], options)


def _size(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64)


def can_be_sent(replica: Replica) -> bool:
    """Whether sleepers could be brought up to date: a schedule, say, may keep what is neither a tensor nor a plain value."""
    try:
        _pack(replica, stop=False, checkpoint=False)
    except ConfigError:
        return False
    return True


def _pack(replica: Replica, *, stop: bool, checkpoint: bool) -> Tensor:
    """What a sleeper needs besides the buckets."""
    extras = replica.state.extras()
    settings, tensors = flatten({"groups": list(extras.groups), "scheduler": extras.scheduler}, "settings")
    about = {
        "step": extras.step,
        "position": asdict(extras.position),
        "settings": settings,
        "said": replica.heard.said,
        "lost": replica.lost,
        "not_finite": replica.not_finite,
        "stop": stop,
        "checkpoint": checkpoint,
        "checkpointed": 0 if replica.checkpointer is None else replica.checkpointer.latest,
    }
    return packed([*about.items(), *((name, tensor.detach()) for name, tensor in tensors.items())])


class Parting:
    """Joins the groups of an incarnation's sleepers and of those who are awake, in the background.

    Args:
        join: builds a group, given its name, this worker's rank in it, and its size; raises `FencedError` or `PeerLostError`.
        rank, size: of this worker's replica, in the incarnation.

    Attributes:
        members: the replicas that train the step under way, and that hold the state of the boundary after it. The first of them
            decides on checkpoints; who wakes is the last, so that this one goes on to.
    """

    def __init__(self, join: Callable[[str, int, int], FencedGroup], rank: int, size: int) -> None:
        self._join, self._rank = join, rank
        self._everybody = tuple(range(size))
        self.members = self._everybody
        self._lock = threading.Lock()
        self._asleep: frozenset[int] = frozenset()
        self._groups: list[FencedGroup | None] = []
        self._apart: Apart | None = None
        self._served = False  # whether all have joined these: the same on every rank

    def begin(self, asleep: frozenset[int], step: int) -> None:
        """From this step on, these sleep. The groups for who slept last time are there, if all have come to use them."""
        if not self._served:
            self.leave()
        awake = [rank for rank in self._everybody if rank not in asleep]
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

    def part(self, sleep: Sleep, *, busy: bool = False) -> bool:
        """A step begins. Returns whether this worker has no part in it. Tells `sleep` whether it has joined.

        Args:
            busy: a checkpoint is under way, which is to come to its end in the hands in which it is.
        """
        with self._lock:
            if self._apart is None and len(self._groups) == 2:
                self._apart = Apart(*self._groups)
        self._served |= sleep.apart
        ready = self._apart is not None and sleep.asleep == self._asleep
        sleep.joined = ready and not busy
        sleep.ready = sleep.ready + 1 if ready and not sleep.apart else 0
        if sleep.apart:
            self.members = tuple(rank for rank in self.members if rank not in sleep.asleep)
        return self._rank not in self.members

    def connect(self, links: Links) -> Links:
        """The connections of the step that begins."""
        if self._apart is None or len(self.members) == len(self._everybody):
            return links
        self._apart.reassure()
        assert self._apart.group is not None
        return replace(links, group=self._apart.group)

    def ends(self, sleep: Sleep, commit: Commit, *, last: bool) -> bool:
        """Whether all come together after this step, perhaps the `last` one: others than before sleep from here on, or training
        stops."""
        return len(self.members) < len(self._everybody) and (not sleep.apart or commit.stop or last)

    def gather(self, replica: Replica, commit: Commit) -> None:
        """All come together.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a message failed.
        """
        assert self._apart is not None
        self._come_back(replica.state.tail.sleep)
        self._apart.wake(replica, commit)

    def _come_back(self, sleep: Sleep) -> None:
        sleep.apart = False
        self.members = (*self.members, *(rank for rank in self._everybody if rank not in self.members))

    def doze(self, replica: Replica) -> Woken:
        """For who has no part in the steps of others, until all come together. Raises as `Apart.doze` does."""
        assert self._apart is not None
        woken = self._apart.doze(replica)
        self._come_back(replica.state.tail.sleep)
        return woken

    def leave(self) -> None:
        """These groups are not used any more."""
        with self._lock:
            groups, self._groups = self._groups, []
            self._asleep, self._apart = frozenset(), None
        for group in groups:
            process_group.leave(group)
