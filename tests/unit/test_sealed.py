"""The task's way to the workers: through a file that is believed only if it holds what the driver has written, and past Ray's
object store, which keeps nothing for a supervisor that is started again."""

from __future__ import annotations

import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.cloudpickle
from torch import nn
from torch.optim import SGD

import raytrain_ft as ft
from raytrain_ft import trainer as trainers
from raytrain_ft.errors import StorageError
from raytrain_ft.runtime import notes, sealed

KEPT_BYTES = 100 * 1024
"""What Ray keeps of an actor's argument for as long as the actor may be started again."""


def spec_of(directory: Path, task: bytes, run_id: str = "0123456789ab") -> Any:
    return SimpleNamespace(directory=directory, run_id=run_id, task=sealed.digest_of(task), nonce="n")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_task_is_what_it_was_and_is_gone_with_its_run(tmp_path: Path) -> None:
    task = pickle.dumps({"images": bytes(3 * KEPT_BYTES)})
    spec = spec_of(tmp_path / "run", task)
    sealed.write(spec, task)
    (file,) = (tmp_path / "run").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sealed.load(spec) == {"images": bytes(3 * KEPT_BYTES)}
    sealed.remove(spec)
    sealed.remove(spec)
    assert names(tmp_path / "run") == []
    with pytest.raises(StorageError, match=r"task-0123456789ab\.pickle cannot be read"):
        sealed.load(spec)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("how", ["replaced", "longer", "shorter"])
def test_what_the_driver_has_not_written_is_not_unpickled(how: str, tmp_path: Path) -> None:
    """Whoever may write to the directory runs no code on the workers with that."""
    task = pickle.dumps("a task")
    spec = spec_of(tmp_path, task)
    sealed.write(spec, task)
    (file,) = tmp_path.iterdir()
    bomb = pickle.dumps(Bomb(tmp_path / "mark"))
    file.write_bytes({"replaced": bomb, "longer": task + bomb, "shorter": task[:-1]}[how])
    with pytest.raises(StorageError, match="is not what the run's driver has written"):
        sealed.load(spec)
    assert not (tmp_path / "mark").exists()


def test_a_run_puts_away_the_tasks_of_earlier_ones_and_nothing_else(tmp_path: Path) -> None:
    task = pickle.dumps("a task")
    spec = spec_of(tmp_path, task)
    for earlier in ("ba9876543210", "0000aaaa1111"):
        sealed.write(spec_of(tmp_path, task, earlier), task)
    (tmp_path / ".task-ba9876543210.pickle.0123456789abcdef.partial").write_bytes(task[:3])
    (tmp_path / "task-of-mine.pickle").write_bytes(task)
    sealed.write(spec, task)
    notes.past_of(spec)
    assert names(tmp_path) == ["nonce", "task-0123456789ab.pickle", "task-of-mine.pickle"]


class Weighty(ft.TrainTask):
    """As a script's whose data is a global variable."""

    def __init__(self) -> None:
        self.images = bytes(3 * KEPT_BYTES)

    def model(self, stage: int) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, params: Any) -> Any:
        return SGD(params, lr=0.1)

    def dataset(self) -> Any:
        return self.images

    def loss(self, output: Any, batch: Any) -> Any: ...


def test_what_a_supervisor_is_started_with_is_small_and_the_task_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts no actor again whose arguments were larger: nobody refers to them any more."""
    monkeypatch.setattr(trainers.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(trainers, "_account_of", lambda name: None)
    seen: list[tuple[Any, Any]] = []

    def train(self: ft.Trainer, spec: Any, *about: Any) -> None:
        seen.append((spec, sealed.load(spec)))
        raise KeyboardInterrupt

    monkeypatch.setattr(ft.Trainer, "_train", train)
    run = ft.RunConfig(name="run", storage_path=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        ft.Trainer(Weighty(), max_steps=1, global_batch_size=1, run_config=run, quiet=True).fit()
    ((spec, task),) = seen
    assert len(ray.cloudpickle.dumps(spec)) < KEPT_BYTES // 2  # pyright: ignore[reportPrivateImportUsage]
    assert task.images == bytes(3 * KEPT_BYTES)
    assert [name for name in names(tmp_path / "run") if "task" in name] == []
