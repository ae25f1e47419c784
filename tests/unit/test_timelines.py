"""Figure 4 of CheckFreq: what overlaps in which scheme, measured with real checkpoints, and how it is drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.paced import How, Preset, Span, loop
from benchmarks.timelines import drawn

STEPS, K = 6, 2


def test_a_line_for_each_kind_to_one_scale() -> None:
    spans = [
        Span("compute", 7, 10.0, 10.4),
        Span("stall", 7, 10.4, 10.6),
        Span("snapshot", 7, 10.4, 10.61),
        Span("persist", 7, 10.61, 11.0),
        Span("compute", 8, 10.6, 10.96),
        Span("stall", 8, 10.96, 10.961),
    ]
    assert drawn(spans, 0.1) == [
        "  compute   1111  2222",
        "  stall         11",
        "  snapshot      11",
        "  persist         1111",
    ]


def overlap(spans: Sequence[Span], one: str, other: str) -> float:
    """Seconds in which both were under way."""
    pairs = [(a, b) for a in spans for b in spans if (a.what, b.what) == (one, other)]
    return sum(max(0.0, min(a.ended, b.ended) - max(a.began, b.began)) for a, b in pairs)


def test_the_three_schemes_overlap_what_the_paper_says() -> None:
    """Synchronous: nothing; then persisting with training; then the snapshot, too."""
    found: dict[How, list[Span]] = {}
    for how in ("sync", "persist only", "pipelined"):
        with loop(Preset("small", 0.02, 0.002, 16), fixed=K) as run:
            run.run(K, how)
            run.settle()
            began = time.monotonic()
            run.run(STEPS, how)
            run.settle()
            found[how] = run.timeline(began)
    for how, spans in found.items():
        assert sorted(span.step for span in spans if span.what == "snapshot") == [4, 6, 8]
        assert sum(span.ended - span.began for span in spans if span.what == "compute") >= STEPS * 0.02
        assert overlap(spans, "compute", "stall") == 0
        assert (overlap(spans, "compute", "snapshot") > 0) == (how == "pipelined")
        assert (overlap(spans, "compute", "persist") > 0) == (how != "sync")
