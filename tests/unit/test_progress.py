"""What a person sees of a run."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_ft import progress
from raytrain_ft.policy.strategy import Guarantee, Recovery, Strategy
from raytrain_ft.progress import Display, describe
from raytrain_ft.result import recovery_of
from raytrain_ft.runtime.event_log import read_records

RECORDED = read_records(Path(__file__).parent / "recorded" / "replication" / "events.jsonl")
EXACT = recovery_of(next(record for record in RECORDED if record["event"] == "Recovery"))
ROUNDED = Recovery(
    cause="its node died",
    noticed_by="heartbeat",
    lost=["w1", "w3"],
    attempts=2,
    guarantee=Guarantee.ROUNDING,
    reason="step 26 was updated by some survivors: it is undone and redone",
    step=26,
    undone=20_736,
    repaired=2,
    world_before=4,
    world_after=2,
    detected=2.0,
    fenced=2.05,
    reconciled=2.06,
    filled=2.06,
    resumed=2.25,
)
LOSSY = Recovery(
    cause="the process died (SIGKILL, a crash or an exit)",
    noticed_by="ray",
    lost=["w1"],
    left=["w2"],
    attempts=1,
    strategy=Strategy.LOSSY,
    guarantee=Guarantee.LOSSY,
    reason="step 26 was finished without the gradients of who died",
    step=27,
    completes=True,
    updated_twice=1_000,
    samples_lost=1_024,
    world_before=4,
    world_after=2,
    detected=2.0,
    fenced=2.05,
    reconciled=2.06,
    filled=2.061,
    resumed=3.5,
)
ACCOUNTS = {
    "exact": """\
  recovery: the process died (SIGKILL, a crash or an exit)
    noticed by ray; lost w1; workers 3 -> 3
    replication: nobody had updated anything in step 4: it is redone
    fenced +263 ms, reconciled +37 ms, filled +27 ms, resumed +324 ms = 0.65 s
    goes on with step 4; kept: exact (every bit as without the failure)""",
    "rounded": """\
  recovery: its node died
    noticed by heartbeat; lost w1, w3; workers 4 -> 2
    replication: step 26 was updated by some survivors: it is undone and redone; 20,736 parameters undone; \
2 buckets repaired after a hash mismatch
    fenced +50 ms, reconciled +10 ms, filled +0 ms, resumed +190 ms = 0.25 s
    goes on with step 26, after 2 attempts; kept: same samples, other bits (an undo, another order, or other shares)""",
    "lossy": """\
  recovery: the process died (SIGKILL, a crash or an exit)
    noticed by ray; lost w1; w2 left; workers 4 -> 2
    lossy: step 26 was finished without the gradients of who died; 1,000 parameters updated twice; 1,024 samples lost
    fenced +50 ms, reconciled +10 ms, filled +1 ms, resumed +1439 ms = 1.50 s
    goes on with step 27; kept: lossy (samples lost, or parameters updated twice)""",
}


def test_one_of_something_is_not_several() -> None:
    told = describe(replace(ROUNDED, undone=1, repaired=1, updated_twice=1, samples_lost=1))
    words = "1 parameter undone; 1 parameter updated twice; 1 sample lost; 1 bucket repaired after a hash mismatch"
    assert words in told


def screen(written: str) -> list[str]:
    """The lines that are left on a terminal: one that was erased and written again and again stands there once."""
    lines = [""]
    for piece in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\n":
            lines.append("")
        elif piece == "\x1b[2K":
            lines[-1] = ""
        elif not piece.startswith(("\x1b", "\r")):  # nor colours, nor the cursor
            lines[-1] += piece
    return [line.rstrip() for line in lines]


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests says."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(_no_terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written goes to one, as rich is told."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)


def account(state: str = "RUNNING", recoveries: Sequence[Recovery] = (), **more: Any) -> dict[str, Any]:
    usual = {"name": "run", "world_size": 3, "loss": None, "step": 4, "seconds": 1.0, "warnings": [], "checkpoint": None}
    return usual | {"state": state, "recoveries": [asdict(one) for one in recoveries]} | more


def run_with_a_recovery(display: Display, recovery: Recovery) -> None:
    """Of 60 steps. The supervisor is asked how it stands again and again, and tells all of it each time."""
    under_way = replace(recovery, resumed=None)
    display.show(account("SCHEDULING", step=0, world_size=0, seconds=0.0))
    display.show(account("REPLACE", step=0, seconds=1.5))
    display.show(account("RESUME", step=0, seconds=1.6))
    display.show(account(step=26, seconds=8.5, loss=0.27741))
    display.show(account("FENCE", [under_way], step=26, seconds=8.6, loss=0.27741))
    for _ in range(2):
        display.show(account("RUNNING", [recovery], step=27, seconds=8.9, loss=0.31249, world_size=1))


@pytest.mark.parametrize(("recovery", "kept"), [(EXACT, "exact"), (ROUNDED, "rounded"), (LOSSY, "lossy")], ids=list(ACCOUNTS))
def test_a_recovery_is_told(recovery: Recovery, kept: str) -> None:
    assert describe(recovery) == ACCOUNTS[kept]


def test_a_recovery_that_did_not_end_is_told_as_far_as_it_came() -> None:
    told = describe(replace(ROUNDED, lost=[], reconciled=None, filled=None, resumed=None)).splitlines()
    assert told[1] == "    noticed by heartbeat; nobody lost; workers 4 -> 2"
    assert told[3] == "    fenced +50 ms"


@pytest.mark.parametrize(("recovery", "kept"), [(EXACT, "exact"), (ROUNDED, "rounded"), (LOSSY, "lossy")], ids=list(ACCOUNTS))
@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_a_bar_and_above_it_what_happened(
    recovery: Recovery, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display("run", 60) as display:
        run_with_a_recovery(display, recovery)
        display.say("takes a last checkpoint")
    *above, bar, rest = screen(capsys.readouterr().out)
    assert above == [*ACCOUNTS[kept].splitlines(), "[run] takes a last checkpoint"]
    assert re.sub(r"\d:\d\d:\d\d", "0:00:00", bar) == f"run {'━' * 18}╺{'━' * 21} 27/60 0:00:00 running  1 worker  loss 0.3125"
    assert rest == ""


@pytest.mark.usefixtures("terminal")
def test_the_cursor_comes_back_whatever_happens(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout

    def interrupted() -> None:
        with Display("run", 60) as display:
            display.show(account())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    written = capsys.readouterr().out
    assert "\x1b[?25l" in written
    assert written.endswith("\x1b[?25h")
    assert sys.stdout is before


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One for each state, and none for what was told before."""
    with Display("run", 60) as display:
        run_with_a_recovery(display, ROUNDED)
        display.show(account("FINISHED", [ROUNDED], step=60, seconds=123.45, loss=0.1, world_size=2))
    assert capsys.readouterr().out.splitlines() == [
        "[run]     0.0 s  step 0/60  scheduling",
        "[run]     1.5 s  step 0/60  starting  3 workers",
        "[run]     8.5 s  step 26/60  running  3 workers  loss 0.2774",
        "[run]     8.6 s  step 26/60  fence  3 workers  loss 0.2774",
        *ACCOUNTS["rounded"].splitlines(),
        "[run]     8.9 s  step 27/60  running  1 worker  loss 0.3125",
        "[run]   123.5 s  step 60/60  finished  2 workers  loss 0.1000",
    ]


