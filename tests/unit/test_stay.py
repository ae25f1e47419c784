"""What goes to another process while it is copied: torch moves its memory, and frees what it had."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.training import stay as module
from raytrain_ft.training.layout import share
from raytrain_ft.training.snapshot import Copy
from raytrain_ft.training.stay import Stay

NUMBERS = 24 * 1024
"""Enough not to be copied at once."""


class Slow(SharedMemory):
    """Memory that is had when it is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Event()

    def reserve(self, size: int) -> memoryview:
        assert self.allowed.wait(60)
        return super().reserve(size)


@pytest.fixture
def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((NUMBERS,), float(number))) for number in range(40)]


def copied(weights: list[nn.Parameter], meanwhile: Callable[[Slow, Copy], object]) -> tuple[Copy, Tensor]:
    """What comes of a copy during which this happens."""
    memory = Slow()
    with Stay() as stay:
        copy = Copy(share([(f"w{n}", p) for n, p in enumerate(weights)], 0, 1), memory, lambda _: None, stay=stay)
        copy.start()
    try:
        meanwhile(memory, copy)
    finally:
        memory.allowed.set()
    copy.wait(lambda: None, 60)
    copy.join(60)
    found = torch.frombuffer(memory.view, dtype=torch.float32).clone()
    memory.close()
    return copy, found


def test_what_goes_to_another_process_waits_for_the_copy(weights: list[nn.Parameter]) -> None:
    moving = threading.Thread(target=lambda: [p.share_memory_() for p in weights], daemon=True)

    def move(memory: Slow, copy: Copy) -> None:
        moving.start()
        moving.join(0.3)
        assert moving.is_alive()
        assert not any(p.is_shared() for p in weights)

    copy, found = copied(weights, move)
    moving.join(60)
    assert copy.error is None
    assert found.tolist() == torch.cat(list(weights)).tolist()
    assert all(p.is_shared() for p in weights)


def test_a_copy_waits_for_what_moves_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread puts it into a queue, say."""
    began, may_end = threading.Event(), threading.Event()

    def move() -> None:  # as torch does
        lock = threading.RLock()
        with lock:
            with module._lock:
                module._moving[1] = lock
            began.set()
            may_end.wait(60)
            with module._lock:
                del module._moving[1]

    moving = threading.Thread(target=move)
    moving.start()
    began.wait(60)
    since = time.monotonic()
    threading.Timer(0.3, may_end.set).start()
    with Stay() as stay:
        assert time.monotonic() - since > 0.2
        assert module._lock.locked()
        assert not module._moving
        stay.end()
    assert not module._lock.locked()
    moving.join(60)

    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_moving", {1: SimpleNamespace(acquire=lambda timeout: time.sleep(timeout))})
    with Stay() as stay:  # who moves it does not come to an end: a checkpoint does not hang with it
        assert not module._lock.locked()
    stay.end()


def test_copies_of_two_runs_keep_all_in_place_together() -> None:
    """Neither waits for the other, and what is left of them when one has ended stays."""
    with Stay() as one, Stay() as other:
        one.end()
        one.end()
        assert module._lock.locked()
        other.end()
        assert not module._lock.locked()


def test_after_an_error_everything_may_move(weights: list[nn.Parameter]) -> None:
    with pytest.raises(KeyError), Stay():
        raise KeyError("no copy was begun")
    weights[0].share_memory_()
    assert weights[0].is_shared()


def in_child() -> None:
    moved = torch.ones(16)  # few: a process that was forked has no other threads, and torch might wait for them
    moved.share_memory_()
    assert moved.is_shared()


def test_a_process_that_was_forked_meanwhile_waits_for_nobody(weights: list[nn.Parameter]) -> None:
    """The workers of a DataLoader move all that they send."""

    def fork(memory: Slow, copy: Copy) -> None:
        child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert module._lock.locked(), "it is kept here"

    copy, _ = copied(weights, fork)
    assert copy.error is None
    with module._lock:  # torch holds it itself for a moment, or a copy is just ending
        child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 0


def test_what_got_other_memory_is_named(weights: list[nn.Parameter]) -> None:
    """Memory that was freed holds anything by then."""
    copy, _ = copied(weights, lambda memory, copy: weights[7].untyped_storage().resize_(40 * NUMBERS))
    assert "w7 got other memory while being copied" in str(copy.error)


def test_without_the_lock_of_torch_a_copy_is_made_nevertheless(
    weights: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module._lock is not None, "this version of torch has it"
    monkeypatch.setattr(module, "_lock", None)

    def move(memory: Slow, copy: Any) -> None:
        weights[3].share_memory_()

    copy, _ = copied(weights, move)
    assert "w3 got other memory" in str(copy.error)
