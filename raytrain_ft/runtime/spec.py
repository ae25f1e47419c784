"""What a run is: everything that its supervisor and its workers are told once, at their start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raytrain_ft.places import Place
from raytrain_ft.policy.lineage import Return
from raytrain_ft.policy.planning import LogChoice
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.sketch import Sketch
from raytrain_ft.runtime.notices.notice import Notice, NoticeSpec
from raytrain_ft.training.settings import StepSettings

NAMESPACE = "raytrain_ft"
"""Ray namespace of all our named actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """How a run writes checkpoints and resumes from them; see `CheckpointConfig`.

    Attributes:
        place: the directory of checkpoints.
        every: steps from one to the next; None chooses within `overhead`.
        keep: how many stay.
        failure_s: mean time between failures, if it is known beforehand.
        profile_key: what measured times, and the interval that comes of them, depend on but for the number of workers.
        window: steps to measure before the first checkpoint.
        resume: "auto", "never" or "require".
    """

    place: Place
    overhead: float
    every: int | None
    keep: int
    keep_epochs: bool
    failure_s: float | None
    profile_key: str
    window: int
    resume: str
    override: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpec:
    """How a run logs what crosses between stages; see `LogConfig`."""

    memory_bytes: int
    quota_bytes: int | None
    compression: Literal["lz4", "zstd"] | None
    synchronous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run. Times in seconds.

    Attributes:
        run_id: unique, also among runs of the same name.
        directory: the run's directory, visible from every node.
        task: SHA-256 of the pickled task, which lies in the directory (`sealed`).
        log: how what crosses between the stages of a pipeline is logged; None does not.
        log_choice: what was decided about that and why, for the run's record.
        nonce: what a worker must find in the directory, to prove that it is the same one.
        checkpoints: None writes none.
        incarnation: the last one of earlier runs of this name; 0 until they are known to be over.
        returns: of those, as of a `RunState`.
        notices: which of them are heeded.
        driver_timeout: see `RecoveryConfig`.
        options: of Ray, for each worker actor (num_cpus, num_gpus, resources, runtime_env).
    """

    run_id: str
    name: str
    directory: Path
    nonce: str
    task: str
    sampling: Sampling
    step: StepSettings
    rules: Rules
    options: dict[str, Any]
    use_gpu: bool
    undo: str
    checkpoints: CheckpointSpec | None
    log: LogSpec | None
    log_choice: LogChoice | None
    incarnation: int = 0
    returns: tuple[Return, ...] = ()
    faults: tuple[Any, ...]
    notices: NoticeSpec
    heartbeat_interval: float
    heartbeat_timeout: float
    probe_timeout: float
    setup_timeout: float
    lease: float
    driver_timeout: float

    @property
    def stored_in(self) -> Place | None:
        """The directory of the run's checkpoints; None if it keeps none in storage."""
        return self.checkpoints.place if self.checkpoints is not None and self.rules.strategy != "snapshot" else None

    @property
    def logs(self) -> Path:
        """Where the logs of all workers are."""
        return self.directory / "logs"

    @property
    def supervisor_name(self) -> str:
        return supervisor_name(self.name)

    def member_name(self, member: str) -> str:
        return worker_name(self.run_id, member)


def supervisor_name(run: str) -> str:
    """What Ray calls the supervisor of the run of this name: there is one at most."""
    return f"supervisor:{run}"


def worker_name(run_id: str, member: str) -> str:
    """What Ray calls a worker."""
    return f"worker:{run_id}:{member}"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker tells the supervisor, again and again. Level, not edge: a lost beat loses nothing.

    Attributes:
        status: "idle", "running", or how the latest run of steps ended: "stopped", "completed", "suspect", "diverged" or
            "failed".
        detail: of the status: a reason, a digest or a traceback.
        kind: of a failure: "task", "non_finite".
        where: what the training thread is doing, and at which step.
        since: seconds that it has been at it.
        commits: steps committed and not yet acknowledged.
        notes: what is to be told of checkpoints and not yet acknowledged: (event, fields).
        notices: that this worker will be taken away, with the seconds that are left; the most urgent first.
        clock: the time of day where it is, Unix seconds.
    """

    member: str
    incarnation: int
    rank: int
    status: str
    detail: str
    kind: str
    step: int
    where: str
    since: float
    commits: tuple[dict[str, Any], ...]
    notes: tuple[tuple[str, dict[str, Any]], ...] = ()
    notices: tuple[Notice, ...] = ()
    clock: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The answer to a heartbeat.

    Attributes:
        pause: seconds to the next one.
        age: seconds since the run began.
    """

    pause: float
    age: float


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says of itself when it is ready.

    Attributes:
        lifeline: the port on `host` of a connection that ends when its process dies; 0 if it offers none.
        num_parameters, num_buckets: of the model, or of the first stage of it: the same everywhere, if the code is.
        software: versions that the bits depend on, and the code of raytrain_ft.
        samples: what its dataset looks like; nothing if it reads none.
        build_s: how long it took to build the model, seconds.
    """

    node: str
    pid: int
    host: str
    lifeline: int
    num_parameters: int
    num_buckets: int
    software: str
    samples: tuple[Sketch, ...] = ()
    build_s: float = 0.0
