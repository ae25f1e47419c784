"""The call of torch that looks at many tensors at once: it is there, it sees what matters, and it keeps nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from raytrain_ft.training import guard as guards
from raytrain_ft.training.guard import guard


def some() -> list[Tensor]:
    plain = [torch.ones(2, 3), torch.tensor(4), nn.Parameter(torch.zeros(5))]
    return [*plain, torch.ones(2, dtype=torch.complex64), torch.ones(0, 4)]


def test_this_torch_has_it() -> None:
    assert guards.TensorGuards is not None
    passes = guard(some())
    assert passes(some())
    assert guard([])([])


@pytest.mark.parametrize(
    ("number", "other"),
    [
        (0, lambda one: one.double()),
        (0, lambda one: one.t()),
        (0, lambda one: one.view(3, 2)),
        (0, lambda one: one.t().contiguous().t()),
        (0, lambda one: one.expand(2, 2, 3)[0].as_strided((2, 3), (0, 0))),
        (0, lambda one: one.to("meta")),
        (0, lambda one: one.to_sparse()),
        (0, lambda one: torch._neg_view(one)),
        (2, lambda one: one.detach()),
        (3, lambda one: one.conj()),
        (4, lambda one: torch.ones(4, 0)),
    ],
)
def test_another_kind_does_not_pass(number: int, other: Callable[[Tensor], Tensor]) -> None:
    passes, tensors = guard(some()), some()
    tensors[number] = other(tensors[number])
    assert not passes(tensors)


def test_more_or_fewer_do_not_pass() -> None:
    passes = guard(some())
    assert not passes(some()[:-1])
    assert not passes([*some(), torch.ones(1)])


def test_it_keeps_no_tensor() -> None:
    tensors = some()
    there = [weakref.ref(tensor) for tensor in tensors]
    passes = guard(tensors)
    assert passes(tensors)
    del tensors
    assert [one() for one in there] == [None] * len(there)


def test_without_it_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "TensorGuards", None)
    assert not guard(some())(some())
