"""A number or a claim of a paper beside ours, with the verdict, and those that nobody can reach here, with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Way = Literal["arithmetic", "closed form", "simulated", "policy"]
"""How ours came about: from printed numbers alone; from a formula; by the simulator; by the code that decides in production."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        where: paper, and table, figure or section. what: the quantity, with its unit.
        printed: as the paper has it. ours: the same, by `way`.
        deviation: of ours from the printed number, relative; None for a claim.
        verdict: "to the digit", "within 1 %" (the stated tolerance), "differs"; with "fitted" before it if a constant was, so
            that the agreement says nothing by itself; of a claim "holds" or "refuted"; "shape": what the number depends on is
            not printed, and only direction and size can be compared.
        constants: that were fitted to this very number, in words; empty if none was.
        note: what to know about it.
    """

    where: str
    what: str
    printed: str
    ours: str
    way: Way
    verdict: str
    deviation: float | None = None
    constants: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfReach:
    """Numbers that neither arithmetic nor simulation can give, and why."""

    where: str
    what: str
    why: str


def number(
    where: str,
    what: str,
    printed: str,
    ours: float,
    way: Way,
    *,
    within: float = 0.0,
    shape: bool = False,
    constants: str = "",
    note: str = "",
) -> Row:
    """A printed number beside ours, which is shown with one digit more.

    Args:
        within: relative deviation up to which it counts as reproduced.
        shape: judge nothing; see `Row.verdict`.
    """
    decimals = len(printed.partition(".")[2])
    deviation = ours / float(printed) - 1 if float(printed) else None  # of nothing there is no share
    coarse = 0.5 * 10**-decimals > 0.05 * abs(float(printed))  # what rounds to it may be far from it
    if f"{ours:.{decimals}f}" == printed and (not coarse or math.isclose(ours, float(printed))):
        verdict = "to the digit"
    elif shape:
        verdict = "shape"
    else:
        near = deviation is not None and abs(deviation) <= within
        verdict = f"within {100 * within:g} %" if near else "differs"
    if constants:
        verdict = f"fitted, {verdict}"
    shown = str(ours) if isinstance(ours, int) else f"{ours:.{decimals + 1}f}"
    return Row(
        where=where,
        what=what,
        printed=printed,
        ours=shown,
        way=way,
        verdict=verdict,
        deviation=deviation,
        constants=constants,
        note=note,
    )


def claim(where: str, what: str, printed: str, ours: str, way: Way, *, holds: bool, note: str = "") -> Row:
    """What a paper says in words, or as a bound."""
    verdict = "holds" if holds else "refuted"
    return Row(where=where, what=what, printed=printed, ours=ours, way=way, verdict=verdict, note=note)


def cells(row: Row) -> tuple[str, str, str, str, str, str]:
    """What both tables show."""
    deviation = "" if row.deviation is None else f"{100 * row.deviation:+.2f} %"
    remarks = "; ".join(part for part in (f"fitted: {row.constants}" if row.constants else "", row.note) if part)
    return f"{row.where}: {row.what}", row.printed, row.ours, deviation, f"{row.verdict} ({row.way})", remarks


TITLES = ("what", "printed", "ours", "deviation", "verdict", "remarks")


def show(rows: Iterable[Row], missing: Iterable[OutOfReach]) -> None:
    """Both tables on the terminal."""
    console = Console(width=200)
    table = Table(title="the papers beside ours", show_lines=False)
    for title in TITLES:
        table.add_column(title, justify="right" if title in TITLES[1:4] else "left", overflow="fold")
    for row in rows:
        table.add_row(*cells(row), style="bold red" if row.verdict in ("refuted", "differs") else None)
    console.print(table)
    table = Table(title="out of reach")
    for title in ("where", "what", "why"):
        table.add_column(title, overflow="fold")
    for one in missing:
        table.add_row(one.where, one.what, one.why)
    console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown, as docs/papers.md has it."""
    lines = [TITLES, ("---", "---:", "---:", "---:", "---", "---"), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown_missing(missing: Sequence[OutOfReach]) -> str:
    """The same for those out of reach."""
    lines = [("where", "what", "why"), ("---", "---", "---"), *((one.where, one.what, one.why) for one in missing)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
