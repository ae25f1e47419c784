"""Many blocks of memory are copied as one would be, by whatever way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.training import memory

MB = 2**20
Blocks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
SIZES = st.lists(st.sampled_from([1, 7, 4096, 70_000, 600_000]) | st.integers(1, 9000), min_size=1, max_size=60)


def places(sizes: npt.NDArray[np.int64], gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where blocks begin that have such gaps before them."""
    return np.cumsum(sizes + gaps) - sizes


def copied(sizes: list[int], source_gap: int, target_gap: int, seed: int, way: Callable[..., None]) -> None:
    """Copies random bytes there, and looks that they arrive and nothing else is touched."""
    chance, lengths = np.random.default_rng(seed), np.array(sizes, np.int64)
    starts = places(lengths, chance.integers(0, source_gap + 1, len(sizes)))
    ends = places(lengths, chance.integers(0, target_gap + 1, len(sizes)))
    source = chance.integers(0, 256, int(starts[-1] + lengths[-1]), np.uint8)
    target = np.zeros(int(ends[-1] + lengths[-1]) + 1, np.uint8)
    expected = target.copy()
    for start, end, size in zip(starts, ends, lengths, strict=True):
        expected[end : end + size] = source[start : start + size]
    way(target.ctypes.data + ends, source.ctypes.data + starts, lengths)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("way", [memory.move_all, memory.move_blocks])
@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, source_gap=st.sampled_from([0, 30]), target_gap=st.sampled_from([0, 30]), seed=st.integers(0, 99))
def test_blocks_arrive(way: Callable[..., None], sizes: list[int], source_gap: int, target_gap: int, seed: int) -> None:
    copied(sizes, source_gap, target_gap, seed, way)


@pytest.mark.parametrize("gaps", [(30, 0), (0, 30)])
def test_thousands_of_them(gaps: tuple[int, int]) -> None:
    copied([3000 + n % 5000 for n in range(5000)], *gaps, 0, memory.move_all)


def test_large_ones_are_shared_out() -> None:
    copied([9 * MB + 1, 5, 17 * MB], 8, 0, 0, memory.move_all)


@pytest.mark.parametrize("gaps", [(30, 0), (0, 30)])
@pytest.mark.parametrize("answer", [-1, 4096])
def test_a_kernel_that_does_not_allow_it_or_stops_halfway(
    monkeypatch: pytest.MonkeyPatch, gaps: tuple[int, int], answer: int
) -> None:
    asked = []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    for name in ("_gather", "_scatter"):
        monkeypatch.setattr(memory, name, refuse)
    copied([3000] * 100, *gaps, 0, memory.move_blocks)
    assert asked


@pytest.mark.parametrize("gaps", [(30, 0), (0, 30), (30, 30)])
def test_the_kernel_copies_small_blocks_wherever_they_are(monkeypatch: pytest.MonkeyPatch, gaps: tuple[int, int]) -> None:
    one, address = np.array([8], np.int64), np.array([(place := np.zeros(2, np.int64)).ctypes.data], np.int64)
    if not memory._by_kernel(address, address + 8, one):
        pytest.skip(f"this system does not allow process_vm_writev: {len(place)} words could not be copied")
    monkeypatch.setattr(memory, "move", lambda *arguments: pytest.fail("one by one"))
    copied([3000] * 3000, *gaps, 0, memory.move_blocks)


def test_copying_can_be_left() -> None:
    def leave() -> None:
        raise InterruptedError("no more of this")

    sizes, place = np.array([5 * MB] * 8, np.int64), np.zeros(5 * MB, np.uint8)
    addresses = np.full(8, place.ctypes.data)
    with pytest.raises(InterruptedError):
        memory.move_all(addresses, addresses, sizes, leave)


@pytest.mark.parametrize("times", [1, 2])
def test_who_cannot_have_a_second_thread_copies_alone(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    copied([9 * MB] * times, 8, 0, 0, memory.move_all)
