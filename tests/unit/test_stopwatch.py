"""How long a step takes, without what is no part of training."""

from __future__ import annotations

import time

import pytest

from raytrain_ft.training.stopwatch import Stopwatch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be changed by the test."""
    found = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def test_it_stands_still_while_it_is_held_and_goes_on_after(now: list[float]) -> None:
    watch = Stopwatch()
    watch.start()
    now[0] += 1
    with watch.held(), watch.held():
        now[0] += 10
        watch.start()  # an evaluation's loader, from its first batch to its end
        now[0] += 10
        watch.stop()
    now[0] += 2
    assert watch.take() == 3
    now[0] += 4
    assert watch.take() == 4


def test_what_is_started_while_it_is_held_runs_after_that(now: list[float]) -> None:
    """By the first batch, where to wait for that is no training."""
    watch = Stopwatch()
    with watch.held():
        with watch.held():
            watch.start()
            now[0] += 10
        now[0] += 10
        assert watch.take() == 0
    now[0] += 3
    assert watch.take() == 3


def test_what_is_started_and_stopped_while_it_is_held_stands_still_after_that(now: list[float]) -> None:
    watch = Stopwatch()
    with watch.held():
        watch.start()
        watch.stop()
    now[0] += 3
    assert watch.take() == 0
