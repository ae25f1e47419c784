"""What a user sets is checked when it is set: a typed error names the value and the remedy, and no bare error gets out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError
from raytrain_ft.settings import Keywords, TrainSettings


class Task(ft.TrainTask):
    """Is never run."""

    def model(self, stage: int) -> Any: ...

    def optimizer(self, params: Any) -> Any: ...

    def dataset(self) -> Any: ...

    def loss(self, output: Any, batch: Any) -> Any: ...


def trainer(**arguments: Any) -> ft.Trainer:
    return ft.Trainer(Task(), **({"max_steps": 1, "global_batch_size": 4} | arguments))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ft.RecoveryConfig(hang_timeout=60), r"hang_timeout=60\): use timedelta"),
        (lambda: ft.RecoveryConfig(quorum="0.5"), "use float"),
        (lambda: ft.RecoveryConfig(quorum=1.5), "a share from 0 to 1"),
        (lambda: ft.RecoveryConfig(num_spares=1.5), "use int"),
        (lambda: ft.RecoveryConfig(num_spares=True), "use int"),
        (lambda: ft.RecoveryConfig(log=False), "use LogConfig"),
        (lambda: ft.RecoveryConfig(strategy=["auto"]), "use one of auto, replication"),
        (lambda: ft.RecoveryConfig(preemption="aws"), "a tuple of aws, gcp"),
        (lambda: ft.RecoveryConfig(lease=timedelta()), "longer than zero"),
        (lambda: ft.LogConfig(enabled="no"), "use bool"),
        (lambda: ft.LogConfig(recovery_target=2), "use a timedelta longer than zero"),
        (lambda: ft.CheckpointConfig(overhead="3"), "use float"),
        (lambda: ft.CheckpointConfig(every="often"), "a number of steps"),
        (lambda: ft.ParallelismConfig(split=[1]), "tuple"),
        (lambda: ft.FailAt(phase="forward", role="x"), "use 'worker', 'supervisor'"),
        (lambda: ft.FailAt(phase="forward", nth=0), "nth=0"),
        (lambda: ft.FailAt(phase="nowhere"), "a worker has the phases data"),
        (lambda: ft.FailAt(phase="forward", action="x"), "use one of sigkill"),
        (lambda: trainer(faults=ft.FailAt(phase="forward")), r"use Sequence\[FailAt\]"),
        (lambda: trainer(callbacks=ft.TensorBoard()), "a list of instances"),
        (lambda: trainer(recovery_config={"num_spares": 1}), "use a raytrain_ft.RecoveryConfig"),
        (lambda: trainer(precision="fp16"), "use 'fp32', 'bf16'"),
        (lambda: trainer(max_steps=1e3), "use int"),
        (lambda: trainer(seed="a"), "use int"),
        (lambda: trainer(recovery_config=ft.RecoveryConfig(replacement="shrink")), r"num_workers=\(min, max\)"),
    ],
)
def test_a_value_that_cannot_be_used(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_editors_know_every_keyword() -> None:
    assert get_type_hints(Keywords) == get_type_hints(TrainSettings)


def test_values_that_can() -> None:
    range_of_workers = ft.ScalingConfig(num_workers=(2, 4))
    trainer(scaling_config=range_of_workers, recovery_config=ft.RecoveryConfig(replacement="shrink", quorum=1))
    trainer(max_grad_norm=1, faults=[ft.FailAt(phase="forward")], callbacks=[ft.TensorBoard()])
    ft.CheckpointConfig(every=None, failure_interval=timedelta(hours=1), num_to_keep=None)
    ft.RecoveryConfig(preemption=("aws", "sigterm"), log=ft.LogConfig(recovery_target=timedelta(seconds=1)))
