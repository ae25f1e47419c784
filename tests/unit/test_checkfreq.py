"""`raytrain_ft.checkfreq` in one process: what is saved, when, and what is refused. See test_checkfreq_kills for kills."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from store import Versioned
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.errors import (
    ConfigError,
    FTError,
    LockedError,
    MismatchError,
    NoCheckpointError,
    StorageError,
    UnknownFormatError,
    UnreachableError,
)
from raytrain_ft.places import Place
from raytrain_ft.policy.sampling import Position, Sampling, next_batch, order, share
from raytrain_ft.result import load_model
from raytrain_ft.storage import checkpoint, selection, tree
from raytrain_ft.storage.filesystem import LocalStorage, open_storage
from raytrain_ft.storage.tree import flatten
from raytrain_ft.training import checkpointer, layout, loading, placing, resumable, resume, snapshot
from raytrain_ft.training import journal as journals
from raytrain_ft.training import objects as states
from raytrain_ft.training.beginning import Beginning
from raytrain_ft.training.build import check_model
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.export import open_checkpoint, state_dicts
from raytrain_ft.training.forgotten import FORGOTTEN
from raytrain_ft.training.journal import Journal
from raytrain_ft.training.objects import generator_states
from raytrain_ft.training.random import sample_seed
from raytrain_ft.training.ranks import Ranks
from raytrain_ft.training.session import Session

SAMPLES, BATCH = 40, 8


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside tests that want every core a checkpoint may take longer than training would wait for it."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 120.0)


class Setup:
    """A model with everything that has state; built anew for each launch, with other initial values."""

    def __init__(self, *, width: int = 16, samples: int = SAMPLES, batch: int = BATCH, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, 8, generator=generator)
        labels = torch.randint(0, 3, (samples,), generator=generator)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.5)
        self.loader = checkfreq.Loader(TensorDataset(inputs, labels), global_batch_size=batch, seed=seed)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def train(self, run: checkfreq.Run, until: int) -> None:
        for inputs, labels in run.batches(self.loader, until_step=until):
            self.step(inputs, labels)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> str:
        skeleton, tensors = flatten({name: value.state_dict() for name, value in self.objects.items()})
        return repr((skeleton, {path: tensor.tolist() for path, tensor in tensors.items()}))


def trained(directory: Path, until: int, **options: Any) -> Setup:
    setup = Setup()
    with checkfreq.open(directory, **({"every": 5} | options | setup.objects)) as run:
        setup.train(run, until)
    return setup


def journal(directory: Path, event: str) -> list[dict[str, Any]]:
    path = directory / "checkfreq.jsonl"  # which a thread writes
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Of a run of 12 steps, with checkpoints of steps 10 and 12."""
    trained(tmp_path / "run", 12)
    return tmp_path / "run"


def shard(directory: Path, step: int) -> Path:
    (found,) = directory.glob(f"checkpoints/step-{step:09d}-*/shard-*.arrow")
    return found


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(bytes(content))


# ---------------------------------------------------------------- resume


def test_resume_has_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = trained(tmp_path / "a", 23)
    expected = reference.state(), torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1)
    trained(tmp_path / "b", 9)
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    setup = Setup()
    with checkfreq.open(tmp_path / "b", **setup.objects) as run:
        assert (run.step, setup.loader.position) == (9, Position(1, 32))
        torch.rand(7)  # what is drawn before the first batch does not count
        setup.train(run, 23)
    assert (setup.state(), torch.rand(2).tolist()) == expected[:2]


class Exact(torch.optim.Optimizer):
    """Sums gradients in single precision, whatever its parameters are, and counts its steps in whole numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"sums": [torch.zeros_like(p, dtype=torch.float32)], "count": torch.zeros(3, dtype=torch.uint8)}
                state["sums"][0].mul_(0.9).add_(p.grad)
                state["count"] += 1
                p.sub_(group["lr"] * state["sums"][0])


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, Exact])
def test_what_an_optimizer_keeps_more_exactly_than_parameters_is_not_rounded(
    tmp_path: Path, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    def train(directory: Path, until: int) -> Setup:
        setup = Setup()
        setup.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(torch.bfloat16)
        setup.optimizer = kind(setup.model.parameters())
        setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 7, 0.5)
        with checkfreq.open(directory, every=5, **setup.objects) as run:
            for inputs, labels in run.batches(setup.loader, until_step=until):
                setup.step(inputs.to(torch.bfloat16), labels)
        return setup

    torch.manual_seed(1)
    reference = train(tmp_path / "a", 23)
    torch.manual_seed(1)
    train(tmp_path / "b", 9)
    resumed = train(tmp_path / "b", 23)
    assert resumed.state() == reference.state()
    kinds = [[t.dtype for t in flatten(one.optimizer.state_dict())[1].values()] for one in (resumed, reference)]
    assert kinds[0] == kinds[1]


def test_nor_is_what_holds_a_number_that_is_none() -> None:
    """A NaN is not equal to itself, so the whole tensor was taken for one that the optimizer had changed as it loaded it."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"mean": torch.tensor([1 / 3, math.nan, math.inf])}}
    states.put_back(optimizer, state)
    found = optimizer.state[p]["mean"]
    assert found.dtype == torch.float32
    assert torch.equal(found.nan_to_num(7.0), state["state"][0]["mean"].nan_to_num(7.0))


def test_what_an_optimizer_keeps_under_a_name_is_put_back() -> None:
    """It was taken for a parameter, which has a shape, so no run with it could go on."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {"all": {"mean": torch.arange(3.0), "count": 2}, 0: {"momentum_buffer": torch.ones(3)}}
    states.put_back(optimizer, state)
    assert torch.equal(optimizer.state["all"]["mean"], torch.arange(3.0))  # pyright: ignore
    assert optimizer.state["all"]["count"] == 2  # pyright: ignore
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones(3))


def test_a_buffer_that_cannot_be_put_back_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("ones", torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=r"^model/ones is an expanded tensor, which cannot be written to"):
        checkfreq.open(tmp_path, model=model)
    model.register_buffer("ones", torch.ones(1).expand(3), persistent=False)
    checkfreq.open(tmp_path, model=model).close()


def test_all_that_a_loop_does_after_its_update_belongs_to_the_step(tmp_path: Path) -> None:
    """A scheduler that follows the validation after each epoch, whose loader draws from torch's generator."""

    def train(directory: Path, epochs: int) -> tuple[str, list[int]]:
        setup = Setup()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(setup.optimizer, patience=0)
        shuffled = DataLoader(TensorDataset(torch.arange(9)), batch_size=3, shuffle=True)
        seen: list[int] = []
        with checkfreq.open(directory, every=1, **(setup.objects | {"scheduler": scheduler})):
            for epoch in setup.loader.epochs(epochs):
                seen.append(epoch)
                for inputs, labels in setup.loader:
                    setup.optimizer.zero_grad()
                    F.cross_entropy(setup.model(inputs), labels).backward()
                    setup.optimizer.step()
                scheduler.step(float(torch.stack([batch.float().mean() for (batch,) in shuffled]).std()))
        return setup.state() + repr(scheduler.state_dict()), seen

    torch.manual_seed(3)
    expected, seen = train(tmp_path / "a", 4)
    assert seen == [0, 1, 2, 3]
    torch.manual_seed(3)
    assert train(tmp_path / "b", 2)[1] == [0, 1]
    got, seen = train(tmp_path / "b", 4)
    assert seen == [2, 3]
    assert got == expected
    assert train(tmp_path / "b", 4)[1] == []


def validated_first(directory: Path, epochs: int, stop_at: int | None = None) -> str:
    """The weights and the generators after a loop that validates before each epoch, with dropout."""
    setup = Setup()
    val = checkfreq.Loader(TensorDataset(torch.arange(12)), global_batch_size=4, shuffle=False)
    with suppress(InterruptedError), checkfreq.open(directory, every=1, keep=100, **setup.objects, val=val) as run:
        for _ in setup.loader.epochs(epochs):
            for (numbers,) in val:
                torch.rand(len(numbers))
            for inputs, labels in setup.loader:
                if run.step == stop_at:
                    raise InterruptedError
                setup.step(inputs, labels)
    return setup.state() + repr(torch.rand(3).tolist())


def test_a_validation_that_is_done_again_draws_nothing_of_the_training(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = validated_first(tmp_path / "a", 3)
    torch.manual_seed(3)
    validated_first(tmp_path / "b", 3, stop_at=7)
    torch.manual_seed(4)
    assert validated_first(tmp_path / "b", 3) == whole


def test_a_validation_ends_no_step_that_the_loop_says_itself_to_be_over(tmp_path: Path) -> None:
    setup = Setup()
    val = checkfreq.Loader(TensorDataset(torch.arange(12)), global_batch_size=4, shuffle=False)
    with checkfreq.open(tmp_path, every=1, keep=100, model=setup.model, scheduler=setup.scheduler, val=val) as run:
        for _ in range(5):
            run.commit()
            with run.update():
                setup.model[0].weight.data.add_(1.0)
            for _ in val:
                pass
            setup.scheduler.step()
    for step in range(1, 6):
        name = next((tmp_path / "checkpoints").glob(f"step-{step:09d}-*")).name
        content = resume.read(open_storage(str(tmp_path / "checkpoints")), name)
        skeletons = states.stored_skeletons(content, 0)
        assert states.put_together(content, skeletons["scheduler"], 0)["last_epoch"] == step


class Breaks(torch.optim.SGD):
    """Is interrupted between two of its parameters."""

    breaks = False

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        if not self.breaks:
            super().step()
            return
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise KeyboardInterrupt


def test_a_batch_that_is_asked_for_within_an_update_breaks_nothing_off(tmp_path: Path) -> None:
    """As where the statistics of an average are gathered by a forward pass over the training's loader."""
    setup = Setup()
    with checkfreq.open(tmp_path, every=100, **setup.objects) as run:
        setup.train(run, 3)
        with run.update():
            torch.optim.swa_utils.update_bn(setup.loader, setup.model)
    assert journal(tmp_path, "CheckpointFailed") == []
    assert list((tmp_path / "checkpoints").glob("step-*"))


def test_generators_are_put_back_before_whatever_comes_after_an_epoch(tmp_path: Path) -> None:
    """The launch before ended with the epoch, so the validation at the next one's beginning is still to be done."""
    torch.manual_seed(3)
    whole = validated_first(tmp_path / "a", 3)
    torch.manual_seed(3)
    validated_first(tmp_path / "b", 1)
    torch.manual_seed(4)
    assert validated_first(tmp_path / "b", 3) == whole


def test_generators_are_not_put_back_in_the_midst_of_a_training_on_other_data(tmp_path: Path) -> None:
    def launch(*names: str) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = {n: checkfreq.Loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4) for n in ("first", "second")}
        drawn = []
        with checkfreq.open(tmp_path, every=1, model=model, optimizer=optimizer, **loaders):
            for name in names:
                for (inputs,) in loaders[name]:
                    drawn.append(float(torch.rand(())))
                    model(inputs).sum().backward()
                    optimizer.step()
        return drawn

    torch.manual_seed(3)
    begun = launch("first")
    torch.manual_seed(4)
    more = launch("second", "first")
    assert len({*begun, *more}) == 6, "no number is drawn twice"


