"""The run's records and its checkpoints go to directories that every node sees as the supervisor's does, or who does not see
them is refused: a worker before it builds anything, the driver before it shows anything."""

from __future__ import annotations

import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store import OWNER, own

import raytrain_ft as ft
from raytrain_ft import trainer as trainers
from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.places import Place
from raytrain_ft.runtime import shared
from raytrain_ft.runtime.shared import check_checkpoints, check_directory
from raytrain_ft.runtime.worker import Worker
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.lock import Owner

EPOCH = 2
LATER = Owner(owner="later", epoch=EPOCH + 1, host="nowhere", pid=1, started=0.0)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CACHED_S", 0.2)
    monkeypatch.setattr(shared, "LOOK_S", 0.2)
    monkeypatch.setattr(shared, "POLL_S", 0.05)


def spec(place: Path | str, directory: Path = Path("/nowhere")) -> Any:
    return SimpleNamespace(stored_in=Place(str(place)) if place else None, directory=directory, run_id="run")


# ---------------------------------------------------------------- the run's directory


OTHERS = [None, "", "of another run"]
"""What a node may find in its own directory of that name."""


def run_in(directory: Path, found: str | None) -> Any:
    """A run whose directory has this nonce on this node, or is not there."""
    if found is not None:
        directory.mkdir()
        (directory / "nonce").write_text(found)
    rules = SimpleNamespace(schedule_timeout=7.0, max_steps=1, stop_timeout=1.0, leaves_checkpoint=True)
    return SimpleNamespace(directory=directory, nonce="of this run", name="run", rules=rules, stored_in=None, run_id="run")


@pytest.mark.parametrize("found", OTHERS)
def test_a_node_that_does_not_see_the_runs_directory_is_refused(tmp_path: Path, found: str | None) -> None:
    words = rf"RunConfig\.storage_path: node 10\.0\.0\.7 does not see the run's directory {tmp_path}/run\. Use a path that is"
    run = run_in(tmp_path / "run", found)
    with pytest.raises(ConfigError, match=words):
        check_directory(run, "10.0.0.7")
    worker, built = worker_of(run)
    with pytest.raises(ConfigError, match=words):
        worker._build()
    assert built == []
    run.directory.mkdir(exist_ok=True)
    (run.directory / "nonce").write_text(run.nonce)
    check_directory(run, "10.0.0.7")


def test_a_worker_looks_for_the_place_of_checkpoints_before_it_builds_anything(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "of this run")
    run.stored_in = Place(str(tmp_path / "checkpoints"))
    worker, built = worker_of(run)
    with pytest.raises(ConfigError, match="does not see the run's checkpoints"):
        worker._build()
    assert built == []


def worker_of(run: Any) -> tuple[Any, list[str]]:
    """One that is to be built, and what it has built."""
    worker: Any = object.__new__(Worker)
    built: list[str] = []
    worker._spec, worker._host, worker._epoch = run, "10.0.0.7", EPOCH
    worker._trainee = SimpleNamespace(build=lambda: built.append("a model"))
    return worker, built


