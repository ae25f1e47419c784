"""Undo of optimizer updates: each supported optimizer comes back to where it was, and what cannot is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, UndoRefusedError
from raytrain_ft.training import blocks
from raytrain_ft.training.lamb import LAMB
from raytrain_ft.training.undo import Undo, refusals

SHAPES = ((7, 5), (13,), (), (3, 4, 5))
CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd-momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {}),
    "adamw": (AdamW, {}),
    "adamw-slow": (AdamW, {"betas": (0.99, 0.95)}),  # beta1**2 > beta2: the other branch of the floor
    "nadam": (NAdam, {}),
    "nadam-decoupled": (NAdam, {"decoupled_weight_decay": True}),
    "radam": (RAdam, {}),
    "radam-decoupled": (RAdam, {"decoupled_weight_decay": True}),
    "rmsprop": (RMSprop, {}),
    "rmsprop-momentum": (RMSprop, {"momentum": 0.9}),
    "rmsprop-centered": (RMSprop, {"centered": True}),
    "rmsprop-both": (RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (Adagrad, {}),
    "adagrad-decay": (Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "adafactor": (Adafactor, {}),
    "lamb": (LAMB, {}),
}
VARIANTS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = (SGD, Adam, AdamW, Adagrad)
BUCKETED = ("sgd-momentum", "adam", "adamw", "nadam", "adagrad", "adafactor", "lamb")
EVERY = [(case, variant) for case in CASES for variant in VARIANTS if variant != "fused" or CASES[case][0] in FUSED]
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-5)}  # of parameters, of state


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    return [Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def gradients(params: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    return [torch.randn_like(p) * scale for p in params]


def step(optimizer: Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()


def snapshot(optimizer: Optimizer, params: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, dict[str, Tensor]]]:
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])


def distance(found: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """The largest difference relative to `scale`, by default the largest element; absolute where all is zero."""
    return (found - expected).abs().max().item() / (scale or expected.abs().max().item() or 1.0)


def assert_at(optimizer: Optimizer, params: Sequence[Tensor], saved: Any, tolerance: tuple[float, float] = (0.0, 0.0)) -> None:
    """Parameters, and the state with its keys, dtypes and step counters, are those that were saved.

    The scale of a state is its largest element anywhere: v is a sum of squares, and rounds at the largest of them.
    """
    for p, x in zip(params, saved[0], strict=True):
        assert distance(p.detach(), x) <= tolerance[0]
    state = optimizer.state_dict()["state"]
    assert state.keys() == saved[1].keys()
    for index, entry in saved[1].items():
        assert state[index].keys() == entry.keys()
        for name, value in entry.items():
            assert state[index][name].dtype == value.dtype
            limit = 0.0 if name in ("step", "mu_product") else tolerance[1]
            scale = max(other[name].abs().max().item() for other in saved[1].values() if name in other)
            assert distance(state[index][name], value, scale) <= limit, name


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("case", "variant"), EVERY)
def test_one_undo_restores_parameters_and_state(case: str, variant: str, dtype: torch.dtype) -> None:
    kind, kwargs = CASES[case]
    for weight_decay, maximize, steps in itertools.product((0.0, 0.1), (False, True), (1, 2, 50)):
        params = parameters(dtype)
        optimizer = kind(params, weight_decay=weight_decay, maximize=maximize, **kwargs, **VARIANTS[variant])  # type: ignore[call-arg]
        undo = Undo(optimizer)
        for _ in range(steps - 1):
            step(optimizer, params, gradients(params))
        saved, grads = snapshot(optimizer, params), gradients(params)
        step(optimizer, params, grads)
        undo.undo()
        assert_at(optimizer, params, saved, TOLERANCE[dtype])
        for p, g in zip(params, grads, strict=True):  # a step that overwrites p.grad had that undone, too
            assert distance(p.grad, g) <= TOLERANCE[dtype][0]


@pytest.mark.parametrize("foreach", [False, True])
def test_radam_before_and_after_its_variance_becomes_tractable(foreach: bool) -> None:
    params = parameters(torch.float64)
    optimizer = RAdam(params, foreach=foreach)
    undo = Undo(optimizer)
    for _ in range(8):  # rho_t passes 5 at step 6
        saved, grads = snapshot(optimizer, params), gradients(params)
        step(optimizer, params, grads)
        undo.undo()
        assert_at(optimizer, params, saved, TOLERANCE[torch.float64])
        step(optimizer, params, grads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_parameter_that_was_zero_is_so_again_but_for_the_rounding_of_its_update(case: str, foreach: bool) -> None:
    kind, kwargs = CASES[case]
    p = Parameter(torch.zeros(33))
    optimizer = kind([p], foreach=foreach, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    step(optimizer, [p], gradients([p]))
    update = p.detach().clone()
    undo.undo()
    assert (p.abs() <= 2e-7 * update.abs()).all()


@pytest.mark.parametrize(("case", "variant"), EVERY)
def test_undo_and_the_same_gradient_again_leads_back(case: str, variant: str) -> None:
    kind, kwargs = CASES[case]
    params = parameters()
    optimizer = kind(params, weight_decay=0.01, **kwargs, **VARIANTS[variant])  # type: ignore[call-arg]
    undo = Undo(optimizer)
    for _ in range(3):
        step(optimizer, params, gradients(params))
    grads = gradients(params)
    step(optimizer, params, grads)
    after = snapshot(optimizer, params)
    undo.undo()
    optimizer.step()  # on the gradients that are still there
    ulp = torch.finfo(torch.float32).eps
    assert_at(optimizer, params, after, (4 * ulp, 8 * ulp))


@pytest.mark.parametrize("case", ["sgd-momentum", "sgd-nesterov", "adam", "adamw", "nadam", "rmsprop-both", "lamb"])
def test_a_thousand_undos_and_redos_do_not_drift(case: str) -> None:
    kind, kwargs = CASES[case]
    params = parameters(shapes=((40,),))
    optimizer = kind(params, weight_decay=0.01, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    for _ in range(5):
        step(optimizer, params, gradients(params))
    after, grads = snapshot(optimizer, params), [p.grad for p in params]
    for _ in range(1000):
        undo.undo()
        step(optimizer, params, grads)  # type: ignore[arg-type]
    # Nesterov's update is not the same sum forwards and backwards, and so may stray by an ulp now and then.
    assert_at(optimizer, params, after, (5e-6 if case == "sgd-nesterov" else 5e-7, 2e-6))


@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.0), (0.0, 0.0)])
def test_an_average_without_memory_is_lost_but_never_missed(betas: tuple[float, float]) -> None:
    params = parameters()
    optimizer = Adam(params, betas=betas)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    saved, grads = snapshot(optimizer, params), gradients(params)
    step(optimizer, params, grads)
    after = snapshot(optimizer, params)
    undo.undo()
    assert all(distance(p.detach(), x) <= 1e-6 for p, x in zip(params, saved[0], strict=True))
    step(optimizer, params, grads)
    assert_at(optimizer, params, after, (5e-7, 1e-6))


@settings(max_examples=30)
@given(data=st.data())
def test_undo_of_some_parameters_touches_no_others(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    kind, kwargs = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    params = parameters()
    optimizer = kind(params, weight_decay=0.01, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    before = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    after = snapshot(optimizer, params)
    chosen = data.draw(st.sets(st.integers(0, len(params) - 1)))
    undo.undo([params[i] for i in chosen])
    assert {id(p) for p in undo.updated()} == {id(p) for i, p in enumerate(params) if i not in chosen}
    for i, p in enumerate(params):
        source, tolerance = (before, TOLERANCE[torch.float32]) if i in chosen else (after, (0.0, 0.0))
        assert distance(p.detach(), source[0][i]) <= tolerance[0]
        for name, value in source[1].get(i, {}).items():
            scale = max(other[name].abs().max().item() for other in after[1].values() if name in other)
            assert distance(optimizer.state[p][name], value, scale) <= tolerance[1]


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize(("case", "variant"), [(case, variant) for case, variant in EVERY if case in BUCKETED])
def test_bucket_by_bucket(case: str, variant: str, maximize: bool) -> None:
    """As the trainer does it: step() several times, each time with the groups narrowed to one bucket's parameters."""
    kind, kwargs = CASES[case]
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    optimizer = kind(groups, maximize=maximize, **kwargs, **VARIANTS[variant])  # type: ignore[call-arg]
    undo = Undo(optimizer)
    buckets = [[params[3], params[1]], [params[2], params[0]]]

    def step_bucket(bucket: list[Parameter]) -> None:
        wanted = {id(p) for p in bucket}
        flat = torch.randn(sum(p.numel() for p in bucket))
        for p, view in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = view.view_as(p)
        full = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in wanted]
        optimizer.step()
        for group, everything in zip(optimizer.param_groups, full, strict=True):
            group["params"] = everything

    for _ in range(2):
        for bucket in buckets:
            step_bucket(bucket)
    before = snapshot(optimizer, params)
    for bucket in buckets:
        step_bucket(bucket)
    assert len(undo.updated()) == len(params)
    undo.undo(buckets[0])
    undo.undo(buckets[1])
    assert undo.updated() == []
    assert_at(optimizer, params, before, TOLERANCE[torch.float32])


