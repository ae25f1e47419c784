"""`raytrain_ft.checkfreq` and optimizers that are inside another one, or inside another object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks
from test_checkfreq import Setup, journal
from test_checkfreq_followed import Accelerated, Lookahead
from torch import nn

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.errors import ConfigError
from raytrain_ft.training.objects import put_back

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def recipe(params: list[nn.Parameter]) -> Any:
    """The optimizer that the page about settings shows."""
    (block,) = (block for block in blocks("here") if "class MuonWithAdamW" in block.code)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(block.tree, block.name, "exec"), names)
    return names["MuonWithAdamW"](params)


class Both(torch.optim.Optimizer):
    """As it was shown first: torch's `load_state_dict` makes a state and groups that only the outer one has."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
        self.param_groups = [group for o in self.optimizers for group in o.param_groups]
        for o in self.optimizers:
            o.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for o in self.optimizers:
            o.step()


class Around(torch.optim.Optimizer):
    """Has all in common with one other, and stores it by that one's state dict."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.AdamW(params, lr=0.01)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])


class Twice(Around):
    """Stores and loads both, each of which has a state and groups of its own then; the inner one at another rate perhaps."""

    def __init__(self, params: list[nn.Parameter], *, rate: float | None = None) -> None:
        super().__init__(params)
        self.rate = rate

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "outer": torch.optim.Optimizer.state_dict(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        torch.optim.Optimizer.load_state_dict(self, state_dict["outer"])
        if self.rate is not None:
            self.inner.param_groups[0]["lr"] = self.rate


class Parted(Both):
    """Each of those inside loads its own part."""

    def state_dict(self) -> dict[str, Any]:
        whole = {p: dict(kept) for p, kept in self.state.items()}
        found = []
        for o in self.optimizers:
            o.state = {p: whole[p] for group in o.param_groups for p in group["params"] if p in whole}
            found.append(o.state_dict())
            o.state = self.state
        return {"parts": found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for o, part in zip(self.optimizers, state_dict["parts"], strict=True):
            o.load_state_dict(part)


def trained(directory: Path, make: Make, until: int) -> str:
    """The state at the end."""
    setup = Setup()
    setup.optimizer = make(list(setup.model.parameters()))
    setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 3, 0.5)
    with checkfreq.open(directory, every=5, **setup.objects) as run:
        setup.train(run, until)
    assert journal(directory, "NotGiven") == []
    return setup.state()


@pytest.mark.parametrize("make", [recipe, Both, Around, Twice, Parted])
def test_what_optimizers_have_in_common_they_have_in_common_after_a_resume(tmp_path: Path, make: Make) -> None:
    """Those inside went on with empty moments, at the rates that they were made with."""
    torch.manual_seed(1)
    reference = trained(tmp_path / "a", make, 23)
    torch.manual_seed(1)
    trained(tmp_path / "b", make, 9)
    assert trained(tmp_path / "b", make, 23) == reference


def test_the_recipe_needs_nobody_else_to_load_its_state() -> None:
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    optimizer = recipe(params)
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(one.state is optimizer.state for one in optimizer.optimizers)
    assert [id(group) for one in optimizer.optimizers for group in one.param_groups] == list(map(id, optimizer.param_groups))


def test_what_can_be_had_in_common_in_two_ways_is_refused() -> None:
    optimizer = Twice([nn.Parameter(torch.ones(2))], rate=7.0)
    with pytest.raises(ConfigError, match=r"Twice had one `param_groups` in common.*o\.param_groups = self\.param_groups"):
        put_back(optimizer, optimizer.state_dict())


def test_a_group_of_other_parameters_does_not_take_the_place_of_one() -> None:
    class Anew(Both):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self.param_groups[0]["params"] = [nn.Parameter(torch.ones(2, 2))]

    optimizer = Anew([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match=r"Anew, Muon had one `param_groups` in common"):
        put_back(optimizer, optimizer.state_dict())


class Holder:
    """Something else that has an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = {"inner": optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {"opt": self.optimizers["inner"].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizers["inner"].load_state_dict(state_dict["opt"])


class Stateless(torch.optim.Optimizer):
    """Has little of what an optimizer has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("holder", [Lookahead, Accelerated, Stateless, Holder])
def test_what_an_optimizer_inside_keeps_is_neither_rounded_nor_laid_out_anew(holder: Callable[[Any], Any]) -> None:
    p = nn.Parameter(torch.rand(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    inner = torch.optim.SGD([p], lr=0.1)
    value = holder(inner)
    exact = torch.rand(2, 3, 4, 5)
    inner.state[p]["mean"] = exact
    put_back(value, copy.deepcopy(value.state_dict()))
    found = inner.state[p]["mean"]
    assert found is not exact
    assert torch.equal(found, exact)
    assert found.dtype == torch.float32
    assert found.stride() == p.stride()
    assert value.state is inner.state if hasattr(value, "state") else True
    assert not inner._optimizer_load_state_dict_pre_hooks, "it is left as it was"
