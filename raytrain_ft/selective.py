"""What a pipeline run logs: all that crosses between nodes, as much as a budget or a target allows, or nothing.

Called once, in the driver, before the run. Where the workers will be, and so which stages have replicas on other nodes and need
no log, is known only later: what is reckoned with here is the most that a run may log. Without a budget or a target the stages
are only asked how much they pass on, which takes one micro-batch forward. With one they are timed as well, so that what cannot
be met is refused here; the groups themselves are chosen by what the first steps take where the workers are
(`policy.replaying.on_stage_timed`).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_ft.config import RecoveryConfig
from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.policy import planning
from raytrain_ft.policy.logging_cost import SMALL_LOG, Worth, fits_idle_time, in_proportion
from raytrain_ft.policy.planning import LogChoice, Measured, Selective, Wish
from raytrain_ft.ray_config import ScalingConfig, workers
from raytrain_ft.settings import TrainSettings
from raytrain_ft.storage.log_speed import bandwidth_of
from raytrain_ft.task import TrainTask
from raytrain_ft.training.profile import ROUNDS, measure_pipeline
from raytrain_ft.training.settings import StepSettings

ZERO_BUBBLE = 3
"""A backward pass in two halves, of which one waits for nobody, leaves a third of the idle time."""


def choose_log(
    task: TrainTask,
    step: StepSettings,
    settings: TrainSettings,
    scaling: ScalingConfig,
    recovery: RecoveryConfig,
    every: int | str | None,
    directory: Path,
) -> LogChoice | None:
    """What a run in stages logs; None if nobody asked for a log.

    Args:
        every: of the run's `CheckpointConfig`. directory: of the run; the log will be in there.

    Raises:
        ConfigError: the budget or the target cannot be met. TaskError: the task fails when it is measured for one of them.
    """
    how = recovery.log
    if step.pipeline is None or not how.enabled or recovery.strategy not in ("auto", "logging"):
        return None
    wish = Wish(
        interval=planning.interval_of(every, settings.max_steps),
        budget_bytes=how.budget_bytes,
        target_seconds=how.recovery_target.total_seconds() if how.recovery_target is not None else None,
        replay_workers=recovery.replay_workers,
    )
    measured: Measured | None = None
    if how.selective:
        measured = measure(task, step, settings, scaling)
        choice = _selected(measured, wish)
    elif recovery.strategy == "logging":
        return LogChoice(kept=True, reason='strategy="logging"', interval=wish.interval)
    else:
        try:
            choice = _described(
                measure(task, step, settings, scaling, rounds=0), wish, "every boundary between nodes is logged"
            )
        except TaskError as error:  # the workers will say the same of it, with rank and step
            return LogChoice(kept=True, reason=f"how much it logs is not known: {error}", interval=wish.interval)
    if choice.kept and recovery.strategy == "auto":
        worth = in_proportion(choice.bytes_per_step, choice.state_bytes)
        if worth.worth and choice.bytes_per_step > SMALL_LOG:
            measured = measured or measure(task, step, settings, scaling, rounds=1)
            worth = _fits(measured, choice, step, worth.reason, directory)
        choice = replace(choice, kept=worth.worth, reason=f"{choice.reason}; {worth.reason}" if worth.worth else worth.reason)
    if not choice.kept:
        warnings.warn(
            f"no log is kept, and a stage that is lost without a replica takes all back to the checkpoint: {choice.reason}",
            stacklevel=4,
        )
    return choice


def _fits(measured: Measured, choice: LogChoice, step: StepSettings, size: str, directory: Path) -> Worth:
    """Whether the log can be written in the pipeline's bubbles, which another schedule makes shorter."""
    bandwidth, how = bandwidth_of(directory), step.pipeline
    assert how is not None
    if bandwidth is None:  # the run will say why
        return Worth(True, size)
    groups = choice.groups or tuple((stage,) for stage in range(measured.stages))
    shorter = ZERO_BUBBLE if how.schedule == "zero_bubble" else how.chunks
    found = fits_idle_time(
        log_bytes=planning.most_per_stage(measured, groups),
        bandwidth=bandwidth,
        step_seconds=measured.step_seconds,
        stages=measured.stages,
        micro_batches=shorter * measured.micro_batches,
    )
    return replace(found, reason=f"{size}; {found.reason}") if found.worth else found


def measure(
    task: TrainTask, step: StepSettings, settings: TrainSettings, scaling: ScalingConfig, rounds: int = ROUNDS
) -> Measured:
    """What the stages of this run cost per step, measured in this process.

    Raises:
        TaskError: the task fails on a micro-batch.
    """
    assert step.pipeline is not None
    replicas, micro_batches = workers(scaling)[1] // step.pipeline.stages, step.pipeline.micro_batches
    samples = settings.global_batch_size // (replicas * micro_batches)
    resources: Any = scaling.resources_per_worker or {}
    return measure_pipeline(task, step, samples, replicas, rounds=rounds, threads=max(1, int(resources.get("CPU", 1))))


def _selected(measured: Measured, wish: Wish) -> LogChoice:
    field = "budget_bytes" if wish.budget_bytes is not None else "recovery_target"
    try:
        groups = planning.choose_groups(measured, wish)
    except ConfigError as error:
        raise ConfigError(f"LogConfig({field}=...): {error}") from error
    choice = _described(measured, wish, f"LogConfig({field}=...) chose the groups {planning.named(groups)}")
    logged = round(planning.log_per_step(measured, groups))
    if len(groups) == 1:
        reason = f"{choice.reason}: the target is met without a log"
        return replace(choice, kept=False, reason=reason, groups=groups, bytes_per_step=0)
    return replace(choice, groups=groups, bytes_per_step=logged, selective=Selective(wish, measured))


def _described(measured: Measured, wish: Wish, reason: str) -> LogChoice:
    every = tuple((stage,) for stage in range(measured.stages))
    return LogChoice(
        kept=True,
        reason=reason,
        bytes_per_step=round(planning.log_per_step(measured, every)),
        state_bytes=sum(measured.state),
        interval=wish.interval,
        compute_ms=tuple(round(1e3 * seconds, 3) for seconds in measured.compute if seconds),
    )
