"""What workers tell in their heartbeats -> events, each once.

A beat tells again what was not acknowledged, and all ranks tell of the same step; a supervisor that was restarted has told some
of it before (`recall`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.forward import complement
from raytrain_ft.policy.sampling import Range
from raytrain_ft.policy.topology import stage_of
from raytrain_ft.runtime.spec import Beat, RunSpec

Note = (
    m.CheckpointCommitted
    | m.CheckpointFailed
    | m.Dormant
    | m.IntervalChosen
    | m.LogFailed
    | m.LogWhole
    | m.LogWritten
    | m.NoticesUnavailable
    | m.Parted
    | m.SetAside
    | m.StageTimed
    | m.StateUnseen
)
IDENTITY = ("incarnation", "step", "source", "number")
"""What tells two notes of the same kind and worker apart."""
MOST_NOTED = 4096
"""Of each worker; what it has told before was acknowledged long ago."""
NOTES: dict[str, type[Note]] = {cls.__name__: cls for cls in get_args(Note)}


class Tidings:
    """What was told so far.

    Attributes:
        loss: of the step that was committed last, whoever told of it.
    """

    def __init__(self, spec: RunSpec, tell: Callable[[m.Event], None]) -> None:
        self._spec, self._tell = spec, tell
        self._told: dict[str, tuple[int, str]] = {}  # by member, incarnation and status
        self._recorded: dict[str, tuple[int, int]] = {}  # of each member, up to which step of which incarnation
        self._lost: dict[tuple[int, int], list[Range]] = {}  # of (incarnation, step), the samples that were told to be lost
        self._noted: dict[str, dict[tuple[Any, ...], None]] = {}  # by member, the oldest first
        self.loss: float | None = None

    def recall(self, event: m.Event) -> None:
        """What is in the log is not told again."""
        if isinstance(event, m.StepsCommitted):
            self._recorded[event.member] = event.incarnation, event.stop_step
            self.loss = event.loss
        elif isinstance(event, m.SamplesLost):
            self._not_listed(event.incarnation, event.step, event.start, event.stop)
        elif isinstance(event, Note):
            self._is_new(event.member, (type(event).__name__, *(getattr(event, name, None) for name in IDENTITY)))

    def forget(self, member: str) -> None:
        """This worker is gone. What it told stays told."""
        for known in (self._told, self._recorded, self._noted):
            known.pop(member, None)

    def tell_of_training(self, beat: Beat) -> None:
        """Tells of the steps, checkpoints and the like that are news."""
        for commit in beat.commits:
            self._record(beat.member, commit)
        for name, fields in beat.notes:
            self._note(beat.member, name, fields)

    def _record(self, member: str, commit: dict[str, Any]) -> None:
        reached = commit["incarnation"], commit["stop_step"]
        if self._recorded.get(member, (-1, -1)) >= reached:  # its acknowledgement was lost, with the supervisor perhaps,
            self.samples_lost(commit)  # and what follows the record with it
            return
        self._recorded[member] = reached
        self.loss = commit["loss"]
        fields = {name: value for name, value in commit.items() if name != "lost"}
        self._tell(m.StepsCommitted(member=member, **fields))
        self.samples_lost(commit)

    def samples_lost(self, commit: dict[str, Any]) -> None:
        """Tells of the samples that committed steps went without. All ranks say the same; one is enough. Only if who was the
        first to say it is lost, and a further recovery lost more of the same step, do others say more."""
        incarnation = commit["incarnation"]
        for lost in commit["lost"]:
            for start, stop in self._not_listed(incarnation, lost["step"], lost["start"], lost["stop"]):
                self._tell(m.SamplesLost(incarnation=incarnation, **(lost | {"start": start, "stop": stop})))

    def _not_listed(self, incarnation: int, step: int, start: int, stop: int) -> tuple[Range, ...]:
        """What of these samples nobody has told of; from now on it counts as told."""
        known = self._lost.setdefault((incarnation, step), [])
        more = complement((start, stop), known)
        known += more
        return more

    def _note(self, member: str, name: str, fields: dict[str, Any]) -> None:
        """An event about checkpoints, logs or notices, once; or of samples that were lost."""
        if name == m.SamplesLost.__name__:
            lost = {name: value for name, value in fields.items() if name != "incarnation"}
            self.samples_lost({"incarnation": fields["incarnation"], "lost": [lost]})
            return
        if self._is_new(member, (name, *(fields.get(part) for part in IDENTITY))):
            self._tell(NOTES[name](member=member, **fields))

    def _is_new(self, member: str | None, note: tuple[Any, ...]) -> bool:
        """Whether this worker has not told of it yet; from now on it has."""
        noted = self._noted.setdefault(str(member), {})
        if note in noted:
            return False
        noted[note] = None
        if len(noted) > MOST_NOTED:
            del noted[next(iter(noted))]
        return True

    def tell_status(self, beat: Beat) -> None:
        """Tells what has become of a worker, if that is news."""
        member, incarnation = beat.member, beat.incarnation
        if self._told.get(member) == (incarnation, beat.status):
            return
        self._told[member] = incarnation, beat.status
        match beat.status:
            case "suspect":
                self._tell(m.Suspected(incarnation=incarnation, reason=beat.detail, noticed_by=member))
            case "diverged":
                self._tell(m.LogMissing(member=member, incarnation=incarnation, reason=beat.detail, diverged=True))
            case "stopped":
                self._tell(m.Stopped(member=member, incarnation=incarnation, step=int(beat.detail)))
            case "completed":
                stage = stage_of(beat.rank, self._spec.rules.stages)
                self._tell(m.Completed(member=member, incarnation=incarnation, digest=beat.detail, stage=stage))
            case "failed":
                kind: Any = beat.kind
                of = incarnation if kind == "non_finite" else None  # of that all ranks tell
                about = {"member": member, "rank": beat.rank, "step": beat.step, "kind": kind, "message": beat.detail}
                self._tell(m.TaskFailed(**about, incarnation=of))
