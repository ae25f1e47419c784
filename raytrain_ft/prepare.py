"""From what the user gave to what a run is. Whatever cannot work is refused here, before any worker starts."""

from __future__ import annotations

import json
import math
import os
import secrets
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import torch
import xxhash

from raytrain_ft.config import NOTICE_SOURCES, ParallelismConfig, RecoveryConfig, check_name
from raytrain_ft.errors import ConfigError, NoCheckpointError, StorageError
from raytrain_ft.model_checks import Update, check_stages, choose_update, has_statistics, pipeline_of
from raytrain_ft.places import Place
from raytrain_ft.policy.frequency import profile_steps
from raytrain_ft.policy.planning import LogChoice
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.sampling import Sampling, steps_per_epoch
from raytrain_ft.ray_config import CheckpointConfig, RunConfig, ScalingConfig, workers
from raytrain_ft.runtime import sealed
from raytrain_ft.runtime.notices.notice import NoticeSpec
from raytrain_ft.runtime.placement import check_ray, connect
from raytrain_ft.runtime.preemption import CLOUDS
from raytrain_ft.runtime.spec import CheckpointSpec, LogSpec, RunSpec
from raytrain_ft.selective import choose_log
from raytrain_ft.settings import TrainSettings
from raytrain_ft.storage.filesystem import HALF_A_URI, local_path, open_storage, within
from raytrain_ft.storage.retention import KEEP_ALL
from raytrain_ft.storage.selection import select
from raytrain_ft.task import TrainTask
from raytrain_ft.training.calls import call
from raytrain_ft.training.data import task_size
from raytrain_ft.training.memory import STREAMING
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.split_check import check_split

PHASE_S = 60.0
STOP_S = 30.0
PARAMETERS_PER_S = 100e6 / 60
"""To move: with Adam's state they are 12 bytes each, and storage or a network may bring 20 MB/s."""
RESOURCES = ("CPU", "GPU", "memory")
"""As Ray calls what every node may have; all other names are the user's own."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the user gave, but for the task and how it is cut."""

    settings: TrainSettings
    scaling: ScalingConfig
    run: RunConfig
    recovery: RecoveryConfig


def prepare(
    task: TrainTask,
    settings: TrainSettings,
    scaling: ScalingConfig,
    run: RunConfig,
    recovery: RecoveryConfig,
    parallelism: ParallelismConfig,
) -> tuple[RunSpec, bytes]:
    """Checks what needs the task or the file system, connects to Ray, and puts together what a run is; with the task as it
    travels.

    Raises:
        ConfigError: naming value, place and remedy.
    """
    _warn_of_gpus(scaling)
    settings.check_checkpoints(_policy(run), recovery)
    pipeline = pipeline_of(task, parallelism, settings)
    update, model_key = choose_update(task, recovery) if pipeline is None else ("barrier", check_stages(task, pipeline))
    directory = directory_of(str(run.storage_path), check_name(str(run.name)))
    sampling = _sampling(task, settings, pipeline)
    step = _step(settings, scaling, recovery, update, pipeline)
    recovery = _of_pipeline(task, step, settings, recovery)
    given = Given(settings, scaling, run, recovery)
    log_choice = choose_log(task, step, settings, scaling, recovery, _policy(run).every, directory)
    rules = _rules(given, step, model_key, log_choice)
    pickled = _pickled(task)
    options = _worker_options(scaling, run)
    checkpoints = _checkpoints(given, directory, sampling, model_key)
    if not ray.is_initialized():
        connect(log_to_driver=False)
    check_ray()
    make_directory(directory)  # last, so that what is refused leaves nothing behind
    spec = RunSpec(
        run_id=uuid.uuid4().hex[:12],
        name=directory.name,
        directory=directory,
        nonce=secrets.token_hex(16),
        task=sealed.digest_of(pickled),
        sampling=sampling,
        step=step,
        rules=rules,
        options=options,
        use_gpu=scaling.use_gpu is True,
        undo=recovery.undo,
        checkpoints=checkpoints,
        log=_log(recovery) if rules.logging else None,
        log_choice=log_choice,
        faults=tuple(settings.faults),
        notices=_notices(recovery),
        heartbeat_interval=recovery.heartbeat_interval.total_seconds(),
        heartbeat_timeout=recovery.heartbeat_timeout.total_seconds(),
        probe_timeout=recovery.probe_timeout.total_seconds(),
        setup_timeout=recovery.setup_timeout.total_seconds(),
        lease=recovery.lease.total_seconds(),
        driver_timeout=recovery.driver_timeout.total_seconds(),
    )
    return spec, pickled


