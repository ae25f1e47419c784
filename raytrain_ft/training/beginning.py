"""Where a session begins: all ranks were given alike, one takes the right to write, all load the newest valid checkpoint."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from raytrain_ft.errors import MAY_BE_WHOLE_ELSEWHERE, ConfigError, NoCheckpointError, StorageError
from raytrain_ft.storage import lock, retention, selection
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import Storage
from raytrain_ft.training import objects as states
from raytrain_ft.training import resume as resuming
from raytrain_ft.training.journal import Journal
from raytrain_ft.training.ranks import Ranks, tried
from raytrain_ft.training.resumable import Loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a session goes on with.

    Attributes:
        owner, epoch: of the right to write (see `storage.lock`).
        plan: what was loaded; None if there was nothing to load.
        rejected: names of checkpoints that are damaged, as some rank sees them; unread: of those that could not be read.
    """

    owner: str
    epoch: int
    plan: resuming.Plan | None
    rejected: list[str]
    unread: list[str]


class Beginning:
    """The first thing that the ranks do together."""

    def __init__(
        self, ranks: Ranks, storage: Storage, journal: Journal, objects: Mapping[str, Any], loaders: Mapping[str, Loader]
    ) -> None:
        self._ranks, self._storage, self._journal = ranks, storage, journal
        self._objects, self._loaders = objects, loaders
        self._rejected: list[str] = []
        self._unread: list[str] = []

    def begin(self, resume: str, override: Collection[str], closing: ExitStack) -> Begun:
        """Takes the right to write, which `closing` gives back, also after an error, and loads the newest valid checkpoint.

        Raises:
            the errors of `checkfreq.open`, on every rank.
        """
        self.compare_ranks()
        right = self._ranks.first_does(partial(self._acquire, closing))
        plan = self._resume(resume, override, right["epoch"])
        return Begun(**right, plan=plan, rejected=self._rejected, unread=self._unread)

    def compare_ranks(self) -> None:
        """Each rank stores a part of what all were given alike: parts of different states do not fit together.

        Raises:
            ConfigError: on every rank, naming what differs on one of them.
        """
        data = {name: {"class": "Loader", **asdict(loader.sampling)} for name, loader in self._loaders.items()}
        here = json.loads(json.dumps(states.describe(self._objects) | data))
        first = self._ranks.first_says(here)
        found = states.unlike(first, here)
        error = ConfigError(f"checkfreq.open was given other objects here than on rank 0: {', '.join(found)}")
        self._ranks.agree(error if found else None)

    def _acquire(self, closing: ExitStack) -> dict[str, Any]:
        right = lock.acquire(self._storage, uuid.uuid4().hex)
        closing.callback(right.release)
        retention.sweep(self._storage, right.owner.epoch, new=right.new)
        return {"owner": right.owner.owner, "epoch": right.owner.epoch}

    def _resume(self, resume: str, override: Collection[str], epoch: int) -> resuming.Plan | None:
        """Every rank reads the same checkpoint, and none changes anything unless it fits on all."""

        def choose() -> list[str]:
            names = [] if resume == "never" else [str(name) for name in selection.counting(self._storage)]
            if not names and resume == "require":
                raise NoCheckpointError(f'{self._storage.uri} holds no checkpoint, and resume="require"')
            return names

        names = self._ranks.first_does(choose)
        if not names:
            self._ranks.agree(self._read_before())
            if resume == "never":
                self._ranks.first_does(lambda: selection.begin_anew(self._storage, epoch))
            self._journal.tell("Started", {"world": self._ranks.count})
            return None
        content = self.newest(names)
        rank = self._ranks.rank
        plan = self._ranks.all_do(lambda: resuming.plan(content, self._objects, self._loaders, override, rank))
        before = _rates(self._objects)
        self._ranks.all_do(lambda: resuming.load(plan))
        replaced = _replaced(before, _rates(self._objects))
        resuming.set_generators(plan, rank)
        data = {name: loader.state_dict() for name, loader in self._loaders.items()}
        about = {"world": self._ranks.count, "world_before": plan.world, "notes": plan.notes + replaced}
        self._journal.tell("Resumed", {"checkpoint": str(content.manifest.name), "step": plan.step, "data": data, **about})
        if rank == 0:
            where = f"goes on from step {plan.step} ({self._storage.uri}/{content.manifest.name})"
            self._journal.show("; ".join([where, *replaced]))
        return plan

    def _read_before(self) -> ConfigError | None:
        """A run that begins would never see what was read of a loader before, perhaps in the run before it. One that was put
        elsewhere on purpose is left there."""
        for name, loader in self._loaders.items():
            if loader.was_read:
                return ConfigError(
                    f"checkfreq.open({name}=Loader): batches were read from it before, so it stands at sample "
                    f"{loader.at.consumed} of epoch {loader.at.epoch}, and there is no checkpoint to go on from: make a new "
                    f'Loader for each run, or put it back first: {name}.load_state_dict({{"epoch": 0, "consumed": 0}})'
                )
        return None

    def newest(self, names: Sequence[str]) -> Content:
        """The first of these checkpoints that is whole, as every rank sees it. All read it at the same time: a large one takes
        longer than ranks wait for each other.

        Raises:
            NoCheckpointError: all are damaged. MismatchError: it is none of ours.
        """
        passed: list[str] = []
        for name in names:
            content, error = tried(partial(resuming.read, self._storage, name))
            failures = self._ranks.failures(error)
            for failure in failures:
                if not isinstance(failure, StorageError):
                    raise failure
            if content is not None and not failures:
                return content
            passed.append(f"checkpoint {name} is passed over: {failures[0]}")
            damaged = any(not isinstance(failure, MAY_BE_WHOLE_ELSEWHERE) for failure in failures)
            (self._rejected if damaged else self._unread).append(name)
            self._journal.tell("CheckpointPassedOver", {"reason": passed[-1]})
        raise NoCheckpointError(
            f"{self._storage.uri}: no checkpoint can be read; " + "; ".join(passed) + '. resume="never" begins anew'
        )


def _rates(objects: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """The learning rates of each optimizer's groups; None where a scheduler makes them, which leaves its mark in the group, or
    is passed itself."""
    scheduled = [getattr(value, "optimizer", None) for value in objects.values()]
    return {
        name: [None if "initial_lr" in one else _number(one.get("lr")) for one in getattr(value, "param_groups", [])]
        for name, value in objects.items()
        if isinstance(value, torch.optim.Optimizer) and not any(value is one for one in scheduled)
    }


def _number(rate: Any) -> float | None:
    known = isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.numel() == 1)
    return float(rate) if known else None


def _replaced(before: Mapping[str, Sequence[float | None]], after: Mapping[str, Sequence[float | None]]) -> list[str]:
    """In words: which learning rates are others now than the optimizers were made with."""
    found: list[str] = []
    for name, rates in before.items():
        pairs = [(b, a) for b, a in zip(rates, after[name], strict=False) if b is not None and a is not None and b != a]
        if pairs:
            made, stored = pairs[0]
            found.append(
                f"the learning rate of {name} is the checkpoint's {stored:g}, not {made:g}: set another after checkfreq.open"
            )
    return found