@pytest.mark.parametrize("commits", ["before", "after"])
def test_what_was_drawn_is_not_drawn_again_wherever_the_loop_commits(tmp_path: Path, commits: str) -> None:
    def launch(directory: Path, until: int) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawn = []
        with checkfreq.open(directory, every=1, model=model, optimizer=optimizer) as run:
            if commits == "before":
                torch.rand(3)  # no part of a step
            while run.step < until:
                if commits == "before":
                    run.commit()
                drawn.append(float(torch.rand(())))
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if commits == "after":
                    run.commit()
        return drawn

    torch.manual_seed(3)
    whole = launch(tmp_path / "a", 6)
    torch.manual_seed(3)
    assert launch(tmp_path / "b", 3) == whole[:3]
    torch.manual_seed(4)
    assert launch(tmp_path / "b", 6) == whole[3:]


def test_generators_are_put_back_at_the_first_batch_also_after_an_update_without_one(tmp_path: Path) -> None:
    """As where a step without gradients has an optimizer make its state."""

    def launch(directory: Path, until: int) -> list[float]:
        setup = Setup()
        drawn = []
        with checkfreq.open(directory, every=1, **setup.objects) as run:
            setup.optimizer.step()
            torch.rand(3)
            for inputs, labels in run.batches(setup.loader, until_step=until):
                drawn.append(float(torch.rand(())))
                setup.step(inputs, labels)
        return drawn

    torch.manual_seed(3)
    whole = launch(tmp_path / "a", 6)
    torch.manual_seed(3)
    begun = launch(tmp_path / "b", 3)
    torch.manual_seed(4)
    resumed = launch(tmp_path / "b", 6)
    assert not {*begun} & {*resumed}, "no number is drawn twice"
    assert [*begun, *resumed][: len(whole)] == whole


def test_a_loader_that_is_not_there_any_more_is_not_asked(tmp_path: Path) -> None:
    setup = Setup()
    others = {n: checkfreq.Loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4) for n in ("first", "second")}
    with checkfreq.open(tmp_path, every=1, **setup.objects, **others):
        for _ in zip(setup.loader, others["first"], others["second"], strict=False):
            setup.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    del others["second"]
    with checkfreq.open(tmp_path, every=1, override={"dataset"}, **setup.objects, **others) as run:
        assert run.step == 2


def test_an_evaluation_after_an_update_that_broke_off_makes_it_no_whole_one(tmp_path: Path) -> None:
    setup = Setup()
    setup.optimizer = optimizer = Breaks(setup.model.parameters(), lr=0.01)
    setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    val = checkfreq.Loader(TensorDataset(torch.arange(12)), global_batch_size=4, shuffle=False)
    with checkfreq.open(tmp_path, every=2, **setup.objects, val=val) as run:
        with suppress(KeyboardInterrupt):
            for inputs, labels in run.batches(setup.loader, until_step=20):
                optimizer.breaks = run.step == 5
                setup.step(inputs, labels)
        assert len(list(val)) == 3
    assert max(int(path.name[5:14]) for path in (tmp_path / "checkpoints").glob("step-*")) == 4
    assert len(journal(tmp_path, "CheckpointFailed")) == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_an_update_left_that_broke_off_is_not_stored_as_the_last_state(tmp_path: Path, goes_on: bool) -> None:
    """The loop catches Ctrl-C inside the `with` block, which ends as ever. If the loop goes on, that is its own state."""
    setup = Setup()
    setup.optimizer = optimizer = Breaks(setup.model.parameters(), lr=0.01)
    setup.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    with checkfreq.open(tmp_path, every=2, **setup.objects) as run:
        with suppress(KeyboardInterrupt):
            for inputs, labels in run.batches(setup.loader, until_step=20):
                optimizer.breaks = run.step == 5
                setup.step(inputs, labels)
        if goes_on:
            optimizer.breaks = False
            setup.train(run, 7)
    newest = max(int(path.name[5:14]) for path in (tmp_path / "checkpoints").glob("step-*"))
    failed = journal(tmp_path, "CheckpointFailed")
    assert (newest, len(failed)) == ((7, 0) if goes_on else (4, 1))
    assert goes_on or "broke off" in failed[0]["reason"]


class Opened(Dataset[float]):
    """Reads what a loader worker has opened."""

    opened: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return -1.0 if self.opened is None else self.opened + index


def _open_it(number: int) -> None:
    get_worker_info().dataset.opened = 100.0  # pyright: ignore[reportOptionalMemberAccess]


def test_a_loader_worker_is_begun_with_the_dataset_itself() -> None:
    loader = checkfreq.Loader(Opened(), global_batch_size=4, shuffle=False, num_workers=1, worker_init_fn=_open_it)
    assert torch.cat(list(loader)).tolist() == list(range(100, 108))
    assert [sketch.mean for sketch in loader.sketches] == list(range(100, 108))


def test_accumulated_gradients_are_never_cut(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, every=1, keep=100, **setup.objects) as run:
        for number, (inputs, labels) in enumerate(batch for _ in range(4) for batch in setup.loader):
            F.cross_entropy(setup.model(inputs), labels).backward()
            if number % 2:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
        assert run.step == 10
    stored = sorted((tmp_path / "checkpoints").glob("step-*/manifest.json"))
    positions = [json.loads(path.read_text())["values"]["data"]["loader"] for path in stored]
    assert [40 * p["epoch"] + p["consumed"] for p in positions] == [16 * step for step in range(1, 11)]


def test_several_updates_of_a_batch_are_one_step_and_own_updates_count(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, **setup.objects) as run:
        for inputs, labels in run.batches(setup.loader, until_step=2):
            with run.update():
                setup.step(inputs, labels)
            setup.step(inputs, labels)
        before = run.step
        with run.update():
            setup.model[0].weight.data.mul_(0.5)
        run.commit()
        with run.update():
            setup.model[0].weight.data.mul_(0.5)
        assert (before, run.step) == (2, 3)


def test_a_module_is_told_of_which_version_its_state_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(directory: Path) -> tuple[Tensor, Tensor]:
        """The weights as they were at the beginning, and as they were stored."""
        layer = Versioned(3, 3)
        with checkfreq.open(directory, model=nn.Sequential(layer)) as run:
            begun = layer.weight.detach().clone()
            with run.update():
                layer.weight.data.add_(1.0)
        return begun, layer.weight.detach()

    _, stored = launch(tmp_path / "now")
    assert torch.equal(launch(tmp_path / "now")[0], stored)
    with monkeypatch.context() as earlier:
        earlier.setattr(Versioned, "_version", 1)
        _, stored = launch(tmp_path / "earlier")
    (place,) = tmp_path.glob("earlier/checkpoints/step-*")
    found: Any = load_model(SimpleNamespace(model=lambda stage: nn.Sequential(Versioned(3, 3))), str(place))
    assert torch.equal(found[0].weight, stored.T)
    assert torch.equal(launch(tmp_path / "earlier")[0], stored.T)
    with monkeypatch.context() as earlier:
        earlier.setattr(tree, "versions_of", lambda state: None)
        _, stored = launch(tmp_path / "without")
    assert torch.equal(launch(tmp_path / "without")[0], stored)


class Centred(nn.Module):
    """Subtracts a running mean, which its state dict does not have, as with others that it can do without."""

    def __init__(self, *, longest: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.rand(longest), persistent=False)
        self.register_buffer("same", torch.rand(1).expand(4), persistent=False)
        self.register_buffer("edges", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("cached", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = self.mean.lerp(inputs.mean(0), 0.1)
        self.cached = torch.ones(2)
        return self.layer(inputs - self.mean)


def centred(directory: Path, until: int, **sizes: int) -> Setup:
    setup = Setup()
    setup.model = nn.Sequential(Centred(**sizes))
    setup.optimizer = torch.optim.AdamW(setup.model.parameters(), lr=0.01)
    setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 7, 0.5)
    with checkfreq.open(directory, every=5, **setup.objects) as run:
        setup.train(run, until)
    return setup


def test_buffers_that_a_state_dict_leaves_out_are_stored_but_not_exported(tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = centred(tmp_path / "a", 23)
    torch.manual_seed(1)
    centred(tmp_path / "b", 9)
    resumed = centred(tmp_path / "b", 23)
    assert torch.equal(resumed.model[0].mean, reference.model[0].mean)
    assert resumed.state() == reference.state()
    assert torch.equal(resumed.model[0].table, reference.model[0].table)
    place = Place(str(next((tmp_path / "b" / "checkpoints").glob("step-000000023-*"))))
    exported = state_dicts(open_checkpoint(place))
    assert exported.keys() == {"model", "optimizer", "scheduler", "generators"}
    nn.Sequential(Centred()).load_state_dict(exported["model"])
    assert load_model(SimpleNamespace(model=lambda stage: nn.Sequential(Centred())), str(place))[0].layer is not None


def test_a_buffer_that_has_become_another_stays_as_it_is(tmp_path: Path) -> None:
    stored = centred(tmp_path, 3)
    longer = centred(tmp_path, 3, longest=16)
    assert len(longer.model[0].table) == 16
    assert torch.equal(longer.model[0].mean, stored.model[0].mean)
    assert not torch.equal(longer.model[0].same, stored.model[0].same), "it has less memory than elements"


def test_a_checkpoint_without_the_buffers_that_state_dicts_leave_out_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote such ones."""
    take_apart = states.take_apart

    def earlier(objects: Any) -> states.Parts:
        parts = take_apart(objects)
        del parts.skeletons[states.LEFT_OUT]
        return parts

    with monkeypatch.context() as before:
        before.setattr(states, "take_apart", earlier)
        stored = centred(tmp_path, 3)
    resumed = centred(tmp_path, 3)
    assert resumed.model[0].mean.tolist() == [0.0] * 8
    assert torch.equal(resumed.model[0].layer.weight, stored.model[0].layer.weight)


class MadeLate(nn.Module):
    """Makes its layer when it sees how wide its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(inputs.shape[1], 16)
        return self.layer(inputs)


def made_late(directory: Path, until: int, made: str) -> None:
    setup = Setup()
    setup.model = nn.Sequential(MadeLate(), nn.ReLU(), nn.Linear(16, 3))
    if made != "by the first step":
        setup.model(torch.ones(2, 8))
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.01)
    setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 7)
    with checkfreq.open(directory, every=2, model=setup.model, optimizer=setup.optimizer, loader=setup.loader) as run:
        for inputs, labels in run.batches(setup.loader, until_step=until):
            setup.step(inputs, labels)
            if made == "later" and run.step == 3:
                setup.model.append(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))


@pytest.mark.parametrize(
    ("made", "step", "words"),
    [
        (
            "by the first step",
            1,
            "model: 0.layer.weight is in the checkpoint only; model: 0.layer.bias is in the checkpoint only.",
        ),
        ("later", 4, "; and 3 more. Make all layers"),
    ],
)
def test_a_layer_that_is_made_after_the_run_was_opened_is_told_of(tmp_path: Path, made: str, step: int, words: str) -> None:
    """The next launch would be refused; this one is not, for the next may make it beforehand."""
    made_late(tmp_path, 7, made)
    (told,) = journal(tmp_path, "WillNotFit")
    assert told["step"] == step
    assert words in told["reason"]
    with pytest.raises(MismatchError, match="is in the checkpoint only"):
        made_late(tmp_path, 9, made)


