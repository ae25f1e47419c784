"""Which checkpoints are of the training that goes on, by the returns that a run is told of."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from raytrain_ft.policy.lineage import MOST_RETURNS, Return, stands, telling

RETURNS = st.lists(st.builds(Return, st.integers(1, 9), st.integers(0, 9)), max_size=12)


@given(returns=RETURNS, ordered=st.booleans())
def test_the_returns_that_tell_say_all_that_all_of_them_say(returns: list[Return], ordered: bool) -> None:
    """Also where incarnations began anew, because the records of earlier runs were gone."""
    told = sorted(returns, key=lambda one: one.incarnation) if ordered else returns
    kept = telling(told)
    for incarnation in range(11):
        for step in range(11):
            assert stands(incarnation, step, kept) == stands(incarnation, step, told)
    assert kept[-1:] == tuple(told[-1:]), "from the last one on steps count"
    assert telling(kept) == kept


def test_a_run_is_told_of_no_more_returns_than_ray_keeps_for_its_supervisor() -> None:
    """An argument of more than 100 KiB is lost when the supervisor is to be started again."""
    assert telling([Return(number, 5) for number in range(1, 20_000)]) == (Return(19_999, 5),)
    kept = telling([Return(10**6 + number, 10**9 + number) for number in range(20_000)])
    assert kept[-1] == Return(10**6 + 19_999, 10**9 + 19_999)
    assert (len(kept), len(pickle.dumps(kept)) < 30_000) == (MOST_RETURNS, True)
