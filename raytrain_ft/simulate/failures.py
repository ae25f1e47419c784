"""Where failures come from. Every source gives them in order, drawn from a seeded generator; times in seconds."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from numpy.random import Generator

from raytrain_ft.errors import ConfigError
from raytrain_ft.simulate import checks
from raytrain_ft.simulate.model import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A change of the cluster. It comes at a time, or at a point of the training, whichever of the two is given.

    Attributes:
        at: seconds since the run began.
        step: steps committed for the first time; 12.5 is in the middle of the thirteenth.
        lost: nodes lost at once, drawn from those at work; of: or those of these workers, one for each, by rank.
        workers: single workers lost instead, by rank; nobody may be, where nodes only come back.
        anyone: a single worker is lost, or the node of one, drawn from all that live, spares among them.
        back: nodes that the cluster has room for again, `back_s` seconds later.
        notice_s: the nodes have notice: they are lost so many seconds later.
        factor: the workers are not lost, but so many times slower for `lasts_s` seconds.
        spares_one: it does not happen where nobody would be left who holds the training state.
        event: the number of a scenario's event that it is of.
    """

    at: float | None = None
    step: float | None = None
    lost: int = 0
    of: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    anyone: bool = False
    back: int = 0
    back_s: float = 0.0
    notice_s: float = 0.0
    factor: float = 1.0
    lasts_s: float = 0.0
    spares_one: bool = False
    event: int | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.step is None):
            raise ConfigError(f"{self}: give either the time (at=) or the step (step=)")
        checks.seconds(self, "at" if self.step is None else "step", "back_s", "notice_s", "lasts_s")
        checks.seconds(self, "factor", least=1.0)
        checks.whole(self, "lost", "back", least=0)
        for name, ranks in (("workers", self.workers), ("of", self.of)):
            known = isinstance(ranks, tuple)
            if not known or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
                raise ConfigError(f"Failure({name}={ranks!r}): use a list of ranks, whole numbers from 0 on")
        if isinstance(self.event, bool) or not isinstance(self.event, int | None):
            raise ConfigError(f"Failure(event={self.event!r}): use the number of an event")
        if not (self.strikes or self.back) or (self.lost and self.workers):
            raise ConfigError(f"{self}: say how many nodes are lost (lost=), which workers are (workers=), or who comes back")
        if self.of and len(set(self.of)) != self.lost:
            raise ConfigError(f"{self}: of these workers the nodes are lost (of=): as many as nodes (lost=)")
        if self.anyone and (self.workers or self.of or self.lost > 1):
            raise ConfigError(f"{self}: anyone is a single worker, or one node (lost=1), which nobody names")
        if self.notice_s and not self.lost:
            raise ConfigError(f"{self}: notice_s is of nodes: say how many (lost=)")
        if (self.factor > 1 and not (self.workers or self.anyone)) or (self.lasts_s and self.factor == 1):
            raise ConfigError(f"{self}: say which workers (workers=) are how many times slower (factor=), for lasts_s")

    @property
    def strikes(self) -> bool:
        """Whether it does harm; or else nodes only come back."""
        return bool(self.lost or self.workers or self.anyone)

    def unheeded(self, job: Job) -> Failure:
        """What it is to those who do nothing upon a notice: a loss when the time has come. Back are nodes as before."""
        later = {} if self.at is None else {"at": self.at + self.notice_s}
        if self.step is not None:
            later = {"step": self.step + self.notice_s / job.step_s}
        return replace(self, **later, notice_s=0.0, back_s=max(0.0, self.back_s - self.notice_s))


def unheeded(failures: Iterable[Failure], job: Job) -> Iterator[Failure]:
    """What failures are to those who do nothing upon a notice, in order of time: one that was told of early comes after others
    that were not."""
    waiting: list[tuple[float, int, Failure]] = []
    for number, failure in enumerate(failures):
        while waiting and waiting[0][0] <= _when(failure):
            yield heapq.heappop(waiting)[2]
        later = failure.unheeded(job)
        heapq.heappush(waiting, (_when(later), number, later))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _when(failure: Failure) -> float:
    """All failures of a source are at a time, or all at a step."""
    when = failure.step if failure.at is None else failure.at
    assert when is not None
    return when


class Failures(Protocol):
    """A source of failures."""

    def check(self, job: Job) -> None:
        """Whether these failures can happen to this job.

        Raises:
            ConfigError: one cannot; the message says which, and what is allowed.
        """
        ...

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """The failures of one run of this job, in order; as many as the run may need.

        Raises:
            ConfigError: as `check`.
        """
        ...


