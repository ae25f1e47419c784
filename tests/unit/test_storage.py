"""What is stored comes back bit by bit, whatever its kind, however many workers wrote it; retention; the newest valid one."""

from __future__ import annotations

import ast
import errno
import json
import math
import os
import struct
import threading
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commits
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store import OWNER, own, parts_of, same_bits, save, state, step_of, tensors_of, two_checkpoints
from store import newest as newest_of
from torch import Tensor, nn

import raytrain_ft
from raytrain_ft.errors import AbsentError, ConfigError, FencedError, NoCheckpointError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, filesystem, lock, manifest, retention, selection, shard
from raytrain_ft.storage.durable import sync_directory
from raytrain_ft.storage.filesystem import LocalStorage, RemoteStorage, Storage, open_storage
from raytrain_ft.storage.manifest import Manifest, Name, ShardEntry
from raytrain_ft.storage.shard import Piece
from raytrain_ft.storage.tree import flatten, unflatten
from raytrain_ft.training.layout import share, total_size
from raytrain_ft.training.restore import fill
from raytrain_ft.training.snapshot import copy_all

DTYPES = [
    dtype
    for dtype in dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
    if (dtype.itemsize and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1")))
    or dtype in (torch.int16, torch.uint16)
]


def newest(storage: LocalStorage) -> checkpoint.Content:
    content = newest_of(storage, [])
    assert content is not None
    return content


# ---------------------------------------------------------------- tensors of every kind


def kinds() -> dict[str, Tensor]:
    """A tensor of random bytes of every dtype that torch can make here, and every layout that has plain bytes."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for dtype in DTYPES:
        data = torch.randint(
            0, 2 if dtype == torch.bool else 256, (48 * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        try:
            found[str(dtype)] = data.view(dtype).reshape(6, 8)
        except (RuntimeError, TypeError):
            continue  # a dtype in name only
    wide = torch.randn(40, 30, generator=generator)
    complex_ = torch.view_as_complex(torch.randn(9, 2, generator=generator))
    found |= {
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty 2": torch.empty(3, 0, 4, dtype=torch.bfloat16),
        "transposed": wide.t(),
        "strided": wide[::3, 1::2],
        "expanded": torch.tensor([1.0, math.nan]).expand(4, 2),
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "parameter": torch.nn.Parameter(wide),
        "NaN": torch.tensor([0x7FC00001, -0x400001], dtype=torch.int32).view(torch.float32),
    }
    return found


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path: Path, count: int) -> None:
    tensors = kinds()
    assert {f"torch.{name}" for name in ("bfloat16", "float16", "complex64", "complex128", "bool", "int64")} <= tensors.keys()
    assert sum(name.startswith("torch.float8") for name in tensors) >= 5
    storage = LocalStorage(tmp_path / "checkpoints")
    own(storage)
    save(storage.uri, 7, tensors, count)
    content = newest(storage)
    found = tensors_of(content)
    assert found.keys() == tensors.keys()
    assert [name for name in tensors if not same_bits(found[name], tensors[name])] == []
    assert content.manifest.size == total_size(list(tensors.items()))


def test_filling_overwrites_tensors_of_every_layout(tmp_path: Path) -> None:
    tensors = kinds()
    storage = LocalStorage(tmp_path / "checkpoints")
    own(storage)
    save(storage.uri, 7, tensors, 3)
    targets = {name: torch.zeros_like(tensor.detach().resolve_conj()) for name, tensor in tensors.items() if name != "expanded"}
    targets["transposed"] = torch.zeros(40, 30).t()
    fill(targets, newest(storage))
    assert [name for name, target in targets.items() if not same_bits(target, tensors[name])] == []


def test_filling_changes_nothing_unless_everything_fits(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    targets = {"weight": torch.zeros(300, 20), "bias": torch.zeros(8, dtype=torch.float64)}
    with pytest.raises(StorageError, match="bias"):
        fill(targets, newest(storage))
    assert not targets["weight"].any()


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.full((i % 7, 3), float(i)) for i in range(10_000)}
    storage = LocalStorage(tmp_path / "checkpoints")
    own(storage)
    save(storage.uri, 1, tensors, 2)
    found = tensors_of(newest(storage))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_without_plain_bytes_is_refused_by_name(tensor: Tensor) -> None:
    with pytest.raises(ConfigError, match="the/path"):
        share([("the/path", tensor)], 0, 1)


# ---------------------------------------------------------------- shares


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 20_000), max_size=12), count=st.integers(1, 9), data=st.data())
def test_the_shares_are_the_whole_state_once(sizes: list[int], count: int, data: st.DataObject) -> None:
    tensors = [(f"t{i}", torch.randint(0, 256, (size,), dtype=torch.uint8)) for i, size in enumerate(sizes)]
    shares = [share(tensors, number, count) for number in range(count)]
    pieces = [piece for part in shares for piece in part.layout.pieces]
    for name, tensor in tensors:
        mine = [piece for piece in pieces if piece.name == name]
        ends = [piece.start + piece.size for piece in mine]
        assert [piece.start for piece in mine] == [0, *ends[:-1]]  # no gap, nothing twice
        assert ends[-1] == tensor.numel()
        assert len(mine) == 1 or all(piece.size for piece in mine)
    held = [part.layout.size for part in shares]
    assert max(held) - sum(sizes) / count <= 2 * 4096
    files = []
    for part, size in zip(shares, held, strict=True):
        memory = memoryview(bytearray(size))
        copy_all(part.pending(), memory)
        hashed = shard.Hashed(shard.encode(part.layout.pieces, memory))
        file = b"".join(bytes(part) for part in hashed)
        assert (len(file), shard.verify(file, hashed.blocks())) == (hashed.size, None)  # pyright: ignore
        files.append(file)
    found: dict[str, bytes] = {}
    for file in files:
        for piece, content, _ in parts_of(file):
            found[piece.name] = found.get(piece.name, b"") + bytes(content)
    assert found == {name: tensor.numpy().tobytes() for name, tensor in tensors}


def test_a_shard_of_many_batches_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BATCH_BYTES", 1000)
    monkeypatch.setattr(shard, "BLOCK_BYTES", 4096)
    sizes = [0, 999, 1, 1, 5000, 0, 12_000, 3, 4096] * 5
    pieces = [Piece(f"p{i}", "torch.uint8", (size,), 0, size) for i, size in enumerate(sizes)]
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8).tobytes()
    hashed = shard.Hashed(shard.encode(pieces, memoryview(data)))
    file = b"".join(bytes(part) for part in hashed)
    assert len(hashed.blocks()) == shard.count_blocks(len(file)) > 10
    found = parts_of(file)
    assert [part.piece for part in found] == pieces
    assert b"".join(bytes(part.data) for part in found) == data
    for position in range(0, len(file), 997):
        damaged = bytearray(file)
        damaged[position] ^= 1
        assert shard.verify(bytes(damaged), hashed.blocks()) == position // 4096  # pyright: ignore


# ---------------------------------------------------------------- state dicts

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.integers(-3, 3) | st.sampled_from(["", "1", "a", "a/b", "a~1b", "~", "/", "(key)", "\ud800"]) | st.booleans()
SCALARS = st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1j), np.float64(math.nan)])
ARRAYS = st.sampled_from([np.arange(6).reshape(2, 3)[:, ::2], np.zeros((0, 3), np.float16), np.array(2.5)])
TENSORS = st.integers(0, 9).map(torch.tensor)
TREES = st.recursive(
    PLAIN | SCALARS | ARRAYS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 3))
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(None, items))
    ),
    max_leaves=12,
)


def alike(a: Any, b: Any) -> bool:
    """Equal, of the same types, and also where a value is not equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_bits(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return alike(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(alike, a, b))
    return a == b


@settings(max_examples=200)
@given(tree=TREES)
def test_a_state_dict_comes_back_as_it_was(tree: Any) -> None:
    skeleton, tensors = flatten(tree)
    assert alike(unflatten(json.loads(json.dumps(skeleton)), tensors.__getitem__), tree)
    for path in tensors:
        path.encode()  # it can stand in a file


def test_tensors_whose_paths_look_alike_are_kept_apart() -> None:
    tree = {
        1: torch.tensor(1),
        "1": torch.tensor(2),
        "": {"1": torch.tensor(3)},
        "a": {"b": torch.tensor(4)},
        "a/b": torch.tensor(5),
    }
    skeleton, tensors = flatten(tree)
    assert len(tensors) == 5
    assert alike(unflatten(skeleton, tensors.__getitem__), tree)


def test_other_containers() -> None:
    tree = {
        "counter": Counter("hello"),
        "sets": [{3, 1, "x"}, frozenset({(1, 2)})],
        "size": torch.Size([2, 3]),
        "defaults": [defaultdict(list, {"a": [1]}), defaultdict(None, {"a": 1})],
        "dtype": torch.bfloat16,
        "NaN": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    }
    assert alike(unflatten(json.loads(json.dumps(flatten(tree)[0])), lambda path: torch.empty(0)), tree)


def test_the_versions_of_a_module_come_back_with_its_state() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    skeleton, tensors = flatten({"inner": [state]})
    (found,) = unflatten(json.loads(json.dumps(skeleton)), tensors.__getitem__)["inner"]
    assert alike(found, state)
    assert alike(found._metadata, state._metadata)
    assert found._metadata["1"] == {"version": 2}


def test_a_defaultdict_comes_back_with_what_it_makes() -> None:
    found = unflatten(json.loads(json.dumps(flatten(defaultdict(int, {3: 4}))[0])), lambda path: torch.empty(0))
    assert (found, found[5]) == ({3: 4, 5: 0}, 0)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": object()}}, "a/b"),
        ({"a": [1, lambda: 0]}, "a/1"),
        ({"a": np.array([object()])}, "a"),
        ({"a": np.array(["x"])}, "a"),
        ({"a": np.arange(3, dtype=">i4")}, "a"),
        ({"a": np.ma.array([1.0, 2.0], mask=[False, True])}, r"a is a numpy\.ma\.\S*MaskedArray"),  # would lose its mask
        ({"a": np.asmatrix([[1.0, 2.0]])}, r"a is a numpy\.\S*matrix"),
        ({"x": {object(): 1}}, r"x/\(key\)"),
        ({"a": [defaultdict(lambda: 0)]}, "a/0"),
        ({"scheduler": torch.optim.lr_scheduler.LambdaLR}, "scheduler"),
        (nested(150), "0/0"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        flatten(value)


@pytest.mark.parametrize(
    "node",
    [
        {"eval": "1"},
        {"float": "xyz"},
        {"float": "00"},
        {"float": 1},
        {},
        {"list": 3},
        {"dict": [1]},
        {"dict": [[{"list": []}, 1]]},
        {"ndarray": ["O", [1], "AAAAAAAAAAA="]},
        {"ndarray": ["float64", [2**40], ""]},
        {"ndarray": ["no such", [1], ""]},
        {"scalar": ["float64", ""]},
        {"dtype": "torch.nn"},
        {"dtype": "torch.load"},
        {"bytes": "é"},
        {"a": 1, "b": 2},
        {"deque": [1]},
        {"Size": ["a"]},
        {"defaultdict of eval": []},
        {"state_dict": [[]]},
        {"state_dict": [[], None]},
        {"state_dict": [[], {"dict": [["", 1]]}]},
        {"state_dict": [[1], {"dict": []}]},
    ],
)
def test_what_is_no_skeleton_is_a_typed_error(node: Any) -> None:
    with pytest.raises(StorageError):
        unflatten(node, lambda path: torch.empty(0))


# ---------------------------------------------------------------- names, manifests, retention


@settings(max_examples=100)
@given(parts=st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1)))
def test_names_are_read_as_they_are_written_and_ordered_by_age(parts: tuple[int, int, int]) -> None:
    name = Name(*parts)
    assert Name.parse(str(name)) == name
    step, epoch, incarnation = parts
    assert (name < Name(7, 8, 9)) == ((epoch, incarnation, step) < (8, 9, 7))
    assert not name < name <= name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step-1-e1-i1",
        "step-0000000010-e1-i1",
        "step-000000010-e01-i1",
        "step-000000010-e1-i1 ",
        "step-000000010-e1-i1\n",
        "step-٠٠٠٠٠٠٠١٠-e1-i1",
        "step--00000010-e1-i1",
        "../step-000000010-e1-i1",
        "STEP-000000010-e1-i1",
    ],
)
def test_what_is_not_written_by_us_is_no_name(text: str) -> None:
    assert Name.parse(text) is None


