"""`raytrain_ft.checkfreq` notices what is trained and was not given to it, and says nothing of other loops."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_checkfreq import Plateau, Setup, journal
from torch import Tensor, nn

import raytrain_ft.checkfreq as checkfreq

STEPS = 8


def told(directory: Path, objects: dict[str, Any], step: Callable[..., None], until: int = STEPS) -> list[str]:
    """What is said of a run with this step."""
    with checkfreq.open(directory, every=5, **objects) as run:
        for batch in run.batches(objects["loader"], until_step=until):
            step(*batch)
    return [record["reason"] for record in journal(directory, "NotGiven")]


class Head(nn.Module):
    """A loss with weights of its own, as ArcFace has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(inputs @ self.weight, labels)


@pytest.mark.parametrize("passed", [False, True])
def test_parameters_that_nothing_stores_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, passed: bool) -> None:
    setup, head = Setup(), Head()
    setup.optimizer = optimizer = torch.optim.SGD([*setup.model.parameters(), *head.parameters()], lr=0.1)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        head(setup.model(inputs), labels).backward()
        optimizer.step()

    objects = {"model": setup.model, "optimizer": optimizer, "loader": setup.loader} | ({"head": head} if passed else {})
    with caplog.at_level(logging.WARNING):
        found = told(tmp_path, objects, step)
    if passed:
        assert found == []
    else:
        (reason,) = found
        assert reason.startswith("optimizer trains parameter 6 of group 0, of shape [3, 3], which no module")
        assert "pass the module too" in reason
        assert "NotGiven" in caplog.text


def test_of_many_parameters_that_nothing_stores_one_is_named(tmp_path: Path) -> None:
    optimizer = Setup().optimizer
    checkfreq.open(tmp_path, optimizer=optimizer).close()
    (record,) = journal(tmp_path, "NotGiven")
    assert record["reason"].startswith("optimizer trains parameter 0 of group 0, of shape [16, 8] and 5 more, which")


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_scheduler_that_was_not_passed_is_told_of_in_each_launch(tmp_path: Path, made: str) -> None:
    for launch in (1, 2):
        setup = Setup()
        setup.optimizer = optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
        if made == "before":
            setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
        objects = {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}
        with checkfreq.open(tmp_path, every=5, **objects) as run:
            if made == "after":
                setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
            setup.train(run, launch * STEPS)
        reasons = [record["reason"] for record in journal(tmp_path, "NotGiven")]
        assert len(reasons) == launch
        assert "a learning rate scheduler was made for optimizer" in reasons[-1]
        assert "pass the scheduler too" in reasons[-1]


class Gan:
    """Two models, the loss of each of which leaves gradients in the other one."""

    def __init__(self) -> None:
        self.real, self.fake = nn.Linear(8, 1), nn.Linear(8, 8)
        self.optimizers = {
            "real_optimizer": torch.optim.Adam(self.real.parameters(), lr=0.01),
            "fake_optimizer": torch.optim.Adam(self.fake.parameters(), lr=0.01),
        }
        self.objects = {"real": self.real, "fake": self.fake, "loader": Setup().loader}

    def step(self, inputs: Tensor, _: Tensor) -> None:
        for sign, optimizer in zip((1, -1), self.optimizers.values(), strict=True):
            optimizer.zero_grad()
            (sign * (self.real(inputs) - self.real(self.fake(inputs)))).mean().backward()
            optimizer.step()


def test_a_module_whose_optimizer_was_not_passed_is_told_of(tmp_path: Path) -> None:
    gan = Gan()
    (reason,) = told(tmp_path, gan.objects | {"optimizer": gan.optimizers["real_optimizer"]}, gan.step)
    assert "of fake is trained, and is in no optimizer" in reason
    assert "pass its optimizer too" in reason


