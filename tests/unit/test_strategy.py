"""Who trains next and in which seat, what is copied to whom, and the account that is given of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.commands import StartWorker
from raytrain_ft.policy.reconcile import Copy, Plan
from raytrain_ft.policy.roster import MemberState, Roster, Rules
from raytrain_ft.policy.strategy import Guarantee, Recoveries, Recovery, Strategy
from raytrain_ft.policy.world import differing, filled_otherwise, rebuild, seats, shall_wait

quick = settings(max_examples=200, derandomize=True)
names = st.lists(st.sampled_from([f"w{i}" for i in range(12)]), unique=True, max_size=12)


# ---------------------------------------------------------------- seats


def test_everybody_keeps_the_rank_and_a_spare_takes_the_empty_one() -> None:
    assert seats(["a", "b", "c"], ["a", "c"], ["s", "t"], 3) == ("a", "s", "c")


def test_without_a_spare_ranks_move_up() -> None:
    assert seats(["a", "b", "c"], ["a", "c"], [], 3) == ("a", "c")


def test_who_slept_keeps_its_rank_though_it_holds_nothing() -> None:
    """Else who is told to wake, by rank, would be another one."""
    assert seats(["a", "b", "c"], ["b"], ["c", "s"], 3) == ("s", "b", "c")
    assert seats(["a", "b", "c"], ["b"], ["s", "c"], 3) == ("s", "b", "c")
    assert seats(["a", "b", "c"], ["b"], ["s", "c"], 2) == ("s", "b")


def test_spares_beyond_the_empty_seats_make_the_world_larger() -> None:
    assert seats(["a", "b"], ["a", "b"], ["s", "t"], 3) == ("a", "b", "s")


def test_a_filled_replacement_that_never_trained_comes_before_the_spares() -> None:
    assert seats(["a", "b", "c"], ["a", "c", "filled"], ["s"], 3) == ("a", "filled", "c")


@quick
@given(world=names, others=names, most=st.integers(1, 12), data=st.data())
def test_all_survivors_have_a_seat_and_nobody_has_two(
    world: list[str], others: list[str], most: int, data: st.DataObject
) -> None:
    world = world[:most]
    survivors = [member for member in world if data.draw(st.booleans())]
    spares = [member for member in others if member not in survivors]  # some of whom may have slept
    seated = seats(world, survivors, spares, most)
    assert len(set(seated)) == len(seated) == min(most, len(survivors) + len(spares))
    assert set(survivors) <= set(seated) <= {*survivors, *spares}
    if len(seated) == len(world):
        assert all(member == world[rank] for rank, member in enumerate(seated) if member in world)


def test_to_wait_or_not_to_wait() -> None:
    waits = Rules(min_workers=2, max_workers=4, max_steps=1)
    shrinks = Rules(min_workers=2, max_workers=4, max_steps=1, wait_for_replacement=False)
    assert shall_wait(waits, 4, 3, more_may_come=True)
    assert not shall_wait(waits, 4, 3, more_may_come=False), "there is nothing to wait for"
    assert not shall_wait(waits, 3, 3, more_may_come=True), "as many as before: it can grow later"
    assert shall_wait(waits, 0, 3, more_may_come=True), "the first world is the largest there can be"
    assert not shall_wait(shrinks, 4, 3, more_may_come=True)
    assert shall_wait(shrinks, 4, 1, more_may_come=False), "fewer than the minimum cannot go on at all"


# ---------------------------------------------------------------- what is copied to whom


def test_equal_replicas_need_nothing() -> None:
    assert rebuild(["a", "b"], {"a": ("x", "y"), "b": ("x", "y")}) == ()


def test_a_replacement_is_filled_by_all_in_turn() -> None:
    copies = rebuild(["a", "new", "b"], {"a": ("x", "y", "z"), "b": ("x", "y", "z")})
    assert copies == tuple(Copy(bucket, "state", source, ("new",)) for bucket, source in enumerate("aba"))


def test_the_majority_repairs_the_rest_and_only_who_is_right_sends() -> None:
    digests = {"a": ("bad", "y"), "b": ("x", "bad"), "c": ("x", "y")}
    assert rebuild(["a", "b", "c", "new"], digests) == (
        Copy(0, "state", "b", ("a", "new")),
        Copy(1, "state", "c", ("b", "new")),
    )
    assert differing(digests) == 2


def test_of_two_that_differ_the_lower_rank_is_believed() -> None:
    assert rebuild(["b", "a"], {"a": ("x",), "b": ("y",)}) == (Copy(0, "state", "b", ("a",)),)


@quick
@given(st.lists(st.lists(st.sampled_from("xyz"), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 2))
def test_afterwards_all_hold_the_same_state(hashes: list[list[str]], newcomers: int) -> None:
    digests = {f"w{i}": tuple(row) for i, row in enumerate(hashes)}
    world = [*digests, *(f"new{i}" for i in range(newcomers))]
    after = {member: list(digests.get(member, ("", "", ""))) for member in world}
    for copy in rebuild(world, digests):
        for target in copy.targets:
            after[target][copy.bucket] = digests[copy.source][copy.bucket]
    assert len({tuple(row) for row in after.values()}) == 1


def test_who_was_filled_otherwise_is_wrong_however_few_the_others_are() -> None:
    world, digests = ["new", "also", "a"], {"new": ("z",), "also": ("z",), "a": ("x",)}
    assert filled_otherwise(world, {"a"}, digests, 1) == {"new", "also"}
    assert filled_otherwise(world, set(), digests, 1) == set(), "all have loaded it, and nobody can tell"
    assert filled_otherwise(["new", "c", "a", "b"], {"a", "b"}, digests | {"b": ("y",), "c": ("y",)}, 2) == {"new"}, "by stages"


# ---------------------------------------------------------------- the account


def test_a_recovery_tells_how_it_went() -> None:
    recoveries = Recoveries()
    recovery = recoveries.begin(1.0, "the node died", "heartbeat", 3)
    recovery.begin_again()
    recovery.fenced = 1.2
    recoveries.follow(Plan(step=7, completes=True, reason="step 6 was fully reduced"))
    recovery.world_after = 3
    assert recoveries.open is recovery
    recoveries.close(1.5)
    assert recoveries.open is None
    assert (recovery.seconds, recovery.guarantee, recovery.step) == (0.5, Guarantee.EXACT, 7)


def test_a_further_loss_is_part_of_the_same_recovery() -> None:
    recoveries = Recoveries()
    recovery = recoveries.begin(1.0, "the node died", "heartbeat", 3)
    recovery.begin_again()
    recovery.fenced = 1.2
    assert recoveries.begin(2.0, "the process died", "ray", 3) is recovery
    recovery.begin_again()
    assert (recovery.cause, recovery.detected, recovery.attempts) == ("the node died; then the process died", 1.0, 2)
    assert recovery.fenced is None, "times are those of the last attempt"
    assert recoveries.begin(2.0, "the process died", "ray", 3).cause == "the node died; then the process died"


def test_what_costs_the_guarantee() -> None:
    def kept(plan: Plan | None = None, before: int = 3, after: int = 3, repaired: int = 0) -> Guarantee:
        recoveries = Recoveries()
        recovery = recoveries.begin(0.0, "cause", "ray", before)
        recovery.begin_again()
        if plan is not None:
            recoveries.follow(plan)
        recovery.world_after, recovery.repaired = after, repaired
        recoveries.close(1.0)
        return recovery.guarantee

    assert kept(Plan(step=1)) == Guarantee.EXACT
    assert kept(Plan(step=1, undo=(0,))) == Guarantee.ROUNDING
    assert kept(after=2) == Guarantee.ROUNDING, "the same gradients are added in another order"
    assert kept(repaired=1) == Guarantee.ROUNDING, "where survivors differ, a majority is no proof"
    assert kept(before=0, after=2) == Guarantee.EXACT, "nobody had trained"


INEXACT = [
    Plan(step=7, undo=(0,)),
    Plan(step=7, keep=(0,)),
    Plan(step=8, completes=True, mean=(0,), lost=((0, 4),)),
    Plan(step=8, skips=True, lost=((0, 8),)),
]


@pytest.mark.parametrize("plan", INEXACT, ids=["undo", "rollback", "lossy", "skip"])
@pytest.mark.parametrize(("checkpoint", "exact"), [(5, True), (7, True), (8, False)])
def test_what_was_inexact_is_gone_if_everybody_goes_back_to_before_it(plan: Plan, checkpoint: int, exact: bool) -> None:
    """All of these interrupted step 7. What had committed that step is from after it."""
    recoveries = Recoveries()
    recovery = recoveries.begin(0.0, "the node died", "heartbeat", 3)
    recoveries.follow(plan)
    recoveries.carried_out(plan, undone=9 * len(plan.undo), kept=9 * len(plan.keep))
    recoveries.begin(1.0, "another one died", "heartbeat", 3)
    recovery.begin_again()
    recoveries.go_back(checkpoint, 8, "the checkpoint", Strategy.CHECKPOINT)
    recovery.world_after = 3
    recoveries.close(2.0)
    assert (recovery.guarantee == Guarantee.EXACT) == exact
    assert any((recovery.undone, recovery.updated_twice, recovery.samples_lost)) != exact
    later = recoveries.begin(3.0, "a third one died", "heartbeat", 3)
    recoveries.follow(Plan(step=12, undo=(0,)))
    recoveries.go_back(9, 12, "a checkpoint after that", Strategy.CHECKPOINT)
    assert later.guarantee == Guarantee.EXACT, "what an earlier recovery left in a checkpoint is told by that one"


def test_who_went_back_and_then_went_on_otherwise_tells_both() -> None:
    """A further loss right after everybody had gone back is the same recovery, and its last attempt is not all of it."""
    recoveries = Recoveries()
    recovery = recoveries.begin(0.0, "all nodes died", "heartbeat", 3)
    recovery.begin_again()
    recovery.reason = "nobody holds the state of step 9 any more"
    recoveries.go_back(5, 9, "step-5", Strategy.CHECKPOINT)
    recoveries.begin(1.0, "another one died", "heartbeat", 3)
    recovery.begin_again()
    recoveries.follow(Plan(step=6, completes=True, reason="step 5 was fully reduced"))
    assert recovery.reason == (
        "nobody holds the state of step 9 any more: everybody goes back to step 5 (step-5), 4 steps or a few more are done "
        "again; then step 5 was fully reduced"
    )
    assert (recovery.strategy, recovery.step, recovery.redone) == (Strategy.CHECKPOINT, 6, 4)
    recoveries.close(2.0)
    later = recoveries.begin(3.0, "a third one died", "heartbeat", 3)
    recoveries.follow(Plan(step=8, reason="nothing of step 8 was updated"))
    assert later.reason == "nothing of step 8 was updated"


def after(*plans: Plan) -> Recovery:
    """One recovery, which was interrupted between these plans; of what they undo or keep, all is told."""
    recoveries = Recoveries()
    recovery = recoveries.begin(0.0, "the node died", "heartbeat", 3)
    for plan in plans:
        recovery.begin_again()
        recoveries.follow(plan)
        recoveries.carried_out(plan, undone=9 * len(plan.undo), kept=9 * len(plan.keep))
    return recovery


def test_samples_that_are_used_after_all_are_not_lost() -> None:
    """Nobody had begun to finish the step without them when another one died, and then too few were left for the quorum."""
    recovery = after(Plan(11, True, lost=((0, 8),)), Plan(10))
    assert (recovery.strategy, recovery.guarantee, recovery.samples_lost) == (Strategy.REPLICATION, Guarantee.EXACT, 0)


def test_what_two_steps_cost_is_added_up() -> None:
    """The second one was interrupted before anything was committed; the ends of the first one's recovery are told again."""
    assert after(Plan(11, True, lost=((0, 8),)), Plan(12, True, lost=((0, 8),))).samples_lost == 16
    assert after(Plan(11, True, lost=((0, 8),)), Plan(11, True, lost=((0, 12),)), Plan(11)).samples_lost == 12
    assert after(Plan(11, skips=True, lost=((0, 8),)), Plan(11)).strategy == Strategy.SKIP
    twice = after(Plan(10, keep=(0, 1)), Plan(10, keep=(0,)), Plan(11, keep=(0,)), Plan(11))
    assert (twice.guarantee, twice.strategy, twice.updated_twice) == (Guarantee.LOSSY, Strategy.ROLLBACK, 27)
    undone = after(Plan(10, undo=(0, 1)), Plan(10, undo=(0,)), Plan(11, undo=(0,)))
    assert (undone.guarantee, undone.undone) == (Guarantee.ROUNDING, 27)


