"""`raytrain_ft.checkfreq` sees the updates of optimizers whose hooks torch never calls."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkfreq import Setup, journal

import raytrain_ft.checkfreq as checkfreq


class Lookahead(torch.optim.Optimizer):
    """As they are written: with what `Optimizer.__init__` would make, so that nothing seems to be missing, and without it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.updates = inner, 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.updates += 1
        with torch.no_grad():
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                if self.updates % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:  # that of torch would put the hooks around step after all
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow, self.updates = state_dict["slow"], state_dict["updates"]


def looking_ahead(directory: Path, until: int, *, early: bool) -> tuple[int, str]:
    """What was committed and the state at the end. `early`: the schedule is made before the run is opened."""
    setup = Setup()
    setup.optimizer = optimizer = Lookahead(setup.optimizer)
    objects = {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}
    before = vars(optimizer).copy()
    if early:
        setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        before = vars(optimizer).copy()
    with checkfreq.open(directory, every=2, **objects) as run:
        if not early:
            setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        for inputs, labels in run.batches(setup.loader, until_step=until):
            setup.step(inputs, labels)
    assert not early or vars(optimizer).get("step") is before.get("step"), "it is left as it was"
    setup.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    return run.step, repr([tensor.tolist() for tensor in setup.model.state_dict().values()])


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.filterwarnings("error::UserWarning")
def test_updates_of_a_wrapper_whose_hooks_torch_never_calls_are_seen(tmp_path: Path, early: bool) -> None:
    assert not getattr(Lookahead.step, "hooked", False)
    torch.manual_seed(1)
    reference = looking_ahead(tmp_path / "a", 11, early=early)
    assert reference[0] == 11
    torch.manual_seed(1)
    assert looking_ahead(tmp_path / "b", 6, early=early)[0] == 6
    assert 4 in {record["step"] for record in journal(tmp_path / "b", "CheckpointCommitted")}
    assert looking_ahead(tmp_path / "b", 11, early=early) == reference


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's, which is called for every batch, and passes on only those calls that follow the last gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.passes_on = optimizer, False

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        if self.passes_on:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.passes_on:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def accelerated(directory: Path, until: int) -> tuple[int, str]:
    """Three batches are accumulated for each update."""
    setup = Setup()
    optimizer = Accelerated(setup.optimizer)
    objects = {"model": setup.model, "optimizer": optimizer, "loader": setup.loader}
    with checkfreq.open(directory, every=1, **objects) as run:
        number = 3 * run.step
        for inputs, labels in run.batches(setup.loader, until_step=until):
            number += 1
            optimizer.passes_on = number % 3 == 0
            torch.nn.functional.cross_entropy(setup.model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.step == number // 3, "a call that changes nothing is no update"
    assert "step" not in vars(optimizer)
    assert setup.optimizer._optimizer_step_pre_hooks == {}, "it is left as it was"
    return run.step, repr([tensor.tolist() for tensor in setup.model.state_dict().values()])


def test_only_those_steps_of_a_wrapper_count_that_it_passes_on(tmp_path: Path) -> None:
    """A checkpoint between accumulated gradients would lose some of them."""
    assert not getattr(Accelerated.step, "hooked", False)
    torch.manual_seed(1)
    reference = accelerated(tmp_path / "a", 7)
    torch.manual_seed(1)
    accelerated(tmp_path / "b", 3)
    assert journal(tmp_path / "b", "CheckpointFailed") == []
    assert accelerated(tmp_path / "b", 7) == reference
