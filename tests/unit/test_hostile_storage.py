"""A directory of checkpoints that holds what others have put there: a typed error, nothing executed, the one before read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from store import newest, save, state, step_of, two_checkpoints

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place, told
from raytrain_ft.runtime.event_log import EventLog
from raytrain_ft.storage import checkpoint, manifest, shard
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.draft import draft_of
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.manifest import Manifest, Name, ShardEntry
from raytrain_ft.storage.pieces import Pieces
from raytrain_ft.training import resume
from raytrain_ft.training.restore import fill, make

NEW = "step-000000020-e1-i1"
SHARD = "shard-00000-of-00001.arrow"
Harm = Callable[[Path, Path], object]
"""Is given the newest checkpoint's directory, and a file elsewhere whose content is secret."""


def test_a_small_file_does_not_unpack_to_all_of_the_memory(tmp_path: Path) -> None:
    """What compresses well: shapes of zeros, of which each batch has 80 MB."""
    zeros = np.zeros(10_000_000, np.int64)
    shapes = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), pa.array(zeros))
    columns = [pa.array(["t"]), pa.array(["torch.uint8"]), shapes, pa.array([0]), pa.array([b""], pa.large_binary())]
    arrays = [column.cast(field.type) for column, field in zip(columns, shard.SCHEMA, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=shard.SCHEMA)
    schema = shard.SCHEMA.with_metadata({"format": shard.FORMAT})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(20):
            writer.write_batch(batch.replace_schema_metadata({"format": shard.FORMAT}))
    file = sink.getvalue()
    assert file.size < 1_000_000
    before = pa.total_allocated_bytes()
    peak = 0

    real = shard._check_within

    def look(*args: Any) -> int:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - before)
        return real(*args)

    shard._check_within = look
    try:
        with pytest.raises(StorageError, match="it is compressed"):
            shard.decode(file, "a file")
    finally:
        shard._check_within = real
    assert 0 < peak < 200_000_000


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def harm_manifest(change: Callable[[dict[str, Any]], object]) -> Harm:
    """A manifest whose hash is right and whose fields are not."""

    def harm(directory: Path, _: Path) -> None:
        path = directory / manifest.FILE
        fields = json.loads(path.read_bytes())
        for name in ("format", "hash"):
            del fields[name]
        change(fields)
        rest = json.dumps(fields, separators=(",", ":")).removeprefix("{").encode()
        path.write_bytes(manifest._head(rest) + rest)

    return harm


def written(name: str, content: bytes) -> Harm:
    return lambda directory, _: (directory / name).write_bytes(content)


def linked(name: str) -> Harm:
    def harm(directory: Path, secret: Path) -> None:
        (directory / name).rename(secret.parent / "moved")
        (directory / name).symlink_to(secret.parent / "moved")

    return harm


