"""`raytrain-ft plan`: what it prints, and how it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raytrain_ft import model_checks
from raytrain_ft.cli import plan
from raytrain_ft.cli.main import main
from raytrain_ft.config import ParallelismConfig
from raytrain_ft.loading import load_task
from raytrain_ft.settings import TrainSettings
from raytrain_ft.training.split import measure_cuts

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft


class Layers(ft.TrainTask):
    def model(self, stage):
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(8, 4))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self):
        return TensorDataset(torch.randn(32, 16), torch.zeros(32, dtype=torch.int64))

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])


class Sized(Layers):
    def __init__(self, width, depth=1):
        assert (width, depth) == (3, 2)


class Whole(Layers):
    def model(self, stage):
        return nn.Bilinear(2, 2, 2)


class Bad(Layers):
    def loss(self, output, batch):
        raise KeyError("labels")


class Empty(Layers):
    def dataset(self):
        return []


class Lacking(ft.TrainTask):
    pass


task = Layers()
number = 5
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "planned_job.py"
    path.write_text(JOB)
    (tmp_path / "broken_job.py").write_text("import nothing_of_that_name")
    return path


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console was made when the module was imported, with whatever COLUMNS said then."""
    monkeypatch.setattr(plan.console, "width", 200)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_what_it_recommends(job: Path) -> None:
    result = call(f"{job}:Layers", "--stages", 3, "--batch-size", 24, "--budget", 200_000)
    assert result.exit_code == 0, result.output
    for part in (
        "3 stages in one copy on 3 nodes, 6 micro-batches",
        "global checkpoint",
        "logging, with",
        "every boundary",
        "optimum",
        "greedy (the paper's)",
        "0-1 | 2",  # only the boundary that 8 numbers cross fits
        "over the budget of 200 KB",
        "Logging for stages 0, 1, 2",
    ):
        assert part in result.output
    sizes = [line for line in result.output.splitlines() if "12.3 KB" in line and "yes" not in line]
    assert sizes, "24 samples x 64 floats, there and back"


def test_replicas_and_nodes(job: Path) -> None:
    apart = call(f"{job}:task", "--stages", 3, "--replicas", 2)
    assert "Replication for stages 0, 1, 2" in apart.output
    assert "Nothing is logged" in apart.output
    assert "every boundary" not in apart.output
    half = call(f"{job}:task", "--stages", 3, "--replicas", 2, "--nodes", 3)
    assert "Replication for stages 0, 1, 2" in half.output
    together = call(f"{job}:Sized(3, depth=2)", "--stages", 3, "--replicas", 2, "--nodes", 1)
    assert "The replicas of stages 0, 1, 2 share a node" in together.output
    alone = call(f"{job}:task", "--stages", 2, "--nodes", 1)
    assert "All stages are on one node" in alone.output


def test_the_stages_are_those_that_a_run_has(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run cuts by the samples of all replicas together."""
    found: list[int] = []

    def measured(task: Any, stages: int, samples: int) -> tuple[int, ...]:
        found.append(samples)
        return measure_cuts(task, stages, samples)

    for module in (plan, model_checks):
        monkeypatch.setattr(module, "measure_cuts", measured)
    result = call(f"{job}:task", "--stages", 2, "--replicas", 4, "--micro-batches", 2, "--batch-size", 32)
    assert result.exit_code == 0, result.output
    how = ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=2, split="auto")
    model_checks.pipeline_of(load_task(f"{job}:task"), how, TrainSettings(max_steps=1, global_batch_size=32))
    assert found == [16, 16]


def test_a_module_and_a_target(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # to which a module's name adds this directory
    result = call("planned_job:task", "--stages", 2, "--target", 1000, "--parallel-recovery")
    assert result.exit_code == 0, result.output
    assert "checkpoint" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("JOB", "--stages", "2"), "give JOB:TASK"),
        (("JOB:Layers",), "--stages"),
        (("JOB:Layers", "--stages", "1"), "1 is not in the range"),
        (("JOB:Layers", "--stages", "4"), "3 layers to train"),
        (("JOB:Layers", "--stages", "3", "--nodes", "4"), "3 workers need 1 to 3"),
        (("JOB:Layers", "--stages", "3", "--batch-size", "10"), "need a multiple of 6"),
        (("JOB:Layers", "--stages", "3", "--budget", "10"), "holds no boundary at all"),
        (("JOB:Layers", "--stages", "3", "--target", "1e-9"), "still leaves"),
        (("JOB:Layers", "--stages", "3", "--budget", "10", "--target", "1"), "exclude each other"),
        (("JOB:Layers", "--stages", "3", "--bandwidth", "inf"), "'--bandwidth': inf is not finite"),
        (("JOB:Nobody", "--stages", "2"), "its tasks: Bad, Empty, Lacking, Layers, Sized, Whole, task"),
        (("JOB:number", "--stages", "2"), "the task is a int"),
        (("os:mkdir('made')", "--stages", "2"), "the task is a builtin_function"),
        (("JOB:Sized", "--stages", "2"), "Give its arguments, as in 'Sized(...)'"),
        (("JOB:Sized(open('x'))", "--stages", "2"), "plain values"),
        (("JOB:a b", "--stages", "2"), "plain values"),
        (("JOB:Lacking", "--stages", "2"), "lacks model, optimizer, dataset, loss"),
        (("JOB:Whole", "--stages", "2"), "no torch.nn.Sequential"),
        (("JOB:Empty", "--stages", "2"), "TrainTask.dataset(): list is empty"),
        (("JOB:Bad", "--stages", "2"), "stage 1 fails on a micro-batch of 4 samples"),
        (("missing.py:Layers", "--stages", "2"), "there is no file missing.py"),
        (("no_such_module:Layers", "--stages", "2"), "cannot be imported: ModuleNotFoundError"),
        (("BROKEN:Layers", "--stages", "2"), "nothing_of_that_name"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input(job: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # to which a module's name adds this directory
    given = [part.replace("JOB", str(job)).replace("BROKEN", str(job.parent / "broken_job.py")) for part in arguments]
    result = call(*given)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output
    assert not Path("made").exists()
