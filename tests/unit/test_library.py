"""Which checkpoints a run begins from, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import RaySystemError
from store import save

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.policy import messages as m
from raytrain_ft.runtime import library as libraries
from raytrain_ft.runtime.library import Library
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.manifest import Manifest
from raytrain_ft.storage.retention import KEEP_ALL


def library_of(directory: Path, resume: str, run_id: str) -> Library:
    checkpoints = SimpleNamespace(place=Place(str(directory)), resume=resume)
    spec: Any = SimpleNamespace(checkpoints=checkpoints, run_id=run_id, rules=SimpleNamespace(strategy="auto"))
    return Library(spec)


def launched(directory: Path, resume: str, run_id: str, step: int | None = None) -> list[int]:
    """The steps that a launch may begin from; before it ends, or is lost, it stores one."""
    place, library = Place(str(directory)), library_of(directory, resume, run_id)

    async def live() -> list[int]:
        found = await library.open()
        if step is not None:
            about = {"owner": run_id, "epoch": library.epoch, "values": {"records": []}}
            await asyncio.to_thread(save, place, step, {"w": torch.zeros(3)}, **about)
        await library.close()
        return [stored.step for stored in found]

    return asyncio.run(live())


def test_who_has_lost_the_right_to_write_hears_of_it_and_loads_nothing_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another cluster, where the run's directory is another one: only the checkpoints' place is the same."""
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    assert launched(tmp_path, "auto", "a", step=5) == []
    library = library_of(tmp_path, "auto", "b")

    async def succeed(mine: lock.WriterLock) -> None:
        while True:  # once may be in the midst of a renewal, which would write over it
            lock._write(mine._storage, replace(mine.owner, owner="c", epoch=mine.owner.epoch + 1))
            await asyncio.sleep(0.01)

    async def live() -> None:
        assert [one.step for one in await library.open()] == [5]
        assert library._lock is not None
        about = {"owner": "c", "epoch": library.epoch + 1, "values": {"records": []}}
        successor = asyncio.create_task(succeed(library._lock))
        assert "c" in await asyncio.wait_for(library.until_lost(), 10)
        successor.cancel()
        await asyncio.to_thread(save, Place(str(tmp_path)), 1000, {"w": torch.zeros(3)}, **about)
        assert [one.step for one in library._stored()] == [5]

    asyncio.run(live())


def test_who_looks_what_there_is_to_go_back_to_ends_what_earlier_worlds_write(tmp_path: Path) -> None:
    library, told = library_of(tmp_path, "auto", "a"), asyncio.Queue[m.Event]()

    async def live() -> None:
        await library.open()
        library.find(4, 0, told.put_nowait)
        found = await asyncio.wait_for(told.get(), 30)
        assert (found.incarnation, found.error) == (4, "")
        owner = await asyncio.to_thread(lock.read_owner, LocalStorage(tmp_path))
        assert owner is not None
        assert owner.since == 4
        await library.close()

    asyncio.run(live())