def steps(storage: LocalStorage) -> list[int]:
    return [found.name.step for found in checkpoint.found(storage) if found.complete]


def test_retention_keeps_the_newest_and_those_marked(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage)
    for step in range(1, 8):
        save(storage.uri, step, state(step), kept=step in (2, 4))
    assert steps(storage) == [7, 6, 4, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == [f"step-{i:09d}-e1-i1" for i in (2, 4, 6, 7)]


def test_what_is_known_to_be_kept_for_good_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each checkpoint the manifests of all epochs before would be."""
    storage = LocalStorage(tmp_path)
    own(storage)
    read, seen = checkpoint.read_manifest, Counter[int]()

    def counted(storage: Storage, name: Name) -> Manifest:
        seen[name.step] += 1
        return read(storage, name)

    monkeypatch.setattr(checkpoint, "read_manifest", counted)
    for step in range(1, 21):
        save(storage.uri, step, state(step), kept=step <= 10)
    assert steps(storage) == [20, 19, *range(10, 0, -1)]
    assert max(seen.values()) == 2, "once as the one to fall back to, and once when it was seen to be marked"


def test_retention_keeps_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was to be kept for good is not known then, and a storage that gives no answer once is no reason to delete."""
    storage = LocalStorage(tmp_path)
    own(storage)
    for step in (10, 20, 30):
        save(storage.uri, step, state(step), kept=True)
    view = LocalStorage.view

    def hiccup(storage: LocalStorage, name: str) -> pa.Buffer:
        if name == "step-000000010-e1-i1/manifest.json":
            raise StorageError("the request timed out")
        return view(storage, name)

    monkeypatch.setattr(LocalStorage, "view", hiccup)
    save(storage.uri, 40, state(40))
    assert steps(storage) == [40, 30, 20, 10]


def test_checkpoints_that_cannot_be_read_do_not_look_like_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = two_checkpoints(tmp_path)
    passed: list[str] = []
    view = LocalStorage.view

    def hiccup(storage: LocalStorage, name: str) -> pa.Buffer:
        raise StorageError(f"{name}: the request timed out")

    monkeypatch.setattr(LocalStorage, "view", hiccup)
    with pytest.raises(NoCheckpointError, match=r"step-000000020.*timed out.*step-000000010"):
        list(selection.select(storage, passed.append))
    monkeypatch.setattr(LocalStorage, "view", view)
    assert len(passed) == len(list(selection.select(storage, pytest.fail))) == 2


def test_a_checkpoint_that_has_taken_the_place_of_the_only_one_is_found(tmp_path: Path) -> None:
    """If one stays, the older is deleted as the newer comes, perhaps just after somebody has seen that it is there."""
    storage = LocalStorage(tmp_path)
    own(storage)
    save(storage.uri, 10, state(10))
    passed: list[str] = []

    class Replaced(LocalStorage):
        def view(self, name: str) -> Any:
            if name.startswith("step-000000010") and storage.size(name) is not None:
                save(storage.uri, 20, state(20))
                storage.delete("step-000000010-e1-i1")
            return super().view(name)

    assert [manifest.step for manifest in selection.select(Replaced(tmp_path), passed.append)] == [20]
    assert len(passed) == 1


def test_what_was_stored_beyond_where_everybody_went_back_to_keeps_nothing_else_out(tmp_path: Path) -> None:
    """Its world was over when it was committed: it is nothing to fall back to."""
    storage = LocalStorage(tmp_path)
    own(storage)
    for step, incarnation in ((20, 1), (40, 1), (30, 5)):
        save(storage.uri, step, state(step), incarnation=incarnation, keep=9)
    assert retention.retain(storage, Name(30, 1, 5), 3, begun=40) == []
    assert retention.retain(storage, Name(30, 1, 5), 2, begun=20) == [Name(40, 1, 1)]
    assert retention.retain(storage, Name(30, 1, 5), 1, begun=20) == [Name(20, 1, 1)]


def test_a_note_that_is_no_note_is_not_read(tmp_path: Path) -> None:
    """A file of a terabyte would not even fit into memory."""
    storage = LocalStorage(tmp_path)
    with (tmp_path / selection.BEGUN_FILE).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(StorageError, match=r"begun\.json has 1099511627776 bytes, and 65536 at most"):
        selection.counting(storage)


def test_what_azure_shows_before_it_is_written_is_not_there_yet(tmp_path: Path) -> None:
    """pyarrow begins an upload with an empty blob of its name."""

    class Azure:
        type_name = "abfs"
        files = pafs.LocalFileSystem()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.files, name)

    storage = RemoteStorage(Place("abfs://bucket/run"), Azure(), str(tmp_path))
    storage.put("whole", [memoryview(b"1")])
    (tmp_path / "begun").touch()
    (tmp_path / "directory").mkdir()
    assert storage.names() == ["directory", "whole"]
    assert (storage.size("begun"), storage.size("whole")) == (None, 1)
    elsewhere = RemoteStorage(Place("hdfs://bucket/run"), pafs.LocalFileSystem(), str(tmp_path))
    assert elsewhere.size("begun") == 0


