"""Real replicas and gloo groups in one process: while some sleep, the others train without them, and no result shows it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from sleepers import Task, one_generator_each
from torch import nn
from torch._C._distributed_c10d import HashStore

import raytrain_ft as ft
from raytrain_ft.errors import FencedError
from raytrain_ft.policy.reconcile import reconcile
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.runtime import recovery
from raytrain_ft.training import apart, process_group
from raytrain_ft.training.apart import Parting, Woken
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.links import Links, data_parallel
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.sleep import JOINED, MOST_READY, Sleep
from raytrain_ft.training.step import Replica

TIMEOUT = timedelta(seconds=20)
SAMPLING = Sampling(32, 16, seed=0, shuffle=False)


@pytest.fixture(autouse=True)
def _one_generator_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one_generator_each(monkeypatch)


class Crew:
    """So many replicas that train together, each on a thread, as workers do.

    Args:
        parts: whether they join other groups while some of them sleep.
        task: what they train.
    """

    def __init__(self, size: int, *, parts: bool = True, task: ft.TrainTask | None = None, **settings: Any) -> None:
        self.size = size
        self._parts = parts
        self._lock, self._stores = threading.Lock(), defaultdict[str, HashStore](HashStore)
        self.fences = [Fence(1) for _ in range(size)]
        made = StepSettings(bucket_bytes=1, first_bucket_bytes=1, seats=size, **settings)
        self.replicas = [
            build_replica(task or Task(), SAMPLING, made, use_gpu=False, undo_mode="exact", probe=None) for _ in range(size)
        ]
        with ThreadPoolExecutor(size) as pool:
            self.worlds = list(pool.map(lambda rank: self._join(rank, "", rank, size), range(size)))
        self.links: list[Links] = [data_parallel(world) for world in self.worlds]
        self.partings = [Parting(partial(self._join, rank), rank, size) for rank in range(size)]
        self._pool, self.training = ThreadPoolExecutor(size), dict[int, Future[list[Commit | Woken]]]()
        self.target, self.dozing = 0, set[int]()
        for rank, replica in enumerate(self.replicas):
            replica.loader.start(Position(), rank, size)
            replica.state.filled = True

    def _join(self, owner: int, name: str, rank: int, size: int) -> FencedGroup:
        with self._lock:
            store = self._stores[name]
        fence = self.fences[owner]
        return process_group.build(store, rank, size, fence, host="127.0.0.1", timeout=TIMEOUT, default=False)

    def train(self, count: int) -> None:
        """So many steps of all who do not sleep."""
        self.train_all(count)

    def train_all(self, count: int) -> list[list[Commit | Woken]]:
        """So many steps; what each of them committed, or woke up to. Who does nothing at the end of these is left alone."""
        self.begin(count)
        deadline = time.monotonic() + 30
        while not self.done:
            assert time.monotonic() < deadline, {rank: each.done() for rank, each in self.training.items()}
            time.sleep(0.001)
        return [[] if rank in self.dozing else self.training[rank].result() for rank in range(self.size)]

    @property
    def done(self) -> bool:
        """Whether all have come as far as they will."""
        ended = [rank for rank, each in self.training.items() if each.done()]
        for rank in ended:
            if self.training[rank].exception() is not None:
                self.trip()
                self.training[rank].result()
        parted = [self.replicas[rank].state.tail.sleep.apart for rank in ended]
        return len(ended) == self.size or (any(parted) and len(ended) + len(self.dozing) == self.size)

    def begin(self, count: int) -> None:
        self.target = self.step + count
        for rank in range(self.size):
            if rank not in self.dozing:
                self.training[rank] = self._pool.submit(self.steps, rank)

    def steps(self, rank: int) -> list[Commit | Woken]:
        replica, parting, found = self.replicas[rank], self.partings[rank], []
        sleep = replica.state.tail.sleep
        while replica.state.step < self.target:
            if parting.part(sleep):
                self.dozing.add(rank)
                found.append(parting.doze(replica))
                self.dozing.discard(rank)
            else:
                commit = replica.train_step(parting.connect(self.links[rank]))
                found.append(commit)
                if parting.ends(sleep, commit, last=False):
                    parting.gather(replica, commit)
            if found[-1].reads_change:
                replica.loader.start(replica.state.position, rank, self.size, weights=sleep.weights(self.size))
                if self._parts and not sleep.apart:
                    parting.begin(sleep.asleep, replica.state.step)
        return found

    def ask(self, ranks: set[int], asleep: bool) -> None:
        for rank in ranks:
            self.replicas[rank].state.tail.sleep.wanted = asleep
            for replica in self.replicas:
                waking = replica.state.tail.sleep.waking
                (waking.discard if asleep else waking.add)(rank)

    def part(self, ranks: set[int]) -> None:
        """These fall asleep, and all train on until the others reduce without them."""
        self.ask(ranks, True)
        deadline = time.monotonic() + 20
        while not (self.apart and self.asleep == ranks):
            assert time.monotonic() < deadline
            self.train(1)

    @property
    def apart(self) -> bool:
        found = {replica.state.tail.sleep.apart for replica in self.replicas}
        assert len(found) == 1, "some are in other groups than others"
        return found.pop()

    @property
    def awake(self) -> list[Replica]:
        """Who is up to date."""
        return [replica for rank, replica in enumerate(self.replicas) if not self.apart or rank not in self.asleep]

    @property
    def asleep(self) -> set[int]:
        (found,) = {replica.state.tail.sleep.asleep for replica in self.replicas}
        return set(found)

    @property
    def step(self) -> int:
        (found,) = {replica.state.step for replica in self.awake}
        return found

    @property
    def digest(self) -> str:
        (found,) = {replica.state.final_digest() for replica in self.awake}
        return found

    def trip(self) -> None:
        for fence in self.fences:
            fence.trip()

    def close(self) -> None:
        self.trip()
        self._pool.shutdown()
        for replica, parting, world in zip(self.replicas, self.partings, self.worlds, strict=True):
            replica.abandon()
            replica.loader.stop()
            parting.leave()
            process_group.leave(world)


@contextmanager
def crew_of(size: int, **settings: Any) -> Iterator[Crew]:
    made = Crew(size, **settings)
    try:
        yield made
    finally:
        made.close()


def started(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the rank of each collective that begins in the group of all."""
    found: list[int] = []
    for rank, world in enumerate(crew.worlds):
        start = world.start

        def noted(*args: Any, rank: int = rank, start: Callable[..., Any] = start) -> Any:
            found.append(rank)
            return start(*args)

        monkeypatch.setattr(world, "start", noted)
    return found


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
@pytest.mark.parametrize("sleepers", [{3}, {0, 2}], ids=["the last", "two, with the first"])
def test_nobody_sees_in_the_result_who_reduces_with_whom(
    monkeypatch: pytest.MonkeyPatch, sleepers: set[int], update: Any
) -> None:
    with crew_of(4, update=update) as crew:
        crew.train(2)
        crew.part(sleepers)
        assert crew.asleep == sleepers
        together, before = started(crew, monkeypatch), [crew.replicas[rank].state.digests() for rank in sleepers]
        crew.train(3)
        assert together == []
        assert crew.dozing == sleepers
        assert [crew.replicas[rank].state.digests() for rank in sleepers] == before, "nothing reached them"
        crew.ask(sleepers, False)
        crew.train(3)
        counts = {int(replica.state.model[1].num_batches_tracked) for replica in crew.replicas}  # type: ignore[index]
        assert counts == {crew.step}
        assert (crew.asleep, crew.apart, len(crew.awake)) == (set(), False, 4)
        found, steps = crew.digest, crew.step
    with crew_of(4, update=update, parts=False) as other:
        other.train(2)
        other.ask(sleepers, True)
        other.train(steps - 5)
        other.ask(sleepers, False)
        other.train(3)
        assert not other.apart
        assert other.digest == found