def test_going_back_takes_back_what_was_done_since() -> None:
    recoveries = Recoveries()
    recovery = recoveries.begin(0.0, "the node died", "heartbeat", 3)
    recoveries.follow(Plan(8, True, lost=((0, 4),)))
    recoveries.follow(Plan(12, True, lost=((0, 8),)))
    recoveries.go_back(9, 12, "the checkpoint", Strategy.CHECKPOINT)
    assert (recovery.guarantee, recovery.samples_lost) == (Guarantee.LOSSY, 4)


@pytest.mark.parametrize(
    ("resizes", "checkpoint", "after", "kept"),
    [
        ([(10, 3, 2)], 12, 2, Guarantee.EXACT),
        ([(10, 3, 2)], 10, 2, Guarantee.EXACT),
        ([(10, 3, 2)], 5, 2, Guarantee.ROUNDING),
        ([(10, 3, 2)], 5, 3, Guarantee.EXACT),
        ([(10, 3, 2), (15, 2, 3)], 5, 3, Guarantee.EXACT),
        ([(10, 3, 2), (15, 2, 3)], 12, 3, Guarantee.ROUNDING),
        ([(10, 3, 2), (15, 2, 3)], 12, 2, Guarantee.EXACT),
        ([(10, 3, 2), (4, 2, 2)], 5, 2, Guarantee.EXACT),
        ([(0, 0, 2)], 5, 2, Guarantee.EXACT),
    ],
)
def test_steps_that_are_done_again_by_more_or_fewer_are_not_exact(
    resizes: list[tuple[int, int, int]], checkpoint: int, after: int, kept: Guarantee
) -> None:
    """Each resize: the step from which on the second number of workers trained, rather than the first. In the last but one,
    those who were left went back, and did again all that the larger world had done."""
    recoveries = Recoveries()
    for step, before, now in resizes:
        recovery = recoveries.begin(0.0, "the node died", "heartbeat", before)
        recovery.begin_again()
        recovery.step, recovery.world_after = step, now
        recoveries.close(1.0)
    recovery = recoveries.begin(2.0, "all died", "heartbeat", resizes[-1][2])
    recovery.begin_again()
    recoveries.go_back(checkpoint, 20, "the checkpoint", Strategy.CHECKPOINT)
    recovery.world_after = after
    recoveries.close(3.0)
    assert recovery.guarantee == kept


