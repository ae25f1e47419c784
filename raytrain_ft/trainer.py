"""`Trainer`: checks what it is given, starts the supervisor, shows how it goes, cleans up whatever the end."""

from __future__ import annotations

import inspect
import time
from difflib import get_close_matches
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util import list_named_actors

from raytrain_ft import errors
from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.config import (
    ParallelismConfig,
    RecoveryConfig,
    RunConfig,
    ScalingConfig,
    check_name,
    check_supported,
)
from raytrain_ft.errors import ConfigError, RunActiveError, TrainingFailedError
from raytrain_ft.prepare import prepare
from raytrain_ft.progress import Display
from raytrain_ft.result import Result, recovery_of
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.spec import NAMESPACE, RunSpec
from raytrain_ft.runtime.supervisor import Supervisor
from raytrain_ft.settings import TrainSettings
from raytrain_ft.task import TrainTask, check_task

SUPERVISOR: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 1000}
"""Ray's options for the supervisor actor: it restarts itself as often as it takes."""
POLL_S = 0.2
UNAVAILABLE_S = 120.0
"""How long the driver waits for a supervisor that Ray is restarting."""


class Trainer:
    """Trains a task on the Ray cluster, whatever becomes of its nodes.

    Args:
        task: the user's `TrainTask`.
        scaling_config: Ray Train's: how many workers, and what each of them takes.
        run_config: Ray Train's: name, storage path, failure budgets.
        recovery_config: how losses are met.
        parallelism_config: how the model is spread.
        max_steps: optimizer steps of the run.
        global_batch_size: samples per step over all workers; stays the same when their number changes.
        seed: of everything random.
        gradient_accumulation_steps: micro-batches per worker and step.
        max_grad_norm: clip gradients to this global norm; None does not.
        shuffle: whether each epoch has an order of its own, drawn from the seed.
        drop_last: leave out the last, shorter batch of an epoch.
        bucket_bytes, first_bucket_bytes: sizes of the gradient buckets, as in DDP.
        precision: "bf16" computes forward and loss under autocast.
        on_non_finite: "raise" ends the run at a NaN or infinite loss; "skip" leaves the step's update out and lists its
            samples as lost.
        faults: failures to inject (`chaos.FailAt`), to rehearse.
        quiet: show nothing.

    Raises:
        ConfigError: a value that cannot be used, before any worker starts.
    """

    def __init__(
        self,
        task: TrainTask,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        recovery_config: RecoveryConfig | None = None,
        parallelism_config: ParallelismConfig | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        check_task(task)
        _check_keywords(settings)
        self._task = task
        self._scaling: Any = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()
        self._recovery = recovery_config or RecoveryConfig()
        self._parallelism = parallelism_config or ParallelismConfig()
        self._quiet = quiet
        self._settings = TrainSettings(**settings)
        self._settings.check(self._scaling, self._recovery, self._parallelism)
        check_supported(self._scaling, self._run)
        check_name(str(self._run.name))

    def fit(self) -> Result:
        """Trains to the end.

        Raises:
            ConfigError: something about the run cannot work; TrainingFailedError: a run that began could not be finished.
        """
        spec = prepare(self._task, self._settings, self._scaling, self._run, self._recovery, self._parallelism)
        supervisor = self._start(spec)
        try:
            account = self._follow(spec, supervisor)
        except BaseException:
            _abort(supervisor, "the driver was interrupted")
            raise
        finally:
            _clean_up(spec, supervisor)
        return _result(spec, account)

    # ---------------------------------------------------------------- while it runs

    def _start(self, spec: RunSpec) -> Any:
        """Starts the supervisor. Its name is taken as long as the run lives, which keeps a second one out."""
        _refuse_second_run(spec)
        _keep_earlier_records(spec)
        (spec.directory / "nonce").write_text(spec.nonce)
        try:
            where = placement.on_head()  # nothing goes on without the head anyway
            options = {"name": spec.supervisor_name, "namespace": NAMESPACE, "scheduling_strategy": where, **SUPERVISOR}
            return ray.remote(Supervisor).options(**options).remote(spec)
        except ValueError as error:
            raise RunActiveError(_active(spec)) from error

    def _follow(self, spec: RunSpec, supervisor: Any) -> dict[str, Any]:
        """Shows the run's progress until it has ended; returns the last account."""
        ended = supervisor.run.remote()
        unreachable: float | None = None
        with Display(spec.name, spec.rules.max_steps, quiet=self._quiet) as display:
            while True:
                done, _ = ray.wait([ended], timeout=POLL_S)
                try:
                    account: Any = ray.get(ended if done else supervisor.status.remote(), timeout=10)
                    unreachable = None
                except (ActorUnavailableError, GetTimeoutError) as error:
                    unreachable = unreachable or time.monotonic()
                    if time.monotonic() - unreachable > UNAVAILABLE_S:
                        raise TrainingFailedError(f"the supervisor has not answered for {UNAVAILABLE_S:g} s") from error
                    continue
                except ActorDiedError as error:
                    if "No module named" in str(error):
                        module = str(error).split("No module named")[1].split()[0].strip("'\"")
                        raise ConfigError(
                            f"the cluster's nodes cannot import {module!r}, which the task needs: define the task in the job's "
                            "own file, submit with --working-dir, or install the module on every node"
                        ) from error
                    raise TrainingFailedError(f"the supervisor could not be kept alive: {error}") from error
                except RayTaskError as error:
                    raise TrainingFailedError(f"the supervisor failed: {error}") from error
                display.show(account)
                if done:
                    return account


def _check_keywords(settings: dict[str, Any]) -> None:
    known = list(TrainSettings.__dataclass_fields__)
    for name in settings:
        if name not in known:
            everything = [*known, *inspect.signature(Trainer.__init__).parameters]
            near = get_close_matches(name, everything, n=1)
            raise ConfigError(f"Trainer has no argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    missing = [name for name in ("max_steps", "global_batch_size") if name not in settings]
    if missing:
        raise ConfigError(f"Trainer needs {' and '.join(missing)}")
    if not all(isinstance(fault, FailAt) for fault in settings.get("faults", ())):
        raise ConfigError(f"Trainer(faults={settings['faults']!r}): use raytrain_ft.chaos.FailAt")


def _active(spec: RunSpec) -> str:
    return f"a run named {spec.name!r} is alive on this cluster: wait for it, end it, or choose another RunConfig(name=...)"


def _refuse_second_run(spec: RunSpec) -> None:
    try:
        ray.get_actor(spec.supervisor_name, namespace=NAMESPACE)
    except ValueError:
        return
    raise RunActiveError(_active(spec))


def _keep_earlier_records(spec: RunSpec) -> None:
    log = spec.directory / "events.jsonl"
    if log.exists():
        number = len(list(spec.directory.glob("events-*.jsonl"))) + 1
        log.rename(spec.directory / f"events-{number:03d}.jsonl")
    faults = spec.directory / "faults"
    for marker in faults.glob("*") if faults.exists() else ():
        marker.unlink()


def _abort(supervisor: Any, reason: str) -> None:
    try:
        ray.get(supervisor.abort.remote(reason), timeout=15)
    except (RayActorError, RayTaskError, GetTimeoutError):
        return  # it is gone, and its workers end themselves; `_clean_up` sees to the rest


def _clean_up(spec: RunSpec, supervisor: Any) -> None:
    """Leaves nothing behind: the supervisor, and any worker that it did not end."""
    ray.kill(supervisor)
    actors: Any = list_named_actors(all_namespaces=True)
    for actor in actors:
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(spec.member_name("")):
            try:
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
            except ValueError:
                continue  # it ended meanwhile


def _result(spec: RunSpec, account: dict[str, Any]) -> Result:
    recoveries = [recovery_of(fields) for fields in account["recoveries"]]
    if account["failure"] is not None:
        name, message = account["failure"]
        kind = getattr(errors, name, TrainingFailedError)
        where = f"\nThe run's records: {spec.directory}"
        raise kind(message + where)
    metrics = {"loss": account["loss"], "step": account["step"]}
    digest = account["result"].get("digest", "")
    checkpoint = f"{spec.checkpoints.uri}/{account['stored'][0]}" if spec.checkpoints and account["stored"] else None
    return Result(metrics, str(spec.directory), recoveries, digest, account["seconds"], checkpoint)
