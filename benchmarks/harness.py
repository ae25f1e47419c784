"""What every benchmark shares: goals and their verdicts, statistics, the machine, and taking turns.

A benchmark measures, calls `Report.add` once per metric, and ends with `Report.finish`. It states its goals itself:

    GOALS = {"undo_ratio_adam": Goal("<=", 1.0), "torchft_step_ratio": REPORT_ONLY}

    def run(options: Options) -> Report:
        report = Report("undo", metrics_from=GOALS)
        report.add("undo_ratio_adam", ratios)             # many values: median and a bootstrap interval
        report.absent("torchft_step_ratio", why="torchft is not installed")
        return report

    if __name__ == "__main__":
        main(run, __doc__)

Two things that are compared run in turns (A/B/A/B, see `Turns`), so that a change of the machine's speed hits both.
This module knows nothing of torch, of Ray or of the product, so that importing it costs nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.floors import loopback_bandwidth, machine
from benchmarks.turns import BlockClock, BlockTimes, Turns, TurnsOver, read_blocks

__all__ = [
    "REPORT_ONLY",
    "BlockClock",
    "BlockTimes",
    "Estimate",
    "Goal",
    "Options",
    "Report",
    "Turns",
    "TurnsOver",
    "bootstrap_ci",
    "estimate",
    "loopback_bandwidth",
    "machine",
    "machine_noise",
    "main",
    "noise_floor",
    "p95_of",
    "p99_of",
    "paired_ratio",
    "parse_options",
    "read_blocks",
]

Direction = Literal["<=", ">=", "==", "report"]
Statistic = Callable[..., Any]  # statistic(array, axis=-1), as np.median
DIRECTIONS: tuple[Direction, ...] = ("<=", ">=", "==", "report")
FEWEST = 5
"""Observations behind a percentile that is judged. Of fewer, they say next to nothing of it."""
BOUND = 0.975
"""How sure each end of an interval is: together they enclose 95 %."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a metric must satisfy. `direction` "report" judges nothing: the number is printed only."""

    direction: Direction
    value: float | None = None

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction is {self.direction!r}: choose one of {', '.join(DIRECTIONS)}")
        if (self.value is None) != (self.direction == "report"):
            raise ValueError(f"a goal with direction {self.direction!r} has value {self.value}: 'report' alone has none")

    def met_by(self, low: float, high: float) -> bool | None:
        """Whether the interval as a whole passes (its unfavourable end decides). None: nothing to judge."""
        if self.value is None:
            return None
        if self.direction == "<=":
            return high <= self.value
        if self.direction == ">=":
            return low >= self.value
        return math.isclose(low, self.value, rel_tol=1e-9) and math.isclose(high, self.value, rel_tol=1e-9)


REPORT_ONLY = Goal("report")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its 95 % confidence interval, and how many observations are behind it (0: not measured, see `why`)."""

    value: float | None
    low: float
    high: float
    n: int
    why: str | None = None
    tail: bool = False  # it is a percentile near the end, see `TAILS`
    open: bool = False  # `high` is the largest observation and no bound: it would take more of them, see `percentile`

    @property
    def interval(self) -> str:
        """Its ends in words."""
        return f"{self.low:.4g}, {'largest ' if self.open else ''}{self.high:.4g}"

    def __str__(self) -> str:
        return "n/a" if self.value is None else f"{self.value:.4g} [{self.interval}] (n={self.n})"


def bootstrap_ci(values: Sequence[float], statistic: Statistic = np.median, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile-bootstrap interval of `statistic` (called as `statistic(array, axis=-1)`).

    The resamples are drawn from `seed` alone. One value has no spread to speak of: its interval is itself.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"bootstrap needs finite values and at least one, got {data.tolist()}")
    draws = np.random.default_rng(seed).integers(0, data.size, size=(4000, data.size))
    low, high = np.percentile(statistic(data[draws], axis=-1), [2.5, 97.5])
    return float(low), float(high)


def p95_of(values: Any, axis: int = -1) -> Any:
    """The 95th percentile along its axis, as a statistic."""
    return np.percentile(values, 95, axis=axis)


def p99_of(values: Any, axis: int = -1) -> Any:
    """The 99th."""
    return np.percentile(values, 99, axis=axis)


TAILS = {p95_of: 0.95, p99_of: 0.99}


def estimate(values: Sequence[float], statistic: Statistic = np.median, seed: int = 0) -> Estimate:
    """`statistic` of the values with its bootstrap interval; of a percentile near the end, as `percentile` has it."""
    if statistic in TAILS:
        return percentile(values, TAILS[statistic])
    low, high = bootstrap_ci(values, statistic, seed)
    value = float(statistic(np.asarray(values, dtype=np.float64), axis=-1))
    return Estimate(value, low, high, len(values))


def percentile(values: Sequence[float], share: float) -> Estimate:
    """The value that this share of all there could be stays below, with the interval of the order statistics: how many of n
    observations lie below it is binomial, whatever they are. A resample has none beyond the largest, so a bootstrap's upper
    end is too low; and of fewer than log(0.025) / log(share) observations (72 for the 95th percentile, 368 for the 99th) all
    may well lie below. The largest is then told in place of a bound, as such."""
    data = np.sort(np.asarray(values, dtype=np.float64))
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"a percentile needs finite values and at least one, got {data.tolist()}")
    lower, upper = _ranks(data.size, share)
    low, high = float(data[max(0, lower)]), float(data[min(upper, data.size - 1)])
    return Estimate(float(np.quantile(data, share)), low, high, data.size, tail=True, open=upper >= data.size)


@cache
def _ranks(n: int, share: float) -> tuple[int, int]:
    """Which of n observations, from 0 by size, lie below this share's value and not below it, each but for 2.5 %."""
    factors = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    each = [math.exp(f + k * math.log(share) + (n - k) * math.log1p(-share)) for k, f in enumerate(factors)]
    at_most = np.cumsum(each)  # how likely it is that so many lie below, or fewer
    return int(np.searchsorted(at_most, 1 - BOUND, side="right")) - 1, int(np.searchsorted(at_most, BOUND))


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """Median over blocks of (median of our block / median of their block next to it in time).

    Block i of one side ran right before or after block i of the other, so a slow minute of the machine cancels out.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"ratios need the same number of blocks on both sides, got {len(ours)} and {len(theirs)}")
    return estimate([float(np.median(a) / np.median(b)) for a, b in zip(ours, theirs, strict=True)], seed=seed)


def median_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Median of ours over that of theirs, of what was not measured in pairs; for the interval both are drawn anew."""
    if not ours or not theirs:
        raise ValueError(f"a ratio needs both sides, got {len(ours)} and {len(theirs)} values")
    chance = np.random.default_rng(seed)
    drawn = [np.median(chance.choice(np.asarray(one), size=(4000, len(one))), axis=1) for one in (ours, theirs)]
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5])
    return Estimate(float(np.median(ours) / np.median(theirs)), float(low), float(high), min(len(ours), len(theirs)))


