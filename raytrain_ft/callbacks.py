"""Callbacks of `Trainer`: called on the driver with the steps that a run commits and the recoveries that it goes through.

They follow the run's event log, so training never waits for them. Each step comes once and in order, also when a recovery has
everybody go back, and when a run of the same name goes on from a checkpoint: it begins with the first step not told before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raytrain_ft.places import told
from raytrain_ft.policy.chronicle import Steps
from raytrain_ft.policy.messages import RunStarted
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.follow import Follower, committed_before

SPAN_S = 0.9
"""Steps are joined until they took about so long: of several workers each tells once a second. As long as that, and no longer,
they wait for those that may follow."""


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
        """These steps were committed: about one second of training; fewer at the ends of an incarnation, and up to ten seconds
        in a run of many workers or of many hours."""

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
        self._came = 0.0  # when the last of them did
        self._unreadable = False

    def poll(self) -> None:
        """Tells what is new, but for the last steps, as long as others may be joined to them."""
        self._read()
        self._tell_news(self._news[-1:] if self._may_grow() else [])

    def _read(self) -> None:
        """Takes in what is new."""
        if not self._callbacks:
            return
        try:
            for one in self._follower.news():
                self._add(one)
            if not self._seen and self._follower.started is not None:
                self._begin(self._follower.started)
            self._unreadable = False
        except OSError as error:  # the storage may come back
            if not self._unreadable:
                warnings.warn(f"the run's events cannot be read now, so callbacks wait for news: {error}", stacklevel=3)
            self._unreadable = True
        except Exception as error:  # whatever is wrong with a log, training does not end for it
            self._tell_news()
            self._leave(self._callbacks, f"the run's events cannot be followed: {error}")

    def _add(self, news: Steps | Recovery) -> None:
        """To what nobody was told of yet. Steps are joined to those before them, until these are about a second's."""
        last = self._news[-1] if self._news else None
        joined = None
        if isinstance(last, Steps) and isinstance(news, Steps) and (last.seconds or 0.0) < SPAN_S:
            joined = last.with_next(news)
        if joined is not None:
            self._news[-1] = joined
        else:
            self._news.append(news)
            self._came = time.monotonic()

    def _may_grow(self) -> bool:
        """Whether others may be joined to the last steps, and were not waited for too long: a run may stand still."""
        last = self._news[-1] if self._news else None
        short = isinstance(last, Steps) and last.seconds is not None and last.seconds < SPAN_S
        return short and time.monotonic() - self._came < SPAN_S

    def _tell_news(self, later: Sequence[Steps | Recovery] = ()) -> None:
        """Tells in order what was read, but for the last of it that is to be told `later`."""
        if not self._seen:
            return  # nobody was told that the run has begun
        news, self._news = self._news[: len(self._news) - len(later)], list(later)
        for one in news:
            if isinstance(one, Recovery):
                self._recoveries += 1
            for callback in list(self._callbacks):
                self._tell(callback, one)

    def end(self) -> None:
        """Tells the rest, and that the run has ended."""
        self._read()
        self._tell_news()
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
