"""raytrain_ft on the work that the peers train (`benchmarks.models`): tasks, and runs that go on in the background.

`Timed` takes turns with plain DDP, block by block. `Journaled` keeps the journal by which recoveries are timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from benchmarks.models import Work
from benchmarks.turns import BlockClock, Turns
from raytrain_ft.result import Result
from raytrain_ft.runtime.spec import NAMESPACE

SETTINGS = {"quiet": True, "shuffle": False}
PATIENT = timedelta(hours=1)  # who waits for its turn does not hang


class Task(ft.TrainTask):
    """A `Work` as raytrain_ft takes it: the same model, optimizer, samples and loss as the peers have."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def model(self, stage: int) -> nn.Module:
        """The model of the work; there is but one stage."""
        return self.work.model()

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the work, which asks a module for its parameters."""
        return self.work.optimizer(nn.ParameterList(params))

    def dataset(self) -> TensorDataset:
        """The samples of the work."""
        return self.work.dataset()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """The loss of the work."""
        return self.work.loss(output, batch[1])


class Timed(Task):
    """Takes turns. `loss` is called once per step, so from one call to the next is one whole step."""

    def __init__(self, work: Work, turns: Turns, side: str, plan: tuple[int, int]) -> None:
        """`plan`: blocks, and steps per block."""
        super().__init__(work)
        self._turns, self._side, self._plan = turns, side, plan
        self._clock: BlockClock | None = None
        self._calls = 0

    @property
    def max_steps(self) -> int:
        """One more than is timed: it takes two calls to see one step."""
        return self._plan[0] * self._plan[1] + 1

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """Ends a step and begins the next one."""
        if self._clock is None:
            self._clock = BlockClock(self._turns, self._side, dist.get_rank(), *self._plan)
        else:
            self._clock.after_step()
        self._calls += 1
        if self._calls < self.max_steps:
            self._clock.before_step()
        return super().loss(output, batch)


@dataclass
class Running:
    """A run on a thread of its own."""

    name: str
    path: Path
    _result: Result | None = None
    _error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def fit(self, trainer: ft.Trainer) -> None:
        """The body of the thread."""
        try:
            self._result = trainer.fit()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def why_ended(self) -> str | None:
        """What became of the run; None while it goes on."""
        if not self._done.is_set():
            return None
        return "it finished" if self._error is None else f"{type(self._error).__name__}: {self._error}"[:300]

    def why_failed(self) -> str | None:
        """The same for a run that may finish in its own time: None then, too."""
        return None if self._error is None else self.why_ended()

    def result(self, timeout_s: float) -> Result:
        """Waits for the end of the run."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"run {self.name} has not ended within {timeout_s:g} s")
        if self._result is None:
            raise RuntimeError(f"run {self.name} failed: {self.why_ended()}") from self._error
        return self._result

    def status(self) -> dict[str, Any] | None:
        """The supervisor's account, or None when it does not answer (it has not begun, or it is over)."""
        try:
            supervisor: Any = ray.get_actor(f"supervisor:{self.name}", namespace=NAMESPACE)
            return ray.get(supervisor.status.remote(), timeout=5)
        except (RayError, ValueError):
            return None

    def abort(self) -> None:
        """Ends the run, if it has not ended."""
        if self._done.is_set():
            return
        try:
            supervisor: Any = ray.get_actor(f"supervisor:{self.name}", namespace=NAMESPACE)
            ray.get(supervisor.abort.remote("the benchmark is over"), timeout=30)
        except (RayError, ValueError):
            pass
        self._done.wait(30)


@contextmanager
def training(
    task: Task, name: str, directory: str, num_workers: Any, recovery: ft.RecoveryConfig, **settings: Any
) -> Iterator[Running]:
    """A run of the task that goes on while the block does; `settings` go to `Trainer`."""
    most = num_workers if isinstance(num_workers, int) else num_workers[1]
    trainer = ft.Trainer(
        task,
        global_batch_size=most * task.work.batch_per_worker,
        scaling_config=ft.ScalingConfig(num_workers=num_workers),
        run_config=ft.RunConfig(name=name, storage_path=directory),
        recovery_config=recovery,
        **SETTINGS,
        **settings,
    )
    running = Running(name, Path(directory) / name)
    threading.Thread(target=running.fit, args=(trainer,), name=f"fit {name}", daemon=True).start()
    try:
        yield running
    finally:
        running.abort()