class Far(LocalStorage):
    """Storage that takes its time for every question, and fails some."""

    def __init__(self, root: Path, failures: int = 0) -> None:
        super().__init__(root)
        self.failures, self.asked = failures, 0

    def size(self, name: str) -> int | None:
        self._ask()
        return super().size(name)

    def view(self, name: str) -> Any:
        self._ask()
        return super().view(name)

    def _ask(self) -> None:
        time.sleep(0.02)
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise UnreachableError("503")


def test_many_checkpoints_are_looked_at_side_by_side(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    own(storage)
    for step in range(1, 41):
        save(storage.uri, step, state(step), kept=True)
    far = Far(tmp_path)
    began = time.monotonic()
    assert [manifest.step for manifest in selection.select(far, pytest.fail)] == list(range(40, 0, -1))
    assert time.monotonic() - began < 0.02 * far.asked / 2
    far.asked = 0
    assert next(selection.select(far, pytest.fail)).step == 40
    assert far.asked < 50, "of the newest alone the manifest is read"


def many_checkpoints(path: Path, count: int) -> LocalStorage:
    """None of which is ever deleted."""
    storage = LocalStorage(path)
    own(storage)
    for step in range(1, count + 1):
        save(storage.uri, step, state(step), keep=retention.KEEP_ALL)
    return storage


def test_of_many_checkpoints_the_newest_alone_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store answers ten questions a second: what is asked of each of thousands takes minutes, at the beginning of a
    run and whenever everybody goes back."""
    many_checkpoints(tmp_path, 60)
    far = Far(tmp_path)
    assert next(selection.select(far, pytest.fail)).step == 60
    assert far.asked < 10
    far.asked = 0
    assert [manifest.step for manifest in islice(selection.select(far, pytest.fail), 16)] == list(range(60, 44, -1))
    assert far.asked < 100, "three questions for each"
    parts(far, Name(70, 1, 1), 0)
    parts(far, Name(50, 1, 9), 0)
    far.delete(f"{Name(55, 1, 1)}/manifest.json")
    far.asked = 0
    assert retention.retain(far, Name(60, 1, 1), retention.KEEP_ALL) == [Name(55, 1, 1)]
    retention.sweep(far, 2, new=True)
    selection.begin_anew(far, 2)
    assert far.asked < 100
    assert {found.name for found in checkpoint.found(far) if not found.complete} == set(), "what broke off is gone"
    assert len(steps(far)) == 59
    far.asked = 0
    lock.acquire(far, "test").release()
    assert far.asked < 20, "an epoch follows from names"


def test_storage_that_fails_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "AGAIN_S", 0.01)
    far = Far(tmp_path)
    own(far)
    save(far.uri, 5, state(5))
    (name,) = selection.counting(far)
    far.failures = 3
    assert checkpoint.patiently(lambda: checkpoint.read_manifest(far, name)).step == 5
    monkeypatch.setattr(checkpoint, "READ_S", 0.05)
    far.failures = 1000
    with pytest.raises(UnreachableError, match="503"):
        checkpoint.patiently(lambda: checkpoint.read_manifest(far, name))
    checks = iter([None, FencedError(1)])

    def check() -> None:
        if (error := next(checks)) is not None:
            raise error

    monkeypatch.setattr(checkpoint, "READ_S", 30.0)
    with pytest.raises(FencedError):
        checkpoint.patiently(lambda: checkpoint.read_manifest(far, name), check)


def test_a_look_that_fails_does_not_cost_a_checkpoint_of_which_all_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listed(Far):
        def names(self, directory: str = "") -> list[str]:
            self._ask()
            return super().names(directory)

    monkeypatch.setattr(checkpoint, "AGAIN_S", 0.01)
    far, name = Listed(tmp_path), Name(5, 1, 1)
    entries = [checkpoint.write_shard(far, name, number, 2, [memoryview(bytes(8))]) for number in range(2)]
    far.failures = 2
    assert checkpoint.await_shards(far, name, entries[0], 2, 30.0, checkpoint.nothing) == entries
    assert far.failures == 0


def test_a_shard_that_was_left_out_and_is_tried_again_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run all try again what they left out, and each begins when it can: the mark of one may still be there
    when another looks for its shard."""

    class Slow(LocalStorage):
        def put(self, name: str, parts: Any) -> None:
            time.sleep(0.5)
            super().put(name, parts)

    monkeypatch.setattr(checkpoint, "MARK_S", 0.5)
    storage, name = LocalStorage(tmp_path), Name(5, 1, 1)
    own = checkpoint.write_shard(storage, name, 0, 2, [memoryview(bytes(8))])
    checkpoint.mark_failed(storage, name, 1, 2)
    late = threading.Timer(0.2, checkpoint.write_shard, (Slow(tmp_path), name, 1, 2, [memoryview(bytes(8))]))
    late.start()
    assert len(checkpoint.await_shards(storage, name, own, 2, 30.0, checkpoint.nothing)) == 2
    checkpoint.mark_failed(storage, name, 1, 3)
    with pytest.raises(StorageError, match="could not write shard 1 of 3"):
        checkpoint.await_shards(storage, name, own, 3, 30.0, checkpoint.nothing)
    late.join()


def test_storage_elsewhere_is_not_asked_all_the_time_whether_shards_have_come(tmp_path: Path) -> None:
    far, looks = RemoteStorage(Place("somewhere"), pafs.LocalFileSystem(), str(tmp_path)), []
    own = checkpoint.write_shard(far, Name(5, 1, 1), 0, 2, [memoryview(bytes(8))])
    with pytest.raises(StorageError, match=r"did not come within 1\.2 s"):
        checkpoint.await_shards(far, Name(5, 1, 1), own, 2, 1.2, lambda: looks.append(1))
    assert len(looks) <= 4


@pytest.mark.parametrize(("options", "seconds"), [("", 60), ("?retry_limit_seconds=7", 7)])
def test_google_storage_that_does_not_answer_is_given_up(options: str, seconds: int) -> None:
    storage = open_storage(f"gs://anonymous@bucket/runs{options}")
    assert isinstance(storage, RemoteStorage)
    assert storage._filesystem.__reduce__()[1][0]["retry_time_limit"].total_seconds() == seconds


def test_what_took_long_to_fail_is_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "READ_S", 0.1)
    monkeypatch.setattr(checkpoint, "AGAIN_S", 0.01)
    left = [True]

    def read() -> str:
        if left:
            left.pop()
            time.sleep(0.2)  # as long as a large shard takes, and then its end does not come
            raise UnreachableError("503")
        return "read"

    assert checkpoint.patiently(read) == "read"


