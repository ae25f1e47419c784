"""Two real replicas in one process, of which one or both are told to sleep, or that are interrupted meanwhile."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sleepers import SAMPLING, Task, one_generator_each
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import FencedError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.training import mending
from raytrain_ft.training import step as steps
from raytrain_ft.training import tail as tails
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.step import Replica


@pytest.fixture(autouse=True)
def _one_generator_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one_generator_each(monkeypatch)


class Gated(nn.Module):
    """Has a part that only some samples need."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.often(x) + (self.seldom(x) if float(x.max()) > 100 else 0.0)


class Seldom(Task):
    """The second half of the first batch needs that part, which is rank 1's share, and no other does."""

    def model(self, stage: int) -> nn.Module:
        return Gated()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, weight_decay=0.5)

    def dataset(self) -> TensorDataset:
        inputs, targets = super().dataset().tensors
        inputs[2:4] += 1000.0
        return TensorDataset(inputs, targets)


class Sum:
    """A reduction under way: complete once both have come."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.done = threading.Event()

    def add(self, part: Tensor) -> None:
        self.parts.append(part)
        if len(self.parts) == 2:
            total = self.parts[0] + self.parts[1]
            for each in self.parts:
                each.copy_(total)
            self.done.set()

    def wait(self) -> bool:
        assert self.done.wait(10)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    succeeded = is_completed


class Pair:
    """Two replicas that train together, each on a thread."""

    def __init__(self, task: type[ft.TrainTask] = Task, **settings: Any) -> None:
        self._lock, self._sums, self._begun = threading.Lock(), dict[int, Sum](), [0, 0]
        self.replicas: list[Replica] = []
        self.links: list[Links] = []
        for rank in range(2):
            made = StepSettings(bucket_bytes=1, first_bucket_bytes=1, seats=2, **settings)
            self.replicas.append(build_replica(task(), SAMPLING, made, use_gpu=False, undo_mode="exact", probe=None))
            fence = Fence(1)
            self.links.append(Links(fence, rank, 2, Side(self, rank, fence)))  # pyright: ignore[reportArgumentType]
            self.replicas[rank].loader.start(Position(), rank, 2)

    def start(self, rank: int, tensor: Tensor) -> Sum:
        with self._lock:
            work = self._sums.setdefault(self._begun[rank], Sum())
            self._begun[rank] += 1
            work.add(tensor)
            return work

    def train(self, count: int) -> list[Commit]:
        """So many steps; what rank 0 committed."""
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self._train, rank, count) for rank in range(2)]
            found = [each.result(30) for each in both]
        return found[0]

    def _train(self, rank: int, count: int) -> list[Commit]:
        replica, found = self.replicas[rank], []
        for _ in range(count):
            found.append(replica.train_step(self.links[rank]))
            if found[-1].reads_change:
                replica.loader.start(replica.state.position, rank, 2, weights=replica.state.tail.sleep.weights(2))
        return found

    def ask(self, rank: int, asleep: bool, *, at_once: bool = False) -> None:
        sleep = self.replicas[rank].state.tail.sleep
        sleep.at_once, sleep.wanted = at_once, asleep
        for replica in self.replicas:
            waking = replica.state.tail.sleep.waking
            (waking.discard if asleep else waking.add)(rank)

    @property
    def equal(self) -> bool:
        return self.replicas[0].state.digests() == self.replicas[1].state.digests()


class Side:
    """The group as one of the two sees it."""

    def __init__(self, pair: Pair, rank: int, fence: Fence) -> None:
        self._pair, self._rank, self.fence = pair, rank, fence

    def all_reduce(self, tensor: Tensor, silent: Collection[int] = (), said: int = 0) -> Sum:
        self.fence.check()
        if self._rank in silent:
            assert not tensor[: len(tensor) - said].any(), "it would not have been sent"
        return self._pair.start(self._rank, tensor)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for replica in made.replicas:
        replica.loader.stop()


def count_of(replica: Replica) -> int:
    model: Any = replica.state.model
    return int(model[1].num_batches_tracked)


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_large_buffers_come_to_the_same_bits_in_a_sum_of_their_own(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both awake, one asleep, and one that falls silent in the midst of a step."""
    found = []
    for large in (1, 2**16):
        monkeypatch.setattr(tails, "LARGE", large)
        pair = Pair(update=update)
        pair.train(2)
        pair.ask(1, True, at_once=True)
        pair.train(3)
        pair.ask(1, False)
        pair.train(2)
        assert pair.equal
        assert [replica.state.buckets[-1].more is not None for replica in pair.replicas] == [large == 1] * 2
        found.append(pair.replicas[0].state.digests())
        for replica in pair.replicas:
            replica.loader.stop()
    assert found[0] == found[1]


