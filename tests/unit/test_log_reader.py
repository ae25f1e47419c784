"""The reader of the tensor logs: all that was written whole, and nothing else."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from store import complete_steps, same_bits
from torch import Tensor

from raytrain_ft.errors import LogGapError, StorageError
from raytrain_ft.storage import log_format, log_reader, log_scan
from raytrain_ft.storage.log_format import Head
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import Key, TensorLog
from raytrain_ft.storage.tensors import DTYPES


def key(step: int, micro_batch: int = 0) -> Key:
    return Key(step, micro_batch, "activation", 0, 1)


def log_of(directory: Path, records: dict[Key, list[Tensor]], member: str = "w0", incarnation: int = 1, **more: Any) -> Path:
    """Writes a log of one file."""
    log = TensorLog(directory, member, **more)
    for at, tensors in records.items():
        log.append(at, incarnation, tensors)
    log.close()
    assert log.stats.failed == ""
    return max(directory.glob(f"{member}-{incarnation}-*.arrow"), key=lambda path: path.stat().st_mtime_ns)


def seen(directory: Path) -> LogReader:
    reader = LogReader(directory)
    reader.refresh()
    return reader


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    kind = DTYPES[dtype]
    tensors = [random_bits(kind, 3, 5), random_bits(kind, 1).reshape(()), torch.empty((0, 3), dtype=kind), random_bits(kind, 7)]
    log_of(tmp_path, {key(0): tensors, key(1): tensors[:1], key(2): tensors[2:3]})
    reader = seen(tmp_path)
    for at, expected in ((0, tensors), (1, tensors[:1]), (2, tensors[2:3])):
        found = reader.read(key(at))
        assert len(found) == len(expected)
        assert all(map(same_bits, found, expected))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.rand(6, 8)
    with torch.inference_mode():
        inference = torch.rand(4)
    tensors = [
        base.t(),
        base[::2, 1::3],
        base[:1].expand(5, 8),
        torch.rand(3, requires_grad=True) * 2,
        torch.nn.Parameter(base),
        torch.view_as_complex(torch.rand(3, 2)).conj(),
        torch.rand(3, dtype=torch.complex64).conj().imag,
        inference,
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(float("nan")),
    ]
    log_of(tmp_path, {key(0): tensors})
    found = seen(tmp_path).read(key(0))
    assert all(map(same_bits, found, tensors))
    found[0].add_(1)  # they are the caller's own
    assert same_bits(seen(tmp_path).read(key(0))[0], tensors[0])


def test_a_file_broken_off_at_every_byte(tmp_path: Path) -> None:
    whole = log_of(tmp_path / "whole", {key(n): [torch.full((3,), float(n)), torch.ones(2)] for n in range(3)}).read_bytes()
    last = seen(tmp_path / "whole")._places[key(2)][0]
    torn = tmp_path / "torn" / "w0-1-0-0-1.arrow"
    torn.parent.mkdir()
    growing = LogReader(torn.parent)  # one that sees the file grow byte by byte
    for length in range(len(whole) + 1):
        with torn.open("ab") as file:
            file.write(whole[length - 1 : length] if length else b"")
        growing.refresh()
        if length < last.start:
            continue
        for reader in (growing, seen(torn.parent)):
            assert reader.has(key(1))
            assert reader.has(key(2)) == (length >= last.end), length
            assert reader.read(key(1))[0].tolist() == [1, 1, 1]
            if length >= last.end:
                assert reader.read(key(2))[0].tolist() == [2, 2, 2]
            else:
                with pytest.raises(LogGapError, match=r"nothing was found of Key.step=2") as error:
                    reader.read(key(2))
                assert ("breaks off within record 2" in str(error.value)) == (length > last.start)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_every_bit_that_flips_is_noticed(tmp_path: Path, compression: Any) -> None:
    """Never a wrong tensor, and no other error; the file is named unless nothing is wrong that matters."""
    tensors = {key(n): [torch.full((3,), float(n)), torch.tensor([n], dtype=torch.int8)] for n in range(3)}
    path = log_of(tmp_path, tensors, compression=compression)
    whole = bytearray(path.read_bytes())
    gaps: list[str] = []
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        reader = seen(tmp_path)
        assert len(reader._places) <= 3
        for wanted, expected in tensors.items():
            try:
                assert all(map(same_bits, reader.read(wanted), expected))
            except LogGapError as error:
                gaps.append(str(error))
    assert all(path.name in gap for gap in gaps)
    assert len(gaps) > len(whole) // 4


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_heads_are_the_same_without_pyarrow(tmp_path: Path, compression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of several layouts in turns: those that look like one before are read in another way, and found alike."""
    log = TensorLog(tmp_path, "w0", compression=compression)
    for step in range(3):
        for number in range(6):
            shape = (number % 2 + 1, 4)
            log.append(key(step, number), 1, [torch.randn(shape)])
            log.append(Key(step, number, "gradient", 0, 2), 1, [torch.randn(shape), torch.ones(2, dtype=torch.int16)])
        log.append(Key(step, -1, "agreed", -1, -1), 1, [torch.zeros(3, dtype=torch.float64)])
    assert log.flush(10)
    log.close()
    decoded: list[Any] = []
    decode = log_scan.decode_head
    monkeypatch.setattr(log_scan, "decode_head", lambda batch: decoded.append(batch) or decode(batch))
    quickly, count = seen(tmp_path), len(decoded)
    assert count == (39 if compression else 5)
    monkeypatch.setattr(log_scan, "MOST_PATTERNS", 0)
    slowly = seen(tmp_path)
    assert len(decoded) == count + 39
    assert quickly._places == slowly._places
    assert [place.head for places in quickly._places.values() for place in places] == [
        place.head for places in slowly._places.values() for place in places
    ]


