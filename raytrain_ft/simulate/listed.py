"""Failures that are given one by one, in a list or as the trace of a spot market."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from numpy.random import Generator

from raytrain_ft import checks
from raytrain_ft.errors import ConfigError
from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.model import Job


@dataclass(frozen=True, slots=True)
class Listed:
    """These failures, in order. All of them at a time, or all at a step.

    Attributes:
        lines: where each was given, for messages of errors.
    """

    failures: tuple[Failure, ...] = ()
    lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_order(self.failures, self._places)

    @property
    def _places(self) -> Sequence[str]:
        return self.lines or [f"failure {number}" for number in range(1, len(self.failures) + 1)]

    def check(self, job: Job) -> None:
        """See `Failures`."""
        for failure, place in zip(self.failures, self._places, strict=True):
            _check_casualties(job, failure, place)

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        del chance
        self.check(job)
        return iter(self.failures)


@dataclass(frozen=True, slots=True)
class SpotTrace:
    """What a spot market gave and took: a CSV file with the columns `seconds` and `change`, the change of the number of nodes.

    Attributes:
        failures: one per line. lines: where each stands, for messages of errors.
        cycle: seconds after which the trace begins anew; 0: it happens once.
    """

    failures: tuple[Failure, ...]
    lines: tuple[str, ...]
    cycle: float = 0.0

    @classmethod
    def read(cls, path: Path, cycle: float = 0.0) -> SpotTrace:
        """From a file.

        Raises:
            ConfigError: it cannot be read, or a line of it cannot be used; the message names the line and what is allowed.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        try:
            rows = list(csv.reader(text.splitlines()))
        except csv.Error as error:
            raise ConfigError(f"{path} cannot be read: {error}. A quote without its counterpart?") from error
        if not rows or [cell.strip() for cell in rows[0]] != ["seconds", "change"]:
            raise ConfigError(f"{path}, line 1: {','.join(rows[0]) if rows else ''!r}: the first line is seconds,change")
        failures, lines = [], []
        for number, row in enumerate(rows[1:], 2):
            if not row:
                continue
            lines.append(f"{path}, line {number}")
            failures.append(_of_row(row, lines[-1]))
        _check_order(failures, lines)
        if not checks.is_finite(cycle) or (cycle and not (failures and cycle > (failures[-1].at or 0.0))):
            raise ConfigError(f"SpotTrace(cycle={cycle!r}): use seconds beyond the last line of {path}")
        return cls(tuple(failures), tuple(lines), cycle)

    def check(self, job: Job) -> None:
        """See `Failures`."""
        self.check_nodes(job.number_of_nodes)

    def check_nodes(self, nodes: int) -> None:
        """Whether it takes no more nodes at once than there are.

        Raises:
            ConfigError: a line does.
        """
        for failure, line in zip(self.failures, self.lines, strict=True):
            _check_nodes(failure, nodes, line)

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        del chance
        self.check(job)
        return self._again_and_again()

    def _again_and_again(self) -> Iterator[Failure]:
        began = 0.0
        while True:
            for failure in self.failures:
                yield Failure(at=began + (failure.at or 0.0), lost=failure.lost, back=failure.back)
            began += self.cycle
            if not self.cycle or not math.isfinite(began):
                return


def _of_row(row: Sequence[str], line: str) -> Failure:
    try:
        at, change = (cell.strip() for cell in row)
        seconds, nodes = float(at), int(change)
    except ValueError:
        raise ConfigError(f"{line}: {','.join(row)!r}: use seconds and a whole number of nodes, as in 3600,-2") from None
    if not math.isfinite(seconds) or seconds < 0 or not nodes:
        raise ConfigError(f"{line}: {','.join(row)!r}: the time is finite and not negative, the change is not 0")
    return Failure(at=seconds, lost=max(0, -nodes), back=max(0, nodes))


def _check_order(failures: Sequence[Failure], lines: Sequence[str]) -> None:
    for before, failure, line in zip(failures, failures[1:], lines[1:], strict=False):
        if (before.at is None) != (failure.at is None):
            raise ConfigError(f"{line}: {failure}: all failures of a list are at a time, or all at a step")
        earlier, later = before.when, failure.when
        if later < earlier:
            raise ConfigError(f"{line}: {later:g} comes after {earlier:g}: lines are in order of time")


def _check_nodes(failure: Failure, nodes: int, line: str) -> None:
    if failure.lost > nodes:
        raise ConfigError(f"{line}: {failure.lost} nodes are lost at once, and the job has {nodes}")


def _check_casualties(job: Job, failure: Failure, line: str) -> None:
    _check_nodes(failure, job.number_of_nodes, line)
    outside = [rank for rank in (*failure.workers, *failure.of) if rank >= job.workers]
    if outside:
        raise ConfigError(f"{line}: worker {outside[0]} is lost, and the job has workers 0 to {job.workers - 1}")
    if failure.step is not None and failure.step >= job.steps:
        raise ConfigError(f"{line}: step {failure.step:g} of {job.steps}: use a step before the last one's end")
