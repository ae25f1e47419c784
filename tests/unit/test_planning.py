"""Which strategy and which groups are recommended: decision tables, and the reasons in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import replacing
from raytrain_ft.policy.logging_cost import SMALL_LOG, in_proportion
from raytrain_ft.policy.plan_words import explain
from raytrain_ft.policy.planning import (
    ASSUMED_INTERVAL,
    Measured,
    Wish,
    _nodes,
    choose_groups,
    interval_of,
    log_per_step,
    named,
    plan,
)
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.topology import Groups
from raytrain_ft.policy.units import in_bytes, in_seconds

MB = 10**6
FOUR = Measured(
    compute=(1.0, 1.0, 1.0, 1.0),
    crossing=(30.0 * MB, 10.0 * MB, 20.0 * MB),
    state=(100 * MB, 100 * MB, 100 * MB, 100 * MB),
    micro_batches=8,
)
TEN = Wish(interval=10)


@pytest.mark.parametrize(
    ("every", "max_steps", "expected"),
    [(20, 1000, 20), (20, 5, 5), ("auto", 1000, ASSUMED_INTERVAL), ("auto", 30, 30), (None, 700, 700)],
)
def test_the_interval_that_is_reckoned_with(every: int | str | None, max_steps: int, expected: int) -> None:
    assert interval_of(every, max_steps) == expected


@pytest.mark.parametrize(
    ("budget", "groups"),
    [
        (None, "0 | 1 | 2 | 3"),
        (600 * MB, "0 | 1 | 2 | 3"),
        (599 * MB, "0 | 1-2 | 3"),
        (300 * MB, "0-1 | 2 | 3"),
        (199 * MB, "0-1 | 2-3"),
        (100 * MB, "0-1 | 2-3"),
    ],
)
def test_groups_within_a_budget(budget: int | None, groups: str) -> None:
    chosen = choose_groups(FOUR, replace(TEN, budget_bytes=budget))
    assert named(chosen) == groups
    assert budget is None or log_per_step(FOUR, chosen) * 10 <= budget


@pytest.mark.parametrize(
    ("tied", "budget", "groups"),
    [
        (((0, 1, 31.0 * MB),), 300 * MB, "0-1 | 2 | 3"),  # what is left of the budget beside what these share is nothing
        (((0, 1, 31.0 * MB),), 760 * MB, "0 | 1 | 2 | 3"),
        (((1, 0, 31.0 * MB),), 759 * MB, "0-1 | 2 | 3"),
        (((2, 3, 31.0 * MB),), 300 * MB, "0 | 1 | 2-3"),  # though it takes longer than with 0 and 1 together
        (((0, 3, 5.0 * MB), (0, 1, 31.0 * MB)), 350 * MB, "0-1 | 2 | 3"),
        (((0, 3, 25.0 * MB),), 399 * MB, None),
    ],
)
def test_stages_that_share_much_stay_together_and_others_need_not(tied: Any, budget: int, groups: str | None) -> None:
    even = replace(FOUR, compute=(1.0, 1.0, 2.0, 2.0), crossing=(15.0 * MB,) * 3, tied=tied)
    wish = replace(TEN, budget_bytes=budget)
    if groups is None:
        with pytest.raises(ConfigError, match="holds no boundary at all: the smallest takes 400 MB"):
            choose_groups(even, wish)
        return
    for found in (choose_groups(even, wish), plan(even, wish).greedy):
        assert named(found) == groups
        assert log_per_step(even, found) * 10 <= budget


def test_a_budget_is_of_all_replicas() -> None:
    twice = replace(FOUR, replicas=2)
    assert named(choose_groups(twice, replace(TEN, budget_bytes=1200 * MB))) == "0 | 1 | 2 | 3"
    assert named(choose_groups(twice, replace(TEN, budget_bytes=600 * MB))) == "0-1 | 2 | 3"
    assert log_per_step(twice, ((0,), (1, 2, 3))) == 60 * MB


def test_a_budget_that_holds_no_boundary() -> None:
    with pytest.raises(ConfigError, match=r"holds no boundary at all: the smallest takes 100 MB in 10 steps.*100000000 bytes"):
        choose_groups(FOUR, replace(TEN, budget_bytes=100 * MB - 1))


@pytest.mark.parametrize(("target", "groups"), [(1.0, "0 | 1 | 2 | 3"), (2.1, "0-1 | 2-3"), (9.0, "0-3")])
def test_groups_that_meet_a_target(target: float, groups: str) -> None:
    assert named(choose_groups(FOUR, replace(TEN, target_seconds=target))) == groups


def test_a_target_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match="logging every boundary still leaves 1 seconds"):
        choose_groups(FOUR, replace(TEN, target_seconds=0.5))
    choose_groups(FOUR, replace(TEN, target_seconds=0.5, replay_workers=4))


@pytest.mark.parametrize(
    ("replicas", "nodes", "strategies"),
    [
        (1, 0, {"logging"}),
        (1, 2, {"logging"}),  # two neighbours on each node, and one boundary between them
        (2, 0, {"replication"}),
        (2, 4, {"replication"}),  # each node has half a replica
        (2, 3, {"replication"}),
        (2, 2, {"replication"}),
        (2, 8, {"replication"}),
        (1, 1, {"checkpoint"}),
        (2, 1, {"checkpoint"}),
    ],
)
def test_a_replica_counts_only_on_another_node(replicas: int, nodes: int, strategies: set[str]) -> None:
    found = plan(replace(FOUR, replicas=replicas), replace(TEN, nodes=nodes))
    assert set(found.strategies) == strategies
    assert (found.log > 0) == (strategies == {"logging"}), "what is filled from replicas is not logged"
    assert log_per_step(found.measured, found.greedy) == found.log


@pytest.mark.parametrize(("stages", "replicas", "nodes"), [(4, 1, 0), (4, 1, 2), (4, 1, 3), (4, 2, 4), (3, 3, 2), (2, 2, 1)])
def test_workers_are_where_a_run_seats_them(stages: int, replicas: int, nodes: int) -> None:
    count = stages * replicas
    run = RunState(Rules(min_workers=count, max_workers=count, max_steps=10, stages=stages))
    for number in range(count):  # each starts on the emptiest node
        run.roster.members[f"w{number}"] = MemberState.SPARE
        run.roster.nodes[f"w{number}"] = f"n{number % (nodes or count)}"
    (told,) = [command for command in replacing.replace(run, waited=True) if isinstance(command, c.Reconcile)]
    measured = Measured(compute=(1.0,) * stages, crossing=(1.0,) * (stages - 1), state=(1,) * stages, micro_batches=1)
    world, where = _nodes(replace(measured, replicas=replicas), replace(TEN, nodes=nodes))
    assert (world, where) == (told.world, run.roster.nodes)


@pytest.mark.parametrize(("nodes", "boundaries"), [(4, "0 | 1 | 2 | 3"), (3, "0-1 | 2 | 3"), (2, "0-1 | 2-3"), (1, "0-3")])
def test_what_stages_on_one_node_send_each_other_is_not_logged(nodes: int, boundaries: str) -> None:
    """Of three nodes the first has two of the four stages."""
    found = plan(FOUR, replace(TEN, nodes=nodes))
    assert named(found.every) == named(found.groups) == boundaries


def test_why_nothing_is_logged_beside_replicas() -> None:
    words = " ".join(explain(plan(replace(FOUR, replicas=2), TEN)))
    assert "Replication for stages 0, 1, 2, 3" in words
    assert "Nothing is logged: that would only matter if all replicas of a stage were lost at once" in words
    assert "between two checkpoints" not in words


def test_why_replicas_do_not_count() -> None:
    words = " ".join(explain(plan(replace(FOUR, replicas=2), replace(TEN, nodes=1))))
    assert "The replicas of stages 0, 1, 2, 3 share a node, and would be lost together." in words


def test_what_is_logged_far_beyond_the_state_is_left_to_checkpoints() -> None:
    wide = replace(FOUR, state=(1 * MB,) * 4)
    found = plan(wide, TEN)
    assert set(found.strategies) == {"checkpoint"}
    assert "15 times the model's state" in found.worth.reason


def test_groups_so_large_that_there_is_little_to_gain() -> None:
    lopsided = replace(FOUR, compute=(1.0, 9.0, 9.0, 1.0), crossing=(1.0 * MB, 20.0 * MB, 1.0 * MB), micro_batches=64)
    found = plan(lopsided, replace(TEN, budget_bytes=20 * MB))
    assert named(found.groups) == "0 | 1-2 | 3"
    assert set(found.strategies) == {"logging"}
    assert "hardly less than going back" in found.worth.reason


def test_a_step_takes_as_long_as_its_slowest_stage_and_the_bubble() -> None:
    assert FOUR.step_seconds == pytest.approx((4 + 7) / 8)
    assert replace(FOUR, compute=(1.0, 3.0, 1.0, 1.0), micro_batches=1).step_seconds == 6


def test_helpers_make_replay_faster() -> None:
    found = plan(FOUR, TEN)
    assert found.seconds(found.groups) == pytest.approx(1.0)
    assert found.seconds(found.groups, 4) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("workers", "groups", "seconds"),
    [
        (2, ((0,), (1,), (2,), (3,)), 1 / 2),
        (9, ((0,), (1,), (2,), (3,)), 1 / 4),  # there are four
        (2, ((0, 1), (2,), (3,)), 2 * 2 / 4 + 2 * 1 / 2 / 4),
        (4, ((0, 1), (2, 3)), 2.0),
    ],
)
def test_no_more_help_is_reckoned_with_than_a_run_gives(workers: int, groups: Groups, seconds: float) -> None:
    """A team has at most `replay_workers` members, and a group of several stages has none."""
    quick = replace(TEN, bandwidth=1e18, replay_workers=workers)
    assert plan(FOUR, quick).seconds(groups) == pytest.approx(seconds)
    assert plan(replace(FOUR, replicas=2), quick).seconds(groups) == plan(FOUR, replace(quick, replay_workers=1)).seconds(
        groups
    )
    shared = plan(FOUR, replace(quick, nodes=2))  # stages 0 and 1 are on one node, 2 and 3 on the other: no group of one
    assert shared.seconds(((0, 1), (2, 3))) == pytest.approx(2.0)


def test_the_reasons_in_words() -> None:
    words = " ".join(explain(plan(FOUR, replace(TEN, budget_bytes=199 * MB, replay_workers=4))))
    for part in (
        "Logging for stages 0, 1, 2, 3",
        "600 MB between two checkpoints, over the budget of 199 MB",
        "the groups 0-1 | 2-3 take 100 MB",
        "replay together",
        "so far only groups of one stage have helpers",
        "A stage is idle for 27% of a step (4 stages, 8 micro-batches)",
    ):
        assert part in words
    words = " ".join(explain(plan(FOUR, replace(TEN, target_seconds=2.1))))
    assert "log least (100 MB between two checkpoints, of 600 MB)" in words
    assert "All stages are on one node" in " ".join(explain(plan(FOUR, replace(TEN, nodes=1))))


def test_the_greedy_grouping_beside_the_optimum() -> None:
    uneven = replace(FOUR, compute=(1.0, 2.0, 2.0, 1.0), crossing=(10.0 * MB, 21.0 * MB, 10.0 * MB))
    wish = replace(TEN, budget_bytes=205 * MB)
    found = plan(uneven, wish)
    assert found.seconds(found.groups) <= found.seconds(found.greedy)
    if found.greedy != found.groups:
        assert "greedy algorithm chooses" in " ".join(explain(found))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget_bytes": 1, "target_seconds": 1.0}, "exclude each other"),
        ({"nodes": 5}, "4 workers need 1 to 4"),
        ({"nodes": -1}, "nodes=-1"),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"interval": 0}, "interval=0"),
    ],
)
def test_bad_input(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(FOUR, replace(TEN, **change))


@pytest.mark.parametrize(
    ("logged", "state", "worth"),
    [(SMALL_LOG, 1, True), (SMALL_LOG + 1, 1, False), (10**10, 10**9, True), (10**10 + 1, 10**9, False), (0, 0, True)],
)
def test_in_proportion(logged: int, state: int, worth: bool) -> None:
    assert in_proportion(logged, state).worth is worth


def test_sizes_and_times_in_words() -> None:
    assert [in_bytes(size) for size in (0, 999, 999.6, 1500, 12_345_678, 3e12)] == [
        *("0 B", "999 B", "1 KB", "1.5 KB", "12.3 MB", "3 TB"),
    ]
    assert [in_seconds(time) for time in (12.0, 0.25, 0.00012)] == ["12 s", "250 ms", "120 µs"]