def test_nothing_is_told_of_a_layer_that_was_made_before_nor_of_the_state_of_an_optimizer(tmp_path: Path) -> None:
    for until in (7, 9):
        made_late(tmp_path, until, "before")
    trained(tmp_path / "with more", 7)
    assert journal(tmp_path, "WillNotFit") == journal(tmp_path / "with more", "WillNotFit") == []
    assert journal(tmp_path, "Resumed")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_resume_says_in_a_line_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """In a program that has not set up logging, and what became of a learning rate that it has changed."""
    logger = logging.Logger("raytrain_ft.checkfreq", logging.WARNING if quiet else logging.NOTSET)
    monkeypatch.setattr(journals, "log", logger)
    said = []
    for rate in (0.1 + 0.2, 0.1 + 0.2, 0.001):
        setup = Setup()
        setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=rate)
        objects = {"model": setup.model, "optimizer": setup.optimizer, "loader": setup.loader}
        with checkfreq.open(tmp_path, every=5, **objects) as run:
            for inputs, labels in run.batches(setup.loader, until_step=run.step + 2):
                F.cross_entropy(setup.model(inputs), labels).backward()
                setup.optimizer.step()
        said.append(capsys.readouterr().err.splitlines())
    assert [record["notes"] == [] for record in journal(tmp_path, "Resumed")] == [True, False]
    if quiet:
        assert said == [[], [], []]
    else:
        first, (second,), (third,) = said
        assert first == []
        assert re.fullmatch(rf"raytrain_ft.checkfreq: goes on from step 2 \({tmp_path}/checkpoints/step-000000002-.*\)", second)
        assert "from step 4" in third
        assert "the learning rate of optimizer is the checkpoint's 0.3, not 0.001: set another after checkfreq.open" in third


def test_until_a_step_that_has_been_made_says_why_nothing_is_trained(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal(run_directory, "NothingLeft") == [], "it was trained until that step"
    monkeypatch.setattr(journals, "log", logging.Logger("raytrain_ft.checkfreq"))
    setup = Setup()
    with checkfreq.open(run_directory, **setup.objects) as run:
        for until in (9, 12, 14, 13):
            setup.train(run, until)
    (told,) = journal(run_directory, "NothingLeft")
    assert told["reason"].startswith("Run.batches(until_step=9) gives no batch: the run is at step 12")
    assert told["reason"] in capsys.readouterr().err


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Leaves no mark in the optimizer's groups."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:
        super().step(metrics)


@pytest.mark.parametrize("plateau", [False, True])
def test_nothing_is_noted_of_a_learning_rate_that_a_scheduler_makes(tmp_path: Path, plateau: bool) -> None:
    for until in (9, 20):
        setup = Setup()
        if plateau:
            setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
            setup.scheduler = cast(Any, Plateau(setup.optimizer, patience=0))
        with checkfreq.open(tmp_path, every=5, **setup.objects) as run:
            setup.train(run, until)
    (resumed,) = journal(tmp_path, "Resumed")
    assert resumed["notes"] == []


class WithAList:
    """An average, say: what it calls its parameters is no method."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p.detach().clone() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parameters = state["parameters"]


def test_what_an_object_calls_parameters_is_its_own_affair(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, ema=WithAList(setup.model), **setup.objects) as run:
        setup.train(run, 2)
    assert journal(tmp_path, "CheckpointCommitted")


def test_average_is_restored_and_stored_once_over(tmp_path: Path) -> None:
    def train(until: int) -> tuple[str, int]:
        setup = Setup()
        average = torch.optim.swa_utils.AveragedModel(setup.model)
        with checkfreq.open(tmp_path, every=3, average=average, **setup.objects) as run:
            for inputs, labels in run.batches(setup.loader, until_step=until):
                setup.step(inputs, labels)
                average.update_parameters(setup.model)
        return repr(average.state_dict()), int(average.n_averaged)

    first, count = train(5)
    assert count == 5
    assert train(5) == (first, 5)


def test_an_average_that_moves_on_without_an_update_costs_the_checkpoint_and_never_tears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GradScaler leaves out the optimizer's step where gradients are infinite, and nothing waits for the copy."""
    setup, scaler = Setup(), torch.amp.GradScaler("cpu")
    average = torch.optim.swa_utils.AveragedModel(setup.model)
    go_on, copy_all = threading.Event(), snapshot.copy_all

    def late(pending: snapshot.Pending, memory: memoryview) -> None:
        assert go_on.wait(30)
        copy_all(pending, memory)

    monkeypatch.setattr(snapshot, "copy_all", late)
    monkeypatch.setattr(snapshot, "AT_ONCE_BYTES", 0)  # this model is so small that all would be copied before anything changes
    with checkfreq.open(tmp_path, every=1, keep=9, average=average, **setup.objects):
        for number, (inputs, labels) in zip(range(4), setup.loader, strict=False):
            setup.optimizer.zero_grad()
            scaled = scaler.scale(F.cross_entropy(setup.model(inputs * (math.inf if number == 1 else 1.0)), labels))
            scaled.backward()
            scaler.step(setup.optimizer)
            scaler.update()
            average.update_parameters(setup.model)
            if number == 1:
                go_on.set()
    (failed,) = journal(tmp_path, "CheckpointFailed")
    assert failed["step"] == 1
    assert re.search(
        r"the snapshot failed: average/module\.0\.(bias|weight).* changed while .*run\.update\(\)", failed["reason"]
    )
    assert [record["step"] for record in journal(tmp_path, "CheckpointCommitted")] == [2, 3]


def test_a_learning_rate_that_is_a_tensor_is_stored_as_it_was(tmp_path: Path) -> None:
    def make() -> Setup:
        setup = Setup()
        setup.optimizer = torch.optim.AdamW(setup.model.parameters(), lr=torch.tensor(0.01))
        setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 7, 0.5)
        return setup

    def train(directory: Path, until: int) -> Setup:
        setup = make()
        with checkfreq.open(directory, every=5, **setup.objects) as run:
            setup.train(run, until)
        return setup

    optimizer = make().optimizer
    parts = states.take_apart({"optimizer": optimizer})
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert parts.own["optimizer/param_groups/0/lr"] == 0.01
    torch.manual_seed(1)
    reference = train(tmp_path / "a", 23)
    torch.manual_seed(1)
    train(tmp_path / "b", 9)
    assert train(tmp_path / "b", 23).state() == reference.state()


def test_error_keeps_what_was_committed_and_writes_no_last_one(tmp_path: Path) -> None:
    setup = Setup()

    def interrupted() -> None:
        with checkfreq.open(tmp_path, every=4, **setup.objects) as run:
            for inputs, labels in run.batches(setup.loader, until_step=20):
                if run.step == 9:
                    raise KeyboardInterrupt
                setup.step(inputs, labels)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [record["step"] for record in journal(tmp_path, "CheckpointCommitted")] == [4, 8]
    with checkfreq.open(tmp_path, **Setup().objects) as run:
        assert run.step == 8


def test_keep_epochs(tmp_path: Path) -> None:
    trained(tmp_path, 17, keep=1, keep_epochs=True, every=4)
    manifests = [json.loads(path.read_text()) for path in sorted((tmp_path / "checkpoints").glob("step-*/manifest.json"))]
    assert [(one["step"], one["kept"]) for one in manifests] == [(5, True), (10, True), (15, True), (17, False)]


@pytest.mark.parametrize("validates", [False, True])
def test_the_end_of_the_last_epoch_is_kept_also_after_batches_without_an_update(tmp_path: Path, validates: bool) -> None:
    """Elsewhere it is the first step of the next epoch that is kept: gradients that are accumulated are not stored."""
    setup = Setup(samples=10 * BATCH)
    val = checkfreq.Loader(TensorDataset(torch.ones(16, 8)), global_batch_size=4, shuffle=False)
    with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, val=val, **setup.objects):
        for _ in setup.loader.epochs(2):
            for number, (inputs, labels) in enumerate(setup.loader):
                F.cross_entropy(setup.model(inputs), labels).backward()
                if number % 4 == 3:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
            for _ in val if validates else ():
                pass
    assert kept(tmp_path) == [(3, True), (4, True)]


def test_a_validation_that_ends_after_batches_without_an_update_is_no_end_of_an_epoch(tmp_path: Path) -> None:
    setup = Validated(samples=64)
    with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, **setup.objects):
        for number, (inputs, labels) in enumerate(setup.loader):
            F.cross_entropy(setup.model(inputs), labels).backward()
            if number == 3:
                setup.optimizer.step()
            if number == 5:
                setup.validate()
                break
    assert kept(tmp_path) == [(1, False)]


class Validated(Setup):
    """Validates after each epoch with a loader that is followed too, and steps its scheduler then."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.val = checkfreq.Loader(TensorDataset(torch.ones(16, 8)), global_batch_size=4, shuffle=False)

    @property
    def objects(self) -> dict[str, Any]:
        return super().objects | {"val": self.val}

    def accumulated(self, count: int, killed_at: Position | None = None) -> None:
        """The same with an update every four batches, and a validation every two."""
        for _ in self.loader.epochs(count):
            for inputs, labels in self.loader:
                F.cross_entropy(self.model(inputs), labels).backward()
                batches = self.loader.position.consumed // BATCH
                if batches % 4 == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if batches % 2 == 0:
                    self.validate(self.loader.position == killed_at)
                if batches % 4 == 0:
                    self.scheduler.step()

    def validate(self, killed: bool = False) -> None:
        for number, _ in enumerate(self.val):
            if killed and number == 2:
                raise KeyboardInterrupt

    def epochs(self, count: int, killed_in: int | None = None) -> None:
        for epoch in self.loader.epochs(count):
            for inputs, labels in self.loader:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(inputs), labels).backward()
                self.optimizer.step()
            self.validate(epoch == killed_in)
            self.scheduler.step()


def kept(directory: Path) -> list[tuple[int, bool]]:
    manifests = [json.loads(path.read_text()) for path in sorted((directory / "checkpoints").glob("step-*/manifest.json"))]
    return [(one["step"], one["kept"]) for one in manifests]


def test_the_end_of_a_validation_is_no_end_of_an_epoch(tmp_path: Path) -> None:
    setup = Validated()
    with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, **setup.objects):
        setup.epochs(3)
    assert kept(tmp_path) == [(5, True), (10, True), (15, True)], "also that of the last epoch of a launch"
    setup = Validated()
    with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, **setup.objects):
        setup.epochs(4)
    assert kept(tmp_path) == [(5, True), (10, True), (15, True), (20, True)]


def test_nor_is_that_of_a_validation_before_training(tmp_path: Path) -> None:
    for epochs, expected in ((2, [(5, True), (10, True)]), (3, [(5, True), (10, True), (15, True)])):
        setup = Validated()
        with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, **setup.objects):
            setup.validate()
            setup.epochs(epochs)
        assert kept(tmp_path) == expected


def test_batches_that_are_taken_out_of_a_loop_before_the_update_count(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, every=1000, keep_epochs=True, keep=1, **setup.objects):
        for _ in range(6):
            (batch,) = itertools.islice(setup.loader, 1)
            setup.step(*batch)
    assert kept(tmp_path) == [(5, True), (6, False)]


def test_a_validation_between_accumulated_gradients_does_not_end_the_step(tmp_path: Path) -> None:
    """The one after the update, and the scheduler's step after that, belong to it all the same."""
    torch.manual_seed(0)
    undisturbed = Validated(samples=64)
    with checkfreq.open(tmp_path / "a", every=1, **undisturbed.objects):
        undisturbed.accumulated(3)

    def interrupted() -> None:
        torch.manual_seed(0)
        setup = Validated(samples=64)
        with checkfreq.open(tmp_path / "b", every=1, **setup.objects):
            setup.accumulated(3, killed_at=Position(1, 32))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    resumed = Validated(samples=64)
    with checkfreq.open(tmp_path / "b", every=1, **resumed.objects) as run:
        assert run.step == 2
        resumed.accumulated(3)
    assert resumed.scheduler.last_epoch == 6
    assert resumed.state() == undisturbed.state()


