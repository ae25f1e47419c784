"""Checkpoints go to a directory that a worker's node sees as the supervisor's does, or the worker is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store import OWNER, own

from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.runtime import shared
from raytrain_ft.runtime.shared import check_checkpoints
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
    return SimpleNamespace(stored_in=str(place), directory=directory, run_id="run")


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