def total_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """All of our time over all of theirs, by which throughputs compare: every step counts, a slow one too. Blocks as in
    `paired_ratio`, each as long as its mean step; the interval is of blocks drawn anew, in pairs."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"ratios need the same number of blocks on both sides, got {len(ours)} and {len(theirs)}")
    pairs = np.array([(np.mean(a), np.mean(b)) for a, b in zip(ours, theirs, strict=True)])
    draws = np.random.default_rng(seed).integers(0, len(pairs), size=(4000, len(pairs)))
    totals = pairs[draws].sum(axis=1)
    low, high = np.percentile(totals[:, 0] / totals[:, 1], [2.5, 97.5])
    value = pairs[:, 0].sum() / pairs[:, 1].sum()
    return Estimate(float(value), float(low), float(high), len(pairs))


def noise_floor(once: Sequence[Sequence[float]], again: Sequence[Sequence[float]], seed: int = 0) -> float:
    """How far the ratio of a thing to itself (an A/A run) strays from 1: the interval's farther end, as a fraction."""
    same = paired_ratio(once, again, seed)
    return max(abs(same.low - 1.0), abs(same.high - 1.0))


def machine_noise(blocks: int = 15, repeats: int = 20, size: int = 320) -> float:
    """The `noise_floor` of a fixed matrix product (a millisecond) against itself: for want of a better A/A run."""
    factor = np.random.default_rng(0).standard_normal((size, size))
    times: list[list[float]] = []
    for _ in range(2 * blocks):
        marks = [time.perf_counter()]
        for _ in range(repeats):
            _ = factor @ factor
            marks.append(time.perf_counter())
        times.append(np.diff(marks).tolist())
    return noise_floor(times[0::2], times[1::2])