def test_a_job_that_is_killed_in_its_validation_steps_its_scheduler_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    undisturbed = Validated()
    with checkfreq.open(tmp_path / "a", every=1, **undisturbed.objects):
        undisturbed.epochs(3)

    def interrupted() -> None:
        torch.manual_seed(0)
        setup = Validated()
        with checkfreq.open(tmp_path / "b", every=1, **setup.objects):
            setup.epochs(3, killed_in=1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    resumed = Validated()
    with checkfreq.open(tmp_path / "b", every=1, **resumed.objects):
        resumed.epochs(3)
    assert resumed.scheduler.last_epoch == 3
    assert resumed.state() == undisturbed.state()


def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """How much later it is than it seems, to be changed, and how long steps have taken."""
    clock, later = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + later[0])
    told: list[float] = []
    stepped = Checkpointer.stepped

    def listen(self: Checkpointer, step: int, seconds: float) -> None:
        told.append(seconds)
        stepped(self, step, seconds)

    monkeypatch.setattr(Checkpointer, "stepped", listen)
    return later, told


def test_the_start_of_loader_workers_is_no_slow_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later, told = timed(monkeypatch)
    setup = Setup()
    batches = setup.loader._batches

    def slowly(position: Position) -> Iterator[Any]:
        later[0] += 1e6
        for number, batch in enumerate(batches(position)):
            later[0] += 1e6 if number == 0 else 1000.0
            yield batch

    monkeypatch.setattr(setup.loader, "_batches", slowly)
    with checkfreq.open(tmp_path, every=1000, **setup.objects) as run:
        setup.train(run, 8)
    assert [round(seconds / 1000) for seconds in told] == [0, 1, 1, 1, 1, 0, 1, 1]


def test_a_validation_in_the_midst_of_an_epoch_is_no_slow_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the step before it has ended or not, and though it has a loader that is followed too."""
    later, told = timed(monkeypatch)
    setup = Validated()

    def validate(seconds: float) -> None:
        for _ in setup.val:
            later[0] += seconds / 4

    with checkfreq.open(tmp_path, every=1000, **setup.objects) as run:
        with run.untimed():
            validate(1e6)
        for inputs, labels in run.batches(setup.loader, until_step=9):
            if run.step == 2:
                later[0] += 1000.0  # reading a large batch, say
                with run.untimed():
                    validate(1e6)
            setup.step(inputs, labels)
            if run.step == 7:
                with run.untimed():
                    validate(1e6)
                later[0] += 1000.0
    assert [round(seconds / 1000) for seconds in told] == [0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_interval_is_chosen_by_itself_and_remembered(tmp_path: Path) -> None:
    def train(checkpoints: int) -> None:
        """Until there are so many of them: the first may take a while where others want the machine, too."""
        setup = Setup()
        with checkfreq.open(tmp_path, overhead=0.05, **setup.objects) as run:
            for inputs, labels in run.batches(setup.loader, until_step=20_000):
                time.sleep(0.005)  # the step's work
                setup.step(inputs, labels)
                if run.step % 50 == 0 and len(journal(tmp_path, "CheckpointCommitted")) >= checkpoints:
                    return

    train(2)
    (chosen, *_) = journal(tmp_path, "IntervalChosen")
    assert chosen["reason"].startswith("profiled")
    assert chosen["iteration_s"] > 0.005
    weights = sum(tensor.nbytes for tensor in Setup().model.state_dict().values())
    assert weights < chosen["snapshot_bytes"] < 20_000, "of the optimizer and the generators, too"
    assert (chosen["budget"], chosen["failure_interval_s"]) == (0.05, None)
    if not torch.cuda.is_available():
        assert (chosen["mode"], chosen["device_copy_s"], chosen["free_bytes"]) == ("cpu", None, 0)
    before = len(journal(tmp_path, "IntervalChosen"))
    train(len(journal(tmp_path, "CheckpointCommitted")) + 1)
    first, *others = journal(tmp_path, "IntervalChosen")[before:]
    assert first["reason"].startswith("recalled")
    assert first["iteration_s"] > 0.005
    assert not [one for one in others if one["reason"].startswith("profiled")]


def test_a_failure_rate_joins_in_and_what_was_measured_for_another_run_is_not_taken_over(tmp_path: Path) -> None:
    def key(*, directory: str = "here", optimizer: Any = None, failure_s: float | None = None, **options: Any) -> str:
        objects = Setup().objects
        if optimizer is not None:
            objects["optimizer"] = optimizer(objects["model"].parameters(), lr=0.1)
            objects.pop("scheduler", None)
        with checkfreq.open(tmp_path / directory, **options, **objects) as run:
            tuning = run._session._checkpointer._tuning
            assert tuning._tuner is not None
            assert tuning._tuner.failure_s == failure_s
            return tuning._key

    hour = {"failure_interval": timedelta(hours=1), "failure_s": 3600.0}
    same = {key(), key()}
    others = [key(**hour), key(overhead=0.1), key(every=7), key(optimizer=torch.optim.Adagrad), key(directory="elsewhere")]
    assert len(same) == 1
    assert len({*same, *others}) == 1 + len(others)


@pytest.mark.parametrize("ends", [(4,), (2, 4), (2, 2, 4), (1, 2, 3, 4, 4)])
def test_an_epoch_whose_last_batches_had_no_update_is_over_when_its_loop_is(tmp_path: Path, ends: tuple[int, ...]) -> None:
    """Gradients are accumulated over four of ten batches; the job is started again and again, be there nothing left to do."""

    def job(directory: Path, epochs: int) -> Setup:
        setup = Setup(samples=10 * BATCH)
        with checkfreq.open(directory, every=1000, **setup.objects):
            for _ in setup.loader.epochs(epochs):
                for number, (inputs, labels) in enumerate(setup.loader):
                    F.cross_entropy(setup.model(inputs), labels).backward()
                    if number % 4 == 3:
                        setup.optimizer.step()
                        setup.optimizer.zero_grad()
                setup.scheduler.step()
                setup.optimizer.zero_grad()
        return setup

    torch.manual_seed(1)
    reference = job(tmp_path / "undisturbed", 4).state()
    torch.manual_seed(1)
    states = [job(tmp_path / "again", end).state() for end in ends]
    assert states[-1] == reference


# ---------------------------------------------------------------- a disk that cannot be written

BROKEN_DISK = """
import errno, os
from pathlib import Path

def break_off(*args, real=os.{call}, **more):
    if Path({broken!r}).exists():
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    return real(*args, **more)

os.{call} = break_off
"""
"""Python runs this as `sitecustomize` in the process that writes checkpoints: its disk breaks while a file is there."""


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [("mkdir", "EROFS", "Read-only file system. Look at its mount"), ("fsync", "EIO", "Input/output error")],
)
def test_training_goes_on_while_the_disk_cannot_be_written_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, error: str, words: str
) -> None:
    torch.manual_seed(1)
    reference = trained(tmp_path / "undisturbed", 17).state()
    broken, run_directory = tmp_path / "broken", tmp_path / "run"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BROKEN_DISK.format(call=call, error=error, broken=str(broken)))
    monkeypatch.syspath_prepend(tmp_path / "site")
    torch.manual_seed(1)
    setup = Setup()
    with checkfreq.open(run_directory, every=5, **setup.objects) as run:
        for inputs, labels in run.batches(setup.loader, until_step=17):
            if run.step == 7:
                until(lambda: journal(run_directory, "CheckpointCommitted"))
                broken.touch()
            if run.step == 12:
                until(lambda: journal(run_directory, "CheckpointFailed"))
                broken.unlink()
            setup.step(inputs, labels)
    assert setup.state() == reference
    (failed,) = journal(run_directory, "CheckpointFailed")
    assert failed["step"] == 10
    assert words in failed["reason"]
    (said,) = [record for record in caplog.records if "CheckpointFailed" in record.message]
    assert said.levelno == logging.ERROR
    assert words in said.message
    assert [record["step"] for record in journal(run_directory, "CheckpointCommitted")] == [5, 15, 17]
    with checkfreq.open(run_directory, **Setup().objects) as again:
        assert again.step == 17


def test_a_journal_that_is_a_link_or_no_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others may write to the directory, and make training write elsewhere, or wait for ever."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name, make in (("link", lambda path: path.symlink_to(precious)), ("pipe", os.mkfifo), ("directory", Path.mkdir)):
        run_directory = tmp_path / name
        run_directory.mkdir()
        make(run_directory / "checkfreq.jsonl")
        caplog.clear()
        training = threading.Thread(target=trained, args=(run_directory, 3), daemon=True)
        training.start()
        training.join(60)
        assert not training.is_alive(), f"{name}: it waits for a reader"
        assert len([record for record in caplog.records if "no journal from here on" in record.message]) == 1, name
        assert kept(run_directory) == [(3, False)]
    assert precious.read_text() == "mine"


def test_a_journal_whose_disk_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(journals, "LEAVE_S", 0.1)
    monkeypatch.setattr(journals, "_append", lambda path, line: hangs.wait(60) and None)
    told = Journal(tmp_path / "checkfreq.jsonl")
    telling = threading.Thread(target=lambda: (told.tell("Started", {}), told.close()), daemon=True)
    telling.start()
    telling.join(30)
    assert not telling.is_alive()
    hangs.set()


def test_a_script_is_warned_that_what_a_checkpoint_replaces_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup()
    with caplog.at_level(logging.WARNING), checkfreq.open(tmp_path, every=3, keep=1, **setup.objects) as run:
        for inputs, labels in run.batches(setup.loader, until_step=13):
            if run.step == 5:
                until(lambda: kept(tmp_path))
                (oldest,) = (tmp_path / "checkpoints").glob("step-*")
                (oldest / "directory").mkdir()
            setup.step(inputs, labels)
    said = [record for record in caplog.records if "what it replaces could not be deleted" in record.message]
    assert {record.levelno for record in said} == {logging.WARNING}
    assert "CheckpointCommitted" in said[0].message


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


# ---------------------------------------------------------------- damage, strangers, wrong values


def test_damaged_checkpoint_is_passed_over(run_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(shard(run_directory, 12))
    with caplog.at_level(logging.WARNING), checkfreq.open(run_directory, **Setup().objects) as run:
        assert run.step == 10
    assert "step-000000012-e1-i1/shard-00000-of-00001.arrow is damaged" in caplog.text
    assert journal(run_directory, "CheckpointPassedOver")


def test_what_was_passed_over_is_not_kept_in_place_of_what_was_loaded(run_directory: Path) -> None:
    damage(shard(run_directory, 12))
    trained(run_directory, 14)
    assert [step for step, _ in kept(run_directory)] == [10, 14]


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, error: type[StorageError]) -> Iterator[None]:
    """Storage gives this error, at once, for the shards of step 12."""
    view = LocalStorage.view

    def fails(self: LocalStorage, name: str) -> Any:
        if "000000012" in name and name.endswith(".arrow"):
            raise error("Input/output error")
        return view(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "READ_S", 0.0)
        patch.setattr(LocalStorage, "view", fails)
        yield


@pytest.mark.parametrize("error", [UnreachableError, UnknownFormatError])
def test_what_may_be_whole_is_passed_over_but_stays(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, error: type[StorageError]
) -> None:
    """The file system gives an error for as long as it is asked, or another version has written it."""
    setup = Setup()
    with unreadable(monkeypatch, error):
        run = checkfreq.open(run_directory, every=5, **setup.objects)
    with run:
        assert run.step == 10
        setup.train(run, 14)
    assert [step for step, _ in kept(run_directory)] == [10, 12, 14], "and 10 is there, if 14 should be damaged"


def test_what_is_not_there_on_this_worker_is_passed_over_but_stays(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount of this node alone is away for a moment: what others see whole is not deleted for it."""
    size, setup = LocalStorage.size, Setup()

    def away(self: LocalStorage, name: str) -> int | None:
        return None if "000000012" in name and name.endswith(".arrow") else size(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "size", away)
        run = checkfreq.open(run_directory, every=5, **setup.objects)
    with run:
        assert run.step == 10
        setup.train(run, 14)
    assert [step for step, _ in kept(run_directory)] == [10, 12, 14]
    (passed,) = journal(run_directory, "CheckpointPassedOver")
    assert "is not there" in passed["reason"]


