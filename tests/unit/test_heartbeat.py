"""How often a worker tells of committed steps."""

from __future__ import annotations

import pytest

from raytrain_ft.runtime.heartbeat import record_interval

HOUR = 3600.0


@pytest.mark.parametrize(
    ("replicas", "age_s", "seconds"),
    [
        (1, 0, 1),
        (16, 0, 1),
        (64, 0, 4),
        (4, HOUR, 1),
        (4, 5 * HOUR, 5),
        (4, 1000 * HOUR, 10),
        (64, HOUR, 4),
        (640, 9 * HOUR, 40),
    ],
)
def test_records_become_rarer_with_many_workers_and_with_time(replicas: int, age_s: float, seconds: float) -> None:
    assert record_interval(replicas, age_s) == seconds


def test_a_supervisor_that_comes_back_after_weeks_has_not_too_much_to_read() -> None:
    """A record takes 12 us to be read."""
    for workers in (4, 16, 64):
        weeks = 2 if workers == 64 else 4
        records = workers * weeks * 7 * 24 * HOUR / record_interval(workers, 7 * 24 * HOUR)
        assert records * 12e-6 < 120, "the workers' lease"
