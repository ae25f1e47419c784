"""The times in a run's records go on while its supervisor is away."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_ft.runtime import clock


def test_on_the_same_machine_no_time_is_lost() -> None:
    start = time.monotonic() - 100.0
    assert clock.began(clock.origin(start), last=60.0, most_away=1.0) == pytest.approx(start)


def test_no_record_is_earlier_than_one_before_it() -> None:
    start = time.monotonic() - 100.0
    assert time.monotonic() - clock.began(clock.origin(start), last=130.0, most_away=1.0) == pytest.approx(130.0, abs=0.1)


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, 100.0), (-50.0, 60.0), (3600.0, 180.0)])
def test_elsewhere_the_time_of_day_tells_and_no_clock_is_trusted_too_far(
    ahead: float, expected: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run was seen last at 60 s, it is 100 s old, and its workers live for two minutes without a supervisor."""
    recorded = clock.origin(time.monotonic() - 100.0)
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(clock, "BOOT_ID", tmp_path / "boot_id")
    wall = time.time
    monkeypatch.setattr(clock.time, "time", lambda: wall() + ahead)
    assert time.monotonic() - clock.began(recorded, last=60.0, most_away=120.0) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("recorded", [None, {}, "word", {"boot": "", "wall": "noon"}, {"boot": "x"}])
def test_a_record_without_a_clock(recorded: Any) -> None:
    assert time.monotonic() - clock.began(recorded, last=60.0, most_away=120.0) == pytest.approx(60.0, abs=0.1)


def test_a_deadline_stands_still_while_the_process_does() -> None:
    """What others said meanwhile is read before it is over, whether it would have been over by then or not."""

    async def wait(seconds: float, held_up: float) -> tuple[float, list[str]]:
        said: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, time.sleep, held_up)  # nothing runs in this process
        threading.Timer(0.2, lambda: threading.Timer(held_up, loop.call_soon_threadsafe, (said.append, "here")).start()).start()
        began = time.monotonic()
        await clock.run_for(seconds)
        return time.monotonic() - began, list(said)

    passed, said = asyncio.run(wait(0.3, 2.0))
    assert (said, 2.0 <= passed < 4.0) == (["here"], True)
    passed, said = asyncio.run(wait(2.0, 1.5))
    assert (said, 3.0 <= passed < 4.5) == (["here"], True)
    passed, _ = asyncio.run(wait(1.2, 0.0))
    assert 1.2 <= passed < 1.7
