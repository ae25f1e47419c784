"""The arguments of `Trainer` that are numbers, and whether they go together with what else a user has set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Required, TypedDict

from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.config import ParallelismConfig, RecoveryConfig
from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import check_types
from raytrain_ft.policy.forward import STRATEGIES as FORWARD
from raytrain_ft.ray_config import CheckpointConfig, ScalingConfig, workers


class Keywords(TypedDict, total=False):
    """The same as keywords of `Trainer`, for editors and type checkers; what is left out has the default of `TrainSettings`."""

    max_steps: Required[int]
    global_batch_size: Required[int]
    seed: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    precision: Literal["fp32", "bf16"]
    on_non_finite: Literal["raise", "skip", "roll_back"]
    shuffle: bool
    drop_last: bool
    bucket_bytes: int
    first_bucket_bytes: int
    faults: Sequence[FailAt]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of `Trainer` that are numbers; checked here, before anything starts."""

    max_steps: int
    global_batch_size: int
    seed: int = 0
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    on_non_finite: Literal["raise", "skip", "roll_back"] = "raise"
    shuffle: bool = True
    drop_last: bool = False
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    faults: Sequence[FailAt] = ()

    def check(self, scaling: ScalingConfig, recovery: RecoveryConfig, parallelism: ParallelismConfig) -> None:
        """Raises `ConfigError` for values that cannot work together."""
        check_types(self, TrainSettings, called="Trainer")
        for name in ("max_steps", "global_batch_size", "gradient_accumulation_steps", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Trainer({name}={getattr(self, name)!r}): use a whole number of at least 1")
        for name in ("max_grad_norm", "first_bucket_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Trainer({name}={value!r}): use a number greater than 0")
        if parallelism.pipeline_parallel_degree > 1:
            self._check_pipeline(scaling, recovery, parallelism)
        elif recovery.log.selective:
            raise ConfigError("LogConfig(budget_bytes=..., recovery_target=...): only a pipeline logs anything; leave them out")
        elif recovery.strategy == "logging":
            raise ConfigError('RecoveryConfig(strategy="logging"): only a pipeline logs anything; use "auto"')
        _, most = workers(scaling)
        needed = most // parallelism.pipeline_parallel_degree * self.gradient_accumulation_steps
        if self.global_batch_size < needed:
            raise ConfigError(
                f"Trainer(global_batch_size={self.global_batch_size}): with up to {most} workers and "
                f"{self.gradient_accumulation_steps} micro-batches each, a step needs at least {needed} samples"
            )
        if recovery.replacement == "shrink" and isinstance(scaling.num_workers, int):
            raise ConfigError(
                f'RecoveryConfig(replacement="shrink") with ScalingConfig(num_workers={scaling.num_workers}): nothing says '
                "with how few workers the run may go on; give a range, num_workers=(min, max)"
            )
        if recovery.update == "wait_free" and (self.max_grad_norm is not None or self.on_non_finite == "skip"):
            raise ConfigError(
                'RecoveryConfig(update="wait_free") updates buckets before all gradients are known, so it excludes '
                'max_grad_norm and on_non_finite="skip"; use update="barrier"'
            )
        if self.on_non_finite == "roll_back" and recovery.strategy == "replication":
            raise ConfigError(
                'Trainer(on_non_finite="roll_back") goes back to a checkpoint, and RecoveryConfig(strategy="replication") '
                'never does: use strategy="auto"'
            )
        self._check_faults(most, silence=recovery.update == "barrier" and parallelism.pipeline_parallel_degree == 1)

    def _check_faults(self, workers: int, *, silence: bool) -> None:
        """Raises `ConfigError` for failures that would never come about. `silence`: whether a rank can fall silent."""
        beyond = [fault.rank for fault in self.faults if fault.rank is not None and fault.rank >= workers]
        if beyond:
            raise ConfigError(
                f"FailAt(rank={beyond[0]}) would never strike: ranks begin at 0, and ScalingConfig(num_workers) is at most "
                f"{workers}"
            )
        names = [fault.name for fault in self.faults]
        if twice := [fault for number, fault in enumerate(self.faults) if fault.name in names[:number]]:
            raise ConfigError(f"{twice[0]} is among faults twice, and strikes once: give another rank, step, phase or nth")
        if not silence and any(fault.action == "silence" for fault in self.faults):
            raise ConfigError(
                'FailAt(action="silence") has a rank contribute zeros to buckets that nobody has updated yet, and no stage is '
                'without its neighbours: it goes with update="barrier" and without a pipeline'
            )

    def check_checkpoints(self, policy: CheckpointConfig, recovery: RecoveryConfig) -> None:
        """Raises `ConfigError` for wishes that need checkpoints which will not be there."""
        wishes = {
            f'RecoveryConfig(strategy="{recovery.strategy}")': recovery.strategy in ("checkpoint", "snapshot"),
            'Trainer(on_non_finite="roll_back")': self.on_non_finite == "roll_back",
        }
        for wish, present in wishes.items():
            if present and policy.every is None:
                raise ConfigError(
                    f'{wish} goes back to checkpoints, and CheckpointConfig(every=None) takes none: use every="auto"'
                )
        if recovery.strategy == "snapshot" and (policy.resume == "require" or policy.keep_epochs):
            asked = 'resume="require"' if policy.resume == "require" else "keep_epochs=True"
            raise ConfigError(
                f'CheckpointConfig({asked}): RecoveryConfig(strategy="snapshot") keeps copies in memory alone, which are gone '
                "when the run ends; use another strategy"
            )

    def _check_pipeline(self, scaling: ScalingConfig, recovery: RecoveryConfig, parallelism: ParallelismConfig) -> None:
        stages, micro_batches = parallelism.pipeline_parallel_degree, parallelism.micro_batches
        least, most = workers(scaling)
        if least % stages or most % stages:
            raise ConfigError(
                f"ScalingConfig(num_workers={scaling.num_workers}): {stages} stages need a multiple of {stages} workers"
            )
        for replicas in range(least // stages, most // stages + 1):
            if self.global_batch_size % (replicas * micro_batches):
                raise ConfigError(
                    f"Trainer(global_batch_size={self.global_batch_size}): {replicas} replicas of {micro_batches} "
                    f"micro-batches need a multiple of {replicas * micro_batches}"
                )
        refused = {
            'RecoveryConfig(update="wait_free")': recovery.update == "wait_free",
            "Trainer(gradient_accumulation_steps=...)": self.gradient_accumulation_steps != 1,
            "ScalingConfig(use_gpu=True)": scaling.use_gpu is True,
            'RecoveryConfig(on_notice="sleep")': recovery.on_notice == "sleep",
            f'RecoveryConfig(strategy="{recovery.strategy}")': recovery.strategy in ("snapshot", *FORWARD),
        }
        remedy = {
            'RecoveryConfig(update="wait_free")': "stages update when all have finished, which costs nothing",
            "Trainer(gradient_accumulation_steps=...)": "set ParallelismConfig(num_pp_microbatches=...) instead",
            "ScalingConfig(use_gpu=True)": "what goes between stages is sent from CPUs only, so far",
            'RecoveryConfig(on_notice="sleep")': "the other stages need what each of them computes",
            f'RecoveryConfig(strategy="{recovery.strategy}")': 'use "auto", "logging" or "checkpoint"',
        }
        for what, present in refused.items():
            if present:
                raise ConfigError(f"{what} does not go with a pipeline: {remedy[what]}")