@pytest.mark.parametrize("case", CASES)
def test_replicas_with_the_same_bits_have_the_same_bits_afterwards(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One undoes everything at once, the other one by one and from the back, and cuts tensors into blocks elsewhere."""
    kind, kwargs = CASES[case]
    mine = parameters(shapes=((300,), (41, 37), (5,)))
    theirs = copy.deepcopy(mine)
    ours = [kind(params, weight_decay=0.01, **kwargs) for params in (mine, theirs)]  # type: ignore[call-arg]
    undos = [Undo(optimizer) for optimizer in ours]
    for _ in range(3):
        grads = gradients(mine)
        step(ours[0], mine, grads)
        step(ours[1], theirs, grads)
    undos[0].undo()
    monkeypatch.setattr(blocks, "block_size", lambda *_: 128)
    monkeypatch.setattr(blocks, "shared_cache", lambda: 0)
    for p in reversed(theirs):
        undos[1].undo([p])
    assert_at(ours[1], theirs, snapshot(ours[0], mine))


def test_the_hyper_parameters_of_the_step_are_used_not_those_set_since() -> None:
    params = parameters()
    groups = [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.03, "betas": (0.8, 0.99)}]
    optimizer = AdamW(groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)  # moves lr and beta1
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    scheduler.step()
    saved = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    used = [(group["lr"], group["betas"]) for group in optimizer.param_groups]
    scheduler.step()
    assert used != [(group["lr"], group["betas"]) for group in optimizer.param_groups]
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


@pytest.mark.parametrize("earlier", [False, True], ids=["registered since", "registered before"])
def test_what_a_hook_does_after_the_step_is_not_the_steps(earlier: bool) -> None:
    params = parameters()
    optimizer = AdamW(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    def hook(*_: Any) -> None:
        scheduler.step()
        with torch.no_grad():
            params[0].clamp_(-0.01, 0.01)

    if earlier:
        optimizer.register_step_post_hook(hook)
    undo = Undo(optimizer)
    if not earlier:
        optimizer.register_step_post_hook(hook)
    saved = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    undo.undo(params[1:])
    for p, x in zip(params[1:], saved[0][1:], strict=True):
        assert distance(p.detach(), x) <= 1e-6, "with the learning rate of the step"
    with pytest.raises(UndoRefusedError, match=r"of shape \(7, 5\) was changed after the step"):
        undo.undo()


def test_what_a_hook_does_before_the_step_stays() -> None:
    params = parameters()
    optimizer = Adafactor(params, lr=0.1)

    def halve(*_: Any) -> None:
        with torch.no_grad():
            for p in params:
                p.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    found, state = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    undo.undo()
    assert_at(optimizer, params, ([0.5 * x for x in found], state), TOLERANCE[torch.float32])


def test_parameters_without_gradient_frozen_and_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    params = list(model.parameters())
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    undo = Undo(optimizer)
    saved = snapshot(optimizer, params)
    model[1](model[0](torch.randn(2, 4))).sum().backward()  # the last layer takes no part
    optimizer.step()
    assert {id(p) for p in undo.updated()} == {id(p) for p in (model[0].weight, model[0].bias, model[1].bias)}
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


@pytest.mark.parametrize("case", ["adam", "nadam", "adafactor", "lamb"])
def test_a_frozen_parameter_that_has_a_gradient_is_updated_and_undone(case: str) -> None:
    kind, kwargs = CASES[case]
    params = parameters()
    optimizer = kind(params, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    params[1].requires_grad_(False)
    for _ in range(2):
        saved = snapshot(optimizer, params)
        step(optimizer, params, gradients(params))
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


def test_a_parameter_that_a_later_step_passed_over_has_no_update_to_undo() -> None:
    params = parameters()
    optimizer = Adam(params)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    params[0].grad = None
    optimizer.step()
    with pytest.raises(UndoRefusedError, match=r"at \[0\] of the 1 given"):
        undo.undo(params[:1])
    undo.undo()
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1, 1, 1]


def test_what_is_not_there_cannot_be_undone() -> None:
    params = parameters()
    optimizer = Adam(params)
    undo = Undo(optimizer)
    with pytest.raises(UndoRefusedError, match="no update to undo"):
        undo.undo()
    step(optimizer, params, gradients(params))
    undo.undo()
    saved = snapshot(optimizer, params)
    for again in (None, params, params[:1]):
        with pytest.raises(UndoRefusedError, match="Undo each update once"):
            undo.undo(again)
    undo.undo([])  # nothing asked, nothing done
    step(optimizer, params, gradients(params))
    undo.forget(params[:1])
    with pytest.raises(UndoRefusedError):
        undo.undo(params)
    undo.undo(params[1:])
    assert distance(params[1].detach(), saved[0][1]) <= 1e-6
    undo.close()
    step(optimizer, params, gradients(params))
    assert undo.updated() == []


def test_gradients_that_the_loop_let_go_are_still_held_and_changed_ones_are_noticed() -> None:
    params = parameters()
    optimizer = AdamW(params)
    undo = Undo(optimizer)
    saved = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    optimizer.zero_grad(set_to_none=True)
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])
    step(optimizer, params, gradients(params))
    saved = snapshot(optimizer, params)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(UndoRefusedError, match=r"gradient of a parameter .* changed after the step"):
        undo.undo()
    assert_at(optimizer, params, saved)
    step(optimizer, params, gradients(params))
    with torch.no_grad():
        params[2].add_(1)
    with pytest.raises(UndoRefusedError, match=r"of shape \(\) was changed after the step"):
        undo.undo()
    undo.undo([params[0]])


@pytest.mark.parametrize("case", ["sgd-momentum", "adam", "nadam", "adafactor", "lamb"])
def test_parameters_cut_out_of_one_tensor_are_undone_one_by_one(case: str) -> None:
    """The change of one is counted as one of its neighbours, too."""
    kind, kwargs = CASES[case]
    whole = torch.randn(3, 5)
    params = [Parameter(row) for row in whole]
    assert {p._version for p in params} == {whole._version}
    optimizer = kind(params, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    for _ in range(2):
        saved = snapshot(optimizer, params)
        step(optimizer, params, gradients(params))
    for p in params:
        undo.undo([p])
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


def test_a_change_to_one_of_several_cut_out_of_one_tensor_is_noticed() -> None:
    whole = torch.randn(3, 5)
    params = [Parameter(row) for row in whole]
    optimizer = SGD(params, lr=0.1)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    undo.undo(params[2:])
    with torch.no_grad():
        params[0].clamp_(-0.1, 0.1)
    with pytest.raises(UndoRefusedError, match="was changed after the step"):
        undo.undo(params[:1])
    step(optimizer, params, gradients(params))
    with torch.no_grad():
        params[0].clamp_(-0.1, 0.1)
    with pytest.raises(UndoRefusedError, match="was changed after the step"):
        undo.undo()


def test_a_change_to_one_of_several_that_share_memory_but_no_counter_is_noticed() -> None:
    """As in one flat buffer that parameters were put into."""
    flat, params = torch.randn(10), [Parameter(torch.randn(5)) for _ in range(2)]
    for p, piece in zip(params, flat.split(5), strict=True):
        p.data = piece
    optimizer = SGD(params, lr=0.1)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    with torch.no_grad():
        params[0].add_(1)
    with pytest.raises(UndoRefusedError, match="was changed after the step"):
        undo.undo(params[:1])
    undo.undo(params[1:])


def test_loading_a_state_and_a_failed_step_leave_nothing_to_undo() -> None:
    params = parameters()
    optimizer = Adam(params)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    optimizer.load_state_dict(optimizer.state_dict())
    assert undo.updated() == []
    step(optimizer, params, gradients(params))
    params[1].grad = torch.randn(13).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert undo.updated() == []


@pytest.mark.parametrize("case", ["sgd", "sgd-momentum", "adam", "adamw", "adagrad"])
def test_a_step_that_the_grad_scaler_skipped_is_no_update(case: str) -> None:
    kind, kwargs = CASES[case]
    params = parameters()
    optimizer = kind(params, fused=True, **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    step(optimizer, params, gradients(params))
    saved = snapshot(optimizer, params)
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert undo.updated() == []
    undo.undo()  # passes it over
    assert_at(optimizer, params, saved)
    for p, g in zip(params, gradients(params, 8.0), strict=True):
        p.grad = g  # scaled: the fused step leaves the unscaled gradient in p.grad
    scaler.step(optimizer)
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


def test_the_unfused_step_after_a_closure_and_nesterov_overwriting_the_gradient() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    saved, grads = snapshot(optimizer, params), gradients(params)

    def closure() -> float:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        return 1.5

    assert optimizer.step(closure) == 1.5
    # Should this fail, torch no longer overwrites p.grad here: then `overwrites_gradient` has to go.
    assert all(distance(p.grad, g) > 1e-3 for p, g in zip(params, grads, strict=True))
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])
    assert all(distance(p.grad, g) < 1e-6 for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_a_momentum_that_a_schedule_has_set_to_zero(foreach: bool) -> None:
    """Nesterov's is in no gradient then."""
    params = parameters()
    optimizer = SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    optimizer.param_groups[0]["momentum"] = 0.0
    saved, grads = snapshot(optimizer, params), gradients(params)
    step(optimizer, params, grads)
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("kind", [Adam, AdamW, NAdam, RAdam, LAMB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_after_a_spike_the_next_update_stays_bounded(kind: type[Optimizer], ratio: float, dtype: torch.dtype) -> None:
    """A gradient 1000 times its history and more wipes out v; the Cauchy-Schwarz floor bounds the next update."""
    p = Parameter(torch.randn(4000, dtype=dtype))
    optimizer = kind([p], lr=1e-3, weight_decay=0.0)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    for _ in range(20):
        step(optimizer, [p], gradients([p]))
    saved = snapshot(optimizer, [p])
    step(optimizer, [p], gradients([p], ratio))
    undo.undo()
    v = optimizer.state[p]["exp_avg_sq"]
    eps = torch.finfo(dtype).eps
    assert (v >= 0).all()
    assert (v - saved[1][0]["exp_avg_sq"]).abs().max() <= 4 * eps * (ratio * 6) ** 2 * 1e-3 + eps
    before = p.detach().clone()
    step(optimizer, [p], gradients([p]))
    trust = optimizer.trust_ratios[p].item() if isinstance(optimizer, LAMB) else 1.0
    assert (p - before).abs().max() <= 4 * 1e-3 * trust


@pytest.mark.parametrize("case", ["rmsprop", "rmsprop-centered", "adagrad", "adafactor"])
def test_after_a_spike_no_root_is_nan(case: str) -> None:
    kind, kwargs = CASES[case]
    p = Parameter(torch.randn(4000))
    optimizer = kind([p], **kwargs)  # type: ignore[call-arg]
    undo = Undo(optimizer)
    for _ in range(5):
        step(optimizer, [p], gradients([p]))
    for ratio in (1e3, 1e5):
        step(optimizer, [p], gradients([p], ratio))
        undo.undo()
        state = optimizer.state[p]
        assert all((state[name] >= 0).all() for name in ("square_avg", "sum", "variance") if name in state)
        step(optimizer, [p], gradients([p], 1e-3))
        assert p.isfinite().all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "kwargs", "kept"),
    [
        (Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (Adamax, {}, "exp_inf"),
    ],
)
def test_replay_mode(kind: type[Optimizer], kwargs: dict[str, Any], kept: str, weight_decay: float) -> None:
    params = parameters()
    optimizer = kind(params, weight_decay=weight_decay, **kwargs)  # type: ignore[call-arg]
    with pytest.raises(UndoRefusedError, match='mode="replay"'):
        Undo(optimizer)
    undo = Undo(optimizer, "replay")
    ulp = torch.finfo(torch.float32).eps
    for _ in range(20):
        saved = snapshot(optimizer, params)
        step(optimizer, params, gradients(params))
        after = snapshot(optimizer, params)
        undo.undo()
        for entry in saved[1].values():
            del entry[kept]
        maxima = [optimizer.state[p].pop(kept) if optimizer.state.get(p) else None for p in params]
        assert_at(optimizer, params, saved, TOLERANCE[torch.float32])
        for p, maximum in zip(params, maxima, strict=True):
            if maximum is not None:
                optimizer.state[p][kept] = maximum
        optimizer.step()
        assert_at(optimizer, params, after, (4 * ulp, 8 * ulp))


class Mine(SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Adam(p, amsgrad=True), ["param_groups[0]", "amsgrad=True", 'mode="replay"']),
        (lambda p: Adamax(p), ["Adamax", 'mode="replay"']),
        (lambda p: Adadelta(p), ["Adadelta", "Use one of", "AdamW"]),
        (lambda p: Rprop(p), ["Rprop", "sign"]),
        (lambda p: LBFGS(p), ["LBFGS"]),
        (lambda p: SparseAdam(p), ["SparseAdam", "rows"]),
        (lambda p: torch.optim.ASGD(p), ["ASGD"]),
        (lambda p: torch.optim.Muon(p[:1]), ["Muon"]),
        (lambda p: Mine(p), ["Mine", "subclass"]),
        (
            lambda p: Adam([{"params": p[:1]}, {"params": p[1:], "betas": (0.01, 0.9)}]),
            ["param_groups[1]", "betas[0]=0.01"],
        ),
        (lambda p: Adam(p, betas=(0.9, 0.02)), ["betas[1]=0.02"]),
        (lambda p: SGD(p, momentum=0.01), ["momentum=0.01"]),
        (lambda p: RMSprop(p, alpha=0.01), ["alpha=0.01"]),
        (lambda p: AdamW(p, lr=1.0, weight_decay=0.9999), ["lr=1.0", "weight_decay=0.9999", "Lower one"]),
        (lambda p: SGD(p, lr=2.0, weight_decay=0.5), ["shrinks"]),
        (lambda p: SGD(p, differentiable=True), ["differentiable=True"]),
        (lambda p: Adam(p, capturable=True), ["capturable=True"]),
        (lambda p: Adam(p, lr=torch.tensor(0.1)), ["lr is a tensor", "float"]),
        (lambda p: SGD([p[0].bfloat16().detach().requires_grad_()]), ['["params"][0]', "bfloat16", "float32 masters"]),
        (lambda p: SGD([p[0].half().detach().requires_grad_()]), ["float16"]),
        (lambda p: SGD([Parameter(torch.randn(3, dtype=torch.complex64))]), ["complex64"]),
        (lambda p: Adafactor([p[0], Parameter(p[1].double())]), ["eps[0]=None"]),
    ],
)
def test_refusals_name_the_place_the_value_and_the_remedy(make: Any, words: list[str]) -> None:
    optimizer = make(parameters())
    (reason,) = refusals(optimizer)
    assert all(word in reason for word in words), reason
    with pytest.raises(UndoRefusedError) as caught:
        Undo(optimizer)
    assert reason in str(caught.value)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_refusals_are_all_named_at_once() -> None:
    p = parameters()
    optimizer = Adam([{"params": [p[0], p[0]], "amsgrad": True}, {"params": p[1:], "capturable": True}])
    assert len(refusals(optimizer)) == 3
    assert len(refusals(optimizer, "replay")) == 2
    with pytest.raises(ConfigError, match='choose "exact" or "replay"'):
        refusals(optimizer, "perfect")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_everything_that_is_supported_is_not_refused(case: str) -> None:
    kind, kwargs = CASES[case]
    assert refusals(kind(parameters(), weight_decay=0.1, **kwargs)) == []  # type: ignore[call-arg]