def test_storage_that_can_only_be_read_now_is_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full, say. What cannot be said in it now is said with the next renewal."""
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    library, told = library_of(tmp_path, "auto", "a"), asyncio.Queue[m.Event]()
    write, full = lock._write, [True]

    def fail(*about: Any) -> None:
        if full:
            raise StorageError("no space left on device")
        write(*about)

    async def live() -> None:
        await library.open()
        about = {"owner": "a", "epoch": library.epoch, "values": {"records": []}}
        await asyncio.to_thread(save, Place(str(tmp_path)), 5, {"w": torch.zeros(3)}, **about)
        monkeypatch.setattr(lock, "_write", fail)
        library.find(4, 0, told.put_nowait)
        found = await asyncio.wait_for(told.get(), 30)
        assert [one.step for one in found.stored] == [5]
        full.clear()
        while (await asyncio.to_thread(lock.read_owner, LocalStorage(tmp_path))).since != 4:  # pyright: ignore
            await asyncio.sleep(0.05)
        await library.close()

    with pytest.warns(UserWarning, match="no space left"):
        asyncio.run(live())


def test_as_many_are_found_as_are_remembered_of_those_to_go_back_to(tmp_path: Path) -> None:
    """There may be thousands. But others that are newer, which cannot be loaded or were given up, hide none of them."""
    place, library = Place(str(tmp_path)), library_of(tmp_path, "auto", "a")

    async def live() -> None:
        assert await library.open() == ()
        about = {"owner": "a", "epoch": library.epoch, "values": {"records": []}, "keep": KEEP_ALL}
        for step in range(1, 46):
            await asyncio.to_thread(save, place, step, {"w": torch.zeros(3)}, **about)
        assert [one.step for one in library._stored()] == list(range(45, 29, -1))
        assert library.records.keys() == {one.name for one in library._stored()}
        assert {one.workers for one in library._stored()} == {1}
        library._counts = lambda stored: stored.step <= 25
        assert [one.step for one in library._stored()] == list(range(45, 9, -1))
        await library.close()

    asyncio.run(live())


@pytest.mark.parametrize(
    ("values", "loss"),
    [({"loss": (0.375).hex()}, 0.375), ({"loss": "nan"}, None), ({"loss": "half"}, None), ({"loss": 0.5}, None), ({}, None)],
)
def test_what_a_manifest_tells_of_the_loss(values: dict[str, Any], loss: float | None) -> None:
    """It comes from storage, so it may be anything; and another writer, such as checkfreq, tells of none."""
    manifest = Manifest(step=5, epoch=1, incarnation=1, shards=[], values=values)
    assert libraries._loss(manifest) == loss


def test_an_attempt_that_failed_leaves_no_second_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage fails between the right to write and the list of checkpoints, and all is tried again."""
    library = library_of(tmp_path, "auto", "a")
    stored, failures = library._stored, [StorageError("503")]

    def fails_at_first() -> Any:
        if failures:
            raise failures.pop()
        return stored()

    async def live() -> None:
        monkeypatch.setattr(library, "_stored", fails_at_first)
        with pytest.raises(StorageError, match="503"):
            await library.open()
        assert await library.open() == ()
        assert [thread.name for thread in threading.enumerate()].count("writer-lock") == 1
        await library.close()

    asyncio.run(live())


def test_what_was_abandoned_does_not_come_back(tmp_path: Path) -> None:
    """Not in the launch after the one that was told so, either, though that one may have stored nothing."""
    assert launched(tmp_path, "auto", "a", step=1000) == []
    assert launched(tmp_path, "auto", "b") == [1000]
    assert launched(tmp_path, "never", "c") == []
    assert launched(tmp_path, "auto", "d", step=5) == []
    assert launched(tmp_path, "auto", "e") == [5]


def with_holder(taken: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of a run with `strategy="snapshot"`, where Ray has these actors by name."""

    def start(name: str, get_if_exists: bool = False, **about: object) -> object:
        if name in taken and not get_if_exists:
            raise ValueError(f"the name {name} is taken")
        return taken.setdefault(name, object())

    def options(**about: Any) -> object:
        return SimpleNamespace(remote=lambda: start(**about))

    monkeypatch.setattr(libraries.ray, "remote", lambda kind: SimpleNamespace(options=options))
    monkeypatch.setattr(libraries.placement, "nodes", list)
    about = {"checkpoints": SimpleNamespace(), "rules": SimpleNamespace(strategy="snapshot"), "options": {}}
    spec: Any = SimpleNamespace(**about, member_name=lambda name: f"run:{name}")
    return Library(spec)


@pytest.mark.parametrize("error", [RaySystemError("failed to connect to GCS"), RuntimeError("no state"), ValueError("taken")])
def test_a_holder_that_ray_cannot_start_now_is_a_storage_that_is_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, or the run ends with a word of it, and its right to write is given up."""
    library, errors = with_holder({}, monkeypatch), [error]

    def nodes() -> list[dict[str, Any]]:
        if errors:
            raise errors.pop()
        return []

    monkeypatch.setattr(libraries.placement, "nodes", nodes)
    with pytest.raises(StorageError, match=f"the holder of snapshots cannot be started: .*{error}"):
        asyncio.run(library.open())
    assert asyncio.run(library.open()) == ()


def test_the_holder_of_the_supervisor_before_is_the_next_ones_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends it some time after the process that has started it. One's own that is out of reach is not let go of."""
    before = object()
    taken = {"run:holder": before}
    library = with_holder(taken, monkeypatch)
    assert asyncio.run(library.open()) == ()
    assert library._holder is before
    with pytest.raises(StorageError, match="run:holder is taken"):
        library._start_holder()
    assert library._holder is before
    taken.clear()
    library._start_holder()
    assert library._holder is taken["run:holder"]