@pytest.mark.parametrize(("checkpoint", "kept"), [(5, Guarantee.EXACT), (7, Guarantee.EXACT), (8, Guarantee.ROUNDING)])
def test_what_an_attempt_did_with_another_number_of_workers_is_gone_if_everybody_goes_back(
    checkpoint: int, kept: Guarantee
) -> None:
    """It went on from step 7. A checkpoint of a later step is of what it did."""
    recoveries = Recoveries()
    recovery = recoveries.begin(0.0, "1 more workers are ready", "supervisor", 3)
    recovery.begin_again()
    recoveries.follow(Plan(step=7))
    recoveries.trains(4)
    recoveries.begin(1.0, "all died", "heartbeat", 4)
    recovery.begin_again()
    recoveries.go_back(checkpoint, 9, "the checkpoint", Strategy.CHECKPOINT)
    recoveries.trains(3)
    recovery.world_after = 3
    recoveries.close(2.0)
    assert recovery.guarantee == kept


def test_a_resize_that_the_end_of_the_run_overtook_is_none() -> None:
    recoveries = Recoveries()
    recoveries.begin(1.0, "1 more workers are ready", "supervisor", 2)
    recoveries.close(2.0)
    assert recoveries.all == []


# ---------------------------------------------------------------- the roster


def test_the_cluster_s_room_and_the_number_of_spares_limit_what_is_started() -> None:
    roster = Roster(Rules(min_workers=1, max_workers=2, max_steps=1, spares=1))
    assert roster.provision() == []
    assert roster.lacking() == 0, "nothing is known of the cluster yet"
    roster.resized(0)
    assert roster.lacking() == 3, "an autoscaler reacts to what cannot be placed"
    roster.resized(1)
    assert roster.provision() == [StartWorker("w0")]
    assert roster.lacking() == 2
    roster.resized(9)
    assert roster.lacking() == 0
    assert roster.provision() == [StartWorker("w1"), StartWorker("w2")]
    roster.resized(1)
    assert roster.provision() == []
    assert roster.lose("w1", None) == MemberState.STARTING
    assert roster.provision() == [], "two are left, and there is room for one"


