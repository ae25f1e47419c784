"""Bad input gets a typed error that names value, place and remedy, early, and leaves nothing behind."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import ray
import torch
from conftest import train
from ray.util import list_named_actors
from torch.nn.functional import cross_entropy
from toy import Toy

import raytrain_ft as ft
from raytrain_ft import FailAt, trainer
from raytrain_ft.errors import ConfigError, NonFiniteLossError, RunActiveError, TaskError, UndoRefusedError


class Sudden(Toy):
    """Its loss becomes NaN in one step; which one, the batch decides, so that all ranks are in it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def loss(self, output, batch):
        self.calls += 1
        return cross_entropy(output, batch[1]) * (math.nan if self.calls == self.at else 1.0)


class Broken(Toy):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def loss(self, output, batch):
        raise KeyError(self.what)


class Empty(Toy):
    def dataset(self):
        return torch.utils.data.TensorDataset(torch.zeros(0, 16))


class Lacking(ft.TrainTask):
    def model(self, stage):
        return torch.nn.Linear(2, 2)


class Locked(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Half(Toy):
    def model(self, stage):
        return super().model(stage).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "num_workers=0"),
        ({"workers": (0, 2)}, r"num_workers=\(0, 2\)"),
        ({"workers": (True, 2)}, r"num_workers=\(True, 2\)"),
        ({"global_batch_size": 2}, "global_batch_size=2"),
        ({"steps": 0}, "max_steps=0"),
        ({"precision": "fp8"}, "fp8"),
        ({"update": "sometimes"}, "sometimes"),
        ({"max_step": 5}, "did you mean 'max_steps'"),
        ({"update": "wait_free", "max_grad_norm": 1.0}, "max_grad_norm"),
        ({"task": Lacking()}, "lacks optimizer, dataset, loss"),
        ({"task": Toy}, "add parentheses"),
        ({"task": Empty()}, "empty"),
        ({"task": Locked()}, "Locked cannot be sent to the workers"),
        ({"task": Half()}, "bfloat16"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refused_before_any_worker_starts(cluster, arguments, words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, "bad", **arguments)
    assert list_named_actors(all_namespaces=True) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "a/b", "x" * 101, "-rf", "a\0b", "a b"])
def test_hostile_names_are_refused(cluster, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RunConfig"):
        train(tmp_path, name)


def test_an_optimizer_that_cannot_be_undone(cluster, tmp_path: Path) -> None:
    task = Toy(optimizer="AMSGrad")
    with pytest.raises(UndoRefusedError, match="barrier"):
        train(tmp_path, "refused", task=task, update="wait_free", strategy="replication")
    with pytest.warns(UserWarning, match="Falling back"):
        result = train(tmp_path, "fallback", task=task, workers=2, update="wait_free", steps=3)
    assert result.metrics["step"] == 3


def test_a_user_exception_on_one_rank_ends_the_run_at_once(cluster, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=4, phase="forward", action="exception")
    with pytest.raises(TaskError, match="rank 1") as failure:
        train(tmp_path, "one-rank", workers=2, num_spares=0, faults=[fault])
    assert "ChaosError" in str(failure.value)
    assert "Traceback" in str(failure.value)
    assert list_named_actors(all_namespaces=True) == []


def test_a_broken_task_shows_its_own_traceback(cluster, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="KeyError: 'no such column'"):
        train(tmp_path, "broken", workers=2, task=Broken("no such column"))


def test_a_loss_that_is_not_finite(cluster, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match="step 4"):
        train(tmp_path, "nan-raise", workers=2, task=Sudden(at=5))
    result = train(tmp_path, "nan-skip", workers=2, task=Sudden(at=5), on_non_finite="skip", steps=10)
    proof = result.audit()
    assert proof.ok
    assert proof.samples_lost == 32
    assert math.isfinite(result.metrics["loss"])


def test_two_runs_of_one_name(cluster, tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Holder:
        def ready(self) -> bool:
            return True

    holder = Holder.options(name="supervisor:taken", namespace="raytrain_ft").remote()
    assert ray.get(holder.ready.remote(), timeout=30)
    try:
        with pytest.raises(RunActiveError, match="taken"):
            train(tmp_path, "taken")
    finally:
        ray.kill(holder)


def test_a_storage_path_that_cannot_be_written(cluster) -> None:
    with pytest.raises(ConfigError, match="storage_path"):
        train(Path("/proc/nowhere"), "bad-path")


def test_nodes_with_other_code_of_this_package_are_refused(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a run send each other would be taken for something else."""
    monkeypatch.setattr(trainer, "CODE", "0123456789abcdef")
    words = r"has other code of raytrain_ft \([0-9a-f]{16}\) than the script that started the run \(0123456789abcdef\)"
    with pytest.raises(ConfigError, match=words) as refused:
        train(tmp_path, "other")
    assert "install the same commit on all nodes" in str(refused.value)
    assert list_named_actors(all_namespaces=True) == []
    assert list((tmp_path / "other").glob("*.jsonl")) == [], "it has begun nothing"