def test_shards_that_were_read_are_not_read_again_for_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "AGAIN_S", 0.01)
    storage = LocalStorage(tmp_path)
    own(storage)
    save(storage.uri, 5, state(5), 3)
    manifest = next(selection.select(storage, pytest.fail))
    view, viewed = LocalStorage.view, Counter[str]()

    def fails_at_first(storage: LocalStorage, name: str) -> Any:
        viewed[name[-23:]] += 1
        if name.endswith("00002-of-00003.arrow") and viewed[name[-23:]] < 3:
            raise UnreachableError("503")
        return view(storage, name)

    monkeypatch.setattr(LocalStorage, "view", fails_at_first)
    assert same_bits(tensors_of(checkpoint.read(storage, manifest))["weight"], state(5)["weight"])
    assert sorted(viewed.values()) == [1, 1, 3]


@pytest.mark.parametrize(
    ("error", "answers"), [(errno.EIO, False), (errno.ESTALE, False), (errno.ENOENT, True), (errno.ELOOP, True)]
)
def test_what_does_not_answer_is_told_from_what_is_not_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, answers: bool
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("directory/file", [memoryview(b"content")])

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        with pytest.raises(StorageError) as raised:
            storage.view("directory/file")
    assert isinstance(raised.value, UnreachableError) is not answers
    if not answers:
        monkeypatch.setattr(Path, "is_symlink", fails)
        with pytest.raises(UnreachableError, match="cannot be reached"):
            storage.size("directory/file")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": 9}, "its hash differs"),
        ({"blocks": ["0" * 16]}, "its hash differs"),
        ({"hash": 7}, "its hash differs"),
        ({"blocks": [], "hash": None}, "it has 0 hashes for 8 bytes"),
        ({"hash": None}, ""),
    ],
)
def test_what_another_worker_noted_of_its_shard_is_not_believed_if_it_is_damaged(
    tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    """It goes into the manifest: the checkpoint would be committed, and no reader would take it. An earlier version wrote no
    hash."""
    storage, name = LocalStorage(tmp_path), Name(5, 1, 1)
    own, other = (checkpoint.write_shard(storage, name, number, 2, [memoryview(bytes(8))]) for number in range(2))
    path = tmp_path / str(name) / "shard-00001-of-00002.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if error:
        with pytest.raises(StorageError, match=rf"shard-00001-of-00002\.json is damaged: {error}"):
            checkpoint.await_shards(storage, name, own, 2, 5.0, checkpoint.nothing)
    else:
        assert checkpoint.await_shards(storage, name, own, 2, 5.0, checkpoint.nothing) == [own, other]


def test_a_shard_that_was_cut_short_is_named_and_not_committed(tmp_path: Path) -> None:
    storage, name = LocalStorage(tmp_path), Name(30, 1, 1)
    whole = Manifest(step=30, epoch=1, incarnation=1, shards=parts(storage, name, 0, 1))
    path = tmp_path / str(name) / "shard-00001-of-00002.arrow"
    os.truncate(path, 100)
    size = whole.shards[1].size
    with pytest.raises(StorageError, match=rf"shard-00001-of-00002\.arrow has 100 bytes, and {size} were written"):
        checkpoint.commit(storage, whole)
    assert [found.complete for found in checkpoint.found(storage)] == [False]


@pytest.mark.parametrize("what", ["manifest.json", "shard-00000-of-00001.arrow"])
def test_what_is_not_there_is_told_from_what_is_damaged(tmp_path: Path, what: str) -> None:
    storage, name = two_checkpoints(tmp_path), Name(20, 1, 1)
    manifest = checkpoint.read_manifest(storage, name)
    (tmp_path / str(name) / what).unlink()
    with pytest.raises(AbsentError, match=f"step-000000020-e1-i1/{what} is not there"):
        checkpoint.read(storage, manifest if what.startswith("shard") else checkpoint.read_manifest(storage, name))
    with pytest.raises(AbsentError):
        storage.view(f"{name}/{what}")


def test_retention_counts_what_was_written_last(tmp_path: Path) -> None:
    """20 had to be passed over, so the run went on from 10: what follows is what a reader may need, and 20 is not."""
    storage = two_checkpoints(tmp_path)
    save(storage.uri, 15, state(15), incarnation=2)
    save(storage.uri, 25, state(25), incarnation=2)
    assert steps(storage) == [25, 15]


@pytest.mark.parametrize("where", ["in a shard", "in the manifest"])
def test_what_is_damaged_is_nothing_to_fall_back_to(tmp_path: Path, where: str) -> None:
    """20 had to be passed over: to delete 10 for it would leave one checkpoint alone that can be read."""
    storage = two_checkpoints(tmp_path)
    if where == "in the manifest":  # perhaps 20 was to be kept, so it stays
        (tmp_path / str(Name(20, 1, 1)) / "manifest.json").write_text("{}")
    save(storage.uri, 25, state(25), incarnation=2, rejected=[str(Name(20, 1, 1))] if where == "in a shard" else [])
    assert steps(storage) == ([25, 10] if where == "in a shard" else [25, 20, 10])
    save(storage.uri, 30, state(30), incarnation=2)
    assert steps(storage) == ([30, 25] if where == "in a shard" else [30, 25, 20])


def test_what_could_not_be_read_stays_beside_what_the_run_went_on_from(tmp_path: Path) -> None:
    """A later launch (epoch 2) could not read 20, and began from 10."""
    storage = two_checkpoints(tmp_path)
    own(storage, replace(OWNER, epoch=2))
    save(storage.uri, 15, state(15), epoch=2, unread=[str(Name(20, 1, 1))])
    assert steps(storage) == [15, 20, 10]
    save(storage.uri, 18, state(18), epoch=2, unread=[str(Name(20, 1, 1))])
    assert steps(storage) == [18, 15, 20], "18 and 15 are two that can be read"


def test_retention_deletes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = two_checkpoints(tmp_path)
    order: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: (order.append(path.name), unlink(path, missing_ok))[1])
    assert retention.retain(storage, Name(20, 1, 1), 1) == [Name(10, 1, 1)]
    assert order[0] == "manifest.json"
    assert set(order[1:]) == {"shard-00000-of-00001.arrow", "shard-00000-of-00001.json"}
    assert steps(storage) == [20]


