"""What plain PyTorch can do, and the same numbers: against an ordinary loop over the same global batches in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import promise_kept, train
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.places import Place
from raytrain_ft.policy.sampling import Position, Sampling, next_batch, sample_ids
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.training.export import open_checkpoint, state_dicts
from raytrain_ft.training.random import seed_all

STEPS, BATCH, SEED = 12, 24, 7


class Autoencoder(nn.Module):
    """Tied weights, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.encode = nn.Linear(8, 4, bias=False)
        self.unused = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(self.encode(self.frozen(x)))
        return code @ self.encode.weight + self.bias


class Everything(ft.TrainTask):
    """Parameter groups, tied and frozen and unused parameters, a schedule; clipping and accumulation come from the Trainer."""

    def model(self, stage: int) -> nn.Module:
        return Autoencoder()

    def optimizer(self, params):
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.05], total_steps=STEPS + 1)

    def dataset(self):
        return TensorDataset(torch.randn(100, 8, generator=torch.Generator().manual_seed(3)))

    def inputs(self, batch):
        return batch[0]

    def loss(self, output, batch):
        return mse_loss(output, batch[0])


class Classifier(ft.TrainTask):
    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)

    def dataset(self):
        inputs = torch.randn(100, 8, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))

    def loss(self, output, batch):
        return cross_entropy(output, batch[1])


def plain_loop(task: ft.TrainTask, *, clip: float | None = None, bf16: bool = False) -> nn.Module:
    """The ordinary loop of a person who has never heard of us, on one process."""
    seed_all(SEED)
    model = task.model(0)
    optimizer = task.optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = task.scheduler(optimizer)
    tensors = task.dataset().tensors
    sampling, position = Sampling(100, BATCH, SEED), Position()
    for _ in range(STEPS):
        batch, position = next_batch(sampling, position)
        ids = torch.from_numpy(sample_ids(sampling, batch.epoch, range(batch.start, batch.stop)).copy())
        data = [tensor[ids] for tensor in tensors]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = task.loss(model(task.inputs(data)), data)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_groups_ties_frozen_unused_clipping_accumulation_and_schedule(cluster, workers: int, tmp_path: Path) -> None:
    task = Everything()
    settings = {"global_batch_size": BATCH, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "steps": STEPS}
    result = train(tmp_path, "everything", task=task, workers=workers, **settings)
    ours, plain = ft.load_model(task, result).state_dict(), plain_loop(task, clip=0.1).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_bf16_autocast_computes_in_bf16_and_updates_in_fp32(cluster, tmp_path: Path) -> None:
    task = Classifier()
    result = train(tmp_path, "bf16", task=task, workers=1, global_batch_size=BATCH, steps=STEPS, precision="bf16")
    ours = ft.load_model(task, result).state_dict()
    plain, full = plain_loop(task, bf16=True).state_dict(), plain_loop(task).state_dict()
    for name, value in plain.items():
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(ours[name], full[name]) for name in full)


def test_clipping_accumulation_and_bf16_beside_kills(undisturbed, tmp_path: Path) -> None:
    """A worker dies between two micro-batches, with the reduction under way, and where the clipped update is half done."""
    how = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "precision": "bf16"}
    faults = [
        ft.FailAt(rank=0, step=5, phase="forward", micro_batch=1),
        ft.FailAt(rank=1, step=12, phase="reduced", bucket=1),
        ft.FailAt(rank=2, step=19, phase="update"),
    ]
    result = train(tmp_path, "run", faults=faults, **how)
    assert result.digest == undisturbed(**how).digest != undisturbed().digest
    assert promise_kept(result) == []
    assert sum(len(recovery.lost) for recovery in result.recoveries) == len(faults)
    assert {recovery.guarantee for recovery in result.recoveries} == {Guarantee.EXACT}


class FromFiles(Toy):
    """The same samples, in Parquet files."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def dataset(self):
        return ft.ArrowDataset(self.directory, transform=lambda row: (row["inputs"], row["label"]))


def test_parquet_files_beside_a_kill(undisturbed, tmp_path: Path) -> None:
    """The bits are those of an undisturbed run on the same samples in memory."""
    inputs, labels = (tensor.numpy() for tensor in Toy().dataset().tensors)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(inputs)), inputs.shape[1])
    table = pa.table({"inputs": rows, "label": pa.array(labels)})
    (tmp_path / "data").mkdir()
    for number, start in enumerate(range(0, len(labels), 200)):
        pq.write_table(table.slice(start, 200), tmp_path / "data" / f"{number}.parquet", row_group_size=64)
    result = train(tmp_path, "run", task=FromFiles(tmp_path / "data"), faults=[ft.FailAt(rank=1, step=10, phase="data")])
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert len(result.recoveries) == 1


class Plateau(Toy):
    """The learning rate is lowered whenever the loss is not far below the best so far: nearly every step's loss counts."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.1)


def schedule_of(result: ft.Result) -> dict[str, Any]:
    """Of the run's last step."""
    assert result.checkpoint is not None
    return state_dicts(open_checkpoint(Place(result.checkpoint)))["scheduler"]


@pytest.mark.parametrize(("update", "ranks"), [("barrier", [1]), pytest.param("wait_free", [0, 1, 2], marks=pytest.mark.long)])
def test_a_schedule_that_is_given_the_loss_beside_kills(undisturbed, tmp_path: Path, update: Any, ranks: list[int]) -> None:
    """Killed between reduce and update: the others give their schedules the loss of the step all the same, and who takes the
    place has theirs."""
    faults = [ft.FailAt(rank=rank, step=8 + 6 * rank, phase="reduced", bucket=2) for rank in ranks]
    result = train(tmp_path, "run", task=Plateau(), faults=faults, update=update)
    expected = undisturbed(task=Plateau(), update=update)
    assert result.digest == expected.digest
    assert schedule_of(result) == schedule_of(expected)
    assert schedule_of(result)["_last_lr"][0] < 1e-2 / 4, "so often was it lowered that the bits depend on it"
    assert promise_kept(result) == []
    assert sum(len(recovery.lost) for recovery in result.recoveries) == len(faults)
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)
    assert [recovery.step for recovery in result.recoveries] == [9 + 6 * rank for rank in ranks], "no step is redone"
