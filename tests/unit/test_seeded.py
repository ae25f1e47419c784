"""What a dataset draws is a function of the sample, to the bit, though most batches are loaded whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.training.arrow_dataset import ArrowDataset
from raytrain_ft.training.objects import generator_states
from raytrain_ft.training.random import sample_seed
from raytrain_ft.training.seeded import Seeded, draws_nothing

SAMPLES, BATCH, SEED = 300, 20, 7


def forked() -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand((), dtype=torch.float64))


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    "numpy": np.random.rand,
    "random": random.random,
    "seeds": lambda: (random.seed(random.random()), random.random())[1],
    "the seed itself": lambda: float(torch.initial_seed()),
    "a copy of the generator": forked,
}
MOVING = ("torch", "numpy", "random", "seeds")


class Items(Dataset[Any]):
    """Draws in every sample, in none (0), or in one of so many; `loads` counts what is loaded."""

    def __init__(self, source: str, every: int) -> None:
        self.source, self.every, self.loads = source, every, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.loads += 1
        return index, DRAWS[self.source]() if self.every and index % self.every == 0 else 0.0


class Many(Items):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


def one_by_one(dataset: Items, epoch: int) -> dict[int, float]:
    """By sample, what is drawn after its own seed."""
    found: dict[int, float] = {}
    for index in range(SAMPLES):
        seed = sample_seed(SEED, epoch, index)
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        random.seed(seed)
        found[index] = dataset[index][1]
    return found


def loader(dataset: Any, workers: int = 0) -> checkfreq.Loader:
    return checkfreq.Loader(dataset, global_batch_size=BATCH, seed=SEED, num_workers=workers, persistent_workers=workers > 0)


@pytest.mark.parametrize("kind", [Items, Many])
@pytest.mark.parametrize(
    ("source", "every", "workers"),
    [
        *((source, every, 0) for source in MOVING for every in (1, 100)),
        *((source, 1, 0) for source in DRAWS if source not in MOVING),
        *(("torch", every, 2) for every in (1, 100, 0)),
        ("torch", 0, 0),
        ("the seed itself", 1, 2),
    ],
)
def test_samples_are_as_if_each_was_seeded_and_loaded_alone(kind: type[Items], source: str, every: int, workers: int) -> None:
    expected = [one_by_one(Items(source, every), epoch) for epoch in range(2)]
    read = loader(kind(source, every), workers)
    before = repr(generator_states())
    found = [{int(i): float(value) for indices, values in read for i, value in zip(indices, values, strict=True)} for _ in "12"]
    assert found == expected
    assert repr(generator_states()) == before
    assert len({*expected[0].values()}) == (SAMPLES if every == 1 else 4 if every else 1)


@pytest.mark.parametrize(
    ("source", "every", "more"),
    [
        ("torch", 0, 1),  # the first sample, which is tried
        ("torch", 1, 0),
        ("the seed itself", 1, BATCH),
    ],
)
def test_little_is_loaded_twice(source: str, every: int, more: int) -> None:
    dataset = Many(source, every)
    read = loader(dataset)
    for _ in range(3):
        list(read)
    assert dataset.loads == 3 * SAMPLES + more


def test_of_rare_draws_one_batch_is_loaded_twice() -> None:
    dataset = Many("random", 100)
    rows = Seeded(dataset, SEED)
    keys = [(0, index) for index in range(1, SAMPLES)]
    for start in range(0, len(keys), BATCH):
        rows.__getitems__(keys[start : start + BATCH])
    assert dataset.loads == len(keys) + 1 + BATCH


def test_a_batch_is_asked_for_as_a_whole_where_nothing_is_drawn() -> None:
    asked: list[int] = []

    class Asked(Many):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            asked.append(len(indices))
            return super().__getitems__(indices)

    list(loader(Asked("torch", 0)))
    assert asked == [1] + [BATCH] * (SAMPLES // BATCH)


def test_rows_of_arrow_files_are_known_to_draw_nothing_but_what_is_made_of_them_is_not(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(40.0)}), tmp_path / "rows.parquet")

    class Noisy(ArrowDataset):
        def __getitems__(self, indices: Any) -> list[Any]:
            return [row["x"] + torch.rand(()) for row in super().__getitems__(indices)]

    assert draws_nothing(ArrowDataset(tmp_path))
    assert not draws_nothing(Noisy(tmp_path))
    assert not draws_nothing(ArrowDataset(tmp_path, transform=lambda row: row["x"] + torch.rand(())))
    read = loader(ArrowDataset(tmp_path))
    assert sorted(float(x) for batch in read for x in batch["x"]) == list(range(40))
