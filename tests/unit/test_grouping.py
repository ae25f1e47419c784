"""Selective logging against brute force over every grouping, with the paper's formulas written down a second time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import constrained_path
from raytrain_ft.policy.constrained_path import Search
from raytrain_ft.policy.grouping import Groups, Profile, arcs, cheapest, greedy, log_bytes, objective, optimal


def every_grouping(stages: int) -> Iterator[Groups]:
    for mask in range(2 ** (stages - 1)):
        bounds = [0, *(cut for cut in range(1, stages) if mask >> (cut - 1) & 1), stages]
        yield tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


def seconds(profile: Profile, group: tuple[int, ...]) -> float:
    """R(G) of section 5.3, undivided."""
    return sum(profile.compute[s] for s in group) + sum(profile.crossing[s] for s in group[:-1]) / profile.bandwidth


def by_the_paper(profile: Profile, groups: Groups) -> tuple[float, float]:
    """Expected seconds per lost step, and bytes of log, for one stage per machine."""
    n = len(profile.compute)
    shares = [n // len(group) if profile.parallel else 1 for group in groups]
    time = sum(seconds(profile, group) / share * len(group) / n for group, share in zip(groups, shares, strict=True))
    return time, profile.interval * sum(profile.crossing[group[-1]] for group in groups[:-1])


def drawn(seed: int, stages: int, parallel: bool) -> Profile:
    draws = np.random.default_rng(seed)
    return Profile(
        compute=tuple(draws.exponential(size=stages).tolist()),
        crossing=tuple((draws.random(stages - 1) + 1e-3).tolist()),
        bandwidth=float(10 ** draws.uniform(-1, 3)),
        interval=int(draws.integers(1, 200)),
        parallel=parallel,
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Values of widely different sizes, with many ties."""
    stages = draw(st.integers(1, 7))
    times = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e3))
    sizes = st.one_of(st.integers(1, 3).map(float), st.floats(1e-3, 1e9))
    return Profile(
        compute=tuple(draw(st.lists(times, min_size=stages, max_size=stages))),
        crossing=tuple(draw(st.lists(sizes, min_size=stages - 1, max_size=stages - 1))),
        bandwidth=draw(st.floats(1e-2, 1e9)),
        interval=draw(st.integers(1, 1000)),
        parallel=draw(st.booleans()),
    )


def check_against_brute_force(profile: Profile, share: float) -> None:
    all_groups = list(every_grouping(len(profile.compute)))
    costs = {groups: (objective(profile, groups), log_bytes(profile, groups)) for groups in all_groups}
    budget = share * costs[all_groups[-1]][1]
    best = optimal(profile, budget)
    least = min(time for time, size in costs.values() if size <= budget)
    assert costs[best][1] <= budget
    assert costs[best][0] <= least * (1 + 1e-11)
    merged = greedy(profile, budget)
    assert costs[merged][1] <= budget
    assert costs[merged][0] >= least
    target = costs[all_groups[-1]][0] * (1 + 5 * share)
    small = cheapest(profile, target)
    assert costs[small][0] <= target
    assert costs[small][1] <= min(size for time, size in costs.values() if time <= target) * (1 + 1e-11)


@settings(max_examples=150)
@given(profiles(), st.floats(0, 1.1))
def test_optimal_equals_brute_force(profile: Profile, share: float) -> None:
    check_against_brute_force(profile, share)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_optimal_equals_brute_force_on_real_numbers(seed: int, parallel: bool) -> None:
    check_against_brute_force(drawn(seed, 2 + seed % 9, parallel), share=(seed % 10) / 10)


@pytest.mark.parametrize("seed", range(40))
def test_optimal_equals_brute_force_also_if_stages_share_parameters(seed: int) -> None:
    """Which is logged only if they are in different groups, and may be more than all that crosses a boundary."""
    stages = 3 + seed % 7
    draws = np.random.default_rng(seed)
    pairs = [sorted(draws.choice(stages, 2, replace=False).tolist()) for _ in range(1 + seed % 3)]
    tied = tuple((one, other, float(draws.exponential(2.0))) for one, other in pairs)
    profile = replace(drawn(seed, stages, parallel=False), tied=tied)
    apart = tuple((stage,) for stage in range(stages))
    assert log_bytes(profile, apart) == pytest.approx(
        profile.interval * (sum(profile.crossing) + sum(size for _, _, size in tied))
    )
    check_against_brute_force(profile, share=(seed % 10) / 10)


