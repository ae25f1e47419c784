"""A backward pass in two parts gives the gradients of a whole one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.training import split_backward
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.split_backward import of_inputs, of_weights, separable
from raytrain_ft.training.split_check import check_split


class Block(nn.Module):
    """Attention, a weight that is used twice, one that the input does not reach, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.twice = nn.Linear(8, 8)
        self.place = nn.Embedding(5, 8)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v) + self.place(torch.arange(5))
        return self.twice(torch.tanh(self.twice(x))).transpose(0, 1)  # a view


@pytest.mark.parametrize(
    "make", [Block, lambda: Sum(), lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.Dropout(0.2))]
)
@pytest.mark.parametrize("is_loss", [False, True])
def test_the_gradients_are_those_of_a_whole_backward_pass(make: Any, is_loss: bool) -> None:
    torch.manual_seed(0)
    model = make()
    params = list(model.parameters())
    batches = [torch.randn(3, 5, 8) for _ in range(3)]
    found = []
    for split in (False, True):
        model.zero_grad()
        inputs = [batch.clone().requires_grad_() for batch in batches]
        rests = []
        for number, one in enumerate(inputs):
            torch.manual_seed(number)
            output = model(one)
            outputs = separable([output.square().mean() if is_loss else output])
            gradients = None if is_loss else [torch.ones_like(output)]
            if split:
                rests.append(of_inputs(outputs, gradients, [one], params))
            else:
                torch.autograd.backward(outputs, gradients)
        for rest in rests:
            of_weights(rest, params)
        found.append([*(one.grad for one in inputs), *(p.grad for p in params)])
    for whole, parts in zip(*found, strict=True):
        assert (whole is None) == (parts is None)
        if whole is not None:
            torch.testing.assert_close(parts, whole)


class Sum(nn.Module):
    """Two parameters that get one and the same gradient, and one that has the shape of the input and is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.place = nn.Parameter(torch.randn(3, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x + self.place, self.base + self.delta))


class Again(nn.Module):
    """A weight that is used twice, each time with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList(torch.randn(8) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for bias in self.biases:
            x = torch.tanh(nn.functional.linear(x, self.weight, bias))
        return x


def two_parts(model: nn.Module, params: list[nn.Parameter]) -> list[Tensor | None]:
    """Gradients, from a pass in two parts."""
    x = torch.ones(3, 8).requires_grad_()
    model.zero_grad()
    output = model(x)
    of_weights(of_inputs(separable([output]), [torch.ones_like(output)], [x], params), params)
    return [p.grad for p in params]


def test_a_weight_whose_gradient_would_be_computed_twice_is_refused_also_in_the_midst_of_a_run() -> None:
    """Whether torch would depends on the order of the parameters and, for some, on where their graph lies in memory."""
    model = Again()
    first, second = model.biases
    # torch's groups may share the bias too, and which of what they share comes first is a matter of addresses
    why = r"torch .* of a weight of shape \((8, 8|8,)\) that is used more than once.*schedule=\"1f1b\""
    with pytest.raises(TaskError, match=why):
        two_parts(model, [first, second, model.weight])
    model(torch.ones(3, 8)).sum().backward()
    expected = [first.grad, model.weight.grad, second.grad]
    for _ in range(20):
        with suppress(TaskError):
            for whole, parts in zip(expected, two_parts(model, [first, model.weight, second]), strict=True):
                torch.testing.assert_close(parts, whole)


def test_what_was_sent_is_not_changed_by_what_comes_after() -> None:
    model, sent = Sum(), []
    params = list(model.parameters())
    for _ in range(2):
        x = torch.randn(3, 5, 8).requires_grad_()
        output = model(x)
        rest = of_inputs(separable([output]), [torch.ones_like(output)], [x], params)
        assert x.grad is not None
        sent.append((x.grad, x.grad.clone()))
        of_weights(rest, params)
    assert all(torch.equal(now, then) for now, then in sent)


class Given(ft.TrainTask):
    """A stage that is the identity, and one to look at."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def model(self, stage: int) -> nn.Module:
        return nn.Linear(8, 8) if stage == 0 else self.part()

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(6, 5, 8))

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output[0] + output[1].sum() if isinstance(output, tuple) else output).square().mean()


class Apart(nn.Module):
    """A parameter whose way to the output does not meet the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heat = nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.heat.exp()


STEP = StepSettings(pipeline=PipelineSettings(stages=3, micro_batches=2, schedule="zero_bubble"))


class Doubled(nn.Module):
    """Changes its input in place: what one pass is given, the next one must be given too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2))


@pytest.mark.parametrize("part", [lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), Doubled])
def test_a_model_that_can_be_trained_so_is_taken(part: Any) -> None:
    before = torch.random.get_rng_state()
    check_split(Given(part), STEP, 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_would_be_trained_wrongly_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(STEP, pipeline=PipelineSettings(stages=2, micro_batches=2, schedule="zero_bubble"))
    check_split(Given(Apart), two, 3)  # in the last stage both meet in the loss
    with pytest.raises(ConfigError, match=r"part 1 of the model in two parts \(the gradient of heat is another"):
        check_split(Given(Apart), STEP, 3)
    monkeypatch.setattr(split_backward, "import_module", lambda name: object())
    with pytest.raises(ConfigError, match=r'AttributeError.*stage_backward_input.*Use schedule="1f1b"'):
        check_split(Given(lambda: nn.Linear(8, 8)), STEP, 3)


def test_who_does_not_use_it_does_not_load_what_comes_with_it() -> None:
    """torch.distributed.pipelining took a second of every worker's start."""
    program = "import sys, raytrain_ft.runtime.trainee; print('torch.distributed.pipelining' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
