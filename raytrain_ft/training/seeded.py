"""A dataset whose draws are a function of (seed, epoch, sample), as `checkfreq.Loader` reads it, and what it looks like."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from raytrain_ft.policy.sampling import Sampling, sample_ids
from raytrain_ft.policy.sketch import Sketch, unlike
from raytrain_ft.training.arrow_dataset import ArrowDataset
from raytrain_ft.training.data import fetch
from raytrain_ft.training.determinism import fingerprint
from raytrain_ft.training.random import batch_seed, sample_seed
from raytrain_ft.training.sketching import sketch_of

_SKETCHED = 8
"""Samples by which a dataset is known again."""


class Seeded(Dataset[Any]):
    """A dataset whose draws from the global generators depend on the epoch and the sample alone, and disturb nobody else's.

    Where samples draw, each is loaded by itself, after a seed of its own. Most datasets draw nothing, and load a batch as a
    whole many times faster. So batches are loaded whole until a generator has moved meanwhile: that batch is thrown away and
    loaded again by samples, and so are all others from then on. Which of the two it is to be is tried with the first sample of
    a process: if it does not draw, it is loaded again with its batch, and has to have the same bits, for what is made of
    `torch.initial_seed()` depends on the seed and moves nothing.

    A dataset that counts its loads, or has a generator of its own, sees in each process one sample twice if it draws nothing,
    and one batch twice if it draws in few samples only. What is made of the seed without drawing, and not in the first sample,
    is a function of the batch.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._draws: bool | None = None  # in this process; None: not tried

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if get_worker_info() is not None:  # nobody else draws here, but collate_fn, next
            samples = self._load(keys)
            for epoch, first in keys[:1]:
                _seed(batch_seed(self.seed, epoch, first))
            return samples
        states = _states()
        try:
            return self._load(keys)
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

    def _load(self, keys: list[tuple[int, int]]) -> list[Any]:
        if not keys:
            return []
        done: list[Any] = []
        if self._draws is None:
            done, self._draws = self._watched(sample_seed(self.seed, *keys[0]), keys[:1])
        if not self._draws:
            whole, self._draws = self._watched(batch_seed(self.seed, *keys[0]), keys)
            self._draws |= any(fingerprint(one) != fingerprint(other) for one, other in zip(done, whole, strict=False))
            if not self._draws:
                return whole
        return done + [self._one(epoch, index) for epoch, index in keys[len(done) :]]

    def _one(self, epoch: int, index: int) -> Any:
        _seed(sample_seed(self.seed, epoch, index))
        return fetch(self.dataset, [index])[0]

    def _watched(self, seed: int, keys: list[tuple[int, int]]) -> tuple[list[Any], bool]:
        """These samples, loaded together after this seed, and whether that has moved a generator."""
        _seed(seed)
        before = _states()
        samples = fetch(self.dataset, [index for _, index in keys])
        return samples, _moved(before, _states())


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is known not to draw: nothing of the user's runs in it."""
    return type(dataset) is TensorDataset or (type(dataset) is ArrowDataset and dataset.transform is None)


_States = tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]


def _states() -> _States:
    numpys: Any = np.random.get_state()
    return torch.get_rng_state(), numpys, random.getstate()


def _moved(before: _States, after: _States) -> bool:
    """Whether a generator of the CPU stands elsewhere."""
    (_, words, *numpys), (_, other_words, *other_numpys) = before[1], after[1]
    same = torch.equal(before[0], after[0]) and before[2] == after[2]
    return not (same and numpys == other_numpys and np.array_equal(words, other_words))


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches. At the beginning it draws from its generator, which is the CPU's, whatever device is torch's default. So the
    default of loader workers, which begin here, is the CPU, too."""
    with torch.device("cpu"):
        return iter(loader)


def in_workers(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """These options of DataLoader over a `Seeded`: in a loader worker, `get_worker_info().dataset` is the user's."""
    if not options.get("num_workers", 0):
        return options
    return {**options, "worker_init_fn": partial(_begin_worker, options.get("worker_init_fn"))}


def _begin_worker(begin: Callable[[int], object] | None, number: int) -> None:
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it lets nobody change it
    if begin is not None:
        begin(number)


def sketches(dataset: Any, sampling: Sampling, options: Mapping[str, Any]) -> tuple[Sketch, ...]:
    """What a few samples look like; nothing, if they look otherwise when they are loaded again, as with a generator of the
    dataset's own. They are loaded where the training's are: what a dataset opens in a loader worker must not be open before
    that worker is forked."""
    ids = sample_ids(sampling, 0, range(min(_SKETCHED, sampling.dataset_size))).tolist()
    elsewhere = {"num_workers": min(1, options.get("num_workers", 0)), "persistent_workers": False, "pin_memory": False}
    rows = Seeded(dataset, sampling.seed)
    loader: DataLoader[Any] = DataLoader(
        rows,
        batch_sampler=[[(0, index) for index in (*ids, *ids)]],
        generator=torch.Generator(),
        **in_workers({**options, **elsewhere, "collate_fn": _sketched}),
    )
    return next(begun(loader))


def _sketched(samples: Sequence[Any]) -> tuple[Sketch, ...]:
    found = tuple(map(sketch_of, samples))
    once, again = found[: len(found) // 2], found[len(found) // 2 :]
    return () if unlike(once, again) else once


def _seed(value: int) -> None:
    """Seeds the generators of the CPU. Those of GPUs, which `seed_all` includes, are the training's own."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFF_FFFF)
    random.seed(value)