def test_who_keeps_all_keeps_also_what_could_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps the storage gave no answer. And nobody looks at each of them, of which there may be many."""
    storage = two_checkpoints(tmp_path)
    monkeypatch.setattr(checkpoint, "read_manifest", None)
    assert retention.retain(storage, Name(20, 1, 1), retention.KEEP_ALL, rejected=[str(Name(10, 1, 1))]) == []
    assert steps(storage) == [20, 10]


def test_retention_goes_on_past_what_cannot_be_deleted(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    (tmp_path / "step-000000015-e1-i1" / "directory").mkdir(parents=True)
    with pytest.raises(StorageError, match="step-000000015"):
        retention.retain(storage, Name(20, 1, 1), 1)
    assert steps(storage) == [20]


def test_what_cannot_be_deleted_keeps_nothing_else(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    foreign = {f"directory-{number}" for number in range(20)}  # some of which come before our files
    for name in foreign:
        (tmp_path / str(Name(10, 1, 1)) / name).mkdir()
    with pytest.raises(StorageError, match=r"step-000000010-e1-i1 could not be removed: .*directory-"):
        retention.retain(storage, Name(20, 1, 1), 1)
    assert {path.name for path in (tmp_path / str(Name(10, 1, 1))).iterdir()} == foreign


def test_a_file_system_that_cannot_sync_directories_is_warned_of_once() -> None:
    """As procfs cannot."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for path in ("/proc/self", "/proc/self/fd"):
            sync_directory(Path(path))
    assert [str(one.message).partition(" (")[0] for one in warned] == [
        "/proc/self is on a file system that cannot fsync directories"
    ]