def test_a_sleeper_wakes_from_one_step_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew_of(3) as crew:
        crew.part({2})
        crew.ask({2}, False)
        crew.train(1)
        assert (crew.asleep, crew.apart) == (set(), False)
        assert crew.digest
        together = started(crew, monkeypatch)
        crew.train(2)
        assert set(together) == {0, 1, 2}
        joins: list[Any] = []
        monkeypatch.setattr(Parting, "_join_all", lambda *about: joins.append(about))
        crew.ask({2}, True)
        crew.train(1)
        assert (crew.asleep, crew.apart) == ({2}, False)
        crew.train(1)
        assert (crew.asleep, crew.apart) == ({2}, True)
        assert joins == [], "the groups are there"
        crew.train(2)
        crew.ask({2}, False)
        crew.train(1)
        assert crew.digest


def test_a_sleeper_that_nobody_wakes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "UNHEARD_S", 0.1)
    monkeypatch.setattr(apart, "LOOK_S", 0.01)
    with crew_of(3) as crew:
        crew.part({2})
        crew.train(2)
        crew.replicas[2].state.tail.sleep.wanted = False
        with pytest.raises(PeerLostError, match="did not hear of it"):
            crew.training[2].result(30)
        assert not crew.replicas[2].state.filled


def test_sleepers_are_told_from_time_to_time_that_they_sleep_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "REASSURE_S", 0.0)
    with crew_of(4) as crew:
        crew.part({2, 3})
        leads, words = crew.partings[0]._apart, list[int]()
        assert leads is not None
        broadcast = leads._broadcast
        monkeypatch.setattr(leads, "_broadcast", lambda message: words.append(len(message)) or broadcast(message))
        crew.train(5)
        assert words == [1] * 5
        assert crew.dozing == {2, 3}
        crew.ask({2, 3}, False)
        crew.train(2)
        assert crew.digest


