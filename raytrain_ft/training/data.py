"""Loading: the batches that this rank reads, prepared ahead of the step that needs them.

One background thread per `Loader` walks the global batches from any `Position` on, takes this rank's share of each,
and collates it in micro-batches. It holds nothing worth saving: whatever was read ahead is thrown away at a restart
and read again, because its content is a function of (seed, epoch, position) alone (CheckFreq 4.3.1; the state of the
iterator is two integers, never prefetched data). Must not know of Ray, nor of the step that uses the batches.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeGuard, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.policy.sampling import (
    GlobalBatch,
    Position,
    Range,
    Sampling,
    after_loss,
    micro_batches,
    next_batch,
    sample_ids,
    share,
)
from raytrain_ft.policy.sketch import Sketch, as_records
from raytrain_ft.training.random import sample_seed

Augment = Callable[[Any, torch.Generator], Any]
Collate = Callable[[list[Any]], Any]

PATIENCE_S = 600.0
"""With another thread that is inside a dataset."""
_POLL_SECONDS = 0.01  # how late a fence may be noticed while the step waits for data


@runtime_checkable
class BatchSource(Protocol):
    """A dataset that loads, augments and collates whole batches itself, as `DaliImages` does."""

    def __len__(self) -> int: ...

    def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> Any:
        """The collated samples `ids` (int64 [n], n > 0). Each is a function of (seed, epoch, id), whatever `ids` are.

        It may have another argument, `between`: a function to call now and then, which raises when nobody needs the batch.
        """
        ...


def augment_of(task: Any) -> Augment | None:
    """The task's `augment`, if it has one."""
    return getattr(task, "augment", None)


def collate_of(task: Any) -> Collate:
    """The task's `collate`, or torch's."""
    return getattr(task, "collate", default_collate)


def loads_batches(dataset: Any) -> TypeGuard[BatchSource]:
    """Whether it is a `BatchSource`. What can be read by index is not, whatever other methods it has."""
    by_index = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)  # torch's raises
    return isinstance(dataset, BatchSource) and not by_index and not hasattr(dataset, "__getitems__")


