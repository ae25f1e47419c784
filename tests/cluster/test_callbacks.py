"""Callbacks of a real run: it goes on from a checkpoint, a worker is lost, and the curve stays one."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import train
from toy import Leisurely

import raytrain_ft as ft
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.chronicle import Steps
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.runtime.event_log import read_run

pytestmark = pytest.mark.long


LONG = 30
"""Steps: as Leisurely takes them, longer than the callback sleeps, and than the run waits for its driver after that."""


class Recorder(ft.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Steps | Recovery] = []
        self.ended: list[str] = []

    def on_steps(self, steps: Steps) -> None:
        self.told.append(steps)

    def on_recovery(self, recovery: Recovery) -> None:
        self.told.append(recovery)

    def on_end(self, state: str) -> None:
        self.ended.append(state)


class Slow(ft.Callback):
    """Takes longer over one call than a run may be without its driver."""

    def __init__(self) -> None:
        self.calls = 0

    def on_steps(self, steps: Steps) -> None:
        self.calls += 1
        if self.calls == 1:
            time.sleep(5.0)


def test_a_slow_callback_delays_the_driver_and_nothing_else(cluster, tmp_path: Path) -> None:
    slow, patience = Slow(), timedelta(seconds=2)
    (tmp_path / "pace").touch()
    result = train(
        tmp_path, "run", task=Leisurely(tmp_path / "pace"), workers=2, steps=LONG, callbacks=[slow], driver_timeout=patience
    )
    assert result.metrics["step"] == LONG
    assert slow.calls > 1


def test_one_curve_over_a_resume_and_a_recovery(cluster, tmp_path: Path) -> None:
    recorders = Recorder(), Recorder()
    often = ft.CheckpointConfig(every=5)
    train(tmp_path, "run", steps=12, workers=2, checkpoints=often, callbacks=[recorders[0], ft.TensorBoard()])
    faults = [ft.FailAt(rank=1, step=17, phase="backward", bucket=1)]
    result = train(
        tmp_path, "run", steps=24, workers=2, checkpoints=often, faults=faults, callbacks=[recorders[1], ft.TensorBoard()]
    )
    assert audit(read_run(tmp_path / "run")).ok
    steps = [one for recorder in recorders for one in recorder.told if isinstance(one, Steps)]
    assert (steps[0].first, steps[-1].stop) == (0, 24)
    assert all(a.stop == b.first for a, b in itertools.pairwise(steps))
    assert steps[-1].loss == result.metrics["loss"]
    assert [one for one in recorders[1].told if isinstance(one, Recovery)] == result.recoveries
    assert recorders[1].ended == ["FINISHED"]

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard here")
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    losses = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert losses == [(one.stop, pytest.approx(one.loss)) for one in steps]
    pauses = [event.value for event in board.Scalars("recovery/pause_seconds")]
    assert pauses == [pytest.approx(recovery.seconds) for recovery in result.recoveries]
