"""What stands behind `raytrain_ft.checkfreq`: one process's part in a run whose loop belongs to the user.

A step begins when a batch is asked for and ends when the next one is, of a loader whose loop the update was in: then it is
*committed*, with all that the loop did after the update, such as a validation with a loader of its own. Rank 0 decides how
often to checkpoint. The others learn it without a collective per step: with every checkpoint rank 0 also says at which step it
will speak again, and only there do the ranks meet (a broadcast of two numbers over gloo). Before that they meet once, after the
first step, to see whether what each stores a part of is the same on all.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.storage.filesystem import Storage
from raytrain_ft.training import objects as states
from raytrain_ft.training import resume as resuming
from raytrain_ft.training.beginning import Beginning
from raytrain_ft.training.checkpointer import Checkpointer, go_on
from raytrain_ft.training.followed import follow
from raytrain_ft.training.forgotten import NOT_GIVEN, Forgotten
from raytrain_ft.training.journal import Journal
from raytrain_ft.training.missing import Missing
from raytrain_ft.training.ranks import Ranks
from raytrain_ft.training.resumable import Loader
from raytrain_ft.training.settings import Target
from raytrain_ft.training.stopwatch import Stopwatch

MOST_TOLD = 5
"""So many differences are told of a state that has become another; there may be one in each of thousands of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a session was told; see `checkfreq.open`. `window`: steps to measure before the first checkpoint; `failure_s`: mean
    time between failures."""

    budget: float
    window: int
    every: int | None
    keep: int
    keep_epochs: bool
    timeout_s: float
    failure_s: float | None


class Session:
    """See above. All methods belong to the training thread.

    Attributes:
        step: updates made so far, over all launches of the run.
        storage: where its checkpoints are.
        passed_over: names of those that this launch found to be damaged, or could not read.
    """

    def __init__(
        self,
        ranks: Ranks,
        storage: Storage,
        journal: Journal,
        objects: Mapping[str, Any],
        loaders: Mapping[str, Loader],
        settings: Settings,
    ) -> None:
        self.step = 0
        self.storage = storage
        self.passed_over: set[str] = set()
        self._ranks, self._journal, self._settings = ranks, journal, settings
        self._objects, self._loaders = objects, loaders
        self._closing = ExitStack()
        self._resumed: resuming.Plan | None = None
        self._began_at = 0
        self._overridden: set[str] = set()  # what this launch was told to leave as it is
        self._left_told = self._again_told = False
        self._stood: dict[str, int] = {}  # the epoch beyond 0 in which each was resumed, until one is trained on
        self._opened = threading.get_ident()
        self._updating: int | None = None  # the thread of the last update
        self._parts: states.Parts | None = None
        self._given: dict[str, Any] | None = None  # what the objects were like at the beginning; None: others were told of
        self._committed: dict[str, Position] = {}
        self._reading: set[str] = set()  # the loaders whose loop is under way
        self._ended: set[str] = set()  # those whose epoch came to its end in the loop, with nothing asked of them since
        self._uncommitted: set[str] | None = None  # the loaders that end the present step, if there was an update in it
        self._last: set[str] = set()  # those that ended the last one; none: the loop said itself that it was over
        self._goes_on_at: set[str] | None = None  # as is stored; None: whoever is asked first
        self._open_updates = 0  # begun and not ended, since a batch was asked for
        self._forgotten = Forgotten(self._nothing_to_store, self._parameters, follows=bool(self._optimizers()))
        self._missing = Missing(lambda reason: self._journal.tell("NotGiven", {"reason": reason}), objects)
        self._next_decision = 0
        self._watch = Stopwatch()  # runs from the first batch on
        self._update_s = self._update_began = 0.0

    # ---------------------------------------------------------------- the beginning

    def begin(self, resume: str, override: Collection[str]) -> None:
        """Takes the right to write, loads the newest valid checkpoint, and gets ready. Undone by `close`, also after an error.

        Raises:
            the errors of `checkfreq.open`, on every rank.
        """
        self._closing.callback(self._ranks.leave)
        self._closing.callback(self._journal.close)
        beginning = Beginning(self._ranks, self.storage, self._journal, self._objects, self._loaders)
        begun = beginning.begin(resume, override, self._closing)
        self.passed_over = {*begun.rejected, *begun.unread}
        self._overridden = set(override) & self._objects.keys()
        if begun.plan is not None:
            self._resumed = begun.plan
            self.step = self._began_at = begun.plan.step
            self._last, self._goes_on_at = begun.plan.ended_by or set(), begun.plan.ended_by
            self._stood = {name: position.epoch for name, position in self._positions().items() if position.epoch}
            for loader in self._loaders.values():
                loader.asked = False  # before, it stood elsewhere
        timeout_s = self._settings.timeout_s
        target = Target(
            place=self.storage.place,
            owner=begun.owner,
            epoch=begun.epoch,
            keep=self._settings.keep,
            keep_epochs=self._settings.keep_epochs,
            profile_key=self._profile_key(),
            timeout_s=timeout_s,
            most_patience_s=timeout_s / 2 if self._ranks.count > 1 else math.inf,  # others wait for what rank 0 says
        )
        self._checkpointer = Checkpointer(target, self._capture, self._tuner, self._journal.tell, self._own)
        self._closing.callback(self._checkpointer.close, timeout_s)
        self._committed = self._positions()
        self._given = states.describe(self._objects)
        self._tell_of_samples()
        self._missing.begin()
        self._follow()
        self._checkpointer.begin(
            self._ranks.rank, self._ranks.count, 1, self.step, rejected=begun.rejected, unread=begun.unread
        )
        self._next_decision = self._ranks.first_says(self._earliest())

    def _tuner(self) -> Tuner:
        told = self._settings
        return Tuner(budget=told.budget, window=told.window, fixed=told.every, failure_s=told.failure_s)

    def _profile_key(self) -> str:
        """Measurements of other objects, elsewhere or on another machine are of no use, nor is a k for another budget."""
        batches = [loader.sampling.global_batch_size for loader in self._loaders.values()]
        kinds = [type(value).__qualname__ for value in self._objects.values()]
        modules = [value for value in self._objects.values() if isinstance(value, torch.nn.Module)]
        size = sum(one.numel() for module in modules for one in module.parameters())
        here = f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.cuda.device_count()} devices, {self.storage.uri}"
        asked = f"overhead {self._settings.budget}, every {self._settings.every}, failures {self._settings.failure_s} s"
        return f"batches {batches}, {size} parameters of {kinds}, {here}, {asked}"

    def _tell_of_samples(self) -> None:
        """Nothing is known of those that look otherwise when they are loaded again."""
        for name in (name for name, loader in self._loaders.items() if not loader.sketches):
            reason = (
                f"samples of {name}'s dataset look otherwise each time they are loaded, so a resumed run does not draw what it "
                "would have drawn: if they are drawn from a generator of the dataset's own, or from a GPU's, use one of the "
                "CPU's global generators (torch's, numpy's, Python's), which are seeded for each sample"
            )
            self._journal.tell("SamplesVary", {"reason": reason})

    def _follow(self) -> None:
        """Has the loaders and the optimizers tell of what happens."""
        for name, loader in self._loaders.items():
            asked, left, again = (partial(call, name) for call in (self._asked, self._left, self._tell_of_again))
            loader.observe(asked, left, again, self.untimed)
            self._closing.callback(loader.observe)
        for optimizer in self._optimizers():
            self._closing.callback(follow(optimizer, self.update_begins, partial(self.update_ends, id(optimizer))))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [value for value in self._objects.values() if isinstance(value, torch.optim.Optimizer)]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for value in self._objects.values():
            if isinstance(value, torch.nn.Module):
                yield from value.parameters()
            elif isinstance(value, torch.optim.Optimizer):
                yield from chain.from_iterable(group["params"] for group in value.param_groups)

    # ---------------------------------------------------------------- step by step

    def update_begins(self) -> None:
        """The weights are about to change: waits until a copy that is under way is complete."""
        self._updating = threading.get_ident()
        self._checkpointer.await_copy(go_on)
        self._open_updates += 1
        self._update_began = time.monotonic()

    def update_ends(self, optimizer: int | None = None) -> None:
        """The weights have changed. However often that happens between two batches, it is one step.

        Args:
            optimizer: the id of the one that made the update; None: it was none that is followed.
        """
        self._open_updates = max(0, self._open_updates - 1)  # in its midst a batch may have been asked for
        self._forgotten.updated(optimizer, reading=bool(self._reading))
        if optimizer is None:
            self._missing.updated_by_hand()
        now = time.monotonic()
        self._update_s += now - self._update_began
        self._update_began = now  # an optimizer's step inside `update` is not counted twice
        if self._uncommitted is None:
            self.step += 1
        self._uncommitted = self._ending()
        if self._stood:
            self._look_for_range(self._uncommitted & self._stood.keys())

    def _look_for_range(self, read: Collection[str]) -> None:
        """At the first update from `read`: a loop over range(n) begins at 0 again after a resume, and nothing else would
        tell. A validation is none of `read`. Where two are read together, the epochs of one are counted."""
        name = min(read, default=None)
        if name is None:
            return
        epoch, self._stood = self._stood[name], {}
        if not any(loader.asked for loader in self._loaders.values()):
            more = "1 epoch" if epoch == 1 else f"{epoch} epochs"
            reason = (
                f"{name} was resumed in epoch {epoch}, and the loop reads it without having asked which epochs are left: one "
                f"over range(n) begins at 0 again, and trains {more} too many. Write `for epoch in {name}.epochs(n):` in its "
                f"place. A loop that counts otherwise can read {name}.position.epoch before it trains: nothing is said then"
            )
            self._journal.tell("EpochsNotAsked", {"step": self.step, "reason": reason})

    def _ending(self) -> set[str]:
        """The loaders that the updates of the present step read from. A loop that was over by then was a validation, before
        training or between accumulated gradients; unless none was under way: then batches were taken out of it beforehand."""
        positions = self._positions()
        read = {name for name in positions if positions[name] != self._committed[name]}
        return (self._uncommitted or set()) | (read & self._reading) or read

    def _positions(self) -> dict[str, Position]:
        return {name: loader.at for name, loader in self._loaders.items()}

    def _asked(self, name: str) -> None:
        """A batch of this loader is asked for. If the last step read from others only, it goes on: this is its validation.

        Raises:
            ConfigError: by a thread beside that of the updates, which may be in the midst of one.
        """
        beside = threading.get_ident() not in (self._updating, self._opened)  # an update may be made within a backward pass
        if beside and any(thread.ident == self._updating for thread in threading.enumerate()):
            raise ConfigError(
                f"a thread beside the training asks {name!r} for a batch, and a step ends when the next batch is asked for: "
                "read the loader in the loop itself. Its own num_workers, prefetch_factor and pin_memory read ahead"
            )
        self._reading.add(name)
        self._ended.discard(name)
        self._put_generators_back(name)
        if self._uncommitted is None or name in self._uncommitted:
            self.commit(name)

    def commit(self, name: str | None = None) -> None:
        """A batch is asked for (of this loader): what was done since the last one is a step, if there was an update in it."""
        self._watch.start()
        self._forgotten.asked(by_hand=name is None)
        if name is None or not self._last or name in self._last:
            self._open_updates = 0  # one that broke off, if the training goes on, is as much of its state as any other
        if name is None:
            self._put_generators_back(None)
        if self._uncommitted is not None:
            ended = self._commit_step()
            if ended or self.step >= self._next_decision:
                self._decide(ended)

    def _put_generators_back(self, name: str | None) -> None:
        """The loop is where it was: something may have drawn since `begin`. Not where the training has gone on already, with a
        batch that was read, or in a loop that commits after its update: what it has drawn would be drawn again."""
        if self._resumed is None or not self._resumed.goes_on_at(name):
            return
        plan, self._resumed = self._resumed, None
        if self._uncommitted is None or (name is not None and not self._uncommitted):
            resuming.set_generators(plan, self._ranks.rank)

    def _left(self, name: str, ended: bool) -> None:
        """This loader's loop was left, perhaps because its epoch has ended."""
        self._reading.discard(name)
        if ended:
            self._ended.add(name)
        self.pause()

    def _tell_of_again(self, name: str, epoch: int) -> None:
        """Said once. A loop that was left with `break`, as at a signal, has gone on to what ends an epoch."""
        if self._again_told:
            return
        self._again_told = True
        loader = self._loaders[name]
        reason = (
            f"{name}.epochs gives epoch {epoch} again, for the loop over {name} was left after {loader.done} of its "
            f"{len(loader)} batches: what was done after that loop (scheduler.step(), say) is done again when the epoch is "
            f"over. To stop, leave both loops: `if {name}.done: break` right after the inner one"
        )
        self._journal.tell("EpochNotOver", {"step": self.step, "reason": reason})

    def pause(self) -> None:
        """The epoch is over: until the next batch is asked for, time is not counted."""
        self._watch.stop()

    def untimed(self) -> AbstractContextManager[None]:
        """What is done inside is no training: its time is not counted, also where a loader is read."""
        return self._watch.held()

    def _commit_step(self) -> bool:
        """Returns whether an epoch ended with this step whose end is to be kept.

        Raises:
            ConfigError: on every rank, after the first step: they do not hold the same.
        """
        assert self._uncommitted is not None
        if self.step == self._began_at + 1:  # this launch's first: no checkpoint was taken yet
            self._compare_shared()
        self._missing.stepped()
        before, self._committed = self._committed, self._positions()
        ended = any(self._committed[name].epoch != before[name].epoch for name in self._uncommitted)
        self._last, self._uncommitted, self._resumed = self._uncommitted, None, None
        self._goes_on_at = self._last
        self._checkpointer.updated(self._update_s)
        self._checkpointer.stepped(self.step, self._watch.take())
        self._update_s = 0.0
        return ended and self._checkpointer.keeps_epochs

    def _compare_shared(self) -> None:
        """Parts of weights that differ between ranks would be put together to what none of them had. Where a model is sharded
        by hand, or replicas have drifted apart, shapes do not tell. After an update, for by then an optimizer has its state.

        Raises:
            ConfigError: on every rank, naming the first tensor that differs on one of them.
        """
        if self._ranks.count == 1:
            return
        self._ranks.meet(None)
        here = self._ranks.all_do(lambda: states.digests(states.take_apart(self._objects).shared))
        first = self._ranks.first_says(here)
        apart = next((path for path in sorted(first.keys() | here.keys()) if first.get(path) != here.get(path)), None)
        error = ConfigError(
            f"{apart} is not the same here as on rank 0 after the first step, and of parameters and optimizer state each rank "
            "stores a part. Models that are sharded over processes cannot be stored here; replicas must begin alike and be "
            "updated alike, as DistributedDataParallel sees to it"
        )
        self._ranks.agree(None if apart is None else error)

    def _decide(self, ended: bool) -> None:
        """The ranks meet: is a checkpoint due, and at which step will rank 0 speak again?"""
        due = ended or (self._ranks.rank == 0 and self._checkpointer.wants(self.step))
        if due and self._ranks.rank == 0:  # first: of one that it leaves out, the others would fill the storage with shards
            due = self._checkpointer.take(self.step, go_on, kept=ended)
        due, self._next_decision = self._ranks.meet([due, self._earliest()])
        if due and self._ranks.rank != 0:
            self._checkpointer.take(self.step, go_on, kept=ended)

    def _earliest(self) -> int:
        return self._checkpointer.earliest(self.step) if self._ranks.rank == 0 else 0

    # ---------------------------------------------------------------- what is stored

    def _capture(self) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
        self._parts = states.take_apart(self._objects)
        world, ended_by = self._ranks.count, self._goes_on_at
        about = resuming.values(self._objects, self._loaders, self._committed, world, ended_by, self._parts, self._overridden)
        self._compare_given(about["objects"])
        return list(self._parts.shared.items()), about

    def _compare_given(self, now: Mapping[str, Any]) -> None:
        """A launch that makes its objects as this one did compares what is stored with what they are like before they are
        trained, and would refuse it. Not refused here: another launch may make them otherwise."""
        if self._given is None or now == self._given:
            return
        found = [line for name, before in self._given.items() for line in states.differences(name, now[name], before)]
        if not found:  # a parameter has another name, say, with nothing in its place
            return
        self._given = None
        more = f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
        reason = (
            "checkpoints are from here on of something else than checkfreq.open was given, and a launch that gives it the same "
            f"cannot go on from them: {'; '.join(found[:MOST_TOLD])}{more}. Make all layers and parameter groups before "
            "checkfreq.open; where a forward pass makes layers, do one"
        )
        self._journal.tell("WillNotFit", {"step": self.step, "reason": reason})

    def _own(self) -> list[tuple[str, torch.Tensor]]:
        assert self._parts is not None
        return states.own_tensors(self._parts, self._ranks.rank)

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        """The loop has come to its end: its last state becomes a checkpoint, which is waited for."""
        if self._open_updates:
            self._journal.tell(
                "CheckpointFailed",
                {
                    "step": self.step,
                    "reason": "the last update broke off, so the weights may be updated in part: the last state is not stored, "
                    "and the next launch goes on from the checkpoint before",
                },
            )
            return
        ended = False
        if self._uncommitted is not None:
            self.pause()
            ended = self._commit_step()
        else:  # after batches without an update; what is stored is the state after them, so they are not to be read again
            self._committed |= {name: self._loaders[name].at for name in self._ended}
            ended = self._checkpointer.keeps_epochs and bool(self._ended & self._last)  # a validation's end is none
        if any(self._loaders[name].at.consumed == 0 for name in self._last):
            self._goes_on_at = None  # their epoch is over, and what is done before the next one is still to be done
        if self.step > self._began_at:
            self._checkpointer.finish(self.step, go_on, kept=ended)
        elif any(loader.was_read for loader in self._loaders.values()) and not self.step:
            self._forgotten.tell(NOT_GIVEN)
        self._journal.tell("Finished", {"step": self.step})

    def _nothing_to_store(self, reason: str) -> None:
        self._journal.tell("NothingToStore", {"reason": reason})

    def nothing_left(self, until: int) -> None:
        """`Run.batches` was asked to go on until a step that was made before this launch: nobody would see why nothing
        is trained. Said once: a loop may go on in stretches, some of which are behind it."""
        if self._left_told or self.step > self._began_at:
            return
        self._left_told = True
        reason = f"Run.batches(until_step={until}) gives no batch: the run is at step {self.step}; name a later one"
        self._journal.tell("NothingLeft", {"step": self.step, "reason": reason})
        if self._ranks.rank == 0:
            self._journal.show(reason)

    def stands_still(self, epochs: int, batches: int) -> bool:
        """Whether a loop until a step has gone on for too long without coming nearer to it."""
        return self._forgotten.stands_still(epochs, batches)

    def close(self) -> None:
        """Brings a checkpoint that is under way to its end, and gives everything back."""
        self._closing.close()
