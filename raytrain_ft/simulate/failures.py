"""Where failures come from. Every source gives them in order, drawn from a seeded generator; times in seconds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from numpy.random import Generator

from raytrain_ft import checks
from raytrain_ft.errors import ConfigError
from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.model import Job


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
class _Renewed:
    """Failures of one source, the cluster, or of as many as it has nodes: what `Exponential` and `Weibull` share."""

    mtbf_s: float
    per: Per = "cluster"
    together: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        _check_rate(self, self.per, self.together)

    def check(self, job: Job) -> None:
        """See `Failures`."""
        _check_together(self, job)

    def mean_s(self, job: Job) -> float:
        """Mean time between failures of the whole cluster."""
        return self.mtbf_s / self._sources(job)

    def with_mean(self, job: Job, mean_s: float) -> Self:
        """The same with another mean time between failures of the whole cluster."""
        return replace(self, mtbf_s=mean_s * self._sources(job))

    def _sources(self, job: Job) -> int:
        return job.number_of_nodes if self.per == "node" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(_Renewed):
    """Failures without memory.

    Attributes:
        mtbf_s: mean time between failures, of the whole cluster or (`per="node"`) of one node.
        together: probability that 1, 2, 3, ... nodes are lost at once: correlated losses.
    """

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        self.check(job)
        mean = self.mean_s(job)  # of all nodes at once: without memory, they are as one source
        return _renewals(chance, self.together, lambda: chance.exponential(mean))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull(_Renewed):
    """Failures with memory: with a shape below 1, as clusters have it, failures come in bursts.

    Attributes:
        mtbf_s: mean time between failures, of the whole cluster or (`per="node"`) of one node, which is as new after it.
        shape: of the distribution; 1 is `Exponential`.
        together: as in `Exponential`.
    """

    shape: float = 0.7

    def __post_init__(self) -> None:
        _Renewed.__post_init__(self)  # super() knows no class with slots
        checks.seconds(self, "shape", least=0.01)  # below, math.gamma overflows, and nearly all come at once

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        """See `Failures`."""
        self.check(job)
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        return _renewals(chance, self.together, lambda: scale * chance.weibull(self.shape), self._sources(job))


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


def _renewals(chance: Generator, together: tuple[float, ...], gap: Callable[[], float], sources: int = 1) -> Iterator[Failure]:
    """Failures of so many independent sources, each of which begins anew after its own."""
    due = [float(gap()) for _ in range(sources)]
    heapq.heapify(due)
    while math.isfinite(due[0]):
        at = due[0]
        yield Failure(at=at, lost=_how_many(chance, together))
        heapq.heapreplace(due, at + float(gap()))


def _how_many(chance: Generator, together: tuple[float, ...]) -> int:
    return 1 if len(together) == 1 else 1 + int(chance.choice(len(together), p=together))


def _check_rate(owner: _Renewed | Uniform, per: str, together: tuple[float, ...]) -> None:
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


def _check_together(owner: _Renewed | Uniform, job: Job) -> None:
    most = len(owner.together)
    if most > job.number_of_nodes:
        found = f"{type(owner).__name__}(together={owner.together!r})"
        raise ConfigError(f"{found}: {most} nodes cannot be lost at once, the job has {job.number_of_nodes}")