def test_what_is_agreed_upon_reaches_the_sleepers() -> None:
    """A stop, and a checkpoint, which who leads the others decides on."""
    with crew_of(3) as crew:
        crew.part({0})
        tail = crew.replicas[1].state.tail
        fill = tail.fill

        def wants_one(*args: Any, **kwargs: Any) -> None:
            tail.checkpoint_wanted = True
            fill(*args, **kwargs)

        tail.fill = wants_one  # type: ignore[method-assign]
        tail.stop_requested = True
        assert [(one.stop, one.checkpoint) for one in crew.train_all(1)[1]] == [(True, True)]
        assert [(one.stop, one.checkpoint) for one in crew.training[0].result(30)[-1:]] == [(True, True)]
        assert (crew.asleep, crew.apart) == ({0}, False)
        assert crew.digest


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
@pytest.mark.parametrize("during", ["training", "waking"])
def test_a_sleeper_holds_nothing_until_it_is_up_to_date(monkeypatch: pytest.MonkeyPatch, update: Any, during: str) -> None:
    """If the incarnation ends while it sleeps, or has a part of the state, the others go on from what they have."""
    with crew_of(4, update=update) as crew:
        crew.part({3})
        crew.train(1)
        step = crew.step
        if during == "waking":
            packs = iter([crew.replicas[0].state.pack] * 2)
            never = lambda _: crew.fences[0].wait(threading.Event(), TIMEOUT)  # noqa: E731
            monkeypatch.setattr(crew.replicas[0].state, "pack", lambda bucket: next(packs, never)(bucket))
            crew.ask({3}, False)
        else:
            monkeypatch.setattr(crew.replicas[1].loader, "next", lambda _: crew.fences[1].wait(threading.Event(), TIMEOUT))
        others = (0, 1, 2) if during == "waking" else (0, 2)
        places = [waiting(crew, rank, step + (during == "waking"), monkeypatch) for rank in others]
        crew.begin(2)
        marks = interrupted(crew, lambda: all(place() for place in places))
        assert marks[3] is None
        survivors = [mark for mark in marks if mark is not None]
        assert [mark.step for mark in survivors] == [step + (during == "waking")] * 3
        assert reconcile(survivors, whole_update=update == "barrier").step == step + (during == "waking")


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_who_falls_behind_as_the_others_part_from_it_holds_nothing(monkeypatch: pytest.MonkeyPatch, update: Any) -> None:
    """It has said that it has joined, and stands still before it hears what the others said."""
    with crew_of(3, update=update) as crew:
        crew.ask({2}, True)
        late, others, fence = crew.replicas[2], crew.replicas[:2], crew.fences[2]
        sleep, wait = late.state.tail.sleep, fence.wait

        def others_have_parted() -> bool:
            step = late.state.step
            return all(
                other.state.tail.sleep.apart or (other.state.tail.sleep.joined and other.state.step == step) for other in others
            )

        def wait_or_stand_still(done: threading.Event, timeout: Any) -> None:
            deadline = time.monotonic() + 1.0
            while sleep.joined and not sleep.apart and time.monotonic() < deadline:
                if others_have_parted():
                    wait(threading.Event(), TIMEOUT)
                time.sleep(0.001)
            wait(done, timeout)

        monkeypatch.setattr(fence, "wait", wait_or_stand_still)
        crew.begin(1000)
        marks = interrupted(crew, lambda: min(other.state.step for other in others) >= late.state.step + 3)
        assert marks[2] is None
        survivors = [mark for mark in marks if mark is not None]
        assert abs(survivors[0].step - survivors[1].step) <= 1
        assert reconcile(survivors, whole_update=update == "barrier").step >= survivors[0].step - 1


