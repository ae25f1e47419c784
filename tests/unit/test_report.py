"""The report: whatever the log holds, one page comes out that says what happened and runs nothing."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raytrain_ft import follow
from raytrain_ft.cli.main import main
from raytrain_ft.policy.states import State
from raytrain_ft.runtime import report, report_data, timeline
from raytrain_ft.runtime.event_log import EventLog, read_records
from raytrain_ft.runtime.notes import Notes, draw
from raytrain_ft.runtime.report_data import LARGEST, gather, thin
from raytrain_ft.runtime.report_figures import one_in, shaded

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;$\\frac{1}{0}$ \ud800 \x00 -->]]></style></svg>"
VOID = {"meta", "img", "br", "path", "use", "rect", "link"}


class Page(HTMLParser):
    """What a browser would make of the page: elements, attributes, text, and tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.mismatches: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.mismatches.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(records: list[Any]) -> Page:
    """The parsed page of these records; whatever they hold, it is well formed, self-contained and runs nothing."""
    html = report.build(records, "dir")
    page = Page(html)
    assert page.mismatches == []
    assert page.open == []
    forbidden = {"script", "img", "iframe", "link", "object", "embed", "base", "form", "foreignobject", "image"}
    assert not forbidden & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith("href"))
    assert not re.search(r"https?:|@import|url\((?!#)", html)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    html.encode()
    return page


def step(at: float, stop: int, **more: Any) -> dict[str, Any]:
    fields = {"member": "w0", "rank": 0, "world_size": 3, "incarnation": 1, "first_step": stop - 1, "stop_step": stop}
    return {"event": "StepsCommitted", "at": at, **fields, "loss": 2.0 / stop, "longest_s": 0.05, **more}


def recovery(at: float, **more: Any) -> dict[str, Any]:
    marks = {
        "detected": at,
        "fenced": at + 0.1,
        "reconciled": at + 0.2,
        "filled": at + 0.3,
        "resumed": at + 0.5,
        "reason": "it is redone",
    }
    about = {"cause": "the process died", "noticed_by": "ray", "lost": ["w1"], "incarnation": 2, "strategy": "replication"}
    return {"event": "Recovery", **about, "guarantee": "exact", "step": 5, "world_before": 3, "world_after": 2, **marks, **more}


def checkpoint(at: float, number: int, **more: Any) -> dict[str, Any]:
    costs = {"bytes": 2_000_000, "snapshot_s": 0.0125, "stall_s": 0.0031, "persist_s": 0.41}
    name = f"step-{number:09d}-i1"
    about = {"at": at, "member": "w0", "incarnation": 1, "step": number, "name": name}
    return {"event": "CheckpointCommitted", **about, **costs, **more}


def interval(at: float, k: int, **more: Any) -> dict[str, Any]:
    bounds = {"k_persist": 9, "k_overhead": k, "k_failures": 0, "observed": 0.031, "reason": "raised: over budget"}
    return {
        "event": "IntervalChosen",
        "at": at,
        "member": "w0",
        "incarnation": 1,
        "step": 5,
        "k": k,
        "mode": "cpu",
        **bounds,
        **more,
    }


def run_of_everything() -> list[dict[str, Any]]:
    return [
        {
            "event": "RunStarted",
            "at": 0.0,
            "run_id": "abc",
            "details": {"name": "digits", "max_steps": 20, "update": "barrier"},
        },
        {"event": "Resumed", "at": 0.9, "incarnation": 1, "step": 0, "world_size": 3},
        *(step(1.0 + 0.1 * n, n) for n in range(1, 11)),
        checkpoint(1.5, 4),
        interval(1.6, 14),
        {"event": "WorkerLost", "at": 2.05, "member": "w1", "cause": "the process died", "noticed_by": "ray"},
        {"event": "WorkerLost", "at": 2.06, "member": "w1", "cause": "silent", "noticed_by": "heartbeat"},
        {"event": "SupervisorRestarted", "at": 2.2},
        {"event": "Resumed", "at": 2.4, "incarnation": 2, "step": 5, "world_size": 2},
        *(step(2.5 + 0.1 * n, 5 + n, incarnation=2) for n in range(1, 16)),
        {"event": "CheckpointFailed", "at": 3.0, "member": "w0", "incarnation": 2, "step": 12, "reason": "disk full"},
        recovery(2.0),
        {"event": "RunFinished", "at": 4.2, "steps": 20, "digest": "d", "path": "p"},
    ]