class Sharp(torch.optim.Optimizer):
    """As SAM is written: it takes a step up, the gradients there, and has another optimizer take the step. torch's state dict
    has the groups, and what was kept for the way back."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["before"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Nested(Sharp):
    def state_dict(self) -> dict[str, Any]:
        return {"sharp": super().state_dict(), "base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["sharp"])
        self.base_optimizer.load_state_dict(state_dict["base"])
        self.param_groups = self.base_optimizer.param_groups


class Copied(Nested):
    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


class Caching(Nested):
    """What it keeps beside the parameters' own is made anew in each step, and not stored."""

    def step(self, closure: Callable[[], Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        self.state["norm"] = torch.stack([p.norm() for p in self.param_groups[0]["params"]]).norm()  # pyright: ignore

    def state_dict(self) -> dict[str, Any]:
        cache = self.state.pop("norm", None)  # pyright: ignore
        try:
            return super().state_dict()
        finally:
            if cache is not None:
                self.state["norm"] = cache  # pyright: ignore


class Apart(Nested):
    """Leaves out what is its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict["base"])


def sharp(kind: type[Sharp] = Sharp) -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    optimizer = kind(setup.model.parameters())

    def step(inputs: Tensor, labels: Tensor) -> None:
        def closure() -> None:
            optimizer.zero_grad()
            F.cross_entropy(setup.model(inputs), labels).backward()

        closure()
        optimizer.step(closure)

    return {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}, step


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Sharp, "what the optimizer in Sharp.base_optimizer, of class AdamW, keeps is in no state_dict()"),
        (Apart, "what optimizer, of class Apart, keeps is in no state_dict()"),
    ],
)
def test_what_an_optimizer_keeps_outside_of_its_state_dict_is_told_of(tmp_path: Path, kind: type[Sharp], what: str) -> None:
    for launch in (1, 2):
        found = told(tmp_path, *sharp(kind), until=launch * STEPS)
        assert len(found) == launch
        assert found[-1].startswith(what)
        assert "state_dict() and load_state_dict() of optimizer have it too" in found[-1]


def one_in_another_optimizer() -> tuple[dict[str, Any], Callable[..., None]]:
    return sharp(Nested)


def one_whose_state_is_copied_as_it_is_given() -> tuple[dict[str, Any], Callable[..., None]]:
    return sharp(Copied)


def one_with_a_cache_that_is_made_anew() -> tuple[dict[str, Any], Callable[..., None]]:
    return sharp(Caching)


def both_of_a_gan() -> tuple[dict[str, Any], Callable[..., None]]:
    gan = Gan()
    return gan.objects | gan.optimizers, gan.step


def all_that_has_state() -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    return setup.objects, setup.step


def gradients_in_what_is_not_trained() -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    optimizer = torch.optim.SGD(setup.model[-1].parameters(), lr=0.1)

    def step(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(setup.model(inputs), labels).backward()
        optimizer.step()

    return {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}, step


def an_average() -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    average = copy.deepcopy(setup.model)

    def step(inputs: Tensor, labels: Tensor) -> None:
        setup.step(inputs, labels)
        with torch.no_grad():
            for mean, one in zip(average.parameters(), setup.model.parameters(), strict=True):
                mean.lerp_(one, 0.1)

    return setup.objects | {"average": average}, step


def a_scheduler_inside_another_object() -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    inside = setup.scheduler
    holder = SimpleNamespace(all=[inside], state_dict=inside.state_dict, load_state_dict=inside.load_state_dict)
    return setup.objects | {"scheduler": holder}, setup.step


def a_plateau() -> tuple[dict[str, Any], Callable[..., None]]:
    setup = Setup()
    optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
    setup.optimizer, setup.scheduler = optimizer, Plateau(optimizer)  # pyright: ignore
    return setup.objects, setup.step


def copies_of_an_optimizer() -> tuple[dict[str, Any], Callable[..., None]]:
    """As where weights of float16 are trained: of the copies it makes the weights anew."""
    setup = Setup()
    copies = [one.detach().clone().requires_grad_() for one in setup.model.parameters()]

    class Copies(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # pyright: ignore
            with torch.no_grad():
                for mine, one in zip(copies, setup.model.parameters(), strict=True):
                    mine.grad = one.grad
                super().step()
                for mine, one in zip(copies, setup.model.parameters(), strict=True):
                    one.copy_(mine)

        def state_dict(self) -> dict[str, Any]:
            return {"copies": copies}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    optimizer = Copies(copies, lr=0.1)

    def step(inputs: Tensor, labels: Tensor) -> None:
        setup.model.zero_grad()
        F.cross_entropy(setup.model(inputs), labels).backward()
        optimizer.step()

    return {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}, step


@pytest.mark.parametrize(
    "loop",
    [
        all_that_has_state,
        both_of_a_gan,
        gradients_in_what_is_not_trained,
        an_average,
        a_scheduler_inside_another_object,
        a_plateau,
        copies_of_an_optimizer,
        one_in_another_optimizer,
        one_whose_state_is_copied_as_it_is_given,
        one_with_a_cache_that_is_made_anew,
    ],
)
def test_nothing_is_said_of_a_loop_with(tmp_path: Path, loop: Callable[[], tuple[dict[str, Any], Callable[..., None]]]) -> None:
    for launch in (1, 2):
        assert told(tmp_path, *loop(), until=launch * STEPS) == []


def test_nothing_is_said_of_what_updates_of_ones_own_train(tmp_path: Path) -> None:
    gan = Gan()
    optimizer, other = gan.optimizers.values()
    with checkfreq.open(tmp_path, every=5, **gan.objects, optimizer=optimizer) as run:
        other.register_step_pre_hook(lambda *_: run._session.update_begins())
        other.register_step_post_hook(lambda *_: run._session.update_ends())
        for batch in run.batches(gan.objects["loader"], until_step=STEPS):
            gan.step(*batch)
    assert journal(tmp_path, "NotGiven") == []
