"""Going on without redoing: when it applies, what it costs, and when the step is redone after all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_ft.policy.forward import STRATEGIES, complement, instead, worth_finishing
from raytrain_ft.policy.reconcile import Marks, Plan, Share, reconcile
from raytrain_ft.policy.sampling import samples_in

BATCH = (64, 96)


def survivor(rank: int, versions, gradients, *, whole: bool = True, step: int = 5, lost=None, of: int = 4) -> Marks:
    width = (BATCH[1] - BATCH[0]) // of
    mine = (BATCH[0] + rank * width, BATCH[0] + (rank + 1) * width)
    return Marks(f"w{rank}", step, versions, gradients, share=Share(step, BATCH, mine, whole), lost=lost)


def plan_of(survivors: list[Marks], strategy: str, quorum: float = 0.5, *, whole_update: bool = True) -> Plan:
    return instead(reconcile(survivors, whole_update=whole_update), survivors, strategy, quorum)


def test_lossy_reduces_again_what_was_reduced_nowhere_and_passes_on_the_rest() -> None:
    survivors = [survivor(0, (5, 5, 5), (5, None, None)), survivor(2, (5, 5, 5), (None, None, None))]
    plan = plan_of(survivors, "lossy")
    assert (plan.step, plan.completes, plan.mean) == (6, True, (1, 2))
    assert [(copy.bucket, copy.source, copy.targets) for copy in plan.gradients] == [(0, "w0", ("w2",))]
    assert plan.lost == ((72, 80), (88, 96))


def test_who_speaks_for_all_survivors_had_samples() -> None:
    """One that slept ran no forward pass, and could not say what that changed."""
    asleep = Marks("w0", 5, (5,), (None,), share=Share(5, BATCH, (BATCH[0], BATCH[0]), whole=True))
    awake = [
        Marks(f"w{rank}", 5, (5,), (None,), share=Share(5, BATCH, mine, True)) for rank, mine in ((1, (64, 80)), (2, (80, 88)))
    ]
    plan = plan_of([asleep, *awake], "lossy")
    assert (plan.mean, plan.speaker, plan.lost) == ((0,), "w1", ((88, 96),))


def test_lossy_with_wait_free_updates_takes_the_state_where_the_gradient_was_used() -> None:
    survivors = [survivor(0, (6, 5), (None, None)), survivor(1, (5, 5), (None, None)), survivor(2, (6, 5), (None, None))]
    plan = plan_of(survivors, "lossy", whole_update=False)
    assert [(copy.what, copy.bucket, copy.targets) for copy in plan.states] == [("state", 0, ("w1",))]
    assert plan.mean == (1,)
    assert plan.undo == ()


@pytest.mark.parametrize("of", [2, 4, 8, 16, 32])
def test_a_quorum_that_is_just_met_is_met(of: int) -> None:
    """Whatever the sums round to: BATCH has 32 samples."""
    for left in range(1, of):
        survivors = [survivor(rank, (5,), (None,), of=of) for rank in range(left)]
        assert plan_of(survivors, "lossy", left / of).completes, (left, of)
    five = [Marks("w0", 5, (5,), (None,), share=Share(5, (0, 5), (0, 1), True))]
    assert plan_of(five, "lossy", 0.2).completes
    assert not plan_of(five, "lossy", 0.21).completes
    assert worth_finishing(five, range(1, 5), 5, 0.2) == 5


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("quorum", [0.6, 1.0])
def test_fewer_samples_than_the_quorum_are_redone(quorum: float, whole: bool) -> None:
    """Who was told that it is in vain may have left its gradients: that is not why."""
    survivors = [survivor(0, (5,), (None,)), survivor(1, (5,), (None,), whole=whole)]
    plan = plan_of(survivors, "lossy", quorum)
    assert (plan.step, plan.completes, plan.lost) == (5, False, ())
    assert "quorum" in plan.reason


def test_without_gradients_of_its_own_a_survivor_cannot_finish() -> None:
    survivors = [survivor(0, (5,), (None,)), survivor(1, (5,), (None,), whole=False)]
    assert not plan_of(survivors, "lossy").completes
    survivors[1] = Marks("w1", 5, (5,), (None,))
    assert not plan_of(survivors, "lossy").completes


def test_a_step_is_worth_finishing_if_all_have_computed_it_or_can() -> None:
    """If it is not said to be, the plan is to redo it, whatever the others add; if it is, they may still finish it."""
    here, ahead, broken = (
        survivor(0, (5,), (None,)),
        survivor(1, (6,), (None,), step=6),
        survivor(2, (5,), (None,), whole=False),
    )
    between = Marks("w3", 5, (5,), (None,))
    one_of_four = ([3], 4, 0.5)
    assert worth_finishing([here], *one_of_four) == 5
    assert worth_finishing([here, survivor(1, (5,), (None,))], *one_of_four) == 5
    assert worth_finishing([here, ahead], *one_of_four) is None
    assert worth_finishing([here, broken], *one_of_four) is worth_finishing([between], *one_of_four) is None
    assert not plan_of([here, broken], "lossy").completes


@pytest.mark.parametrize(("gone", "worth"), [([3], 5), ([2, 3], None)])
def test_nor_is_it_if_too_few_samples_are_left(gone: list[int], worth: int | None) -> None:
    left = [survivor(rank, (5,), (None,)) for rank in range(4) if rank not in gone]
    assert worth_finishing(left[:1], gone, 4, 0.75) == worth
    assert plan_of(left, "lossy", 0.75).completes is (worth is not None)


def test_rollback_keeps_the_update_of_who_has_come_furthest() -> None:
    survivors = [survivor(0, (6, 5, 5), (None,) * 3), survivor(1, (6, 6, 5), (None,) * 3), survivor(2, (5, 5, 5), (None,) * 3)]
    plan = plan_of(survivors, "rollback", whole_update=False)
    assert (plan.step, plan.completes, plan.keep, plan.undo, plan.lost) == (5, False, (0, 1), (), ())
    assert [(copy.bucket, copy.source, copy.targets) for copy in plan.states] == [(0, "w1", ("w2",)), (1, "w1", ("w0", "w2"))]


def test_rollback_without_a_partial_update_redoes_the_step_and_says_why() -> None:
    survivors = [survivor(0, (5, 5), (5, None)), survivor(1, (5, 5), (None, None))]
    exact = reconcile(survivors, whole_update=False)
    plan = plan_of(survivors, "rollback", whole_update=False)
    assert (plan.step, plan.completes, plan.keep, plan.lost) == (exact.step, exact.completes, (), ())
    assert plan.reason == f"{exact.reason}, because there is no partial update to keep"


def test_skip_first_undoes_what_was_updated() -> None:
    survivors = [survivor(0, (6, 5), (None, None)), survivor(1, (6, 5), (None, None))]
    plan = plan_of(survivors, "skip", whole_update=False)
    assert (plan.step, plan.skips, plan.undo, plan.lost) == (6, True, (0,), (BATCH,))


def test_what_one_has_skipped_all_skip() -> None:
    """It had undone its update, and stands where it stood before, though its versions are those of the next step."""
    lost = (5, (BATCH,))
    skipped = Marks("w0", 6, (6, 6, 6), (None,) * 3, lost=lost, left_out=5)
    survivors = [skipped, survivor(1, (6, 5, 5), (None,) * 3, lost=lost), Marks("w2", 5, (5, 5, 5), (None,) * 3)]
    plan = plan_of(survivors, "skip", whole_update=False)
    assert (plan.step, plan.skips, plan.completes, plan.undo, plan.lost) == (6, True, False, (), (BATCH,))
    assert [(copy.what, copy.bucket, copy.source, copy.targets) for copy in plan.states] == [("state", 0, "w0", ("w1",))]
    done = [skipped, Marks("w1", 6, (6, 6, 6), (None,) * 3, left_out=5)]
    assert not plan_of(done, "skip", whole_update=False).skips


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_can_be_completed_exactly_is(strategy: str) -> None:
    survivors = [survivor(0, (5, 5), (5, None)), survivor(1, (5, 5), (None, 5))]
    plan = plan_of(survivors, strategy)
    assert (plan.completes, plan.mean, plan.keep, plan.skips, plan.lost) == (True, (), (), False, ())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_nobody_has_begun_is_just_begun(strategy: str) -> None:
    survivors = [Marks("w0", 5, (5,), (4,)), Marks("w1", 5, (5,), (4,))]
    assert plan_of(survivors, strategy) == reconcile(survivors, whole_update=True)


def test_what_an_interrupted_recovery_let_go_of_is_not_forgotten() -> None:
    """One survivor was told to finish the step, did so, and everybody was disturbed again."""
    lost = (5, ((72, 80),))
    finished = Marks("w0", 6, (6,), (None,), lost=lost)
    plan = plan_of([finished, survivor(2, (5,), (None,))], "lossy")
    assert plan.completes
    assert plan.lost == ((72, 80),)


@given(st.data())
def test_the_complement_and_the_parts_are_the_batch(data) -> None:
    start, length = data.draw(st.integers(0, 50)), data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(start, start + length), min_size=2, max_size=8)))
    parts = list(zip(cuts[::2], cuts[1::2], strict=False))
    left = complement((start, start + length), parts)
    every = sorted(position for a, b in [*left, *parts] for position in range(a, b))
    assert every == list(range(start, start + length))
    assert samples_in(left) + samples_in(parts) == length