def interrupted(crew: Crew, until: Callable[[], bool]) -> list[Any]:
    """Trains until that is so; then every incarnation ends. What each of them is left with."""
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline, {rank: each.done() for rank, each in crew.training.items()}
        time.sleep(0.001)
    crew.trip()
    found = []
    for rank, replica in enumerate(crew.replicas):
        with pytest.raises(FencedError):
            crew.training[rank].result(30)
        replica.abandon()
        found.append(recovery.marks(f"w{rank}", replica))
    return found


def waiting(crew: Crew, rank: int, step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether that one waits for others, in this step."""
    places: list[tuple[int, str]] = []
    monkeypatch.setattr(crew.replicas[rank], "_probe", lambda phase, at, _: places.append((at, phase)))
    return lambda: bool(places) and places[-1] == (step, "wait")


@pytest.mark.parametrize("can", [True, False])
def test_what_a_schedule_keeps_decides_whether_sleepers_can_be_brought_up_to_date(can: bool) -> None:
    class Schedule:
        def state_dict(self) -> dict[str, Any]:
            return {"rate": torch.ones(3) if can else object()}

    with crew_of(1) as crew:
        crew.replicas[0].state.scheduler = Schedule()
        assert apart.can_be_sent(crew.replicas[0]) == can


def test_where_the_groups_cannot_be_joined_all_stay_together_and_try_again_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with crew_of(3) as crew:
        failed = [threading.Event() for _ in range(3)]

        def fails(rank: int, *_: Any) -> FencedGroup:
            failed[rank].set()
            raise PeerLostError("no route")

        with monkeypatch.context() as broken:
            for rank, parting in enumerate(crew.partings):
                broken.setattr(parting, "_join", partial(fails, rank))
            crew.ask({2}, True)
            deadline = time.monotonic() + 20
            while not all(each.is_set() for each in failed):
                assert time.monotonic() < deadline
                crew.train(1)
            crew.train(5)
            assert (crew.asleep, crew.apart) == ({2}, False)
            crew.ask({2}, False)
            crew.train(2)
        crew.part({2})
        assert crew.digest


def test_others_fall_asleep_meanwhile() -> None:
    """The groups for who slept before are left in the midst of training."""
    with crew_of(4) as crew:
        crew.part({3})
        crew.part({3, 0})
        assert crew.asleep == {0, 3}
        crew.ask({3}, False)
        crew.train(1)
        assert (crew.asleep, crew.apart) == ({0}, False)
        crew.part({0})
        crew.ask({0}, False)
        crew.train(2)
        assert crew.asleep == set()
        assert crew.digest


def test_who_leads_the_others_falls_silent_in_the_midst_of_a_step() -> None:
    with crew_of(4) as crew:
        crew.part({3})
        step = crew.step
        crew.replicas[0].state.tail.sleep.at_once = True
        crew.ask({0}, True)
        commits = [commit for found in crew.train_all(1)[:3] for commit in found if isinstance(commit, Commit)]
        (lost,) = {commit.lost for commit in commits}
        ids = commits[0].attempt.ids
        assert sum(stop - start for start, stop in lost) == sum(map(len, ids)) > 0
        assert (crew.step, crew.asleep) == (step + 1, {0, 3})
        crew.part({0, 3})
        assert crew.digest


def test_one_alone_does_not_part_from_who_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew_of(2) as crew:
        joins: list[Any] = []
        monkeypatch.setattr(Parting, "_join_all", lambda *about: joins.append(about))
        crew.ask({1}, True)
        crew.train(5)
        assert (crew.asleep, crew.apart, joins) == ({1}, False, [])


def test_groups_that_come_too_late_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others sleep by then."""
    left: list[Any] = []
    monkeypatch.setattr(process_group, "leave", left.append)
    go_on = {"awake-5/": threading.Event(), "awake-7/": threading.Event()}

    def join(name: str, rank: int, size: int) -> Any:
        if name in go_on:
            assert go_on[name].wait(10)
        return f"{name} {rank} of {size}"

    parting = Parting(join, 0, 4)
    parting.begin(frozenset({3}), 5)
    parting.begin(frozenset({2}), 7)
    go_on["awake-7/"].set()
    deadline = time.monotonic() + 10
    while len(parting._groups) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    go_on["awake-5/"].set()
    while len(left) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert left == ["awake-5/ 0 of 3"]
    assert parting._groups == ["awake-7/ 0 of 3", "followers-7/ 0 of 2"]
    parting.leave()
    assert left[1:] == ["awake-7/ 0 of 3", "followers-7/ 0 of 2"]
    assert parting._groups == []


class Linear(Task):
    """Takes batches of one."""

    def model(self, stage: int) -> nn.Module:
        return nn.Linear(3, 1)


def test_who_is_left_out_at_once_is_so_though_others_are_to_read_otherwise() -> None:
    """What one that fell silent has lost is read again, so all begin to read anew at the boundary at which they part."""
    with crew_of(4, task=Linear(), returns_lost=True) as crew:
        crew.ask({3}, True)
        crew.train(1)
        deadline = time.monotonic() + 20
        while not all(parting._apart or len(parting._groups) == 2 for parting in crew.partings):  # in a step they may part
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not crew.apart
        sleep = crew.replicas[1].state.tail.sleep
        sleep.wanted = sleep.at_once = True

        def once(bucket: int) -> bool:
            """Falls silent in this step, and does not sleep after it."""
            silent = sleep.is_silent(bucket)
            sleep.wanted = False
            return silent

        crew.replicas[1].reducer._is_silent = once
        commits = crew.train_all(1)
        assert [one.returned for one in commits[0] if isinstance(one, Commit)] == [True]
        assert (crew.asleep, crew.apart) == ({3}, True)
        crew.train(3)
        assert crew.dozing == {3}
        crew.ask({3}, False)
        crew.train(1)
        assert crew.digest
        assert len({replica.state.position for replica in crew.replicas}) == 1


def test_what_was_lost_as_a_sleeper_woke_is_known_to_it() -> None:
    with crew_of(4) as crew:
        crew.part({3})
        crew.replicas[1].state.tail.sleep.at_once = True
        crew.ask({1}, True)
        crew.train(1)
        assert not crew.apart
        (lost,) = {replica.lost for replica in crew.replicas}
        assert lost is not None
        assert lost[0] == crew.step - 1


def test_that_a_step_was_not_finite_is_known_to_who_woke() -> None:
    """Who has not yet ended that step may copy it, and others may be lost meanwhile."""
    with crew_of(4) as crew:
        crew.part({3})
        for replica in crew.replicas[:3]:
            replica.not_finite = 0
        crew.ask({3}, False)
        crew.train(1)
        assert not crew.apart
        assert [replica.not_finite for replica in crew.replicas] == [0] * 4


def test_who_decides_on_checkpoints_goes_on_to_when_the_first_wakes() -> None:
    with crew_of(3) as crew:
        crew.part({0})
        crew.train(1)
        assert {parting.members for parting in crew.partings} == {(1, 2)}
        crew.ask({0}, False)
        crew.train(1)
        assert {parting.members for parting in crew.partings} == {(1, 2, 0)}
        crew.part({2})
        crew.train(1)
        assert {parting.members for parting in crew.partings} == {(1, 0)}


def test_nobody_parts_while_a_checkpoint_is_under_way() -> None:
    sleep, parting = Sleep(), Parting(lambda *_: None, 0, 3)  # type: ignore[arg-type, return-value]
    parting._groups, parting._asleep, sleep.asleep = [None, None], frozenset({2}), frozenset({2})
    parting.part(sleep, busy=True)
    assert not sleep.joined
    parting.part(sleep)
    assert sleep.joined
    said = [JOINED, JOINED, 1 | JOINED]
    sleep.settle(said, checkpoint=True)
    assert not sleep.apart
    sleep.settle(said)
    assert sleep.apart
    sleep.settle([JOINED, JOINED, 1], checkpoint=True)
    assert sleep.apart, "those who are awake write this one"


def test_who_is_ready_to_part_waits_for_checkpoints_for_so_long_only() -> None:
    """Another one may never be."""
    sleep, parting = Sleep(), Parting(lambda *_: None, 0, 3)  # type: ignore[arg-type, return-value]
    sleep.asleep = frozenset({2})
    parting.part(sleep, busy=True)
    assert not sleep.parts_soon, "it has not joined"
    parting._groups, parting._asleep = [None, None], frozenset({2})
    found = []
    for _ in range(MOST_READY + 2):
        parting.part(sleep, busy=True)
        found.append(sleep.parts_soon)
    assert found == [True] * MOST_READY + [False] * 2
    sleep.begin()
    assert not sleep.parts_soon


def test_that_all_have_joined_counts_for_who_slept_when_they_said_so() -> None:
    sleep = Sleep()
    sleep.settle([0, 0, 1])
    assert (sleep.asleep, sleep.apart) == ({2}, False)
    sleep.settle([JOINED, JOINED, 1 | JOINED])
    assert sleep.apart
    sleep.settle([JOINED, 1 | JOINED, 1 | JOINED])
    assert (sleep.asleep, sleep.apart) == ({1, 2}, False)
