"""The figures of a run's report: what is drawn of the run's facts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from raytrain_ft.runtime.report_data import Account, Facts, Point, thin
from raytrain_ft.runtime.report_style import (
    BLUE,
    CARD,
    GREEN,
    GRID,
    INK,
    LEFT,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    RIGHT,
    SKY,
    add_legend,
    name_axis,
    plain,
    seconds_axis,
    stacked,
    to_svg,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {"fence": RED, "replace": ORANGE, "rebuild": SKY, "resume": GREEN}
MOST_BARS = 12
MOST_SPANS = 300
CHARACTER = 0.0057
"""Width of a character of a recovery's name, as a share of the figure's width, on the safe side."""


def draw(facts: Facts) -> dict[str, str]:
    """The figures for which the run has data, by the name of their section."""
    import matplotlib

    wanted: dict[str, tuple[Callable[[Facts], Figure], bool]] = {
        "steps": (_steps, bool(facts.progress)),
        "phases": (_phases, any(account.phases for account in facts.recoveries)),
        "loss": (_loss, bool(facts.losses)),
        "checkpoints": (_checkpoints, bool(facts.checkpoints)),
        "interval": (_interval, bool(facts.decisions)),
    }
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False, "font.size": 9}):
        return {name: to_svg(make(facts), name) for name, (make, wanted_here) in wanted.items() if wanted_here}


# ---------------------------------------------------------------- the figures


def _steps(facts: Facts) -> Figure:
    figure, (main, lane, world) = stacked(4.9, (6.2, 1.25, 1.25), top=0.58, gap=0.3)
    points = thin(facts.progress)
    main.plot(*zip(*points, strict=True), color=BLUE, linewidth=2, label="steps committed", zorder=3, solid_joinstyle="round")
    main.plot(facts.seconds, facts.steps, "o", color=BLUE, markersize=4, zorder=4)
    _mark_disturbances(main, facts)
    name_axis(main, "steps")
    whole_numbers(main)
    main.set_ylim(0, max(1.0, facts.max_steps or 0, *(step for _, step in points)) * 1.06)
    add_legend(main, 5, above=1.085)
    _name_recoveries(main, facts)
    _lanes(lane, facts)
    if facts.worlds:
        sizes = thin([*facts.worlds, (facts.seconds, facts.worlds[-1][1])])
        world.step(*zip(*sizes, strict=True), where="post", color=INK, linewidth=1.6)
        world.set_ylim(0, max(size for _, size in sizes) * 1.25)
    most = max((size for _, size in facts.worlds), default=1.0)
    ticks: list[float] = []
    for size in [most, *sorted({0.0, *(size for _, size in facts.worlds)}, reverse=True)]:
        if not ticks or (ticks[-1] - size >= 0.4 * most and (size == 0 or size >= 0.4 * most)):
            ticks.append(size)
    world.set_yticks(ticks)
    name_axis(world, "workers")
    seconds_axis(world, facts.seconds)
    return figure


def _height(facts: Facts) -> Callable[[float], float]:
    """Where the curve of committed steps is at a time."""
    import numpy as np

    times, steps = np.array(facts.progress, dtype=float).T  # once: it is asked for every checkpoint
    return lambda at: float(np.interp(at, times, steps))


def _mark_disturbances(axes: Axes, facts: Facts) -> None:
    curve = _height(facts)
    _shade(axes, facts)
    gone = [(loss.at, curve(loss.at)) for loss in facts.gone]
    for points, marker, colour, label in (
        (gone, "X", RED, "worker lost"),
        ([(at, curve(at)) for at in facts.restarts], "D", PURPLE, "supervisor restarted"),
        ([(c.at, curve(c.at)) for c in facts.checkpoints], "o", GREEN, "checkpoint"),
    ):
        if not points:
            continue
        size = (8 if marker == "X" else 4.5) * (1 if len(points) < 60 else 0.6)
        look = {"markersize": size, "markeredgecolor": CARD, "markeredgewidth": 0.8, "zorder": 6 if marker == "X" else 5}
        axes.plot(*zip(*thin(points, 500), strict=True), marker, color=colour, label=label, linestyle="none", **look)


def _shade(axes: Axes, facts: Facts) -> None:
    least = facts.seconds * 0.0015  # so that a recovery of milliseconds in a run of hours is still seen
    spans = [(account.at, max(account.seconds or 0.0, least)) for account in shaded(facts)]
    if spans:
        look = {"color": ORANGE, "alpha": 0.28, "linewidth": 0, "label": "recovery", "zorder": 0.5}
        axes.broken_barh(spans, (0, 1), transform=axes.get_xaxis_transform(), **look)


def shaded(facts: Facts) -> list[Account]:
    """The recoveries that are marked in the figures: all, or the longest ones. Those without an end count as short."""
    return sorted(facts.recoveries, key=lambda account: account.seconds or 0.0, reverse=True)[:MOST_SPANS]


def _name_recoveries(axes: Axes, facts: Facts) -> None:
    """The number of each recovery above its span, and as much of its cause as there is room for."""
    scale = (RIGHT - LEFT) / max(facts.seconds * 1.005, 1e-3)
    taken = 0.0
    ahead = sorted(facts.recoveries, key=lambda account: account.at)
    for account, after in itertools.zip_longest(ahead, ahead[1:]):
        here = account.at * scale
        room = int(((after.at * scale if after else RIGHT - LEFT) - here) / CHARACTER) - 1
        words = f"{account.number}  {plain(account.cause)}"
        if room < 14:
            words = str(account.number)
        elif len(words) > room:
            words = words[: room - 1].rstrip() + "…"
        if here < taken:
            continue
        taken = here + (len(words) + 2) * CHARACTER
        style = {"color": INK, "fontsize": 8}
        axes.annotate(words, (account.at, 1), (0, 4), axes.get_xaxis_transform(), "offset points", **style)


def _lanes(axes: Axes, facts: Facts) -> None:
    """Two rows under the curve: the phases of recoveries, and checkpoints."""
    axes.grid(visible=False)
    axes.set_ylim(-0.55, 1.55)
    axes.set_yticks([1, 0], ["recoveries", "checkpoints"], fontsize=8)
    least, marked = facts.seconds * 0.0008, shaded(facts)
    for phase, colour in PHASES.items():
        found = [(begin, max(end - begin, least)) for a in marked for name, begin, end in a.phases if name == phase]
        axes.broken_barh(found, (0.66, 0.68), color=colour, linewidth=0)
    done = [(c.at, 0.0) for c in facts.checkpoints]
    failed = [(c.at, 0.0) for c in facts.failures]
    for points, marker, colour in ((done, "|", GREEN), (failed, "x", RED)):
        if points:
            axes.plot(*zip(*thin(points, 500), strict=True), marker, color=colour, markersize=8, markeredgewidth=1.8)


def _phases(facts: Facts) -> Figure:
    shown = longest(facts)
    from matplotlib.patches import Patch

    top, bottom = 0.3, 0.46
    figure, (axes,) = stacked(top + bottom + 0.5 * len(shown), (1,), top=top, bottom=bottom)
    end = max((phases[-1][2] - account.at for account in shown if (phases := account.phases)), default=1.0)
    end = max(end, 1e-6)
    unit, per = ("ms", 1000.0) if end < 2 else ("seconds", 1.0)
    for row, account in enumerate(shown):
        for name, begin, stop in account.phases:
            axes.barh(row + 0.16, (stop - begin) * per, 0.42, (begin - account.at) * per, color=PHASES[name])
        total = account.phases[-1][2] - account.at
        known = f"{total * 1000:,.0f} ms" if unit == "ms" else f"{total:,.2f} s"
        look = {"va": "center", "fontsize": 8.5, "color": INK}
        axes.annotate(known, (total * per, row + 0.16), (5, 0), "data", "offset points", **look)
        axes.annotate(_story(account), (0, row - 0.24), (1, 0), "data", "offset points", **look)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, end * per * 1.1)
    axes.set_yticks(range(len(shown)), [f"{account.number}" for account in shown])
    axes.tick_params(axis="y", labelsize=10, labelcolor=INK)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(f"{unit} since the first sign", color=MUTED, fontsize=8.5)
    style = {"frameon": False, "labelcolor": INK, "fontsize": 8.5, "handlelength": 1.0, "handleheight": 0.9, "borderpad": 0}
    patches = [Patch(color=colour, label=name) for name, colour in PHASES.items()]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.5, **style)
    return figure


def longest(facts: Facts) -> list[Account]:
    """The recoveries whose phases are drawn: all, or the longest ones, in order."""
    known = [account for account in facts.recoveries if account.phases]
    most = sorted(known, key=lambda account: account.phases[-1][2] - account.at, reverse=True)[:MOST_BARS]
    return sorted(most, key=lambda account: account.number)


def _story(account: Account) -> str:
    lost = f"lost {', '.join(account.lost[:4])}{'…' if len(account.lost) > 4 else ''}" if account.lost else "nobody lost"
    step = "" if account.step is None else f"step {account.step:g} · "
    words = plain(f"{step}{lost} · {account.cause}" if account.cause else f"{step}{lost}")
    return words if len(words) <= 150 else words[:149] + "…"


def _loss(facts: Facts) -> Figure:
    figure, (axes,) = stacked(3.1, (1,))
    points = thin(facts.losses)
    values = [value for _, value in points]
    few = len(points) <= 60
    axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.8, marker="o" if few else None, markersize=3.2, label="loss")
    steps = [account.step for account in shaded(facts) if account.step is not None]
    if steps:
        look = {"color": ORANGE, "linewidth": 1.2, "alpha": 0.8 if len(steps) < 30 else 0.3, "zorder": 1, "label": "recovery"}
        axes.vlines(steps, 0, 1, transform=axes.get_xaxis_transform(), **look)
    if min(values) > 0 and max(values) > 50 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.tick_params(axis="y", which="minor", length=0)
    axes.set_xlim(0, max(1.0, points[-1][0]) * 1.005)
    axes.set_xlabel("steps committed", color=MUTED, fontsize=8.5)
    name_axis(axes, "loss" + (" (logarithmic)" if axes.get_yscale() == "log" else ""))
    add_legend(axes, 2)
    return figure


def _checkpoints(facts: Facts) -> Figure:
    figure, rows = stacked(4.6, (1, 1, 1), gap=0.42)
    for axes, (name, words, colour) in zip(
        rows,
        (
            ("stall_s", "training stood still", RED),
            ("snapshot_s", "snapshot in memory", PURPLE),
            ("persist_s", "made durable, in the background", GREEN),
        ),
        strict=True,
    ):
        found = [(c.at, value) for c in facts.checkpoints if (value := getattr(c, name)) is not None]
        _stems(axes, found, words, colour)
        failed = [checkpoint.at for checkpoint in facts.failures[:: one_in(facts)]]
        axes.vlines(failed, 0, 1, color=RED, linewidth=1, linestyle=(0, (3, 3)), transform=axes.get_xaxis_transform())
        _shade(axes, facts)
    seconds_axis(rows[-1], facts.seconds)
    return figure


def one_in(facts: Facts) -> int:
    """Of so many checkpoints that failed, one is marked."""
    return max(1, -(-len(facts.failures) // MOST_SPANS))


def _stems(axes: Axes, points: list[Point], words: str, colour: str) -> None:
    from matplotlib.ticker import MaxNLocator

    most = max((value for _, value in points), default=0.0)
    unit, per = ("ms", 1000.0) if most < 1 else ("s", 1.0)
    found = [(at, value * per) for at, value in thin(points)]
    if found:
        times, values = zip(*found, strict=True)
        axes.vlines(times, 0, values, color=colour, linewidth=1.4, alpha=0.45)
        axes.plot(times, values, "o", color=colour, markersize=4.2 if len(found) < 200 else 2, clip_on=False)
    axes.set_ylim(0, most * per * 1.15 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    name_axis(axes, f"{words} [{unit}]")


def _interval(facts: Facts) -> Figure:
    figure, (axes,) = stacked(3.1, (1,))
    last = facts.decisions[-1]
    for name, colour, dashes, words in (
        ("k_persist", GREEN, (0, (5, 2)), "least k: durable before the next"),
        ("k_overhead", PURPLE, (0, (1, 1.5)), "least k: overhead within budget"),
        ("k_failures", ORANGE, (0, (6, 2, 1, 2)), "least k: failures are rare"),
    ):
        bound = [(d.at, d.bounds[name]) for d in facts.decisions if name in d.bounds]
        if any(value for _, value in bound):
            ends = thin([*bound, (facts.seconds, bound[-1][1])])
            axes.step(*zip(*ends, strict=True), where="post", color=colour, linestyle=dashes, linewidth=1.4, label=words)
    chosen = [(decision.at, decision.k) for decision in facts.decisions]
    line = thin([*chosen, (facts.seconds, last.k)])
    axes.step(*zip(*line, strict=True), where="post", color=BLUE, linewidth=2.2, label="k", zorder=3)
    axes.plot(*zip(*thin(chosen), strict=True), "o", color=BLUE, markersize=4.5, zorder=4)
    taken = -1.0
    for index, (at, k) in enumerate(chosen, 1):
        if at - taken > facts.seconds * 0.014:  # else it would be written over the one before
            axes.annotate(str(index), (at, k), (4, 4), "data", "offset points", fontsize=8.5, color=INK)
            taken = at
    axes.set_ylim(0, max(k for _, k in [*chosen, *((0, b) for d in facts.decisions for b in d.bounds.values())]) * 1.2 or 1)
    whole_numbers(axes)
    name_axis(axes, "steps")
    seconds_axis(axes, facts.seconds)
    add_legend(axes, 4)
    return figure
