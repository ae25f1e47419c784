"""Groups that are left give back their threads and sockets once nothing in them is under way, whoever is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raytrain_ft.training import process_group
from raytrain_ft.training.fence import Fence
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


def reduce(group: FencedGroup, size: int = 1000) -> process_group.FencedWork:
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


def wait_for(work: Any) -> None:
    with suppress(RuntimeError):
        work.wait(process_group.WAIT_DEADLINE)
