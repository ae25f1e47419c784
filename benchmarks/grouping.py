"""How good are the groups that selective logging plans, and how fast?    python -m benchmarks.grouping [--quick] --json FILE

Quality: the plan's expected recovery time over that of the best of all groupings, which are enumerated here with the paper's
formulas written down once more; the paper's greedy algorithm is shown beside it. Speed: the slowest of many plans for 128
machines, of every kind of pipeline below, both ways round (bytes given, time given). Table 3: the paper's sizes of logs.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Goal, Options, Report, main
from raytrain_ft.policy.constrained_path import Search
from raytrain_ft.policy.grouping import Groups, Profile, arcs, cheapest, greedy, log_bytes, objective, optimal
from raytrain_ft.policy.logging_cost import transformer_log_bytes

GOALS = {
    "objective_ratio_vs_brute_force": Goal("<=", 1.0),
    "plan_seconds_128": Goal("<=", 1.0),
    "table3_rows_matched": Goal(">=", 4),
}
TABLE_3 = [("ViT-128/32", 4096, 49, 16, "24.66"), ("ViT-128/32", 4096, 49, 8, "11.51")]
TABLE_3 += [("BERT-128", 512, 128, 16, "8.05"), ("BERT-128", 512, 128, 8, "3.76")]
KINDS = ("any", "alike", "equal times", "equal sizes", "long tails")


def pipeline(draws: np.random.Generator, stages: int, kind: str, parallel: bool) -> Profile:
    """A random one. Real numbers, so that hardly any two groupings log the same number of bytes."""
    compute, crossing = draws.random((2, stages))
    if kind == "alike":
        compute, crossing = 1 + 0.05 * compute, 1 + 0.05 * crossing
    elif kind == "long tails":
        compute, crossing = draws.pareto(1.2, (2, stages))
    compute = np.ones(stages) if kind == "equal times" else compute
    crossing = np.ones(stages) if kind == "equal sizes" else crossing + 1e-3
    return Profile(
        compute=tuple(compute.tolist()),
        crossing=tuple(crossing[1:].tolist()),
        bandwidth=float(10 ** draws.uniform(-0.5, 3)),
        interval=50,
        parallel=parallel,
    )


def apart(stages: int) -> Groups:
    """Every boundary logged."""
    return tuple((stage,) for stage in range(stages))


def seconds(profile: Profile, start: int, stop: int) -> float:
    """R(G) |G| / N of the group start..stop-1, as section 5.3 has it; one stage per machine."""
    n, size = len(profile.compute), stop - start
    time = sum(profile.compute[start:stop]) + sum(profile.crossing[start : stop - 1]) / profile.bandwidth
    return time / (n // size if profile.parallel else 1) * size / n


def brute_force(profile: Profile, budget: float) -> float:
    """The least expected recovery time of all 2^(N-1) groupings whose log fits the budget."""
    n = len(profile.compute)
    times, sizes = [np.zeros(1)], [np.zeros(1)]  # of every grouping of the first 0, 1, 2, ... stages
    for stop in range(1, n + 1):
        right = profile.crossing[stop - 1] * profile.interval if stop < n else 0.0
        times.append(np.concatenate([times[start] + seconds(profile, start, stop) for start in range(stop)]))
        sizes.append(np.concatenate([sizes[start] + right for start in range(stop)]))
    assert len(times[n]) == 2 ** (n - 1)
    return float(times[n][sizes[n] <= budget].min())


def measure_quality(report: Report, options: Options) -> None:
    """Every instance is planned with and without parallel recovery."""
    draws = np.random.default_rng(options.seed)
    count = 50 if options.quick else 500
    ratios: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for number in range(count):
        kind, stages, seed = KINDS[number % len(KINDS)], int(draws.integers(2, 17)), int(draws.integers(2**32))
        share = draws.random()
        for parallel in (False, True):
            profile = pipeline(np.random.default_rng(seed), stages, kind, parallel)
            budget = share * log_bytes(profile, apart(stages))
            best = brute_force(profile, budget)
            plans = [plan(profile, budget) for plan in (optimal, greedy)]
            assert all(log_bytes(profile, groups) <= budget for groups in plans)
            bounds = [[0, *np.cumsum([len(group) for group in groups]).tolist()] for groups in plans]
            found = [sum(seconds(profile, a, b) for a, b in pairwise(edges)) / best for edges in bounds]
            ratios.setdefault((kind, parallel), []).append((found[0], found[1]))
    table = Table(title="expected recovery time / the least of all groupings, N <= 16")
    for title in ("pipeline", "parallel recovery", "ours, worst", "greedy, median", "greedy, worst"):
        table.add_column(title, justify="left" if title == "pipeline" else "right")
    for (kind, parallel), pairs in ratios.items():
        ours, theirs = np.array(pairs).T
        cells = (f"{ours.max():.10f}", f"{np.median(theirs):.3f}", f"{theirs.max():.3f}")
        table.add_row(kind, "yes" if parallel else "no", *cells)
    Console(width=120).print(table)
    ours, theirs = np.array([pair for pairs in ratios.values() for pair in pairs]).T
    worst = round(float(ours.max()), 9)  # the two sums are rounded differently
    report.add("objective_ratio_vs_brute_force", worst, n=len(ours))
    exact = np.mean(theirs < 1 + 1e-9)
    report.note(f"greedy: best in {exact:.0%}, median {np.median(theirs):.4f}, worst {theirs.max():.3f} of {len(theirs)} plans")


def measure_speed(report: Report, options: Options) -> None:
    """The slowest plan decides."""
    draws = np.random.default_rng(options.seed)
    table = Table(title="plans for 128 machines: seconds, and the greedy's expected recovery time / ours")
    for title in (
        "pipeline",
        "optimal, median",
        "optimal, worst",
        "cheapest, worst",
        "greedy, seconds",
        "greedy / ours, worst",
    ):
        table.add_column(title, justify="left" if title == "pipeline" else "right")
    times: list[float] = []
    losses: list[float] = []
    for kind in KINDS:
        rows = []
        for number in range(4 if options.quick else 40):
            profile = pipeline(draws, 128, kind, parallel=number % 2 == 1)
            budget = draws.random() * log_bytes(profile, apart(128))
            marks = [time.perf_counter()]
            best = optimal(profile, budget)
            marks.append(time.perf_counter())
            merged = greedy(profile, budget)
            marks.append(time.perf_counter())
            fastest, slowest = objective(profile, apart(128)), objective(profile, (tuple(range(128)),))
            target = fastest * (slowest / fastest) ** draws.random()
            marks.append(time.perf_counter())
            cheapest(profile, min(target, slowest))
            marks.append(time.perf_counter())
            spent = np.diff(marks)
            search = Search(*arcs(profile), budget)
            search.best([0, 128])
            losses.append(search.loss / search.value)
            rows.append((spent[0], spent[3], spent[1], objective(profile, merged) / objective(profile, best)))
        first, reverse, greedily, ratio = np.array(rows).T
        worst = (f"{x:.3f}" for x in (np.median(first), first.max(), reverse.max(), greedily.max(), ratio.max()))
        table.add_row(kind, *worst)
        times += [*first.tolist(), *reverse.tolist()]
    Console(width=120).print(table)
    report.add("plan_seconds_128", max(times), n=len(times))
    thinned = sum(loss > 0 for loss in losses)
    report.note(f"not proven the best: {thinned} of {len(losses)} plans, all within {max(losses):.1e} (relative) of it")
    report.note(f"plans for 128 machines: median {np.median(times):.3f} s, worst {max(times):.3f} s")


def measure_table_3(report: Report) -> None:
    """Log per step, in GB, to the printed digit."""
    matched = 0
    for model, batch, tokens, groups, printed in TABLE_3:
        found = f"{transformer_log_bytes(batch, tokens, 1024, 4, groups - 1) / 1e9:.2f}"
        matched += found == printed
        report.note(f"Table 3, {model}, {groups} groups: {found} GB per step, printed {printed}")
    report.add("table3_rows_matched", matched, n=len(TABLE_3))


def run(options: Options) -> Report:
    """Measures everything; one thread, no device."""
    report = Report("grouping", metrics_from=GOALS)
    measure_table_3(report)
    measure_quality(report, options)
    measure_speed(report, options)
    return report


if __name__ == "__main__":
    main(run, __doc__)