def test_all_damaged_is_an_error_and_never_begins_anew(run_directory: Path) -> None:
    damage(shard(run_directory, 12))
    damage(shard(run_directory, 10))
    with pytest.raises(NoCheckpointError, match=r"step-000000012.*step-000000010.*never"):
        checkfreq.open(run_directory, **Setup().objects)
    with checkfreq.open(run_directory, resume="never", **Setup().objects) as run:
        assert run.step == 0
    setup = Setup()
    with checkfreq.open(run_directory, **setup.objects) as run:
        assert run.step == 0, "nor is their damage an error any more"
        setup.train(run, 3)
    with checkfreq.open(run_directory, **Setup().objects) as run:
        assert run.step == 3, "the earlier lineage does not come back"


def test_a_run_that_began_anew_hands_no_checkpoint_of_the_one_before_to_ray(run_directory: Path) -> None:
    setup = Setup()
    with checkfreq.open(run_directory, resume="never", every=1, **setup.objects) as run:
        assert run.ray_checkpoint() is None
        setup.train(run, 3)
        until(lambda: run.ray_checkpoint() is not None)
        assert "-e2-" in Path(run.ray_checkpoint().path).name


def test_a_checkpoint_that_was_passed_over_is_not_handed_to_ray(run_directory: Path) -> None:
    """What the run goes on from is, until there is a newer one: be it one of an earlier step than the damaged one."""

    def handed(run: checkfreq.Run) -> str:
        return Path(run.ray_checkpoint().path).name

    damage(shard(run_directory, 12))
    setup = Setup()
    with checkfreq.open(run_directory, every=1, **setup.objects) as run:
        assert handed(run) == "step-000000010-e1-i1"
        setup.train(run, 12)
        until(lambda: handed(run) == "step-000000011-e2-i1")


def test_nor_is_one_that_could_not_be_read(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with unreadable(monkeypatch, UnreachableError):
        run = checkfreq.open(run_directory, every=5, **Setup().objects)
    with run:
        assert Path(run.ray_checkpoint().path).name == "step-000000010-e1-i1"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"epoch": 1e999}', b'{"epoch": "2"}', b'{"epoch": 2.5}', b"{}", b"[2]", b"\xff"]
)
def test_a_damaged_note_of_a_new_beginning_is_a_typed_error(run_directory: Path, content: bytes) -> None:
    (run_directory / "checkpoints" / selection.BEGUN_FILE).write_bytes(content)
    with pytest.raises(StorageError, match=r"begun\.json is damaged: remove it|begun\.json has 100000 bytes"):
        checkfreq.open(run_directory, **Setup().objects)


def test_strangers_in_the_directory_are_left_alone(run_directory: Path, tmp_path: Path) -> None:
    directory = run_directory / "checkpoints"
    (directory / "step-000000099-e1-i1").mkdir()
    (directory / "step-000000098-e1-i1").symlink_to(tmp_path)
    (directory / "notes.txt").write_text("mine")
    newest = directory / "step-000000097-e1-i1"
    newest.mkdir()
    (newest / "manifest.json").write_text('{"format": "other", "hash": 1}')
    setup = Setup()
    with checkfreq.open(run_directory, **setup.objects) as run:
        assert run.step == 12
        setup.train(run, 14)
    assert (directory / "notes.txt").read_text() == "mine"


def test_require(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="require"):
        checkfreq.open(tmp_path, resume="require", **Setup().objects)
    trained(tmp_path, 3)
    with checkfreq.open(tmp_path, resume="require", **Setup().objects) as run:
        assert run.step == 3


def test_every_difference_is_told_and_nothing_is_loaded(run_directory: Path) -> None:
    other = Setup(width=24, samples=50, batch=10)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
    before = other.state()
    objects = other.objects | {"extra": nn.Linear(1, 1)}
    del objects["scheduler"]
    with pytest.raises(MismatchError) as caught:
        checkfreq.open(run_directory, **objects)
    for expected in (
        "model: 0.weight is torch.float32 [16, 8] in the checkpoint, torch.float32 [24, 8] here",
        "model: 3.weight is",
        "optimizer is a torch.optim.adamw.AdamW in the checkpoint, a torch.optim.sgd.SGD here",
        "scheduler is in the checkpoint, and was not passed",
        "extra was passed to checkfreq.open, and is not in the checkpoint",
        "loader: dataset_size is 40 in the checkpoint, 50 here",
        "loader: global_batch_size is 8 in the checkpoint, 10 here",
    ):
        assert expected in str(caught.value)
    assert other.state() == before
    with checkfreq.open(run_directory, **Setup().objects) as run:  # the right to write was given back
        assert run.step == 12


def test_override_leaves_what_differs_as_it_is(run_directory: Path) -> None:
    stored = Setup()
    with checkfreq.open(run_directory, **stored.objects):
        pass
    other = Setup(samples=50)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.25)
    objects = other.objects
    del objects["scheduler"]
    names = {"dataset", "optimizer", "scheduler"}
    with checkfreq.open(run_directory, override=names, **objects) as run:
        assert run.step == 12
        assert other.loader.position == Position(2, 0), "another order: from the beginning of the epoch"
        assert other.optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(other.model[0].weight, stored.model[0].weight)
    with pytest.raises(ConfigError, match="modle"):
        checkfreq.open(run_directory, override={"modle"}, **objects)


def test_override_leaves_what_does_not_differ_as_it_is_once(run_directory: Path) -> None:
    """It was loaded all the same. A launch with the same options goes on with what was overridden: it may have been killed."""

    def launch(override: Collection[str], until: int = 14) -> tuple[int, list[str]]:
        setup = Setup()
        setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 9, 0.5)
        with checkfreq.open(run_directory, override=override, every=100, **setup.objects) as run:
            size = setup.scheduler.step_size
            setup.train(run, until)
        return size, journal(run_directory, "Resumed")[-1]["notes"]

    assert launch({"scheduler"}) == (9, ["overridden: scheduler is left as it is"])
    size, (note,) = launch({"scheduler"}, 16)
    assert size == 9
    assert note.startswith("scheduler was overridden by the launch that stored this already, and is loaded")
    resumed = Setup()
    with checkfreq.open(run_directory, override={"scheduler"}, **resumed.objects):
        assert (resumed.scheduler.step_size, resumed.scheduler.last_epoch) == (9, 4)
    assert launch((), 18) == (9, [])
    with checkfreq.open(run_directory, override={"scheduler"}, **resumed.objects):
        assert journal(run_directory, "Resumed")[-1]["notes"] == ["overridden: scheduler is left as it is"]


def test_a_scaler_that_was_not_in_use_can_be_overridden(tmp_path: Path) -> None:
    def launch(until: int, *, enabled: bool, override: Collection[str] = ()) -> int:
        setup = Setup()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        with checkfreq.open(tmp_path, override=override, scaler=scaler, **setup.objects) as run:
            setup.train(run, until)
        return run.step

    launch(2, enabled=False)
    with pytest.raises(ConfigError, match=r"GradScaler.load_state_dict failed .*pass its name in override=.*: RuntimeError"):
        launch(4, enabled=True)
    assert launch(4, enabled=True, override={"scaler"}) == 4
    assert launch(5, enabled=True) == 5


def test_another_dataset_of_the_same_length_is_refused(run_directory: Path) -> None:
    other = Setup()
    inputs, labels = other.loader.dataset.tensors
    other.loader = checkfreq.Loader(TensorDataset(inputs + 1, labels), global_batch_size=BATCH)
    before = other.state()
    with pytest.raises(MismatchError, match=r"loader: dataset of the same length with other content: .*number 0 has mean"):
        checkfreq.open(run_directory, **other.objects)
    assert other.state() == before
    with checkfreq.open(run_directory, override={"dataset"}, **other.objects) as run:
        assert (run.step, other.loader.position) == (12, Position(2, 16)), "of the same length: it goes on where it stood"


@pytest.mark.parametrize(("part", "name", "without"), [("datasets", "loader", "samples"), ("objects", "optimizer", "names")])
def test_a_checkpoint_that_does_not_tell_all_that_is_compared_now_is_resumed(
    part: str, name: str, without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote such ones: of what the data looked like, or of the optimizer's parameters they said nothing."""
    values = resume.values

    def earlier(*given: Any) -> dict[str, Any]:
        found = values(*given)
        del found[part][name][without]
        return found

    with monkeypatch.context() as then:
        then.setattr(resume, "values", earlier)
        then.setattr(Session, "_compare_given", lambda *_: None)
        trained(tmp_path, 3)
    with checkfreq.open(tmp_path, resume="require", **Setup().objects) as run:
        assert run.step == 3


class OpenedWhereItIsRead(Dataset[Tensor]):
    """As one that opens a file at its first sample, which a process that is forked must not share."""

    opened = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.opened = True
        return torch.rand(3) + index


def test_what_a_dataset_looks_like_is_seen_where_it_is_read_and_disturbs_no_generator() -> None:
    before = torch.get_rng_state()
    elsewhere = checkfreq.Loader(OpenedWhereItIsRead(), global_batch_size=BATCH, num_workers=1)
    here = checkfreq.Loader(OpenedWhereItIsRead(), global_batch_size=BATCH)
    assert elsewhere.sketches == here.sketches
    assert (elsewhere.dataset.opened, here.dataset.opened) == (False, True)
    assert torch.equal(torch.get_rng_state(), before)


class Attention(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4, bias=False))


