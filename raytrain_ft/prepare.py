"""From what the user gave to what a run is. Whatever cannot work is refused here, before any worker starts."""

from __future__ import annotations

import secrets
import uuid
import warnings
from pathlib import Path
from typing import Any, Literal

import ray

from raytrain_ft.config import RecoveryConfig, RunConfig, ScalingConfig, TrainSettings, check_name, workers
from raytrain_ft.errors import ConfigError, UndoRefusedError
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.task import TrainTask
from raytrain_ft.training.build import check_model, check_undo
from raytrain_ft.training.step import StepSettings

Update = Literal["barrier", "wait_free"]


def prepare(
    task: TrainTask, settings: TrainSettings, scaling: ScalingConfig, run: RunConfig, recovery: RecoveryConfig
) -> RunSpec:
    """Checks what needs the task or the file system, connects to Ray, and puts together what a run is.

    Raises:
        ConfigError: naming value, place and remedy.
    """
    update = choose_update(task, recovery)
    directory = make_directory(str(run.storage_path), check_name(str(run.name)))
    sampling = Sampling(
        dataset_size=_size(task.dataset()),
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
    )
    step = StepSettings(
        seed=settings.seed,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_grad_norm=settings.max_grad_norm,
        precision=settings.precision,
        update=update,
        on_non_finite=settings.on_non_finite,
        bucket_bytes=settings.bucket_bytes,
        first_bucket_bytes=settings.first_bucket_bytes,
    )
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return RunSpec(
        run_id=uuid.uuid4().hex[:12],
        name=directory.name,
        directory=directory,
        nonce=secrets.token_hex(16),
        task=task,
        sampling=sampling,
        step=step,
        rules=_rules(settings, scaling, run, recovery, update),
        options=_worker_options(scaling, run),
        use_gpu=scaling.use_gpu is True,
        undo=recovery.undo,
        faults=tuple(settings.faults),
        heartbeat_interval=recovery.heartbeat_interval.total_seconds(),
        heartbeat_timeout=recovery.heartbeat_timeout.total_seconds(),
        probe_timeout=recovery.probe_timeout.total_seconds(),
        hang_timeout=recovery.hang_timeout.total_seconds(),
        lease=recovery.lease.total_seconds(),
    )


def _rules(settings: TrainSettings, scaling: ScalingConfig, run: RunConfig, recovery: RecoveryConfig, update: Update) -> Rules:
    least, most = workers(scaling)
    failure = run.failure_config
    return Rules(
        min_workers=least,
        max_workers=most,
        max_steps=settings.max_steps,
        spares=recovery.num_spares,
        whole_update=update == "barrier",
        wait_for_replacement=recovery.replacement == "wait",
        schedule_timeout=recovery.schedule_timeout.total_seconds(),
        replacement_timeout=recovery.replacement_timeout.total_seconds(),
        fence_timeout=recovery.fence_timeout.total_seconds(),
        max_failures=failure.max_failures if failure else -1,
        max_preemption_failures=getattr(failure, "max_preemption_failures", -1),
        max_fruitless_recoveries=recovery.max_fruitless_recoveries,
    )


def choose_update(task: TrainTask, recovery: RecoveryConfig) -> Update:
    """Builds model and optimizer once, here, so that what cannot work fails early, and says how to update.

    `strategy="auto"` falls back to "barrier" where wait-free updates could not be undone.

    Raises:
        UndoRefusedError: wait-free updates were insisted on.
    """
    model = task.model(0)
    check_model(model)
    optimizer = task.optimizer([p for p in model.parameters() if p.requires_grad])
    if recovery.update == "barrier":
        return "barrier"
    reasons = "; ".join(check_undo(optimizer, recovery.undo))
    if not reasons:
        return "wait_free"
    if recovery.strategy != "auto":
        raise UndoRefusedError(
            f'RecoveryConfig(update="wait_free"): {reasons}. Use update="barrier", which never needs an undo.'
        )
    warnings.warn(
        f'update="wait_free" would need undo, but {reasons}. Falling back to update="barrier", which never needs it.',
        stacklevel=5,
    )
    return "barrier"


def make_directory(storage_path: str, name: str) -> Path:
    """The run's directory, made, inside `storage_path`. An earlier run of this name keeps its records beside the new ones.

    Raises:
        ConfigError: it cannot be written, or is of a kind that is not supported.
    """
    if "://" in storage_path:
        raise ConfigError(
            f"RunConfig(storage_path={storage_path!r}): only paths of a file system that all nodes share are supported so far"
        )
    directory = Path(storage_path).expanduser().resolve() / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = directory / f".probe-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"RunConfig(storage_path={storage_path!r}): {directory} cannot be written: {error}") from error
    return directory


def _worker_options(scaling: ScalingConfig, run: RunConfig) -> dict[str, Any]:
    """Ray's options for each worker actor."""
    asked: Any = scaling.resources_per_worker
    resources: dict[str, float] = dict(asked or {"CPU": 1})
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0)}
    gpus = resources.pop("GPU", 1 if scaling.use_gpu is True else 0)
    if gpus:
        options["num_gpus"] = gpus
    if resources:
        options["resources"] = resources
    wanted: Any = run.worker_runtime_env
    runtime_env: dict[str, Any] = dict(wanted or {})
    threads = str(max(1, int(options["num_cpus"])))
    environment = {"OMP_NUM_THREADS": threads, **runtime_env.get("env_vars", {})}
    options["runtime_env"] = {**runtime_env, "env_vars": environment}
    return options


def _size(dataset: Any) -> int:
    try:
        size = len(dataset)
    except TypeError as error:
        raise ConfigError(f"dataset() returned a {type(dataset).__name__} without a length; use a map-style dataset") from error
    if size == 0:
        raise ConfigError("dataset() is empty: there is nothing to train on")
    return size
