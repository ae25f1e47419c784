"""What a worker does between two disturbances: checkpoints of the ends of epochs that broke off with the incarnation before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import FencedError
from raytrain_ft.policy.commands import Run
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.runtime.loop import Loop
from raytrain_ft.training import mending
from raytrain_ft.training.apart import Parting
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.solo import Solo

EPOCH = 2
"""Steps."""


class Task(ft.TrainTask):
    def model(self, stage: int) -> nn.Module:
        return nn.Linear(3, 2)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.ones(8, 3), torch.ones(8, 2))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


class Taking:
    """In the place of a checkpointer: says what was taken, of which step and incarnation, and whether it is kept."""

    asked = busy = False
    latest = 0

    def __init__(self, *, keeps_epochs: bool) -> None:
        self.keeps_epochs = keeps_epochs
        self.taken: list[tuple[int, int, bool]] = []
        self.incarnation = 0

    def begin(self, rank: int, count: int, incarnation: int, *about: Any, **bad: Any) -> None:
        self.incarnation = incarnation

    def take(self, step: int, check: Callable[[], None], *, kept: bool) -> None:
        check()
        self.taken.append((step, self.incarnation, kept))

    def wants(self, step: int) -> bool:
        return False

    def await_copy(self, check: Callable[[], None]) -> None: ...
    def updated(self, seconds: float) -> None: ...
    def stepped(self, step: int, seconds: float) -> None: ...


def nobody(name: str, rank: int, size: int) -> FencedGroup:
    """Nobody sleeps, so nobody parts."""
    raise AssertionError(name)


class Worker:
    """Trains alone, life after life."""

    def __init__(self, *, keeps_epochs: bool = True, logging: bool = False, max_steps: int = 5) -> None:
        self.checkpointer: Any = Taking(keeps_epochs=keeps_epochs)
        self.rules = SimpleNamespace(max_steps=max_steps, selective=None, stages=1, logging=logging)
        self.dies_at: int | None = None
        settings = StepSettings()
        self.spec: Any = SimpleNamespace(rules=self.rules, step=settings, use_gpu=False)
        sampling = Sampling(8, 4, seed=0)
        self.replica = build_replica(Task(), sampling, settings, use_gpu=False, undo_mode="exact", probe=self._probe)
        self.replica.checkpointer = self.checkpointer
        self.incarnation = 0

    def _probe(self, phase: str, step: int, bucket: int | None) -> None:
        if phase == "forward" and step == self.dies_at:
            raise FencedError("the incarnation is over")

    def live(self, until: int | None, *, loaded: bool) -> list[tuple[int, int, bool]]:
        """One life, which is over in the midst of the step after `until`; returns what was taken in it."""
        self.incarnation, self.dies_at = self.incarnation + 1, until
        fence, before = Fence(self.incarnation), len(self.checkpointer.taken)
        connections: Any = SimpleNamespace(
            live=lambda rounded: Links(fence, 0, 1, Solo(fence)),
            parting=lambda: Parting(nobody, 0, 1),
        )
        told: Any = SimpleNamespace(committed=lambda commit: None, note=lambda *about: None)
        command = Run(("w0",), self.incarnation)
        loop = Loop(self.spec, self.replica, connections, told, fence, command, 0, asleep=False, loaded=loaded)
        try:
            loop.run()
        except FencedError:
            self.replica.abandon()
            mending.discard(self.replica)
        self.replica.loader.stop()
        return self.checkpointer.taken[before:]


@pytest.mark.parametrize("again", [1, 3])
def test_the_end_of_an_epoch_that_broke_off_is_taken_again(again: int) -> None:
    """As often as it may have, before anything changes the state."""
    worker = Worker()
    assert worker.live(EPOCH, loaded=True) == [(EPOCH, 1, True)]
    for incarnation in range(2, 2 + again):
        assert worker.live(EPOCH, loaded=False) == [(EPOCH, incarnation, True)]
    assert worker.live(None, loaded=False) == [(EPOCH, 2 + again, True), (2 * EPOCH, 2 + again, True)]


def test_what_was_loaded_is_not_taken_again() -> None:
    worker = Worker()
    worker.live(EPOCH, loaded=True)
    assert worker.live(EPOCH, loaded=True) == []


@pytest.mark.parametrize("stands_at", [0, 1, 3])
def test_within_an_epoch_and_at_the_beginning_nothing_is_taken_again(stands_at: int) -> None:
    worker = Worker()
    worker.live(stands_at, loaded=True)
    assert worker.live(stands_at, loaded=False) == []


def test_the_last_state_is_stored_as_the_run_ends() -> None:
    worker = Worker(max_steps=EPOCH)
    worker.live(None, loaded=True)
    assert worker.live(None, loaded=False) == []


@pytest.mark.parametrize("how", [{"keeps_epochs": False}, {"logging": True}])
def test_nor_where_epochs_are_not_kept_or_a_stage_may_have_been_replayed(how: dict[str, bool]) -> None:
    """What a stage computed again is compared only in the next step."""
    worker = Worker(**how)  # pyright: ignore[reportArgumentType]
    worker.live(EPOCH, loaded=True)
    assert worker.live(EPOCH, loaded=False) == []
