"""Two or more sets of live processes take turns at computing: A, B, A, B, ..., one block of steps each.

Only one side runs at a time, so what is compared sees the same machine within seconds. The gate is a directory of
small files: it needs no connection between the sides, which may be spawned processes, Ray workers, or both.

A worker of any side drives a `BlockClock` from its training loop; the benchmark reads the times with `read_blocks`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
"""Who waits for its turn looks as rarely as that: each look of a dozen workers takes from those whose turn it is."""


class TurnsOver(RuntimeError):
    """Another side gave up, or took too long: nobody has to wait for it any more."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A gate that can be pickled and handed to every worker of every side.

    Block 0 of the first side runs first, then block 0 of the second, and so on; then block 1 of the first. Every worker
    of a side calls `wait(side, block)` before the block and `done(side, block, rank)` after it; a turn ends when all
    of the side's workers are done.
    """

    directory: str
    sides: tuple[tuple[str, int], ...]  # (name, number of workers), in the order of their turns
    timeout_s: float

    @classmethod
    @contextmanager
    def create(cls, sides: Sequence[tuple[str, int]], timeout_s: float = 120.0) -> Iterator[Turns]:
        """A gate in a temporary directory that is removed at the end. `timeout_s` is the longest wait for one turn."""
        if len({name for name, _ in sides}) != len(sides):
            raise ValueError(f"two sides have the same name: {[name for name, _ in sides]}")
        directory = tempfile.mkdtemp(prefix="turns-")
        turns = cls(directory, tuple(sides), timeout_s)
        try:
            yield turns
        finally:
            turns.stop("the benchmark is over")  # for workers that outlive it; their next look sees it or nothing
            shutil.rmtree(directory, ignore_errors=True)

    def wait(self, side: str, block: int) -> None:
        """Return when it is this side's turn; `TurnsOver` if somebody stopped, TimeoutError after `timeout_s`."""
        names = [name for name, _ in self.sides]
        position = names.index(side)
        before, its_block = (position - 1, block) if position > 0 else (len(names) - 1, block - 1)
        if its_block < 0:
            return
        name, num_workers = self.sides[before]
        waited_for = [self._mark(name, its_block, rank) for rank in range(num_workers)]
        deadline = time.monotonic() + self.timeout_s
        while waited_for:
            while waited_for and waited_for[-1].exists():
                waited_for.pop()
            self._raise_if_stopped()
            if waited_for and time.monotonic() > deadline:
                raise TimeoutError(
                    f"{side} waited {self.timeout_s:g} s for block {its_block} of {name}; "
                    f"{len(waited_for)} of its {num_workers} workers are not done"
                )
            if waited_for:
                time.sleep(POLL_S)

    def done(self, side: str, block: int, rank: int) -> None:
        """This worker has finished the block."""
        self._raise_if_stopped()
        self._mark(side, block, rank).touch()

    def stop(self, why: str) -> None:
        """Make every present and future wait raise: called by a side that fails."""
        directory = Path(self.directory)
        if directory.is_dir():
            unfinished = directory / "stopped.new"
            unfinished.write_text(why)
            unfinished.rename(directory / "stopped")

    def _mark(self, side: str, block: int, rank: int) -> Path:
        return Path(self.directory) / f"{side}.{block}.{rank}"

    def _raise_if_stopped(self) -> None:
        directory = Path(self.directory)
        stopped = directory / "stopped"
        if stopped.exists():
            raise TurnsOver(stopped.read_text())
        if not directory.is_dir():
            raise TurnsOver("the gate is gone")


class BlockClock:
    """One worker's side of the gate: waits for its turn before a block, times every step, and says when it is done.

    A step lasts from one `tick` to the next, so whatever a framework does between two steps is counted too. All sides tick
    at the same point of the loop, right before the loss: where workers outnumber the cores they reach some points in a more
    uneven row than others, and a step as long as its slowest rank would be longer for a side that ticks at such a point.
    """

    def __init__(self, turns: Turns, side: str, rank: int, blocks: int, steps_per_block: int) -> None:
        self.turns, self.side, self.rank = turns, side, rank
        self.blocks, self.steps_per_block = blocks, steps_per_block
        self._ticks = 0
        self._marks: list[float] = []

    @property
    def num_ticks(self) -> int:
        """How many steps the worker has to run in all: it takes two ticks to see one."""
        return self.blocks * self.steps_per_block + 1

    def tick(self) -> None:
        """Call once in each step. Passes the turn on if a block ends here, and waits for the next one."""
        self._marks.append(time.monotonic())
        block, steps = divmod(self._ticks, self.steps_per_block)
        self._ticks += 1
        if steps:
            return
        if block:
            times = [after - before for before, after in itertools.pairwise(self._marks)]
            (Path(self.turns.directory) / f"{self.side}.{block - 1}.{self.rank}.times").write_text(json.dumps(times))
            self.turns.done(self.side, block - 1, self.rank)
        if block < self.blocks:
            self.turns.wait(self.side, block)
            self._marks = [time.monotonic()]


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """The step times of one block, in seconds. The block's first step is left out: its workers start unevenly."""

    rank0: list[float]
    slowest: list[float]  # the maximum over the ranks, step by step


def read_blocks(turns: Turns, side: str, blocks: int) -> list[BlockTimes]:
    """What a side's clocks measured, once it is done."""
    num_workers = dict(turns.sides)[side]
    found = []
    for block in range(blocks):
        paths = [Path(turns.directory) / f"{side}.{block}.{rank}.times" for rank in range(num_workers)]
        times = [json.loads(path.read_text())[1:] for path in paths]
        found.append(BlockTimes(times[0], [max(step) for step in zip(*times, strict=True)]))
    return found