def _warn_of_gpus(scaling: ScalingConfig) -> None:
    if scaling.use_gpu is True:
        warnings.warn(
            "ScalingConfig(use_gpu=True): training over NCCL was tried with replicas that share one GPU, never on several. "
            "Rehearse it before you trust it.",
            stacklevel=4,
        )


def _sampling(task: TrainTask, settings: TrainSettings, pipeline: PipelineSettings | None) -> Sampling:
    sampling = Sampling(
        dataset_size=task_size(call(task, "dataset")),
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
    )
    if pipeline is not None and sampling.dataset_size % sampling.global_batch_size and not sampling.drop_last:
        raise ConfigError(
            f"Trainer(global_batch_size={sampling.global_batch_size}): the {sampling.dataset_size} samples of an epoch leave a "
            "smaller last batch, and a pipeline needs micro-batches of one size: set drop_last=True, or choose a batch that "
            "divides the samples"
        )
    return sampling


def _step(
    settings: TrainSettings, scaling: ScalingConfig, recovery: RecoveryConfig, update: Update, pipeline: PipelineSettings | None
) -> StepSettings:
    return StepSettings(
        seed=settings.seed,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_grad_norm=settings.max_grad_norm,
        precision=settings.precision,
        update=update,
        on_non_finite=settings.on_non_finite,
        seats=workers(scaling)[1] // (1 if pipeline is None else pipeline.stages),
        returns_lost=recovery.lost_samples == "return",
        finishes_alone=recovery.strategy == "lossy",
        pipeline=pipeline,
        bucket_bytes=settings.bucket_bytes,
        first_bucket_bytes=settings.first_bucket_bytes,
    )


def _of_pipeline(task: TrainTask, step: StepSettings, settings: TrainSettings, recovery: RecoveryConfig) -> RecoveryConfig:
    """How a run in stages recovers: where they have statistics, one worker alone replays a lost one.

    Raises:
        ConfigError: the backward pass cannot be cut as its schedule needs it; see `check_split`.
    """
    pipeline = step.pipeline
    if pipeline is None:
        return recovery
    if pipeline.schedule == "zero_bubble":
        check_split(task, step, settings.global_batch_size // (step.seats * pipeline.micro_batches))
    if recovery.replay_workers == 1 or not has_statistics(task, pipeline):
        return recovery
    warnings.warn(
        f"RecoveryConfig(replay_workers={recovery.replay_workers}): a stage has BatchNorm statistics, which depend on the "
        "order of the micro-batches, so that a lost stage is replayed by one worker alone",
        stacklevel=4,
    )
    return replace(recovery, replay_workers=1)


def _pickled(task: TrainTask) -> bytes:
    """The task as it travels."""
    try:
        return ray.cloudpickle.dumps(task)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__} cannot be sent to the workers: {type(error).__name__}: {error}. A task must be picklable: "
            "open files, locks and connections in its methods, not in its __init__"
        ) from error


def _notices(recovery: RecoveryConfig) -> NoticeSpec:
    detect = recovery.preemption == "auto"
    wanted = NOTICE_SOURCES if detect else recovery.preemption or ()
    return NoticeSpec(
        clouds=tuple(name for name in wanted if name in CLOUDS),
        detect=detect,
        drain="ray" in wanted,
        grace_s=recovery.sigterm_grace.total_seconds() if "sigterm" in wanted else None,
    )


def _log(recovery: RecoveryConfig) -> LogSpec:
    how = recovery.log
    return LogSpec(
        memory_bytes=how.memory_bytes,
        quota_bytes=how.quota_bytes,
        compression=how.compression,
        synchronous=how.synchronous,
    )