def test_adagrads_sums_begin_with_what_torch_put_there() -> None:
    """It fills them all with the constructor's value, whatever a group says."""
    p, q = Parameter(torch.ones(8)), Parameter(torch.ones(8))
    groups = [{"params": [p], "initial_accumulator_value": 0.5}, {"params": [q]}]
    adagrad = Adagrad(groups, lr=0.1, initial_accumulator_value=0.25)
    undo = Undo(adagrad)
    saved = snapshot(adagrad, [p, q])
    step(adagrad, [p, q], [torch.full((8,), 2.0)] * 2)
    undo.undo()
    assert_at(adagrad, [p, q], saved, (1e-6, 0.0))
    assert [float(adagrad.state[each]["sum"][0]) for each in (p, q)] == [0.25, 0.25]


def test_what_only_the_step_shows_is_refused_before_anything_changes() -> None:
    """Weight decay scaled by the data to exactly 1; sparse gradients; settings changed since."""
    p = Parameter(torch.ones(8))
    adagrad = Adagrad([p], lr=1.0, weight_decay=1.0)
    undo = Undo(adagrad)
    step(adagrad, [p], [torch.zeros(8)])  # the gradient is 1 * x, its root 1: x becomes 0 whatever it was
    saved = snapshot(adagrad, [p])
    with pytest.raises(UndoRefusedError, match="weight decay, scaled by the data"):
        undo.undo()
    assert_at(adagrad, [p], saved)

    lamb = LAMB([p], lr=1.0, weight_decay=1.0)
    undo = Undo(lamb)
    p.data.fill_(1.0)
    step(lamb, [p], [torch.zeros(8)])
    with pytest.raises(UndoRefusedError, match="weight decay, scaled by the data"):
        undo.undo()

    table = torch.nn.Embedding(9, 3, sparse=True)
    sgd = SGD(table.parameters(), lr=0.1)
    undo = Undo(sgd)
    table(torch.tensor([1, 2])).sum().backward()
    sgd.step()
    with pytest.raises(UndoRefusedError, match="sparse"):
        undo.undo()

    adam = Adam([p])
    undo = Undo(adam)
    adam.param_groups[0]["betas"] = (0.01, 0.9)  # set since
    step(adam, [p], [torch.ones(8)])
    with pytest.raises(UndoRefusedError, match=r"the latest step: betas\[0\]=0.01"):
        undo.undo()