class Report:
    """The metrics of one benchmark: collects them, prints them as a table, writes them as JSON."""

    def __init__(self, name: str, metrics_from: Mapping[str, Goal] | None = None) -> None:
        """`metrics_from`: the goal of each key, as the benchmark states it. A key left unmeasured shows as such."""
        self.name = name
        self.goals: dict[str, Goal] = dict(metrics_from or {})
        self.noise_floor: float | None = None  # relative: set it from an A/A run of what is timed (see `noise_floor`)
        self._load_before = os.getloadavg()[0]  # what else ran here: read before the benchmark adds its own
        self._estimates: dict[str, Estimate] = {}
        self._notes: list[str] = []
        self._began = time.monotonic()

    def add(
        self,
        key: str,
        value: float | Sequence[float] | Estimate | None,
        ci: tuple[float, float] | None = None,
        n: int | None = None,
        goal: float | None = None,
        direction: Direction | None = None,
        why: str | None = None,
        statistic: Statistic = np.median,
    ) -> None:
        """Record a metric: one number (with `ci` and `n`), an `Estimate`, or the observations behind it.

        A sequence is summed up by `statistic` with a bootstrap interval. None means "not measured", and needs a `why`.
        `goal` and `direction` override what `metrics_from` says of the key.
        """
        if direction is not None or goal is not None:
            self.goals[key] = Goal(direction or "<=", goal)
        self.goals.setdefault(key, REPORT_ONLY)
        if value is None:
            if not why:
                raise ValueError(f"metric {key!r} has no value: say why")
            self._estimates[key] = Estimate(None, math.nan, math.nan, 0, why)
        elif isinstance(value, Estimate):
            self._estimates[key] = value
        elif isinstance(value, (int, float, np.number)):
            low, high = ci or (float(value), float(value))
            self._estimates[key] = Estimate(float(value), float(low), float(high), n if n is not None else 1, why)
        else:
            self._estimates[key] = estimate(value, statistic)
        found = self._estimates[key]
        self._tell(f"{key} = {found}" + (f": {found.why}" if found.why else ""))

    def absent(self, key: str, why: str) -> None:
        """Record that a metric could not be measured here (a peer or a device is missing)."""
        self.add(key, None, why=why)

    def note(self, text: str) -> None:
        """A line printed under the table: a floor, a breakdown, what was unusual."""
        self._notes.append(text)
        self._tell(text)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Ctrl-C ends what is being measured, and no more: what is known by then is printed and written."""
        try:
            yield
        except KeyboardInterrupt:
            self.note("interrupted: what is n/a was not measured")

    def _tell(self, text: str) -> None:
        """Shows at once what is known: a benchmark takes minutes, and one that is cut short still says something."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)

    def verdict(self, key: str) -> str:
        """ "met", "NOT met", "report" (nothing to judge) or "n/a" (not measured). Of a percentile also "all met" (there are too
        few observations to bound it, and each of them meets the goal) and "too few" (even for that)."""
        found = self._estimates.get(key)
        if found is None or found.value is None:
            return "n/a"
        met = self.goals[key].met_by(found.low, found.high)
        if met is None:
            return "report"
        if found.tail and found.n < FEWEST:
            return "too few"
        return ("all met" if found.open else "met") if met else "NOT met"

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values: {"metrics": {key: ...}, "machine": ..., "noise_floor": ...}."""
        metrics: dict[str, dict[str, Any]] = {}
        for key, goal in self.goals.items():
            found = self._estimates.get(key, Estimate(None, math.nan, math.nan, 0, "this run did not measure it"))
            measured = found.value is not None
            metrics[key] = {
                "value": found.value,
                "ci": [found.low, found.high] if measured else None,
                "n": found.n,
                "goal": goal.value,
            } | ({"why": found.why} if found.why else {})
            if found.open:
                metrics[key]["ci_high_is"] = "the largest observation: too few for a bound"
        return {
            "metrics": metrics,
            "machine": machine() | {"load_before": self._load_before},
            "noise_floor": self._noise_floor(),
        }

    def _noise_floor(self) -> float:
        if self.noise_floor is None:
            self.noise_floor = machine_noise()
        return self.noise_floor

    def print(self, console: Console | None = None) -> None:
        """Print the table, the noise floor and the notes."""
        console = console or Console(width=None if os.isatty(1) else 120)
        table = Table(title=f"benchmark: {self.name}")
        for title in ("metric", "value", "95 % CI", "n", "goal", "verdict"):
            table.add_column(title, justify="left" if title in ("metric", "verdict") else "right", overflow="fold")
        for key, goal in self.goals.items():
            found = self._estimates.get(key)
            shown = f"{goal.direction} {goal.value:g}" if goal.value is not None else "report"
            if found is None or found.value is None:
                why = found.why if found is not None else "this run did not measure it"
                table.add_row(key, "n/a", "", "0", shown, f"n/a: {why}")
            else:
                table.add_row(key, f"{found.value:.4g}", found.interval, str(found.n), shown, self.verdict(key))
        console.print(table)
        floor = f"noise floor (A/A): ±{100 * self._noise_floor():.2f} %"
        console.print(f"{floor}; load average before: {self._load_before:.1f}", highlight=False)
        for note in self._notes:
            console.print(note, highlight=False, markup=False)

    def finish(self, json_path: Path | None = None) -> None:
        """Print the report, and write it to `json_path` if given."""
        self.print()
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a benchmark."""

    quick: bool
    json: Path | None
    seed: int


def parse_options(description: str | None = None, argv: Sequence[str] | None = None) -> Options:
    """Read `--quick`, `--json FILE` and `--seed N` from the command line."""
    summary = (description or "").strip().split("\n", 1)[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics to this file")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn at random (default: %(default)s)")
    given = parser.parse_args(argv)
    return Options(given.quick, given.json, given.seed)


def main(run: Callable[[Options], Report], description: str | None = None) -> None:
    """The entry point of a benchmark module: parse, run, print, write. One intra-op thread unless set otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse_options(description)
    run(options).finish(options.json)
