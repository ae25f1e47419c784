"""raytrain_ft on the work that the peers train (`benchmarks.models`): tasks, and runs that go on in the background.

`Timed` takes turns with another side, block by block, and is timed like it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from raytrain_ft.runtime.spec import NAMESPACE, supervisor_name

PATIENT = ft.RecoveryConfig(num_spares=0, hang_timeout=timedelta(hours=1))  # who waits for its turn does not hang
FINISHED = "it finished"


@dataclass(frozen=True, slots=True)
class Paced(Work):
    """Work whose every step takes a fixed time besides, as on an accelerator that leaves the host idle."""

    pace_s: float = 0.2

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Sleeps, then as before."""
        time.sleep(self.pace_s)
        return Work.loss(self, output, target)


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
    """Takes turns. The loss is asked for once per step: there its clock ticks."""

    def __init__(self, work: Work, turns: Turns, side: str, plan: tuple[int, int]) -> None:
        """`plan`: blocks, and steps per block."""
        super().__init__(work)
        self._turns, self._side, self._plan = turns, side, plan
        self._clock: BlockClock | None = None
        self._calls = 0
        self._update_began = 0.0
        self._updates: list[float] = []

    @property
    def max_steps(self) -> int:
        """As many as `BlockClock.num_ticks`."""
        return self._plan[0] * self._plan[1] + 1

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Timed too: see `update_seconds`."""
        optimizer = super().optimizer(params)
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "_update_began", time.monotonic()))
        optimizer.register_step_post_hook(lambda *_: self._updates.append(time.monotonic() - self._update_began))
        return optimizer

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """A tick of the clock comes before it."""
        if self._clock is None:
            self._clock = BlockClock(self._turns, self._side, dist.get_rank(), *self._plan)
        self._clock.tick()
        self._calls += 1
        if self._calls == self.max_steps:
            Path(self._turns.directory, f"{self._side}.{dist.get_rank()}.updates").write_text(json.dumps(self._updates))
        return super().loss(output, batch)


def update_seconds(turns: Turns, side: str) -> list[float]:
    """How long each `optimizer.step()` of a side's rank 0 took."""
    return json.loads(Path(turns.directory, f"{side}.0.updates").read_text())


@dataclass
class Run:
    """A run on a thread of its own.

    Attributes:
        directory: its records.
    """

    name: str
    directory: Path
    _result: Result | None = None
    _error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def fit(self, trainer: ft.Trainer) -> None:
        """The body of the thread."""
        try:
            self._result = trainer.fit()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def why_ended(self) -> str | None:
        """What became of the run; None while it goes on."""
        if not self._ended.is_set():
            return None
        return FINISHED if self._error is None else f"{type(self._error).__name__}: {self._error}"[:300]

    def why_failed(self) -> str | None:
        """The same for a run that may finish in its own time: None then, too."""
        return None if self._error is None else self.why_ended()

    def result(self, timeout_s: float) -> Result:
        """Waits for the end of the run."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"run {self.name} has not ended within {timeout_s:g} s")
        if self._result is None:
            raise RuntimeError(f"run {self.name}: {self.why_ended()}") from self._error
        return self._result

    def status(self) -> dict[str, Any] | None:
        """The supervisor's account of the run; None if there is no supervisor, or it does not answer."""
        try:
            supervisor: Any = ray.get_actor(supervisor_name(self.name), namespace=NAMESPACE)
            return ray.get(supervisor.status.remote(), timeout=5)
        except (RayError, ValueError):
            return None

    def wait_for(self, what: str, look: Any, timeout_s: float = 120.0) -> dict[str, Any]:
        """The first account of which `look(account)` is true."""
        deadline = time.monotonic() + timeout_s
        while (account := self.status()) is None or not look(account):
            if (why := self.why_ended()) is not None:
                raise RuntimeError(f"run {self.name} ended while waiting for {what}: {why}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name}: no {what} within {timeout_s:g} s; last: {account}")
            time.sleep(0.05)
        return account

    def abort(self) -> None:
        """Ends the run, unless it has ended."""
        if self._ended.is_set():
            return
        with suppress(RayError, ValueError):
            supervisor: Any = ray.get_actor(supervisor_name(self.name), namespace=NAMESPACE)
            ray.get(supervisor.abort.remote("the benchmark is over"), timeout=30)
        self._ended.wait(30)


@contextmanager
def training(
    task: Task, name: str, storage: str, num_workers: int | tuple[int, int], recovery: ft.RecoveryConfig, **settings: Any
) -> Iterator[Run]:
    """A run that goes on in the background, and is ended with the block at the latest. `settings` go to `Trainer`."""
    most = num_workers if isinstance(num_workers, int) else num_workers[1]
    trainer = ft.Trainer(
        task,
        global_batch_size=most * task.work.batch_per_worker,
        shuffle=False,  # the peers read in order, too
        quiet=True,
        scaling_config=ft.ScalingConfig(num_workers=num_workers),
        run_config=ft.RunConfig(name=name, storage_path=storage, checkpoint_config=ft.CheckpointConfig(every=None)),
        recovery_config=recovery,
        **settings,
    )
    run = Run(name, Path(storage) / name)
    threading.Thread(target=run.fit, args=(trainer,), name=f"fit-{name}", daemon=True).start()
    try:
        yield run
    finally:
        run.abort()