def test_parameters_of_an_optimizer_that_have_changed_places_are_told_apart(tmp_path: Path) -> None:
    """They have one shape, so what the optimizer kept for one of them was loaded for the other."""

    def launch(*names: str, apart: bool = False, override: Collection[str] = ()) -> None:
        model = Attention(*names)
        optimizer = torch.optim.Adam(model.parameters())
        parts = {"a_part": model.get_submodule(names[0])} if apart else {}
        with checkfreq.open(tmp_path, override=override, **parts, model=model, optimizer=optimizer) as run:
            run.commit()
            torch.stack([one.sum() for one in model.parameters()]).sum().backward()
            optimizer.step()

    launch("q", "k")
    with pytest.raises(MismatchError) as caught:
        launch("k", "q")
    assert "optimizer: group 0, parameter 0 is model/q.weight in the checkpoint, model/k.weight here" in str(caught.value)
    assert "optimizer: group 0, parameter 1 is model/k.weight in the checkpoint, model/q.weight here" in str(caught.value)
    launch("q", "k", apart=True, override={"a_part"})
    launch("q", "k", override={"a_part"})


def test_groups_of_an_optimizer_are_compared(run_directory: Path) -> None:
    other = Setup()
    groups = [{"params": other.model[0].parameters()}, {"params": other.model[3].parameters()}]
    other.optimizer = torch.optim.AdamW(groups, lr=0.01)
    with pytest.raises(MismatchError, match=r"1 parameter groups in the checkpoint, 2 here"):
        checkfreq.open(run_directory, **other.objects)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overhead": 0}, "between 0 and 1"),
        ({"overhead": 1.5}, "between 0 and 1"),
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"keep": 0}, "keep=0"),
        ({"failure_interval": "measured"}, "supervisor, and there is none here"),
        ({"failure_interval": timedelta()}, r"failure_interval=datetime\.timedelta\(0\).*longer than zero"),
        ({"failure_interval": 3600}, "failure_interval=3600"),
        ({"timeout": 5}, r"timeout=5\): use a timedelta longer than zero"),
        ({"timeout": timedelta()}, r"timeout=datetime\.timedelta\(0\)\): use"),
        ({"timeout": None}, "timeout=None"),
        ({"resume": "always"}, "resume='always'"),
        ({"override": "model"}, "override='model'"),
        ({"extra": 3}, "state_dict"),
        ({"overhaed": 0.1}, r"overhaed=0\.1\): there is no option overhaed; did you mean 'overhead'\?"),
        ({"keep_epoch": True}, "there is no option keep_epoch; did you mean 'keep_epochs'"),
        (
            {"loader": DataLoader(TensorDataset(torch.arange(9)), batch_size=3, shuffle=True)},
            r"loader=DataLoader.*checkfreq\.Loader\(dataset, global_batch_size=3, shuffle=True\) in its place",
        ),
        ({"dataset": nn.Linear(1, 1)}, "dataset"),
    ],
)
def test_bad_values_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checkfreq.open(tmp_path, **(Setup().objects | options))
    assert not list(tmp_path.iterdir())


def test_an_object_may_have_a_name_like_an_option(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, **setup.objects, timer=nn.Linear(2, 2)):
        pass
    with pytest.raises(ConfigError, match=r"checkfreq\.Loader\(dataset"):
        checkfreq.open(tmp_path, **setup.objects, keeper=DataLoader(TensorDataset(torch.arange(9))))


def test_bad_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch://"):
        checkfreq.open("nosuch://bucket/run", **Setup().objects)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        checkfreq.open(file / "run", **Setup().objects)
    with pytest.raises(ConfigError, match="by keyword"):
        checkfreq.open(tmp_path)


@pytest.mark.parametrize("path", ["", " ", "\n"])
def test_a_path_that_says_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """As of a variable of the environment that is not set: what is within it would be at the file system's root."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkfreq, "open_storage", lambda place: pytest.fail(f"{place} is opened"))
    with pytest.raises(ConfigError, match=r"the path is empty: give a directory"):
        checkfreq.open(path, **Setup().objects)


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, **setup.objects) as run:
        with pytest.raises(LockedError, match="is being written by"):
            checkfreq.open(tmp_path, **Setup().objects)
        setup.train(run, 2)
    assert journal(tmp_path, "CheckpointCommitted")


def test_what_was_taken_apart_is_described_as_if_it_was_not() -> None:
    setup = Setup()
    setup.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    nested = nn.ModuleDict({"a": nn.BatchNorm1d(2), "model": nn.ModuleDict({"model": nn.Linear(2, 3)})})
    objects = {"model": nested, "compiled": torch.compile(setup.model), "optimizer": setup.optimizer}
    assert gc.isenabled()
    assert states.describe(objects, states.take_apart(objects)) == states.describe(objects)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_after_an_error(enabled: bool) -> None:
    seen: list[bool] = []

    class Odd:
        def state_dict(self) -> Any:
            seen.append(gc.isenabled())
            return {"odd": object()}

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ConfigError, match=r"odd/odd is a builtins\.object"):
            states.take_apart({"odd": Odd()})
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_what_cannot_be_stored_is_told_at_once(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": {"thing": object()}}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match=r"odd/inner/thing is a builtins\.object"):
        checkfreq.open(tmp_path, odd=Odd(), **Setup().objects)
    sparse = torch.nn.Module()
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"graph/edges is a torch\.sparse_coo tensor"):
        checkfreq.open(tmp_path, graph=sparse, **Setup().objects)


def two() -> Tensor:
    """What torchao's kinds are: it says that it is plain, and holds all that it is in other tensors."""
    return TwoTensor(torch.full((3, 3), 3.0), torch.full((3, 3), 7.0))


UNPLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapper": (two, "is a torch.testing._internal.two_tensor.TwoTensor, which is made of other tensors"),
    "frozen": (lambda: nn.Parameter(two(), requires_grad=False), "TwoTensor, which is made of other tensors"),
    "masked": (lambda: masked_tensor(torch.arange(4.0), torch.arange(4) % 2 == 0), "MaskedTensor, which is made of other"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor, which is made of"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "is a UninitializedParameter, of a lazy module .* call the model once before"),
    "lazy buffer": (lambda: nn.UninitializedBuffer(), "is a UninitializedBuffer, of a lazy module"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", UNPLAIN)
def test_a_tensor_that_is_more_than_its_bytes_is_refused(tmp_path: Path, kind: str) -> None:
    """What was stored of a wrapper was whatever lay at its address, and nobody was told."""
    make, words = UNPLAIN[kind]
    module, value = nn.Linear(2, 2), make()
    if isinstance(value, nn.Parameter):
        module.register_parameter("odd", value)
    else:
        module.register_buffer("odd", value)
    with pytest.raises(ConfigError, match=f"model/odd {words}" if words.startswith("is") else f"model/odd is a .*{words}"):
        checkfreq.open(tmp_path, model=module)
    with pytest.raises(ConfigError, match="odd"):
        states.describe({"model": module})
    with pytest.raises(ConfigError, match="odd"):
        layout.share([("odd", value)], 0, 1)
    with pytest.raises(ConfigError, match="odd"):
        check_model(module)


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", ["wrapper", "masked", "nested", "lazy buffer"])
def test_a_buffer_that_is_more_than_its_bytes_and_no_state_is_left_out(tmp_path: Path, kind: str) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("odd", UNPLAIN[kind][0](), persistent=False)
    checkfreq.open(tmp_path, model=module).close()


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "multi": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_can_be_stored(name: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    flatten(SCHEDULERS[name](optimizer).state_dict())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path, name: str) -> None:
    def rates(directory: Path, until: int) -> list[float]:
        """Of the steps of one launch."""
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler, found = SCHEDULERS[name](optimizer), list[float]()
        with checkfreq.open(directory, model=model, optimizer=optimizer, scheduler=scheduler, every=1) as run:
            while run.step < until:
                optimizer.step()
                scheduler.step(*([1.0] if name == "plateau" else []))
                found.append(optimizer.param_groups[0]["lr"])
                run.commit()
        return found

    resumed = [rate for until in (2, 5, 10) for rate in rates(tmp_path / "resumed", until)]
    assert resumed == rates(tmp_path / "whole", 10)


def test_counts_come_back_as_they_were() -> None:
    """A Counter's `update` adds."""
    stored = Counter(seen=3)
    assert placing.on_devices_of({"of": [stored]}, {"of": [Counter(seen=0)]}) == {"of": [Counter(seen=3)]}
    assert loading._not_cast(stored, Counter(seen=3)) == Counter(seen=3)


# ---------------------------------------------------------------- the loader


class Drawing(Dataset[tuple[int, float, float, float]]):
    """Draws from every global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


def rows(loader: checkfreq.Loader, batches: int | None = None) -> list[list[float]]:
    found: list[list[float]] = []
    for batch in loader:
        found += torch.stack([column.double() for column in batch], dim=1).tolist()
        if batches is not None and len(found) >= batches * loader.sampling.global_batch_size:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_of_a_dataset_depend_on_the_sample_and_disturb_nobody(workers: int) -> None:
    def make() -> checkfreq.Loader:
        return checkfreq.Loader(Drawing(), global_batch_size=BATCH, seed=4, num_workers=workers)

    before = repr(generator_states())
    whole = rows(make())
    assert repr(generator_states()) == before
    resumed = make()
    resumed.load_state_dict({"epoch": 0, "consumed": 24})
    assert rows(resumed) == whole[24:]
    assert len({row[1] for row in whole}) == SAMPLES
    again = make()
    assert rows(again, 2) + rows(again) == whole, "it goes on after a break"
    assert [row[0] for row in rows(again)] != [row[0] for row in whole], "the next epoch has another order"


class OwnGenerator(Drawing):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, self.generator.normal(), 0.0, 0.0


def test_a_dataset_with_a_generator_of_its_own_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, drawing = (checkfreq.Loader(dataset, global_batch_size=BATCH) for dataset in (OwnGenerator(), Drawing()))
    with caplog.at_level(logging.WARNING), checkfreq.open(tmp_path, model=nn.Linear(1, 1), own=own, drawing=drawing):
        assert len(rows(own)) == SAMPLES
    (told,) = journal(tmp_path, "SamplesVary")
    assert "samples of own's dataset look otherwise" in told["reason"]
    assert "one of the CPU's global generators" in told["reason"]
    assert "SamplesVary" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("plain", [True, False])
def test_another_default_device_changes_nothing(tmp_path: Path, plain: bool, workers: int) -> None:
    """What is stored, read and told to others is made on the CPU."""

    def launch(until: int, device: str | None) -> str:
        setup = Setup()
        setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.01, momentum=0.9)
        rows = setup.loader.dataset if plain else cast(Any, list(setup.loader.dataset))
        setup.loader = checkfreq.Loader(rows, global_batch_size=BATCH, num_workers=workers)
        setup.scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 7, 0.5)
        torch.set_default_device(device)
        try:
            with checkfreq.open(tmp_path / str(device), every=2, **setup.objects) as run:
                setup.train(run, until)
        finally:
            torch.set_default_device(None)
        return setup.state() + repr(setup.loader.sketches)

    found = []
    for device in (None, "meta"):
        torch.manual_seed(3)
        launch(4, device)
        found.append(launch(7, device))
    assert found[0] == found[1]


def test_what_ranks_tell_each_other_is_made_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a group of gloo's."""
    ranks = Ranks(timedelta(seconds=10))
    ranks._group = ranks._meeting = object()
    sent: list[Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_, **__: sent.append(tensor))
    monkeypatch.setattr(dist, "all_gather", lambda found, tensor, **_: [one.copy_(tensor) for one in found])
    with torch.device("meta"):
        assert ranks.first_says([1, "two"]) == [1, "two"]
        assert ranks.all_say([1, "two"]) == [[1, "two"]]
    assert {one.device.type for one in sent} == {"cpu"}


def mixed(samples: list[tuple[Any, ...]]) -> list[Tensor]:
    """Collates, and draws from every global generator, as MixUp does."""
    draws = float(torch.rand(())), float(np.random.rand()), random.random()
    return [torch.tensor([float(sample[0]) for sample in samples]), *(torch.full((len(samples),), one) for one in draws)]


@pytest.mark.parametrize("dataset", [Drawing(), TensorDataset(torch.arange(float(SAMPLES)))])
def test_draws_of_a_collation_in_a_loader_worker_depend_on_the_batch(dataset: Any) -> None:
    def make(workers: int) -> checkfreq.Loader:
        return checkfreq.Loader(dataset, global_batch_size=BATCH, seed=4, num_workers=workers, collate_fn=mixed)

    before = repr(generator_states())
    whole = rows(make(1))
    assert repr(generator_states()) == before
    resumed = make(2)
    resumed.load_state_dict({"epoch": 0, "consumed": 16})
    assert rows(resumed) == whole[16:]
    assert [len({row[column] for row in whole}) for column in (1, 2, 3)] == [SAMPLES // BATCH] * 3
    again = make(1)
    again.load_state_dict({"epoch": 1, "consumed": 0})
    assert not {row[1] for row in rows(again)} & {row[1] for row in whole}, "each epoch draws anew"


class Batches:
    """A dataset that makes whole batches: the ids, and what is random about each."""

    def __init__(self) -> None:
        self.loaded: list[list[int]] = []
        self.broken = False

    def __len__(self) -> int:
        return SAMPLES

    def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> list[Tensor]:
        if self.broken and len(ids) > 1:
            self.broken = False
            raise OSError("the disk is away for a moment")
        self.loaded.append(ids.tolist())
        drawn = [torch.rand((), generator=torch.Generator().manual_seed(sample_seed(seed, epoch, int(i)))) for i in ids]
        return [torch.from_numpy(ids), torch.stack(drawn)]


def batched(dataset: Any) -> checkfreq.Loader:
    return checkfreq.Loader(dataset, global_batch_size=BATCH, seed=4)


def test_a_dataset_that_makes_batches_is_read_in_the_order_of_any_other() -> None:
    before = repr(generator_states())
    whole = rows(batched(Batches()))
    assert repr(generator_states()) == before
    assert [row[0] for row in whole] == order(Sampling(SAMPLES, BATCH, 4), 0).tolist()
    resumed = batched(Batches())
    resumed.load_state_dict({"epoch": 0, "consumed": 24})
    assert rows(resumed) == whole[24:]


def test_a_dataset_that_makes_batches_is_read_ahead_and_nothing_of_it_twice() -> None:
    """Neither after a break, nor at the end of an epoch."""
    dataset = Batches()
    loader = batched(dataset)
    seen = rows(loader, 2) + rows(loader) + rows(loader)
    assert [row[0] for row in seen] == [i for epoch in (0, 1) for i in order(loader.sampling, epoch)]
    loaded = [ids for ids in dataset.loaded if len(ids) > 1][2:]  # the look at it takes samples one by one, then together twice
    batches = [order(loader.sampling, epoch)[at : at + BATCH].tolist() for epoch in range(3) for at in range(0, SAMPLES, BATCH)]
    assert 10 <= len(loaded) <= 13, "two steps ahead, and one in the making"
    assert loaded == batches[: len(loaded)]


def test_what_could_not_be_loaded_is_tried_anew() -> None:
    dataset, seen = Batches(), []
    loader = batched(dataset)

    def read() -> None:
        for ids, _ in loader:
            seen.extend(ids.tolist())
            if len(seen) == BATCH:
                dataset.broken = True  # until a batch fails: what is read ahead by now, three at most, is still to be had

    with pytest.raises(OSError, match="for a moment"):
        read()
    assert loader.state_dict() == {"epoch": 0, "consumed": len(seen)}
    read()
    assert seen == order(loader.sampling, 0).tolist()


def test_a_loader_that_nobody_has_any_more_leaves_no_thread() -> None:
    def reading() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "raytrain_ft-loader"}

    gc.collect()
    before = reading()
    loader = batched(Batches())
    rows(loader, 1)
    (thread,) = reading() - before
    del loader
    gc.collect()
    assert not thread.is_alive()


def test_a_dataset_that_can_be_read_by_index_is_whatever_else_it_can() -> None:
    """A method of that name may be anything."""

    class Both(TensorDataset):
        def load_batch(self, path: str) -> None:
            raise AssertionError(path)

    both = Both(torch.arange(SAMPLES))
    loader = checkfreq.Loader(both, global_batch_size=BATCH, seed=4, num_workers=0)
    assert [row[0] for row in rows(loader)] == order(loader.sampling, 0).tolist()


def test_a_dataset_that_makes_batches_may_be_one_of_torchs_classes() -> None:
    """Which has a `__getitem__` that only raises."""

    class Derived(Batches, torch.utils.data.Dataset[Any]): ...

    assert rows(batched(Derived())) == rows(batched(Batches()))


def test_batches_that_a_resumed_run_would_not_read_again_are_refused() -> None:
    class Noisy(Batches):
        def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> list[Tensor]:
            return [torch.rand(len(ids))]

    loader = batched(Noisy())
    with pytest.raises(ConfigError, match=r"load_batch draws from.*torch.*sample_seed\(seed, epoch, id\)"):
        next(iter(loader))


def test_example_of_the_papers_figure_5() -> None:
    """Order 1 5 8 2 6 4 7 3, cut after 4: what is left is 6 4 7 3. The seed is one that gives this order."""

    def make() -> checkfreq.Loader:
        return checkfreq.Loader(TensorDataset(torch.arange(1, 9)), global_batch_size=2, seed=140114)

    loader, resumed = make(), make()
    assert [int(i) for (batch,) in _some(loader, 2) for i in batch] == [1, 5, 8, 2]
    assert loader.state_dict() == {"epoch": 0, "consumed": 4}
    resumed.load_state_dict(loader.state_dict())
    assert [int(i) for (batch,) in resumed for i in batch] == [6, 4, 7, 3]
    assert resumed.state_dict() == {"epoch": 1, "consumed": 0}


def _some(loader: checkfreq.Loader, count: int) -> Iterator[Any]:
    for number, batch in enumerate(loader, start=1):
        yield batch
        if number == count:
            return


@settings(max_examples=300)
@given(st.data())
def test_all_cuts_and_worlds_read_each_sample_once(data: st.DataObject) -> None:
    size, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    sampling = Sampling(size, batch, data.draw(st.integers(0, 9)), data.draw(st.booleans()))
    position, seen = Position(), []
    while position.epoch < 2:
        world = data.draw(st.integers(1, 6))
        for _ in range(data.draw(st.integers(1, 5))):  # steps until the next cut
            if position.epoch == 2:
                break
            step, after = next_batch(sampling, position)
            for rank in range(world):
                mine = share(step, rank, world)
                seen += order(sampling, position.epoch)[mine.start : mine.stop].tolist()
            position = after
    assert sorted(seen[:size]) == sorted(seen[size:]) == list(range(size))


def seconds_to_resume(size: int, consumed: int, seed: int) -> float:
    """Everything is counted: the position, the order of the samples from there, DataLoader's iterator, the collated batch."""
    loader = checkfreq.Loader(TensorDataset(torch.arange(size)), global_batch_size=64, seed=seed)
    began = time.perf_counter()
    loader.load_state_dict({"epoch": 3, "consumed": consumed})
    (first,) = next(iter(loader))
    seconds = time.perf_counter() - began
    assert first.tolist() == order(loader.sampling, 3)[consumed : consumed + 64].tolist()
    return seconds


def test_resume_to_the_exact_next_sample_of_a_million_takes_no_longer_than_of_a_few() -> None:
    """How long it takes is `benchmarks.checkfreq`'s to say; here both are measured in turn, whatever else this machine does."""
    took = [(seconds_to_resume(1_000_000, 64 * 7_777, seed), seconds_to_resume(1_000, 64 * 7, seed)) for seed in range(20)]
    million, few = (statistics.median(times) for times in zip(*took, strict=True))
    assert million <= 3 * few, "a position is found by counting, not by going through what came before it"


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"sampler": None}, {"generator": torch.Generator()}])
def test_options_that_would_change_the_order_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        checkfreq.Loader(TensorDataset(torch.arange(8)), global_batch_size=2, **options)


def test_batches_that_arrive_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_order"):
        checkfreq.Loader(TensorDataset(torch.arange(8)), global_batch_size=2, num_workers=2, in_order=False)


def test_a_loader_that_was_not_given_is_missed_before_much_is_lost(tmp_path: Path) -> None:
    """Nothing else would tell that no step ever ends. Who commits has none, and so may make as many updates as he likes."""

    def train(directory: Path, *, commits: bool) -> list[Any]:
        setup = Setup()
        objects = {name: value for name, value in setup.objects.items() if name != "loader"}
        with checkfreq.open(directory, **objects) as run:
            for number, (inputs, labels) in enumerate(itertools.islice(itertools.cycle(list(setup.loader)), FORGOTTEN + 1)):
                if commits and number % (FORGOTTEN - 1) == 0:
                    run.commit()
                setup.step(inputs, labels)
        return journal(directory, "NothingToStore")

    (told,) = train(tmp_path / "without", commits=False)
    assert "checkfreq.open(..., loader=loader)" in told["reason"]
    assert train(tmp_path / "by hand", commits=True) == []


def test_an_optimizer_that_was_not_given_is_missed_while_the_loop_goes_on(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, model=setup.model, loader=setup.loader):
        for _ in itertools.islice(itertools.chain.from_iterable(itertools.repeat(setup.loader)), FORGOTTEN + 1):
            pass
        until(lambda: journal(tmp_path, "NothingToStore"))
    evaluated = Setup()
    with checkfreq.open(tmp_path / "with", model=setup.model, optimizer=evaluated.optimizer, loader=evaluated.loader):
        for _ in itertools.islice(itertools.chain.from_iterable(itertools.repeat(evaluated.loader)), FORGOTTEN + 1):
            pass
        assert journal(tmp_path / "with", "NothingToStore") == [], "it may be evaluated before it is trained"


def test_an_epoch_without_an_update_is_an_error_where_updates_are_counted(tmp_path: Path) -> None:
    loader = checkfreq.Loader(TensorDataset(torch.arange(8)), global_batch_size=2)
    run = checkfreq.open(tmp_path, model=nn.Linear(2, 2), loader=loader)
    with pytest.raises(ConfigError, match=r"no update was seen in 1 whole epoch \(4 batches\)"):
        list(itertools.islice(run.batches(loader, until_step=10), 20))
    run.close()


