"""Another dataset of the same length is noticed; the same one, decoded a little otherwise, is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.sketch import Sketch, as_records, of_records, unlike
from raytrain_ft.training.determinism import check_deterministic
from raytrain_ft.training.sketching import CHUNK, sketch_of

PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


class Picture:
    """What is known of it is its bytes, as of PIL's."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def tobytes(self) -> bytes:
        return self._array.tobytes()


def compared(one: Any, other: Any) -> str:
    return unlike([sketch_of(one)], [sketch_of(other)])


def test_a_batch_of_one_is_looked_at_as_the_sample_in_it() -> None:
    """Else its tokens would have rows and columns, and its label a row."""
    tokens, label = torch.arange(70_000, 70_016), torch.tensor(3, dtype=torch.uint8)
    assert sketch_of(np.array(["a caption"], dtype=object), batch=True) == sketch_of(np.array("a caption", dtype=object))
    alone, batch = sketch_of([tokens, label]), sketch_of([tokens[None], label[None]], batch=True)
    assert alone == batch
    assert unlike([batch], [sketch_of([tokens[None] + 1, label[None]], batch=True)])
    assert unlike([batch], [sketch_of([tokens[None], label[None] + 1], batch=True)])


def test_sketches_of_an_earlier_version_are_not_compared() -> None:
    here = sketch_of(torch.arange(3))
    assert unlike([Sketch(here.exact.partition(":")[2], 7, 1.0, 1.0)], [here]) == ""


def test_what_cannot_be_looked_into_counts_as_equal_and_ends_nothing() -> None:
    class Node:
        def __init__(self, value: int) -> None:
            self.value, self.itself = value, self

    class Words(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return np.array([f"word {index}", "x" * index], dtype=object), torch.eye(3).to_sparse() * index, Node(index)

    first, second = check_deterministic(Words(), Sampling(20, 4, 0), collate=list)[:2]
    assert unlike([first], [second]), "of what can be looked into, the numbers differ"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.5], dtype=torch.bfloat16)),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        (torch.tensor([70_000, 2]), torch.tensor([70_001, 2])),
        ([PICTURE, torch.tensor(3, dtype=torch.uint8)], [PICTURE, torch.tensor(4, dtype=torch.uint8)]),
        (np.int16(3), np.int16(4)),
        (("x", 3), ("x", 4)),
        ({"a": 1.0}, {"b": 1.0}),
        ([1.0, 2.0], [1.0, 2.0, 3.0]),
        (np.bool_(True), np.bool_(False)),
        (b"abc", b"abd"),
        (Picture(PICTURE), Picture(PICTURE[::2])),
        (Picture(PICTURE), Picture(255 - PICTURE // 2)),
    ],
)
def test_another_sample_is_told_apart(one: Any, other: Any) -> None:
    assert compared(one, other)
    assert compared(one, one) == compared(other, other) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6])),
        (PICTURE, np.where(PICTURE == 100, 101, PICTURE).astype(np.uint8)),
        (("/mnt/a/1.png", 3), ("/mnt/b/1.png", 3)),
        (float("nan"), float("nan")),
        (torch.tensor([1e300, 1.0], dtype=torch.float64), torch.tensor([1e300, 2.0], dtype=torch.float64)),
        (torch.empty(0), torch.empty(0)),
        (None, None),
        ({"a": 1.0, "b": 2}, {"b": 2, "a": 1.0}),
        (np.array(["short"]), np.array(["much longer"])),
        (PICTURE.astype(np.int64), np.where(PICTURE == 100, 101, PICTURE).astype(np.int64)),
    ],
)
def test_the_same_sample_read_elsewhere_is_the_same(one: Any, other: Any) -> None:
    assert compared(one, other) == ""


def test_a_sample_is_measured_as_a_whole() -> None:
    values = np.random.default_rng(1).normal(size=CHUNK + 1000)
    sketch = sketch_of(values)
    assert sketch.count == len(values)
    assert (sketch.mean, sketch.rms) == pytest.approx((values.mean(), np.sqrt((values**2).mean())))


def test_what_a_checkpoint_holds_of_it_comes_back() -> None:
    sketches = (sketch_of((PICTURE, 3)), sketch_of(0.5), sketch_of(np.array([1e308, 1.0])))
    assert of_records(json.loads(json.dumps(as_records(sketches)))) == sketches


@pytest.mark.parametrize(
    "records",
    [None, {}, [1], [["x", 1, 2.0]], [["x", 1, float("nan"), 1.0]], [["x", 1, float("inf"), 1.0]], [[1, 1, 1.0, 1.0]]],
)
def test_what_else_a_file_says_is_refused(records: Any) -> None:
    with pytest.raises(ValueError, match="sketch"):
        of_records(records)


@pytest.mark.parametrize("there", [(), (Sketch("x", 1, 0.0, 0.0),)])
def test_who_reads_nothing_is_like_everybody(there: tuple[Sketch, ...]) -> None:
    assert unlike(there, ()) == unlike((), there) == ""


@pytest.mark.parametrize(
    ("change", "differ"),
    [(lambda x, y: (x, y), False), (lambda x, y: (x.flip(0), y), True), (lambda x, y: (x, 1 - y), True)],
    ids=["the same", "in another order", "other labels"],
)
def test_a_dataset_is_known_again(change: Callable[..., Any], differ: bool) -> None:
    inputs = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(1) > 0).long()
    sampling = Sampling(100, 10, 0)
    before = check_deterministic(TensorDataset(inputs, labels), sampling)
    after = check_deterministic(TensorDataset(*change(inputs, labels)), sampling)
    assert bool(unlike(before, after)) is differ