@pytest.mark.parametrize("sleeper", [0, 1])
def test_who_is_awake_counts(pair: Pair, sleeper: int) -> None:
    """Counters go on, whoever sleeps, rank 0 too."""
    pair.train(2)
    pair.ask(sleeper, True)
    pair.train(4)
    assert pair.replicas[0].state.tail.sleep.asleep == {sleeper}
    assert [count_of(replica) for replica in pair.replicas] == [6, 6]
    pair.ask(sleeper, False)
    pair.train(2)
    assert [count_of(replica) for replica in pair.replicas] == [8, 8]
    assert pair.equal


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_sleeper_wakes_after_the_step_in_which_it_is_asked(pair: Pair, monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    """Although it has sent its last bucket by then: the other one says it."""
    pair.ask(sleeper, True)
    pair.train(2)
    sent, other = pair._begun[sleeper], pair.replicas[1 - sleeper]
    forward = other.forward_backward

    def ask_late() -> None:
        deadline = time.monotonic() + 10
        while pair._begun[sleeper] < sent + len(other.state.buckets) and time.monotonic() < deadline:
            time.sleep(0.001)
        pair.ask(sleeper, False)
        forward()

    monkeypatch.setattr(other, "forward_backward", ask_late)
    pair.train(1)
    assert pair._begun[sleeper] == sent + len(other.state.buckets)
    assert [replica.state.tail.sleep.asleep for replica in pair.replicas] == [frozenset()] * 2
    monkeypatch.setattr(other, "forward_backward", forward)
    pair.train(2)
    assert pair.equal


def test_a_sleeper_wakes_though_nobody_else_heard_of_it(pair: Pair) -> None:
    """The word to who speaks for it was lost: it says so itself, with the next step."""
    pair.ask(1, True)
    pair.train(2)
    pair.replicas[1].state.tail.sleep.wanted = False
    pair.train(1)
    assert [replica.state.tail.sleep.asleep for replica in pair.replicas] == [frozenset()] * 2
    pair.train(2)
    assert pair.equal


def test_what_only_a_silent_replica_used_was_used_by_nobody() -> None:
    """An update with a gradient of zero is another than none: it decays weights."""
    pair = Pair(Seldom)
    try:
        pair.ask(1, True, at_once=True)
        (commit,) = pair.train(1)
        assert commit.lost
        assert pair.equal
        pair.ask(1, False)
        pair.train(3)
        assert pair.equal
    finally:
        for replica in pair.replicas:
            replica.loader.stop()


class Plain(Task):
    """Without anything that depends on who computes what."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def inputs(self, batch: Any) -> Any:
        return batch[0]


@pytest.mark.parametrize("at_once", [False, True], ids=["asleep", "silent"])
def test_the_mean_is_over_the_samples_that_are_there(at_once: bool) -> None:
    """As one process would take it with plain torch: of whole batches while rank 1 sleeps, for rank 0 computes its samples,
    too; and of rank 0's share in the one step in which rank 1 falls silent."""
    pair = Pair(Plain)
    task = Plain()
    data, alone = task.dataset(), copy.deepcopy(pair.replicas[0].state.model)
    optimizer = task.optimizer(alone.parameters())
    try:
        pair.ask(1, True, at_once=at_once)
        pair.train(5)
        for step in range(5):
            used = slice(4 * step, 4 * step + (2 if at_once and step == 0 else 4))
            optimizer.zero_grad()
            task.loss(alone(data.tensors[0][used]), (None, data.tensors[1][used])).backward()
            optimizer.step()
        assert pair.replicas[0].state.tail.sleep.asleep == {1}
        assert pair.equal
        for mine, theirs in zip(pair.replicas[0].state.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    finally:
        for replica in pair.replicas:
            replica.loader.stop()


class Half(Plain):
    """Of the first batch, what rank 1 reads is not a number."""

    def dataset(self) -> TensorDataset:
        inputs, targets = super().dataset().tensors
        inputs[2:4] = torch.nan
        return TensorDataset(inputs, targets)


def test_what_a_silent_replica_gave_before_is_looked_at_although_its_loss_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls silent after its first bucket: the loss is that of the others, and finite."""
    pair = Pair(Half, on_non_finite="skip")
    try:
        before = pair.replicas[0].state.digests()
        silent, sleep = pair.replicas[1].reducer._is_silent, pair.replicas[1].state.tail.sleep

        def from_the_second_on(bucket: int) -> bool:
            if bucket == 1:
                pair.ask(1, True, at_once=True)
            return silent(bucket)

        monkeypatch.setattr(pair.replicas[1].reducer, "_is_silent", from_the_second_on)
        (commit,) = pair.train(1)
        assert (commit.lost, commit.why, math.isfinite(commit.loss)) == (((0, 4),), steps.NOT_FINITE, True)
        assert [replica.state.model.state_dict()["0.weight"].isfinite().all() for replica in pair.replicas] == [True] * 2
        assert sleep.asleep == {1}, "it sleeps from here on"
        assert pair.train(2)[-1].lost == ()
        assert pair.equal
        assert pair.replicas[0].state.digests() != before
    finally:
        for replica in pair.replicas:
            replica.loader.stop()


@pytest.mark.parametrize("first", ["both at once", "one after the other"])
def test_nobody_is_left(pair: Pair, first: str) -> None:
    """The step has no gradients: it is left out, and then all take part, as they would if all had been told to sleep."""
    pair.train(2)
    if first == "one after the other":
        pair.ask(0, True)
        pair.train(2)
        pair.ask(1, True, at_once=True)
    else:
        for rank in range(2):
            pair.ask(rank, True, at_once=True)
    before = [p.detach().clone() for p in pair.replicas[0].state.model.parameters()]
    loss = pair.replicas[0].state.loss
    (commit,) = pair.train(1)
    assert commit.loss == loss != 0, "nobody has seen another one, and a schedule may go by it"
    assert commit.lost == ((commit.attempt.batch.start, commit.attempt.batch.stop),)
    assert commit.why == steps.NOTHING_LEFT
    assert [replica.lost for replica in pair.replicas] == [(commit.attempt.step, commit.lost)] * 2, "for survivors to hear of"
    assert all(torch.equal(p, old) for p, old in zip(pair.replicas[0].state.model.parameters(), before, strict=True))
    assert [after.lost for after in pair.train(3)] == [()] * 3
    assert not pair.replicas[0].state.tail.sleep.asleep
    assert pair.equal


def test_what_is_lost_is_made_up_for_once() -> None:
    """Also when the update was interrupted just before it began."""
    digests = []
    for interrupted in (False, True):
        pair = Pair()
        pair.train(2)
        for replica in pair.replicas:
            replica.checkpointer = Copying()  # pyright: ignore[reportAttributeAccessIssue]
        pair.ask(1, True, at_once=True)
        if interrupted:
            with ThreadPoolExecutor(2) as pool:
                other = pool.submit(pair._train, 1, 1)
                with pytest.raises(FencedError):
                    until_update(pair, pool)
                other.result(30)
            pair.replicas[0].update()  # what a recovery does with what is reduced
            pair.replicas[0].commit()
        else:
            pair.train(1)
        assert pair.equal
        digests.append(pair.replicas[0].state.digests())
        for replica in pair.replicas:
            replica.loader.stop()
    assert digests[0] == digests[1]


def test_what_a_silent_replica_did_not_live_to_say_is_made_up_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fell silent, and died before the last bucket was reduced, in whose tail it would have said so. The survivor reduces
    this one alone; in the others it has the sums to which the dead one gave nothing."""
    replica, start = pair.replicas[0], pair.start

    def breaks_off(rank: int, tensor: Tensor) -> Sum:
        if pair._begun[rank] == len(replica.state.buckets) - 1:
            raise PeerLostError("a collective failed")
        return start(rank, tensor)

    monkeypatch.setattr(pair, "start", breaks_off)
    pair.ask(1, True, at_once=True)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(pair._train, rank, 1) for rank in range(2)]:
            with pytest.raises(PeerLostError):
                each.result(30)
    replica.reducer.abandon()
    own = [p.grad.clone() for p in replica.state.model.parameters() if p.grad is not None]
    last = len(replica.state.buckets) - 1
    assert [bucket.gradient for bucket in replica.state.buckets] == [0] * last + [None]
    replica.lost = (0, ((2, 4),))
    alone: Any = Solo(pair.links[0].fence)
    mending.reduce_alone(replica, [last], alone, leads=True)
    replica.update()
    assert replica.commit().lost == ((2, 4),)
    grads = [p.grad for p in replica.state.model.parameters() if p.grad is not None]
    for grad, mine in zip(grads, own, strict=True):
        torch.testing.assert_close(grad, 2 * mine)


def until_update(pair: Pair, pool: ThreadPoolExecutor) -> None:
    """Rank 0 comes as far as to the wait for its snapshot, and no further."""
    replica = pair.replicas[0]
    wait = replica._await_copy

    def fenced() -> None:
        replica._await_copy = wait  # type: ignore[method-assign]
        raise FencedError("the incarnation is over")

    replica._await_copy = fenced  # type: ignore[method-assign]
    pool.submit(pair._train, 0, 1).result(30)


class Copying:
    """In the place of a checkpointer: nothing is due."""

    asked = keeps_epochs = False

    def await_copy(self, check: Callable[[], None]) -> None:
        check()

    def updated(self, seconds: float) -> None: ...
    def stepped(self, step: int, seconds: float) -> None: ...
    def wants(self, step: int) -> bool:
        return False


@pytest.mark.parametrize(("ready", "asked", "begins"), [(0, False, True), (3, False, False), (3, True, True)])
def test_what_is_due_is_put_off_while_replicas_are_about_to_part(pair: Pair, ready: int, asked: bool, begins: bool) -> None:
    """With a checkpoint in every step, one would always be under way. What somebody asked for is not put off."""
    for replica in pair.replicas:
        replica.checkpointer = Due(asked)  # pyright: ignore[reportAttributeAccessIssue]
        replica.state.tail.sleep.ready = ready
    (commit,) = pair.train(1)
    assert commit.checkpoint is begins


class Due(Copying):
    """One is due in every step."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked

    def wants(self, step: int) -> bool:
        return True


def test_inputs_that_are_drawn_are_a_function_of_the_step() -> None:
    digests = []
    for disturbed in (False, True):
        pair = Pair()
        pair.train(2)
        if disturbed:
            torch.rand(7)  # as whatever happened since the last step
        pair.train(2)
        digests.append(pair.replicas[0].state.digests())
        for replica in pair.replicas:
            replica.loader.stop()
    assert digests[0] == digests[1]


def test_a_look_for_something_ends_with_the_incarnation() -> None:
    fence, never = Fence(3), threading.Event()
    assert not fence.came(never, 0.01)
    threading.Timer(0.05, fence.trip).start()
    began = time.monotonic()
    with pytest.raises(FencedError):
        fence.came(never, 60)
    assert time.monotonic() - began < 30
    with pytest.raises(FencedError):
        fence.came(never, 60)
