"""Figure 4 of CheckFreq, measured: what training, snapshots and persisting do in the three schemes, drawn as lines of text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.harness import Report
from benchmarks.paced import How, Loop, Preset, Span, loop

SCHEMES: dict[How, str] = {
    "sync": "a, synchronous",
    "persist only": "b, persisting pipelined",
    "pipelined": "c, snapshots and persisting pipelined",
}
STEPS, K = 12, 3
COLUMNS = 96
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def measure_timelines(report: Report, preset: Preset) -> None:
    """12 steps with a checkpoint after each third, under each scheme; all drawn to one scale."""
    measured: dict[How, tuple[float, list[Span]]] = {}
    for how in SCHEMES:
        with loop(preset, fixed=K) as run:
            measured[how] = _measured(run, how)
    column = max(_length(spans) for _, spans in measured.values()) / COLUMNS
    for how, (_, spans) in measured.items():
        head = f"Figure 4{SCHEMES[how]}; {preset.name}, {STEPS} steps, k={K}; {1e3 * column:.0f} ms per column:"
        report.note("\n".join([head, *drawn(spans, column)]))
    totals = ", ".join(f"{how} {seconds:.2f} s" for how, (seconds, _) in measured.items())
    alone = STEPS * preset.iteration_s
    report.note(f"Figure 4, {preset.name}, {STEPS} steps, k={K}: {totals}; without checkpoints {alone:.2f} s")


def _measured(run: Loop, how: How) -> tuple[float, list[Span]]:
    """The seconds that these steps took, and what was done in them and with their checkpoints."""
    run.run(K, how)
    run.settle()
    began = time.monotonic()
    run.run(STEPS, how)
    seconds = time.monotonic() - began
    run.settle()
    return seconds, run.timeline(began)


def _length(spans: Sequence[Span]) -> float:
    return max(span.ended for span in spans) - min(span.began for span in spans)


def drawn(spans: Sequence[Span], column: float) -> list[str]:
    """A line for each kind of span, `column` seconds per character, which is the number of the step (from 1). What is shorter
    than a quarter of a column is left out."""
    origin, first = min(span.began for span in spans), min(span.step for span in spans)
    lines = []
    for what in ("compute", "stall", "snapshot", "persist"):
        line: dict[int, str] = {}
        for span in spans:
            if span.what == what and span.ended - span.began >= column / 4:
                start, stop = (round((moment - origin) / column) for moment in (span.began, span.ended))
                line |= dict.fromkeys(range(start, max(stop, start + 1)), DIGITS[(span.step - first + 1) % len(DIGITS)])
        marks = "".join(line.get(place, " ") for place in range(max(line, default=-1) + 1))
        lines.append(f"  {what:<10}{marks}".rstrip())
    return lines
