"""Real replicas and gloo groups in one process: while some sleep, the others reduce among themselves, and nobody notices."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sleepers import Task, one_generator_each
from torch._C._distributed_c10d import HashStore

from raytrain_ft.errors import FencedError
from raytrain_ft.policy.reconcile import reconcile
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.runtime import recovery
from raytrain_ft.training import process_group
from raytrain_ft.training.apart import Parting
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.links import Links, data_parallel
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.sleep import JOINED, Sleep

TIMEOUT = timedelta(seconds=20)
SAMPLING = Sampling(32, 16, seed=0, shuffle=False)


@pytest.fixture(autouse=True)
def _one_generator_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one_generator_each(monkeypatch)


class Crew:
    """So many replicas that train together, each on a thread, as workers do.

    Args:
        parts: whether they join other groups while some of them sleep.
    """

    def __init__(self, size: int, *, parts: bool = True, **settings: Any) -> None:
        self.size = size
        self._parts = parts
        self._lock, self._stores = threading.Lock(), defaultdict[str, HashStore](HashStore)
        self.fences = [Fence(1) for _ in range(size)]
        made = StepSettings(bucket_bytes=1, first_bucket_bytes=1, seats=size, **settings)
        self.replicas = [
            build_replica(Task(), SAMPLING, made, use_gpu=False, undo_mode="exact", probe=None) for _ in range(size)
        ]
        with ThreadPoolExecutor(size) as pool:
            self.worlds = list(pool.map(lambda rank: self._join(rank, "", rank, size), range(size)))
        self.links: list[Links] = [data_parallel(world) for world in self.worlds]
        self.partings = [
            Parting(partial(self._join, rank), rank, size, replica.state.buckets) for rank, replica in enumerate(self.replicas)
        ]
        for rank, replica in enumerate(self.replicas):
            replica.loader.start(Position(), rank, size)
            replica.state.filled = True

    def _join(self, owner: int, name: str, rank: int, size: int) -> FencedGroup:
        with self._lock:
            store = self._stores[name]
        fence = self.fences[owner]
        return process_group.build(store, rank, size, fence, host="127.0.0.1", timeout=TIMEOUT, default=False)

    def train(self, count: int) -> list[Commit]:
        """So many steps of all; what rank 0 committed."""
        return self.train_all(count)[0]

    def train_all(self, count: int) -> list[list[Commit]]:
        """What each of them committed."""
        with self.pool() as pool:
            return [each.result(60) for each in [pool.submit(self.steps, rank, count) for rank in range(self.size)]]

    @contextmanager
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """A thread for each. If anything goes wrong, nobody waits for the others any longer."""
        with ThreadPoolExecutor(self.size) as pool:
            try:
                yield pool
            except BaseException:
                for fence in self.fences:
                    fence.trip()
                raise

    def steps(self, rank: int, count: int) -> list[Commit]:
        replica, parting, found = self.replicas[rank], self.partings[rank], []
        sleep = replica.state.tail.sleep
        for _ in range(count):
            found.append(replica.train_step(parting.connect(self.links[rank], sleep)))
            if found[-1].reads_change:
                replica.loader.start(replica.state.position, rank, self.size, weights=sleep.weights(self.size))
                if self._parts:
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
    def asleep(self) -> set[int]:
        (found,) = {replica.state.tail.sleep.asleep for replica in self.replicas}
        return set(found)

    @property
    def step(self) -> int:
        (found,) = {replica.state.step for replica in self.replicas}
        return found

    @property
    def digests(self) -> tuple[str, ...]:
        (found,) = {replica.state.digests() for replica in self.replicas}
        return found

    def close(self) -> None:
        for fence in self.fences:
            fence.trip()
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
        together = started(crew, monkeypatch)
        crew.train(3)
        assert together == []
        counts = {int(replica.state.model[1].num_batches_tracked) for replica in crew.replicas}  # type: ignore[index]
        assert counts == {crew.step}
        found, steps = crew.digests, crew.step
    with crew_of(4, update=update, parts=False) as other:
        other.train(2)
        other.ask(sleepers, True)
        other.train(steps - 2)
        assert not other.apart
        assert other.digests == found


@pytest.mark.parametrize("heard", [True, False], ids=["who leads hears of it", "it says so itself"])
def test_a_sleeper_wakes_from_one_step_to_the_next(monkeypatch: pytest.MonkeyPatch, heard: bool) -> None:
    with crew_of(3) as crew:
        crew.part({2})
        if heard:
            crew.ask({2}, False)
        else:
            crew.replicas[2].state.tail.sleep.wanted = False
        crew.train(1)
        assert (crew.asleep, crew.apart) == (set(), False)
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
        assert crew.digests


def test_what_a_sleeper_says_besides_reaches_all() -> None:
    """A stop that it was asked for, and a checkpoint, which rank 0 decides on."""
    with crew_of(3) as crew:
        crew.part({0})
        tail = crew.replicas[0].state.tail
        fill = tail.fill

        def wants_one(*args: Any, **kwargs: Any) -> None:
            tail.checkpoint_wanted = True
            fill(*args, **kwargs)

        tail.fill = wants_one  # type: ignore[method-assign]
        tail.stop_requested = True
        assert [(commit.stop, commit.checkpoint) for (commit,) in crew.train_all(1)] == [(True, True)] * 3


def hold(monkeypatch: pytest.MonkeyPatch, crew: Crew, rank: int, owner: Any, method: str) -> None:
    """That one comes as far as to this method, and no further until its incarnation is over."""
    monkeypatch.setattr(owner, method, lambda *_: crew.fences[rank].wait(threading.Event(), TIMEOUT))


def interrupt(crew: Crew, steps: int, until: Callable[[], bool]) -> list[Any]:
    """Trains until that is so; then every incarnation ends. What each of them is left with."""
    with crew.pool() as pool:
        under_way = [pool.submit(crew.steps, rank, steps) for rank in range(crew.size)]
        deadline = time.monotonic() + 20
        while not until():
            assert time.monotonic() < deadline, [each for each in under_way if each.done()]
            time.sleep(0.001)
        for fence in crew.fences:
            fence.trip()
        for each in under_way:
            with pytest.raises(FencedError):
                each.result(30)
    found = []
    for rank, replica in enumerate(crew.replicas):
        replica.abandon()
        found.append(recovery.marks(f"w{rank}", replica))
    return found


def waiting(crew: Crew, rank: int, step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether that one waits for others, in this step."""
    places: list[tuple[int, str]] = []
    monkeypatch.setattr(crew.replicas[rank], "_probe", lambda phase, at, _: places.append((at, phase)))
    return lambda: bool(places) and places[-1] == (step, "wait")


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_there_is_no_sum_of_a_step_that_a_sleeper_is_not_in(monkeypatch: pytest.MonkeyPatch, update: Any) -> None:
    """It has committed the step before, and comes no further: the others are in the next, and have computed all of it."""
    with crew_of(4, update=update) as crew:
        crew.part({3})
        step = crew.step
        hold(monkeypatch, crew, 3, crew.replicas[3].loader, "next")
        marks = interrupt(crew, 1, waiting(crew, 0, step, monkeypatch))
        assert {(mark.step, mark.versions) for mark in marks} == {(step, (step,) * len(marks[0].versions))}
        assert all(step not in mark.gradients for mark in marks)
        assert reconcile(marks, whole_update=update == "barrier").step == step


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_a_sleeper_that_lacks_the_sums_of_a_step_is_one_step_behind_at_most(
    monkeypatch: pytest.MonkeyPatch, update: Any
) -> None:
    with crew_of(4, update=update) as crew:
        crew.part({3})
        step = crew.step
        hold(monkeypatch, crew, 3, crew.replicas[3], "_let_others_go_first")
        ahead = [waiting(crew, rank, step + 1, monkeypatch) for rank in range(3)]
        marks = interrupt(crew, 9, lambda: all(each() for each in ahead))
        assert [mark.step for mark in marks] == [step + 1] * 3 + [step]
        plan = reconcile(marks, whole_update=update == "barrier")
        assert (plan.step, plan.completes) == (step + 1, True)


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
        assert crew.digests


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
        assert crew.digests


def test_who_leads_the_others_falls_silent_in_the_midst_of_a_step() -> None:
    with crew_of(4) as crew:
        crew.part({3})
        step = crew.step
        crew.replicas[0].state.tail.sleep.at_once = True
        crew.ask({0}, True)
        commits = [commit for (commit,) in crew.train_all(1)]
        (lost,) = {commit.lost for commit in commits}
        ids = commits[0].attempt.ids
        assert sum(stop - start for start, stop in lost) == sum(map(len, ids)) > 0
        assert (crew.step, crew.asleep) == (step + 1, {0, 3})
        crew.part({0, 3})
        assert crew.digests


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

    parting = Parting(join, 0, 4, ())
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


def test_that_all_have_joined_counts_for_who_slept_when_they_said_so() -> None:
    sleep = Sleep()
    sleep.settle([0, 0, 1])
    assert (sleep.asleep, sleep.apart) == ({2}, False)
    sleep.settle([JOINED, JOINED, 1 | JOINED])
    assert sleep.apart
    sleep.settle([JOINED, 1 | JOINED, 1 | JOINED])
    assert (sleep.asleep, sleep.apart) == ({1, 2}, False)
