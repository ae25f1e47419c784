"""What the trainer has stored goes on in plain PyTorch; what is forged is an error that says where it was read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from store import own, same_bits, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from raytrain_ft.cli.main import main
from raytrain_ft.config import ParallelismConfig
from raytrain_ft.errors import StorageError
from raytrain_ft.model_checks import pipeline_of
from raytrain_ft.result import load_model
from raytrain_ft.settings import TrainSettings
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.task import TrainTask
from raytrain_ft.training import durable
from raytrain_ft.training.pipeline import cut, sequential
from raytrain_ft.training.settings import PipelineSettings
from raytrain_ft.training.state import TrainingState

NAME = "step-000000003-e1-i1"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """Without a checkpoint."""
    found = LocalStorage(tmp_path / "checkpoints")
    own(found)
    return found


def export(storage: LocalStorage, kind: str = "torch") -> tuple[Result, Path]:
    file = storage.root.parent / "exported"
    return CliRunner().invoke(main, ["checkpoints", "export", storage.uri, str(file), "--format", kind]), file


def build(kind: type = float) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """A model with something frozen; an optimizer whose groups do not follow the order of the model; learning rates that are
    numbers, or tensors."""

    def rate() -> Any:
        return torch.tensor(0.1) if kind is Tensor else 0.1

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    thin, wide = [p for p in trained if p.dim() == 1], [p for p in trained if p.dim() > 1]
    groups = [{"params": thin, "lr": rate(), "weight_decay": 0.0}, {"params": wide, "lr": rate(), "betas": (0.8, 0.9)}]
    optimizer = torch.optim.AdamW(groups, lr=rate(), foreach=False)
    return model, optimizer, CosineAnnealingLR(optimizer, 7)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    scheduler.step()


def trained(kind: type = float) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    found = build(kind)
    for seed in range(3):
        train(*found, seed)
    return found


def captured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    stage: int | None = None,
    pipeline: PipelineSettings | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = TrainingState(model, optimizer, scheduler, bucket_bytes=1000, first_bucket_bytes=1000, stage=stage)
    tensors, values = durable.capture(state, {}, [], pipeline)
    return dict(tensors), values


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and same_bits(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", [float, Tensor])
def test_a_checkpoint_of_the_trainer_goes_on_in_plain_torch(storage: LocalStorage, kind: type) -> None:
    model, optimizer, _ = stored = trained(kind)
    optimizer.state[next(model.parameters())]["note"] = 0.5  # some keep plain numbers
    tensors, values = captured(*stored)
    save(storage.uri, 3, tensors, 2, values=values)
    result, file = export(storage)
    assert result.exit_code == 0, result.output
    found = torch.load(file, weights_only=True)
    fresh = build(kind)
    for name, one, old in zip(("model", "optimizer", "scheduler"), fresh, stored, strict=True):
        one.load_state_dict(found[name])
        assert alike(one.state_dict(), old.state_dict()), name
    for one in (stored, fresh):
        train(*one, seed=9)
    assert alike(fresh[0].state_dict(), model.state_dict())


def test_each_stage_of_a_pipeline_has_an_optimizer_of_its_own(storage: LocalStorage) -> None:
    pipeline = PipelineSettings(stages=2, micro_batches=1, cuts=(1,))
    tensors, values, optimizers = {}, {}, []
    for stage, model in enumerate((nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(3, 2)))):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + stage)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
        found, values = captured(model, optimizer, None, stage, pipeline)
        tensors |= found
        optimizers.append(optimizer)
    save(storage.uri, 3, tensors, 2, values=values)
    result, file = export(storage)
    assert result.exit_code == 0, result.output
    state = torch.load(file, weights_only=True)
    assert state.keys() == {"model", "stage-0", "stage-1"}
    nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).load_state_dict(state["model"])
    for stage, optimizer in enumerate(optimizers):
        assert alike(state[f"stage-{stage}"], {"optimizer": optimizer.state_dict()})


class Named(nn.Sequential):
    """Of a class of its own, which does no more than its layers do."""


class Naming(TrainTask):
    def model(self, stage: int) -> nn.Module:
        return Named(OrderedDict((name, nn.Linear(4, 4)) for name in ("embed", "first", "second", "head")))


@pytest.mark.parametrize(("chunks", "cuts"), [(1, (3,)), (2, (1, 2, 3))])
def test_a_model_that_is_cut_keeps_the_names_of_its_layers(storage: LocalStorage, chunks: int, cuts: tuple[int, ...]) -> None:
    task, numbers = Naming(), TrainSettings(max_steps=3, global_batch_size=8)
    pipeline = pipeline_of(task, ParallelismConfig(pipeline_parallel_degree=2, num_pp_chunks=chunks, split=cuts), numbers)
    assert pipeline is not None
    whole, finals = sequential(task.model(0)), storage.root.parent
    tensors, values = {}, {}
    for stage, model in enumerate(cut(whole, cuts, 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found, values = captured(model, optimizer, None, stage, pipeline)
        tensors |= found
        write_tensors(finals / f"final-stage-{stage}.arrow", model.state_dict(), {"step": 3, "stage": stage, **pipeline.spread})
    save(storage.uri, 3, tensors, 2, values=values)
    result, file = export(storage)
    assert result.exit_code == 0, result.output
    exported = task.model(0)
    exported.load_state_dict(torch.load(file, weights_only=True)["model"])
    loaded = [load_model(task, place) for place in (f"{storage.uri}/{NAME}", str(finals / "final-stage-0.arrow"))]
    for one in (exported, *loaded):
        assert type(one) is Named
        assert alike(one.state_dict(), whole.state_dict())


def test_a_file_that_does_not_tell_names_has_those_of_a_plain_sequential(tmp_path: Path) -> None:
    """As an earlier version wrote it."""
    whole = sequential(Naming().model(0))
    for stage, model in enumerate(cut(whole, (3,), 2)):
        write_tensors(tmp_path / f"final-stage-{stage}.arrow", model.state_dict(), {"step": 3, "stages": 2, "cuts": [3]})
    found = load_model(Naming(), str(tmp_path / "final-stage-0.arrow"))
    assert alike(dict(found.state_dict()), dict(nn.Sequential(*whole).state_dict()))


class Rotary(nn.Module):
    """Keeps something that its state dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("frequency", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.frequency)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_buffers_that_a_state_dict_leaves_out_are_not_exported(storage: LocalStorage, kind: str, stages: int) -> None:
    tensors, values = {}, {}
    for stage in range(stages):
        model = nn.Sequential(Rotary())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline = PipelineSettings(stages=2, micro_batches=1, cuts=(1,)) if stages > 1 else None
        found, values = captured(model, optimizer, None, stage if pipeline else None, pipeline)
        assert [name for name in found if "frequency" in name], "a step may depend on it"
        tensors |= found
    save(storage.uri, 3, tensors, values=values)
    result, file = export(storage, kind)
    assert result.exit_code == 0, result.output
    state = torch.load(file, weights_only=True)["model"] if kind == "torch" else load_file(file)
    nn.Sequential(*(Rotary() for _ in range(stages))).load_state_dict(state)