def test_the_rate_of_a_resumed_run_is_of_its_own_steps() -> None:
    resumed = [
        {"event": "Resumed", "at": 1.0, "incarnation": 1, "step": 90_000, "world_size": 3},
        *(step(2.0, 90_050), {"event": "Resumed", "at": 3.0, "incarnation": 2, "step": 90_040, "world_size": 3}),
        *(step(9.0, 90_100, incarnation=2), {"event": "RunFinished", "at": 10.0}),
    ]
    words = " ".join(checked(resumed).text)
    assert " 10.0 steps/s overall" in words
    assert "90,100" in words


def test_a_run_is_told() -> None:
    page = checked(run_of_everything())
    words = " ".join(page.text)
    for expected in (
        *("digits", "finished", "Steps over time", "Recoveries, phase by phase", "Loss over steps", "Checkpoints"),
        *("Checkpoint interval k", "the process died", "replication", "exact", "w1", "3 → 2", "500 ms", "it is redone"),
        *("step-000000004-i1", "2.000", "12.5", "3.1", "0.41", "disk full", "raised: over budget", "3.1%"),
        *("fence", "replace", "rebuild", "resume", "worker lost", "supervisor restarted", "1 worker lost"),
    ):
        assert expected in words, expected
    assert page.tags.count("svg") == 5


def test_a_return_to_an_earlier_step_is_seen_and_stale_lines_are_not() -> None:
    facts = gather([*run_of_everything(), step(4.1, 19, incarnation=1)])
    assert (2.4, 5.0) in facts.progress
    assert facts.progress[-1] == (4.0, 20.0)
    assert [loss.member for loss in facts.gone] == ["w1"]
    assert facts.recoveries[0].phases[0] == ("fence", 2.0, 2.1)


def test_the_losses_of_steps_that_all_have_gone_back_from_are_not_shown() -> None:
    """The records of the second time end at other steps."""
    resumed = {"event": "Resumed", "at": 3.0, "incarnation": 2, "step": 8, "world_size": 3}
    before, after = [step(1.0, 5, loss=5.0), step(2.0, 10, loss=1.0)], step(4.0, 9, incarnation=2, loss=7.0)
    assert gather([*before, resumed]).losses == [(5.0, 5.0)]
    assert gather([*before, resumed, after]).losses == [(5.0, 5.0), (9.0, 7.0)]


@pytest.mark.parametrize("records", [[], [{}], [None, 5, "x", []], [{"event": "RunStarted"}], [{"event": "Recovery"}]])
def test_hardly_any_records(records: list[Any]) -> None:
    page = checked(records)
    assert "not ended" in " ".join(page.text)


def test_an_interval_that_was_asked_for_has_no_bounds() -> None:
    unknown = dict.fromkeys(("mode", "k_persist", "k_overhead", "k_failures", "observed"))
    records = [r for r in run_of_everything() if r["event"] != "IntervalChosen"]
    page = checked([*records, interval(0.9, 6, **unknown, reason="fixed: as it was asked for")])
    assert "fixed: as it was asked for" in " ".join(page.text)
    assert page.tags.count("svg") == 5


def test_a_run_in_which_nothing_happened() -> None:
    quiet = [r for r in run_of_everything() if r["event"] in ("RunStarted", "RunFinished", "StepsCommitted")]
    page = checked(quiet)
    assert page.tags.count("svg") == 2
    assert " ".join(page.text).count("None in this run.") == 3