@settings(max_examples=50)
@given(profiles())
def test_the_formulas_are_the_papers(profile: Profile) -> None:
    for groups in every_grouping(len(profile.compute)):
        time, size = by_the_paper(profile, groups)
        assert objective(profile, groups) == pytest.approx(time, rel=1e-9)
        assert log_bytes(profile, groups) == pytest.approx(size, rel=1e-9)


@settings(max_examples=50)
@given(profiles(), st.data())
def test_a_merge_costs_time_and_saves_bytes(profile: Profile, data: st.DataObject) -> None:
    """Both forms of the paper's change of R, and that it is never negative."""
    groups = data.draw(st.sampled_from(list(every_grouping(len(profile.compute)))))
    n = len(profile.compute)
    for index, (left, right) in enumerate(pairwise(groups)):
        merged = (*groups[:index], left + right, *groups[index + 2 :])
        change = objective(profile, merged) - objective(profile, groups)
        saved = log_bytes(profile, groups) - log_bytes(profile, merged)
        slack = 1e-9 * objective(profile, merged)
        assert change >= -slack
        assert saved == pytest.approx(profile.crossing[left[-1]] * profile.interval, abs=1e-9 * log_bytes(profile, groups))
        if not profile.parallel:
            sent = profile.crossing[left[-1]] / profile.bandwidth
            first = seconds(profile, left + right) * len(left + right) - seconds(profile, left) * len(left)
            second = seconds(profile, left) * len(right) + seconds(profile, right) * len(left) + sent * len(left + right)
            assert change == pytest.approx((first - seconds(profile, right) * len(right)) / n, abs=slack)
            assert change == pytest.approx(second / n, abs=slack)
            assert second > 0


@pytest.mark.parametrize("parallel", [False, True])
def test_more_space_is_never_slower(parallel: bool) -> None:
    """The shape of the paper's Figure 11."""
    profile = drawn(5, 16, parallel)
    whole = log_bytes(profile, tuple((stage,) for stage in range(16)))
    times = [objective(profile, optimal(profile, share * whole)) for share in np.linspace(0, 1, 41)]
    assert all(later <= earlier * (1 + 1e-11) for earlier, later in pairwise(times))
    assert times[0] > 2 * times[-1]
    sizes = [log_bytes(profile, cheapest(profile, time)) for time in times]
    assert all(later >= earlier * (1 - 1e-11) for earlier, later in pairwise(sizes))


FOUR: dict[str, Any] = {"compute": (1.0, 1.0, 1.0, 5.0), "crossing": (1.0, 2.0, 1.0), "bandwidth": 1e12, "interval": 10}


@pytest.mark.parametrize("plan", [greedy, optimal])
def test_golden(plan: Any) -> None:
    profile = Profile(**FOUR)
    assert plan(profile, 0) == ((0, 1, 2, 3),), "no budget: one group, no log"
    assert plan(profile, 40) == plan(profile, float("inf")) == ((0,), (1,), (2,), (3,))
    assert plan(profile, 30) == ((0,), (1, 2), (3,)), "the pair that saves the most bytes for its seconds"
    assert log_bytes(profile, ((0,), (1, 2), (3,))) == 20
    assert objective(profile, ((0,), (1, 2), (3,))) == pytest.approx((1 + 2 * 2 + 5) / 4)


def test_a_machine_has_its_own_team_and_a_larger_group_none() -> None:
    profile = Profile(**FOUR, teams=(3, 1, 1, 2))
    plain = Profile(**FOUR)
    assert [profile.replay_seconds(n, n + 1) for n in range(4)] == [
        plain.replay_seconds(n, n + 1) / team for n, team in enumerate((3, 1, 1, 2))
    ]
    assert profile.replay_seconds(0, 2) == plain.replay_seconds(0, 2)
    for teams in ((1, 1), (1, 1, 1, 0)):
        with pytest.raises(ConfigError, match="give one number of at least 1 for each"):
            Profile(**FOUR, teams=teams)


def test_parallel_recovery_divides_by_helpers() -> None:
    profile = Profile(**FOUR, parallel=True)
    assert objective(profile, ((0,), (1, 2), (3,))) == pytest.approx((1 / 4 + 2 * 2 / 2 + 5 / 4) / 4)
    assert objective(profile, ((0, 1, 2), (3,))) == pytest.approx((3 * 3 + 5 / 4) / 4), "three of four machines have no helper"


def test_the_greedy_misses_the_best() -> None:
    misses = 0
    for seed in range(30):
        profile = drawn(seed, 10, False)
        budget = 0.4 * log_bytes(profile, tuple((stage,) for stage in range(10)))
        misses += objective(profile, greedy(profile, budget)) > 1.001 * objective(profile, optimal(profile, budget))
    assert misses > 0