def _rules(given: Given, step: StepSettings, model_key: Sequence[Any], log: LogChoice | None) -> Rules:
    settings, recovery, pipeline = given.settings, given.recovery, step.pipeline
    least, most = workers(given.scaling)
    policy, failure = _policy(given.run), given.run.failure_config
    exact_sums = recovery.replay_sums == "exact"
    if pipeline is not None:  # with sums in another order, copies of what stages share would differ from then on
        exact_sums = exact_sums or bool(pipeline.ties)
    seconds = _seconds_to_move(recovery, model_key)
    return Rules(
        min_workers=least,
        max_workers=most,
        max_steps=settings.max_steps,
        stages=step.stages,
        joined=pipeline.joined if pipeline is not None else (),
        replay_workers=recovery.replay_workers,
        exact_sums=exact_sums,
        logging=log is not None and log.kept,
        selective=log.selective if log is not None and log.kept else None,
        spares=recovery.num_spares,
        whole_update=step.update == "barrier",
        strategy=recovery.strategy,
        quorum=recovery.quorum,
        checkpoints=policy.every is not None,
        roll_back=settings.on_non_finite == "roll_back",
        measure_failures=policy.failure_interval == "measured",
        wait_for_replacement=recovery.replacement == "wait",
        sleeps_on_notice=recovery.on_notice == "sleep",
        schedule_timeout=recovery.schedule_timeout.total_seconds(),
        replacement_timeout=recovery.replacement_timeout.total_seconds(),
        fence_timeout=recovery.fence_timeout.total_seconds(),
        hang_timeout=recovery.hang_timeout.total_seconds(),
        phase_timeout=seconds["phase_timeout"],
        stop_timeout=seconds["stop_timeout"],
        max_failures=failure.max_failures if failure else -1,
        max_preemption_failures=getattr(failure, "max_preemption_failures", -1),
        max_fruitless_recoveries=recovery.max_fruitless_recoveries,
    )


def _seconds_to_move(recovery: RecoveryConfig, model_key: Sequence[Any]) -> dict[str, float]:
    """The deadlines of `Rules` that a larger model needs to be longer: to be read or sent in a recovery by all workers, or
    to be written at the end by all of them together."""
    sizes = [math.prod(part[2]) for part in model_key if isinstance(part, list)]  # (name, dtype, shape)
    seconds = sum(sizes) / PARAMETERS_PER_S
    by_size = {"phase_timeout": PHASE_S + seconds, "stop_timeout": STOP_S + seconds / 2}
    wanted = {name: getattr(recovery, name) for name in by_size}
    return {name: by_size[name] if wanted[name] is None else wanted[name].total_seconds() for name in by_size}


def _policy(run: RunConfig) -> CheckpointConfig:
    """The run's `CheckpointConfig`; Ray Train's own, which says less, is taken as ours with the defaults."""
    given: Any = run.checkpoint_config
    if isinstance(given, CheckpointConfig):
        return given
    return CheckpointConfig(num_to_keep=given.num_to_keep if given is not None else 2)


