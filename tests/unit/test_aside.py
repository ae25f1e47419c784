"""A state that makes room for another one comes back to the bit, and is known to be lost if it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_file_system
from torch import nn

from raytrain_ft.training import aside
from raytrain_ft.training.fence import FencedError
from raytrain_ft.training.state import TrainingState


def trained(hidden: int = 4096) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, None, bucket_bytes=4096, first_bucket_bytes=1024)
    step(state)
    return state


def step(state: TrainingState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(8, 16)).square().sum().backward()
    state.optimizer.step()


def crowded(monkeypatch: pytest.MonkeyPatch, state: TrainingState) -> None:
    """There is room for one state more, which is not enough for a replica, and is once this state is away."""
    size = sum(region.size for region in aside.regions_of(state))
    monkeypatch.setattr(aside, "free_memory", lambda: size)


def never() -> None:
    """There is no fence."""


def test_it_comes_back_to_the_bit_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    state, other = trained(), trained()
    crowded(monkeypatch, state)
    before, told = state.digests(), []
    with aside.room_for_another(state, never, lambda size, seconds: told.append((size, seconds))):
        weight: Any = state.model[0].weight  # pyright: ignore
        assert (weight == 0).float().mean() > 0.9, "all but the pages that it shares with others are gone"
    assert state.digests() == before
    ((size, seconds),) = told
    assert size >= 3 * 4 * sum(p.numel() for p in state.model.parameters())
    assert 0 < seconds < 60
    step(state)
    step(other)
    assert state.digests() == other.digests()


def test_it_stays_where_there_is_room() -> None:
    state, told = trained(), []
    with aside.room_for_another(state, never, lambda *about: told.append(about)):
        assert state.model[0].weight.all()  # pyright: ignore
    assert told == []


def test_it_comes_back_when_what_it_made_room_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    crowded(monkeypatch, state)
    before = state.digests()
    with pytest.raises(KeyError), aside.room_for_another(state, never, lambda *_: None):
        raise KeyError("the replay")
    assert state.digests() == before


@pytest.mark.parametrize("damage", ["a changed bit", "cut short"])
def test_what_does_not_come_back_is_said_to_be_lost(damage: str) -> None:
    state, real = trained(), aside._have_back

    def have_back(regions: Any, hashes: Any, file: Any) -> None:
        if damage == "cut short":
            file.truncate(100)
        else:
            file.seek(50)
            byte = file.read(1)[0]
            file.seek(50)
            file.write(bytes([byte ^ 1]))
        real(regions, hashes, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "_have_back", have_back)
        with pytest.raises(aside.LostAsideError, match="not what was written"), aside.on_disk(aside.regions_of(state), never):
            pass


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(hidden=2**16)  # 17 MB, with the moments
    before = state.digests()
    with small_file_system(tmp_path / "disk", "1M") as disk:
        monkeypatch.setattr(aside, "DISK", str(disk))
        monkeypatch.setattr(aside, "_is_memory", lambda path: False)
        with pytest.raises(OSError, match="No space left"), aside.on_disk(aside.regions_of(state), never):
            pytest.fail("there was no room")
        assert list(disk.iterdir()) == []
    assert state.digests() == before


def test_where_there_is_too_little_even_so_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    before = state.digests()
    monkeypatch.setattr(aside, "free_memory", lambda: 0)
    monkeypatch.setattr(aside, "on_disk", lambda *_: pytest.fail("it was to stay"))
    with pytest.raises(MemoryError, match="0 bytes are free"), aside.room_for_another(state, never, lambda *_: None):
        pytest.fail("there is no room")
    assert state.digests() == before


def test_helpers_on_one_node_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would see the same memory, and take it."""
    state, told = trained(), []
    size = sum(region.size for region in aside.regions_of(state))
    monkeypatch.setattr(aside, "free_memory", lambda: int(2 * aside.NEEDED * size))
    for sharing in (1, 2, 3):
        with aside.room_for_another(state, never, lambda *about: told.append(about), sharing):
            pass
        assert len(told) == (sharing == 3), sharing
    with pytest.raises(MemoryError), aside.room_for_another(state, never, lambda *about: told.append(about), 5):
        pytest.fail("there is no room for five")


def test_gradients_that_are_kept_for_exact_sums_need_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state, told = trained(), []
    size = sum(region.size for region in aside.regions_of(state))
    monkeypatch.setattr(aside, "free_memory", lambda: int(aside.NEEDED * size))
    for extra, is_aside in ((0, False), (size, True)):
        with aside.room_for_another(state, never, lambda *about: told.append(about), extra=extra):
            pass
        assert bool(told) == is_aside
    with (
        pytest.raises(MemoryError),
        aside.room_for_another(state, never, lambda *about: told.append(about), extra=size + 1),
    ):
        pytest.fail("there is no room for them")


def test_a_fence_in_the_midst_of_writing_leaves_it_where_it_was() -> None:
    state, looks = trained(), iter(range(5))
    before = state.digests()

    def check() -> None:
        if next(looks) == 4:
            raise FencedError(2)

    with pytest.raises(FencedError), aside.on_disk(aside.regions_of(state), check):
        pytest.fail("it was left before")
    assert state.digests() == before


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(tmp_path / "memory", "1M") as memory:
        monkeypatch.setattr(aside, "DISK", str(memory))
        with pytest.raises(OSError, match="is memory, not a disk"), aside.on_disk([], never):
            pytest.fail("it is none")


def test_what_a_stage_may_share_with_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    model: Any = state.model
    model.register_buffer("mask", torch.ones(2**16))
    with aside.on_disk(aside.regions_of(state), never):
        assert model.mask.all()
        assert model[1].running_var.any()


def test_a_replica_that_is_not_used_any_more_is_gone_before_the_state_comes_back() -> None:
    """It is a cycle, as a `Replica` is, of 256 MB."""
    code = """
import resource, torch
from raytrain_ft.training import aside
own = [torch.full((2**20,), float(n)) for n in range(64)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with aside.on_disk([aside.Region(one.data_ptr(), one.nbytes) for one in own], lambda: None):
    other = {"weights": [torch.ones(2**20) for _ in range(64)]}
    other["itself"] = other
    del other
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 64 * 2**10  # KiB


def test_no_file_is_left_by_who_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch; from raytrain_ft.training import aside; aside.DISK = sys.argv[1]\n"
        "own = torch.ones(1000)\n"
        "with aside.on_disk([aside.Region(own.data_ptr(), own.nbytes)], lambda: None): os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_memory_is_free_meanwhile() -> None:
    """Of two states of 256 MB each, one is in memory at a time."""
    code = """
import resource, torch
from raytrain_ft.training import aside
own = [torch.full((2**20,), float(n)) for n in range(64)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with aside.on_disk([aside.Region(one.data_ptr(), one.nbytes) for one in own], lambda: None):
    other = torch.ones(64 * 2**20)
    del other
assert all(bool((one == n).all()) for n, one in enumerate(own))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 64 * 2**10  # KiB


def test_a_containers_bound_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(str(tmp_path / name) for name in ("max", "current", "stat"))
    for path, text in zip(files, ("1000000000", "600000000", "anon 5\ninactive_file 100000000\n"), strict=True):
        Path(path).write_text(text)
    monkeypatch.setattr(aside, "CGROUPS", (files,))
    assert aside.free_memory() == 450_000_000
    Path(files[0]).write_text("max\n")
    unbound = aside.free_memory()
    monkeypatch.setattr(aside, "CGROUPS", ())
    assert abs(unbound - aside.free_memory()) < 2**30
    assert aside.fits_beside(100, 200)
    assert not aside.fits_beside(100, 199)
