"""The digest that a run ends with: equal if and only if all that training depends on is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from raytrain_ft.policy.sampling import Position
from raytrain_ft.training.state import TrainingState


def trained() -> TrainingState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    state = TrainingState(model, optimizer, schedule, bucket_bytes=1000, first_bucket_bytes=1000)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    state.position = Position(1, 32)
    return state


CHANGES: dict[str, Callable[[TrainingState], object]] = {
    "a weight": lambda state: state.model.weight.data[0, 0].add_(1e-7),  # type: ignore[union-attr, operator, index]
    "a moment": lambda state: next(iter(state.optimizer.state.values()))["exp_avg"].mul_(2.0),
    "a learning rate": lambda state: state.optimizer.param_groups[1].update(lr=0.25),
    "a learning rate that is a tensor": lambda state: state.optimizer.param_groups[1].update(lr=torch.tensor(0.25)),
    "the betas": lambda state: state.optimizer.param_groups[0].update(betas=(0.9, 0.99)),
    "the schedule": lambda state: setattr(state.scheduler, "last_epoch", 7),
    "the place in the data": lambda state: setattr(state, "position", Position(1, 33)),
}


def test_what_was_trained_alike_has_the_same_digest_also_once_it_was_sent() -> None:
    """Two of one kind differ in their LambdaLR's function, which is no state."""
    one, other = trained(), trained()
    assert one.final_digest() == other.final_digest()
    assert one.final_digest().split(":")[:-1] == list(one.digests())
    one.take(other.extras())
    assert one.final_digest() == other.final_digest()


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_makes_another(change: str) -> None:
    state = trained()
    before = state.final_digest()
    CHANGES[change](state)
    assert state.final_digest() != before
