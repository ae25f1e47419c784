"""Buckets: what an optimizer is narrowed to, gradients that are missing, and what is accepted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_ft.training.buckets import Bucket, only


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2, 3), float(number))) for number in range(count)]


def narrowed(optimizer: torch.optim.Optimizer, bucket: Bucket) -> list[list[float]]:
    with only(optimizer, bucket.selection):
        return [[float(p[0, 0]) for p in group["params"]] for group in optimizer.param_groups]


def test_an_optimizer_is_narrowed_to_a_bucket_in_its_own_order_and_given_back() -> None:
    params = parameters(6)
    optimizer = torch.optim.SGD([{"params": [params[i] for i in (4, 0, 2)]}, {"params": [params[1]]}], lr=0.1)
    bucket = Bucket(0, [params[i] for i in (0, 1, 4, 5)], 0)
    lists = [group["params"] for group in optimizer.param_groups]
    for _ in range(2):
        assert narrowed(optimizer, bucket) == [[4.0, 0.0], [1.0]]
        assert all(group["params"] is one for group, one in zip(optimizer.param_groups, lists, strict=True))


def test_groups_that_have_changed_are_looked_at_again() -> None:
    params = parameters(4)
    optimizer = torch.optim.SGD(params[:2], lr=0.1)
    bucket = Bucket(0, params, 0)
    assert narrowed(optimizer, bucket) == [[0.0, 1.0]]
    optimizer.param_groups[0]["params"].append(params[2])
    assert narrowed(optimizer, bucket) == [[0.0, 1.0, 2.0]]
    optimizer.param_groups[0]["params"] = [params[3], params[0], params[1]]
    assert narrowed(optimizer, bucket) == [[3.0, 0.0, 1.0]]
    optimizer.add_param_group({"params": [params[2]]})
    assert narrowed(optimizer, bucket) == [[3.0, 0.0, 1.0], [2.0]]
    with only(optimizer, bucket.selection):
        optimizer.param_groups[0]["params"].clear()
    assert narrowed(optimizer, bucket) == [[3.0, 0.0, 1.0], [2.0]]


@pytest.mark.parametrize("missing", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_who_has_no_gradient_contributes_zeros_and_no_flag(missing: tuple[int, ...]) -> None:
    """However it was in the step before."""
    params = parameters(4)
    bucket = Bucket(0, params, 0)
    for without in ((), missing, missing, (2,), ()):
        bucket.flat.fill_(torch.nan)
        for number, p in enumerate(params):
            p.grad = None if number in without else torch.full((2, 3), -0.0 if number == 1 else number + 0.5)
        bucket.collect()
        for number, view in enumerate(bucket.views):
            expected = torch.zeros(2, 3) if params[number].grad is None else params[number].grad
            assert expected is not None
            assert torch.equal(view.view(torch.int32), expected.view(torch.int32))
        assert bucket.used.tolist() == [float(number not in without) for number in range(4)]
        assert float(bucket.missing) == 0.0


def test_gradients_are_accepted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(3)
    bucket: Any = Bucket(0, params, 0)
    params[1].grad = torch.ones(2, 3)
    bucket.collect()
    bucket.used[0] = 2.0  # another rank has one
    for _ in range(2):
        bucket.accept()
        assert [p.grad is None for p in params] == [False, False, True]
        assert params[0].grad is bucket.views[0]
    params[0].grad = None  # as nobody but a new step does
    bucket.accept()
    assert params[0].grad is None
    for begin in (bucket.allocate, lambda: bucket.take_reduced(bucket.reduced()), bucket.collect):
        begin()
        bucket.used.fill_(1.0)
        bucket.accept()
        assert all(p.grad is view for p, view in zip(params, bucket.views, strict=True))
