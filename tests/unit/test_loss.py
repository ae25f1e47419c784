"""What a task returns as its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_ft.errors import TaskError
from raytrain_ft.training.backward import loss_of


class Returns:
    """A task whose loss is made by a function of the output."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def loss(self, output: Any, batch: Any) -> Any:
        return self.make(output)


OUTPUT = nn.Linear(3, 2)(torch.ones(4, 3))


@pytest.mark.parametrize("make", [torch.mean, lambda output: output.sum().reshape(1)])
def test_a_loss_is_taken_as_it_is(make: Any) -> None:
    assert torch.equal(loss_of(Returns(make), OUTPUT, None), make(OUTPUT).reshape(()))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda output: output.mean().item(), "a float"),
        (lambda _: None, "a NoneType"),
        (lambda output: output.mean(dim=1), r"shape \(4,\)"),
        (lambda output: output.detach().mean(), "without a gradient"),
    ],
)
def test_a_loss_that_is_none_is_named_with_what_it_should_be(make: Any, found: str) -> None:
    with pytest.raises(TaskError, match=rf"Returns\.loss\(\) returned .*{found}.*cross_entropy"):
        loss_of(Returns(make), OUTPUT, None)


def test_a_measurement_without_gradients_needs_none() -> None:
    with torch.no_grad():
        assert loss_of(Returns(torch.mean), OUTPUT.detach(), None) == OUTPUT.mean()
