"""The file of a run's final state: its formats, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
