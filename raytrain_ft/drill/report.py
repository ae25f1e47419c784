"""A drill's report: a table for a terminal, `drill.json` for programs, `drill.md` for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_ft.drill.numbers import Report, Spread

MOST_STRIKES = 100
"""Rows of the table of strikes; drill.json has them all."""
Rows = list[list[str]]


def write(report: Report, directory: Path) -> tuple[Path, Path]:
    """Writes `drill.json` and `drill.md` into a run's directory."""
    as_json, as_text = directory / "drill.json", directory / "drill.md"
    as_json.write_text(json.dumps({**asdict(report), "passed": report.passed}, indent=2) + "\n")
    as_text.write_text(markdown(report))
    return as_json, as_text


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    for title, head, rows in _tables(report):
        if rows:
            table = Table(*head, title=title, title_justify="left")
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
    console.print(_last_line(report), markup=False)


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [f"# Drill {report.scenario}: {'passed' if report.passed else 'FAILED'}\n"]
    for title, head, rows in _tables(report):
        if rows:
            parts.append(f"## {title}\n\n{_row(head)}\n{_row(['---'] * len(head))}\n" + "\n".join(map(_row, rows)) + "\n")
    parts.append(f"{_last_line(report)}\n\nRecords: `{report.paths[0]}`; undisturbed: `{report.paths[1]}`\n")
    return "\n".join(parts)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _last_line(report: Report) -> str:
    reason = f"not comparable: {report.incomparable}\n" if report.incomparable else ""
    reason += f"no prediction: {report.unpredicted}\n" if report.unpredicted else ""
    return f"{reason}drill {report.scenario} on {report.ground}: {'passed' if report.passed else 'FAILED'}"


def _tables(report: Report) -> list[tuple[str, Sequence[str], Rows]]:
    kept = {True: "kept", False: "NOT KEPT", None: ""}
    checks = [[check.name, check.wanted, check.found, kept[check.kept]] for check in report.checks]
    kinds = [
        [kind.cause, kind.strategy, kind.guarantee, str(kind.count), _time(kind.pause.p50), _time(kind.pause.p95)]
        for kind in report.recoveries
    ]
    strikes = [
        [
            f"events.{strike.event}",
            strike.action,
            ", ".join(strike.members) or strike.node[:8],
            f"{strike.at:.2f} s",
            str(strike.step),
            _time(strike.detected_s),
            _time(strike.pause_s),
            strike.note,
        ]
        for strike in report.strikes[:MOST_STRIKES]
    ]
    return [
        ("Strikes", ("event", "action", "who", "at", "step", "detected after", "pause", ""), strikes),
        ("Recoveries", ("cause", "strategy", "kept", "count", "pause p50", "pause p95"), kinds),
        ("Numbers", ("", report.ground, *(["predicted"] if report.predicted else [])), _numbers(report)),
        ("Verdict", ("", "wanted", "found", ""), checks),
    ]


def _numbers(report: Report) -> Rows:
    equal = {True: "yes", False: "no", None: "unknown" if report.strikes else "not simulated"}[report.bit_equal]
    rows = {
        "goodput": ("goodput", f"{report.goodput:.1%}" + (" (not comparable)" if report.incomparable else "")),
        "training": ("training", f"{report.training_s:.2f} s (undisturbed {report.undisturbed_s:.2f} s)"),
        "recoveries": ("recoveries", str(sum(kind.count for kind in report.recoveries))),
        "detection": ("detection p50, p95, longest", _spread(report.detection)),
        "pause": ("pause p50, p95, longest", _spread(report.pauses)),
        "samples_lost": ("samples lost", str(report.samples_lost)),
        "guarantee": ("guarantee kept", report.guarantee),
        "bit_equal": ("bit-equal to the undisturbed run", equal),
    }
    if report.missed or "missed" in report.predicted:
        rows["missed"] = ("events that did not come about", str(len(report.missed)))
    if report.dropped:
        rows["dropped"] = ("came at random, and could not strike", str(report.dropped))
    if not report.predicted:
        return [list(row) for row in rows.values()]
    return [[*row, f"{report.predicted[name]:.4g}" if name in report.predicted else ""] for name, row in rows.items()]


def _spread(spread: Spread) -> str:
    if not spread.count:
        return "none"
    return f"{_time(spread.p50)}, {_time(spread.p95)}, {_time(spread.longest)} ({spread.count})"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