def test_stages_of_a_machine_stay_together() -> None:
    """Four stages on two machines are two stages of the summed times, with the boundary between them."""
    four, two = Profile(**FOUR, machines=2), Profile(**FOUR | {"compute": (2.0, 6.0), "crossing": (2.0,)})
    for budget in (0, 19, 20):
        groups = optimal(four, budget)
        assert groups == greedy(four, budget)
        assert [len(group) for group in groups] == [2 * len(group) for group in optimal(two, budget)]
        assert objective(four, groups) == objective(two, optimal(two, budget))
        assert log_bytes(four, groups) == log_bytes(two, optimal(two, budget))
    with pytest.raises(ConfigError, match="keep the stages of a machine together"):
        objective(four, ((0,), (1, 2, 3)))


def test_one_stage() -> None:
    alone = Profile(compute=(2.0,), crossing=(), bandwidth=1.0, interval=1)
    assert optimal(alone, 0) == greedy(alone, 0) == cheapest(alone, 2.0) == ((0,),)


def test_every_time_zero() -> None:
    idle = Profile(compute=(0.0,) * 5, crossing=(1.0,) * 4, bandwidth=float("inf"), interval=1)
    assert log_bytes(idle, optimal(idle, 2)) <= 2
    assert cheapest(idle, 0) == ((0, 1, 2, 3, 4),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute": ()}, "0 values in compute"),
        ({"crossing": (1.0,)}, "1 in crossing"),
        ({"compute": (1.0, -1.0, 1.0, 1.0)}, r"compute\[1\]=-1.0"),
        ({"compute": (1.0, float("nan"), 1.0, 1.0)}, r"compute\[1\]=nan"),
        ({"crossing": (1.0, 0.0, 1.0)}, r"crossing\[1\]=0.0"),
        ({"crossing": (1.0, 1.0, float("inf"))}, r"crossing\[2\]=inf"),
        ({"bandwidth": 0.0}, "bandwidth=0.0"),
        ({"bandwidth": float("nan")}, "bandwidth=nan"),
        ({"interval": 0}, "interval=0"),
        ({"interval": 1.5}, "interval=1.5"),
        ({"machines": -1}, "machines=-1"),
        ({"machines": 3}, "machines=3"),
        ({"machines": 8}, "machines=8"),
    ],
)
def test_bad_profiles_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Profile(**FOUR | change)


@pytest.mark.parametrize("value", [-1, float("nan"), "8", True, None])
@pytest.mark.parametrize("plan", [greedy, optimal, cheapest])
def test_bad_budgets_are_refused(plan: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match="not negative"):
        plan(Profile(**FOUR), value)


def test_an_impossible_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="still leaves 2 seconds"):
        cheapest(Profile(**FOUR), 1.9)


@pytest.mark.parametrize(
    "groups", [(), ((0, 1),), ((0, 1), (1, 2, 3)), ((1, 0), (2, 3)), ((0, 1), (), (2, 3)), ((2, 3), (0, 1))]
)
def test_bad_groups_are_refused(groups: Groups) -> None:
    with pytest.raises(ConfigError, match="every stage once"):
        objective(Profile(**FOUR), groups)


@pytest.mark.parametrize("parallel", [False, True])
def test_128_machines_are_planned(parallel: bool) -> None:
    profile = drawn(3, 128, parallel)
    budget = 0.37 * log_bytes(profile, tuple((stage,) for stage in range(128)))
    best, merged = optimal(profile, budget), greedy(profile, budget)
    assert log_bytes(profile, best) <= budget
    assert objective(profile, best) <= objective(profile, merged)
    assert log_bytes(profile, cheapest(profile, objective(profile, best))) <= log_bytes(profile, best)


def test_what_thinning_out_may_lose_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal times and real-valued sizes, hardly any partial paths allowed: still within the budget and the stated loss."""
    thinned = 0
    for seed in range(30):
        profile = Profile(**FOUR | {"compute": (1.0,) * 10, "crossing": drawn(seed, 10, False).crossing, "bandwidth": 1e3})
        budget = 0.6 * log_bytes(profile, tuple((stage,) for stage in range(10)))
        best = objective(profile, optimal(profile, budget))
        with monkeypatch.context() as patch:
            patch.setattr(constrained_path, "WORK", 3 * 11**2)
            search = Search(*arcs(profile), budget)
            path = search.best([0, 10])
        groups = tuple(tuple(range(a, b)) for a, b in pairwise(path))
        assert log_bytes(profile, groups) <= budget
        assert best * (1 - 1e-11) <= objective(profile, groups) <= (best + search.loss) * (1 + 1e-11)
        thinned += search.loss > 0
    assert thinned > 3