def test_a_failed_run_says_why() -> None:
    end = {"event": "RunFailed", "at": 3.0, "state": "ERRORED", "error": ["TaskError", "division by <zero>"]}
    words = " ".join(checked([*run_of_everything()[:-1], end]).text)
    assert "failed" in words
    assert "TaskError: division by <zero>" in words


def test_hostile_text_everywhere_stays_text() -> None:
    records = json.loads(json.dumps(run_of_everything()))

    def poison(value: Any) -> Any:
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, dict):
            return {name: poison(inner) for name, inner in value.items()}
        return [poison(inner) for inner in value] if isinstance(value, list) else value

    poisoned = [{name: value if name == "event" else poison(value) for name, value in record.items()} for record in records]
    page = checked(poisoned)
    assert page.tags.count("svg") == 5
    assert any("<script>alert(1)</script>" in words for words in page.text)  # shown as it is, not swallowed


FIELDS = sorted({name for record in run_of_everything() for name in record} | {"missing"})
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1e-300, 1e11, 1e308, 10**400]))
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(), st.just(HOSTILE), st.lists(NUMBERS, max_size=3))


@settings(max_examples=20, database=None, phases=(Phase.generate,))
@given(st.lists(st.tuples(st.integers(0, len(run_of_everything()) - 1), st.sampled_from(FIELDS), ANYTHING), max_size=40))
def test_fields_of_any_type(changes: list[tuple[int, str, Any]]) -> None:
    records = run_of_everything()
    for index, name, value in changes:
        records[index][name] = value
    checked(records)


def long_run(length: int) -> list[dict[str, Any]]:
    """So many records, of all kinds that there are many of."""
    steps, others = length * 8 // 10, length * 8 // 100
    records = [step(0.1 * n, n + 1, loss=10.0 / (n + 1)) for n in range(steps)]
    records += [checkpoint(0.1 * n, n) for n in range(0, steps, 8)]
    records += [interval(n, 10 + n % 7) for n in range(0, others, 2)]
    records += [recovery(n, incarnation=n) for n in range(0, others, 2)]
    records += [{"event": "WorkerLost", "at": n, "member": f"w{n}", "cause": "gone"} for n in range(0, others, 4)]
    assert len(records) == length
    return records


def test_ten_thousand_records_take_ten_times_as_long_as_a_thousand_and_the_page_stays_small() -> None:
    checked(run_of_everything())  # imports
    seconds = {}
    for length in (1_000, 10_000, 1_000):  # the shorter twice, so that it is measured no better than the longer
        begin = time.perf_counter()
        page = report.build(long_run(length))
        seconds[length] = max(seconds.get(length, 0.0), time.perf_counter() - begin)
        assert len(page) < 3_000_000
    assert seconds[10_000] < 40 * seconds[1_000], f"{seconds}: a hundred times would be quadratic"


def test_thinning_keeps_ends_order_and_peaks() -> None:
    points = [(float(n), 1.0 if n == 4321 else 0.0) for n in range(10_000)]
    few = thin(points)
    assert len(few) <= 2000
    assert few == sorted(few)
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert (4321.0, 1.0) in few


@pytest.mark.parametrize("many", [300, 901])
def test_of_very_many_recoveries_the_longest_are_marked_and_that_is_said(many: int) -> None:
    """They come last: the first ones are the shortest."""
    records: list[Any] = [{"event": "RunStarted", "at": 0.0}]
    records += [
        {"event": "Recovery", "cause": "gone", "detected": 10.0 * n, "resumed": 10.0 * n + n / many, "step": n}
        for n in range(many)
    ]
    records += [{"event": "CheckpointFailed", "at": 10.0 * n, "step": n, "reason": "full"} for n in range(many)]
    facts = gather(records)
    assert sorted(account.at for account in shaded(facts)) == [10.0 * n for n in range(many - 300, many)]
    assert len(facts.failures[:: one_in(facts)]) in (226, 300)
    said = " ".join(checked(records).text)
    assert ("Of 901 recoveries, the 300 longest are marked." in said) == (many > 300)
    assert ("Of 901 that failed, one in 4 is drawn." in said) == (many > 300)


