"""Pieces that a cache holds: each element is in one of them, where it is in none other depends on its tensor alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raytrain_ft.training import blocks, lists
from raytrain_ft.training.blocks import Piece, block_size, pieces

BLOCK = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "block_size", lambda *_: BLOCK)


def rows_of(*shapes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Of two tensors each, whose elements are numbered through."""
    begin, rows = 0, []
    for shape in shapes:
        end = begin + torch.Size(shape).numel()
        rows.append((torch.arange(begin, end).view(shape), -torch.arange(begin, end).view(shape)))
        begin = end
    return rows


def elements(piece: Piece) -> list[int]:
    return torch.cat([t.reshape(-1) for t in piece.columns[0]]).tolist()


@given(st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple)), st.integers(0, 2), st.sampled_from([0, 2**40]))
def test_each_element_is_in_one_piece_and_in_the_same_place_of_each_column(
    shapes: list[tuple[int, ...]], temporaries: int, shared: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "shared_cache", lambda: shared)
        rows = rows_of(*shapes)
        found = list(pieces(rows, temporaries, whole=False)) if rows else []
    every = [element for piece in found for element in elements(piece)]
    assert sorted(every) == list(range(sum(row[0].numel() for row in rows)))
    for piece in found:
        for numbers in zip(*piece.columns, strict=True):
            assert torch.equal(numbers[0], -numbers[1])
        assert len(piece.rows) == len(piece.columns[0])
        if piece.scratch is not None:
            assert piece.scratch.shape == piece.columns[0][0].shape
        if temporaries or not shared:
            assert len(every) == 0 or len(elements(piece)) <= BLOCK, "more than the cache holds"


def test_where_a_tensor_is_cut_does_not_depend_on_the_others() -> None:
    shapes = [(200,), (5,), (64,), (13, 10), (7,), (128,)]
    alone = [[elements(piece) for piece in pieces([row], 1, whole=False)] for row in rows_of(*shapes)]
    together = [elements(piece) for piece in pieces(rows_of(*shapes), 1, whole=False)]
    for row, cut in zip(rows_of(*shapes), alone, strict=True):
        if row[0].numel() > BLOCK // 8:
            assert all(block in together for block in cut)


def test_small_ones_go_together_and_the_others_share_one_scratch_memory() -> None:
    found = list(pieces(rows_of((5,), (8, 8), (3,), (100,), (7,)), 1, whole=False))
    assert [piece.rows for piece in found] == [[1], [3], [3], [0, 2, 4]]
    assert [None if piece.scratch is None else tuple(piece.scratch.shape) for piece in found] == [(8, 8), (64,), (36,), None]
    assert len({piece.scratch.data_ptr() for piece in found if piece.scratch is not None}) == 1


def test_few_operations_leave_uncut_what_the_shared_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of((5,), (100,), (60,), (300,))
    monkeypatch.setattr(blocks, "shared_cache", lambda: 465 * 2 * 8)
    assert [piece.rows for piece in pieces(rows, 0, whole=False)] == [[2], [0, 1, 3]]
    monkeypatch.setattr(blocks, "shared_cache", lambda: 465 * 2 * 8 - 1)
    assert [piece.rows for piece in pieces(rows, 0, whole=False)] == [[1], [1], [2], [3], [3], [3], [3], [3], [0]]


def test_what_must_stay_whole_or_has_no_order_is_not_cut() -> None:
    assert [piece.rows for piece in pieces(rows_of((5,), (100,), (2,)), 1, whole=True)] == [[0], [1], [2]]
    turned = [(torch.zeros(20, 30).t(), torch.zeros(30, 20))]
    assert [piece.columns[0][0].shape for piece in pieces(turned, 1, whole=False)] == [(30, 20)]


def test_a_block_fills_the_caches_of_the_cores_at_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocks, "_CACHES", tmp_path)
    (tmp_path / "index2").mkdir()
    (tmp_path / "index3").mkdir()

    def sizes() -> list[int]:
        blocks.own_cache.cache_clear()
        cases = ((3, 4, 1), (5, 4, 1), (5, 8, 1), (5, 4, 7))
        return [block_size.__wrapped__(*case) for case in cases]

    try:
        assert sizes() == [2**16, 2**15, 2**14, 2**17], "nobody tells: 1 MiB"
        for text, exponents in (("2048K", [17, 16, 15, 18]), ("64K", [14, 14, 14, 16]), ("64M", [16, 15, 14, 17])):
            (tmp_path / "index2" / "size").write_text(text + "\n")
            assert sizes() == [2**e for e in exponents]
        blocks.shared_cache.cache_clear()
        assert blocks.shared_cache() == 0, "nobody tells"
        (tmp_path / "index3" / "size").write_text("33792K\n")
        blocks.shared_cache.cache_clear()
        assert blocks.shared_cache() == 33 * 2**20
    finally:
        blocks.own_cache.cache_clear()
        blocks.shared_cache.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_list_of_one_has_the_bits_of_a_longer_list(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    to, a, b = (torch.randn(1003, dtype=dtype, generator=generator) for _ in range(3))
    operations = {
        "add": lambda x: lists.add_(x, [a] * len(x), -0.3),
        "addcmul": lambda x: lists.addcmul_(x, [a] * len(x), [b] * len(x), -0.001),
        "addcdiv": lambda x: lists.addcdiv_(x, [a] * len(x), [b] * len(x), 0.01),
        "lerp": lambda x: lists.lerp_(x, [a] * len(x), -1 / 9),
        "clamp": lambda x: lists.clamp_min_(x, 0.1),
        "number": lambda x: lists.add_number_(x, 1e-8),
    }
    for name, operation in operations.items():
        one, two = [to.clone()], [to.clone(), to.clone()]
        operation(one)
        operation(two)
        assert torch.equal(one[0], two[0]), name
        assert not torch.equal(one[0], to), name
