"""What the supervisor's machine is told. Frozen data, nothing else; `commands` has what it asks for.

Every event bears `at`, seconds since the run began, because the machine has no clock: whoever hands it over says when. An event
about an incarnation bears its number, and the machine ignores it once that incarnation is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raytrain_ft.policy.lineage import Return
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.policy.sampling import Range

FailureKind = Literal["task", "non_finite", "config", "mismatch", "storage"]
"""Of a `TaskFailed`: the task raised, a loss was not finite, the configuration or what is here does not fit, or a file could
not be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        at: seconds since the run began, monotonic.
    """

    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint: its name in storage, how many steps are committed in it, and by which incarnation (0: it does not say).

    Attributes:
        workers: how many trained when it was written; 0: that is not known.
        loss: of the last of these steps; None: that is not known, or it is not finite.
    """

    name: str
    step: int
    incarnation: int = 0
    workers: int = field(default=0, compare=False)
    loss: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The first event of a run: what it is and what it may use.

    Attributes:
        incarnation: the last one of earlier runs of this name; this run's are later.
        stored: the checkpoints that it may begin from, newest first.
        returns: of those earlier runs, as of a `RunState`.
        details: for the record only.
    """

    run_id: str
    incarnation: int = 0
    stored: tuple[Stored, ...] = ()
    returns: tuple[Return, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged(Event):
    """How many workers the cluster could host now, those that it hosts already included; and how many more as a `last_resort`,
    where a worker may have to go again soon."""

    slots: int
    last_resort: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """A worker has built its model, which took `build_s` seconds, and waits for work: a spare."""

    member: str
    node: str
    pid: int
    build_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker is gone, or is treated as gone. `noticed_by` says how this became known.

    Attributes:
        silent_s: seconds since its last sign of life, or a hung one's of progress: it was gone no longer than that. None if it
            was never heard.
    """

    member: str
    cause: str
    noticed_by: str = "supervisor"
    preempted: bool = False
    silent_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseFound(Event):
    """Why `lost` died, who was known to be dead before."""

    lost: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Event):
    """A worker's node, or its process, will be taken away in `deadline_s` seconds. Told again of a worker only if it is
    sooner.

    Attributes:
        source: "aws spot", "aws rebalance", "gcp", "gcp maintenance", "azure preempt" (or another kind of event), "ray drain",
            "sigterm" or "request".
        replaced: whether another is to take its place; if not, the run has one worker less from then on.
    """

    member: str
    deadline_s: float
    source: str
    reason: str
    replaced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticesUnavailable(Event):
    """A source of notices does not work, on a worker or for all. Training goes on, without being warned by it.

    Attributes:
        source: "aws", "gcp", "azure" or "ray".
    """

    member: str | None
    source: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected(Event):
    """Something is wrong in this incarnation, but it is not known with whom: a collective failed, or a step takes too long."""

    incarnation: int
    reason: str
    noticed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Event):
    """A worker has left its step and its group. `marks` is None when it holds no training state."""

    member: str
    incarnation: int
    marks: Marks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled(Event):
    """A worker has joined the new group and carried out its part of the plan.

    Attributes:
        digests: hash of each bucket's state.
        undone: parameters that were undone.
        kept: parameters whose update was kept although the step is redone.
    """

    member: str
    incarnation: int
    digests: tuple[str, ...]
    undone: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled(Event):
    """A worker holds the whole training state of its stage; `digests` as in Reconciled."""

    member: str
    incarnation: int
    digests: tuple[str, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCommitted(Event):
    """A worker committed steps [first_step, stop_step), drawing its share from position (epoch, start) on.

    Attributes:
        owed: positions of the epoch that are to be read again after it.
        weights: of the ranks' shares of the batches; None if they are equal.
        ids_digest: hash over the ids of the samples that this rank drew, in order.
        loss: mean loss over the last of these global batches.
        longest_s: the longest of these steps, seconds.
    """

    member: str
    rank: int
    world_size: int
    incarnation: int
    first_step: int
    stop_step: int
    epoch: int
    start: int
    ids_digest: str
    loss: float
    longest_s: float = 0.0
    weights: tuple[float, ...] | None = None
    owed: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLost(Event):
    """A lossy decision dropped positions [start, stop) of an epoch's order.

    Attributes:
        returned: they are read again at the end of the epoch.
    """

    incarnation: int
    step: int
    epoch: int
    start: int
    stop: int
    why: str
    returned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint is durable. Seconds: of the copy into memory, of the wait for it, and of writing.

    Attributes:
        bytes: of its files.
        device_copy_s: of the copy within the device's memory; None if it was not copied there.
        untidy: what could not be done after the one before, such as deleting what it replaces; empty if all could.
    """

    member: str
    incarnation: int
    step: int
    name: str
    bytes: int
    snapshot_s: float
    stall_s: float
    persist_s: float
    device_copy_s: float | None = None
    untidy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written. Training goes on."""

    member: str
    incarnation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsFound(Event):
    """What there is in storage to go back to, newest first; `error` if that could not be found out.

    Attributes:
        reached: the step that the lost workers had come to, as far as it is known.
    """

    incarnation: int
    stored: tuple[Stored, ...]
    reached: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected(Event):
    """A worker could not load the checkpoint that it was told to load. damaged: it is; else it may be whole."""

    member: str
    incarnation: int
    name: str
    reason: str
    damaged: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMissing(Event):
    """A replay needs a record that no log has, or that is damaged; or it `diverged` from what it repeats, as perhaps only the
    step after it shows."""

    member: str
    incarnation: int
    reason: str
    diverged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoRefused(Event):
    """A survivor cannot undo what its plan says: the latest update showed what the optimizer's settings had not."""

    member: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFailed(Event):
    """A worker cannot log any more (a full disk, or its quota). Training goes on. `number`: of its failures, from 1."""

    member: str
    incarnation: int
    step: int
    reason: str
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWhole(Event):
    """A checkpoint has revived the log of a worker that could not log any more: from this step on, all that it sends is logged
    again. `number`: of the failure that is over."""

    member: str
    incarnation: int
    step: int
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimed(Event):
    """What a worker's stage takes for its passes: seconds of one of its first steps, that which took least."""

    member: str
    incarnation: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChosen(Event):
    """Which boundaries are logged from now on; see `LogOnly`."""

    incarnation: int
    boundaries: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWritten(Event):
    """What a worker has logged so far of what it sent to other stages; told when an incarnation ends for it.

    Attributes:
        payload_bytes: of the tensors; written_bytes: of these, those in records that were written, for others had been trimmed
            before; idle_bytes: of these, those written while training waited for another stage anyway; file_bytes: on the disk
            now. records: written.
        stalls, stalled_s: how often, and how long, training waited because too much was waiting to be written.
    """

    member: str
    incarnation: int
    step: int
    records: int
    payload_bytes: int
    file_bytes: int
    stalls: int
    stalled_s: float
    idle_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Event):
    """A worker that helped to replay another stage had no memory for both: its own state was on the disk meanwhile.

    Attributes:
        step: of its own state. size: of that, bytes. seconds: to write it and to read it back.
    """

    member: str
    incarnation: int
    step: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUnseen(Event):
    """The passes of a worker change what looks like state, and is where nobody stores it. `names`: where, one by one."""

    member: str
    incarnation: int
    step: int
    names: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dormant(Event):
    """A replica sleeps, or takes part again, from this step on."""

    member: str
    incarnation: int
    step: int
    asleep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted(Event):
    """From this step on, those who are awake train without those who sleep; this one of them brings these up to date later."""

    member: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChosen(Event):
    """Worker 0 decided how many steps lie between two checkpoints, or knows it when it becomes worker 0; the numbers are those
    of `tuner.Decision`.

    Attributes:
        mode, k_persist ... free_bytes: None if k was asked for, and nothing measured.
        device_copy_s: None also if no snapshot was taken within the device's memory yet.
        free_bytes: of the device's memory; 0 without one.
        failure_interval_s: mean time between failures; None if it is not regarded.
    """

    member: str
    incarnation: int
    step: int
    k: int
    mode: str | None = None
    k_persist: int | None = None
    k_overhead: int | None = None
    k_failures: int | None = None
    iteration_s: float | None = None
    update_s: float | None = None
    copy_s: float | None = None
    persist_s: float | None = None
    overhead_s: float | None = None
    device_copy_s: float | None = None
    snapshot_bytes: int | None = None
    free_bytes: int | None = None
    budget: float
    failure_interval_s: float | None = None
    observed: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """A worker stopped at the step boundary that all agreed upon."""

    member: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Event):
    """A worker's part of the last checkpoint of a run that is to end is durable, or will never be."""

    member: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Event):
    """A worker has committed the last step of the run."""

    member: str
    incarnation: int
    digest: str
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """The final state of the run is in storage."""

    member: str
    incarnation: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed(Event):
    """The user's own code raised, the loss is not finite, or storage failed. Of a loss all ranks tell, so it belongs to an
    incarnation, that of the recovery if one completes the step; so does what a worker could not do in a recovery, which may be
    asked of it again.

    Attributes:
        rank: None if the worker did not say it, because it did not train.
    """

    member: str
    rank: int | None
    step: int
    kind: FailureKind
    message: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """A deadline that the machine had set has passed."""

    timer: str
    incarnation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested(Event):
    """Somebody asked for the end of the run, which is to leave a checkpoint of what it has come to."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RightLost(Event):
    """Another run has taken the right to write this one's records or checkpoints, which nobody renewed: two must not write
    there."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRestarted(Event):
    """The supervisor came back after its own loss and has read the events up to here."""
