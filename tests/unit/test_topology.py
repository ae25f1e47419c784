"""Ranks, stages and replicas: who sits where after a loss, who is replayed, and who helps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytrain_ft.policy.reconcile import Marks, reconcile_stages
from raytrain_ft.policy.topology import (
    between,
    groups_by_node,
    groups_of,
    logged_edges,
    members_of,
    replay_teams,
    replicated,
    stage_of,
    to_replay,
    waits,
)
from raytrain_ft.policy.world import rebuild_stages, seats_in_stages

WORLD = ("a0", "a1", "a2", "b0", "b1", "b2")
"""Two replicas of three stages."""


def test_a_rank_is_a_stage_of_a_replica() -> None:
    assert [members_of(WORLD, stage, 3) for stage in range(3)] == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_stages_on_one_node_are_one_group() -> None:
    nodes = {"a0": "n", "a1": "n", "a2": "m"}
    assert groups_by_node(WORLD[:3], nodes, 3) == ((0, 1), (2,))
    assert groups_by_node(WORLD[:3], {}, 3) == ((0,), (1,), (2,)), "who knows where they are?"
    apart = nodes | {"b0": "o", "b1": "p", "b2": "q"}
    assert groups_by_node(WORLD, apart, 3) == ((0,), (1,), (2,)), "in the other replica they are apart"


def test_a_replica_on_the_same_node_counts_for_nothing() -> None:
    nodes = {"a0": "n", "a1": "m", "a2": "o", "b0": "p", "b1": "m", "b2": "q"}
    assert replicated(WORLD, nodes, 3) == {0, 2}
    assert replicated(WORLD, {}, 3) == {0, 1, 2}
    assert replicated(WORLD[:3], nodes, 3) == frozenset()


@given(st.sets(st.integers(0, 6)).map(frozenset))
def test_boundaries_between_some_stages(some: frozenset[int]) -> None:
    assert between(some) == {edge for edge in range(6) if edge in some and edge + 1 in some}


@given(st.sets(st.integers(0, 6)).map(frozenset))
def test_groups_and_logged_boundaries_say_the_same(logged: frozenset[int]) -> None:
    groups = groups_of(logged, 8)
    assert logged_edges(groups) == logged
    assert [stage for group in groups for stage in group] == list(range(8))


def test_who_shares_a_group_with_a_lost_stage_is_replayed_with_it() -> None:
    groups = ((0, 1), (2,), (3, 4))
    assert to_replay(groups, frozenset({0, 2, 3, 4}), 5) == {0, 1}
    assert to_replay(groups, frozenset({0, 1, 3, 4}), 5) == {2}
    assert to_replay(groups, frozenset(range(5)), 5) == frozenset()


def test_survivors_keep_their_seats_and_a_replacement_takes_the_empty_one() -> None:
    stages = {member: rank % 3 for rank, member in enumerate(WORLD) if member != "b1"}
    assert seats_in_stages(WORLD, stages, ["w"], 6, 3) == ("a0", "a1", "a2", "b0", "w", "b2")


def test_with_too_few_a_whole_replica_goes_on() -> None:
    stages = {"a0": 0, "a2": 2, "b0": 0, "b1": 1, "b2": 2}
    assert seats_in_stages(WORLD, stages, [], 6, 3) == ("a0", "b1", "a2")


@given(st.data())
def test_whoever_is_left_stays_at_its_stage(data: st.DataObject) -> None:
    stages, replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    world = tuple(f"w{rank}" for rank in range(stages * replicas))
    left = data.draw(st.sets(st.sampled_from(world)))
    survivors = {member: rank % stages for rank, member in enumerate(world) if member in left}
    spares = [f"s{number}" for number in range(data.draw(st.integers(0, 4)))]
    seats = seats_in_stages(world, survivors, spares, len(world), stages)
    assert len(set(seats)) == len(seats)
    assert len(seats) == min(len(world), (len(left) + len(spares)) // stages * stages)
    if len(seats) == len(world):
        assert all(seats[rank] == member for rank, member in enumerate(world) if member in left)
    for stage in range(stages):  # a spare sits only where no survivor of the stage is left over
        of_stage = {member for member, at in survivors.items() if at == stage}
        seated = set(members_of(seats, stage, stages))
        assert of_stage <= seated or seated <= of_stage


def test_state_is_copied_within_a_stage_only() -> None:
    digests = {"a0": ("x",), "b0": ("x",), "a1": ("y",), "a2": ("z",), "b2": ("other",)}
    copies, whole = rebuild_stages(WORLD, digests, 3)
    assert whole == (("b1", "a1"), ("b2", "a2")), "what belongs to no bucket, too"
    assert [(copy.source, copy.targets) for copy in copies] == [("a1", ("b1",)), ("a2", ("b2",))]


def test_who_took_anothers_state_takes_what_belongs_to_no_bucket_too_and_gives_that_to_nobody() -> None:
    """A number that an optimizer counts in its parameter groups, say: it has not made the update."""
    digests = {"a": ("x",), "b": ("x",), "c": ("x",)}
    assert rebuild_stages(("a", "b", "c"), digests, 1) == ((), ())
    assert rebuild_stages(("a", "b", "c"), digests, 1, {"a"}) == ((), (("a", "b"),))
    copies, whole = rebuild_stages(("a", "d", "b"), digests, 1, {"a"})
    assert [copy.targets for copy in copies] == [("d",)]
    assert whole == (("a", "b"), ("d", "b"))
    assert rebuild_stages(("a", "b"), digests, 1, {"a", "b"})[1] == (("b", "a"),), "nobody is left who made it"


def test_survivors_help_whoever_replays_unless_neighbours_replay_together() -> None:
    world = WORLD[:3]
    assert replay_teams(world, frozenset({1}), 3, 1) == (("a1", "a0"),)
    assert replay_teams(world, frozenset({1}), 3, 5) == (("a1", "a0", "a2"),)
    assert replay_teams(world, frozenset({0, 2}), 3, 1) == (("a0",), ("a2",)), "one cannot help two alike"
    assert replay_teams(world, frozenset({0, 1}), 3, 2) == (("a0",), ("a1",))
    assert stage_of(world.index("a1"), 3) == 1


def test_who_replays_waits_for_its_neighbours_alone() -> None:
    assert not waits(0, frozenset({0, 2}), 3), "an unrelated loss does not disturb it"
    assert waits(0, frozenset({0, 1}), 3)
    assert not waits(3, frozenset({0, 1, 3}), 5)
    assert waits(0, frozenset({0, 2}), 3, ((0, 2),)), "they share parameters"
    assert not waits(1, frozenset({1}), 3, ((0, 1),))


def test_who_began_a_replay_keeps_its_seat_when_another_stage_is_lost_meanwhile() -> None:
    """c3 replays the last stage when the first is lost, and is the first of the spares."""
    world = ("a0", "a1", "a2")
    assert seats_in_stages(world, {"a1": 1}, ["c3", "c4"], 3, 3, ("a0", "a1", "c3")) == ("c4", "a1", "c3")
    assert seats_in_stages(world, {"a1": 1}, ["c4", "a2", "c3"], 3, 3, ("a0", "a1", "c3"))[2] == "a2"


def marks(member: str, step: int, version: int, agreed: int | None = None) -> Marks:
    return Marks(member, step, (version,), (None,), 0, None if agreed is None else (agreed, (0.5, 1.0)))


def test_a_step_is_completed_if_anybody_knows_that_all_had_finished_it() -> None:
    plan = reconcile_stages([marks("a", 4, 4), marks("b", 4, 4, 4)])
    assert (plan.step, plan.completes, plan.agreed) == (5, True, (0.5, 1.0))
    assert reconcile_stages([marks("a", 4, 4, 3), marks("b", 5, 5, 4)]).step == 5


def test_a_step_is_redone_if_nobody_does() -> None:
    plan = reconcile_stages([marks("a", 4, 4, 3), marks("b", 4, 4)])
    assert (plan.step, plan.completes, plan.agreed) == (4, False, ())