Per = Literal["cluster", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Failures without memory.

    Attributes:
        mtbf_s: mean time between failures, of the whole cluster or (`per="node"`) of one node.
        together: probability that 1, 2, 3, ... nodes are lost at once: correlated losses.
    """

    mtbf_s: float
    per: Per = "cluster"
    together: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        _check_rate(self, self.per, self.together)

    def check(self, job: Job) -> None:
        """See `Failures`."""
        _check_together(self, job)

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        self.check(job)
        mean = self.mean_s(job)
        return _renewals(job, chance, self.together, lambda: chance.exponential(mean))

    def mean_s(self, job: Job) -> float:
        """Mean time between failures of the whole cluster."""
        return self.mtbf_s / _sources(self.per, job)

    def with_mean(self, job: Job, mean_s: float) -> Exponential:
        """The same with another mean time between failures of the whole cluster."""
        return replace(self, mtbf_s=mean_s * _sources(self.per, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Failures with memory: with a shape below 1, as clusters have it, failures come in bursts.

    Attributes:
        mtbf_s: mean time between failures, of the whole cluster or (`per="node"`) of one node, which is as new after it.
        shape: of the distribution; 1 is `Exponential`.
        together: as in `Exponential`.
    """

    mtbf_s: float
    shape: float = 0.7
    per: Per = "cluster"
    together: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        _check_rate(self, self.per, self.together)
        checks.seconds(self, "shape", least=0.01)  # below, math.gamma overflows, and nearly all come at once

    def check(self, job: Job) -> None:
        """See `Failures`."""
        _check_together(self, job)

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        self.check(job)
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        return _renewals(job, chance, self.together, lambda: scale * chance.weibull(self.shape), _sources(self.per, job))

    def mean_s(self, job: Job) -> float:
        """Mean time between failures of the whole cluster."""
        return self.mtbf_s / _sources(self.per, job)

    def with_mean(self, job: Job, mean_s: float) -> Weibull:
        """The same with another mean time between failures of the whole cluster."""
        return replace(self, mtbf_s=mean_s * _sources(self.per, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """The simulation study of SWIFT (section 7.3): as many failures as an undisturbed run has of these intervals, each at a
    point of the training that is drawn uniformly.

    Attributes:
        mtbf_s: time between failures. number: of failures, instead.
        together: as in `Exponential`.
    """

    mtbf_s: float = 17 * 3600.0
    number: int | None = None
    together: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        _check_rate(self, "cluster", self.together)
        if self.number is not None:
            checks.whole(self, "number", least=0)

    def check(self, job: Job) -> None:
        """See `Failures`."""
        _check_together(self, job)

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        self.check(job)
        number = round(job.useful_s / self.mtbf_s) if self.number is None else self.number
        for step in sorted(chance.uniform(0, job.steps, number)):
            yield Failure(step=float(step), lost=_how_many(chance, self.together))

    def mean_s(self, job: Job) -> float:
        """Time between failures of the whole cluster; infinite if there are none."""
        if self.number is None:
            return self.mtbf_s
        return job.useful_s / self.number if self.number else math.inf

    def with_mean(self, job: Job, mean_s: float) -> Uniform:
        """The same with another time between failures, also if it was their number that was given."""
        del job
        return replace(self, mtbf_s=mean_s, number=None)


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
        is_number = checks.is_number(cycle) and math.isfinite(cycle)
        if not is_number or (cycle and not (failures and cycle > (failures[-1].at or 0.0))):
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


def _sources(per: Per, job: Job) -> int:
    return job.number_of_nodes if per == "node" else 1


def _renewals(job: Job, chance: Generator, together: tuple[float, ...], gap, sources: int = 1) -> Iterator[Failure]:
    """Failures of so many independent sources, each of which begins anew after its own."""
    due = [float(gap()) for _ in range(sources)]
    heapq.heapify(due)
    while math.isfinite(due[0]):
        at = due[0]
        yield Failure(at=at, lost=_how_many(chance, together))
        heapq.heapreplace(due, at + float(gap()))


def _how_many(chance: Generator, together: tuple[float, ...]) -> int:
    return 1 if len(together) == 1 else 1 + int(chance.choice(len(together), p=together))


def _check_rate(owner: Exponential | Weibull | Uniform, per: str, together: tuple[float, ...]) -> None:
    checks.seconds(owner, "mtbf_s", positive=True)
    name = type(owner).__name__
    if per not in ("cluster", "node"):
        raise ConfigError(f'{name}(per={per!r}): use "cluster" or "node"')
    shares = together if isinstance(together, tuple) else ()
    possible = all(checks.is_number(share) and 0 <= share <= 1 for share in shares)
    if not possible or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ConfigError(
            f"{name}(together={together!r}): use a list of probabilities that add up to 1, of losing 1, 2, ... nodes"
        )


def _check_together(owner: Exponential | Weibull | Uniform, job: Job) -> None:
    most = len(owner.together)
    if most > job.number_of_nodes:
        found = f"{type(owner).__name__}(together={owner.together!r})"
        raise ConfigError(f"{found}: {most} nodes cannot be lost at once, the job has {job.number_of_nodes}")


def _check_order(failures: Sequence[Failure], lines: Sequence[str]) -> None:
    for before, failure, line in zip(failures, failures[1:], lines[1:], strict=False):
        if (before.at is None) != (failure.at is None):
            raise ConfigError(f"{line}: {failure}: all failures of a list are at a time, or all at a step")
        earlier, later = _when(before), _when(failure)
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
