"""Groups that are left give back their threads and sockets once nothing in them is under way, whoever is gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raytrain_ft.errors import FencedError
from raytrain_ft.training import process_group
from raytrain_ft.training.exchange import MOST_BYTES, Exchange
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.fenced_work import FencedWork
from raytrain_ft.training.process_group import FencedGroup

TIMEOUT = timedelta(seconds=20)


def groups(incarnation: int, size: int = 2) -> list[FencedGroup]:
    """Both ends of one world, in this process."""
    store, fences, found = HashStore(), [Fence(incarnation) for _ in range(size)], {}

    def join(rank: int) -> None:
        about = {"host": "127.0.0.1", "timeout": TIMEOUT, "default": False}
        found[rank] = process_group.build(store, rank, size, fences[rank], **about)  # pyright: ignore

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT.total_seconds())
    return [found[rank] for rank in range(size)]


def reduce(group: FencedGroup, size: int = 1000) -> FencedWork:
    return group.start("allreduce", [torch.ones(size)])


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.02)


def test_worlds_that_come_and_go_hold_nothing() -> None:
    before = 0, 0
    for incarnation in range(30):
        world = groups(incarnation)
        for work in [reduce(group) for group in world]:
            work.wait()
        for group in world:
            process_group.abandon(group)
        if incarnation == 4:  # what torch itself makes once is there
            until(lambda: not process_group._abandoned)
            time.sleep(0.3)
            before = held()
    until(lambda: held()[0] <= before[0] + 2 and held()[1] <= before[1] + 4)


def test_who_waits_for_a_peer_that_is_gone_is_left_and_released_too() -> None:
    settled = 0, 0
    for incarnation in range(8):
        mine, other = groups(incarnation)
        work = reduce(mine)  # the other never takes part
        process_group.abandon(mine)
        assert mine in process_group._abandoned, "gloo may still write into its buffer"
        process_group.abandon(other)  # nothing is under way in it, so its sockets close, and what waits for it fails
        until(work.is_completed)
        assert not work.succeeded()
        if incarnation == 2:
            settled = held()
    process_group.leave(None)
    assert process_group._abandoned == []
    until(lambda: held()[0] <= settled[0] + 6 and held()[1] <= settled[1] + 10)


def test_who_waited_when_the_fence_came_leaves_a_group_that_is_not_quiet() -> None:
    """The fence wakes the wait, but gloo is still at work: destroying the group now would take until the peer has gone."""
    mine, other = groups(0)
    work = reduce(mine)  # the other never takes part
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except FencedError as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: bool(mine.fence._waiters))
    process_group.abandon(mine)
    waiter.join(5)
    assert len(ended) == 1
    assert not work.is_completed()
    assert mine in process_group._abandoned
    process_group.abandon(other)
    until(work.is_completed)
    process_group.leave(None)
    assert process_group._abandoned == []


def test_what_was_posted_and_never_comes_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "WAIT_DEADLINE", timedelta(seconds=1))
    before = 0, 0
    for incarnation in range(6):
        mine, other = groups(incarnation)
        wanted = mine.post_receive(torch.empty(10), 1, 77)
        sent = other.post_send(torch.ones(5_000_000), 0, 99)  # nobody takes it
        waiter = threading.Thread(target=wait_for, args=(wanted,))
        waiter.start()
        for group in (mine, other):
            process_group.abandon(group)
            assert group in process_group._abandoned
        del wanted, sent
        waiter.join(5)
        time.sleep(0.2)
        process_group.leave(None)
        assert process_group._abandoned == []
        if incarnation == 2:
            before = held()
    until(lambda: held()[0] <= before[0] + 1 and held()[1] <= before[1] + 2)


def neighbours(incarnation: int) -> tuple[list[FencedGroup], list[threading.Thread]]:
    """A world in which each waits for something from both others, and a thread of each that waits."""
    world = groups(incarnation, 3)
    waited = [group.post_receive(torch.empty(10), peer, 77) for group in world for peer in range(3) if peer != group.getRank()]
    waiters = [threading.Thread(target=wait_for, args=(work,), daemon=True) for work in waited]
    for waiter in waiters:
        waiter.start()
    return world, waiters


@pytest.mark.parametrize("leavers", [3, 2], ids=["all", "all but one, which is frozen"])
def test_neighbours_that_wait_for_each_other_hold_no_more_than_one_world_that_is_over(leavers: int) -> None:
    before, frozen = (0, 0), []
    for incarnation in range(12):
        world, waiters = neighbours(incarnation)
        for group in world[:leavers]:
            process_group.abandon(group)
            assert group in process_group._abandoned, "others may not have left it yet"
        frozen += world[leavers:]
        assert {group.fence.incarnation for group in process_group._abandoned} == {incarnation}
        if incarnation == 4:
            before = held()
        del waiters
    kept = len(frozen[5:])  # who is frozen is in this process too, with what is its own: three threads, four files
    until(lambda: held()[0] <= before[0] + 2 + 3 * kept and held()[1] <= before[1] + 2 + 4 * kept)
    for waiter in waiters_of_the_end(leavers):
        waiter.join(5)
        assert not waiter.is_alive()


def waiters_of_the_end(leavers: int) -> list[threading.Thread]:
    """Those of a world that is left, and of the one after it."""
    world, waiters = neighbours(100)
    later = groups(101)
    for group in (*world[:leavers], *later):
        process_group.abandon(group)
    return waiters


ASKED = """
import sys, threading
from collections import Counter
from datetime import timedelta
from torch._C._distributed_c10d import Store
from raytrain_ft.training import process_group
from raytrain_ft.training.fence import Fence

