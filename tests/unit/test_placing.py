"""Parameters that do not lie in memory as their shape says ("channels_last"), under kernels that go through the memory in one
row ("fused"): a gradient or a moment that lies otherwise would be paired with other weights, without an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_ft import checkfreq
from raytrain_ft.training.objects import put_back
from raytrain_ft.training.placing import laid_out_like, on_devices_of, view_like
from raytrain_ft.training.state import TrainingState

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "unfused": lambda params: torch.optim.Adam(params, lr=0.01),
}


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> Make:
    return OPTIMIZERS[request.param]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(5, 7, 3), nn.BatchNorm2d(7), nn.Conv2d(7, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    return layers.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def backward(trained: nn.Module, step: int) -> None:
    inputs = torch.randn(4, 5, 8, 8, generator=torch.Generator().manual_seed(step))
    F.cross_entropy(trained(inputs), torch.tensor([0, 1, 0, 1])).backward()


def weights(trained: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in trained.state_dict().values()]


def plainly(make: Make, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """By torch alone."""
    trained = model()
    optimizer = make(list(trained.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        backward(trained, step)
        optimizer.step()
    return trained, optimizer


def state(make: Make) -> TrainingState:
    trained = model()
    return TrainingState(trained, make(list(trained.parameters())), None, bucket_bytes=1000, first_bucket_bytes=500)


def go_on(state: TrainingState, first: int, last: int) -> None:
    for step in range(first, last):
        state.optimizer.zero_grad()
        backward(state.model, step)
        for bucket in state.buckets:
            bucket.collect()
            bucket.accept()
        state.optimizer.step()


def test_gradients_lie_as_their_parameters_do(make: Make) -> None:
    ours = state(make)
    go_on(ours, 0, 5)
    assert weights(ours.model) == weights(plainly(make, 5)[0])
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in ours.model.parameters())


def test_a_replacement_goes_on_to_the_same_bits(make: Make) -> None:
    survivor, replacement = state(make), state(make)
    go_on(survivor, 0, 3)
    for one, other in zip(survivor.buckets, replacement.buckets, strict=True):
        replacement.unpack(other, survivor.pack(one))
    replacement.model.load_state_dict(survivor.model.state_dict())  # buffers that belong to no bucket
    go_on(replacement, 3, 6)
    assert weights(replacement.model) == weights(plainly(make, 6)[0])


def test_a_job_of_its_own_loop_resumes_to_the_same_bits(make: Make, tmp_path: Path) -> None:
    for until in (3, 6):
        trained = model()
        optimizer = make(list(trained.parameters()))
        loader = checkfreq.Loader(torch.utils.data.TensorDataset(torch.arange(80.0)), global_batch_size=4)
        with checkfreq.open(tmp_path, model=trained, optimizer=optimizer, loader=loader, every=100) as run:
            for _ in run.batches(loader, until_step=until):
                optimizer.zero_grad()
                backward(trained, run.step)
                optimizer.step()
    assert weights(trained) == weights(plainly(make, 6)[0])


def test_what_an_optimizer_keeps_is_laid_out_as_its_parameter(make: Make) -> None:
    trained, optimizer = plainly(make, 2)
    stored = optimizer.state_dict()
    for kept in stored["state"].values():
        kept.update({key: one.contiguous() for key, one in kept.items() if isinstance(one, Tensor)})
    put_back(optimizer, stored)
    for p in trained.parameters():
        assert all(one.stride() == p.stride() for one in optimizer.state[p].values() if one.shape == p.shape)


@pytest.mark.parametrize(
    ("like", "is_dense"),
    [
        (torch.rand(2, 3, 4, 5), True),
        (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.rand(3, 4).t(), True),
        (torch.rand(()), True),
        (torch.rand(0, 3), True),
        (torch.rand(6, 8)[:, ::2], False),
        (torch.rand(3, 1).expand(3, 4), False),
    ],
)
def test_no_element_is_lost_or_moved(like: Tensor, is_dense: bool) -> None:
    values = torch.arange(float(like.numel())).reshape(like.shape)
    laid_out = laid_out_like(values, like)
    assert torch.equal(laid_out, values)
    row = torch.arange(float(like.numel()) + 3)[3:]
    seen = view_like(row, like)
    assert seen.shape == like.shape
    assert sorted(seen.flatten().tolist()) == row.tolist()
    assert (laid_out.stride() == seen.stride() == like.stride()) is is_dense


def test_what_comes_from_a_file_goes_to_the_device_where_it_was() -> None:
    """ "meta" stands for a GPU: a device that is not the CPU."""

    class Average:
        def __init__(self) -> None:
            there = torch.ones(3, device="meta")
            self.shadow: dict[str, Any] = {"layers": [there, torch.ones(2)], "steps": (1, there[0])}

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    average = Average()
    stored = {"layers": [torch.ones(3), torch.ones(2)], "steps": (7, torch.zeros(())), "new": torch.ones(1)}
    put_back(average, {"shadow": stored})
    layers, (steps, last), new = average.shadow["layers"], average.shadow["steps"], average.shadow["new"]
    assert [one.device.type for one in (*layers, last, new)] == ["meta", "cpu", "meta", "cpu"]
    assert steps == 7


def test_a_rate_that_is_a_tensor_stays_on_its_device() -> None:
    present = {"lr": torch.empty((), device="meta"), "betas": (0, 1)}
    found = on_devices_of({"lr": torch.tensor(0.5), "betas": (0.9, 0.99)}, present)
    assert found["lr"].is_meta
    assert found["betas"] == (0.9, 0.99)
