"""Which samples a step reads: a pure function of two integers, for any world size.

The state of the data is (epoch, samples consumed in epoch order) and nothing else: CheckFreq's resumable iterator
(4.3.1, Fig. 5), made elastic. The order of an epoch is a function of (seed, epoch); a global batch is the next
`global_batch_size` positions of that order; the ranks of whatever world there is share those positions out. So a run
that is cut anywhere and goes on with another number of workers reads the very same global batches.

A *position* is an index into the order of an epoch, a *sample id* is an index into the dataset:
`id = order(sampling, epoch)[position]`. An epoch that owes samples, which a lossy recovery lost, is longer by these: position
`dataset_size + i` is the i-th of them. Must not know of torch, of files or of clocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from raytrain_ft.errors import ConfigError

_MAX_SEED = 2**64 - 1
BLOCK = 4096
"""Positions whose ids are computed, and kept, together."""
ROUNDS = 8
Range = tuple[int, int]
"""Positions [start, stop)."""


@dataclass(frozen=True, slots=True)
class Position:
    """State of the data before a step. `consumed` counts samples of `epoch`, in epoch order, over all ranks.

    Attributes:
        owed: positions of the epoch's own order that were lost, and are read again after it.
    """

    epoch: int = 0
    consumed: int = 0
    owed: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """All that the sequence of global batches depends on. Raises ConfigError for values that cannot be used."""

    dataset_size: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("dataset_size", 1, 2**40),
            ("global_batch_size", 1, 2**40),
            ("seed", 0, _MAX_SEED),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
                hint = " The dataset is empty: check its path and filters." if name == "dataset_size" else ""
                raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}.{hint}")
            object.__setattr__(self, name, int(value))  # a numpy integer would not survive JSON
        if self.drop_last and self.dataset_size < self.global_batch_size:
            raise ConfigError(
                f"drop_last=True with dataset_size={self.dataset_size} < global_batch_size={self.global_batch_size} "
                "drops every sample: use drop_last=False or a smaller global_batch_size."
            )


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Positions [start, stop) of one epoch's order, with what it owes: what all ranks together read in one step."""

    epoch: int
    start: int
    stop: int
    owed: tuple[Range, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


# ---------------------------------------------------------------- the order of an epoch


def order(sampling: Sampling, epoch: int) -> np.ndarray:
    """Sample ids of a whole epoch in the order in which they are read: int64 [dataset_size], read-only."""
    return sample_ids(sampling, epoch, range(sampling.dataset_size))


def sample_ids(sampling: Sampling, epoch: int, positions: range, owed: Sequence[Range] = ()) -> np.ndarray:
    """Sample ids at `positions` of `epoch`, which owes those at `owed`: int64 [len(positions)], read-only.

    A function of (seed, epoch, dataset_size, position) alone: no global generator, no earlier epoch, and no other position,
    so going on in the middle of an epoch of any length costs as much as going on at its beginning (CheckFreq re-creates the
    permutation and skips).
    """
    if owed and positions.stop > sampling.dataset_size:
        own = own_positions(sampling, owed, (positions.start, positions.stop))
        ids = np.concatenate([np.empty(0, np.int64), *(sample_ids(sampling, epoch, range(*piece)) for piece in own)])
        ids.flags.writeable = False
        return ids
    if not sampling.shuffle:
        ids = np.arange(positions.start, positions.stop, dtype=np.int64)
    else:
        blocks = range(positions.start // BLOCK, -(-positions.stop // BLOCK))
        parts = [_block(sampling.seed, epoch, sampling.dataset_size, number) for number in blocks]
        first = blocks.start * BLOCK
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)
        ids = joined[positions.start - first : positions.stop - first]
    ids.flags.writeable = False  # it is shared by everybody who asks
    return ids


@lru_cache(maxsize=8)
def _block(seed: int, epoch: int, size: int, number: int) -> np.ndarray:
    """The ids at positions [number * BLOCK, (number + 1) * BLOCK): int64, read-only."""
    positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, size), dtype=np.uint64)
    ids = _permuted(positions, size, _keys(seed, epoch)).astype(np.int64)
    ids.flags.writeable = False
    return ids


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """One key per round, from Philox: its raw stream is promised never to change (NEP 19)."""
    philox = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    return list(philox.random_raw(ROUNDS))