held, changed, asked = {}, threading.Condition(), Counter()

class Counting(Store):
    def set(self, key, value):
        asked["set"] += 1
        with changed:
            held[key] = value.encode() if isinstance(value, str) else bytes(value)
            changed.notify_all()

    def multi_get(self, keys):
        asked["multi_get"] += 1
        with changed:
            assert changed.wait_for(lambda: all(key in held for key in keys), 20)
            return [held[key] for key in keys]

    def get(self, key):
        asked["get"] += 1
        return self.multi_get([key])[0]

    def wait(self, keys, timeout=None):
        asked["wait"] += 1
        self.multi_get(keys)

    def has_extended_api(self):
        return True

def join(rank):
    about = {"host": "127.0.0.1", "timeout": timedelta(seconds=20), "default": False}
    built.append(process_group.build(stores[rank], rank, 8, Fence(1), **about))

stores, built = [Counting() for _ in range(8)], []
ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(8)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join(30)
print(len(built), sorted(asked.items()), flush=True)
import os; os._exit(0)
"""


def test_each_rank_asks_for_the_addresses_of_all_others_at_once() -> None:
    """Not for each of them: the supervisor answers all of these questions, one after the other, in every recovery."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.strip() == "8 [('multi_get', 8), ('set', 8)]", done.stderr


def test_what_was_sent_arrives_although_its_sender_has_left() -> None:
    mine, other = groups(0)
    sent = [mine.post_send(torch.full((3_000_000,), 7.0), 1, tag) for tag in (77, 78)]
    process_group.abandon(mine)
    found = [torch.empty(3_000_000) for _ in sent]
    for tag, tensor in zip((77, 78), found, strict=True):
        other.post_receive(tensor, 0, tag).wait(timedelta(seconds=10))
        assert bool((tensor == 7).all())
    process_group.abandon(other)


def wait_for(work: Any) -> None:
    with suppress(RuntimeError):
        work.wait(process_group.WAIT_DEADLINE)


@pytest.mark.parametrize("size", [1, 5, MOST_BYTES // 8, MOST_BYTES // 8 + 1])
def test_every_rank_has_the_same_sum(size: int) -> None:
    """Small tensors are exchanged, and added in the order of ranks; of larger ones a ring makes the sum."""
    world = groups(1, 3)
    parts = [torch.randn(size) * 10.0**rank for rank in range(3)]
    sums = [part.clone() for part in parts]
    works = [group.all_reduce(own) for group, own in zip(world, sums, strict=True)]
    is_exchanged = size <= MOST_BYTES // 8
    assert all(isinstance(work, Exchange) == is_exchanged for work in works)
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.succeeded()
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    in_order = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(sums[0], in_order)
    assert not is_exchanged or torch.equal(sums[0], in_order)
    for group in world:
        process_group.abandon(group)


@pytest.mark.parametrize("silent", [{0}, {1}, {0, 2}])
@pytest.mark.parametrize("said", [0, 3])
def test_zeros_need_not_travel(silent: set[int], said: int) -> None:
    """The sum is the same; what a silent rank has before the elements that it says is not sent, or the sum would show it."""
    world = groups(1, 3)
    parts = [torch.randn(50) * 10.0**rank for rank in range(3)]
    want = torch.zeros(50)
    for rank in sorted(range(3), key=lambda rank: rank in silent):
        here = slice(50 - said if rank in silent else 0, 50)
        want[here] += parts[rank][here]
    works = [group.all_reduce(own, silent, said) for group, own in zip(world, parts, strict=True)]
    for work, own in zip(works, parts, strict=True):
        work.wait()
        assert torch.equal(own, want)
    for group in world:
        process_group.abandon(group)


def test_what_a_message_is_written_to_lives_as_long_as_the_message() -> None:
    """gloo knows the address alone; torch keeps the tensor for it."""
    mine, other = groups(0)
    wanted = torch.empty(10)
    kept = weakref.ref(wanted)
    work = mine.start("recv", [wanted], 1, 77)
    process_group.abandon(mine)
    del wanted
    gc.collect()
    assert kept() is not None
    process_group.abandon(other)
    until(work.is_completed)
    process_group.leave(None)
    assert process_group._abandoned == []
    del work, mine
    until(lambda: kept() is None)


def test_memory_is_used_again_once_nothing_reads_or_writes_it() -> None:
    world = groups(1)
    tensors = [torch.arange(50.0), torch.ones(50)]
    places: list[set[int]] = []
    for _ in range(3):
        works = [group.all_reduce(own) for group, own in zip(world, tensors, strict=True)]
        under_way = [group.all_reduce(own.clone()) for group, own in zip(world, tensors, strict=True)]
        places.append({work._parts[1].data_ptr() for work in (works[0], under_way[0])})  # pyright: ignore
        for work in (*works, *under_way):
            work.wait()
    assert [len(each) for each in places] == [2, 2, 2], "two that are under way have memory each"
    assert places[0] == places[1] == places[2]
    assert torch.equal(tensors[0], 4 * (torch.arange(50.0) + 1))
    for group in world:
        process_group.abandon(group)


@pytest.mark.parametrize("size", [1, 7, MOST_BYTES])
def test_every_rank_has_what_all_have(size: int) -> None:
    world = groups(1, 3)
    parts = [torch.full((size,), rank, dtype=torch.uint8) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda group, own: group.all_gather(own), world, parts))
    assert all(torch.equal(each, torch.stack(parts)) for each in found)
    for group in world:
        process_group.abandon(group)


def test_without_a_peer_there_is_no_sum_and_what_was_there_stays() -> None:
    mine, second, third = groups(1, 3)
    own = torch.arange(4.0)
    work = mine.all_reduce(own)
    second.all_reduce(torch.ones(4))
    process_group.abandon(third)  # it never takes part
    until(work.is_completed)
    assert not work.succeeded()
    with pytest.raises(PeerLostError):
        work.wait()
    assert own.tolist() == [0, 1, 2, 3]
    work = second.all_reduce(own)
    mine.fence.trip()
    second.fence.trip()
    with pytest.raises(FencedError):
        work.wait()
    assert own.tolist() == [0, 1, 2, 3]
    for group in (mine, second):
        process_group.abandon(group)


def test_a_sum_that_is_there_counts_after_the_fence_and_is_made_once() -> None:
    world = groups(1)
    sums = [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    works = [group.all_reduce(own) for group, own in zip(world, sums, strict=True)]
    until(lambda: all(work.is_completed() for work in works))
    for group in world:
        group.fence.trip()
    assert all(work.succeeded() and work.succeeded() for work in works)
    assert [own.tolist() for own in sums] == [[5.0] * 3] * 2
    for group in world:
        process_group.abandon(group)


class OnDevice:
    """A group as NCCL's: a work's future is there as soon as it is queued, its end is that of a kernel, and only `abort` breaks
    off what is under way. `wait` would hold the thread up, or the stream."""

    def __init__(self) -> None:
        self.ended = self.waited = self.aborted = False
        self.result = torch.futures.Future()
        self.joined: list[torch.device] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future()
        future.set_result(None)
        return future

    def get_future_result(self) -> torch.futures.Future:
        return self.result

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.joined.append(device)

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> bool:
        assert self.ended, "the thread waits, where no fence can wake it"
        self.waited = True
        return True

    def abort(self) -> None:
        self.ended = self.aborted = True  # the kernel is gone, and what it should have written is not there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """What a world with GPUs is built around here."""
    inner = OnDevice()
    options = type("Options", (), {})
    made = type("ProcessGroupNCCL", (), {"Options": options, "__new__": lambda *_: inner})
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # torch's own choice: it ends the process
    return inner


def on_device() -> FencedGroup:
    about = {"host": "127.0.0.1", "timeout": TIMEOUT, "default": False}
    return process_group.build(HashStore(), 0, 1, Fence(1), use_gpu=True, **about)  # pyright: ignore


def test_on_a_gpu_the_end_of_the_kernel_counts_and_not_the_future(device: OnDevice) -> None:
    group = on_device()
    assert group.inner is device, "use_gpu builds NCCL's group"
    assert device.joined == [torch.device("cuda", 3)], "it has come together before anything is reduced"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    work = group.all_reduce(torch.ones(1))  # however small, it is not exchanged
    assert isinstance(work, FencedWork)
    assert not work.is_completed()
    with pytest.raises(PeerLostError, match="not finished"):
        work.wait(timedelta(milliseconds=10))
    assert not device.waited
    device.ended = True
    assert work.wait()
    assert device.waited, "what is computed next must come after it in the stream"
    assert work.succeeded()
    device.result.set_result(0)  # this comes later
    assert work.succeeded()


def test_on_a_gpu_what_went_wrong_is_no_result(device: OnDevice) -> None:
    work = on_device().all_reduce(torch.ones(1))
    device.ended = True
    device.result.set_result(1)
    with pytest.raises(PeerLostError, match="NCCL gave it up"):
        work.wait()
    assert not device.waited


def test_on_a_gpu_a_group_that_is_left_is_broken_off(device: OnDevice) -> None:
    group = on_device()
    work, ended = group.all_reduce(torch.ones(1)), []

    def wait() -> None:
        try:
            work.wait()
        except FencedError as error:
            ended.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    process_group.abandon(group)
    waiter.join(5)
    assert len(ended) == 1
    until(lambda: device.aborted)
    assert process_group._abandoned == []
    assert work.is_completed()
    assert not work.succeeded(), "it was broken off"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: NCCL itself is not tried")
def test_the_real_nccl_sums_and_its_group_can_be_left() -> None:
    """Alone in its world, for NCCL takes no two ranks on one GPU; behind a kernel that lasts."""
    group = on_device()
    own = torch.ones(1000, device="cuda")
    assert group.all_reduce(own).wait()
    assert own.tolist() == [1.0] * 1000
    torch.cuda._sleep(10**10)
    work = group.all_reduce(own)
    assert not work.is_completed()
    group.fence.trip()
    with pytest.raises(FencedError):
        work.wait()
    process_group.abandon(group)
    torch.cuda.synchronize()
    assert process_group._abandoned == []


class Ends:
    """A work, which ends when it is told to."""

    asked = 0

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended

    def is_completed(self) -> bool:
        Ends.asked += 1
        return self.ended


def test_works_that_have_ended_are_let_go_of_and_each_is_asked_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they began; or, if the first one does not end, once there are many others."""
    monkeypatch.setattr(process_group, "FencedWork", lambda work, *_, **__: work)
    (group,) = groups(1, 1)
    group.inner = SimpleNamespace(barrier=lambda **how: Ends(**how))
    kept: Any = group._works  # pyright: ignore[reportPrivateUsage]
    Ends.asked = 0
    running = [group.start("barrier", ended=False) for _ in range(50)]
    assert Ends.asked < 100
    for work in running:
        work.ended = True  # type: ignore[attr-defined]
    first = group.start("barrier", ended=False)
    assert list(kept) == [first]
    Ends.asked = 0
    for _ in range(1000):
        group.start("barrier", ended=True)
    kept = group._works  # pyright: ignore[reportPrivateUsage]
    assert kept[0] is first
    assert len(kept) <= process_group.CROWD + 1
    assert Ends.asked < 4000
    assert not group.is_quiet()
    first.ended = True  # type: ignore[attr-defined]
    assert group.is_quiet()
    group.start("barrier", ended=True)
    assert len(group._works) == 1  # pyright: ignore[reportPrivateUsage]