def test_state_that_was_built_before_the_first_step_is_kept() -> None:
    """A worker that receives its state builds the optimizer's entries first: they must not vanish."""
    p = Parameter(torch.randn(5))
    optimizer = Adam([p])
    optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5)}
    undo = Undo(optimizer)
    saved = snapshot(optimizer, [p])
    step(optimizer, [p], gradients([p]))
    undo.undo()
    assert_at(optimizer, [p], saved, (1e-6, 0.0))


def test_nothing_of_the_size_of_a_parameter_is_kept() -> None:
    optimizers: list[tuple[Optimizer, list[Parameter]]] = []
    for kind, kwargs in CASES.values():
        params = parameters(shapes=((50, 60), (3000,)))
        optimizers.append((kind(params, **kwargs), params))  # type: ignore[call-arg]

    def large_tensors() -> int:
        for optimizer, params in optimizers:
            step(optimizer, params, gradients(params))
        gc.collect()
        return sum(1 for x in gc.get_objects() if type(x) in (Tensor, Parameter) and x.numel() >= 3000)

    count = large_tensors()
    undos = [Undo(optimizer) for optimizer, _ in optimizers]
    assert large_tensors() == count
    assert all(len(undo.updated()) == 2 for undo in undos)


def test_tensors_that_are_not_contiguous() -> None:
    params = [
        Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        Parameter(torch.randn(9, 4).t()),
    ]
    optimizer = AdamW(params, weight_decay=0.1)
    undo = Undo(optimizer)
    step(optimizer, params, gradients(params))
    saved = snapshot(optimizer, params)
    step(optimizer, params, gradients(params))
    undo.undo()
    assert_at(optimizer, params, saved, TOLERANCE[torch.float32])