def test_what_stays_as_it_is_is_told_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Display("run", 60) as display:
        for step in range(3):
            display.show(account(step=step))
        monkeypatch.setattr(progress, "LINE_INTERVAL_S", -1.0)
        display.show(account(step=3))
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()] == ["0/60", "3/60"]


def test_a_recovery_under_way_is_told_when_the_run_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    under_way = replace(ROUNDED, resumed=None)
    with Display("run", 60) as display:
        display.show(account("FENCE", [under_way]))
        assert "recovery" not in capsys.readouterr().out
        display.show(account("ERRORED", [under_way]))
    assert describe(under_way) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [("step-000000020-e1-i1", "goes on from step-000000020-e1-i1"), (None, "begins anew: it has no checkpoint")],
)
def test_a_run_that_was_ended_says_how_it_goes_on(
    checkpoint: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display("run", 60)
    display.show_end(account("FINISHED", step=60))
    display.show_end(account("ABORTED", step=27, checkpoint=checkpoint))
    assert capsys.readouterr().out == f"[run] ended at step 27/60; run again under the same name, it {words}\n"


@pytest.mark.usefixtures("terminal")
def test_who_wants_quiet_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("run", 60, quiet=True) as display:
        run_with_a_recovery(display, EXACT)
        display.say("takes a last checkpoint")
        display.show_end(account("ABORTED"))
    assert capsys.readouterr().out == ""


def test_a_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("run", 20) as display:
        for warnings in ([], ["w0 cannot log"], ["w0 cannot log"], ["w0 cannot log", "nor can w1"]):
            display.show(account(warnings=warnings))
    shown = capsys.readouterr().out
    assert shown.count("[run] w0 cannot log\n") == 1
    assert shown.count("[run] nor can w1\n") == 1


def test_what_cannot_be_printed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a pipe that nobody reads, letters that the log's encoding lacks."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        display = Display("run", 10)
        with pytest.warns(UserWarning, match="progress cannot be shown any more.*No space left"):
            display.say("x" * 10_000)
        display.say("x" * 10_000)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.warns(UserWarning, match="progress cannot be shown any more.*BrokenPipe"):
            Display("run", 10).say("x" * 10_000)
        with suppress(BrokenPipeError):
            closed.flush()
        monkeypatch.undo()
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="latin-1", write_through=True))
    Display("run", 10).say("caf\udce9.png \u2014 \u7a7a")
    assert b"caf\\udce9.png \\u2014 \\u7a7a" in kept.getvalue()
