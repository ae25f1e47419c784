"""Whom to leave out when some do not reach each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_ft.policy.partition import to_leave_out

MEMBERS = [f"w{number}" for number in range(6)]
PAIRS = list(combinations(MEMBERS, 2))


@pytest.mark.parametrize(
    ("unreached", "expected"),
    [
        ({}, []),
        ({"w0": [], "w1": []}, []),
        ({"w0": ["w1"]}, ["w1"]),
        ({"w1": ["w0"]}, ["w1"]),
        ({"w0": ["w1"], "w1": ["w0"]}, ["w1"]),
        ({"w0": ["w1", "w2", "w3"]}, ["w0"]),
        ({"w1": ["w0"], "w2": ["w0"], "w3": ["w0"]}, ["w0"]),
        ({"w0": ["w1"], "w2": ["w3"]}, ["w3", "w1"]),
    ],
)
def test_who_is_left_out(unreached: dict[str, list[str]], expected: list[str]) -> None:
    assert to_leave_out(unreached) == expected


@given(st.sets(st.sampled_from(PAIRS)))
def test_whoever_is_left_reaches_everybody(pairs: set[tuple[str, str]]) -> None:
    unreached: dict[str, list[str]] = {}
    for one, other in pairs:
        unreached.setdefault(one, []).append(other)
    left_out = to_leave_out(unreached)
    assert all(one in left_out or other in left_out for one, other in pairs)
    assert len(set(left_out)) == len(left_out) <= len(pairs)


@given(st.sampled_from(MEMBERS), st.sets(st.sampled_from(MEMBERS), min_size=2))
def test_one_bad_node_is_the_only_one_left_out(bad: str, others: set[str]) -> None:
    lacking = sorted(others - {bad})
    if len(lacking) > 1:
        assert to_leave_out({bad: lacking}) == [bad]
        assert to_leave_out({other: [bad] for other in lacking}) == [bad]