@pytest.mark.parametrize("batch", [BATCH, SAMPLES])
def test_gradients_may_be_accumulated_for_longer_than_an_epoch_where_updates_are_counted(tmp_path: Path, batch: int) -> None:
    setup = Setup(batch=batch)
    with checkfreq.open(tmp_path, **setup.objects) as run:
        for number, (inputs, labels) in enumerate(run.batches(setup.loader, until_step=3), 1):
            F.cross_entropy(setup.model(inputs), labels).backward()
            if number % 12 == 0:
                setup.optimizer.step()
        assert run.step == 3


def test_many_epochs_without_an_update_are_an_error_where_updates_are_counted(tmp_path: Path) -> None:
    setup = Setup()
    run = checkfreq.open(tmp_path, **setup.objects)
    batches = run.batches(setup.loader, until_step=10)
    setup.step(*next(batches))
    with pytest.raises(ConfigError, match=r"no update was seen in 20 whole epochs \(100 batches\), and the run is at step 1"):
        list(itertools.islice(batches, 3 * FORGOTTEN))
    run.close()


def test_ranks_that_pass_other_objects_are_told(tmp_path: Path) -> None:
    """Each stores a part of the whole, and the parts of different states are none."""

    def agree(error: Exception | None) -> None:
        if error is not None:
            raise error

    model = nn.Linear(2, 2)
    of_first = states.describe({"model": model, "average": nn.Linear(3, 3)})
    ranks: Any = SimpleNamespace(first_says=lambda value: of_first, agree=agree)
    for objects, message in (
        ({"model": model, "average": nn.Linear(3, 3)}, None),
        ({"model": model}, "average .is missing"),
        ({"model": model, "average": nn.Linear(3, 4)}, "average .differs"),
    ):
        beginning = Beginning(ranks, cast(Any, None), cast(Any, None), objects, {})
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            beginning.compare_ranks()


def test_what_another_rank_finds_damaged_is_passed_over_on_all(run_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here the newest one is whole."""
    others: list[FTError] = [StorageError("rank 1: shard-00000-of-00001.arrow is damaged")]
    ranks: Any = SimpleNamespace(failures=lambda error: [others.pop()] if others else [])
    storage = open_storage(str(run_directory / "checkpoints"))
    names = [str(name) for name in selection.counting(storage)]
    beginning = Beginning(ranks, storage, Journal(None), {}, {})
    assert beginning.newest(names).manifest.step == 10
    assert "step-000000012-e1-i1 is passed over: rank 1: shard" in caplog.text
    others.append(ConfigError("rank 1: it does not hold it: is it a directory that all ranks share?"))
    with pytest.raises(ConfigError, match="all ranks share"):
        beginning.newest(names)


def test_an_epoch_in_which_nothing_is_read_is_an_error() -> None:
    loader = checkfreq.Loader(TensorDataset(torch.arange(8)), global_batch_size=2)
    with pytest.raises(ConfigError, match="read no batch"):
        for _ in loader.epochs(3):
            pass


@pytest.mark.parametrize("how", ["probe", "load", "whole"])
def test_a_second_loop_over_the_same_loader_takes_no_samples_away_unnoticed(how: str) -> None:
    """Torch's DataLoader gives each loop a position of its own."""
    loader = checkfreq.Loader(TensorDataset(torch.arange(8)), global_batch_size=2)

    def train() -> None:
        for epoch in loader.epochs(4):
            for number, _ in enumerate(loader):
                if how == "probe" and number == 1:
                    next(iter(loader))
                elif how == "load" and number == 1:
                    loader.load_state_dict({"epoch": epoch, "consumed": 0})
            if how == "whole":
                assert len(list(loader)) == 4, "an accuracy, say"

    with pytest.raises(ConfigError, match=r"something else has read from it meanwhile.*a checkfreq\.Loader of its own"):
        train()


def test_batches_of_many_epochs_in_a_loop_over_epochs_are_told_apart(tmp_path: Path) -> None:
    setup = Setup()

    def train() -> None:
        with checkfreq.open(tmp_path, **setup.objects) as run:
            for _ in setup.loader.epochs(3):
                for inputs, targets in run.batches(setup.loader, until_step=len(setup.loader) + 1):
                    setup.step(inputs, targets)

    with pytest.raises(ConfigError, match=r"Run\.batches goes on over epochs by itself: use it without epochs\(\)"):
        train()


def through_pickle(loader: checkfreq.Loader) -> checkfreq.Loader:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_a_copy_of_a_loader_stands_by_itself(copied: Callable[[checkfreq.Loader], checkfreq.Loader]) -> None:
    """It read from where the other one stood."""

    def begun() -> checkfreq.Loader:
        loader = checkfreq.Loader(Drawing(), global_batch_size=BATCH, seed=4, drop_last=True)
        next(iter(loader))
        return loader

    loader = begun()
    other = copied(loader)
    assert other.dataset is loader.dataset or copied is not copy.copy
    assert rows(loader) == rows(begun())
    assert (other.at, other.was_read) == (Position(0, BATCH), True)
    assert rows(other) == rows(begun())
    assert (other.at, loader.at) == (Position(1), Position(1))


def put_back(loader: checkfreq.Loader) -> None:
    next(iter(loader))
    loader.load_state_dict({"epoch": 0, "consumed": 0})


def put_elsewhere(loader: checkfreq.Loader) -> None:
    loader.load_state_dict({"epoch": 2, "consumed": 16})


def reads_a_batch(loader: checkfreq.Loader) -> None:
    next(iter(loader))


def reads_an_epoch(loader: checkfreq.Loader) -> None:
    for _ in loader:
        pass


@pytest.mark.parametrize("read", [reads_a_batch, reads_an_epoch])
def test_a_run_does_not_begin_with_a_loader_that_was_read_before(
    run_directory: Path, tmp_path: Path, read: Callable[[checkfreq.Loader], None]
) -> None:
    """As that of the run before, in a sweep or a notebook. The second one trained nothing, or without some of the data."""
    setup = Setup()
    read(setup.loader)
    with pytest.raises(ConfigError, match=r"^checkfreq.open\(loader=Loader\): batches were read from it .* make a new Loader"):
        checkfreq.open(tmp_path / "new", **setup.objects)
    with pytest.raises(ConfigError, match="batches were read from it"):
        checkfreq.open(run_directory, resume="never", **setup.objects)
    with checkfreq.open(run_directory, **setup.objects) as run:
        assert (run.step, setup.loader.at) == (12, Position(2, 16)), "what is there counts, and says where to go on"


@pytest.mark.parametrize("put", [put_back, put_elsewhere])
def test_a_run_begins_where_its_loader_was_put_on_purpose(tmp_path: Path, put: Callable[[checkfreq.Loader], None]) -> None:
    setup = Setup()
    put(setup.loader)
    before = setup.loader.at
    with checkfreq.open(tmp_path, **setup.objects):
        assert setup.loader.at == before
    assert journal(tmp_path, "NothingToStore") == [], "no batch was read"


def test_a_loop_that_is_left_and_entered_again_counts_on() -> None:
    loader = checkfreq.Loader(TensorDataset(torch.arange(9)), global_batch_size=2)
    seen = []
    for stop in (2, 4, 9):
        for number, _ in enumerate(loader, loader.done):
            seen.append(number)
            if number + 1 == stop:
                break
    assert seen == [0, 1, 2, 3, 4]
    assert (loader.done, loader.position.epoch) == (0, 1)


def test_batches_that_a_thread_asks_for_beside_the_updates_are_refused(tmp_path: Path) -> None:
    """It would end steps in the midst of an update."""
    setup = Setup()

    def ahead() -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            batches = iter(setup.loader)
            while (batch := pool.submit(next, batches, None).result()) is not None:
                yield batch

    def train() -> None:
        with checkfreq.open(tmp_path, **setup.objects):
            for batch in ahead():
                setup.step(*batch)

    with pytest.raises(ConfigError, match="a thread beside the training asks 'loader'"):
        train()


def test_an_update_within_a_backward_pass_is_no_thread_beside_it(tmp_path: Path) -> None:
    """On a GPU, hooks of a backward pass run on a thread of torch's own."""
    setup = Setup()
    with checkfreq.open(tmp_path, **setup.objects), ThreadPoolExecutor(1) as pool:
        for inputs, labels in setup.loader:
            pool.submit(setup.step, inputs, labels).result()


def test_two_loaders_are_never_inside_one_dataset_at_once() -> None:
    """It may hold an open file; each loader has a thread of its own."""

    @dataclass  # which cannot be hashed
    class OneFile(Batches):
        inside: int = 0

        def __post_init__(self) -> None:
            super().__init__()

        def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> list[Tensor]:
            self.inside += 1
            assert self.inside == 1
            time.sleep(0.002)
            self.inside -= 1
            return super().load_batch(ids, epoch, seed)

    dataset = OneFile()
    loaders = [batched(dataset), batched(dataset)]
    for one, other in zip(*loaders, strict=True):
        assert torch.equal(one[0], other[0])


def test_a_batch_too_small_for_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = checkfreq.Loader(TensorDataset(torch.arange(9)), global_batch_size=4)
    loader.check_world(1)
    with pytest.raises(ConfigError, match="last batch of an epoch has 1 samples for 2 ranks"):
        loader.check_world(2)
    monkeypatch.setattr(resumable, "current", lambda: (0, 2))
    with pytest.raises(ConfigError, match="last batch of an epoch has 1 samples for 2 ranks"):
        next(iter(loader))  # one that `open` was not given, on any rank and before any batch
    with pytest.raises(ConfigError, match="each batch has 4 samples for 5 ranks"):
        loader.check_world(5)


def test_a_rest_of_an_epoch_that_gives_a_rank_nothing_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After batches of another size: each launch would come to this same place, and fail there."""
    setup = Setup(samples=100, batch=10)
    with checkfreq.open(tmp_path, **setup.objects) as run:
        setup.train(run, 5)
    monkeypatch.setattr(checkfreq, "current", lambda: (0, 4))
    monkeypatch.setattr(resume, "current", lambda: (0, 4))
    other = Setup(samples=100, batch=16)
    before = other.state()
    with pytest.raises(ConfigError, match="last batch of epoch 0, of which 50 samples are left, has 2 samples for 4 ranks"):
        checkfreq.open(tmp_path, override={"dataset"}, **other.objects)
    assert other.state() == before
    for batch, drop_last in ((23, False), (16, True)):
        fits = Setup(samples=100)
        order: dict[str, Any] = {"global_batch_size": batch, "drop_last": drop_last}
        fits.loader = checkfreq.Loader(fits.loader.dataset, **order)
        with checkfreq.open(tmp_path, override={"dataset"}, **fits.objects) as run:
            assert (run.step, fits.loader.position) == (5, Position(0, 50))


def test_a_loader_that_is_put_where_a_rank_would_get_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "current", lambda: (0, 4))
    loader = checkfreq.Loader(TensorDataset(torch.arange(100)), global_batch_size=16)
    loader.load_state_dict({"epoch": 2, "consumed": 50})
    with pytest.raises(ConfigError, match=r"last batch of epoch 2, of which 50 samples are left, has 2 .*epoch is over"):
        next(iter(loader))
