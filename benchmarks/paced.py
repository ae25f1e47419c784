"""A training loop in paced mode, with the product's checkpoints: its steps sleep as an accelerator would keep the host idle."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.settings import Target

How = Literal["none", "sync", "persist only", "pipelined"]
"""Figure 4 of CheckFreq: training waits for nothing; for snapshot and persist; for the snapshot; for neither."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A model: a step's time, its update's, and the bytes of its state."""

    name: str
    iteration_s: float
    update_s: float
    megabytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """What was done from one moment to another (of the monotonic clock), and which step it belongs to. While training waits for
    a checkpoint, that is a stall."""

    what: Literal["compute", "stall", "snapshot", "persist"]
    step: int
    began: float
    ended: float


@dataclass
class Trace:
    """What a run did: the time of every step in seconds, and what was told of checkpoints with the step it came after."""

    steps: list[float] = field(default_factory=list)
    told: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        """All of one kind."""
        return [fields for _, name, fields in self.told if name == event]


class Loop:
    """A loop that can be continued; each call of `run` is a stretch of it."""

    def __init__(self, preset: Preset, directory: Path, *, budget: float = 0.035, fixed: int | None = None) -> None:
        self.preset = preset
        size = preset.megabytes * 2**20 // 4
        self._tensors = [("weights", torch.randn(size // 2)), ("momentum", torch.randn(size // 2))]
        self.trace = Trace()
        self._storage = open_storage(str(directory / "checkpoints"))
        self._lock = lock.acquire(self._storage, "paced")
        self.tuner = Tuner(budget=budget, window=20, fixed=fixed)
        target = Target(place=self._storage.place, owner="paced", epoch=self._lock.owner.epoch)
        self._persisters: list[Persister] = []
        self._checkpointer = Checkpointer(target, self._capture, lambda: self.tuner, self._tell, persister=self._persister)
        self._checkpointer.begin(0, 1, 1, 0)
        self._step = 0
        self._spans: list[Span] = []  # of the training thread
        self._captured = 0.0
        self._copied_from: dict[int, float] = {}  # by step: when its snapshot began
        self._durable_at: dict[int, float] = {}

    def _persister(self, memory: SharedMemory) -> Persister:
        self._persisters.append(Persister(memory))
        return self._persisters[-1]

    def _capture(self) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
        self._captured = time.monotonic()
        return self._tensors, {}

    def _tell(self, event: str, fields: dict[str, Any]) -> None:
        self.trace.told.append((len(self.trace.steps), event, fields))
        if event == "CheckpointCommitted":
            self._durable_at[fields["step"]] = time.monotonic()

    def run(self, steps: int, how: How = "pipelined") -> list[float]:
        """So many more steps; returns their times. A stretch without checkpoints does not count for the interval."""
        checkpointer, preset, times = self._checkpointer, self.preset, []
        last = committed = time.monotonic()
        for _ in range(steps):
            time.sleep(preset.iteration_s - preset.update_s)
            computed = time.monotonic()
            checkpointer.await_copy(_nothing)
            began = time.monotonic()
            time.sleep(preset.update_s)
            self._tensors[0][1][:1000] += 1.0  # a torn snapshot would show
            updated = time.monotonic()
            checkpointer.updated(updated - began)
            self._spans += [Span("compute", self._step + 1, last, computed), Span("stall", self._step + 1, computed, began)]
            self._spans.append(Span("compute", self._step + 1, began, updated))
            before, committed = committed, time.monotonic()
            if how != "none":
                self._checkpoint(how, committed - before)  # as training counts: to take one is part of the next step
            now = time.monotonic()
            times.append(now - last)
            last = now
        self.trace.steps += times
        return times

    def _checkpoint(self, how: How, seconds: float) -> None:
        checkpointer = self._checkpointer
        self._step += 1
        wanted = checkpointer.wants(self._step)
        checkpointer.stepped(self._step, seconds)
        if wanted:
            began = time.monotonic()
            checkpointer.take(self._step, _nothing)
            self._copied_from[self._step] = self._captured
            if how == "sync":
                checkpointer.await_durable(_nothing)
            elif how == "persist only":
                checkpointer.await_copy(_nothing)
            self._spans.append(Span("stall", self._step, began, time.monotonic()))

    def settle(self) -> None:
        """Waits for the checkpoint under way, and until what it replaces is deleted: that would slow down what comes next."""
        self._checkpointer.await_durable(_nothing)
        for persister in self._persisters:
            persister.await_tidy(30.0)
        os.sync()

    def timeline(self, since: float) -> list[Span]:
        """What began since then, once nothing is under way."""
        spans = list(self._spans)
        for committed in self.trace.of("CheckpointCommitted"):
            step = committed["step"]
            began, ended = self._copied_from[step], self._durable_at[step]
            copied = began + committed["snapshot_s"]
            spans += [Span("snapshot", step, began, copied), Span("persist", step, copied, ended)]
        return [span for span in spans if span.began >= since]

    def close(self) -> None:
        """Ends the persister and gives up the lock."""
        self._checkpointer.close()
        self._lock.release()


def _nothing() -> None:
    """Nothing leaves these waits."""


@contextmanager
def loop(preset: Preset, **settings: Any) -> Iterator[Loop]:
    """A loop on a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="paced-", dir=os.environ.get("BENCH_DIR")) as directory:
        made = Loop(preset, Path(directory), **settings)
        try:
            yield made
        finally:
            made.close()


THIEF = """
import os, sys
data = os.urandom(2**20) * 32
while os.getppid() == int(sys.argv[2]):  # who started it may be killed before it ends this
    with open(sys.argv[1], "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
"""


@contextmanager
def second_writer(count: int = 1) -> Iterator[None]:
    """Other jobs that write and fsync all the time, to the same disk."""
    with tempfile.TemporaryDirectory(prefix="thief-", dir=os.environ.get("BENCH_DIR")) as directory:
        files = (str(Path(directory) / f"{number}") for number in itertools.count())
        mine = str(os.getpid())
        thieves = [subprocess.Popen([sys.executable, "-c", THIEF, next(files), mine]) for _ in range(count)]
        try:
            yield
        finally:
            for thief in thieves:
                thief.kill()
                thief.wait()
