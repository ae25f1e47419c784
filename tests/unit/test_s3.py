"""Checkpoints in an object store, spoken to as in production: a real server of S3's protocol on the loopback device."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from s3_server import BUCKET, free_port, s3_server, uri
from store import OWNER, newest, own, save, state, step_of

import raytrain_ft as ft
from raytrain_ft.cli.main import main
from raytrain_ft.errors import ConfigError, LockedError, StorageError
from raytrain_ft.follow import recorded
from raytrain_ft.places import Place
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.prepare import Given, _checkpoints, directory_of
from raytrain_ft.runtime import report
from raytrain_ft.runtime.event_log import EventLog
from raytrain_ft.settings import TrainSettings
from raytrain_ft.storage import checkpoint, filesystem, lock, retention
from raytrain_ft.storage.filesystem import Storage, open_storage, parent, within
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.shard import Piece, encode
from raytrain_ft.training import checkpointer
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.export import open_checkpoint
from raytrain_ft.training.settings import Target

pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that holds one bucket."""
    with s3_server(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def storage(server: int, request: pytest.FixtureRequest) -> Storage:
    found = open_storage(uri(server, f"runs/{re.sub('[^a-z0-9]', '-', request.node.name)}"))
    own(found)
    return found


def test_checkpoints_are_written_selected_read_and_deleted(storage: Storage) -> None:
    for step in (10, 20, 30):
        save(storage.place, step, state(step), count=3)
    assert [(found.name.step, found.complete) for found in checkpoint.found(storage)] == [(30, True), (20, True)]
    warnings: list[str] = []
    content = newest(storage, warnings)
    assert content is not None
    assert (step_of(content), warnings) == (30, [])


def test_places_within_a_uri_that_names_its_server(server: int) -> None:
    bare = Place(uri(server, "runs/nested"))
    place = within(bare, "run", "checkpoints")
    assert place == Place(uri(server, "runs/nested/run/checkpoints"))
    assert parent(place) == (Place(uri(server, "runs/nested/run")), "checkpoints")
    inner = open_storage(place)
    own(inner)
    inner.put("file", [memoryview(b"here")])
    assert "file" in open_storage(uri(server, "runs/nested/run/checkpoints")).names()


@pytest.mark.parametrize(
    ("place", "inside"),
    [("/a", "/a/b"), ("/a/", "/a/b"), (".", "./b"), ("s3://k/r/", "s3://k/r/b"), ("s3://k?x=/", "s3://k/b?x=/")],
)
def test_places_within_a_place(place: str, inside: str) -> None:
    assert within(Place(place), "b") == Place(inside)
    directory, name = parent(Place(inside))
    assert name == "b"
    assert within(directory, name) == Place(inside)


def test_a_large_tensor_takes_several_parts(storage: Storage) -> None:
    tensor = torch.arange(5_000_000, dtype=torch.int64)
    save(storage.place, 1, {"t": tensor}, count=2)
    content = newest(storage, [])
    assert content is not None
    found = b"".join(bytes(part.data) for part in content.pieces["t"])
    assert found == tensor.numpy().tobytes()


def test_a_damaged_object_is_passed_over_and_named(storage: Storage) -> None:
    for step in (10, 20):
        save(storage.place, step, state(step))
    name = "step-000000020-e1-i1/shard-00000-of-00001.arrow"
    data = bytearray(storage.view(name).to_pybytes())
    data[len(data) // 2] ^= 1
    storage.put(name, [memoryview(data)])
    warnings: list[str] = []
    content = newest(storage, warnings)
    assert content is not None
    assert step_of(content) == 10
    assert name in warnings[0]


def test_what_broke_off_is_deleted_and_cannot_be_committed_any_more(storage: Storage) -> None:
    save(storage.place, 10, state(10))
    piece, shards = Piece("t", "torch.uint8", (8,), 0, 8), {}
    for name in (Name(20, 1, 1), Name(25, 1, 2), Name(30, 2, 3)):
        shards[name] = [checkpoint.write_shard(storage, name, 0, 1, encode([piece], memoryview(bytes(8))))]
    retention.make_room(storage, Name(25, 1, 2))
    assert [found.name.step for found in checkpoint.found(storage)] == [30, 25, 10]
    retention.sweep(storage, 2, new=True)
    assert [found.name.step for found in checkpoint.found(storage)] == [30, 10]
    for name, entries in shards.items():
        manifest = Manifest(step=name.step, epoch=name.epoch, incarnation=name.incarnation, shards=entries)
        if name.epoch == 2:
            checkpoint.commit(storage, manifest)
        else:
            with pytest.raises(StorageError, match="given up"):
                checkpoint.commit(storage, manifest)
    assert [found.name.step for found in checkpoint.found(storage) if found.complete] == [30, 10]


def test_the_right_to_write(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 1.0)
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    save(storage.place, 10, state(10))
    held = lock.acquire(storage, "another")
    assert held.owner.epoch == OWNER.epoch + 1
    with pytest.raises(LockedError, match="not committed"):
        save(storage.place, 20, state(20))
    with pytest.raises(LockedError, match="another"):
        lock.acquire(storage, "a third")
    held.release()
    content = newest(storage, [])
    assert content is not None
    assert step_of(content) == 10


UPLOAD = """
import sys, time
from commits import job
from raytrain_ft.storage import checkpoint, filesystem
from raytrain_ft.storage.shard import Piece, encode
def parts():
    for _ in range(4):
        yield memoryview(bytes(6 * 2**20))
    print("halfway", flush=True)
    time.sleep(60)
storage = filesystem.open_storage(sys.argv[1])
storage.put("step-000000020-e1-i1/" + sys.argv[2], parts())
"""


@pytest.mark.parametrize("file", ["shard-00000-of-00001.arrow", "manifest.json"])
def test_an_upload_that_is_killed_leaves_nothing_that_is_selected(storage: Storage, file: str) -> None:
    save(storage.place, 10, state(10))
    path = os.pathsep.join([str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(
        [sys.executable, "-c", UPLOAD, storage.place.with_credentials, file],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"halfway\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert storage.size(f"step-000000020-e1-i1/{file}") is None
    content = newest(storage, [])
    assert content is not None
    assert step_of(content) == 10
    save(storage.place, 30, state(30))


def test_a_put_that_fails_halfway_leaves_nothing(storage: Storage) -> None:
    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(11 * 2**20))
        raise StorageError("the world is over")

    with pytest.raises(StorageError, match="the world is over"):
        storage.put("step-000000020-e1-i1/manifest.json", parts())
    assert storage.size("step-000000020-e1-i1/manifest.json") is None


CALLS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda storage: storage.put("a/b", [memoryview(b"x")]),
    "view": lambda storage: storage.view("a/b"),
    "names": lambda storage: storage.names(),
    "size": lambda storage: storage.size("a/b"),
    "delete": lambda storage: storage.delete("a"),
}


@pytest.mark.parametrize("call", ["put", "view"])
def test_a_bucket_that_is_not_there(server: int, call: str) -> None:
    with pytest.raises(StorageError, match=r"(?i)no.?such.?bucket|not exist|404|not found"):
        CALLS[call](open_storage(uri(server, "runs", "another")))


@pytest.mark.parametrize("call", CALLS)
def test_an_endpoint_that_refuses_connections(call: str) -> None:
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"(?i)connect|network|curl"):
        CALLS[call](open_storage(uri(free_port(), "runs")))
    assert time.monotonic() - began < 15


def test_an_endpoint_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = filesystem.S3_LIMITS | {"connect_timeout": 1.0, "request_timeout": 1.0}
    monkeypatch.setattr(filesystem, "S3_LIMITS", limits)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(StorageError):
            open_storage(uri(silent.getsockname()[1], "runs")).size("a/b")
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("bad", ["s3://", "s3://bucket/runs?no_such_option=1", "gs2://bucket"])
def test_a_uri_that_cannot_be_used(bad: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(bad)


def test_a_path_that_pyarrow_refuses_late_is_told() -> None:
    """`f"{base}/runs"`, and the base ends with a slash: it is noticed when something is looked for."""
    storage = open_storage(uri(1, "/runs"))
    with pytest.raises(StorageError, match="//runs"):
        storage.size("writer.json")
    with pytest.raises(StorageError, match="//runs"):
        storage.names()


# ---------------------------------------------------------------- credentials


SECRETS = ("SESAME", "OPENS", "THIS")


def secret_uri(port: int, path: str, bucket: str = BUCKET) -> str:
    """With a password that is "SESAME/OPENS", and an option that pyarrow does not know yet."""
    return uri(port, path, bucket).replace("key:secret", "key:SESAME%2FOPENS")


def assert_none_is_told(words: object) -> None:
    for secret in SECRETS:
        assert secret not in str(words)


def trace(error: pytest.ExceptionInfo[BaseException]) -> str:
    """All that a program prints that ends with it."""
    return "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "bad",
    [
        "s3://key:SESAME/OPENS@bucket/runs",  # "/" must be "%2F"
        "s3://key:SESAME?OPENS@bucket/runs",
        "s3://key:SESAME OPENS@bucket/runs",
        "s3:/key:SESAME@bucket/runs",
        "s3://bucket/runs?secret_key=SESAME",
        "gs://user:SESAME@bucket/runs",
        "gopher://key:SESAME@host/runs",
        "abfss://runs:SESAME@account.dfs.core.windows.net/a?credential_kind=environment&client_secret=OPENS&tenant_id=THIS",
    ],
)
def test_a_place_that_cannot_be_used_is_told_without_its_credentials(bad: str) -> None:
    with pytest.raises((ConfigError, StorageError)) as error:
        open_storage(bad).size("a/b")
    assert_none_is_told(trace(error))
    run = ft.RunConfig(name="digits", checkpoint_config=ft.CheckpointConfig(storage_path=bad))
    given = Given(TrainSettings(max_steps=10, global_batch_size=4), ft.ScalingConfig(num_workers=1), run, ft.RecoveryConfig())
    with pytest.raises((ConfigError, StorageError)) as error:
        _checkpoints(given, Path("/runs/digits"), Sampling(8, 4, 0), [])
    assert_none_is_told(trace(error))
    for command in (["checkpoints", "list", bad], ["checkpoints", bad], ["audit", bad], ["report", bad], [bad]):
        said = CliRunner().invoke(main, command)
        assert said.exit_code
        assert_none_is_told(said.output)
    for wrong in (
        lambda: ft.load_model(None, f"{bad}/final.arrow"),
        lambda: ft.RunConfig(checkpoint_config=ft.CheckpointConfig(storage_path=Path(bad))),  # pyright: ignore
        lambda: directory_of(bad, "digits"),
        lambda: ft.attach(bad),
        lambda: ft.ArrowDataset(bad),
    ):
        with pytest.raises((ConfigError, StorageError)) as error:
            wrong()
        assert_none_is_told(trace(error))


def test_a_url_that_an_error_names_is_told_without_its_signature() -> None:
    """Azure's client puts the whole one there."""
    place = f"abfss://runs@127.0.0.1:{free_port()}/a?enable_tls=false&sv=1&sig=SESAME"
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:[0-9]+\. ") as error:
        open_storage(place).size("a/b")
    assert_none_is_told(trace(error))


def test_nothing_that_is_told_of_checkpoints_has_the_credentials(
    server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with them: it is in the run's records, its report, and what `fit` and `attach` show."""
    monkeypatch.setattr(checkpointer, "PATIENCE_S", 0.0)
    monkeypatch.setattr(lock, "LEASE_S", 1.0)
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    place = within(Place(secret_uri(server, "secret")), "digits", "checkpoints")
    found = open_storage(place)
    own(found)
    with pytest.raises(ConfigError, match="No Arrow or Parquet file") as error:  # there are others
        ft.ArrowDataset(secret_uri(server, "secret/digits/checkpoints"))
    assert_none_is_told(trace(error))
    log = EventLog(tmp_path / "events.jsonl")
    log.append(m.RunStarted(run_id="r", details={"name": "digits", "max_steps": 30, "checkpoints": str(place)}))
    told: list[str] = []

    def tell(event: str, fields: dict[str, Any]) -> None:
        told.append(str(fields))
        if event == "CheckpointFailed":
            log.append(m.CheckpointFailed(at=1.0, member="w0", **fields))
        elif event == "CheckpointCommitted":
            log.append(m.CheckpointCommitted(at=1.0, member="w0", **fields))

    target = Target(place=place, owner=OWNER.owner, epoch=OWNER.epoch)
    one = Checkpointer(target, lambda: ([("w", torch.zeros(8))], {}), lambda: Tuner(budget=0.5, window=4, fixed=5), tell)
    one.begin(0, 1, 1, 0)
    try:
        one.take(5, lambda: None)
        one.take(6, lambda: None)  # the one before is still being written
        one.await_durable(lambda: None, 60.0)
        other = lock.acquire(found, "another")
        one.take(7, lambda: None)
        one.await_durable(lambda: None, 60.0)
    finally:
        one.close(30.0)
    with pytest.raises(LockedError) as error:
        lock.acquire(found, "a third")
    other.release()
    log.note("RunFailed", at=3.0, state="ERRORED", error=["LockedError", str(error.value)])
    log.close()
    report.write(tmp_path)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "is slow or hangs: the checkpoint before" in written
    assert "another run has taken the right to write" in written
    assert "is being written by run another" in written
    for words in (written, told, trace(error), repr(target), f"{found.uri} {found.place} {found.place!r}"):
        assert_none_is_told(words)
    newest = str(within(place, "step-000000005-e1-i1"))
    account = recorded(tmp_path)
    assert account is not None
    assert account["checkpoint"] == newest
    assert newest.startswith(
        "s3://bucket/secret/digits/checkpoints/step-000000005-e1-i1?scheme=http&endpoint_override=127.0.0.1:"
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert open_checkpoint(Place(newest)).manifest.step == 5, "with credentials from the environment"