def test_what_broke_off_is_swept(tmp_path: Path) -> None:
    storage = two_checkpoints(tmp_path)
    parts(storage, Name(30, 1, 1), 0, 1)
    parts(storage, Name(5, 2, 2), 0)
    broken = tmp_path / str(Name(30, 1, 1))
    left = [tmp_path / ".writer.json.12.partial", broken / ".shard-00000-of-00001.arrow.7.partial"]
    for path in left:
        path.write_bytes(b"x")
    mine = tmp_path / "notes.partial"
    mine.write_bytes(b"x")
    stuck = tmp_path / str(Name(40, 1, 1)) / "directory"
    stuck.mkdir(parents=True)
    retention.sweep(storage, 2, new=True)
    assert [path.exists() for path in [*left, broken, mine, stuck]] == [False, False, False, True, True]
    assert len(storage.names(str(Name(5, 2, 2)))) == 2, "it may be under way"
    assert step_of(newest(storage)) == 20


def parts(storage: Storage, name: Name, *numbers: int) -> list[ShardEntry]:
    """Writes these of the two shards of a checkpoint."""
    return [
        checkpoint.write_shard(
            storage, name, number, 2, shard.encode([Piece(f"t{number}", "torch.uint8", (8,), 0, 8)], memoryview(bytes(8)))
        )
        for number in numbers
    ]


