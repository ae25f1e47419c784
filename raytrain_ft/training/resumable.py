"""A loader that goes on with the exact next sample: torch's DataLoader, driven by an order that two integers describe.

CheckFreq's resumable iterator (section 4.3.1, Fig. 5), for any number of processes: the state is (epoch, samples consumed by
all ranks together). Nothing that was read ahead is saved. What a dataset draws at random, from torch, numpy or `random`, is a
function of (seed, epoch, sample), so it is the same whoever loads the sample, and the training's own draws are not disturbed.
Collation in a loader worker draws what is a function of (seed, epoch, batch): a worker's own stream would begin anew on resume.

A `BatchSource`, such as `DaliImages`, has nothing for DataLoader to do: the trainer's own loader reads it, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.sampling import Position, Sampling, next_batch, sample_ids, share, steps_per_epoch
from raytrain_ft.policy.sketch import Sketch
from raytrain_ft.training.data import BatchSource, alone_inside, dataset_size, loads_batches
from raytrain_ft.training.data import Loader as CoreLoader
from raytrain_ft.training.determinism import check_deterministic
from raytrain_ft.training.ranks import current
from raytrain_ft.training.seeded import Seeded, begun, draws_nothing, in_workers, sketches

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "generator")


class Loader:
    """Takes the place of `torch.utils.data.DataLoader`.

    `for batch in loader` runs to the end of the epoch, from wherever it stands: from its beginning, in the midst of it after a
    resume or a `break`. Under torch.distributed every rank reads its share of each global batch.

    Attributes:
        dataset: as given.
        at: as `position`, for checkfreq itself.
        was_read: whether batches were read from where it was set to begin.
        asked: whether the loop has asked where the loader stands, so that it knows which epochs are left.
        share: this rank's samples in the batch that was handed out last, as a multiple of an equal share. It is 1 unless a
            batch cannot be shared out evenly; then DDP's mean over ranks is the mean over samples if the loss is multiplied
            by it.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: map-style: `__len__` and `__getitem__`; or a `BatchSource`, such as `DaliImages`.
            global_batch_size: samples per batch over all ranks, whatever their number: it is what stays when that changes.
            shuffle: each epoch in an order of its own, a function of (seed, epoch).
            drop_last: leave out an epoch's last batch if it is short.
            options: any other argument of DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor... None with a
                `BatchSource`.

        Raises:
            ConfigError: the dataset cannot be read by index, or an option cannot be used.
        """
        _check_options(dataset, options)
        self.dataset, self._options = dataset, options
        self.sampling = Sampling(dataset_size(dataset), global_batch_size, seed, shuffle, drop_last)
        self.at = Position()
        self.was_read = self.asked = False
        self.share = 1.0
        self._before: Callable[[], None]
        self._after: Callable[[bool], None]
        self._again: Callable[[int], None]
        self._begins: Callable[[], AbstractContextManager[None]]
        self.observe()
        if loads_batches(dataset):
            ahead = _Ahead(dataset, self.sampling)
            self._batches, self._look = ahead.batches, ahead.look
        else:
            self._batches, self._look = self._by_torch(options), partial(sketches, dataset, self.sampling, options)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or one in another process, is made anew, and stands where this one does: by itself, unlike what this one has
        told its DataLoader to read."""
        order = asdict(self.sampling)
        del order["dataset_size"]
        return _made_anew, (type(self), self.dataset, order | self._options), {"at": self.at, "was_read": self.was_read}

    @cached_property
    def sketches(self) -> tuple[Sketch, ...]:
        """What the first samples look like: of another dataset of the same length they are others.

        Raises:
            ConfigError: as for the first batch of a `BatchSource`.
        """
        return self._look()

    def _by_torch(self, options: Mapping[str, Any]) -> Callable[[Position], Iterator[Any]]:
        """What gives the batches from the loader's position to the end of the epoch."""
        # A collate_fn in a worker may draw where the dataset does not, and has to be seeded too.
        collates_elsewhere = options.get("collate_fn") is not None and options.get("num_workers", 0) > 0
        seeded = not draws_nothing(self.dataset) or collates_elsewhere
        rows = Seeded(self.dataset, self.sampling.seed) if seeded else self.dataset
        shares = _Shares(self, seeded)
        given = in_workers(options) if seeded else options
        loader: DataLoader[Any] = DataLoader(rows, batch_sampler=shares, generator=torch.Generator(), **given)
        return lambda _: begun(loader)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return steps_per_epoch(self.sampling)

    @property
    def position(self) -> Position:
        """Where the loader stands: the batch that comes next begins here."""
        self.asked = True
        return self.at

    @property
    def done(self) -> int:
        """Batches of the present epoch that were handed out: `for i, batch in enumerate(loader, loader.done)` counts on after a
        resume in the midst of it."""
        return -(-self.at.consumed // self.sampling.global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.at.epoch
        batches: Iterator[Any] | None = None
        ended = False
        try:
            while self.at.epoch == epoch:
                self._before()
                with self._begins() if self.at.consumed == 0 else nullcontext():
                    batches = batches or self._batches(self.at)
                    data = next(batches)
                batch, after = next_batch(self.sampling, self.at)
                rank, count = current()
                self.share = len(share(batch, rank, count)) * count / len(batch)
                self.at, self.was_read = after, True
                yield data
                if self.at != after:
                    raise self._read_by_others(after)
            ended = True
        finally:  # also when the loop is left with `break`
            self._after(ended)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`: `for epoch in loader.epochs(90): for batch in loader: ...`

        One that is left in its midst is given again, and goes on there. What is done once in each epoch would be done twice:
        leave both loops instead, `if loader.done: break` after the inner one.

        Raises:
            ConfigError: an epoch was left without reading a batch of it, which would go on for ever; or more was read than the
                epoch.
        """
        self.asked = True
        while self.at.epoch < count:
            before, end = self.at, Position(self.at.epoch + 1)
            yield before.epoch
            if self.at == before:
                raise ConfigError(f"epoch {before.epoch}: the loop over epochs read no batch from its loader")
            if (self.at.epoch, self.at.consumed) > (end.epoch, end.consumed):
                raise self._read_by_others(end, "Run.batches goes on over epochs by itself: use it without epochs(). ")
            if self.at.epoch == before.epoch:
                self._again(before.epoch)

    def _read_by_others(self, expected: Position, hint: str = "") -> ConfigError:
        found = self.at
        return ConfigError(
            f"the loader was to stand at sample {expected.consumed} of epoch {expected.epoch}, and stands at {found.consumed} "
            f"of epoch {found.epoch}: something else has read from it meanwhile, and training would never see those samples. "
            f"{hint}Give a validation, or a look at a batch, a checkfreq.Loader of its own"
        )

    def observe(
        self,
        before: Callable[[], None] = lambda: None,
        after: Callable[[bool], None] = lambda _: None,
        again: Callable[[int], None] = lambda _: None,
        begins: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Has `before` called when a batch is asked for, `after` when the loop is left: whether at the epoch's end, and `again`
        when `epochs` is about to give an epoch again, which was left in its midst. An epoch's first batch is waited for within
        what `begins` gives, for loader workers may have to start."""
        self._before, self._after, self._again, self._begins = before, after, again, begins

    # ------------------------------------------------------------ what is saved

    def state_dict(self) -> dict[str, int]:
        """The two integers."""
        return two_integers(self.position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there.

        Raises:
            ConfigError: there is no such position in this dataset.
        """
        position = position_of(state)
        batch, _ = next_batch(self.sampling, position)
        self.at, self.was_read = Position(batch.epoch, batch.start), False

    def check_world(self, count: int, position: Position | None = None) -> None:
        """Raises ConfigError if some batch has fewer samples than there are ranks, also of what is left of an epoch from
        `position` on: a rank would have nothing to do."""
        _check_shares(self.sampling, count, position or Position())


def _made_anew(kind: type[Loader], dataset: Any, options: dict[str, Any]) -> Loader:
    return kind(dataset, **options)


def _check_options(dataset: Any, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option of DataLoader that cannot be used."""
    for name in _OURS:
        if name in options:
            raise ConfigError(
                f"checkfreq.Loader({name}=...): the loader makes the order itself; use global_batch_size, shuffle, seed, "
                "drop_last"
            )
    if loads_batches(dataset) and options:
        given = ", ".join(f"{name}=..." for name in options)
        raise ConfigError(
            f"checkfreq.Loader({type(dataset).__name__}, {given}): such a dataset loads, augments and collates whole batches "
            "itself, so there is no DataLoader that could take these options; leave them out"
        )
    if not options.get("in_order", True):
        raise ConfigError(
            "checkfreq.Loader(in_order=False): batches would come in another order than they are counted in, and a "
            "resumed run would repeat some and leave out others"
        )


def _check_shares(sampling: Sampling, count: int, position: Position) -> None:
    """Raises ConfigError if some batch has fewer samples than there are ranks: of a whole epoch, or of what is left of one in
    which the batches before `position` had another size."""
    size, batch = sampling.dataset_size, sampling.global_batch_size
    left = size - position.consumed
    advice = "use another global_batch_size, or drop_last=True"
    batches = [(batch, "each batch", advice)]
    if not sampling.drop_last:
        rest = f"the last batch of epoch {position.epoch}, of which {left} samples are left,"
        batches += [(size % batch, "the last batch of an epoch", advice)]
        batches += [(left % batch, rest, f"{advice}, or go on as before until the epoch is over")]
    for samples, which, what_to_do in batches:
        if 0 < samples < count:
            raise ConfigError(f"{which} has {samples} samples for {count} ranks: {what_to_do}")


def two_integers(position: Position) -> dict[str, int]:
    """A position as it is stored: nothing is ever owed where the loop belongs to the user."""
    return {"epoch": position.epoch, "consumed": position.consumed}


def position_of(state: Mapping[str, Any]) -> Position:
    """The position that was stored."""
    return Position(int(state["epoch"]), int(state["consumed"]))


class _Ahead:
    """This rank's batches of a `BatchSource`, which the trainer's loader prepares ahead, on its thread."""

    def __init__(self, dataset: BatchSource, sampling: Sampling) -> None:
        self._dataset, self._sampling = dataset, sampling
        self._core = CoreLoader(dataset, sampling)
        self._seen: tuple[Sketch, ...] | None = None
        self._reached: tuple[Position, int, int] | None = None  # what the thread's next batch is of; None: it has to be started
        weakref.finalize(self, self._core.stop)  # a program may make a loader for each of its validations

    def look(self) -> tuple[Sketch, ...]:
        """What a few samples look like, each of which is loaded several times.

        Raises:
            ConfigError: a batch depends on more than (seed, epoch, sample ids), so that a resumed run would read another.
        """
        if self._seen is None:
            with alone_inside(self._dataset):
                self._seen = check_deterministic(self._dataset, self._sampling)
        return self._seen

    def batches(self, position: Position) -> Iterator[Any]:
        """From `position` on, without an end: the thread reads on into the next epoch, and after a `break`. It begins anew only
        where the position is not the one that it has come to.

        Raises:
            ConfigError: as `look` does; or a rank would have nothing to do.
        """
        while True:
            self.look()
            here = (position, *current())
            if here != self._reached:
                _check_shares(self._sampling, here[2], position)
                self._core.start(*here)
            self._reached = None  # what could not be loaded is tried anew
            (piece,) = self._core.next()
            position = piece.after
            self._reached = (position, *here[1:])
            yield piece.data


class _Shares:
    """The batch sampler: this rank's sample ids, batch after batch, from the loader's position to the end of the epoch.

    Args:
        seeded: each comes with its epoch, as `Seeded` takes them.
    """

    def __init__(self, loader: Loader, seeded: bool) -> None:
        self._loader, self._seeded = loader, seeded

    def __iter__(self) -> Iterator[list[Any]]:
        sampling, position = self._loader.sampling, self._loader.at
        _check_shares(sampling, current()[1], position)
        epoch = position.epoch
        while position.epoch == epoch:
            batch, position = next_batch(sampling, position)
            ids = sample_ids(sampling, epoch, share(batch, *current())).tolist()
            yield [(epoch, index) for index in ids] if self._seeded else ids

    def __len__(self) -> int:
        return len(self._loader)