def _checkpoints(given: Given, directory: Path, sampling: Sampling, model_key: Any) -> CheckpointSpec | None:
    """How checkpoints are written.

    Raises:
        ConfigError: their place is of no known kind, or cannot be reached; NoCheckpointError: there is none, and one is
            required; or there are some, and none can be read.
    """
    how, strategy, max_steps = _policy(given.run), given.recovery.strategy, given.settings.max_steps
    if how.every is None:
        return None
    asked = Place(how.storage_path or str(directory.parent))
    local = local_path(asked)  # made absolute here: supervisor and workers have other working directories
    place = within(asked if local is None else Place(str(local)), directory.name, "checkpoints")
    try:
        newest = next(select(open_storage(place), warnings.warn), None) if how.resume != "never" else None
    except NoCheckpointError as error:
        raise NoCheckpointError(f'{error}. To begin anew: CheckpointConfig(resume="never")') from error
    except StorageError as error:
        raise ConfigError(f"CheckpointConfig(storage_path={how.storage_path and asked!r}) cannot be read: {error}") from error
    if newest is not None and strategy == "snapshot":
        warnings.warn(
            f'RecoveryConfig(strategy="snapshot") reads no checkpoints from storage: the run begins at step 0, and not from '
            f"those in {place}",
            stacklevel=4,
        )
    if how.resume == "require" and newest is None:
        raise NoCheckpointError(f'CheckpointConfig(resume="require"): there is no valid checkpoint in {place}')
    if newest is not None and newest.step > max_steps and strategy != "snapshot":
        raise ConfigError(
            f"Trainer(max_steps={max_steps}): the newest checkpoint in {place} is of step {newest.step}. Ask for more, choose "
            'another RunConfig(name=...), or begin anew with CheckpointConfig(resume="never")'
        )
    depends_on = [model_key, sampling.global_batch_size, str(place), torch.__version__, os.cpu_count()]
    depends_on += [given.scaling.use_gpu is True, how.every, how.overhead, str(how.failure_interval)]
    known = how.failure_interval if isinstance(how.failure_interval, timedelta) else None
    return CheckpointSpec(
        place=place,
        overhead=how.overhead,
        every=how.every if isinstance(how.every, int) else None,
        keep=how.num_to_keep or KEEP_ALL,
        keep_epochs=how.keep_epochs,
        failure_s=known.total_seconds() if known else None,
        profile_key=xxhash.xxh3_64_hexdigest(json.dumps(depends_on).encode()),
        window=profile_steps(steps_per_epoch(sampling)),
        resume=how.resume,
        override=tuple(how.override),
    )


def directory_of(storage_path: str, name: str) -> Path:
    """The run's directory, inside `storage_path`.

    Raises:
        ConfigError: it is of a kind that is not supported.
    """
    if "://" in storage_path or HALF_A_URI.match(storage_path):
        place = Place(storage_path)
        raise ConfigError(
            f"RunConfig(storage_path={place!r}): only paths of a file system that all nodes share are supported so far"
        )
    return Path(storage_path).expanduser().resolve() / name


def make_directory(directory: Path) -> None:
    """Makes the run's directory. An earlier run of this name keeps its records beside the new ones.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = directory / f".probe-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"RunConfig(storage_path={str(directory.parent)!r}): {directory} cannot be written: {error}"
        ) from error


def _worker_options(scaling: ScalingConfig, run: RunConfig) -> dict[str, Any]:
    """Ray's options for each worker actor.

    Raises:
        ConfigError: an amount is no number, or a name is one of Ray's own in other letters.
    """
    asked: Any = scaling.resources_per_worker
    resources: dict[str, float] = dict(asked or {"CPU": 1})
    for name, amount in resources.items():
        meant = next((one for one in RESOURCES if one.lower() == str(name).lower() and one != name), "")
        if meant:  # no node would have it, and no worker would ever be placed
            raise ConfigError(
                f"ScalingConfig(resources_per_worker={{{name!r}: {amount!r}}}): did you mean {meant!r}? Ray's own names are "
                f"{', '.join(map(repr, RESOURCES))}"
            )
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ConfigError(
                f"ScalingConfig(resources_per_worker={{{name!r}: {amount!r}}}): use a number, of memory the number of bytes"
            )
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0)}
    gpus = resources.pop("GPU", 1 if scaling.use_gpu is True else 0)
    memory = resources.pop("memory", 0)
    options |= {name: amount for name, amount in (("num_gpus", gpus), ("memory", memory), ("resources", resources)) if amount}
    wanted: Any = run.worker_runtime_env
    runtime_env: dict[str, Any] = dict(wanted or {})
    threads = str(max(1, int(options["num_cpus"])))
    environment = {"OMP_NUM_THREADS": threads, **STREAMING}
    if scaling.use_gpu is True:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS may add up in another order each time
    environment |= runtime_env.get("env_vars", {})
    options["runtime_env"] = {**runtime_env, "env_vars": environment}
    return options