def test_a_head_that_is_damaged_is_noticed_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of the last record's head, one at a time, gives what pyarrow gives."""
    path = log_of(tmp_path, {key(n): [torch.full((3,), float(n))] for n in range(3)})
    whole = path.read_bytes()
    place = seen(tmp_path)._places[key(2)][0]
    for at in range(place.start, place.end - 16):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        quickly = seen(tmp_path)
        with monkeypatch.context() as without:
            without.setattr(log_scan, "MOST_PATTERNS", 0)
            slowly = seen(tmp_path)
        assert quickly._places == slowly._places, at
        assert [f.trouble() for f in quickly._files.values()] == [f.trouble() for f in slowly._files.values()], at


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    path = log_of(tmp_path, {key(n): [torch.full((1000,), float(n))] for n in range(3)})
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(1000).numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(content)
    reader = seen(tmp_path)
    with pytest.raises(LogGapError, match=r"step=1.*damaged in w0-1-0-0-1.arrow, record 1 .*checksum of its tensors"):
        reader.read(key(1))
    assert reader.read(key(2))[0].tolist() == [2] * 1000


def test_the_highest_incarnation_counts(tmp_path: Path) -> None:
    for incarnation in (2, 10, 9):
        log_of(tmp_path, {key(0): [torch.tensor(incarnation)]}, f"w{incarnation}", incarnation)
    reader = seen(tmp_path)
    assert reader.read(key(0))[0].item() == 10
    assert reader.read(key(0), incarnation=2)[0].item() == 2
    with pytest.raises(LogGapError, match="of incarnation 3, only of 2, 9, 10"):
        reader.read(key(0), incarnation=3)
    log_of(tmp_path, {key(0): [torch.tensor(100)]}, "w10", 10)  # logged again
    reader.refresh()
    assert reader.read(key(0))[0].item() == 100
    path = tmp_path / "w10-10-1-0-1.arrow"
    path.write_bytes(path.read_bytes().replace(b"\x64\0\0\0\0\0\0\0", b"\x65\0\0\0\0\0\0\0"))
    assert reader.read(key(0))[0].item() == 10, "the same incarnation, written before"
    (tmp_path / "w10-10-0-0-1.arrow").write_bytes(b"")
    with pytest.raises(LogGapError, match=r"w10-10-1-0-1.arrow.*w10-10-0-0-1.arrow"):  # not that of an older one
        reader.read(key(0))


def test_what_belongs_to_another_world_is_waited_past(tmp_path: Path) -> None:
    log_of(tmp_path, {key(0): [torch.tensor(1)]}, "w1", 1)
    reader = LogReader(tmp_path, since=2)
    assert not reader.has(key(0))
    with pytest.raises(LogGapError):
        reader.await_record(key(0), 0.1, lambda: None)
    log_of(tmp_path, {key(0): [torch.tensor(2)]}, "w2", 2)
    assert reader.await_record(key(0), 5, lambda: None)[0].item() == 2