def test_room_on_nodes_that_go_is_for_those_who_are_needed_only() -> None:
    roster = Roster(Rules(min_workers=2, max_workers=3, max_steps=1, spares=1))
    roster.resized(1, last_resort=1)
    assert roster.provision() == [StartWorker("w0"), StartWorker("w1", anywhere=True)]
    assert roster.lacking() == 3, "an autoscaler sees what is missing all the same"
    roster.leaving = frozenset({"w1"})
    assert roster.provision() == [], "it is told to go, and needed until then"
    roster.lose("w1", None)
    roster.leaving = frozenset()
    roster.resized(1)
    assert roster.provision() == []


def vain(member: str) -> m.WorkerLost:
    return m.WorkerLost(member=member, cause="no node has room for it", noticed_by="supervisor")


def test_starting_is_given_up_after_some_rounds_until_the_cluster_grows() -> None:
    roster = Roster(Rules(min_workers=1, max_workers=2, max_steps=1, spares=0, max_start_failures=2))
    roster.resized(2)
    for _ in range(2):
        assert len(roster.provision()) == 2
        for member in list(roster.members):
            roster.lose(member, vain(member))
    assert roster.cannot_start()
    assert roster.provision() == []
    roster.resized(3)
    assert roster.provision() == [StartWorker("w4"), StartWorker("w5")]
    roster.lose("w4", vain("w4"))
    roster.provision()
    roster.ready("w5")
    roster.lose("w6", vain("w6"))
    assert not roster.cannot_start(), "one came, so starting is possible"
    roster.provision()
    for member in list(roster.members):
        roster.lose(member, None)
    assert roster.start_failures == 1, "those were called off"
