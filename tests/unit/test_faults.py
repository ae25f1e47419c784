"""Failures on demand: at their point, once, and together if they are to be."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from raytrain_ft.chaos import faults
from raytrain_ft.chaos.faults import ChaosError, FailAt, Injector
from raytrain_ft.errors import ConfigError


def come(directory: Path, rank: int, asked: list[FailAt]) -> float:
    """When this rank's failure struck, which has come to its point just now."""
    with pytest.raises(ChaosError):
        Injector(asked, directory, "worker").probe("backward", rank=rank, step=3, part=1)
    return time.monotonic()


def test_who_is_to_fail_with_others_waits_for_them(tmp_path: Path) -> None:
    asked = [FailAt(rank=rank, step=3, phase="backward", bucket=1, action="exception", together=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(come, tmp_path, rank, asked) for rank in (2, 0)]
        time.sleep(0.3)
        assert not any(one.done() for one in first)
        assert [faults.when(tmp_path, fault) for fault in asked] == [None] * 3
        last_came = time.monotonic()
        struck = [one.result(5) for one in [*first, pool.submit(come, tmp_path, 1, asked)]]
    assert min(struck) >= last_came
    told = [faults.when(tmp_path, fault) for fault in asked]
    assert all(at is not None and at >= last_came for at in told), "when it struck, not when it came"
    assert {marker.name for marker in tmp_path.iterdir()} == {fault.name for fault in asked}
    assert max(struck) - last_came < 1.0


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "TOGETHER_S", 0.1)
    began = time.monotonic()
    alone = FailAt(rank=0, step=3, phase="backward", bucket=1, action="exception", together=2)
    assert 0.1 <= come(tmp_path, 0, [alone]) - began < 2.0


def test_a_failure_strikes_once_at_its_point(tmp_path: Path) -> None:
    asked = [FailAt(rank=0, step=3, phase="backward", bucket=1, action="exception")]
    injector = Injector(asked, tmp_path, "worker")
    for rank, step, part in ((1, 3, 1), (0, 2, 1), (0, 3, 0)):
        injector.probe("backward", rank=rank, step=step, part=part)
    come(tmp_path, 0, asked)
    Injector(asked, tmp_path, "worker").probe("backward", rank=0, step=3, part=1)  # redone by the next process


def test_one_that_fails_together_with_nobody() -> None:
    with pytest.raises(ConfigError, match="together=0"):
        FailAt(rank=0, step=3, phase="backward", together=0)


def test_a_node_is_killed_although_one_of_its_processes_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def name(self) -> str:
            return "raylet"

        def children(self, recursive: bool) -> list[Process]:
            return [Process(os.getpid()), Process(2), Process(3)]

        def kill(self) -> None:
            killed.append(self.pid)
            if self.pid == 2:
                raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(faults.psutil, "Process", Process)
    faults.kill_node(1)
    assert killed == [1, 2, 3, os.getpid()]