def test_a_directory_that_cannot_be_listed_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(tmp_path, {key(0): [torch.tensor(1)]})
    real, left = os.scandir, [3]

    def scandir(path: Path) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    reader = LogReader(tmp_path)
    assert reader.await_record(key(0), 5, lambda: None)[0].item() == 1
    left[0] = 10**6
    with pytest.raises(LogGapError, match="cannot be listed: Stale file handle"):
        LogReader(tmp_path).await_record(key(0), 0.1, lambda: None)


def test_only_the_files_of_a_step_are_looked_into(tmp_path: Path) -> None:
    log_of(tmp_path, {key(step): [torch.tensor(step)] for step in range(40)})
    log_of(tmp_path, {key(step): [torch.tensor(100 + step)] for step in range(17, 20)}, "w1", 2)  # again, after a recovery
    log_of(tmp_path, {Key(step, 0, "activation", 0, 2): [torch.tensor(step)] for step in range(40)}, "w2", 2)
    log_of(tmp_path, {Key(step, -1, "agreed", -1, -1): [torch.tensor(step)] for step in range(40)}, "w2", 2)
    reader = LogReader(tmp_path)
    assert reader.has(key(17))
    assert {file.receiver for file in reader._files.values() if file.records} == {1}, "what others received is left alone"
    assert {file.step for file in reader._files.values() if file.records} == {16, 17, 20}
    assert reader.read(key(17))[0].item() == 117
    assert reader.has(key(19))
    assert reader.read(key(16))[0].item() == 16
    assert reader.read(key(19))[0].item() == 119
    assert not reader.has(key(40))
    assert max(file.step for file in reader._files.values() if file.records) == 20, "one from 36 on ends with 39"
    assert reader.has(agreed_key(30))


def agreed_key(step: int) -> Key:
    return Key(step, -1, "agreed", -1, -1)


def test_what_is_there_is_found_without_looking_for_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads thousands of records; on a network a listing of their files takes its time, and so does each file. What
    all have agreed upon is in each one's files."""
    listings: list[Path] = []
    looks: list[str] = []
    scandir, scan = os.scandir, log_reader.scan
    monkeypatch.setattr(os, "scandir", lambda path: (listings.append(path), scandir(path))[1])
    monkeypatch.setattr(log_reader, "scan", lambda file: (looks.append(file.path.name), scan(file))[1])
    for member in ("w0", "w1", "w2"):
        log_of(tmp_path, {agreed_key(step): [torch.tensor(step)] for step in range(40)}, member)
    log_of(tmp_path, {key(step, n): [torch.tensor(step)] for step in range(40) for n in range(3)})
    listings.clear()
    reader = LogReader(tmp_path)
    for step in range(40):
        for at in (key(step, 0), key(step, 1), agreed_key(step), key(step, 2)):
            assert reader.await_record(at, 5, lambda: None)[0].item() == step
    assert len(listings) == 1
    assert sum("all" in name for name in looks) == 10, "those of one worker are enough"
    assert max(Counter(looks).values()) == 1
    log_of(tmp_path, {key(39, 3): [torch.tensor(7)], key(40): [torch.tensor(8)]}, "w3", 2)
    assert reader.await_record(key(39, 3), 5, lambda: None)[0].item() == 7, "in a file that came later"
    assert reader.await_record(key(40), 5, lambda: None)[0].item() == 8
    listed = len(listings)
    assert not reader.has(key(40, 1))
    assert not reader.has(key(40, 2))
    assert len(listings) <= listed + 1


@pytest.mark.parametrize("part", ["head", "tensors"])
def test_what_all_agreed_upon_is_read_from_another_ones_file_if_one_is_damaged(tmp_path: Path, part: str) -> None:
    log_of(tmp_path, {agreed_key(0): [torch.tensor(5)]}, "w0")
    path = log_of(tmp_path, {agreed_key(0): [torch.tensor(5)]}, "w1")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"agreed") if part == "head" else data.rindex(b"\x05" + bytes(7))] ^= 1
    path.write_bytes(data)
    assert LogReader(tmp_path).await_record(agreed_key(0), 5, lambda: None)[0].item() == 5


def test_of_what_all_agreed_upon_the_highest_incarnation_counts(tmp_path: Path) -> None:
    for incarnation, member in ((1, "w2"), (3, "w0"), (2, "w1")):
        log_of(tmp_path, {agreed_key(0): [torch.tensor(incarnation)]}, member, incarnation)
    assert LogReader(tmp_path).await_record(agreed_key(0), 5, lambda: None)[0].item() == 3


