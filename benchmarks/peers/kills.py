"""SIGKILL a training worker at a random moment, and time the way back to full strength, whatever framework it runs on.

Every worker keeps a `Journal`: one line per step that it completed. All processes are on one machine, so their
monotonic clocks are one clock. The killer reads the journals and needs nothing from the framework.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

POLL_S = 0.02
STEADY_STEPS = 5  # steps at full strength before the next kill
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kill:
    """What one SIGKILL cost. The first three are seconds from the kill."""

    full_strength_s: float  # until a step is completed by all workers, the replacement among them
    caught_up_s: float  # that, and the interrupted step is completed: no lost work is left to redo
    first_step_s: float  # until a step is completed that nobody had in hand when the kill came
    step_s: float  # median step time just before the kill
    steps_redone: int  # completed before the kill, and computed again
    batches_dropped: int  # survivors' local batches whose step was thrown away for good
    killed_at: float = 0.0  # monotonic time of the kill
    fewer_s: float | None = None  # until fewer workers end a step; perhaps one that was in hand
    gone_s: float | None = None  # until the last thread of a killed process had ended, and the kernel closed its connections
    resumed_from: int = 0  # the first step that was computed after it by a worker that was not there before


@dataclass(frozen=True, slots=True)
class Entry:
    """A worker ended `step` at the monotonic time `when`, `world` workers taking part. 0: the step was thrown away."""

    step: int
    when: float
    world: int


Journals = dict[int, list[Entry]]  # by process id


class Journal:
    """A worker's diary, a file named after its process: kept by the training function."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._file = (self._directory / f"{os.getpid()}.journal").open("a", buffering=1)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Close the file; an exception that ends training is kept, for the killer to tell if nothing goes on."""
        if error is not None:
            (self._directory / f"{os.getpid()}.error").write_text(f"{type(error).__name__}: {error}"[:300])
        self._file.close()

    def ended(self, step: int, world: int) -> None:
        """Note a step's end; `world` is how many workers took part, 0 if the step was thrown away."""
        self._file.write(f"{step} {time.monotonic()!r} {world}\n")

    def stop_at(self) -> int | None:
        """The step at which the killer wants training to end, if it has said so."""
        path = self._directory / "stop_at"
        return int(path.read_text()) if path.exists() else None


def read_journals(directory: str) -> Journals:
    """The entries of every worker there ever was."""
    found: Journals = {}
    for path in Path(directory).glob("*.journal"):
        lines = (line.split() for line in path.read_text().split("\n")[:-1])  # the last may be half written
        found[int(path.stem)] = [Entry(int(step), float(when), int(world)) for step, when, world in lines]
    return found


