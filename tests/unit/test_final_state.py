"""The file of a run's final state: its formats, and a disk that is full."""

from __future__ import annotations

import errno
import os
import random
import struct
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from disks import small_file_system

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.arrow import read_tensors, write_tensors


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    turned = torch.polar(torch.ones(3), torch.arange(3.0)).conj()
    tensors = {"a": torch.randn(3, 4).T, "empty": torch.empty(0, 2), "one": torch.tensor(7, dtype=torch.int8), "turned": turned}
    tensors["half"] = torch.randn(5).bfloat16()
    write_tensors(tmp_path / "final.arrow", tensors, {"step": 3})
    found, values = read_tensors(tmp_path / "final.arrow")
    assert values == {"step": 3}
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {name: (t.dtype, t.shape) for name, t in tensors.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_an_earlier_saver_left_and_cannot_be_removed_does_not_keep_the_state_from_being_written(tmp_path: Path) -> None:
    (tmp_path / ".final.arrow.0.partial" / "directory").mkdir(parents=True)
    write_tensors(tmp_path / "final.arrow", {"a": torch.ones(3)}, {"step": 3})
    assert read_tensors(tmp_path / "final.arrow")[1] == {"step": 3}


def test_a_small_file_does_not_unpack_to_all_of_the_memory(tmp_path: Path) -> None:
    """What compresses well: a hundred batches of 16 MB each, of zeros."""
    write_tensors(path := tmp_path / "final.arrow", {"zeros": torch.zeros(4_000_000)}, {"step": 3})
    with pa.ipc.open_file(path) as reader:
        schema, batch = reader.schema, reader.get_batch(0)
    with pa.ipc.new_file(path, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(100):
            writer.write_batch(batch)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(StorageError, match=r"final\.arrow is damaged, or none of ours: it holds more than its"):
        read_tensors(path)


def test_a_damaged_file_is_told_and_never_followed(tmp_path: Path) -> None:
    """What lies in it says where to read. Each bit of it may be another; what is not noticed changes no tensor."""
    tensors = {"layer.weight": torch.randn(3, 4), "layer.bias": torch.randn(3)}
    write_tensors(path := tmp_path / "final.arrow", tensors, {"step": 3})
    whole, chosen, noticed = path.read_bytes(), random.Random(0), 0
    for number in chosen.sample(range(8 * len(whole)), 2000):
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        path.write_bytes(damaged)
        try:
            found, _ = read_tensors(path)
        except StorageError:
            noticed += 1
        else:
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items() if name in tensors)
    assert noticed > 200
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(StorageError, match=r"final\.arrow"):
            read_tensors(path)


@pytest.mark.parametrize("offset", [-5, 2**20, 2**30, 2**40])
def test_an_offset_that_lies_is_not_followed(tmp_path: Path, offset: int) -> None:
    write_tensors(path := tmp_path / "final.arrow", {"a": torch.randn(777)}, {})
    whole, true = path.read_bytes(), struct.pack("<qq", 0, 4 * 777)
    assert whole.count(true) >= 1
    path.write_bytes(whole.replace(true, struct.pack("<qq", 0, offset)))
    with pytest.raises(StorageError, match=r"final\.arrow"):
        read_tensors(path)


def test_a_disk_that_is_full_is_told_and_given_back(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "1M") as disk:
        (disk / ".final.arrow.0123.partial").write_bytes(bytes(300_000))  # of a saver that was killed
        with pytest.raises(StorageError, match="Free some space"):
            write_tensors(disk / "final.arrow", {"a": torch.zeros(100_000), "b": torch.zeros(300_000)}, {})
        assert list(disk.iterdir()) == []
        write_tensors(disk / "final.arrow", {"a": torch.zeros(100_000)}, {})


def test_a_directory_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some file systems over FUSE and CIFS: the last thing that a run does must not fail for that."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(UserWarning, match="cannot fsync directories"):
        write_tensors(tmp_path / "final.arrow", {"a": torch.ones(2)}, {})
    assert torch.equal(read_tensors(tmp_path / "final.arrow")[0]["a"], torch.ones(2))