def test_complete_steps(tmp_path: Path) -> None:
    keys = [key(1, 0), key(1, 1), key(2, 1), key(3, 0), key(3, 1), key(3, 2)]
    others = [Key(4, n, "gradient", 1, 0) for n in range(2)] + [Key(5, n, "activation", 0, 1, replica=1) for n in range(2)]
    log_of(tmp_path, {at: [torch.zeros(1)] for at in [*keys, *others, Key(2, -1, "agreed", 0, -1)]})
    reader = seen(tmp_path)
    assert complete_steps(reader, 0, 1, "activation", 2) == {1, 3}
    assert complete_steps(reader, 0, 1, "activation", 3) == {3}
    assert complete_steps(reader, 1, 0, "gradient", 2) == {4}
    assert complete_steps(reader, 0, 1, "activation", 2, replica=1) == {5}
    assert reader.has(Key(2, -1, "agreed", 0, -1))


def test_what_was_trimmed_is_gone(tmp_path: Path) -> None:
    log = TensorLog(tmp_path, "w0")
    reader = LogReader(tmp_path / "later")
    reader.refresh()  # nothing there yet
    reader = LogReader(tmp_path)
    log.append(key(0), 1, [torch.zeros(1)])
    assert log.flush(10)
    reader.refresh()
    assert reader.has(key(0))
    log.trim(1)
    assert log.flush(10)
    with pytest.raises(LogGapError, match=r"damaged in w0-1-0-0-1.arrow.*No such file"):
        reader.read(key(0))
    reader.refresh()
    assert not reader.has(key(0))
    log.close()