def fifo(name: str) -> Harm:
    def harm(directory: Path, _: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return harm


def directory_linked(directory: Path, secret: Path) -> None:
    directory.rename(secret.parent / "moved")
    directory.symlink_to(secret.parent / "moved")


def sparse(name: str, size: int) -> Harm:
    return lambda directory, _: os.truncate(directory / name, size)


def sparse_and_promised(directory: Path, secret: Path) -> None:
    sparse(SHARD, 2**42)(directory, secret)
    harm_manifest(lambda fields: fields["shards"][0].update(size=2**42))(directory, secret)


def head_of(rest: bytes) -> bytes:
    return manifest._head(rest) + rest


HARMS: dict[str, Harm] = {
    "a shard that is a link": linked(SHARD),
    "a manifest that is a link": linked(manifest.FILE),
    "a directory that is a link": directory_linked,
    "a manifest that is a FIFO": fifo(manifest.FILE),
    "a shard that is a FIFO": fifo(SHARD),
    "an empty manifest": written(manifest.FILE, b""),
    "a manifest of another kind": written(manifest.FILE, b"[1]"),
    "a manifest that is deep": written(manifest.FILE, b"[" * 2**20),
    "a manifest that is deep where it is hashed": written(manifest.FILE, head_of(b'"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}")),
    "a manifest of terabytes": sparse(manifest.FILE, 2**42),
    "a manifest of a wrong hash": written(manifest.FILE, b'{"format":"raytrain_ft-checkpoint-1","hash":"0","step":20}'),
    "a manifest of the future": written(manifest.FILE, b'{"format":"raytrain_ft-checkpoint-2","hash":""}'),
    "a manifest without its start": written(manifest.FILE, b'{"step":20}'),
    "a manifest with a number of a million digits": written(manifest.FILE, head_of(b'"step":' + b"9" * 10**6 + b"}")),
    "a manifest that is a pickle": written(manifest.FILE, pickle.dumps(Bomb())),
    "a manifest in UTF-16": written(manifest.FILE, "{}".encode("utf-16")),
    "a manifest with a field too many": harm_manifest(lambda fields: fields.update(run="os.system")),
    "a manifest with a field too few": harm_manifest(lambda fields: fields.pop("values")),
    "a manifest of another step": harm_manifest(lambda fields: fields.update(step=10)),
    "a step that is no number": harm_manifest(lambda fields: fields.update(step="20")),
    "shards that are none": harm_manifest(lambda fields: fields.update(shards=[1])),
    "a shard without hashes": harm_manifest(lambda fields: fields["shards"][0].pop("blocks")),
    "a shard elsewhere": harm_manifest(lambda fields: fields["shards"][0].update(file="../../secret")),
    "a shard of infinite size": harm_manifest(lambda fields: fields["shards"][0].update(size=1e999)),
    "a shard of negative size": harm_manifest(lambda fields: fields["shards"][0].update(size=-1)),
    "a shard of too few hashes": harm_manifest(lambda fields: fields["shards"][0].update(blocks=[])),
    "hashes that are numbers": harm_manifest(lambda fields: fields["shards"][0].update(blocks=[1])),
    "a shard that is not there": harm_manifest(lambda fields: fields["shards"].append(fields["shards"][0])),
    "a shard of terabytes": sparse(SHARD, 2**42),
    "a shard of terabytes that the manifest promises": sparse_and_promised,
    "a shard that is a pickle": written(SHARD, pickle.dumps(Bomb())),
    "a shard of another step": lambda directory, _: shutil.copy(
        directory.parent / "step-000000010-e1-i1" / SHARD, directory / SHARD
    ),
}


TOLD = {
    "s3://key:secret@bucket/runs?region=x": "s3://bucket/runs?region=x",
    "s3://key:sec@ret@bucket/a@b": "s3://bucket/a@b",
    "s3://key@bucket?x=y": "s3://bucket",
    "s3://bucket/a@b": "s3://bucket/a@b",
    "s3://key:sec/ret@bucket/runs": "s3://***",  # it is none: who knows where the password ends
    "s3://key:7/ret@bucket/runs": "s3://***",
    "s3:/key:secret@bucket/runs": "s3:/bucket/runs",
    "s3://bucket/runs?endpoint_override=user:secret@host&secret=x&scheme=http": "s3://bucket/runs?scheme=http",
    "gs://anonymous@bucket/runs?project_id=p": "gs://anonymous@bucket/runs?project_id=p",
    "hdfs://user:secret@name:8020/a@b?user=me": "hdfs://user@name:8020/a@b?user=me",
    "hdfs://name:8020/a:b@c": "hdfs://name:8020/a:b@c",
    "abfss://runs:secret@account.dfs.core.windows.net/a": "abfss://runs@account.dfs.core.windows.net/a",
    "abfs://account/runs?sv=1&sig=secret": "abfs://account/runs",
    "http://[::1]:80/a": "http://[::1]:80/a",
    "file:///data/a@b?c=d": "file:///data/a@b?c=d",
    "/data/a@b": "/data/a@b",
    "a:b@c": "a:b@c",
}


@pytest.mark.parametrize("place", TOLD)
def test_a_place_becomes_words_without_its_credentials(place: str) -> None:
    one = Place(place)
    assert [str(one), f"{one}", repr(one), str([one])] == [TOLD[place]] * 2 + [repr(TOLD[place]), str([TOLD[place]])]
    assert str(Place(TOLD[place])) == TOLD[place]
    assert told(f"no '{place}', not that") == one.told(f"no '{place}', not that") == f"no '{TOLD[place]}', not that"
    assert "secret" not in told(f"no {place}, not that")
    assert told("no answer of http://127.0.0.1:80. It (http://name:80) is away") == (
        "no answer of http://127.0.0.1:80. It (http://name:80) is away"
    )


@pytest.mark.parametrize("harm", HARMS)
def test_the_checkpoint_before_is_read(tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    storage = two_checkpoints(tmp_path / "checkpoints")
    HARMS[harm](storage.root / NEW, secret)
    warnings: list[str] = []
    began = time.monotonic()
    content = newest(storage, warnings)
    assert time.monotonic() - began < 5
    assert content is not None
    assert step_of(content) == 10
    # what is not there as a file of its own is no checkpoint, so nothing need be said; all else is named
    quiet = harm in ("a directory that is a link", "a manifest that is a link", "a manifest that is a FIFO")
    assert quiet or any(NEW in warning for warning in warnings), warnings
    assert not (tmp_path / "exploded").exists()
    assert secret.read_text() == "secret"
    # and training goes on: the next checkpoint is written, and retention is not stopped by what lies there
    save(storage.uri, 30, state(30))
    content = newest(storage, warnings)
    assert content is not None
    assert step_of(content) == 30


HOSTILE_NAMES = [
    "..",
    "step-000000099-e1-i1\n",
    "step-٠٠٠٠٠٠٠٩٩-e1-i1",
    "step-0000000020-e1-i1",
    "a" * 200,
    "\udcff",
    "-rf",
    "manifest.json",
]


def test_hostile_names_are_passed_over(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path / "checkpoints")
    for name in HOSTILE_NAMES[1:]:
        shutil.copytree(storage.root / NEW, storage.root / name)
    (storage.root / "step-000000098-e1-i1").write_bytes(b"a file, not a directory")
    assert [found.name.step for found in checkpoint.found(storage)] == [98, 20, 10]
    content = newest(storage, [])
    assert content is not None
    assert step_of(content) == 20
    save(storage.uri, 99, state(99))
    assert [found.name.step for found in checkpoint.found(storage)] == [99, 20]


@pytest.mark.parametrize(
    "name", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "", ".", "..", ".hidden", "a\0b", "a\nb", "ä"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    for call in (storage.view, storage.size, lambda name: storage.put(name, [memoryview(b"x")])):
        with pytest.raises(StorageError, match="no name of a file of ours"):
            call(name)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path / "checkpoints")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (storage.root / "step-000000030-e1-i1").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="symbolic link"):
        save(storage.uri, 30, state(30))
    assert list(elsewhere.iterdir()) == []


def test_no_record_is_written_through_a_link(tmp_path: Path) -> None:
    """Whoever may write into a run's directory has none of the rights of who runs it."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.html").symlink_to(mine)
    with draft_of(run / "report.html") as file:
        assert mine.read_text() == "precious"
        file.write("a report")
    assert (mine.read_text(), (run / "report.html").read_text()) == ("precious", "a report")
    (run / "events.jsonl").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic link"):
        EventLog(run / "events.jsonl")
    assert not (tmp_path / "made").exists()
    assert {path.name for path in run.iterdir()} == {"events.jsonl", "report.html"}


def test_a_checkpoint_beside_ten_thousand_old_ones_is_found_soon(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    for step in range(10_000):
        (tmp_path / f"step-{step:09d}-e0-i1").mkdir()
    began = time.monotonic()
    content = newest(storage, [])
    assert time.monotonic() - began < 2
    assert content is not None
    assert step_of(content) == 20


# ---------------------------------------------------------------- shards whose headers lie


def shard_of(rows: dict[str, list[Any]], schema: pa.Schema = shard.SCHEMA, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(pa.record_batch([pa.array(rows[field.name], field.type) for field in schema], schema=schema))
    return sink.getvalue().to_pybytes()


def row(**changes: Any) -> dict[str, list[Any]]:
    fields = {"name": "t", "dtype": "torch.float32", "shape": [2], "start": 0, "data": b"12345678"} | changes
    return {name: [value] for name, value in fields.items()}


def content_of(file: bytes) -> Content:
    """As `checkpoint.read` gives it, for a file that its manifest vouches for."""
    written_by = Manifest(step=1, epoch=1, incarnation=1, shards=[])
    pieces = Pieces(shard.decode(pa.py_buffer(file), "the shard"))
    for name, parts in pieces.items():
        checkpoint._check_whole(written_by, name, parts)
    return Content(written_by, pieces)


LIES = {
    "terabytes": row(shape=[2**40]),
    "more than can be counted": row(shape=[2**62, 2**62]),
    "nothing, but too large": row(shape=[0, 2**62, 2**62], data=b""),
    "negative": row(shape=[-2, -1]),
    "no length": row(shape=[None]),
    "null": row(data=None),
    "no name": row(name=None),
    "a dtype that is none": row(dtype="torch.nn"),
    "a dtype that is quantized": row(dtype="torch.qint8", data=b"12", shape=[2]),
    "a piece from the middle": row(start=4),
    "a piece from before": row(start=-8),
    "too few bytes": row(data=b"1234"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_row_that_lies_is_a_typed_error(lie: str) -> None:
    with pytest.raises(StorageError):
        make(content_of(shard_of(LIES[lie])), "t")


def test_a_row_that_lies_is_not_put_into_a_tensor() -> None:
    target = torch.zeros(3)
    with pytest.raises(StorageError):
        fill({"t": target}, content_of(shard_of(row(shape=[2**40]))))
    assert not target.any()


def test_a_compressed_column_that_promises_terabytes() -> None:
    data = b"\0" * 4096
    file = bytearray(shard_of(row(shape=[1024], data=data), compression=pa.Codec("lz4")))
    position = file.index(struct.pack("<q", len(data)) + struct.pack("<I", 0x184D2204))
    file[position : position + 8] = struct.pack("<q", 2**44)
    with pytest.raises(StorageError):
        make(content_of(bytes(file)), "t")


def test_a_file_of_another_schema() -> None:
    schema = pa.schema([*shard.SCHEMA, ("code", pa.binary())], metadata=shard.SCHEMA.metadata)
    with pytest.raises(StorageError, match="not a raytrain_ft-shard-1"):
        content_of(shard_of(row() | {"code": [b""]}, schema))
    with pytest.raises(StorageError, match="not a raytrain_ft-shard-1"):
        content_of(shard_of(row(), shard.SCHEMA.remove_metadata()))


def test_a_damaged_header_never_crashes() -> None:
    """Were a hash forged too, Arrow's own checks must hold."""
    file = shard_of({name: values * 3 for name, values in row().items()} | {"name": ["a", "b", "c"]})
    random = np.random.default_rng(0)
    for _ in range(1500):
        damaged = bytearray(file)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(len(damaged))] = random.integers(256)
        try:
            content = content_of(bytes(damaged))
            for name in content.pieces:
                make(content, name)
        except StorageError:
            continue


@pytest.mark.parametrize("created", [float("inf"), float("nan"), -1.0, 10**400])
def test_a_time_that_cannot_be_is_told(created: float) -> None:
    """Who forges a manifest can give it the right hash."""
    content = manifest.encode(Manifest(step=1, epoch=1, incarnation=1, shards=[], values={}, created=created))
    with pytest.raises(StorageError, match="here"):
        manifest.decode(pa.py_buffer(content), "here")


@pytest.mark.parametrize("size", [-1, 10**400])
def test_a_size_that_cannot_be_is_told(size: int) -> None:
    content = manifest.encode(Manifest(step=1, epoch=1, incarnation=1, shards=[ShardEntry(size, ["a"])], values={}))
    with pytest.raises(StorageError, match="here does not describe its shards"):
        manifest.decode(pa.py_buffer(content), "here")


@pytest.mark.parametrize(
    "forged",
    [
        {"world": float("inf")},
        {"data": {"loader": [float("inf"), 0]}},
        {"objects": {"model": {"class": "module", "tensors": [["torch.float32", [3]]]}}},
        {"objects": {"model": {"class": "module", "tensors": {"w": 3}}}},
        {"objects": {"optimizer": {"class": "Adam", "groups": [3]}}},
        {"objects": {"optimizer": {"class": "Adam", "groups": [[["torch.float32", 3]]]}}},
    ],
)
def test_forged_values_of_checkfreq_are_told(forged: dict[str, Any]) -> None:
    objects = {"model": {"class": "module", "tensors": {"w": ["torch.float32", [3]]}}}
    values = {"kind": resume.KIND, "world": 1, "data": {}, "datasets": {}, "objects": objects}
    assert resume._stored(Manifest(step=1, epoch=1, incarnation=1, shards=[], values=values)).objects == objects
    with pytest.raises(StorageError, match="does not have the values of"):
        resume._stored(Manifest(step=1, epoch=1, incarnation=1, shards=[], values=values | forged))


def test_the_hash_is_of_every_byte_of_a_manifest() -> None:
    """Also of those that mean the same in JSON."""
    content = manifest.encode(Manifest(step=1, epoch=1, incarnation=1, shards=[ShardEntry(1, ["a"])], values={"é": 1e-7}))
    for old, new in ((b"e9", b"E9"), (b"1e-07", b"1E-07"), (b'"step":1', b'"step": 1')):
        assert json.loads(content.replace(old, new)) == json.loads(content)
        with pytest.raises(StorageError, match="hash differs"):
            manifest.decode(pa.py_buffer(content.replace(old, new)), "here")
    assert xxhash.xxh3_128_hexdigest(content[len(manifest._head(b"")) :]).encode() in content
    assert manifest.decode(pa.py_buffer(content), "here").name == Name(1, 1, 1)
