"""What the passes change, and nothing stores: of what a forward pass leaves behind, that which looks like state is told of."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.machine import handle
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.runtime import trainee
from raytrain_ft.runtime.tidings import NOTES
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.unseen import LONG


class Leaving(nn.Module):
    """Leaves something behind in each forward pass."""

    def __init__(self, leave: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.norm, self.leave = nn.Linear(3, 2), nn.BatchNorm1d(3), leave
        self.turns, self.heat, self.length, self.mean = 0, 1.0, 0, 0.0
        self.count, self.seen = torch.tensor(0), torch.zeros(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.leave(self, x)
        return self.layer(self.norm(x))


class Criterion(nn.Module):
    """A loss that follows what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.calls = 0

    def forward(self, output: Tensor) -> Tensor:
        return ((output - self.centre) ** 2).mean()


class Task(ft.TrainTask):
    """With a criterion beside its model, or in it."""

    def __init__(self, in_forward: Any = None, in_loss: Any = None, *, inside: bool = False) -> None:
        self.net = Leaving(in_forward or (lambda model, x: None))
        self.in_loss, self.losses = in_loss or (lambda task, output: None), [Criterion()]
        self.temperature, self.calls, self.data, self.length = 1.0, 0, list(range(LONG + 1)), 0
        if inside:
            self.net.criterion = self.losses[0]

    def model(self, stage: int) -> nn.Module:
        return self.net

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.in_loss(self, output.detach())
        return self.losses[0](output)


def told_of(task: Task, steps: int = 3, incarnation: int = 1) -> list[list[str]]:
    replica = build_replica(task, Sampling(16, 4, 0), StepSettings(), use_gpu=False, undo_mode="exact", probe=None)
    replica.loader.start(Position(), 0, 1)
    fence, told = Fence(incarnation), []
    replica.passes.tell_unseen = told.append
    for _ in range(steps):
        replica.train_step(Links(fence, 0, 1, Solo(fence)))
    replica.loader.stop()
    return told


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (lambda model, x: setattr(model, "turns", model.turns + 1), "model.turns"),
        (lambda model, x: setattr(model, "heat", model.heat * 0.99), "model.heat"),
        (lambda model, x: model.count.add_(len(x)), "model.count"),
    ],
)
def test_a_counter_of_a_module_is_told_of_once(leave: Any, name: str) -> None:
    assert told_of(Task(leave)) == [[name]]
    assert told_of(Task(leave), incarnation=2) == [], "nobody looks in a recovery"


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (lambda task, output: setattr(task, "calls", task.calls + 1), "task.calls"),
        (lambda task, output: setattr(task, "temperature", task.temperature - 0.01), "task.temperature"),
        (lambda task, output: setattr(task.losses[0], "calls", task.losses[0].calls + 1), "task.losses[0].calls"),
        (lambda task, output: task.losses[0].centre.lerp_(output.mean(0), 0.1), "task.losses[0].centre"),
    ],
)
def test_so_is_what_the_loss_changes_in_the_task(leave: Any, name: str) -> None:
    assert told_of(Task(in_loss=leave)) == [[name]]


@pytest.mark.parametrize(
    "leave",
    [
        lambda model, x: None,
        lambda model, x: setattr(model, "length", x.shape[0]),  # a cache
        lambda model, x: setattr(model, "length", max(model.length, x.shape[0])),
        lambda model, x: setattr(model, "mean", x.mean().item()),  # to be looked at
        lambda model, x: setattr(model, "seen", x.detach()),
        lambda model, x: setattr(model, "last", x.detach().mean()),
        lambda model, x: setattr(model, "_calls", getattr(model, "_calls", 0) + 1),
        lambda model, x: setattr(model, "ready", True),
        lambda model, x: setattr(model, "made", getattr(model, "made", 7)),
    ],
)
def test_what_a_forward_pass_leaves_for_others_is_no_state(leave: Any) -> None:
    assert told_of(Task(leave)) == []
    assert told_of(Task(in_loss=leave)) == []


def test_a_criterion_that_is_a_part_of_the_model_is_stored() -> None:
    assert told_of(Task(in_loss=lambda task, output: task.losses[0].centre.lerp_(output.mean(0), 0.1), inside=True)) == []


def test_whoever_follows_the_run_is_told_once() -> None:
    run = RunState(Rules(min_workers=1, max_workers=1, max_steps=9))
    handle(run, m.RunStarted(run_id="r"))
    handle(run, m.CapacityChanged(slots=1))
    handle(run, m.WorkerStarted(member="w0", node="n0", pid=1))
    handle(run, m.Reconciled(member="w0", incarnation=1, digests=("d",)))
    for _ in range(2):
        handle(run, m.StateUnseen(member="w0", incarnation=1, step=1, names="task.calls"))
    (words,) = run.warnings
    assert words.startswith("task.calls: changed in the forward pass, and neither stored nor given to a replacement")


def test_a_worker_looks_in_the_first_incarnation_of_its_launch_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a launch that resumes is not number 1."""
    notes: list[tuple[str, dict[str, Any]]] = []
    worker: Any = object.__new__(trainee.Trainee)
    about = ("sampling", "step", "use_gpu", "undo")
    worker._spec = SimpleNamespace(incarnation=4, **dict.fromkeys(about))
    worker._heartbeat = SimpleNamespace(note=lambda event, fields: notes.append((event, fields)))
    replica = SimpleNamespace(passes=SimpleNamespace(), state=SimpleNamespace(step=8))
    monkeypatch.setattr(trainee.sealed, "load", lambda spec: None)
    monkeypatch.setattr(trainee, "build_replica", lambda *_, **__: replica)
    worker.replica = worker._build_replica(writes=False)
    assert replica.passes.first_incarnation == 5
    replica.passes.tell_unseen(["task.calls", "model.turns"])
    ((name, fields),) = notes
    event = NOTES[name](member="w0", **fields)
    assert event == m.StateUnseen(member="w0", incarnation=5, step=8, names="task.calls, model.turns")
