"""The steps that other people's training commits while its workers are killed again and again, as a share of its own pace."""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import ray
from ray.train.torch import TorchTrainer

from benchmarks.models import Work
from benchmarks.peers import ray_torchft, ray_train
from benchmarks.peers.cluster import fitting, local_cluster, one_worker_per_node, reason, run_config, why_ended
from benchmarks.peers.kills import alive, read_journals

START_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Strikes:
    """How it is struck.

    Attributes:
        kills: when, in seconds from where it has shown its own pace for `calm_s`. seconds: how long it goes on from there.
        checkpoint_every: steps between two checkpoints, where it has any. seed: of who dies.
    """

    kills: Sequence[float]
    seconds: float
    calm_s: float
    checkpoint_every: int
    seed: int


@dataclass(frozen=True, slots=True)
class ShareOf:
    """What came of it; `share` is None if it could not be measured, for the reason `why`."""

    share: float | None = None
    kills: int = 0
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return self.why if self.share is None else f"{self.kills} kills in {self.seconds:.0f} s, {self.share:.3f} committed"


def reached(directory: str) -> float:
    """How many steps are completed, in the median of the workers that live: who restarts begins where its checkpoint was."""
    found = [entries[-1].step + 1 for pid, entries in living(directory).items() if entries and entries[-1].world]
    return statistics.median(found) if found else 0.0


def living(directory: str) -> dict[int, list]:
    """The journals of the workers that live."""
    return {pid: entries for pid, entries in read_journals(directory).items() if alive(pid)}


def measure(trainer: Callable[[str], TorchTrainer], num_workers: int, strikes: Strikes) -> ShareOf:
    """Lets it train, looks at its pace, then kills; a kill waits until there is somebody to strike, as in our own runs.

    Raises:
        TimeoutError: training does not begin. RuntimeError: it ends; what it had committed until then is in the words.
    """
    chance, due, seconds = np.random.default_rng(strikes.seed), list(strikes.kills), strikes.seconds
    with (
        local_cluster(num_workers),
        tempfile.TemporaryDirectory(prefix="peer-") as directory,
        fitting(trainer(directory)) as running,
    ):
        deadline = time.monotonic() + START_S
        while len(living(directory)) < num_workers or reached(directory) < 5:
            _look(running, deadline)
        began, first = time.monotonic(), reached(directory)
        time.sleep(strikes.calm_s)
        pace = (reached(directory) - first) / (time.monotonic() - began)
        began, first, most, kills = time.monotonic(), reached(directory), 0.0, 0
        while (now := time.monotonic()) < began + seconds:
            if (why := why_ended(running)) is not None:
                # `Ray Train` restarts nothing any more: a share of the time after that would be a matter of how long it is.
                until = f"after {now - began:.0f} s and {kills} kills, {(most - first) / (pace * (now - began)):.2f} committed"
                raise RuntimeError(f"training ended for good {until} until then: {why}")
            time.sleep(POLL_S)
            most = max(most, reached(directory))
            victims = sorted(living(directory))
            if due and time.monotonic() >= began + due[0] and victims:
                with suppress(ProcessLookupError):  # a restart may end it first: then another one dies, in the next turn
                    os.kill(int(chance.choice(victims)), signal.SIGKILL)
                    kills += 1
                    del due[0]
        return ShareOf((most - first) / (pace * seconds), kills, seconds)


def _look(running: ray.ObjectRef, deadline: float) -> None:
    why = why_ended(running)
    if why is not None:
        raise RuntimeError(f"training ended: {why}")
    if time.monotonic() > deadline:
        raise TimeoutError("no training")
    time.sleep(POLL_S)


def restart_share(work: Work, num_workers: int, strikes: Strikes) -> ShareOf:
    """Ray Train's restart from its last checkpoint."""

    def trainer(directory: str) -> TorchTrainer:
        return TorchTrainer(
            ray_train.train_loop,
            train_loop_config={"work": work, "directory": directory, "checkpoint_every": strikes.checkpoint_every},
            scaling_config=one_worker_per_node(num_workers),
            run_config=run_config(directory),
        )

    return _or_why(lambda: measure(trainer, num_workers, strikes), "Ray Train")


def torchft_share(work: Work, num_workers: int, strikes: Strikes) -> ShareOf:
    """Ray Train + torchft."""
    if importlib.util.find_spec("torchft") is None:
        return ShareOf(why="torchft is not installed")

    def trainer(directory: str) -> TorchTrainer:
        return ray_torchft.killed_trainer(work, num_workers, directory)

    return _or_why(lambda: measure(trainer, num_workers, strikes), "torchft")


def _or_why(measurement: Callable[[], ShareOf], peer: str) -> ShareOf:
    try:
        return measurement()
    except Exception as error:
        return ShareOf(why=f"{peer} did not run: {reason(error)}")
