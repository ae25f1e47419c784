"""What is measured of the place where a log will be."""

from __future__ import annotations

from pathlib import Path

import pytest
from disks import small_file_system

from raytrain_ft.storage.log_speed import bandwidth_of


def test_it_is_measured_where_the_log_will_be_and_nothing_is_left(tmp_path: Path) -> None:
    found = bandwidth_of(tmp_path / "runs" / "mine" / "log")
    assert found is not None
    assert 1e6 < found < 1e12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["1M"])
def test_where_there_is_no_room_nothing_is_said(tmp_path: Path, size: str) -> None:
    with small_file_system(tmp_path / "disk", size) as disk:
        assert bandwidth_of(disk) is None
        assert list(disk.iterdir()) == []
