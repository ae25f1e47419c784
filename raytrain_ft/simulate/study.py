"""Comparisons: several strategies over several seeds, the best interval, sweeps over the interval and over failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raytrain_ft.checks import is_whole
from raytrain_ft.errors import ConfigError
from raytrain_ft.simulate.engine import simulate
from raytrain_ft.simulate.failures import Exponential, Failures, Uniform, Weibull
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import Outcome, Summary, summarize
from raytrain_ft.simulate.strategies import Strategy, check_names

SEEDS = 10
Progress = Callable[[], object]
"""Called after each run."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Summaries of each strategy (by name) at each point of one variable.

    Attributes:
        variable: "interval" (steps) or "mtbf_s" (seconds, of the whole cluster).
    """

    variable: str
    points: tuple[float, ...]
    summaries: dict[str, tuple[Summary, ...]]

    def best(self, strategy: str) -> tuple[float, Summary]:
        """The point at which a strategy takes the least time; one at which some runs did not finish is none."""
        pairs = zip(self.points, self.summaries[strategy], strict=True)
        return min(pairs, key=lambda pair: pair[1].seconds if pair[1].finished == pair[1].runs else math.inf)


def compare(
    job: Job, strategies: Sequence[Strategy], failures: Failures, seeds: int = SEEDS, progress: Progress | None = None
) -> list[Summary]:
    """Every strategy under the same failures, over `seeds` seeds."""
    return [run_seeds(job, strategy, failures, seeds, progress) for strategy in strategies]


def run_seeds(
    job: Job,
    strategy: Strategy,
    failures: Failures,
    seeds: int = SEEDS,
    progress: Progress | None = None,
    unfinished: float = math.inf,
) -> Summary:
    """One strategy over seeds 0, 1, ...

    Args:
        unfinished: once more runs than these did not finish, the rest is left out: such runs take the longest of all.

    Raises:
        ConfigError: fewer than one seed.
    """
    if not is_whole(seeds, 1):
        raise ConfigError(f"seeds={seeds!r}: use a whole number of at least 1")
    outcomes: list[Outcome] = []
    for seed in range(seeds):
        if sum(not outcome.finished for outcome in outcomes) > unfinished:
            break
        outcomes.append(simulate(job, strategy, failures, seed=seed))
        if progress is not None:
            progress()
    return summarize(outcomes)


def sweep_intervals(
    job: Job,
    strategies: Sequence[Strategy],
    failures: Failures,
    intervals: Sequence[int],
    seeds: int = SEEDS,
    progress: Progress | None = None,
) -> Sweep:
    """Each strategy at each number of steps between two times that the state is saved.

    Raises:
        ConfigError: two strategies have one name.
    """
    check_names(strategies)
    found = {
        strategy.name: tuple(run_seeds(job, replace(strategy, every=k), failures, seeds, progress) for k in intervals)
        for strategy in strategies
    }
    return Sweep("interval", tuple(float(k) for k in intervals), found)


def sweep_failures(
    job: Job,
    strategies: Sequence[Strategy],
    failures: Exponential | Weibull | Uniform,
    mtbfs_s: Sequence[float],
    seeds: int = SEEDS,
    progress: Progress | None = None,
) -> Sweep:
    """Each strategy at each mean time between failures of the whole cluster.

    Raises:
        ConfigError: two strategies have one name.
    """
    check_names(strategies)
    found: dict[str, tuple[Summary, ...]] = {}
    for strategy in strategies:
        summaries = []
        for mtbf_s in mtbfs_s:
            summaries.append(run_seeds(job, strategy, failures.with_mean(job, mtbf_s), seeds))
            if progress is not None:
                progress()
        found[strategy.name] = tuple(summaries)
    return Sweep("mtbf_s", tuple(mtbfs_s), found)


def best_interval(
    job: Job, strategy: Strategy, failures: Failures, seeds: int = SEEDS, progress: Progress | None = None
) -> tuple[int, Summary]:
    """The number of steps between two times that the state is saved that takes the least time, and what that comes to. One at
    which more runs finish is better whatever its time, which is the mean of those.

    The time is a valley over the interval (saving costs more on its left, redoing on its right). It is searched on a
    logarithmic grid which narrows around the lowest point; all points see the same failures.

    Raises:
        ConfigError: no run finishes, whatever the interval.
    """
    known: dict[int, Summary] = {}

    def worth(k: int) -> tuple[int, float]:
        if k not in known:
            fewest = min((summary.runs - summary.finished for summary in known.values()), default=seeds)
            known[k] = run_seeds(job, replace(strategy, every=k), failures, seeds, unfinished=fewest)
        return _worth(known[k])

    low, high = 0.0, math.log(job.steps)
    while True:
        grid = sorted({round(math.exp(low + (high - low) * part / 12)) for part in range(13)})
        best = min(grid, key=worth)
        if not known[best].finished:
            why = known[best].reason
            raise ConfigError(f"the best interval of {strategy.name}: no run finishes, whatever the interval: {why}")
        place = grid.index(best)
        left, right = grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)]
        if right - left <= max(2, best // 50):
            if progress is not None:
                progress()
            return best, known[best]
        low, high = math.log(left), math.log(right)


def _worth(summary: Summary) -> tuple[int, float]:
    """The less, the better: how many runs did not finish, then the mean time of those that did."""
    return summary.runs - summary.finished, summary.seconds if summary.finished else math.inf
