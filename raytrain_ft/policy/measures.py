"""What a run measures: the table of its metrics, and the fold of its events into their values. No Ray, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.chronicle import Chronicle, Steps
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.policy.strategy import Recovery

Key = tuple[str, ...]
"""A metric's name and the values of its tags, in the order of `Metric.tags`."""
Kind = Literal["gauge", "counter", "histogram"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of a histogram's buckets: from a killed process to a lost node that nobody replaces."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Ray puts `ray_` before its name, and `_total` after that of a counter.

    Attributes:
        tags: besides `run`, which every metric has.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    tags: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """Its name in Prometheus; a histogram's has `_bucket`, `_count` and `_sum` after it."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


_ALL = (
    Metric("train_ft_run_state", "gauge", "", "1 for the state that the run is in, 0 for the others", ("state",)),
    Metric("train_ft_incarnation", "gauge", "", "number of the present world"),
    Metric("train_ft_world_size", "gauge", "workers", "workers in the present world; during a recovery, in the one before"),
    Metric("train_ft_spares", "gauge", "workers", "workers that are ready and do not train"),
    Metric("train_ft_step", "gauge", "steps", "steps committed; goes back when everybody goes back to a checkpoint"),
    Metric("train_ft_max_steps", "gauge", "steps", "steps of the whole run"),
    Metric("train_ft_loss", "gauge", "", "mean loss over the last global batch that was told of"),
    Metric(
        "train_ft_step_seconds",
        "gauge",
        "s",
        "mean time of the steps told of last (about one second of training, or a part of it)",
    ),
    Metric("train_ft_longest_step_seconds", "gauge", "s", "the longest of these steps on the worker that told of them"),
    Metric(
        "train_ft_goodput_ratio",
        "gauge",
        "",
        "share of the run's time so far that went into first-time commits of steps",
    ),
    Metric("train_ft_productive_seconds", "counter", "s", "that time; its rate is the goodput of any window"),
    Metric("train_ft_steps_committed", "counter", "steps", "steps committed for the first time"),
    Metric("train_ft_steps_redone", "counter", "steps", "steps committed again, after going back to a checkpoint"),
    Metric("train_ft_failures", "counter", "workers", "workers lost, spares included", ("cause", "noticed_by")),
    Metric("train_ft_notices", "counter", "", "notices that a worker's node or process will be taken away", ("source",)),
    Metric("train_ft_departures", "counter", "workers", "workers that left after a notice, spares included; no failures"),
    Metric(
        "train_ft_recoveries",
        "counter",
        "",
        "recoveries that ended; lost=no: nobody was (a resize, a departure, a false alarm, the supervisor's restart)",
        ("strategy", "guarantee", "lost"),
    ),
    Metric("train_ft_paused_seconds", "counter", "s", "exact sum of the pauses of all recoveries", ("lost",)),
    Metric("train_ft_pause_seconds", "histogram", "s", "from a recovery's first sign to the first step afterwards", ("lost",)),
    Metric(
        "train_ft_detection_seconds",
        "histogram",
        "s",
        "from a lost worker's last sign of life (a hung one's: of progress) to its loss being known: an upper bound",
        ("noticed_by",),
    ),
    Metric("train_ft_supervisor_restarts", "counter", "", "times that the supervisor came back after its own loss"),
    Metric(
        "train_ft_samples_lost",
        "counter",
        "samples",
        "samples whose update was left out, and that are not read again; it is not taken back if the run goes back to a"
        " checkpoint from before them",
    ),
    Metric("train_ft_checkpoints", "counter", "", "checkpoints by outcome: committed or failed", ("outcome",)),
    Metric("train_ft_checkpoint_interval_steps", "gauge", "steps", "steps between two checkpoints, k, as chosen last"),
    Metric("train_ft_checkpoint_bytes", "gauge", "bytes", "size of the newest checkpoint"),
    Metric("train_ft_checkpoint_age_seconds", "gauge", "s", "time since a checkpoint was committed; absent before the first"),
    Metric("train_ft_checkpoint_stall_seconds", "counter", "s", "time that training stood still for checkpoints"),
    Metric("train_ft_checkpoint_persist_seconds", "counter", "s", "time that it took to write them, beside the training"),
    Metric("train_ft_log_bytes", "counter", "bytes", "tensors between stages that were logged; told when an incarnation ends"),
    Metric("train_ft_log_disk_bytes", "gauge", "bytes", "logs on the disks of the workers that live, as told last"),
    Metric("train_ft_log_stalls", "counter", "", "times that training waited for a log"),
    Metric("train_ft_log_stall_seconds", "counter", "s", "time that it waited"),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}

_CAUSES = {
    "it could not begin": "other",
    "it could not be set up": "task",
    "it failed ": "task",
    "it could not join": "other",
    "memory": "memory",
    "node died": "node",
    "silent": "silence",
    "hung": "hang",
    "no answer": "deadline",
    "in time": "deadline",
    "process": "process",
    "it died": "process",
}
_WATCHERS = ("ray", "lifeline", "raylet", "heartbeat", "peers", "step time", "deadline", "hash", "supervisor")


def cause_of(loss: m.WorkerLost) -> str:
    """A loss in one word of a few; tags must not grow with a run."""
    if loss.preempted:
        return "preemption"
    return next((word for sign, word in _CAUSES.items() if sign in loss.cause), "other")


def watcher_of(loss: m.WorkerLost) -> str:
    """Who noticed a loss; any worker is `worker`."""
    return loss.noticed_by if loss.noticed_by in _WATCHERS else "worker"


@dataclass(slots=True)
class Measures:
    """Values of a run's metrics: `levels` of gauges, `totals` of counters, `observed` for histograms."""

    levels: dict[Key, float] = field(default_factory=dict)
    totals: dict[Key, float] = field(default_factory=dict)
    observed: list[tuple[Key, float]] = field(default_factory=list)
    _given: dict[Key, float] = field(default_factory=dict)
    _chronicle: Chronicle = field(default_factory=Chronicle)
    _gone: int = 0
    _lost: dict[str, m.WorkerLost] = field(default_factory=dict)  # those that are not counted yet
    _checkpoint_at: float | None = None
    _unstored: set[tuple[int, int]] = field(default_factory=set)
    _logs: dict[str, m.LogWritten] = field(default_factory=dict)

    def take(self, event: m.Event, run: RunState) -> None:
        """Takes in an event, after the machine has."""
        self._find_losses(run)
        for news in self._chronicle.take(event, run):
            if isinstance(news, Steps):
                self._committed(news)
            else:
                self._recovered(news)
        match event:
            case m.CheckpointCommitted():
                self._add("train_ft_checkpoints", "committed")
                self._add("train_ft_checkpoint_stall_seconds", by=event.stall_s)
                self._add("train_ft_checkpoint_persist_seconds", by=event.persist_s)
                self.levels["train_ft_checkpoint_bytes",] = event.bytes
                self._checkpoint_at = event.at
            case m.CheckpointFailed():
                self._not_stored(event)
            case m.IntervalChosen():
                self.levels["train_ft_checkpoint_interval_steps",] = event.k
            case m.SamplesLost() if not event.returned:
                self._add("train_ft_samples_lost", by=event.stop - event.start)
            case m.LogWritten():
                self._logged(event, run)
            case m.Noticed():
                self._add("train_ft_notices", event.source)
            case m.CauseFound() if event.lost in self._lost:
                self._lost[event.lost] = replace(self._lost[event.lost], cause=event.cause)
            case m.SupervisorRestarted():
                self._add("train_ft_supervisor_restarts")

    def look(self, now: float, run: RunState) -> None:
        """Counts the losses, and brings the levels up to date that the run's state alone says, or that time changes."""
        self.count_losses()
        for state in State:
            self.levels["train_ft_run_state", state.lower()] = float(state == run.state)
        self.levels["train_ft_incarnation",] = run.incarnation
        self.levels["train_ft_world_size",] = len(run.world)
        self.levels["train_ft_spares",] = len(run.roster.spares())
        self.levels["train_ft_step",] = run.step
        self.levels["train_ft_max_steps",] = run.rules.max_steps
        productive = self.totals.get(("train_ft_productive_seconds",), 0.0)
        self.levels["train_ft_goodput_ratio",] = productive / now if now > 0 else 0.0
        if self._checkpoint_at is not None:
            self.levels["train_ft_checkpoint_age_seconds",] = now - self._checkpoint_at
        if self._logs:
            on_disk = [log.file_bytes for member, log in self._logs.items() if member in run.members]
            self.levels["train_ft_log_disk_bytes",] = sum(on_disk)

    def count_losses(self) -> None:
        """Those since the last call, each with the cause that is known by now: why a process has ended is known a moment after
        it is missed."""
        for loss in self._lost.values():
            self._add("train_ft_failures", cause_of(loss), watcher_of(loss))
        self._lost = {}

    def increments(self) -> dict[Key, float]:
        """What the totals grew by since the last call."""
        grown = {key: value - self._given.get(key, 0.0) for key, value in self.totals.items()}
        self._given = dict(self.totals)
        return {key: value for key, value in grown.items() if value > 0}

    def observations(self) -> list[tuple[Key, float]]:
        """What was observed for histograms since the last call."""
        observed, self.observed = self.observed, []
        return observed

    def _add(self, *key: str, by: float = 1.0) -> None:
        self.totals[key] = self.totals.get(key, 0.0) + by

    def _not_stored(self, event: m.CheckpointFailed) -> None:
        """Each of the workers tells of it."""
        if (event.incarnation, event.step) not in self._unstored:
            self._unstored.add((event.incarnation, event.step))
            self._add("train_ft_checkpoints", "failed")

    def _find_losses(self, run: RunState) -> None:
        """Each worker once, however many noticed its loss, and also those that the machine itself gave up. Who left after a
        notice is no loss."""
        new = len(run.roster.gone) - self._gone
        self._gone += new
        for member, loss in islice(reversed(run.roster.gone.items()), new):
            if loss is None:
                self._add("train_ft_departures")
                continue
            self._lost[member] = loss
            if loss.silent_s is not None:
                self.observed.append((("train_ft_detection_seconds", watcher_of(loss)), loss.silent_s))

    def _recovered(self, recovery: Recovery) -> None:
        lost = "yes" if recovery.lost else "no"
        seconds = recovery.seconds or 0.0
        self._add("train_ft_recoveries", recovery.strategy.value, recovery.guarantee.value, lost)
        self._add("train_ft_paused_seconds", lost, by=seconds)
        self.observed.append((("train_ft_pause_seconds", lost), seconds))

    def _committed(self, steps: Steps) -> None:
        """A step that is done again is no progress."""
        fresh = steps.stop - steps.first
        self._add("train_ft_steps_committed", by=fresh)
        self._add("train_ft_steps_redone", by=steps.redone)
        if steps.seconds is None or steps.step_seconds is None:
            return
        self._add("train_ft_productive_seconds", by=fresh * steps.step_seconds)
        self.levels["train_ft_step_seconds",] = steps.step_seconds
        self.levels["train_ft_longest_step_seconds",] = steps.longest_s
        self.levels["train_ft_loss",] = steps.loss

    def _logged(self, event: m.LogWritten, run: RunState) -> None:
        """A worker tells what it has logged since its log was opened; what is new is added."""
        before = self._logs.get(event.member)
        if before is not None and before.payload_bytes > event.payload_bytes:
            before = None  # it has opened another log
        self._logs = {member: log for member, log in self._logs.items() if member in run.members} | {event.member: event}
        was = (before.payload_bytes, before.stalls, before.stalled_s) if before is not None else (0, 0, 0.0)
        self._add("train_ft_log_bytes", by=event.payload_bytes - was[0])
        self._add("train_ft_log_stalls", by=event.stalls - was[1])
        self._add("train_ft_log_stall_seconds", by=event.stalled_s - was[2])
