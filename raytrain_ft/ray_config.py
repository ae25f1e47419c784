"""Ray Train's own classes, which users know, with what is different here: retries are on, and checkpoints write themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import Literal

import ray.train

from raytrain_ft.checks import is_whole
from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import check_types, knows_its_names
from raytrain_ft.policy.frequency import check_budget

WITHOUT_EFFECT = (
    *("placement_strategy", "accelerator_type", "label_selector", "topology", "use_tpu", "elastic_resize_monitor_interval_s"),
    *("callbacks", "storage_filesystem", "logging_config"),
    *("controller_failure_limit", "relax_collectives_on_preemption", "preemption_grace_s"),
    *("checkpoint_score_attribute", "checkpoint_score_order"),
)
"""Fields of Ray Train's `ScalingConfig`, `RunConfig`, `FailureConfig` and `CheckpointConfig`."""


@knows_its_names
class ScalingConfig(ray.train.ScalingConfig):
    """Ray Train's `ScalingConfig`; a `num_workers` that cannot be is told here as everything else is, with its value."""

    def __post_init__(self) -> None:
        workers(self)
        super().__post_init__()


@knows_its_names
@dataclass
class FailureConfig(ray.train.FailureConfig):
    """Ray Train's `FailureConfig` with retries on by default: lost nodes are this library's business.

    `max_failures` counts lost workers (-1: no limit), `max_preemption_failures` those that a cloud took back. An
    exception in the user's own code is never retried.
    """

    max_failures: int = -1


@knows_its_names
@dataclass
class CheckpointConfig(ray.train.CheckpointConfig):
    """Ray Train's `CheckpointConfig`, and how often: checkpoints are written by themselves, as often as their budget allows.

    Attributes:
        num_to_keep: how many stay, so that there is one to fall back to if the newest is damaged; None keeps all.
        overhead: the share of the training time that checkpoints may cost (CheckFreq's p), between 0 and 1.
        every: "auto" chooses the interval from measurements, within `overhead`; a number of steps is taken as it is; None
            writes no checkpoints.
        keep_epochs: also write one at the end of every epoch, and keep these.
        storage_path: where checkpoints go if not to the run's directory: a path, or any URI of `pyarrow.fs` ("s3://..."). What
            is told of it is without the credentials that it may hold.
        resume: "auto" goes on from the newest valid checkpoint of a run of this name; "never" begins anew; "require" fails
            without one.
        override: what may differ from the checkpoint on resume: "optimizer" (and its schedule), "dataset".
        failure_interval: mean time between failures, if known, or "measured": with it, checkpoints are no more frequent than
            Young and Daly's interval.
    """

    num_to_keep: int | None = 2
    overhead: float = 0.035
    every: int | Literal["auto"] | None = "auto"
    keep_epochs: bool = False
    storage_path: str | None = None
    resume: Literal["auto", "never", "require"] = "auto"
    override: tuple[str, ...] = ()
    failure_interval: timedelta | Literal["measured"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        are_some = isinstance(self.override, tuple | list | set | frozenset)
        if not are_some or not all(what in ("optimizer", "dataset") for what in self.override):
            raise ConfigError(f'CheckpointConfig(override={self.override!r}): use a tuple of "optimizer", "dataset"')
        check_types(self, CheckpointConfig)
        if isinstance(self.every, int) and self.every < 1:
            raise ConfigError(f'CheckpointConfig(every={self.every}): use "auto", a number of steps of at least 1, or None')
        interval = self.failure_interval
        if isinstance(interval, timedelta) and interval <= timedelta():
            raise ConfigError(f'CheckpointConfig(failure_interval={interval!r}): use a time longer than zero, or "measured"')
        check_budget(self.overhead)


@knows_its_names
@dataclass
class RunConfig(ray.train.RunConfig):
    """Ray Train's `RunConfig`; only the defaults of `failure_config` and `checkpoint_config` differ."""

    def __post_init__(self) -> None:
        if self.failure_config is None:
            self.failure_config = FailureConfig()
        if self.checkpoint_config is None:
            self.checkpoint_config = CheckpointConfig()
        super().__post_init__()


def workers(scaling: ray.train.ScalingConfig) -> tuple[int, int]:
    """(least, most) workers of a `ScalingConfig`, also of Ray's own, and of one whose fields were set since.

    Raises:
        ConfigError: `num_workers` is no number and no range.
    """
    value = scaling.num_workers
    if is_whole(value, 1):
        return value, value
    if isinstance(value, tuple) and len(value) == 2 and all(type(n) is int for n in value) and 1 <= value[0] <= value[1]:
        return value
    raise ConfigError(f"ScalingConfig(num_workers={value!r}): use a number of at least 1, or a range (min, max)")


def check_supported(scaling: ray.train.ScalingConfig, run: ray.train.RunConfig) -> None:
    """Refuses what Ray Train's classes can say but has no effect here, rather than passing over it in silence.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(scaling.use_gpu, bool):
        raise ConfigError(f"ScalingConfig(use_gpu={scaling.use_gpu!r}): use True or False")
    for name in ("max_failures", "max_preemption_failures"):
        most = getattr(run.failure_config, name, -1)
        if not isinstance(most, Integral) or isinstance(most, bool) or most < -1:
            raise ConfigError(f"FailureConfig({name}={most!r}): use a number of workers, or -1 for no limit")
    default = ray.train.RunConfig()
    for given, usual in (
        (scaling, ScalingConfig()),
        (run, default),
        (run.failure_config, default.failure_config),
        (run.checkpoint_config, default.checkpoint_config),
    ):
        for name in WITHOUT_EFFECT:
            wish = getattr(given, name, None)
            if wish != getattr(usual, name, None) and (name, wish) != ("placement_strategy", "SPREAD"):  # which is so anyway
                raise ConfigError(f"{type(given).__name__}({name}={wish!r}) has no effect here: leave it out")


__all__ = ["CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"]
