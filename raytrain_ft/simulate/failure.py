"""One failure: a change of the cluster, at a time or at a point of the training; times in seconds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from raytrain_ft import checks
from raytrain_ft.errors import ConfigError
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
            if not known or not all(checks.is_whole(rank, 0) for rank in ranks):
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

    @property
    def when(self) -> float:
        """The time or the step; all failures of a source are at a time, or all at a step."""
        when = self.step if self.at is None else self.at
        assert when is not None
        return when

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
        while waiting and waiting[0][0] <= failure.when:
            yield heapq.heappop(waiting)[2]
        later = failure.unheeded(job)
        heapq.heappush(waiting, (later.when, number, later))
    while waiting:
        yield heapq.heappop(waiting)[2]
