"""What a run's log says besides its events, for people and for the audit; and what of an earlier life of the run it holds.

Events are what decisions follow from. Notes follow from decisions: states, recoveries with their times, the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.history import ENDS
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import State
from raytrain_ft.runtime import report, sealed, software, timeline
from raytrain_ft.runtime.event_log import EventLog, earlier_logs, read_past
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage.draft import draft_of


class Notes:
    """Of one run.

    Args:
        now: seconds since the run began.
        written: how many notes of each name the log has already.

    Attributes:
        was_over: the run's end has been noted.
    """

    def __init__(
        self, spec: RunSpec, log: EventLog, machine: RunState, now: Callable[[], float], written: Counter[str]
    ) -> None:
        self._spec = spec
        self._log = log
        self._machine = machine
        self._now = now
        self.was_over = any(name in written for name in ENDS)
        self._told_of = written["Recovery"]
        self._over: list[dict[str, Any]] = []  # the recoveries that are, as plain data

    def recoveries(self, known: int = 0) -> list[dict[str, Any]]:
        """All, as plain data, but for so many of the first that are over. What is over hardly changes; it may be thousands, and
        this is asked for many times a second."""
        recoveries, over = self._machine.recoveries, self._finished()
        self._over += [asdict(recovery) for recovery in recoveries[len(self._over) : over]]
        return self._over[known:] + [asdict(recovery) for recovery in recoveries[over:]]

    def explained(self, lost: str) -> None:
        """Why this member died has become known, perhaps after its recovery was over. The others are as they were: to make
        thousands plain data anew would hold up the recovery that is under way."""
        for index in reversed(range(len(self._over))):
            if lost in self._over[index]["lost"]:
                self._over[index] = asdict(self._machine.recoveries[index])
                return

    def _finished(self) -> int:
        """How many recoveries are over: all but perhaps the last."""
        return len(self._machine.recoveries) - (self._machine.history.open is not None)

    def state(self) -> None:
        """The machine is in another one."""
        self._log.note("State", at=self._now(), state=str(self._machine.state), incarnation=self._machine.incarnation)

    def resumed(self, command: c.Run) -> None:
        """Training goes on."""
        recoveries = self._machine.recoveries
        step = recoveries[-1].step if recoveries and recoveries[-1].resumed is None else self._machine.step
        replicas = len(command.world) // self._spec.rules.stages
        self._log.note("Resumed", at=self._now(), incarnation=command.incarnation, step=step, world_size=replicas)

    def stored(self, name: str, record: dict[str, Any]) -> None:
        """What checkpoint `name` says of steps before it."""
        self._log.note("StepsStored", at=self._now(), member=name, **record)

    def finished_recoveries(self) -> None:
        """Those that are over and have not been noted yet, in order."""
        self._tell(self._finished())

    def _tell(self, count: int) -> None:
        for recovery in self._machine.recoveries[self._told_of : count]:
            self._log.note("Recovery", **asdict(recovery))
            self._told_of += 1

    def failed(self, error: tuple[str, str]) -> None:
        """The run cannot go on where it was."""
        self._log.note("RunFailed", at=self._now(), state=str(State.ERRORED), error=error)

    def end(self) -> None:
        """The run's."""
        machine = self._machine
        self._tell(len(machine.recoveries))  # also one that did not come to its end
        if machine.state == State.FINISHED:
            self._log.note("RunFinished", at=self._now(), steps=machine.step, **machine.result)
        elif machine.failure:
            self._log.note("RunFailed", at=self._now(), state=str(machine.state), error=machine.failure)

    def drawn(self, failure: str) -> None:
        """What becomes of `draw`."""
        if failure:
            self._log.note("ReportFailed", at=self._now(), reason=failure)


def draw(directory: Path) -> str:
    """Draws what can be drawn of a run; returns why it could not be, or nothing. It must not fail the run."""
    failures = []
    for write in (timeline.write, report.write):
        try:
            write(directory)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    return "; ".join(failures)


def past_of(spec: RunSpec) -> Iterator[tuple[str, m.Event | None]]:
    """The events of this run so far, and the notes between them, as `read_past` has them: none, unless its supervisor was lost
    and has come back.

    What an earlier run of this name left is put aside. There is no other that still runs: see `Right`.
    """
    path = spec.directory / "events.jsonl"
    first = _first_line(path)
    if first is not None:
        if _run_of(first) == spec.run_id:
            return read_past(path)
        _put_aside(spec.directory) if first else path.unlink()
    faults = spec.directory / "faults"
    for marker in [] if faults.is_symlink() else faults.glob("*"):
        marker.unlink()
    sealed.remove_others(spec)
    with draft_of(spec.directory / "nonce") as file:
        file.write(spec.nonce)
    return iter(())


def _put_aside(directory: Path) -> None:
    """The log of an earlier run, and what was drawn of it: each launch draws what happened to itself."""
    number = 1 + max((int(log.stem[7:]) for log in earlier_logs(directory)), default=0)
    for name in ("timeline.json", "report.html", "events.jsonl"):  # the log last: its number says that all are
        path = directory / name
        with suppress(FileNotFoundError):
            path.rename(directory / f"{path.stem}-{number:03d}{path.suffix}")


def _first_line(path: Path) -> str | None:
    """None if there is no such file. Whether there is one cannot always be told, which is an error."""
    try:
        with path.open(errors="replace") as log:
            return log.readline()
    except FileNotFoundError:
        return None


def _run_of(line: str) -> Any:
    """The run that a log's first line tells of; None if it is not there, or was cut short."""
    try:
        return json.loads(line)["run_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def details_of(spec: RunSpec) -> dict[str, Any]:
    """What the log's first line says of a run, for who reads it without the program that made it."""
    sampling, rules = spec.sampling, spec.rules
    about: dict[str, Any] = {"log": spec.log_choice.as_record()} if spec.log_choice is not None else {}
    if spec.stored_in is not None:
        about["checkpoints"] = str(spec.stored_in)
    return {
        **about,
        "name": spec.name,
        "dataset_size": sampling.dataset_size,
        "global_batch_size": sampling.global_batch_size,
        "seed": sampling.seed,
        "shuffle": sampling.shuffle,
        "drop_last": sampling.drop_last,
        "max_steps": rules.max_steps,
        "num_workers": [rules.min_workers, rules.max_workers],
        "replacement": rules.replacement,
        "strategy": rules.strategy,
        "quorum": rules.quorum,
        "lost_samples": "return" if spec.step.returns_lost else "drop",
        "update": spec.step.update,
        "stages": rules.stages,
        "software": software.versions(),
    }