def test_what_broke_off_makes_room_for_the_next(tmp_path: Path) -> None:
    """And nothing else does: neither a checkpoint, nor what is being written by now."""
    storage = two_checkpoints(tmp_path)
    parts(storage, Name(25, 1, 2), 0, 1)
    (tmp_path / str(Name(25, 1, 2)) / ".manifest.json.7.partial").write_bytes(b"x")
    for name in (Name(30, 1, 1), Name(30, 1, 2), Name(5, 1, 3)):
        parts(storage, name, 1)
    (tmp_path / str(Name(28, 1, 2)) / "directory").mkdir(parents=True)
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    retention.make_room(storage, Name(30, 1, 2))
    left = [Name(5, 1, 3), Name(30, 1, 2), Name(28, 1, 2), Name(20, 1, 1), Name(10, 1, 1)]
    assert [found.name for found in checkpoint.found(storage)] == left
    after = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    gone = (str(Name(25, 1, 2)), str(Name(30, 1, 1)))
    assert after == {path: data for path, data in before.items() if Path(path).parent.name not in gone}


def test_the_first_worker_makes_room_before_it_writes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    commits.prepare(root)
    data = memoryview(bytes(3 * commits.SIZE))
    commits.carry_out(commits.job(root, 30, 1), data, set())
    commits.carry_out(commits.job(root, 40, 1), data, set())
    assert (root / str(Name(30, 1, 1))).exists()
    last = commits.job(root, 50, 0)
    with pytest.raises(StorageError, match="is over"):
        commits.carry_out(last, data, {str(last.name)})
    assert [found.name.step for found in checkpoint.found(open_storage(str(root)))] == [50, 20, 10]


class Watched(LocalStorage):
    """Something happens once, before a note is deleted, or after that."""

    def __init__(self, root: Path, moment: str, happens: Callable[[], object]) -> None:
        super().__init__(root)
        self.moments = {moment: happens}

    def delete(self, name: str) -> None:
        for moment in ("before", "after"):
            if moment == "after":
                super().delete(name)
            if name.endswith(".json"):
                self.moments.pop(moment, lambda: None)()


def test_what_was_committed_just_before_it_is_given_up_stays(tmp_path: Path) -> None:
    storage, name = LocalStorage(tmp_path), Name(30, 1, 1)
    whole = Manifest(step=30, epoch=1, incarnation=1, shards=parts(storage, name, 0, 1))
    retention.give_up(Watched(tmp_path, "before", lambda: checkpoint.commit(storage, whole)), name)
    assert list(checkpoint.read(storage, whole).pieces) == ["t0", "t1"]


def test_who_commits_what_is_being_given_up_is_told_so(tmp_path: Path) -> None:
    """Both find out of each other: nothing that counts is left, and the rest goes with the next one."""
    storage, name = LocalStorage(tmp_path), Name(30, 1, 1)
    whole = Manifest(step=30, epoch=1, incarnation=1, shards=parts(storage, name, 0, 1))

    def written() -> None:
        storage.put(f"{name}/manifest.json", [memoryview(b"{}")])

    retention.give_up(Watched(tmp_path, "after", written), name)
    assert sorted(storage.names(str(name))) == ["manifest.json", "shard-00000-of-00002.arrow", "shard-00001-of-00002.arrow"]
    with pytest.raises(StorageError, match="given up"):
        checkpoint.commit(storage, whole)
    assert [found.complete for found in checkpoint.found(storage)] == [False]
    retention.give_up(storage, name)
    assert checkpoint.found(storage) == []


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["in a directory that is gone", "in one that is made anew"])
def test_what_was_given_up_cannot_be_committed(tmp_path: Path, count: int, again: bool) -> None:
    """A manifest without shards would count as a checkpoint to fall back to: an older one, which is whole, would go for it."""
    storage, name = LocalStorage(tmp_path), Name(30, 1, 1)
    piece = Piece("t", "torch.uint8", (8,), 0, 8)
    entries = [
        checkpoint.write_shard(storage, name, number, count, shard.encode([piece], memoryview(bytes(8))))
        for number in range(count)
    ]
    retention.give_up(LocalStorage(tmp_path), name)
    whole = Manifest(step=30, epoch=1, incarnation=1, shards=entries)
    with pytest.raises(StorageError, match="given up" if again else "No such file"):
        checkpoint.commit(LocalStorage(tmp_path) if again else storage, whole)
    assert not any(found.complete for found in checkpoint.found(storage))


def test_a_leftover_that_cannot_be_removed_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    stays = tmp_path / ".profile.json.0.partial" / "directory"
    stays.mkdir(parents=True)
    (tmp_path / ".profile.json.1.partial").touch()
    retention.sweep(LocalStorage(tmp_path), 2, new=True)
    assert [path.name for path in tmp_path.iterdir()] == [stays.parent.name]


def test_what_is_being_written_outlives_a_supervisors_restart(tmp_path: Path) -> None:
    held = lock.acquire(LocalStorage(tmp_path), "run")
    storage = LocalStorage(tmp_path)
    name = Name(10, held.owner.epoch, 1)

    def interrupted() -> Iterator[memoryview]:
        yield memoryview(b"a")
        again = lock.acquire(storage, "run")  # as the next supervisor of this run does
        assert again.owner.epoch == held.owner.epoch
        retention.sweep(storage, again.owner.epoch, new=again.new)
        yield memoryview(b"b")
        again.release()

    for file in (f"{name}/shard-00000-of-00001.arrow", "profile.json"):
        storage.put(file, interrupted())
        assert storage.view(file).to_pybytes() == b"ab"
    held.release()


