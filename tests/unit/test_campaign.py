"""When a campaign of kills ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from raytrain_ft import campaign
from raytrain_ft.chaos.hand import OURS
from raytrain_ft.drill.numbers import Report, Spread
from raytrain_ft.drill.played import Played, Struck
from raytrain_ft.errors import FTError, TaskError
from raytrain_ft.runtime.supervisor_actor import SupervisorActor
from raytrain_ft.runtime.worker import Worker

ENOUGH = 9
"""Runs; no campaign here may have more."""


def campaigned(monkeypatch: pytest.MonkeyPatch, strikes: Sequence[int], error: FTError | None, kills: int = 4) -> Any:
    """A campaign of so many kills whose runs are struck so often, the last of these for all that follow, and end like this."""
    named: list[str] = []

    def play(name: str, *_: Any, most: float = 0) -> Played:
        if name == "undisturbed":
            return Played(path=Path(name))
        named.append(name)
        assert len(named) < ENOUGH, "it never ends"
        struck = [Struck(event=0, action="kill", at=0.0, step=1)] * strikes[min(len(named), len(strikes)) - 1]
        assert len(struck) <= most
        return Played(path=Path(name), error=error, struck=struck)

    def measured(*about: Any) -> Any:
        played = about[2]
        failure = "" if played.error is None else f"TaskError: {played.error}"
        return SimpleNamespace(
            strikes=played.struck, violations=(), failure=failure, goodput=0.0, pauses=Spread(count=0), bit_equal=None
        )

    monkeypatch.setattr(campaign.tempfile, "mkdtemp", lambda prefix: "/nowhere")
    monkeypatch.setattr(campaign, "laptop", lambda scenario: nullcontext())
    monkeypatch.setattr(campaign, "Laptop", lambda cluster: None)
    monkeypatch.setattr(campaign, "Runs", lambda *_, **__: SimpleNamespace(play=play))
    monkeypatch.setattr(campaign, "measure", measured)
    return CliRunner().invoke(campaign.main, ["--kills", str(kills)])


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("--mtbf", "inf", "is not finite"), ("--mtbf", "0", "x>0"), ("--kills", "0", "x>=1"), ("--workers", "x", "valid integer")],
)
def test_a_campaign_of_nothing_is_refused(option: str, value: str, allowed: str) -> None:
    done = CliRunner().invoke(campaign.main, [option, value])
    assert (done.exit_code, f"Invalid value for '{option}'" in done.output, allowed in done.output) == (2, True, True)


def test_a_run_that_fails_before_anything_was_done_to_it_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done = campaigned(monkeypatch, [1, 0], TaskError("there is no module named task"))
    assert done.exit_code == 1, done.output
    assert "run-2: 0 recoveries (median none), did not end, 3 kills left\n  VIOLATION TaskError: there is no" in done.output
    assert "1 kill ({'worker': 1}) in 2 runs; 2 violations" in done.output


@pytest.mark.parametrize(("error", "code"), [(None, 0), (TaskError("it broke"), 1)])
def test_until_all_kills_are_used_up(monkeypatch: pytest.MonkeyPatch, error: FTError | None, code: int) -> None:
    """Also if a run ends well before its first kill, or fails after one."""
    done = campaigned(monkeypatch, [1, 2, 1] if error else [0, 2, 2], error)
    assert done.exit_code == code, done.output
    assert "4 kills ({'worker': 4}) in 3 runs" in done.output


@pytest.mark.parametrize(("kills", "code"), [(60, 0), (100, 1)])
def test_a_campaign_that_never_strikes_a_supervisor_is_none(monkeypatch: pytest.MonkeyPatch, kills: int, code: int) -> None:
    """Of few kills that is chance."""
    done = campaigned(monkeypatch, [kills], None, kills)
    assert done.exit_code == code, done.output
    assert ("VIOLATION no supervisor was ever struck" in done.output) == (code == 1)


def test_what_strikes_knows_the_processes_of_a_run_by_their_classes() -> None:
    for kind in (Worker, SupervisorActor):
        assert OURS.match(f"ray::{kind.__name__}.beat")
    assert not OURS.match("ray::IDLE")


@pytest.mark.parametrize(
    ("update", "equal", "known", "found"),
    [
        ("barrier", True, (), ()),
        ("barrier", False, (), ("I3 the final state differs from the undisturbed run's",)),
        ("barrier", False, ("I2 other bits",), ("I2 other bits",)),
        ("barrier", None, (), ()),
        ("wait_free", False, (), ()),
    ],
)
def test_no_recovery_excuses_other_bits_unless_it_may_have_undone(
    update: str, equal: bool | None, known: tuple[str, ...], found: tuple[str, ...]
) -> None:
    values = dict.fromkeys((field.name for field in fields(Report)), 0) | {"bit_equal": equal, "violations": known}
    assert campaign._strictly(Report(**values), update).violations == found  # type: ignore[arg-type]