def _takes_between(load_batch: Callable[..., Any]) -> bool:
    try:
        return "between" in inspect.signature(load_batch).parameters
    except ValueError:  # some functions of C do not say
        return False


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward pass of one rank reads."""

    data: Any  # the collated samples; None when there are none
    ids: np.ndarray  # int64 [len(positions)]: sample ids, in order
    positions: range  # of `batch.epoch`'s order
    batch: GlobalBatch  # what all ranks together read in this step
    after: Position  # the state of the data once this step is committed


class Loader:
    """Prepares `prefetch` steps ahead, on one thread. Used by one consumer thread.

    `dataset` is map-style: `__len__` and `__getitem__(int)`, or `__getitems__(list[int]) -> list` for whole batches; or
    it is a `BatchSource`, which augments and collates by itself.
    `augment(sample, generator)` returns a new sample, random only through `generator`, which is seeded from
    (seed, epoch, sample id): so its draws do not depend on the world or on what was redone. `timeout` bounds every wait
    for the dataset. Raises ConfigError when the dataset cannot be read in the order of `sampling`.
    """

    def __init__(
        self,
        dataset: Any,
        sampling: Sampling,
        augment: Augment | None = None,
        collate: Collate = default_collate,
        prefetch: int = 2,
        timeout: timedelta = timedelta(minutes=10),
        sketches: Sequence[Sketch] = (),
    ) -> None:
        size = dataset_size(dataset)
        if size != sampling.dataset_size:
            raise ConfigError(f"The dataset has {size} samples, but the run was planned for {sampling.dataset_size}.")
        if loads_batches(dataset) and (augment is not None or collate is not default_collate):
            raise ConfigError(
                f"{type(dataset).__name__} augments and collates by itself: leave out the task's augment (DaliImages has "
                "an argument of that name) and its collate."
            )
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}: the number of steps to prepare ahead must be at least 1.")
        self._dataset, self._sampling, self._augment, self._collate = dataset, sampling, augment, collate
        self._prefetch, self._timeout_s = prefetch, timeout.total_seconds()
        self.sketches = tuple(sketches)
        self._asks = loads_batches(dataset) and _takes_between(dataset.load_batch)
        self._feed: _Feed | None = None

    @property
    def data(self) -> dict[str, Any]:
        """What a position refers to: the order of the samples, and what they look like, as a checkpoint holds it."""
        return asdict(self._sampling) | {"samples": as_records(self.sketches)}

    def start(
        self,
        position: Position,
        rank: int,
        world_size: int,
        micro_batches: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        """(Re)starts at `position` as `rank` of a world. Never waits; nothing of an earlier start is ever returned."""
        if self._feed is not None:
            self._feed.stop()
        plan = _Plan(position, rank, world_size, micro_batches, weights)
        plan.pieces(self._sampling, position)  # what is wrong with the arguments is raised here, not by the thread
        self._feed = _Feed(self._prefetch)
        thread = threading.Thread(target=self._fill, args=(self._feed, plan), name="raytrain_ft-loader", daemon=True)
        self._feed.thread = thread
        atexit.unregister(self.stop)
        atexit.register(self.stop)  # a thread that is inside a C++ library when the interpreter ends makes it abort
        thread.start()

    def next(self, check: Callable[[], None] | None = None) -> list[MicroBatch]:
        """The micro-batches of the current step; always as many as `start` was told, even when some are empty.

        While it waits, `check` is called at least every 20 ms, and may raise to leave the wait. An exception of the
        user's dataset, augmentation or collation is raised here with its traceback, once the batches before it are
        used up. Raises TaskError when the dataset has not delivered within `timeout`.
        """
        assert self._feed is not None, "next() before start()"
        deadline = time.monotonic() + self._timeout_s
        while True:
            pieces = self._feed.take(_POLL_SECONDS)
            if pieces is not None:
                return pieces
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise TaskError(
                    f"No batch within {self._timeout_s:.0f} s: the dataset hangs while it loads {self._feed.doing}. "
                    "Look at the storage it reads from, and at what the dataset does for these samples."
                )

    def position_after(self, batch: GlobalBatch, lost: Sequence[Range]) -> Position:
        """The position after a batch of which `lost` is to be read again."""
        return after_loss(self._sampling, batch, lost)

    def stop(self, patience: timedelta = timedelta(seconds=1)) -> None:
        """Ends the thread. One that is stuck inside the dataset is left behind after `patience`."""
        if self._feed is not None:
            self._feed.stop()
            assert self._feed.thread is not None
            if self._feed.thread is not threading.current_thread():  # a finalizer runs on whichever thread collects garbage
                self._feed.thread.join(patience.total_seconds())
            self._feed = None
        atexit.unregister(self.stop)

    # ------------------------------------------------------------ on the thread

    def _fill(self, feed: _Feed, plan: _Plan) -> None:
        """Body of the thread: batch after batch into `feed`, until somebody stops it."""
        position = plan.position
        try:
            while not feed.stopped:
                batch, after, pieces = plan.pieces(self._sampling, position)
                feed.put([self._micro_batch(feed, batch, after, positions) for positions in pieces])
                position = after
        except _StoppedError:
            return
        except BaseException as error:  # the consumer is the one to raise it, whatever it is
            error.add_note(f"(raised while loading {feed.doing})")
            feed.fail(error)

    def _micro_batch(self, feed: _Feed, batch: GlobalBatch, after: Position, positions: range) -> MicroBatch:
        ids = sample_ids(self._sampling, batch.epoch, positions, batch.owed).copy()
        if len(ids) == 0:
            return MicroBatch(None, ids, positions, batch, after)
        feed.doing = (
            f"sample ids {ids[:8].tolist()}{'...' if len(ids) > 8 else ''}, "
            f"positions [{positions.start}, {positions.stop}) of epoch {batch.epoch}"
        )
        with alone_inside(self._dataset, self._timeout_s):  # after a restart, until the earlier thread has left it
            return MicroBatch(self._load(feed, ids, batch.epoch), ids, positions, batch, after)

    def _load(self, feed: _Feed, ids: np.ndarray, epoch: int) -> Any:
        """The collated samples `ids`, augmented as of `epoch`."""
        if loads_batches(self._dataset):
            feed.raise_if_stopped()
            asks = {"between": feed.raise_if_stopped} if self._asks else {}
            return self._dataset.load_batch(ids, epoch, self._sampling.seed, **asks)
        if type(self._dataset) is TensorDataset and self._augment is None and self._collate is default_collate:
            index = torch.from_numpy(ids)
            return [tensor[index] for tensor in self._dataset.tensors]  # the same bits and type as collated rows
        samples = fetch(self._dataset, ids.tolist(), feed.raise_if_stopped)
        if self._augment is not None:
            augment_all(self._augment, samples, ids.tolist(), epoch, self._sampling.seed, feed.raise_if_stopped)
        return self._collate(samples)


# ---------------------------------------------------------------- reading a map-style dataset


_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()  # by the dataset's id: whoever has one, has both
_looking = threading.Lock()


@contextmanager
def alone_inside(dataset: Any, timeout_s: float = PATIENCE_S) -> Iterator[None]:
    """A dataset may hold an open file, so two threads must never be inside it, whichever loaders they belong to.

    Raises:
        TaskError: another thread does not leave it within `timeout_s`.
    """
    with _looking:
        lock = _locks.setdefault(id(dataset), threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise TaskError(
            f"Another thread has hung in the {type(dataset).__name__} for {timeout_s:.0f} s. Two threads must not read one "
            "dataset: restart this process, and look at the storage it reads from."
        )
    try:
        yield
    finally:
        lock.release()


def dataset_size(dataset: Any) -> int:
    """Number of samples. Raises ConfigError for a dataset that is empty or cannot be read by index."""
    if isinstance(dataset, type):  # what instances have, it has as well
        raise ConfigError(
            f"{dataset.__name__} is a class; a dataset is an instance of one (you passed the class: add parentheses)"
        )
    readable = any(hasattr(dataset, name) for name in ("__getitem__", "__getitems__", "load_batch"))
    if not readable or isinstance(dataset, IterableDataset):  # torch's class inherits a __getitem__, which only raises
        raise _not_map_style(dataset)
    try:
        size = len(dataset)
    except TypeError as error:  # without __len__, or a wrapper of what has none
        raise _not_map_style(dataset) from error
    if size == 0:
        raise ConfigError(f"{type(dataset).__name__} is empty: check its path and filters.")
    return size


def task_size(dataset: Any) -> int:
    """Number of samples of what `TrainTask.dataset()` gave. Refuses in the driver, at once, what every worker would refuse."""
    try:
        return dataset_size(dataset)
    except ConfigError as error:
        raise ConfigError(f"TrainTask.dataset(): {error}") from error


def _not_map_style(dataset: Any) -> ConfigError:
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        return ConfigError(
            f"{name} is not map-style: it gives batches, which are made here. Return its dataset (loader.dataset); "
            "the batch size is Trainer(global_batch_size=...), and a collate_fn is TrainTask.collate"
        )
    return ConfigError(
        f"{name} is not map-style: it needs __len__ and __getitem__(index). A stream cannot be "
        "resumed or shared out exactly; write it to Arrow or Parquet files and use raytrain_ft's ArrowDataset."
    )


def fetch(dataset: Any, ids: list[int], between: Callable[[], None] = lambda: None) -> list[Any]:
    """Samples `ids` of a map-style dataset, in that order. `between` is called before each load, and may raise."""
    between()
    if type(dataset) is TensorDataset:
        index = torch.tensor(ids, device="cpu")  # copies: an augmentation in place cannot reach the dataset's own tensors
        return list(zip(*(tensor[index].unbind(0) for tensor in dataset.tensors), strict=True))
    if getattr(dataset, "__getitems__", None):
        samples = list(dataset.__getitems__(ids))
        if len(samples) != len(ids):
            name = type(dataset).__name__
            raise ConfigError(f"{name}.__getitems__ returned {len(samples)} samples for {len(ids)} ids.")
        return samples
    samples = []
    for index in ids:
        between()
        try:
            samples.append(dataset[index])
        except BaseException as error:
            error.add_note(f"(raised by sample {index})")
            raise
    return samples


def augment_all(
    augment: Augment, samples: list[Any], ids: list[int], epoch: int, seed: int, between: Callable[[], None] = lambda: None
) -> None:
    """Puts each of the samples `ids` as of `epoch` in the place of what was loaded. `between` as for `fetch`."""
    generator = torch.Generator()
    for i, sample_id in enumerate(ids):
        between()
        generator.manual_seed(sample_seed(seed, epoch, sample_id))
        try:
            samples[i] = augment(samples[i], generator)
        except BaseException as error:
            error.add_note(f"(raised by sample {sample_id})")
            raise


# ---------------------------------------------------------------- between the two threads


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one start of the loader was told."""

    position: Position
    rank: int
    world_size: int
    count: int  # of micro-batches
    weights: Sequence[float] | None

    def pieces(self, sampling: Sampling, position: Position) -> tuple[GlobalBatch, Position, list[range]]:
        """The global batch at `position`, the position after it, and this rank's micro-batches of it."""
        batch, after = next_batch(sampling, position)
        mine = share(batch, self.rank, self.world_size, self.weights)
        return batch, after, micro_batches(mine, self.count)


class _StoppedError(Exception):
    """Leaves the thread of a feed that nobody will read from again."""


class _Feed:
    """A bounded queue that belongs to one start of the loader: a thread that outlives it can disturb nobody."""

    def __init__(self, capacity: int) -> None:
        self.thread: threading.Thread | None = None
        self.stopped = False
        self.doing = "its first batch"
        self._capacity = capacity
        self._ready: deque[list[MicroBatch]] = deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, pieces: list[MicroBatch]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or len(self._ready) < self._capacity)
            self.raise_if_stopped()
            self._ready.append(pieces)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[MicroBatch] | None:
        """The next step's micro-batches, or None after `timeout_s` seconds. Raises what the thread raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None, timeout_s)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            return None

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def raise_if_stopped(self) -> None:
        if self.stopped:
            raise _StoppedError
