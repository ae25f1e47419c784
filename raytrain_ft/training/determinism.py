"""A look at the user's dataset before a run: does it return the same bits every time, and leave the generators alone? What it
saw is kept as a sketch, to know the dataset again.

A recovered step can only repeat what happened if its samples can be loaded again. What a dataset draws from a global
generator depends on everything drawn before, and, since samples are loaded on a thread beside the training, it would
also disturb the model's own draws. Random augmentation belongs in `augment(sample, generator)`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.sampling import Sampling, sample_ids
from raytrain_ft.policy.sketch import Sketch
from raytrain_ft.storage.tensors import bytes_of
from raytrain_ft.training.data import Augment, Collate, augment_all, fetch, loads_batches
from raytrain_ft.training.layout import is_plain
from raytrain_ft.training.random import seed_all
from raytrain_ft.training.sketching import sketch_of

_SAMPLES = 8
_ROUNDS = 3
_UNLIKE = "A recovered step could not load the same samples again."
_USE_AUGMENT = f"{_UNLIKE} Move what is random into the task's augment(sample, generator), and draw from that generator alone."
_DRAW_BEFORE = f"{_UNLIKE} Draw in the task's augment(sample, generator), sample by sample; collate only puts them together."
_USE_SEED = f"{_UNLIKE} Seed a generator of its own for each sample, with sample_seed(seed, epoch, id) (docs/data.md)."


def check_deterministic(
    dataset: Any, sampling: Sampling, augment: Augment | None = None, collate: Collate = default_collate
) -> tuple[Sketch, ...]:
    """Loads a few samples three times, and returns their sketches: the dataset's own, without `augment`. Raises ConfigError
    unless each is a function of its id (and of the epoch).

    Found are: samples whose bits differ between two loads; a dataset, an augmentation or a collation that draws from a
    global generator, or seeds it; an augmentation with other randomness than its generator's, a collation with any; one that
    writes into the dataset; a `BatchSource` that loads a sample otherwise beside others. The global generators are put back as
    they were.
    """
    ids = sample_ids(sampling, 0, range(min(_SAMPLES, sampling.dataset_size))).tolist()
    batches = loads_batches(dataset)

    def loaded() -> list[Any]:
        if batches:
            return [dataset.load_batch(np.array([i], dtype=np.int64), 0, sampling.seed) for i in ids]
        return fetch(dataset, ids)

    def augmented() -> list[Any]:
        assert augment is not None
        samples = fetch(dataset, ids)
        augment_all(augment, samples, ids, 0, sampling.seed)
        return samples

    seen: list[Any] = []

    def looked_at() -> list[Any]:
        seen[:] = loaded()
        return seen

    saved = _global_generators()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # `seed_all` seeds these, too
    try:
        raw = _observe(looked_at)
        sketches = tuple(sketch_of(sample, batch=batches) for sample in seen)  # before `augment` can write into them
        if batches:
            _refuse_random("dataset.load_batch", *raw, ids, _USE_SEED)
            for together in (ids, ids[::-1]):
                batch = dataset.load_batch(np.array(together, dtype=np.int64), 0, sampling.seed)
                _refuse_company(batch, together, dict(zip(ids, seen, strict=True)))
        else:
            _refuse_random("dataset.__getitem__", *raw, ids, _USE_AUGMENT)
        if augment is not None and not batches:
            drawn = _observe(augmented)
            if _observe(loaded)[0][0] != raw[0][0]:
                raise ConfigError("augment writes into the dataset's own sample: it must return a new one.")
            _refuse_random("augment", *drawn, ids, _USE_AUGMENT)
        if collate is not default_collate and not batches:
            together = _observe(lambda: [collate(loaded() if augment is None else augmented())])
            if _observe(loaded)[0][0] != raw[0][0]:
                raise ConfigError("collate writes into the dataset's own samples: it must return new ones.")
            _refuse_random("collate", *together, ids[:1], _DRAW_BEFORE)
    finally:
        torch.set_rng_state(saved["torch"])
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        random.setstate(saved["random"])
        np.random.set_state(saved["numpy.random"])
    return sketches


def fingerprint(sample: Any) -> bytes:
    """16 bytes that are equal for two samples of the same bits. What it cannot look into counts as equal."""
    digest = hashlib.blake2b(digest_size=16)
    _digest_into(digest.update, sample, set())
    return digest.digest()


def _observe(load: Callable[[], list[Any]]) -> tuple[list[list[bytes]], set[str]]:
    """Per round, the fingerprints of the loaded samples; and the global generators that every round has moved.

    Every: some other thread of the process may draw from `random` now and then, as Ray's do to spread out retries.
    """
    rounds: list[list[bytes]] = []
    moved = {"torch", "random", "numpy.random"}
    for number in range(_ROUNDS):
        seed_all(number)  # another state each time: so that drawing shows in the samples, and seeding in the state
        before = {name: fingerprint(state) for name, state in _global_generators().items()}
        rounds.append([fingerprint(sample) for sample in load()])
        moved -= {name for name, state in _global_generators().items() if fingerprint(state) == before[name]}
    return rounds, moved


def _refuse_random(what: str, rounds: list[list[bytes]], moved: set[str], ids: list[int], advice: str) -> None:
    """Raises ConfigError when `what` is seen to be random by itself."""
    if moved:
        names = " and ".join(sorted(moved))
        raise ConfigError(f"{what} draws from, or seeds, the global generator of {names}. {advice}")
    differing = [i for i, *prints in zip(ids, *rounds, strict=True) if len(set(prints)) > 1]
    if differing:
        raise ConfigError(
            f"{what} returned other bits when sample {differing[0]} was loaded again ({len(differing)} of {len(ids)} "
            f"samples tried differ): it draws from a global generator or from one of its own. {advice}"
        )


def _refuse_company(batch: Any, ids: list[int], alone: dict[int, Any]) -> None:
    """Raises ConfigError when a sample of `batch` has other bits than `alone`, as a batch of its own.

    Compared are tensors with a row per sample, if a row has the same shape: beside others, a text may be padded.
    """
    columns = tree_leaves(batch)
    for row, index in enumerate(ids):
        own = tree_leaves(alone[index])
        for column, value in zip(columns, own, strict=True) if len(own) == len(columns) else ():
            if not all(isinstance(one, Tensor) and is_plain(one) for one in (column, value)):
                continue
            if column.shape != (len(ids), *value.shape[1:]) or value.shape[:1] != (1,):
                continue
            if fingerprint(column[row]) != fingerprint(value[0]):
                raise ConfigError(
                    f"dataset.load_batch gave other bits for sample {index} beside {len(ids) - 1} others than for it alone; "
                    "after a change of the number of workers it would be another sample. Compute each from its own id. "
                    + _USE_SEED
                )


def _global_generators() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy.random": np.random.get_state()}


def _digest_into(update: Callable[[bytes], None], value: Any, within: set[int]) -> None:
    """`within`: what the value lies in, by `id`, for an object may refer to what it is part of."""
    update(type(value).__name__.encode())
    if id(value) in within:
        return
    within.add(id(value))
    _content_into(update, value, within)
    within.discard(id(value))


def _content_into(update: Callable[[bytes], None], value: Any, within: set[int]) -> None:
    if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
        update(f"{value.layout}{value.dtype}".encode())
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(bytes_of(value).cpu().numpy().tobytes())
    elif isinstance(value, (str, bytes, int, float, complex, np.generic, type(None))):
        update(repr(value).encode())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:  # whose bytes are pointers
            _digest_into(update, value.tolist(), within)
        else:
            update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _digest_into(update, key, within)
            _digest_into(update, item, within)
    elif isinstance(value, Sequence):
        update(len(value).to_bytes(8, "little"))
        for item in value:
            _digest_into(update, item, within)
    elif callable(getattr(value, "tobytes", None)):  # PIL images
        update(value.tobytes())
    elif hasattr(value, "__dict__"):
        _digest_into(update, vars(value), within)
