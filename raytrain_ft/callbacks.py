"""Callbacks of `Trainer`: called on the driver with the steps that a run commits and the recoveries that it goes through.

They follow the run's event log, so training never waits for them. Each step comes once and in order, also when a recovery has
everybody go back, and when a run of the same name goes on from a checkpoint: it begins with the first step not told before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raytrain_ft.places import told
from raytrain_ft.policy.chronicle import Steps
from raytrain_ft.policy.messages import RunStarted
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.follow import Follower, committed_before


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run is.

    Attributes:
        run_id: of this run; runs that go on from each other's checkpoints share name and directory.
        number: how many runs were in this directory before.
        resumed: whether it goes on from a checkpoint; else it begins anew, whatever was in the directory before.
        config: plain values: max_steps, global_batch_size, seed, num_workers and so on.
    """

    name: str
    run_id: str
    directory: Path
    number: int
    resumed: bool
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was told before: the `steps` that the run had come to, and how many recoveries of this very `RunInfo.run_id`."""

    steps: int
    recoveries: int = 0


class Callback:
    """Override what you need. One that raises is warned about and not called any more; training goes on."""

    def on_start(self, run: RunInfo) -> Seen | None:
        """The run has begun. Return what you know of it already; None: what earlier runs committed is left out."""

    def on_steps(self, steps: Steps) -> None:
        """These steps were committed: about one second of training, or fewer at the ends of an incarnation."""

    def on_recovery(self, recovery: Recovery) -> None:
        """A recovery or planned resize has ended; the step that ended it comes next."""

    def on_end(self, state: str) -> None:
        """The run has ended: FINISHED, ERRORED or ABORTED; or an earlier state, if its end is not known."""


class Callbacks:
    """Tells callbacks the news of one run.

    Args:
        directory: the run's.
        rules: the run's, by which its events are understood.
    """

    def __init__(self, callbacks: Iterable[Callback], name: str, directory: Path, rules: Rules) -> None:
        self._name, self._directory = name, directory
        self._callbacks = list(callbacks)
        self._follower = Follower(directory / "events.jsonl", rules)
        self._seen: dict[int, Seen] = {}  # by the callback's id
        self._recoveries = 0
        self._news: list[Steps | Recovery] = []  # that nobody was told of yet
        self._unreadable = False

    def poll(self) -> None:
        """Tells what is new."""
        if not self._callbacks:
            return
        try:
            self._news += self._follower.news()
            if not self._seen and self._follower.started is not None:
                self._begin(self._follower.started)
            self._unreadable = False
        except OSError as error:  # the storage may come back
            if not self._unreadable:
                warnings.warn(f"the run's events cannot be read now, so callbacks wait for news: {error}", stacklevel=2)
            self._unreadable = True
            return
        except Exception as error:  # whatever is wrong with a log, training does not end for it
            self._leave(self._callbacks, f"the run's events cannot be followed: {error}")
            return
        news, self._news = self._news, []
        for one in news:
            if isinstance(one, Recovery):
                self._recoveries += 1
            for callback in list(self._callbacks):
                self._tell(callback, one)

    def end(self) -> None:
        """Tells the rest, and that the run has ended."""
        self.poll()
        for callback in [one for one in self._callbacks if id(one) in self._seen]:
            self._call(callback, "on_end", str(self._follower.state))
        self._callbacks = []

    def _begin(self, started: RunStarted) -> None:
        number = len(list(self._directory.glob("events-[0-9]*.jsonl")))
        info = RunInfo(self._name, started.run_id, self._directory, number, bool(started.stored), started.details)
        before = Seen(committed_before(self._directory) if info.resumed else 0)
        for callback in list(self._callbacks):
            seen = self._call(callback, "on_start", info)
            self._seen[id(callback)] = seen if isinstance(seen, Seen) else before

    def _tell(self, callback: Callback, news: Steps | Recovery) -> None:
        seen = self._seen[id(callback)]
        if isinstance(news, Recovery):
            if self._recoveries > seen.recoveries:
                self._seen[id(callback)] = replace(seen, recoveries=self._recoveries)
                self._call(callback, "on_recovery", news)
        elif news.stop > seen.steps:
            self._seen[id(callback)] = replace(seen, steps=news.stop)
            again = max(0, seen.steps - news.first)  # told of in an earlier run
            self._call(callback, "on_steps", replace(news, first=news.first + again, redone=news.redone + again))

    def _call(self, callback: Callback, method: str, argument: Any) -> Any:
        try:
            return getattr(callback, method)(argument)
        except Exception as error:
            self._leave([callback], f"{method} raised {type(error).__name__}: {error}")
            return None

    def _leave(self, callbacks: Iterable[Callback], why: str) -> None:
        for callback in list(callbacks):
            self._callbacks.remove(callback)
            warnings.warn(f"{type(callback).__name__} is not called any more; training goes on. {told(why)}", stacklevel=2)