def test_prefetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "AHEAD_BYTES", 10_000)
    keys = [key(n // 4, n % 4) for n in range(40)]
    path = log_of(tmp_path, {at: [torch.full((500,), float(n))] for n, at in enumerate(keys)})
    reader = seen(tmp_path)
    reader.prefetch([key(99), *keys])
    ahead = reader._ahead
    assert ahead is not None
    for n, at in enumerate(keys):
        assert reader.read(at)[0].tolist() == [n] * 500
        assert ahead._bytes <= 12_000
    assert ahead._bytes == 0
    reader.prefetch(keys[:2])
    deadline = time.monotonic() + 5
    while len(ahead._held) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    path.with_name("w0-1-0-0-1.arrow").write_bytes(b"")
    assert reader.read(keys[1])[0].tolist() == [1] * 500, "it was read before"
    log_of(tmp_path, {keys[0]: [torch.tensor(7)]}, "w1", 2)
    reader.refresh()
    assert reader.read(keys[0])[0].item() == 7, "what was read ahead is not the newest any more"
    reader.close()
    assert not ahead._thread.is_alive()


# ---------------------------------------------------------------- with a writer that is alive, or was


def test_reader_and_writer_at_the_same_time(tmp_path: Path) -> None:
    log = TensorLog(tmp_path, "w0", memory_bytes=1)
    reader = LogReader(tmp_path)

    def write() -> None:
        for n in range(200):
            log.append(key(n // 10, n % 10), 1, [torch.full((1000 + n,), float(n))])
            time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    checks = []
    for n in range(200):
        (tensor,) = reader.await_record(key(n // 10, n % 10), 30, lambda: checks.append(1))
        assert tensor.tolist() == [n] * (1000 + n)
    writer.join()
    assert checks
    log.close()


def test_awaiting_ends(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    began = time.monotonic()
    with pytest.raises(LogGapError, match="looked into 0 files"):
        reader.await_record(key(0), 0.2, lambda: None)
    assert 0.2 <= time.monotonic() - began < 10

    def fenced() -> None:
        raise StorageError("fenced")

    with pytest.raises(StorageError, match="fenced"):
        reader.await_record(key(0), 60, fenced)


WRITER = """
import sys, torch
from pathlib import Path
from raytrain_ft.storage.tensor_log import Key, TensorLog
log = TensorLog(Path(sys.argv[1]), "w0")
for n in range(10**9):
    log.append(Key(n, 0, "activation", 0, 1), 1, [torch.full((50_000 + n,), float(n))])
    print(n, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_prefix(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while sum(path.stat().st_size for path in tmp_path.iterdir()) < 20e6:
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    reader = seen(tmp_path)
    steps = complete_steps(reader, 0, 1, "activation", 1)
    assert len(steps) > 50
    assert steps == set(range(len(steps)))
    for step in steps:
        (tensor,) = reader.read(key(step))
        assert tensor.shape == (50_000 + step,)
        assert bool((tensor == step).all())
    with pytest.raises(LogGapError):
        reader.read(key(len(steps)))


# ---------------------------------------------------------------- what others have put there


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def forged(path: Path, promise: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose record has right checksums and wrong shapes."""
    real = Head.__init__

    def init(self: Head, at: Key, incarnation: int, dtypes: object, shapes: object, checksum: int) -> None:
        real(self, at, incarnation, *promise, checksum)

    with monkeypatch.context() as patch:
        patch.setattr(log_format.Head, "__init__", init)
        log_of(path.parent, {key(0): [torch.ones(10)]})


@pytest.mark.parametrize(
    "promise",
    [
        (("torch.float32",), ((2**40,),)),
        (("torch.float32",), ((2**61, 2**61, 2**61),)),
        (("torch.float32",), ((100,),)),
        (("torch.float32",), ((9,),)),
        (("torch.float32",), ((-10,),)),
        (("torch.float32",), ()),
        (("torch.qint8",), ((40,),)),
        (("os.system",), ((40,),)),
        (("torch.float32",), ((1,) * 400,)),
    ],
)
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_shapes_that_are_wrong(tmp_path: Path, promise: Any, compression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TensorLog.__init__
    monkeypatch.setattr(TensorLog, "__init__", lambda self, *args, **more: real(self, *args, **more, compression=compression))
    forged(tmp_path / "w0-1-0-0-1.arrow", promise, monkeypatch)
    with pytest.raises(LogGapError, match=r"w0-1-0-0-1\.arrow"):
        seen(tmp_path).read(key(0))


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    good = log_of(tmp_path / "log", {key(n): [torch.ones(10)] for n in range(2)}).read_bytes()
    directory = tmp_path / "log"
    (tmp_path / "elsewhere.arrow").write_bytes(good)
    (directory / "link-1-0-0-1.arrow").symlink_to(tmp_path / "elsewhere.arrow")
    os.mkfifo(directory / "fifo-1-0-0-1.arrow")
    (directory / "directory-1-0-0-1.arrow").mkdir()
    names = (
        "w0",
        "w0-1-0-0",
        ".w1-1-0-0-1",
        "w1-1-0-0-1.arrow.partial",
        "w1-x-0-0-1",
        "w1-1-٣-0-1",
        "w1--1-0-1",
        "w1-1-0-x-1",
        "w1-1-0-0-y",
    )
    for name in (f"{name}.arrow" for name in names):
        (directory / name).write_bytes(good)
    schema = pa.schema([("step", pa.int64())])
    with pa.ipc.new_stream(directory / "schema-1-0-0-1.arrow", schema) as writer:
        writer.write_batch(pa.record_batch([[1]], schema=schema))
    (directory / "pickle-1-0-0-1.arrow").write_bytes(pickle.dumps(Bomb()))
    (directory / "zeros-1-0-0-1.arrow").write_bytes(bytes(1000))
    (directory / "incarnation-7-0-0-1.arrow").write_bytes(good)
    (directory / "step-1-0-5-1.arrow").write_bytes(good)
    (directory / "length-1-0-0-1.arrow").write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(100))
    (directory / "sparse-1-0-0-1.arrow").write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(100))
    os.truncate(directory / "sparse-1-0-0-1.arrow", 2**42)
    (directory / "after-1-0-0-1.arrow").write_bytes(good + b"more")
    (directory / "old-1-0-0-1.arrow").write_bytes(good[: len(good) - 8] + bytes(64))
    began = time.monotonic()
    reader = seen(directory)
    assert time.monotonic() - began < 2
    assert len(reader._places[key(0)]) == 3, "of w0, after and old"
    assert reader.read(key(1))[0].tolist() == [1] * 10
    with pytest.raises(LogGapError) as error:
        reader.read(key(5))
    assert ", and " in str(error.value)
    named = {what.split("-")[0] for file in reader._files.values() for what in file.trouble()}
    assert named >= {"schema", "pickle", "zeros", "incarnation", "step", "length", "sparse", "after", "old"}
    assert not Path("exploded").exists()