def lamb_by_the_book(x: Tensor, grads: Sequence[Tensor], lr: float, weight_decay: float) -> Tensor:
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + weight_decay * x
        ratio = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
        x = x - lr * ratio * u
    return x


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("maximize", [False, True])
def test_lamb_is_lamb(foreach: bool | None, maximize: bool) -> None:
    params = [*parameters(torch.float64), Parameter(torch.zeros(4, dtype=torch.float64))]
    starts = [p.detach().clone() for p in params]
    optimizer = LAMB(params, lr=0.01, weight_decay=0.1, foreach=foreach, maximize=maximize)
    history = [gradients(params) for _ in range(7)]
    for grads in history:
        step(optimizer, params, grads)
    sign = -1 if maximize else 1
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        expected = lamb_by_the_book(start, [sign * grads[i] for grads in history], 0.01, 0.1)
        assert distance(p.detach(), expected) < 1e-13
    loaded = copy.deepcopy(optimizer)
    assert loaded.trust_ratios == {}
    assert Undo(loaded).updated() == []


def test_lamb_skips_what_has_no_gradient_and_names_bad_values() -> None:
    params = parameters()
    optimizer = LAMB(params)
    params[0].grad = torch.randn_like(params[0])
    assert optimizer.step(lambda: 2.5) == 2.5
    assert set(optimizer.state) == {params[0]}
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            LAMB(params, **bad)  # type: ignore[arg-type]
    params[0].grad = torch.randn(7, 5).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()