class Killer:
    """Kills workers of one training run, one at a time, and measures every recovery."""

    def __init__(
        self,
        directory: str,
        num_workers: int,
        failed: Callable[[], str | None],
        seed: int,
        timeout_s: float,
        checkpoint_every: int = 0,
    ) -> None:
        """
        Args:
            failed: why training ended, if it did.
            timeout_s: the longest wait for full strength.
            checkpoint_every: where a kill costs what was not stored yet: steps between two checkpoints. Each kill then comes
                that many steps after the last recovery, and at random up to as many more: anywhere between two of them.
        """
        self._checkpoint_every = checkpoint_every
        self._directory, self._num_workers, self._failed = directory, num_workers, failed
        self._random = np.random.default_rng(seed)
        self._timeout_s = timeout_s

    def kill_one(self, number: int = signal.SIGKILL) -> Kill:
        """Wait for full strength, kill one worker at a random phase of a step, wait for full strength again.

        `number` is the signal: SIGSTOP freezes the worker instead.
        """
        members, step_s = self._wait(self._steady, "full strength before a kill")
        if self._checkpoint_every:
            begin = max(e.step for e in self._entries(members))
            due = begin + self._checkpoint_every + int(self._random.integers(self._checkpoint_every))
            members, step_s = self._wait(lambda: self._steady(due), f"step {due} before a kill")
        time.sleep(float(self._random.uniform(0.0, step_s)))
        victim = int(self._random.choice(sorted(members)))
        killed_at = time.monotonic()
        os.kill(victim, number)
        gone_s = gone_after(victim, killed_at) if number == signal.SIGKILL else None
        last_step = max(e.step for e in self._entries(members, until=killed_at) if e.world)

        def recovered() -> tuple[float, float] | None:
            full = self._full_strength(killed_at, members)
            committed = [e for e in self._entries(since=killed_at) if e.world]
            caught_up = min((e.when for e in committed if e.step > last_step), default=None)
            return (full, max(full, caught_up)) if full and caught_up else None

        full, caught_up = self._wait(recovered, "full strength after a kill")
        committed = [e for e in self._entries(since=killed_at) if e.world]
        # a step that was reduced already when the kill came may still be completed: that is no recovery
        first = min(e.when for e in committed if e.when > killed_at + step_s or e.when >= full)
        fewer = min((e.when for e in committed if e.world < self._num_workers), default=None)
        redone_from = min(e.step for e in self._entries(since=killed_at, but=members) if e.world)
        thrown_away = [e for e in self._entries(members, since=killed_at, until=full) if not e.world]
        return Kill(
            full_strength_s=full - killed_at,
            caught_up_s=caught_up - killed_at,
            first_step_s=first - killed_at,
            step_s=step_s,
            steps_redone=max(0, last_step + 1 - redone_from),
            batches_dropped=len(thrown_away),
            killed_at=killed_at,
            fewer_s=None if fewer is None else fewer - killed_at,
            gone_s=gone_s,
            resumed_from=redone_from,
        )

    def stop(self, steps_ahead: int = 10) -> None:
        """Ask every worker to end at the same step, far enough ahead that all of them will have read of it."""
        newest = max((e.step for e in self._entries()), default=0)
        unfinished = Path(self._directory) / "stop_at.new"
        unfinished.write_text(str(newest + steps_ahead))
        unfinished.rename(Path(self._directory) / "stop_at")

    def _entries(
        self,
        members: set[int] | None = None,
        since: float = float("-inf"),
        until: float = float("inf"),
        but: set[int] | None = None,
    ) -> list[Entry]:
        """What these workers (default: all) wrote in this span of time."""
        return [
            entry
            for pid, entries in read_journals(self._directory).items()
            for entry in entries
            if (members is None or pid in members) and pid not in (but or set()) and since < entry.when <= until
        ]

    def _steady(self, step: int = 0) -> tuple[set[int], float] | None:
        """The workers and their step time, once all of them have completed some steps together, this one among them."""
        living = {pid: entries[-STEADY_STEPS:] for pid, entries in read_journals(self._directory).items() if alive(pid)}
        worlds = [[entry.world for entry in entries] for entries in living.values()]
        if len(living) != self._num_workers or any(world != [self._num_workers] * STEADY_STEPS for world in worlds):
            return None
        if any(entries[-1].step < step for entries in living.values()):
            return None
        gaps = [b.when - a.when for entries in living.values() for a, b in itertools.pairwise(entries)]
        return set(living), statistics.median(gaps)

    def _full_strength(self, killed_at: float, members: set[int]) -> float | None:
        """When all live workers first completed one and the same step at full strength, a new worker among them."""
        ended: dict[int, dict[int, float]] = defaultdict(dict)  # step -> process -> when
        for pid, entries in read_journals(self._directory).items():
            if alive(pid):
                for entry in entries:
                    if entry.when > killed_at and entry.world == self._num_workers:
                        ended[entry.step][pid] = entry.when
        whole = [when for when in ended.values() if len(when) == self._num_workers and when.keys() - members]
        return min((max(when.values()) for when in whole), default=None)

    def _wait(self, look: Callable[[], T | None], what: str) -> T:
        """Look again and again until there is something to see."""
        deadline = time.monotonic() + self._timeout_s
        while (seen := look()) is None:
            why = self._failed()
            if why is not None:
                raise RuntimeError(f"training ended while waiting for {what}: {why}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {self._timeout_s:g} s; last words: {self._last_words()}")
            time.sleep(POLL_S)
        return seen

    def _last_words(self) -> list[str]:
        """Of the newest workers: the last entry, whether the worker lives, and the error that ended it."""
        words = []
        newest = sorted(Path(self._directory).glob("*.journal"), key=lambda path: path.stat().st_mtime)
        for path in newest[-self._num_workers :]:
            entries = read_journals(self._directory)[int(path.stem)]
            error = path.with_suffix(".error")
            state = error.read_text() if error.exists() else "alive" if alive(int(path.stem)) else "dead"
            words.append(f"{path.stem}: {entries[-1] if entries else 'no step'}, {state}")
        return words


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def gone_after(pid: int, killed_at: float, seconds: float = 2.0) -> float | None:
    """Seconds until the last thread of a killed process had ended; None if that took longer than `seconds`. Where processes
    share CPUs this takes a while, and nobody can notice a death before."""
    while (passed := time.monotonic() - killed_at) < seconds:
        try:
            ended = not alive(pid) and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
        except OSError:
            ended = True
        if ended:
            return passed
        time.sleep(0.001)
    return None


def summary(name: str, kills: list[Kill]) -> str:
    """The kills in words: medians in seconds, and what each kill lost."""
    full = [kill.full_strength_s for kill in kills]
    return (
        f"{name}: {len(kills)} kills, step {statistics.median(kill.step_s for kill in kills):.3f} s; "
        "medians from the kill: "
        f"a step again {statistics.median(kill.first_step_s for kill in kills):.2f} s, "
        f"full strength {statistics.median(full):.2f} s ({min(full):.2f} to {max(full):.2f}), "
        f"caught up {statistics.median(kill.caught_up_s for kill in kills):.2f} s; "
        f"steps redone {[kill.steps_redone for kill in kills]}, "
        f"local batches dropped {[kill.batches_dropped for kill in kills]}"
    )
