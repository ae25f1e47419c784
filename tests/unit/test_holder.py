"""Snapshots in memory, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.runtime import holder
from raytrain_ft.storage.job import Job
from raytrain_ft.storage.manifest import Name
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.shard import Piece

PIECES = [Piece("w", "torch.uint8", (4,), 0, 4)]


def test_a_snapshot_may_take_as_long_as_an_exchange_of_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = ["w", "torch.uint8", [4], 0, 4]
    asked: list[float] = []

    def get(what: Any, timeout: float) -> Any:
        asked.append(timeout)
        return [np.zeros(4, np.uint8)] if isinstance(what, list) else what

    answer = {"values": {}, "size": 4}, [([piece], "reference")]
    actor = SimpleNamespace(get=SimpleNamespace(remote=lambda name: answer))
    monkeypatch.setattr(holder, "holder_of", lambda spec: actor)
    monkeypatch.setattr(holder, "ray", SimpleNamespace(get=get))
    spec: Any = SimpleNamespace(rules=SimpleNamespace(phase_timeout=900.0))
    assert list(holder.load(spec, Name(5, 0, 1)).pieces) == ["w"]
    assert asked[-1] == 900.0


def test_a_snapshot_whose_world_is_over_holds_up_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 is answered when all parts are there, and that of a worker that was lost never comes."""
    late = threading.Event()

    def get(what: Any, timeout: float) -> int:
        late.wait(timeout)
        return 4

    monkeypatch.setattr(holder, "holder_of", lambda spec: SimpleNamespace(put=SimpleNamespace(remote=lambda job, data: None)))
    monkeypatch.setattr(holder, "ray", SimpleNamespace(get=get))
    memory = SharedMemory()
    memory.reserve(4)
    persister = holder.HolderPersister(memory, cast(Any, None))
    about = {"place": Place("here"), "owner": "run", "epoch": 0, "incarnation": 1, "pieces": PIECES}
    job = Job(step=5, number=0, count=2, timeout_s=20.0, **about)
    waiting = persister.submit(job)
    persister.cancel(Name(4, 0, 1))
    assert not waiting.done(), "that was another"
    persister.cancel(job.name)
    assert waiting.result(timeout=5).error == f"{job.name}: the world that was writing it is over"
    late.set()
    again = persister.submit(replace(job, step=10))
    assert again.result(timeout=5).error is None
    assert waiting.result().error is not None, "a late answer counts for nothing"


def test_a_cancelled_snapshot_is_not_over_before_its_bytes_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told that it is over copies the next snapshot into the same memory."""
    begun, taken = threading.Event(), threading.Event()
    brought: list[bytes] = []

    def remote(job: Job, data: np.ndarray) -> None:
        begun.set()
        assert taken.wait(10)
        brought.append(data.tobytes())

    monkeypatch.setattr(holder, "holder_of", lambda spec: SimpleNamespace(put=SimpleNamespace(remote=remote)))
    monkeypatch.setattr(holder, "ray", SimpleNamespace(get=lambda what, timeout: 4))
    memory = SharedMemory()
    memory.reserve(4)[:] = b"ten!"
    persister = holder.HolderPersister(memory, cast(Any, None))
    about = {"place": Place("here"), "owner": "run", "epoch": 0, "incarnation": 1, "pieces": PIECES}
    job = Job(step=10, number=0, count=2, timeout_s=20.0, **about)
    waiting = persister.submit(job)
    assert begun.wait(10)
    persister.cancel(job.name)
    assert not waiting.done()
    taken.set()
    assert waiting.result(timeout=5).error == f"{job.name}: the world that was writing it is over"
    memory.reserve(4)[:] = b"next"
    assert brought == [b"ten!"]


def test_snapshots_that_broke_off_go_with_the_next_that_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before that stays, as it is asked for; of one that is newer, the parts are still to come."""
    monkeypatch.setattr(holder, "ray", SimpleNamespace(put=lambda data: data))
    kept = holder.Holder()
    about = {"place": Place("here"), "owner": "run", "epoch": 0, "incarnation": 1, "pieces": PIECES}

    async def put(step: int, *numbers: int) -> None:
        for number in numbers:
            await kept.put(Job(step=step, number=number, count=2, size=4, timeout_s=5.0, **about), np.zeros(4, np.uint8))

    async def live() -> None:
        await put(5, 1, 0)
        await put(10, 1)  # worker 0 is lost
        await put(20, 1)
        await put(15, 1, 0)  # after going back

    asyncio.run(live())
    assert sorted(name.step for name in kept._snapshots) == [5, 15, 20]


def test_a_world_that_is_over_brings_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be cut off from its supervisor, and not from here: a few more, and what the others go back to is forgotten."""
    monkeypatch.setattr(holder, "ray", SimpleNamespace(put=lambda data: data))
    kept = holder.Holder()
    about = {"place": Place("here"), "owner": "run", "epoch": 0, "pieces": PIECES, "number": 0, "count": 1, "size": 4}

    async def live() -> None:
        await kept.put(Job(step=5, incarnation=1, **about), np.zeros(4, np.uint8))
        assert [step for _, step, _, _ in await kept.found(2)] == [5]
        for step in (10, 15, 20):
            with pytest.raises(StorageError, match="the world that was writing it is over"):
                await kept.put(Job(step=step, incarnation=1, **about), np.zeros(4, np.uint8))
        await kept.put(Job(step=6, incarnation=2, **about), np.zeros(4, np.uint8))
        assert [step for _, step, _, _ in await kept.found(3)] == [6, 5]

    asyncio.run(live())


def test_one_that_becomes_whole_late_leaves_the_one_that_everybody_goes_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its world is over, so nobody may go back to it; without the other the run would begin anew."""
    monkeypatch.setattr(holder, "ray", SimpleNamespace(put=lambda data: data))
    kept = holder.Holder()
    about = {"place": Place("here"), "owner": "run", "epoch": 0, "incarnation": 1, "pieces": PIECES}

    async def live() -> None:
        for step in (5, 10):
            for number in (1, 0):
                await kept.put(Job(step=step, number=number, count=2, size=4, timeout_s=5.0, **about), np.zeros(4, np.uint8))
            assert (await kept.found(1))[0][1] == step
        assert await kept.get(str(Name(5, 0, 1))) is not None

    asyncio.run(live())