@pytest.mark.parametrize("first", ["from raytrain_ft.undo import Undo", "Undo = ft.undo.Undo", "Undo = ft.Undo"])
def test_it_is_found_wherever_it_is_looked_for_first(first: str) -> None:
    """In an interpreter of its own each, because the first import decides what the package's attribute is; and without Ray."""
    same = "import raytrain_ft.undo, raytrain_ft.training.undo as inner; assert ft.undo is raytrain_ft.undo"
    same += "; assert Undo is ft.Undo is ft.undo.Undo is inner.Undo; import sys; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import raytrain_ft as ft; {first}; {same}"], check=True, timeout=120)
    assert [getattr(ft.undo, name) for name in ("Undo", "refusals")] == [Undo, refusals]


@pytest.mark.parametrize("betas", [(0.99, 0.95), (0.9, 0.8)])
def test_a_long_training_with_a_short_memory_of_squares_is_undone(betas: tuple[float, float]) -> None:
    """The bound on what is to be restored is a series that grows without an end there, beyond what a float holds."""
    p = Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=0.01, betas=betas)
    undo = Undo(optimizer)
    for _ in range(3):
        p.grad = torch.randn(5, dtype=torch.float64)
        optimizer.step()
    optimizer.state[p]["step"].fill_(200_000.0)
    before, state = p.detach().clone(), {name: value.clone() for name, value in optimizer.state[p].items()}
    p.grad = torch.randn(5, dtype=torch.float64)
    optimizer.step()
    undo.undo()
    torch.testing.assert_close(p.detach(), before)
    for name, value in state.items():
        torch.testing.assert_close(optimizer.state[p][name], value)
