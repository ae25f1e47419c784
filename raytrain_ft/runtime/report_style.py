"""How the figures of a run's report look: colours, axes, and SVG that can stand inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    # name: (on a light page, on a dark one). The hues are Okabe and Ito's, which colour-blind people can tell apart.
    "ink": ("#1d2630", "#e6ebf0"),
    "muted": ("#5d6976", "#98a5b3"),
    "grid": ("#e4e8ed", "#2d3641"),
    "card": ("#fffffe", "#1a2029"),
    "blue": ("#0072b2", "#58b0e6"),
    "orange": ("#e69f00", "#f0b43c"),
    "green": ("#009e73", "#35c79c"),
    "red": ("#d55e00", "#f28a4b"),
    "sky": ("#56b4e9", "#8fd0f5"),
    "purple": ("#a8508a", "#dc9cc6"),
}
INK, MUTED, GRID, CARD, BLUE, ORANGE, GREEN, RED, SKY, PURPLE = (light for light, _ in COLOURS.values())
WIDTH = 11.0
"""Inches; the page shows them about 1060 pixels wide."""
LEFT, RIGHT = 0.07, 0.985


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page: no header, no style sheet of its own, ids that no other figure has."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    width, height = figure.get_size_inches() * 72
    body = re.sub(r"<style.*?</style>", "", buffer.getvalue(), count=1, flags=re.DOTALL)
    body = body[body.index(">", body.index("<svg")) + 1 :]
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for colour, (light, _) in COLOURS.items():
        body = body.replace(light, f"var(--{colour})")
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title-{name}">{body}'


def stacked(
    height: float, rows: Sequence[float], *, top: float = 0.34, bottom: float = 0.46, gap: float = 0.16
) -> tuple[Figure, list[Axes]]:
    """Axes one below the other with one x axis; the heights of rows are relative, `top` and `bottom` are inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    grid = figure.add_gridspec(
        len(rows), 1, height_ratios=rows, left=LEFT, right=RIGHT, top=1 - top / height, bottom=bottom / height, hspace=gap
    )
    axes: list[Axes] = []
    for row in range(len(rows)):
        axes.append(figure.add_subplot(grid[row], sharex=axes[0] if axes else None))
        _dress(axes[-1], last=row == len(rows) - 1)
    return figure, axes


def _dress(axes: Axes, *, last: bool) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED if last else GRID)
    axes.tick_params(colors=MUTED, length=0, labelbottom=last, labelsize=8.5)
    axes.tick_params(axis="x", pad=6)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def name_axis(axes: Axes, words: str) -> None:
    """What the y axis shows, above its top: easier to read than turned text."""
    axes.annotate(words, (0, 1), (-36, 5), "axes fraction", "offset points", color=MUTED, fontsize=8.5)


def add_legend(axes: Axes, columns: int, *, above: float = 1.0) -> None:
    """A legend in one line above the axes, at the right."""
    style = {"frameon": False, "labelcolor": INK, "fontsize": 8.5, "handlelength": 1.3, "columnspacing": 1.6, "borderpad": 0}
    axes.legend(loc="lower right", bbox_to_anchor=(1, above), ncols=columns, borderaxespad=0.35, **style)


def whole_numbers(axes: Axes) -> None:
    """The y axis counts things."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def seconds_axis(axes: Axes, seconds: float) -> None:
    """The x axis is the time of the run, which took so many seconds."""
    axes.set_xlim(0, max(seconds, 1e-3) * 1.005)
    axes.set_xlabel("seconds since the run began", color=MUTED, fontsize=8.5)


def plain(words: str) -> str:
    """Text that any font can draw."""
    return "".join(c if (c.isprintable() and c < "\u0250") or c in "→…" else "?" for c in " ".join(words.split()))