# ---------------------------------------------------------------- reading executes nothing


def modules() -> list[Path]:
    root = Path(raytrain_ft.__file__).parent
    return sorted(
        [*root.glob("storage/*.py"), *(root / "training" / f"{name}.py" for name in ("restore", "durable", "snapshot"))]
    )


@pytest.mark.parametrize("path", [path for path in modules() if path.exists()], ids=lambda path: path.stem)
def test_no_module_on_a_read_path_can_execute_what_it_reads(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "importlib"} & {
                n.split(".")[0] for n in names
            }
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "os.system")
            assert "unpickle" not in called


def test_the_whole_package_never_loads_a_pickle_from_a_file() -> None:
    """But the task, whose hash came through Ray; and nothing else, but what came through Ray itself (`software.unpack`)."""
    for path in Path(raytrain_ft.__file__).parent.rglob("*.py"):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert not calls & {"torch.load", "np.load", "pickle.load", "eval", "exec"}, path
        assert path.name in ("sealed.py", "software.py") or not [
            call for call in calls if call.endswith(("pickle.loads", "pickle.load"))
        ], path


def test_the_storage_process_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, raytrain_ft.storage.persister; print('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_supervisor_needs_no_torch() -> None:
    """It would take more than another second to come back after its own loss."""
    import subprocess
    import sys

    code = "import sys, raytrain_ft.runtime.supervisor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_manifests_that_are_encoded_are_decoded() -> None:
    import pyarrow as pa

    written = manifest.Manifest(
        step=3, epoch=1, incarnation=2, shards=[manifest.ShardEntry(5, ["ab"])], values={"é": [1, None]}, created=1.5
    )
    assert manifest.decode(pa.py_buffer(manifest.encode(written)), "here") == written


def test_a_place_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="gopher"):
        open_storage("gopher://host/runs")


@pytest.mark.parametrize("place", [str(Path("s3://bucket/runs")), "s3:/bucket", "file:/data", "file://host/data"])
def test_what_is_half_a_uri_names_no_directory(place: str) -> None:
    with pytest.raises(ConfigError, match=rf"storage '{place}' is no URI.*write s3://"):
        open_storage(place)


@pytest.mark.parametrize(
    ("place", "instead"),
    [("s3://bucket/exp#1", "%23"), ("gs://bucket/exp#1/checkpoints", "%23"), ("file:///runs/exp?1", "%3F")],
)
def test_a_uri_with_a_part_that_names_no_directory_is_refused(place: str, instead: str) -> None:
    """pyarrow leaves out what follows "#": all runs whose names differ only in that would share one directory."""
    with pytest.raises(ConfigError, match=instead):
        open_storage(place)


def test_a_path_may_have_any_sign(tmp_path: Path) -> None:
    for name in ("exp#1", "exp?1"):
        open_storage(filesystem.within(Place(str(tmp_path)), name)).put("file", [memoryview(name.encode())])
        assert (tmp_path / name / "file").read_text() == name
    for uri in (f"file://{tmp_path}/exp#1", f"file://{tmp_path}/exp%231"):
        assert open_storage(uri).names() == ["file"]


def test_the_home_of_nobody_is_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="~nosuchuser"):
        open_storage("~nosuchuser/runs")


def test_a_uri_and_a_path_name_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = ["a b:/c", "./s3:/c", "s3:c"]
    assert [open_storage(place).uri for place in places] == [f"{tmp_path}/{name}" for name in ("a b:/c", "s3:/c", "s3:c")]
    assert open_storage((tmp_path / "a b%").as_uri()).uri == str(tmp_path / "a b%")


# ---------------------------------------------------------------- file systems of pyarrow


def remote(root: Path) -> RemoteStorage:
    """A file system that is no object store, and shows what is written at once."""
    return RemoteStorage(Place(f"hdfs://name/{root}"), pafs.LocalFileSystem(), str(root))


def test_a_file_is_replaced_whole_also_where_it_is_shown_at_once(tmp_path: Path) -> None:
    storage = remote(tmp_path)
    storage.put("a", [memoryview(b"before")])

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"af")
        assert storage.view("a").to_pybytes() == b"before"
        raise StorageError("the world is over")

    with pytest.raises(StorageError, match="the world is over"):
        storage.put("a", parts())
    assert storage.view("a").to_pybytes() == b"before"
    storage.put("a", [memoryview(b"after")])
    assert storage.view("a").to_pybytes() == b"after"
    assert storage.names() == ["a"]


def test_no_more_of_an_upload_is_held_in_memory_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "UNSENT_BYTES", 1000)
    held: list[int] = [0]
    most = 0

    class Stream:
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, part: memoryview) -> None:
            nonlocal most
            held[0] += part.nbytes
            most = max(most, held[0])

        def flush(self) -> None:
            held[0] = 0

    files: Any = SimpleNamespace(
        type_name="s3",
        open_output_stream=lambda path: Stream(),
        get_file_info=lambda path: SimpleNamespace(type=pafs.FileType.NotFound),
    )
    RemoteStorage(Place("s3://bucket/run"), files, "bucket/run").put("a", [memoryview(bytes(300))] * 100)
    assert most <= 1300


def test_what_s3_cannot_take_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "S3_LARGEST", 1000)
    far = RemoteStorage(Place("s3://bucket/run"), SimpleNamespace(type_name="s3"), "bucket/run")
    with pytest.raises(StorageError, match="1001 bytes cannot be written to S3, where pyarrow writes 1000 at most"):
        checkpoint.write_shard(far, Name(5, 1, 1), 0, 1, [memoryview(bytes(500)), memoryview(bytes(501))])
