"""CheckFreq for any PyTorch loop: checkpoints as often as a budget allows, and a resume at the exact next sample.

::

    import raytrain_ft.checkfreq as checkfreq

    loader = checkfreq.Loader(dataset, global_batch_size=64)              # instead of DataLoader
    with checkfreq.open("runs/digits", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader):
        for epoch in loader.epochs(10):
            for batch in loader:
                ...                                                       # the loop as it was

Works in a script, under torchrun, and in Ray Train. A step is *committed*, and may be checkpointed, when the loop asks for the
next batch: whatever it does after the update (scheduler, averaging, validation) belongs to the step. The copy of the state
overlaps with the next forward and backward pass; only `optimizer.step()` waits for it (Mohan et al., FAST'21).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch.utils.data import DataLoader

from raytrain_ft.checks import is_whole
from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import did_you_mean
from raytrain_ft.places import Place, told
from raytrain_ft.policy.frequency import LONGEST_PROFILE, check_budget, profile_steps
from raytrain_ft.storage.filesystem import LocalStorage, Storage, open_storage, within
from raytrain_ft.storage.selection import counting
from raytrain_ft.training import objects as states
from raytrain_ft.training.journal import Journal
from raytrain_ft.training.ranks import Ranks, current
from raytrain_ft.training.resumable import Loader
from raytrain_ft.training.session import Session, Settings

__all__ = ["Loader", "Run", "open"]

CHECKPOINTS = "checkpoints"
JOURNAL = "checkfreq.jsonl"
SHOWN = 80
"""So many characters of a value are shown in errors, where it may be anything."""


def open(
    path: str | Path,
    *,
    overhead: float = 0.035,
    every: int | Literal["auto"] = "auto",
    keep: int = 2,
    keep_epochs: bool = False,
    resume: Literal["auto", "never", "require"] = "auto",
    override: Collection[str] = (),
    timeout: timedelta = timedelta(minutes=2),
    failure_interval: timedelta | None = None,
    **objects: Any,
) -> Run:
    """Begins a run or goes on with it. Use it as a context manager: its end writes the last checkpoint.

    Under torch.distributed all ranks call it, with a path that all of them share.

    Args:
        path: directory of the run, or any URI of `pyarrow.fs`; checkpoints go to its "checkpoints".
        overhead: the share of the training time that checkpoints may cost, between 0 and 1.
        every: steps between checkpoints; "auto" chooses them from measurements, again and again.
        keep: how many checkpoints stay. With one, a damaged file leaves nothing to fall back to.
        keep_epochs: also write one at the end of every epoch, and keep these.
        resume: "auto" goes on from the newest valid checkpoint, if there is one; "require" fails without one; "never" begins
            anew and leaves earlier ones out of account.
        override: names of `objects` that may differ from the checkpoint, and stay as they are, whether they do or not;
            "dataset" for loaders, which then may.
        timeout: how long to wait for other ranks, and for storage.
        failure_interval: mean time between failures, if known: with it, checkpoints are no more frequent than Young and Daly's
            interval.
        objects: what is saved and restored, by names of your choice: a `Loader`, modules, optimizers, and anything else with
            state_dict() and load_state_dict(). Updates of torch optimizers are followed by themselves; see `Run.update`.

    Raises:
        ConfigError: a value that cannot be used. MismatchError: the checkpoint is of something else: all differences.
        NoCheckpointError: none is there and one is required, or all are damaged.
        LockedError: another run writes there. StorageError: the storage cannot be used.
    """
    _check_path(path)
    _check(overhead, every, keep, resume, override, objects)
    _check_failures(failure_interval)
    if not _longer_than_zero(timeout):
        raise ConfigError(f"checkfreq.open(timeout={timeout!r}): use a timedelta longer than zero, as timedelta(seconds=60)")
    loaders = {name: value for name, value in objects.items() if isinstance(value, Loader)}
    others = {name: value for name, value in objects.items() if name not in loaders}
    _check_names(others)
    states.check_objects(others)
    states.take_apart(others)  # what cannot be stored is told now, not at the first checkpoint
    storage = open_storage(within(Place(str(path)), CHECKPOINTS))
    for loader in loaders.values():
        loader.check_world(current()[1])
        _ = loader.sketches  # read now: a checkpoint that is due waits for no samples
    ranks = Ranks(timeout)
    settings = Settings(
        budget=overhead,
        window=profile_steps(max(map(len, loaders.values()))) if loaders else LONGEST_PROFILE,
        every=None if every == "auto" else every,
        keep=keep,
        keep_epochs=keep_epochs,
        timeout_s=timeout.total_seconds(),
        failure_s=None if failure_interval is None else failure_interval.total_seconds(),
    )
    session = Session(ranks, storage, _journal(storage, ranks.rank), others, loaders, settings)
    try:
        session.begin(resume, override)
    except BaseException:
        session.close()
        raise
    return Run(session)


class Run:
    """A run under way."""

    def __init__(self, session: Session) -> None:
        """Use `open`."""
        self._session = session

    @property
    def step(self) -> int:
        """Updates made so far, over all launches of the run. Those between which no step ended, as of one batch, are one."""
        return self._session.step

    def batches(self, loader: Loader, *, until_step: int) -> Iterator[Any]:
        """Batches of one epoch after the other, until `step` has come that far. None, and a line in the log, if it has already.

        Raises:
            ConfigError: no update was seen in a whole epoch, which would go on for ever. In several, where an optimizer is
                followed or there was an update before: gradients may be accumulated for longer than an epoch.
        """
        if self.step >= until_step:
            self._session.nothing_left(until_step)
        epochs = batches = 0  # since the last update
        while self.step < until_step:
            before, whole = self.step, loader.position.consumed == 0  # which asks where it stands
            for batch in loader:
                yield batch
                if self.step >= until_step:
                    return
                batches += 1
            if self.step != before:
                epochs = batches = 0
                continue
            epochs += whole
            if self._session.stands_still(epochs, batches):
                raise ConfigError(
                    f"Run.batches(until_step={until_step}): no update was seen in {epochs} whole "
                    f"{'epoch' if epochs == 1 else 'epochs'} ({batches} batches), and the run is at step {self.step}: pass the "
                    "optimizer that makes the updates to checkfreq.open, or put updates into `with run.update():`"
                )

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update that is not made by a torch optimizer that `open` was given: waits until the copy of the weights is
        complete, and counts a step."""
        self._session.update_begins()
        yield
        self._session.update_ends()

    def commit(self) -> None:
        """In a loop without a `Loader`, or that draws at random before it asks one for a batch, or goes on to train on another
        one: the place where a resumed one begins, right before that. Loaders call it by themselves. A checkpoint begins here
        when it is due."""
        self._session.commit()

    def untimed(self) -> AbstractContextManager[None]:
        """Around what is no training (a validation in the midst of an epoch), so that it is not taken for slow steps. What
        happens between epochs is left out anyway."""
        return self._session.untimed()

    def ray_checkpoint(self) -> Any:
        """The newest committed checkpoint as a `ray.train.Checkpoint`, for `ray.train.report(metrics, checkpoint=...)`; None if
        there is none yet, and where storage is no directory. It is read in place: report it before `keep` more are there. One
        that this launch has passed over is none: the run goes on from the one before."""
        storage, passed_over = self._session.storage, self._session.passed_over
        if not isinstance(storage, LocalStorage):
            return None
        name = next((name for name in map(str, counting(storage)) if name not in passed_over), None)
        if name is None:
            return None
        import ray.train

        return ray.train.Checkpoint.from_directory(str(storage.root / name))

    def close(self) -> None:
        """What leaving the `with` block does, for code that has none: writes the last checkpoint and waits for it."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._session.finish()
        finally:
            self._session.close()


def _check_path(path: str | Path) -> None:
    """Raises ConfigError for an empty one, as of a variable that is not set: what is within it would be at the root."""
    if not str(path).strip():
        raise ConfigError(
            f"checkfreq.open({str(path)!r}): the path is empty: give a directory, such as runs/digits, or a URI, such as "
            "s3://bucket/digits"
        )


def _check(
    overhead: float, every: int | str, keep: int, resume: str, override: Collection[str], objects: Mapping[str, Any]
) -> None:
    check_budget(overhead)
    if every != "auto" and not is_whole(every, 1):
        raise ConfigError(f'checkfreq.open(every={every!r}): use "auto", or a number of steps of at least 1')
    if not is_whole(keep, 1):
        raise ConfigError(f"checkfreq.open(keep={keep!r}): at least 1 checkpoint must stay")
    if resume not in ("auto", "never", "require"):
        raise ConfigError(f"checkfreq.open(resume={resume!r}): use auto, never or require")
    if not objects:
        raise ConfigError("checkfreq.open: pass what is to be saved by keyword: model=model, optimizer=optimizer, ...")
    if objects.keys() & {"dataset", states.GENERATORS, states.LEFT_OUT}:
        raise ConfigError(f'checkfreq.open: "dataset" and "{states.GENERATORS}" mean something else; choose another keyword')
    if isinstance(override, str):
        raise ConfigError(f'checkfreq.open(override={override!r}): use a set of names, such as {{"{override}"}}')


def _check_names(objects: Mapping[str, Any]) -> None:
    """Raises ConfigError for a misspelt option: it would be taken for an object that is to be saved."""
    options = [name for name, one in signature(open).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name, value in objects.items():
        hint = did_you_mean(name, options)
        if hint and not states.has_state(value) and not isinstance(value, DataLoader):
            raise ConfigError(
                f"checkfreq.open({name}={told(repr(value))[:SHOWN]}): there is no option {name}{hint} (An "
                "object that is to be saved needs state_dict() and load_state_dict())"
            )


def _check_failures(interval: Any) -> None:
    said = f"checkfreq.open(failure_interval={interval!r})"
    if interval == "measured":
        raise ConfigError(f"{said}: they are measured by the Trainer's supervisor, and there is none here: use a timedelta")
    if interval is not None and not _longer_than_zero(interval):
        raise ConfigError(f"{said}: use a timedelta longer than zero")


def _longer_than_zero(value: Any) -> bool:
    return isinstance(value, timedelta) and value > timedelta()


def _journal(storage: Storage, rank: int) -> Journal:
    return Journal(storage.root.parent / JOURNAL if isinstance(storage, LocalStorage) and rank == 0 else None)