def test_what_an_earlier_version_did_not_store_is_told(storage: LocalStorage) -> None:
    tensors, values = captured(*trained())
    del values["params"]
    save(storage.uri, 3, tensors, values=values)
    result, _ = export(storage)
    assert result.exit_code == 1
    assert f"{NAME} has 2 parameter groups" in result.output
    assert "--format safetensors --optimizer" in result.output
    assert export(storage, "safetensors")[0].exit_code == 0


# ---------------------------------------------------------------- forged: the hash of a manifest does not say who wrote it


def check_refused(storage: LocalStorage, where: str) -> None:
    for kind in ("safetensors", "torch"):
        result, _ = export(storage, kind)
        assert isinstance(result.exception, SystemExit), result.exception
        assert where in result.output
    with pytest.raises(StorageError, match=NAME):
        load_model(SimpleNamespace(model=lambda stage: build()[0]), f"{storage.uri}/{NAME}")


@pytest.mark.parametrize(
    "forged",
    [
        {"aliases": {"another": "nothing"}},
        {"aliases": {"another": 1}},
        {"aliases": [1]},
        {"stages": 2},
        {"stages": "2", "cuts": None},
        {"stages": 0, "cuts": None},
        {"stages": 2, "cuts": []},
        {"stages": 2, "cuts": ["1"]},
        {"stages": 2, "cuts": [1], "chunks": 0},
        {"stages": 2, "cuts": [1], "layers": [1, 2, 3]},
        {"stages": 2, "cuts": [1], "layers": "abc"},
        {"stages": 2, "cuts": [1], "layers": []},
        {"stages": 2, "cuts": None, "chunks": "1"},
    ],
    ids=str,
)
def test_a_forged_manifest_is_told_by_its_name(storage: LocalStorage, forged: dict[str, Any]) -> None:
    tensors, values = captured(*trained())
    save(storage.uri, 3, tensors, values=values | forged)
    check_refused(storage, f"{NAME}/manifest.json")


@pytest.mark.parametrize(
    ("path", "chunks"),
    [("stage-0/model/weight", 1), ("stage-7/model/0.weight", 1), ("stage-0/model/x.0.weight", 2), ("stage-0/model/5.0.a", 2)],
)
def test_a_tensor_of_no_stage_is_told(storage: LocalStorage, path: str, chunks: int) -> None:
    spread = {"stages": 2, "chunks": chunks, "cuts": list(range(1, 2 * chunks)), "ties": []}
    save(storage.uri, 3, {path: torch.zeros(2)}, values=spread)
    check_refused(storage, f"{NAME}/manifest.json")


@pytest.mark.parametrize("aliases", ['{"aliases": {"another": "nothing"}}', '{"aliases": [1]}'])
def test_a_name_of_a_stage_for_nothing_is_told(storage: LocalStorage, aliases: str) -> None:
    spread = {"stages": 1, "chunks": 1, "cuts": None, "ties": []}
    stage = torch.tensor(list(aliases.encode()), dtype=torch.uint8)
    save(storage.uri, 3, {"stage-0/values": stage, "stage-0/model/a": torch.zeros(2)}, values=spread)
    check_refused(storage, NAME)


def test_state_of_no_parameter_that_the_optimizer_has_is_told(storage: LocalStorage) -> None:
    tensors, values = captured(*trained())
    save(storage.uri, 3, tensors, values=values | {"params": [["0.weight"], []]})
    result, _ = export(storage)
    assert isinstance(result.exception, SystemExit)
    assert NAME in result.output
