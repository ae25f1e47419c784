"""Records that are written by the pattern of one before are what pyarrow would have written, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raytrain_ft.storage import log_encoder
from raytrain_ft.storage.log_encoder import Encoder
from raytrain_ft.storage.log_format import Key

KINDS = ("activation", "gradient", "agreed", "tied")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
layouts = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=3)
numbers = st.integers(0, 2**62)
keys = st.builds(
    Key, numbers, st.integers(-1, 2**20), st.sampled_from(KINDS), st.integers(-1, 64), st.integers(-1, 64), numbers
)


def made(layout: list[tuple[torch.dtype, tuple[int, ...]]], seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 2, shape, generator=draws).to(dtype) for dtype, shape in layout]


def written(records: list[tuple[Key, int, list[Tensor]]]) -> list[bytes]:
    encoder = Encoder("w0", None)
    return [b"".join(encoder.encode(*record)) for record in records]


@given(
    st.lists(layouts, min_size=1, max_size=3), st.lists(st.tuples(keys, numbers, st.integers(0, 2)), min_size=1, max_size=12)
)
def test_the_bytes_are_pyarrows(known: list[Any], drawn: list[tuple[Key, int, int]]) -> None:
    records = [(key, incarnation, made(known[n % len(known)], n)) for key, incarnation, n in drawn]
    by_pattern = written(records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_encoder, "MOST_PATTERNS", 0)
        assert written(records) == by_pattern


def test_a_pattern_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = Encoder._write
    monkeypatch.setattr(Encoder, "_write", lambda *about: (calls.append(1), real(*about))[1])
    written([(Key(step, 0, "activation", 0, 1), 1, [torch.ones(4, 8)]) for step in range(5)])
    assert len(calls) == 1, "pyarrow makes the first one only"


def test_what_no_reader_would_take_is_refused_by_any_record() -> None:
    encoder = Encoder("w0", None)
    encoder.encode(Key(0, 0, "activation", 0, 1), 1, [torch.ones(2)])
    with pytest.raises(ValueError, match="cannot be logged"):
        encoder.encode(Key(0, 0, "nonsense", 0, 1), 1, [torch.ones(2)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="too many tensors"):
        encoder.encode(Key(0, 0, "activation", 0, 1), 1, [torch.ones(1)] * 300)


def test_a_large_tensor_is_not_copied() -> None:
    encoder, tensor = Encoder("w0", None), torch.ones(2**20)
    for step in range(2):
        parts = encoder.encode(Key(step, 0, "activation", 0, 1), 1, [tensor])
        large = next(part for part in parts if len(part) == tensor.nbytes)
        assert torch.frombuffer(large, dtype=torch.float32).data_ptr() == tensor.data_ptr()
