"""State travels between real groups of one process: whole, from several sources at once, and nobody waits for each other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raytrain_ft.errors import FencedError
from raytrain_ft.policy.reconcile import Copy
from raytrain_ft.runtime.transfer import Transfer, waves
from raytrain_ft.training.process_group import FencedGroup, abandon
from tests.unit.test_process_group import groups, until

WORLD = ("a", "b", "c", "new", "newer")


def payload(bucket: int) -> Tensor:
    """Bytes that say which bucket they are of; each bucket has another size, one of them none."""
    return torch.full((bucket * 100_003,), bucket, dtype=torch.uint8)


def give(copy: Copy) -> Tensor:
    return payload(copy.bucket)


def begin(
    pool: ThreadPoolExecutor, world: list[FencedGroup], copies: list[Copy], probes: dict[str, Callable[[str], None]]
) -> dict[str, Future[list[tuple[int, Tensor]]]]:
    """Every member carries out its part, each on a thread of its own."""
    cpu = torch.device("cpu")
    members = {
        name: Transfer(group, WORLD, name, cpu, probes.get(name, lambda _: None))
        for name, group in zip(WORLD, world, strict=False)
    }
    return {name: pool.submit(member.copy, copies, give) for name, member in members.items()}


@given(st.lists(st.sampled_from("abc")))
def test_a_wave_has_each_source_once_and_is_cut_only_where_it_must_be(sources: list[str]) -> None:
    copies = [Copy(bucket, "state", source, ("new",)) for bucket, source in enumerate(sources)]
    found = list(waves(copies))
    assert [copy for wave in found for copy in wave] == copies
    assert all(len({copy.source for copy in wave}) == len(wave) > 0 for wave in found)
    for wave, after in itertools.pairwise(found):
        assert after[0].source in {copy.source for copy in wave}


def test_everybody_receives_what_is_meant_for_them_and_nothing_else() -> None:
    copies = [Copy(bucket, "state", "abc"[bucket % 3], ("new", "newer")) for bucket in range(8)]
    copies.append(Copy(8, "state", "a", ("b",)))
    copies.append(Copy(9, "state", "b", ("a",)))  # each of these two gives and takes
    world = groups(1, len(WORLD))
    with ThreadPoolExecutor(len(WORLD)) as pool:
        received = {name: found.result(30) for name, found in begin(pool, world, copies, {}).items()}
    for name in WORLD:
        assert [bucket for bucket, _ in received[name]] == [copy.bucket for copy in copies if name in copy.targets]
        assert all(torch.equal(tensor, payload(bucket)) for bucket, tensor in received[name])
    for group in world:
        abandon(group)


def test_who_is_slow_to_give_keeps_nobody_else_from_giving() -> None:
    copies = [Copy(1, "state", "a", ("new",)), Copy(2, "state", "b", ("new",)), Copy(3, "state", "c", ("new",))]
    world, go = groups(2, 4), threading.Event()
    under_way: list[tuple[int, Any]] = []
    receive = world[3].recv

    def watched(tensors: list[Tensor], peer: int, tag: int) -> Any:
        work = receive(tensors, peer, tag)
        if tensors[0].dtype == torch.uint8:  # the state itself, not how much it is
            under_way.append((peer, work))
        return work

    world[3].recv = watched
    with ThreadPoolExecutor(4) as pool:
        found = begin(pool, world, copies, {"a": lambda _: go.wait(30)})
        until(lambda: [peer for peer, work in under_way if work.is_completed()] == [1, 2])
        assert not found["new"].done()
        go.set()
        assert [bucket for bucket, _ in found["new"].result(30)] == [1, 2, 3]
    for group in world:
        abandon(group)


def test_the_fence_ends_a_wait_for_a_source_that_is_gone() -> None:
    world = groups(3, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = begin(pool, world[:1], [Copy(0, "state", "b", ("a",))], {})["a"]
        world[0].fence.trip()
        with pytest.raises(FencedError):
            waiting.result(30)
    for group in world:
        abandon(group)