def _permuted(positions: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """A pseudo-random permutation of [0, size), at some positions; integers only, so it is the same on every machine.

    A Feistel network on pairs of digits to the base b = ceil(sqrt(size)); what lies beyond `size` is permuted again until it
    does not (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    base = np.uint64(math.isqrt(size - 1) + 1)
    left, right = positions // base, positions % base
    for key in keys:
        left, right = right, (left + _mixed(right + key) % base) % base
    ids = left * base + right
    beyond = ids >= size
    if beyond.any():
        ids[beyond] = _permuted(ids[beyond], size, keys)
    return ids


def _mixed(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each value: the finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


def digest_of_ids(parts: Iterable[np.ndarray]) -> str:
    """Hash of a sequence of sample ids, given in pieces; 32 hexadecimal digits.

    Where the pieces begin does not count, so a rank may digest step by step and an auditor all at once.
    """
    digest = hashlib.blake2b(digest_size=16)
    for ids in parts:
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- batches and positions


def steps_per_epoch(sampling: Sampling) -> int:
    """Global batches in one epoch; the last one may be short, unless `drop_last`."""
    whole, rest = divmod(sampling.dataset_size, sampling.global_batch_size)
    return whole if sampling.drop_last or rest == 0 else whole + 1


def next_batch(sampling: Sampling, position: Position) -> tuple[GlobalBatch, Position]:
    """The global batch at `position`, and the position after it.

    A batch never spans two epochs. The position after an epoch's last batch is the beginning of the next epoch.
    Raises ConfigError when the position does not belong to this dataset, as when a run is resumed on another one.
    """
    position = _rolled(sampling, position)
    stop = min(position.consumed + sampling.global_batch_size, sampling.dataset_size + samples_in(position.owed))
    batch = GlobalBatch(position.epoch, position.consumed, stop, position.owed)
    return batch, _rolled(sampling, Position(position.epoch, stop, position.owed))


def after_loss(sampling: Sampling, batch: GlobalBatch, lost: Iterable[Range]) -> Position:
    """The position after a batch of which `lost` is to be read again at the end of its epoch."""
    own = [piece for one in lost for piece in own_positions(sampling, batch.owed, one)]
    return _rolled(sampling, Position(batch.epoch, batch.stop, (*batch.owed, *own)))


def samples_in(owed: Iterable[Range]) -> int:
    """How many positions these are."""
    return sum(stop - start for start, stop in owed)


def joined(owed: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions in the same order, in as few ranges as there can be."""
    found: list[Range] = []
    for start, stop in owed:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def own_positions(sampling: Sampling, owed: Iterable[Range], positions: Range) -> list[Range]:
    """Where positions, of which some may lie behind the epoch's own order, are in that order."""
    (start, stop), size = positions, sampling.dataset_size
    found = [(start, min(stop, size))]
    begin = size  # of the next of those that are owed
    for first, end in owed:
        found.append((first + max(start - begin, 0), first + min(stop - begin, end - first)))
        begin += end - first
    return [(first, end) for first, end in found if first < end]


def position_at(sampling: Sampling, step: int) -> Position:
    """The position before step number `step` (from 0) of a run that has never dropped a sample."""
    if step < 0:
        raise ConfigError(f"step={step} must not be negative.")
    epoch, index = divmod(step, steps_per_epoch(sampling))
    return Position(epoch, index * sampling.global_batch_size)


def _rolled(sampling: Sampling, position: Position) -> Position:
    """`position`, or the beginning of the next epoch when no further batch can be taken from this one."""
    end = sampling.dataset_size + samples_in(position.owed)
    if position.epoch < 0 or not 0 <= position.consumed <= end:
        raise ConfigError(
            f"{position} does not exist in a dataset of {sampling.dataset_size} samples. Has the dataset changed since "
            "the run began? Resume with the dataset it began with, or begin a run of another name."
        )
    if not sampling.drop_last:
        return position if position.consumed < end else Position(position.epoch + 1)
    if 0 <= sampling.dataset_size - position.consumed < sampling.global_batch_size:  # what is owed, instead of the rest
        position = Position(position.epoch, sampling.dataset_size, position.owed)
    return position if end - position.consumed >= sampling.global_batch_size else Position(position.epoch + 1)


# ---------------------------------------------------------------- who reads what


def share(batch: GlobalBatch, rank: int, world_size: int, weights: Sequence[float] | None = None) -> range:
    """The positions of `batch` that `rank` reads. Contiguous; the shares of all ranks are the batch, in rank order.

    Sizes differ by at most one, the larger ones first; a share is empty when the batch has fewer samples than the
    world has ranks. With `weights` (one per rank, not negative, relative) sizes are proportional to them, rounded by
    largest remainder: a rank of weight 0 (dormant) gets nothing. Raises ConfigError for weights that cannot be used.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not in a world of {world_size}.")
    if weights is None:
        return _piece(range(batch.start, batch.stop), rank, world_size)
    sizes = _apportion(len(batch), world_size, weights)
    start = batch.start + sum(sizes[:rank])
    return range(start, start + sizes[rank])


def micro_batches(positions: range, count: int) -> list[range]:
    """`positions` in exactly `count` contiguous pieces, the larger ones first; some are empty when there are few."""
    if count < 1:
        raise ConfigError(f"{count} micro-batches: there must be at least 1.")
    return [_piece(positions, index, count) for index in range(count)]


def _piece(positions: range, index: int, count: int) -> range:
    """Piece `index` of `positions` cut into `count` pieces whose sizes differ by at most one, larger first."""
    size, larger = divmod(len(positions), count)
    start = positions.start + index * size + min(index, larger)
    return range(start, start + size + (index < larger))


def _apportion(total: int, world_size: int, weights: Sequence[float]) -> list[int]:
    """`total` split in proportion to `weights`, in exact arithmetic so that every rank computes the same."""
    usable = len(weights) == world_size and all(0 <= weight < float("inf") for weight in weights) and sum(weights) > 0
    if not usable:
        raise ConfigError(
            f"weights={list(weights)!r} for a world of {world_size}: one finite number >= 0 per rank, and not all 0."
        )
    fractions = [Fraction(float(weight)) for weight in weights]
    quotas = [total * fraction / sum(fractions) for fraction in fractions]
    sizes = [int(quota) for quota in quotas]
    by_remainder = sorted(range(world_size), key=lambda rank: (sizes[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes
