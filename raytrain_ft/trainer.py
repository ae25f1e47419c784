"""`Trainer`: checks what it is given, starts the supervisor, shows how it goes, cleans up whatever the end."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Unpack

import ray
import ray.train
from ray.exceptions import ActorDiedError, RayError

from raytrain_ft import steer
from raytrain_ft.callbacks import Callback, Callbacks
from raytrain_ft.config import ParallelismConfig, RecoveryConfig, check_name
from raytrain_ft.earlier import after_earlier_runs
from raytrain_ft.errors import ConfigError, FTError, RunActiveError, TooFewWorkersError
from raytrain_ft.fields import did_you_mean
from raytrain_ft.follow import POLL_S, abort, clean_up, kept_going, result_of, watch
from raytrain_ft.policy.states import ENDED
from raytrain_ft.prepare import directory_of, prepare
from raytrain_ft.progress import Display
from raytrain_ft.ray_config import CheckpointConfig, RunConfig, ScalingConfig, check_supported
from raytrain_ft.result import Result
from raytrain_ft.runtime import sealed
from raytrain_ft.runtime.placement import ON_HEAD, demand, lacking
from raytrain_ft.runtime.shared import sees_directory
from raytrain_ft.runtime.software import CODE, pack
from raytrain_ft.runtime.spec import NAMESPACE, RunSpec
from raytrain_ft.runtime.supervisor_actor import SupervisorActor
from raytrain_ft.settings import Keywords, TrainSettings
from raytrain_ft.signals import at_sigterm
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.lock import WriterLock
from raytrain_ft.task import TrainTask, check_task

SUPERVISOR: dict[str, Any] = {
    "num_cpus": 0,
    "resources": ON_HEAD,  # nothing goes on without the head anyway
    "lifetime": "detached",
    "max_restarts": -1,
    "max_task_retries": -1,
    "max_concurrency": 1000,
}
"""Ray's options for the supervisor actor: it restarts itself as often as it takes, and ends itself."""
LEAVE_S = 15.0
"""How long a run of this name that has ended may take to leave."""
_INTERRUPTED: dict[type[BaseException], str] = {
    KeyboardInterrupt: "interrupted (Ctrl-C)",
    SystemExit: "its job was stopped (SIGTERM)",
}


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
        on_non_finite: "raise" ends the run at a NaN or infinite loss, or norm of the gradients where they are clipped by it,
            or samples of the step were lost; "skip" leaves the step's update out and lists its samples as lost; "roll_back"
            goes back to the newest checkpoint, once for each step.
        faults: failures to inject (`chaos.FailAt`), to rehearse.
        callbacks: told of the run on the driver: `ft.TensorBoard()`, or your own.
        quiet: show nothing.

    Raises:
        ConfigError: a value that cannot be used, before any worker starts.
    """

    def __init__(
        self,
        task: TrainTask,
        *,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        recovery_config: RecoveryConfig | None = None,
        parallelism_config: ParallelismConfig | None = None,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
        **settings: Unpack[Keywords],
    ) -> None:
        check_task(task)
        _check_keywords(settings)
        self._task = task
        self._scaling: Any = _config("scaling_config", scaling_config, ScalingConfig, ray.train.ScalingConfig)
        self._run = _config("run_config", run_config, RunConfig, ray.train.RunConfig)
        self._recovery = _config("recovery_config", recovery_config, RecoveryConfig)
        self._parallelism = _config("parallelism_config", parallelism_config, ParallelismConfig)
        if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
            raise ConfigError(f"Trainer(callbacks={callbacks!r}): use a list of instances of raytrain_ft.Callback")
        self._callbacks = tuple(callbacks)
        self._quiet = quiet
        self._settings = TrainSettings(**settings)
        self._settings.check(self._scaling, self._recovery, self._parallelism)
        check_supported(self._scaling, self._run)
        _warn_of_defaults(self._run)
        check_name(str(self._run.name))

    def fit(self) -> Result:
        """Trains to the end. Ctrl-C, SIGTERM and `ray job stop` end the run before its time: it leaves a checkpoint.

        Raises:
            ConfigError: something about the run cannot work; TrainingFailedError: a run that began could not be finished.
        """
        spec, task = prepare(self._task, self._settings, self._scaling, self._run, self._recovery, self._parallelism)
        with ExitStack() as last:
            right = _take_directory(spec)
            last.callback(right.release)  # whatever comes: when this is over, so is the run
            spec = after_earlier_runs(spec)
            last.callback(sealed.remove, spec)
            sealed.write(spec, task)
            return self._train(spec, right, last)

    def suspend(self, rank: int, *, at_once: bool = False) -> None:
        """`raytrain_ft.suspend` for this run, from another thread than the one that is in `fit`, or from a callback."""
        steer.suspend(self._directory(), rank, at_once=at_once)

    def resume(self, rank: int) -> None:
        """`raytrain_ft.resume` for this run."""
        steer.resume(self._directory(), rank)

    def leave(self, rank: int, within_s: float, *, replace: bool = True) -> None:
        """`raytrain_ft.leave` for this run."""
        steer.leave(self._directory(), rank, within_s, replace=replace)

    def _directory(self) -> Path:
        """The run's: another run may have its name, in another place."""
        return directory_of(str(self._run.storage_path), str(self._run.name))

    def _train(self, spec: RunSpec, right: WriterLock, last: ExitStack) -> Result:
        """The run, from its supervisor's start to its end. What is to be done when all has been cleaned up goes to `last`."""
        supervisor, account = _start(spec), None
        with at_sigterm(_exit), Display(spec.name, spec.rules.max_steps, quiet=self._quiet) as display:
            try:
                with kept_going(supervisor):
                    for account in self._follow(spec, supervisor, display, last, right):
                        display.show(account)
            except FTError:
                raise
            except BaseException as error:
                if account is not None:  # else nothing has begun that could be saved
                    _end_early(spec, supervisor, display, error)
                raise
            finally:
                clean_up(spec.run_id, supervisor)
        assert account is not None  # `watch` raises an error where it has none
        return result_of(account)

    def _follow(
        self, spec: RunSpec, supervisor: Any, display: Display, last: ExitStack, right: WriterLock
    ) -> Iterator[dict[str, Any]]:
        """How the run stands, until it has ended. What is to be done when all has been cleaned up goes to `last`; the right to
        write the run's records to the supervisor, once that is there."""
        accounts = watch(supervisor, start_s=spec.rules.schedule_timeout)
        try:
            account = next(accounts)
        finally:
            right.hand_over()
        _check_directory(spec)
        yield account
        if words := _lacking(spec):
            display.say(f"waits for a node that can host a worker: {words}")
        # Not before: until now there may have been the records of an earlier run.
        callbacks = Callbacks(self._callbacks, spec.name, spec.directory, spec.rules)
        last.callback(callbacks.end)
        callbacks.poll()
        for account in accounts:
            kind, message = account.get("failure") or ("", "")
            if kind == TooFewWorkersError.__name__ and (words := _lacking(spec)):
                account = account | {"failure": (kind, f"{message} {words[:1].upper()}{words[1:]}.")}
            yield account
            callbacks.poll()


def _end_early(spec: RunSpec, supervisor: Any, display: Display, error: BaseException) -> None:
    """Has the run end, which leaves a checkpoint, for this process was told to end, or cannot go on."""
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    reason = _INTERRUPTED.get(type(error), f"its driver failed: {error!r}")
    if interrupted and spec.rules.leaves_checkpoint:  # which is asked for whether this can be printed or not
        display.say(f"{reason}: takes a last checkpoint and ends (within {spec.rules.stop_timeout:g} s)")
    abort(supervisor, reason, spec.rules.stop_timeout, display if interrupted else None)


def _lacking(spec: RunSpec) -> str:
    """See `lacking`; empty if Ray does not say: a hint is not worth a run."""
    with suppress(RayError):
        return lacking(ray.nodes(), demand(spec.options))
    return ""


def _config(name: str, given: Any, *kinds: type) -> Any:
    """What was given, or the defaults of its first kind.

    Raises:
        ConfigError: it is of no such kind.
    """
    if given is None:
        return kinds[0]()
    if not isinstance(given, kinds):
        raise ConfigError(f"Trainer({name}={given!r}): use a raytrain_ft.{kinds[0].__name__}")
    return given


def _warn_of_defaults(run: Any) -> None:
    """Of Ray's own, which are not what a run with failures needs. Whether they were chosen or not cannot be told."""
    stored = run.checkpoint_config
    if stored is not None and not isinstance(stored, CheckpointConfig) and stored.num_to_keep is None:
        warnings.warn(
            "Trainer(run_config=...) has Ray's CheckpointConfig(num_to_keep=None): every checkpoint stays, and there is one "
            "every few dozen steps. Use raytrain_ft.CheckpointConfig, which keeps the last two, or give num_to_keep.",
            stacklevel=3,
        )
    if not isinstance(run, RunConfig) and run.failure_config.max_failures == 0:
        warnings.warn(
            "Trainer(run_config=ray.train.RunConfig(...)) has Ray's FailureConfig(max_failures=0): the first lost worker ends "
            "the run. Use raytrain_ft.RunConfig, whose default recovers from every loss, or FailureConfig(max_failures=-1).",
            stacklevel=3,
        )


def _check_keywords(settings: Mapping[str, Any]) -> None:
    known = list(TrainSettings.__dataclass_fields__)
    for name in settings:
        if name not in known:
            everything = [*known, *inspect.signature(Trainer.__init__).parameters]
            raise ConfigError(f"Trainer has no argument {name!r}{did_you_mean(name, everything)}")
    missing = [name for name in ("max_steps", "global_batch_size") if name not in settings]
    if missing:
        raise ConfigError(f"Trainer needs {' and '.join(missing)}")


def _take_directory(spec: RunSpec) -> WriterLock:
    """The right to write the run's records, for the supervisor that is to be started: another cluster may see them too.

    Raises:
        RunActiveError: a run of this name is alive on this cluster; LockedError: elsewhere.
    """
    deadline = time.monotonic() + LEAVE_S
    while (other := _account_of(spec.supervisor_name)) is not None:
        if other.get("state") not in ENDED or time.monotonic() > deadline:
            with suppress(OSError):  # it is not empty: the other run's, or an earlier one's
                spec.directory.rmdir()
            raise RunActiveError(_active(spec.name, other))
        time.sleep(POLL_S)
    return lock.acquire(LocalStorage(spec.directory), spec.run_id)


def _start(spec: RunSpec) -> Any:
    """Starts the supervisor. Its name is taken as long as the run lives, which keeps a second one out."""
    options = {"name": spec.supervisor_name, "namespace": NAMESPACE, **SUPERVISOR}
    try:
        return ray.remote(SupervisorActor).options(**options).remote(CODE, pack(spec))
    except ValueError as error:
        raise RunActiveError(_active(spec.name, _account_of(spec.supervisor_name))) from error


def _account_of(supervisor: str) -> dict[str, Any] | None:
    """What another run says of itself; nothing if it does not answer; None if there is none any more."""
    try:
        other: Any = ray.get_actor(supervisor, namespace=NAMESPACE)
    except ValueError:
        return None
    try:
        return ray.get(other.status.remote(), timeout=5)
    except ActorDiedError:
        return None
    except (RayError, AttributeError):  # the latter: it is no supervisor of ours
        return {}


def _active(name: str, other: dict[str, Any] | None) -> str:
    known = ""
    if other:
        known = f" in {other['directory']} ({other['state'].lower()}, step {other['step']}/{other['max_steps']}"
        known += f", last followed {other['unfollowed_s']:.0f} s ago)"
    return (
        f"a run named {name!r} is alive on this cluster{known}: follow it with `raytrain-ft attach {name}`, end it with "
        f"`raytrain-ft stop {name}`, or choose another RunConfig(name=...)"
    )


def _exit(number: int, frame: object) -> None:
    """As at the end of any program. Ray sees to that too, but writes its own stack into the job's log first."""
    del frame
    sys.exit(128 + number)


def _check_directory(spec: RunSpec) -> None:
    """The supervisor writes the run's records where this process looks for them."""
    if not sees_directory(spec):
        raise ConfigError(
            f"RunConfig.storage_path: the node of the supervisor and this one do not see the same {spec.directory}. Use a path "
            "that is shared by all nodes."
        )