@pytest.mark.parametrize("found", [*OTHERS, "of this run"])
def test_a_driver_that_does_not_see_the_records_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    """Else it would wait for an account that is written elsewhere, and show nothing."""
    run, handed = run_in(tmp_path / "run", found), []
    account = {"state": "RUNNING"}
    monkeypatch.setattr(trainers, "watch", lambda supervisor, start_s: iter([account] if start_s == 7.0 else []))
    right: Any = SimpleNamespace(hand_over=lambda: handed.append(True))
    trainer = ft.Trainer(Nothing(), max_steps=1, global_batch_size=1)

    display: Any = SimpleNamespace()

    def follow() -> Any:
        with ExitStack() as last:
            return list(trainer._follow(run, None, display, last, right))

    if found == run.nonce:
        assert follow() == [account]
    else:
        with pytest.raises(ConfigError, match=rf"this one do not see the same {tmp_path}/run\. Use a path"):
            follow()
    assert handed == [True], "the supervisor writes there, whoever sees it"


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_interrupted_before_it_has_begun_is_not_asked_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    """Its supervisor waits for a place in the cluster, and would not hear of it for a minute."""
    run, ended = run_in(tmp_path / "run", None), []
    starting = {"recoveries": [], "warnings": [], "state": "STARTING", "world_size": 0, "loss": None, "step": 0, "seconds": 0.0}

    def accounts(*_: Any, **__: Any) -> Any:
        if begun:
            yield starting
        raise KeyboardInterrupt

    monkeypatch.setattr(trainers, "_start", lambda spec: None)
    monkeypatch.setattr(trainers, "watch", accounts)
    monkeypatch.setattr(trainers, "kept_going", lambda supervisor: nullcontext())
    monkeypatch.setattr(trainers, "_check_directory", lambda spec: None)
    monkeypatch.setattr(trainers, "Callbacks", lambda *_: SimpleNamespace(end=lambda: None, poll=lambda: None))
    monkeypatch.setattr(trainers, "_lacking", lambda spec: "")
    monkeypatch.setattr(trainers, "abort", lambda supervisor, reason, *_: ended.append(reason))
    monkeypatch.setattr(trainers, "clean_up", lambda run_id, supervisor: ended.append("cleaned up"))
    right: Any = SimpleNamespace(hand_over=lambda: None)
    with pytest.raises(KeyboardInterrupt), ExitStack() as last:
        ft.Trainer(Nothing(), max_steps=1, global_batch_size=1)._train(run, right, last)
    assert ended == ["interrupted (Ctrl-C)"] * begun + ["cleaned up"]
    assert ("takes a last checkpoint" in capsys.readouterr().out) == begun


class Nothing(ft.TrainTask):
    """Is never run."""

    def model(self, stage: int) -> Any: ...
    def optimizer(self, params: Any) -> Any: ...
    def dataset(self) -> Any: ...
    def loss(self, output: Any, batch: Any) -> Any: ...


# ---------------------------------------------------------------- the place of checkpoints


def test_a_place_that_the_supervisor_does_not_write_to_is_refused(tmp_path: Path) -> None:
    words = rf"node 10\.0\.0\.7 does not see the run's checkpoints in {tmp_path}/checkpoints: .*shared by all nodes"
    with pytest.raises(ConfigError, match=words):
        check_checkpoints(spec(tmp_path / "checkpoints"), EPOCH, "10.0.0.7")
    assert not (tmp_path / "checkpoints").exists()
    own(LocalStorage(tmp_path / "checkpoints"))  # an earlier run's, on this node's own disk
    assert OWNER.epoch < EPOCH
    with pytest.raises(ConfigError, match=words):
        check_checkpoints(spec(tmp_path / "checkpoints"), EPOCH, "10.0.0.7")


@pytest.mark.parametrize("owner", ["run", "later"])
def test_the_place_where_it_writes_is_not(tmp_path: Path, owner: str) -> None:
    """Also if another run has taken the right to write since: what may still be told of that is not this node's fault."""
    storage = LocalStorage(tmp_path)
    own(storage, LATER if owner == "later" else Owner("run", EPOCH, "nowhere", 1, 0.0))
    check_checkpoints(spec(tmp_path), EPOCH, "here")


def test_it_may_take_a_while_until_a_node_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CACHED_S", 30.0)
    later = threading.Timer(0.3, own, (LocalStorage(tmp_path / "checkpoints"), LATER))
    later.start()
    check_checkpoints(spec(tmp_path / "checkpoints"), EPOCH, "here")
    later.join()


@pytest.mark.parametrize("place", ["", "s3://bucket/runs/run/checkpoints", "/shared/runs/run/checkpoints"])
def test_what_is_no_directory_of_its_own_is_not_looked_at(place: str) -> None:
    check_checkpoints(spec(place, Path("/shared/runs/run")), EPOCH, "here")


def test_a_storage_that_does_not_answer_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(storage: LocalStorage) -> None:
        raise StorageError("it is away")

    monkeypatch.setattr(lock, "read_owner", away)
    check_checkpoints(spec(tmp_path), EPOCH, "here")
    answered = threading.Event()
    monkeypatch.setattr(lock, "read_owner", lambda storage: answered.wait(60) and None)
    check_checkpoints(spec(tmp_path), EPOCH, "here")
    answered.set()