def test_numbers_that_are_not_measurements_are_left_out() -> None:
    values = [float("nan"), float("inf"), -LARGEST * 10, 10**400, True, "7"]
    assert gather([step(1.0, 5, loss=value) for value in values]).losses == []


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in run_of_everything()) + '{"event": "Cut'
    )
    (tmp_path / "report.html").write_text("old")
    assert report.write(tmp_path) == tmp_path / "report.html"
    assert "digits" in (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run_of_everything()))
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no events.jsonl" in CliRunner().invoke(main, ["report", str(empty)]).output


FAILED = [{"event": "RunStarted", "at": 0.0}, {"event": "RunFailed", "at": 1.0, "state": "ERRORED", "error": ["a", "b"]}]


@pytest.mark.parametrize("records", [[], FAILED])
def test_a_timeline_of_a_run_without_states(tmp_path: Path, records: list[Any]) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = CliRunner().invoke(main, ["timeline", str(tmp_path)])
    assert result.exit_code == 0, result.output
    names = [one["name"] for one in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]]
    assert names == ["thread_name", "thread_name"]


def test_a_timeline_of_a_damaged_log_shows_what_comes_before(tmp_path: Path) -> None:
    lost = {"event": "WorkerLost", "at": 1.0, "member": "w1"}
    stored = {"event": "StepsStored", "at": 2.0, "member": "step-000000120-e1-i3"}  # the name of a checkpoint, and no worker
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in (lost, stored))
    (tmp_path / "events.jsonl").write_bytes(lines + b'{"event":"Sta\xffte"}\n')
    result = CliRunner().invoke(main, ["timeline", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [one["args"]["name"] for one in found if one["ph"] == "M"] == ["supervisor", "recoveries", "worker w1"]
    assert [one["name"] for one in found if one["ph"] == "i"] == ["WorkerLost"]


def test_each_state_lasts_until_the_next_one_and_the_last_to_the_end() -> None:
    states = [{"event": "State", "at": at, "state": f"s{at:g}", "incarnation": 1} for at in (1.0, 3.0)]
    spans = [one for one in timeline.build([*states, {"event": "RunFinished", "at": 7.0}]) if one["ph"] == "X"]
    assert [(one["name"], one["ts"], one["dur"]) for one in spans] == [("s1", 1e6, 2e6), ("s3", 3e6, 4e6)]


def test_steps_of_a_long_run_are_few_spans_and_a_recovery_parts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(member: str, at: int, incarnation: int = 1) -> dict[str, Any]:
        about = {"member": member, "incarnation": incarnation, "longest_s": 0.5}
        return {"event": "StepsCommitted", "at": float(at), "first_step": 2 * at, "stop_step": 2 * at + 2} | about

    records = [steps(member, at, 1 + (at >= 7)) for at in range(20) for member in ("w0", "w1")]
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    (tmp_path / "events.jsonl").write_text(text)
    monkeypatch.setattr(timeline, "MOST_SPANS", 10)
    trace = json.loads(timeline.write(tmp_path).read_text())["traceEvents"]
    spans = [one for one in trace if one["ph"] == "X" and one["tid"] == 10]
    assert [one["name"] for one in spans] == [
        "steps 0-7",
        "steps 8-13",
        "steps 14-21",
        "steps 22-29",
        "steps 30-37",
        "steps 38-39",
    ]
    assert (spans[1]["ts"], spans[1]["dur"]) == (3e6, 3e6)


def test_the_facts_of_a_run_of_weeks_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "MOST_POINTS", 100)
    values = [5.0 if n == 777 else 1.0 for n in range(5000)]
    facts = gather(step(float(n), n + 1, loss=value) for n, value in enumerate(values))
    assert len(facts.losses) <= 101
    assert len(facts.progress) <= 101
    assert (facts.steps, facts.seconds, max(loss for _, loss in facts.losses)) == (5000, 4999.0, 5.0)


RECORDED = Path(__file__).parent / "recorded"
PHASES = {
    "fence": ("detected", "fenced"),
    "replace": ("fenced", "reconciled"),
    "rebuild": ("reconciled", "filled"),
    "resume": ("filled", "resumed"),
}


@pytest.mark.parametrize("run", ["checkpoint", "logging", "replication"])
def test_the_timeline_of_a_recorded_run(run: str, tmp_path: Path) -> None:
    """What chrome://tracing opens; with every step, and every recovery phase by phase."""
    directory = Path(shutil.copytree(RECORDED / run, tmp_path / run))
    result = CliRunner().invoke(main, ["timeline", str(directory)])
    assert result.exit_code == 0, result.output
    trace = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    for one in trace:
        assert {"name", "ph", "pid", "tid"} <= one.keys()
        assert one["ph"] in ("M", "X", "i")
        assert one["ph"] == "M" or one["ts"] >= 0.0  # a name has no time
        assert one["ph"] != "X" or one["dur"] >= 0.0
    records = read_records(directory / "events.jsonl")
    rows = {one["args"]["name"]: one["tid"] for one in trace if one["ph"] == "M"}
    assert rows.keys() >= {f"worker {record['member']}" for record in records if record["event"] == "StepsCommitted"}

    spans = [one for one in trace if one["ph"] == "X" and one["tid"] == rows["recoveries"]]
    recoveries = [record for record in records if record["event"] == "Recovery"]
    expected = [(name, of[begin], of[end]) for of in recoveries for name, (begin, end) in PHASES.items()]
    assert recoveries
    assert all(begin <= end for _, begin, end in expected), "or else a length of zero would hide it"
    assert [one["name"] for one in spans] == [name for name, _, _ in expected]
    assert [one["ts"] / 1e6 for one in spans] == pytest.approx([begin for _, begin, _ in expected])
    assert [(one["ts"] + one["dur"]) / 1e6 for one in spans] == pytest.approx([end for _, _, end in expected])

    ranges = [re.fullmatch(r"steps (\d+)-(\d+)", one["name"]) for one in trace if one["ph"] == "X"]
    done = {step for found in ranges if found for step in range(int(found[1]), int(found[2]) + 1)}
    assert done == set(range(records[0]["details"]["max_steps"]))


def test_workers_of_a_pipeline_are_all_counted() -> None:
    run = Path(__file__).parent / "recorded" / "logging"  # of 4 stages
    assert {workers for _, workers in gather(read_records(run / "events.jsonl")).worlds} == {4}
    ended = follow.recorded(run)
    assert ended is not None
    assert ended["world_size"] == 4


def test_of_what_could_not_be_drawn_nothing_stays_and_the_rest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(*_: Any) -> Any:
        yield {}
        raise OSError(28, "No space left on device")

    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run_of_everything()))
    monkeypatch.setattr(timeline, "build", breaks_off)
    assert draw(tmp_path) == "OSError: [Errno 28] No space left on device"
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "report.html"}


@pytest.mark.parametrize("full", [False, True])
def test_a_disk_without_room_for_the_timeline_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Whether or not there is room left for the line that says so, which else waits until there is."""

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    spec: Any = SimpleNamespace(directory=tmp_path)
    machine: Any = SimpleNamespace(recoveries=[], state=State.ERRORED, failure=None)
    log = EventLog(tmp_path / "events.jsonl")
    monkeypatch.setattr(timeline, "write", no_room)
    with monkeypatch.context() as disk:
        if full:
            disk.setattr("raytrain_ft.runtime.event_log.os.write", no_room)
        Notes(spec, log, machine, lambda: 0.0, Counter()).drawn(draw(tmp_path))
    log.close()  # there is room again: the line has waited
    noted = [record for record in read_records(tmp_path / "events.jsonl") if record["event"] == "ReportFailed"]
    assert [record["reason"] for record in noted] == ["OSError: [Errno 28] No space left on device"]
