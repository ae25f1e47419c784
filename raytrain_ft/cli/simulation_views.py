"""What simulations came to, as tables, plots and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import Summary
from raytrain_ft.simulate.study import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUR = 3600.0
DAY = 24 * HOUR
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKERS = "osD^vPX*"
LOST = ("interrupted", "redone", "saving", "slowdown", "shrunk", "slowed", "detect", "fence", "replace", "rebuild", "resume")


def in_time(seconds: float) -> str:
    """A time in the unit that suits it."""
    if math.isnan(seconds):
        return "-"
    for unit, size in (("d", DAY), ("h", HOUR), ("min", 60.0)):
        if seconds >= 3 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def table(job: Job, summaries: Sequence[Summary]) -> Table:
    """One column per strategy: means over its runs."""
    title = f"{job.name}: {job.steps:,} steps, {in_time(job.useful_s)} without failures and without saving"
    shown = Table(title=escape(title), title_justify="left")
    shown.add_column("")
    for one in summaries:
        shown.add_column(escape(one.strategy), justify="right")
    rows = {
        "saves every": [f"{one.interval:,} steps" if one.interval else "never" for one in summaries],
        "time to finish": [in_time(one.seconds) for one in summaries],
        "  ± (95 %)": [in_time(one.ci_s) for one in summaries],
        "goodput": [_number(one.goodput, ".2%") for one in summaries],
        "lost work": [in_time(one.lost_work_s) for one in summaries],
        "samples lost": [_number(one.samples_lost, ",.0f") for one in summaries],
        "failures": [_number(one.failures, ",.1f") for one in summaries],
        "pause, mean": [in_time(one.pause_s) for one in summaries],
        "pause, longest": [in_time(one.longest_pause_s) for one in summaries],
        "node hours": [_number(one.node_hours, ",.0f") for one in summaries],
        "cost": [_number(one.cost, ",.0f") for one in summaries],
        "keeps": [one.guarantee if one.finished else "-" for one in summaries],
        "runs finished": [f"{one.finished} of {one.runs}" for one in summaries],
    }
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


def reasons(summaries: Sequence[Summary]) -> list[str]:
    """Why runs did not finish, one line per strategy."""
    return [f"{one.strategy}: {one.runs - one.finished} did not finish: {one.reason}" for one in summaries if one.reason]


def _number(value: float, how: str) -> str:
    return "-" if math.isnan(value) else format(value, how)


def sweep_table(sweep: Sweep) -> Table:
    """One row per point, one column per strategy; the least time of each strategy is marked."""
    by_interval = sweep.variable == "interval"
    what = "the interval" if by_interval else "the time between failures of the whole cluster"
    shown = Table(title=f"time to finish by {what}")
    shown.add_column("saves every" if by_interval else "failure every", justify="right")
    for name in sweep.summaries:
        shown.add_column(escape(name), justify="right")
    best = {name: sweep.best(name)[0] for name in sweep.summaries}
    for number, point in enumerate(sweep.points):
        cells = [f"{point:,.0f} steps" if by_interval else in_time(point)]
        for name, summaries in sweep.summaries.items():
            one = summaries[number]
            some = f" ({one.finished} of {one.runs})" if one.finished < one.runs else ""
            cell = in_time(one.seconds) + some
            cells.append(f"[bold]{cell}[/bold]" if by_interval and best[name] == point and not some else cell)
        shown.add_row(*cells)
    return shown


def as_json(job: Job, summaries: Sequence[Summary], sweeps: Sequence[Sweep] = (), **more: Any) -> str:
    """Everything, for machines. What is not known is null."""
    found = {
        "job": asdict(job),
        "strategies": [asdict(summary) for summary in summaries],
        "sweeps": [
            {
                "variable": sweep.variable,
                "points": sweep.points,
                "strategies": {name: [asdict(s) for s in some] for name, some in sweep.summaries.items()},
            }
            for sweep in sweeps
        ],
        **more,
    }
    return json.dumps(finite(found), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """Plain data with None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- plots


def plot_sweep(job: Job, sweep: Sweep, path: Path) -> None:
    """What the run takes beyond its undisturbed steps, over the variable, with 95 % confidence intervals."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 4.3), layout="constrained")
    axes = figure.subplots()
    by_interval = sweep.variable == "interval"
    xs = sweep.points if by_interval else [point / HOUR for point in sweep.points]
    lasted = [s.seconds for summaries in sweep.summaries.values() for s in summaries if s.finished]
    is_log = min(lasted, default=0.0) > job.useful_s  # a step that is skipped costs nothing, and may be more than all else
    for number, (name, summaries) in enumerate(sweep.summaries.items()):
        known = [(x, s) for x, s in zip(xs, summaries, strict=True) if s.finished == s.runs]
        some = [(x, (s.seconds - job.useful_s) / HOUR) for x, s in zip(xs, summaries, strict=True) if 0 < s.finished < s.runs]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        beyond = [(s.seconds - job.useful_s) / HOUR for _, s in known]
        widths = [0.0 if math.isnan(s.ci_s) else s.ci_s / HOUR for _, s in known]
        # a logarithmic axis has no zero
        below = [min(width, 0.9 * value) if is_log else width for width, value in zip(widths, beyond, strict=True)]
        axes.errorbar(
            [x for x, _ in known],
            beyond,
            yerr=(below, widths),
            label=name,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            capsize=2,
        )
        if some:  # the mean of those that finished says little: those that had bad luck are not in it
            axes.plot(*zip(*some, strict=True), linestyle="", color=colour, marker=marker, markersize=4, fillstyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log" if is_log else "linear")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    xlabel = "steps between two times that the state is saved" if by_interval else "hours between failures of the cluster"
    axes.set_xlabel(xlabel)
    axes.set_ylabel(f"hours beyond the {job.useful_s / HOUR:,.1f} h of steps")
    incomplete = any(0 < s.finished < s.runs for summaries in sweep.summaries.values() for s in summaries)
    axes.set_title(job.name + ("\nhollow: some runs did not finish, and are not in the mean" if incomplete else ""))
    _finish(axes)
    figure.savefig(path, dpi=150)


def plot_losses(job: Job, summaries: Sequence[Summary], path: Path) -> None:
    """What each strategy lost its time to, beyond the steps that stood."""
    from matplotlib.figure import Figure

    done = [summary for summary in summaries if summary.finished]
    figure = Figure(figsize=(7, 0.9 + 0.42 * max(2, len(done))), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(done)
    colours = dict(zip(LOST, (*COLOURS, "#b22222", "#8b6508", "#6a3d9a"), strict=True))
    for kind in LOST:
        widths = [max(0.0, summary.lost_s.get(kind, 0.0)) / HOUR for summary in done]
        if sum(widths) > 0.002 * sum(sum(map(abs, s.lost_s.values())) for s in done) / HOUR:
            axes.barh([summary.strategy for summary in done], widths, left=left, label=kind, color=colours[kind], height=0.65)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"hours beyond the {job.useful_s / HOUR:,.1f} h of steps that stood")
    axes.set_title(job.name)
    _finish(axes)
    figure.savefig(path, dpi=150)


def _finish(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
