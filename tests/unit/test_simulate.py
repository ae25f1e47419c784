"""The simulator: training in closed form is training step by step; recoveries cost what the job says; promises hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.states import State
from raytrain_ft.simulate import (
    Costs,
    Exponential,
    Failure,
    Failures,
    Job,
    Listed,
    Outcome,
    SpotTrace,
    Strategy,
    Uniform,
    Weibull,
    best_interval,
    compare,
    simulate,
    sweep_failures,
    sweep_intervals,
)
from raytrain_ft.simulate.campaign import troubled_run
from raytrain_ft.simulate.pace import Pace

COSTS = Costs(
    detect_s=1.0,
    fence_s=0.25,
    rendezvous_s=0.5,
    fill_s=2.0,
    resume_s=0.125,
    load_s=4.0,
    restart_s=16.0,
    restore_s=0.75,
    begin_s=3.0,
    end_s=1.5,
    copy_s=0.5,
    persist_s=2.5,
)
JOB = Job(steps=100, step_s=1.0, workers=4, batch=8, costs=COSTS)
PIPELINE = Job(steps=100, step_s=1.0, workers=4, stages=2)
PAUSE = 1.0 + 0.25 + 0.5 + 2.0 + 0.125
"""Of a recovery from replicas: detect, fence, rendezvous, fill, resume."""


TWINS = [Strategy(kind="lossy"), Strategy(kind="lossy", quorum=0.9)]


def once(kind: str, failures: Failures, job: Job = JOB, **parameters: object) -> Outcome:
    """One run, whose account must be complete."""
    outcome = simulate(job, Strategy(kind=kind, **parameters), failures)  # pyright: ignore[reportArgumentType]
    assert outcome.useful_s + sum(outcome.lost_s.values()) == pytest.approx(outcome.seconds)
    return outcome


def at_step(*steps: float, **loss: object) -> Listed:
    return Listed(tuple(Failure(step=step, **(loss or {"lost": 1})) for step in steps))  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- training in closed form


def stand_step_by_step(pace: Pace, seconds: float) -> tuple[int, float, float]:
    """Steps, seconds into the next one, seconds stalled: as training does it."""
    at, step, stalled = 0.0, pace.begin, 0.0
    while True:
        if at + pace.step_s > seconds:
            return step, seconds - at, stalled
        at, step = at + pace.step_s, step + 1
        if pace.every is not None and step % pace.every == 0:
            if at + pace.stall_s > seconds:
                return step, 0.0, stalled + seconds - at
            at, stalled = at + pace.stall_s, stalled + pace.stall_s


@given(
    begin=st.integers(0, 30),
    every=st.one_of(st.none(), st.integers(1, 12)),
    stall_eighths=st.integers(0, 30),
    step_eighths=st.integers(1, 20),
    at=st.integers(0, 4000),
)
def test_training_in_closed_form_is_training_step_by_step(
    begin: int, every: int | None, stall_eighths: int, step_eighths: int, at: int
) -> None:
    pace = Pace(begin, step_eighths / 8, every, stall_eighths / 8)
    seconds = at / 16  # binary fractions: nothing is rounded
    step, into, stalled = stand_step_by_step(pace, seconds)
    stand = pace.after(seconds)
    assert stand.step == step
    assert stand.into == pytest.approx(into, abs=1e-6)
    assert stand.stalled == pytest.approx(stalled, abs=1e-6)
    if step > begin:
        assert pace.until(step) <= seconds < pace.until(step + 1)
        assert stand_step_by_step(pace, pace.until(step))[0] == step
    if into and every is not None:
        assert pace.until(step + into / pace.step_s) == pytest.approx(seconds)


# ---------------------------------------------------------------- what a recovery costs


def test_nothing_happens_and_it_takes_the_steps_and_what_saving_them_costs() -> None:
    assert once("replication", Listed()).seconds == 100 + 3.0 + 1.5
    saved = once("global_checkpoint", Listed(), every=10)  # 9 times: not after the last step
    assert saved.seconds == pytest.approx(100 + 3.0 + 1.5 + 9 * (0.5 + 2.5))
    assert saved.goodput == 100 / saved.seconds
    assert once("checkpoint", Listed(), every=10).lost_s.get("saving", 0.0) == pytest.approx(0)  # hidden behind steps


def test_replication_costs_the_interrupted_step_and_the_pause() -> None:
    outcome = once("replication", at_step(20.5, 70.25))
    assert outcome.seconds == pytest.approx(104.5 + 0.5 + 0.25 + 2 * PAUSE)
    assert outcome.strategies == {"replication": 2}
    assert outcome.pauses == pytest.approx([PAUSE + 1, PAUSE + 1])  # until the first step is committed
    assert (outcome.guarantee, outcome.samples_lost) == ("exact", 0)


def test_a_recovery_into_the_last_step_of_the_run_made_a_pause_too() -> None:
    assert once("replication", at_step(98.5, 99.5)).pauses == pytest.approx([PAUSE + 1, PAUSE + 1])


def test_a_step_whose_gradients_are_all_reduced_is_completed_and_not_redone() -> None:
    job = Job(steps=100, step_s=1.0, workers=4, costs=Costs(update_s=0.25))
    assert once("replication", at_step(20.5), job).seconds == pytest.approx(100.5)
    assert once("replication", at_step(20.8), job).seconds == pytest.approx(100.0)


def test_going_back_redoes_what_was_done_since_the_last_checkpoint() -> None:
    restart = 1.0 + 0.25 + 16.0 + 0.5 + 4.0 + 0.125
    outcome = once("global_checkpoint", at_step(27.5), every=10)
    assert outcome.lost_s["redone"] == pytest.approx(7)
    assert outcome.lost_work_s == pytest.approx(7.5)
    assert outcome.seconds == pytest.approx(104.5 + 9 * 3 + 7.5 + restart)
    assert once("checkpoint", at_step(27.5), every=10).lost_s["replace"] == pytest.approx(4.5)  # nobody restarts
    too_fresh = once("checkpoint", at_step(22.5), every=10)  # durable 3 s after step 20
    assert too_fresh.lost_s["redone"] == pytest.approx(12)
    snapshot = once("elastic_horovod", at_step(27.5), every=5)
    assert snapshot.lost_s["redone"] == pytest.approx(2)
    assert snapshot.strategies == {"snapshot": 1}


def test_snapshots_in_memory_are_gone_with_all_workers() -> None:
    outcome = once("elastic_horovod", at_step(50, workers=(0, 1, 2, 3)), every=5)
    assert outcome.lost_s["redone"] == pytest.approx(50)


def test_nobody_left_and_nothing_saved_is_the_end() -> None:
    outcome = once("replication", at_step(50, lost=4))
    assert not outcome.finished
    assert outcome.reason.startswith("NoSurvivorError")


def test_logging_replays_the_lost_stage_and_helpers_make_it_faster() -> None:
    job = Job(steps=100, step_s=1.0, workers=4, stages=4, micro_batches=8, costs=Costs(load_s=4.0, replay_ratio=0.5))
    alone = once("logging", at_step(27), job, every=10)
    assert alone.strategies == {"logging": 1}
    assert alone.lost_s["rebuild"] == pytest.approx(4.0 + 7 * 0.5)
    assert alone.seconds == pytest.approx(107.5)
    helped = once("logging", at_step(27), job, every=10, replay_workers=4)
    assert helped.lost_s["rebuild"] == pytest.approx(4.0 + 7 * 0.5 * 2 / 8)
    two_lost = once("logging", at_step(27, workers=(1, 2)), job, every=10)
    assert two_lost.lost_s["rebuild"] == pytest.approx(4.0 + 7 * 0.5)


def test_lossy_rollback_and_skip_lose_what_they_say() -> None:
    lossy, rollback, skip = (once(kind, at_step(20.75)) for kind in ("lossy", "rollback", "skip"))
    redone = once("rollback", at_step(20.75), update="barrier")
    assert (redone.strategies, redone.guarantee) == ({"replication": 1}, "exact")
    assert (lossy.strategies, lossy.samples_lost, lossy.guarantee) == ({"lossy": 1}, 2, "lossy")
    assert lossy.lost_work_s == pytest.approx(0)
    assert (rollback.strategies, rollback.samples_lost, rollback.guarantee) == ({"rollback": 1}, 0, "lossy")
    assert rollback.lost_work_s == pytest.approx(0.75)
    assert (skip.strategies, skip.samples_lost, skip.useful_s) == ({"skip": 1}, 8, 99.0)


def test_samples_of_steps_that_are_done_again_are_not_lost() -> None:
    losses = (Failure(step=150.6, workers=(1,)), Failure(step=160.0, lost=4))
    job = Job(steps=200, step_s=1.0, workers=4, batch=8)
    assert once("lossy", Listed(losses[:1]), job, every=100).samples_lost == 2
    outcome = once("lossy", Listed(losses), job, every=100)
    assert (outcome.strategies, outcome.samples_lost) == ({"lossy": 1, "checkpoint": 1}, 0)


def test_torchft_drops_the_step_and_what_the_missing_one_would_have_done() -> None:
    job = Job(steps=100, step_s=1.0, workers=4, batch=8, spares=0, costs=Costs(detect_s=1.0, start_s=10.0))
    outcome = once("torchft", at_step(20.5), job)
    assert outcome.seconds == pytest.approx(100 + 0.5 + 1.0)
    assert outcome.samples_lost == 8 + 10 * 2
    assert outcome.guarantee == "lossy"


SCARCE = Job(steps=300, step_s=1.0, workers=4, batch=8, spares=0, spare_nodes=0, costs=Costs(start_s=10.0, load_s=4.0))


def test_torchft_goes_on_with_fewer_where_there_are_no_nodes_and_grows_when_one_comes() -> None:
    gone = Failure(at=100.0, lost=1)
    smaller = once("torchft", Listed((gone,)), SCARCE)
    assert (smaller.finished, smaller.seconds, smaller.samples_lost) == (True, pytest.approx(300), 8 + 200 * 2)
    grows = once("torchft", Listed((gone, Failure(at=200.0, back=1))), SCARCE)
    assert (grows.finished, grows.samples_lost) == (True, 8 + 110 * 2)


@pytest.mark.parametrize("kind", ["torchft", "lossy"])
def test_nobody_pays_for_nodes_that_are_gone(kind: str) -> None:
    job, gone = replace(SCARCE, min_workers=3), Failure(at=50.0, lost=1)
    outcome = once(kind, Listed((gone,)), job, replacement="shrink")
    assert outcome.node_hours * 3600 == pytest.approx(4 * 50 + 3 * (outcome.seconds - 50))
    back = once(kind, Listed((gone, Failure(at=150.0, back=1))), job, replacement="shrink")
    assert back.node_hours * 3600 == pytest.approx(4 * (back.seconds - 100) + 3 * 100)


@pytest.mark.parametrize("kind", ["torchft", "replication"])
def test_a_node_may_come_back_a_while_after_it_was_lost(kind: str) -> None:
    at_once, later = (Listed((Failure(step=100, lost=1, back=1, back_s=seconds),)) for seconds in (0.0, 50.0))
    job = replace(SCARCE, min_workers=3)
    away = once(kind, later, job, replacement="shrink")
    apart = once(kind, Listed((Failure(at=100.0, lost=1), Failure(at=150.0, back=1))), job, replacement="shrink")
    assert away.seconds == pytest.approx(apart.seconds)
    assert (away.lost_s, away.samples_lost) == (pytest.approx(apart.lost_s, abs=1e-5), apart.samples_lost)
    assert once(kind, at_once, job, replacement="shrink") != away


def test_torchft_loses_a_process_without_its_node() -> None:
    outcome = once("torchft", at_step(100, 200, workers=(1,)), SCARCE)
    assert (outcome.finished, outcome.samples_lost) == (True, 2 * (8 + 10 * 2))


def test_torchft_waits_while_fewer_are_left_than_the_least() -> None:
    gone, job = Failure(at=100.0, lost=2), replace(SCARCE, min_workers=3, replacement_timeout=150.0)
    waits = once("torchft", Listed((gone, Failure(at=200.0, back=1))), job)
    assert (waits.finished, waits.pauses) == (True, pytest.approx((111.0,)))
    fails = once("torchft", Listed((gone,)), job)
    assert (fails.seconds, fails.reason) == (pytest.approx(250), "RecoveryError: 2 workers are left and none came within 150 s")


def test_torchft_goes_back_to_what_it_has_saved_when_nobody_is_left() -> None:
    losses = Listed((Failure(at=150.5, lost=4), Failure(at=160.0, back=4)))
    assert once("torchft", losses, SCARCE).reason.startswith("NoSurvivorError")
    outcome = once("torchft", losses, SCARCE, every=100)
    assert (outcome.finished, outcome.samples_lost) == (True, 0)
    assert outcome.seconds == pytest.approx(160 + 10 + 200)
    assert outcome.lost_s["redone"] == pytest.approx(50)
    fewer = Listed((Failure(at=90.0, lost=1), *losses.failures))  # until step 100, and not for what is done again
    assert once("torchft", fewer, SCARCE, every=100).samples_lost == 8 + 10 * 2


def test_without_a_spare_training_waits_for_a_new_worker_or_goes_on_with_fewer() -> None:
    costs = Costs(start_s=30.0)
    waits = once("replication", at_step(50), Job(steps=100, step_s=1.0, workers=4, spares=0, costs=costs))
    assert waits.seconds == pytest.approx(130)
    scarce = Job(steps=100, step_s=1.0, workers=4, spares=0, spare_nodes=0, min_workers=2, costs=costs)
    smaller = once("replication", at_step(50), scarce)
    assert smaller.seconds == pytest.approx(50 + 50 * 4 / 3)
    assert smaller.guarantee == "rounding"
    grows = once("replication", Listed((Failure(at=50.0, lost=1), Failure(at=60.0, back=1))), scarce)
    assert 100 < grows.seconds < smaller.seconds
    assert grows.lost_s["shrunk"] == pytest.approx((grows.seconds - 100) * 1.0, rel=0.05)


def test_a_loss_during_a_recovery_belongs_to_it() -> None:
    outcome = once("replication", Listed((Failure(at=23.0, lost=1), Failure(at=24.5, lost=1))), job=JOB)
    assert (outcome.failures, outcome.recoveries) == (2, 1)
    assert outcome.finished


def test_a_run_that_gets_nowhere_is_given_up_with_its_account() -> None:
    job = Job(steps=1000, step_s=1.0, workers=4, costs=Costs(restart_s=5.0))
    outcome = once("global_checkpoint", Exponential(mtbf_s=50.0), job, every=900)
    assert not outcome.finished
    assert outcome.reason.startswith("it was given up: after 20 times")
    assert 19_000 < outcome.seconds <= 20 * (1000 + 5.0)  # of a recovery, too


@pytest.mark.parametrize(
    ("job", "strategy", "failures", "seconds"),
    [
        (Job(steps=100, step_s=0.1, workers=2, costs=Costs(persist_s=5.0)), {"kind": "global_checkpoint", "every": 1}, (), 505),
        (
            Job(steps=100, step_s=0.05, workers=2, spares=0, costs=Costs(start_s=120.0)),
            {"kind": "replication"},
            (Failure(at=2.525, lost=1),),
            125.025,
        ),
    ],
    ids=["saving takes most of the time", "a single recovery does"],
)
def test_a_run_that_takes_as_long_as_it_must_is_not_given_up(
    job: Job, strategy: dict[str, Any], failures: tuple[Failure, ...], seconds: float
) -> None:
    outcome = simulate(job, Strategy(**strategy), Listed(failures))
    assert (outcome.finished, outcome.seconds) == (True, pytest.approx(seconds))


# ---------------------------------------------------------------- notices

CHANGE = PAUSE - 1.0
"""Of a planned one: nothing need be detected."""


def noticed(**more: object) -> Listed:
    """A node has notice in the middle of step 20."""
    return Listed((Failure(at=23.5, lost=1, **more),))  # pyright: ignore[reportArgumentType]


def test_who_has_notice_leaves_at_a_boundary_and_nothing_is_done_again() -> None:
    outcome = once("replication", noticed(notice_s=60.0))
    assert outcome.seconds == pytest.approx(104.5 + CHANGE)
    assert outcome.pauses == pytest.approx((0.5 + CHANGE + 1,))  # from the call to stop, over the boundary, to the next step
    assert (outcome.failures, outcome.recoveries, outcome.guarantee) == (1, 1, "exact")
    assert outcome.lost_work_s == pytest.approx(0)
    assert outcome.lost_s.get("detect", 0.0) == 0


def test_without_a_spare_training_goes_on_until_a_replacement_has_started() -> None:
    job = replace(JOB, spares=0, costs=replace(COSTS, start_s=30.0))
    outcome = once("replication", noticed(notice_s=60.0), job)
    assert outcome.seconds == pytest.approx(104.5 + CHANGE)
    assert outcome.lost_work_s == pytest.approx(0)


def test_a_notice_that_ends_before_the_step_does_is_a_loss() -> None:
    outcome = once("replication", noticed(notice_s=0.25))
    assert outcome.seconds == pytest.approx(104.5 + 0.75 + PAUSE)
    assert outcome.lost_work_s == pytest.approx(0.75)
    assert (outcome.failures, outcome.recoveries) == (1, 1)


def test_where_no_replacement_comes_the_node_is_lost_at_its_deadline() -> None:
    job = replace(JOB, spares=0, spare_nodes=0)
    outcome = once("replication", noticed(notice_s=10.0, back=1, back_s=30.0), job)
    assert outcome.lost_work_s == pytest.approx(0.5)
    gone, there = 33.5, 53.5 + 1.0  # when it is told that there is room again
    assert outcome.seconds == pytest.approx(104.5 + 0.5 + (there - gone) + PAUSE - 1.25)


def test_where_fewer_may_go_on_they_do_shortly_before_the_deadline() -> None:
    job = replace(JOB, spares=0, spare_nodes=0, min_workers=3)
    outcome = once("replication", noticed(notice_s=10.0), job)
    waited = 28  # steps: until three steps before the deadline, and to the end of the one under way
    assert outcome.seconds == pytest.approx(4.5 + waited + CHANGE - 2.0 + (100 - waited) * 4 / 3)
    assert (outcome.guarantee, outcome.lost_work_s) == ("rounding", pytest.approx(0))


def test_a_stage_without_a_replica_is_handed_over() -> None:
    job = Job(steps=100, step_s=1.0, workers=2, stages=2, costs=Costs(fill_s=2.0))
    assert once("replication", at_step(20.5), job).reason.startswith("NoSurvivorError")
    outcome = once("replication", at_step(20.5, lost=1, notice_s=30.0), job)
    assert (outcome.finished, outcome.seconds) == (True, pytest.approx(102))
    all_at_once = once("replication", at_step(20.5, lost=2, notice_s=30.0), replace(job, spares=2))
    assert (all_at_once.finished, all_at_once.seconds) == (True, pytest.approx(102))


def test_of_two_nodes_with_notice_one_leaves_with_the_only_spare_and_the_other_when_there_is_a_second() -> None:
    """The first notice has called for a stop before the second is told: that is not for nothing."""
    job = replace(JOB, costs=Costs(start_s=10.0))
    outcome = once("replication", Listed((Failure(at=23.5, lost=2, notice_s=60.0),)), job)
    assert (outcome.seconds, outcome.lost_work_s, outcome.recoveries) == (pytest.approx(100), pytest.approx(0), 2)
    assert outcome.pauses == pytest.approx((0.5 + 1, 0.5 + 1))  # each half a step to the boundary, and the next step


@pytest.mark.parametrize("kind", ["global_checkpoint", "checkfreq", "torchft"])
def test_who_does_nothing_upon_a_notice_loses_the_node_at_its_deadline(kind: str) -> None:
    by_time = [Failure(at=27.0, lost=1, notice_s=6.5), Failure(at=33.5, lost=1)]
    by_step = [Failure(step=27.0, lost=1, notice_s=3.5), Failure(step=30.5, lost=1)]
    for one, other in (by_time, by_step):
        assert once(kind, Listed((one,)), every=10) == once(kind, Listed((other,)), every=10)


@pytest.mark.parametrize("kind", ["global_checkpoint", "checkfreq", "torchft"])
def test_what_was_told_of_early_holds_up_no_loss_before_it(kind: str) -> None:
    by_time = [Failure(at=27.0, lost=1, notice_s=30.0), Failure(at=33.5, lost=1)], [(33.5, 0.0), (57.0, 0.0)]
    by_step = [Failure(step=27.0, lost=1, notice_s=30.0), Failure(step=33.5, lost=1)], [(33.5, 0.0), (57.0, 0.0)]
    for told, struck in (by_time, by_step):
        name = "step" if told[0].at is None else "at"
        plain = [Failure(**{name: when}, lost=1, notice_s=notice) for when, notice in struck]
        found = once(kind, Listed(tuple(told)), every=10)
        assert found == once(kind, Listed(tuple(plain)), every=10)
        assert found.failures == 2


# ---------------------------------------------------------------- slow workers


def slow(at: float, rank: int, factor: float, lasts_s: float) -> Failure:
    return Failure(at=at, workers=(rank,), factor=factor, lasts_s=lasts_s)


@pytest.mark.parametrize("kind", ["replication", "torchft"])
def test_every_step_waits_for_who_is_slow(kind: str) -> None:
    outcome = once(kind, Listed((slow(23.25, 1, 3.0, 10.0),)))
    assert outcome.seconds == pytest.approx(once(kind, Listed()).seconds + 10 * (1 - 1 / 3))
    assert outcome.lost_s["slowed"] == pytest.approx(10 * (1 - 1 / 3))
    assert (outcome.failures, outcome.recoveries, outcome.lost_work_s) == (1, 0, pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize("kind", ["replication", "torchft"])
def test_who_is_slow_beyond_the_end_of_the_run_holds_up_what_is_left_of_it(kind: str) -> None:
    left = JOB.useful_s - (53.0 - COSTS.begin_s)
    assert once(kind, Listed((slow(53.0, 1, 3.0, 1e6),))).lost_s["slowed"] == pytest.approx(left * (3 - 1))


def test_of_several_who_are_slow_the_slowest_counts() -> None:
    outcome = once("replication", Listed((slow(13.0, 1, 2.0, 10.0), slow(15.0, 2, 4.0, 4.0))))
    assert outcome.lost_s["slowed"] == pytest.approx(2 / 2 + 4 * 3 / 4 + 4 / 2)
    assert outcome.seconds == pytest.approx(104.5 + 6)


def test_who_replaces_a_slow_worker_is_not_slow() -> None:
    outcome = once("replication", Listed((slow(23.5, 1, 5.0, 50.0), Failure(at=28.5, workers=(1,)))))
    assert outcome.seconds == pytest.approx(104.5 + 5 * 4 / 5 + 0.5 + PAUSE)


def test_what_is_due_at_a_step_comes_when_slow_training_is_there() -> None:
    events = Failure(step=20.0, workers=(1,), factor=2.0, lasts_s=10.0), Failure(step=22.5, workers=(2,))
    outcome = once("replication", Listed(events))
    lost = 3 + 20 + 5  # when it struck; from the end of the recovery on, worker 1 is slow for the rest of its ten seconds
    rest = 3 + 20 + 10 - (lost + PAUSE)
    assert outcome.seconds == pytest.approx(104.5 + 2.5 + 0.5 + PAUSE + rest / 2)


def test_who_leaves_a_slow_run_leaves_at_its_boundary() -> None:
    outcome = once("replication", Listed((slow(20.0, 1, 4.0, 8.0), Failure(at=21.0, workers=(1,), factor=2.0, lasts_s=1.0))))
    assert outcome.lost_s["slowed"] == pytest.approx(1 * 3 / 4 + 1 / 2)  # slowed twice: the first end is the end
    leaves = once("replication", Listed((slow(23.0, 1, 4.0, 2.0), Failure(at=24.0, lost=1, notice_s=60.0))))
    assert leaves.seconds == pytest.approx(104.5 + 2 * 3 / 4 + CHANGE)
    assert leaves.pauses == pytest.approx((1.0 + 0.5 + CHANGE + 1,))


# ---------------------------------------------------------------- many runs


def test_a_large_run_takes_the_time_that_arithmetic_says() -> None:
    """SWIFT's Table 5 from its Table 4: T0 + f * (interval / 2) * t, for failures at uniform points."""
    wide = Job(steps=450_360, step_s=479.4 * 3600 / 450_360, workers=2)
    (found,) = compare(wide, [Strategy(kind="global_checkpoint", every=5004)], Uniform(), seeds=40)
    expected = 479.4 + 28 * (5004 / 2) * wide.step_s / 3600
    assert found.failures == 28
    assert found.seconds / 3600 == pytest.approx(expected, rel=0.01)


def test_the_best_interval_is_about_young_and_dalys() -> None:
    job = Job(steps=30_000, step_s=1.0, workers=2, costs=Costs(copy_s=5.0, persist_s=5.0))
    mtbf_s = 3600.0
    k, best = best_interval(job, Strategy(kind="global_checkpoint", every=100), Exponential(mtbf_s=mtbf_s), seeds=4)
    young = math.sqrt(2 * 10.0 * mtbf_s)
    assert young / 2 < k < young * 2
    swept = sweep_intervals(job, [Strategy(kind="global_checkpoint", every=1)], Exponential(mtbf_s=mtbf_s), [20, k, 3000], 4)
    assert swept.best("global_checkpoint") == (k, best)


class Unlucky:
    """Every failure takes both of two workers; in some runs the first takes their nodes, and there are no others."""

    def __init__(self, share: float) -> None:
        self.share = share

    def check(self, job: Job) -> None: ...

    def draw(self, job: Job, chance: Generator) -> Iterator[Failure]:
        if chance.random() < self.share:
            yield Failure(at=0.5, lost=2)
        yield from (Failure(at=one.at, workers=(0, 1)) for one in Exponential(mtbf_s=400.0).draw(job, chance))


def test_the_best_interval_is_that_of_the_runs_that_can_finish() -> None:
    job = Job(steps=2000, step_s=1.0, workers=2, spare_nodes=0, costs=Costs(copy_s=5.0, load_s=20.0))
    saving = Strategy(kind="global_checkpoint", every=100)
    k, best = best_interval(job, saving, Unlucky(0.5), seeds=6)
    assert (best.runs, 0 < best.finished < 6) == (6, True)
    assert 1 < k < 100
    with pytest.raises(ConfigError, match=r"best interval of global_checkpoint: no run finishes, whatever the interval: "):
        best_interval(job, saving, Unlucky(1.0), seeds=2)


def test_more_failures_take_longer() -> None:
    job = Job(steps=20_000, step_s=1.0, workers=4, costs=COSTS)
    kinds = [Strategy(kind="global_checkpoint", every=100), Strategy(kind="replication")]
    swept = sweep_failures(job, kinds, Exponential(mtbf_s=1.0), [300.0, 3000.0, 30_000.0], seeds=5)
    for summaries in swept.summaries.values():
        times = [summary.seconds for summary in summaries]
        assert times == sorted(times, reverse=True)
    pairs = zip(swept.summaries["replication"], swept.summaries["global_checkpoint"], strict=True)
    assert all(ours.seconds < theirs.seconds for ours, theirs in pairs)


def test_a_sweep_over_failures_is_of_the_whole_cluster_and_varies_a_given_number() -> None:
    job = Job(steps=20_000, step_s=1.0, workers=4, costs=COSTS)
    sources = [Exponential(mtbf_s=9.0), Exponential(mtbf_s=9.0, per="node"), Weibull(mtbf_s=9.0, per="node"), Uniform(number=9)]
    for source in sources:
        swept = sweep_failures(job, [Strategy(kind="replication")], source, [200.0, 1000.0], seeds=5)
        often, rarely = (summary.failures for summary in swept.summaries["replication"])
        assert often == pytest.approx(100, rel=0.2)
        assert rarely == pytest.approx(20, rel=0.4)


def test_failures_come_as_often_as_they_are_said_to() -> None:
    job = Job(steps=100, step_s=1.0, workers=10)
    for source in (Exponential(mtbf_s=100.0), Weibull(mtbf_s=1000.0, shape=0.6, per="node", together=(0.5, 0.5))):
        drawn = source.draw(job, default_rng(1))
        times = [next(drawn).at or 0.0 for _ in range(4000)]
        assert times == sorted(times)
        assert times[-1] / len(times) == pytest.approx(100, rel=0.1)


def test_failures_come_in_bursts_and_together_as_they_are_said_to() -> None:
    """The gaps' deviation in means is that of the distribution; of ten losses, three are of two nodes."""
    job = Job(steps=100, step_s=1.0, workers=10)
    for shape, deviation in ((1.0, 1.0), (0.6, 1.76)):
        drawn = Weibull(mtbf_s=100.0, shape=shape, together=(0.7, 0.3)).draw(job, default_rng(1))
        failures = [next(drawn) for _ in range(4000)]
        gaps = np.diff([failure.at or 0.0 for failure in failures])
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.1)
        assert sum(failure.lost == 2 for failure in failures) / len(failures) == pytest.approx(0.3, abs=0.03)
        assert {failure.lost for failure in failures} == {1, 2}


def test_nodes_are_paid_for_from_the_beginning_to_the_end_spares_too() -> None:
    """Those that are lost, until they are: five at first, then four."""
    job = replace(JOB, spares=1, spare_nodes=0, node_hour=2.0)
    calm = once("replication", Listed(), job)
    assert calm.node_hours == pytest.approx(5 * calm.seconds / 3600)
    lossy = once("replication", Listed((Failure(at=50.0, lost=1),)), job)
    assert lossy.node_hours == pytest.approx((5 * 50.0 + 4 * (lossy.seconds - 50.0)) / 3600)
    assert lossy.cost == pytest.approx(2.0 * lossy.node_hours)


def test_the_same_seed_gives_the_same_run() -> None:
    job = Job(steps=5000, step_s=1.0, workers=4, costs=COSTS)
    first, again, other = (simulate(job, Strategy(kind="replication"), Exponential(mtbf_s=200.0), seed=s) for s in (3, 3, 4))
    assert first == again
    assert first.seconds != other.seconds


# ---------------------------------------------------------------- promises


@settings(max_examples=100, derandomize=True)
@given(seed=st.integers(0, 2**32))
@example(seed=8964)  # within one recovery: back to the beginning, a step completed, and a loss before the next one
def test_every_promise_is_kept_in_troubled_runs(seed: int) -> None:
    assert troubled_run(seed).violations == ()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_promise_is_kept_in_ten_thousand_troubled_runs() -> None:
    broken = {seed: story.violations for seed in range(10_000) if (story := troubled_run(seed)).violations}
    assert broken == {}


def test_troubled_runs_go_everywhere() -> None:
    stories = [troubled_run(seed) for seed in range(240)]
    reached = {after for story in stories for _, _, after in story.edges}
    assert reached >= {State.RUNNING, State.RESIZING, State.FENCE, State.REPLACE, State.REBUILD, State.RESUME, State.FINISHED}
    used = {kind for story in stories if story.outcome for kind in story.outcome.strategies}
    assert used >= {"replication", "checkpoint", "snapshot", "logging", "lossy", "rollback", "skip"}
    assert any(story.strategy.every is None for story in stories)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Job(steps=0, step_s=1.0, workers=1), r"Job\(steps=0\): use a whole number of at least 1"),
        (lambda: Job(steps=1, step_s=math.nan, workers=1), r"step_s=nan\): use a finite number greater than 0"),
        (lambda: Job(steps=1, step_s=1.0, workers=3, stages=2), "multiple of 2"),
        (lambda: Job(steps=1, step_s=1.0, workers=4, nodes=3), "divides 4"),
        (lambda: Costs(detect_s=-1.0), r"detect_s=-1.0\): use a finite number that is not negative"),
        (lambda: Exponential(mtbf_s=0.0), r"mtbf_s=0.0\): use a finite number greater than 0"),
        (lambda: Exponential(mtbf_s=math.inf), r"mtbf_s=inf\)"),
        (lambda: Weibull(mtbf_s=1.0, shape=math.nan), r"shape=nan\)"),
        (lambda: Exponential(mtbf_s=1.0, together=(0.5, 0.6)), "add up to 1"),
        (lambda: Strategy(kind="magic"), "use one of global_checkpoint"),  # pyright: ignore[reportArgumentType]
        (lambda: Strategy(kind="global_checkpoint"), "every how many steps"),
        (lambda: Strategy(kind="lossy", label=5), r"label=5\): use text"),  # pyright: ignore[reportArgumentType]
        (lambda: sweep_intervals(JOB, TWINS, Listed(), [5], 1), "lossy is the name of another strategy too: give it a label"),
        (lambda: sweep_failures(JOB, TWINS, Exponential(mtbf_s=1.0), [9.0], 1), "lossy is the name of another"),
        (lambda: Strategy(kind="lossy", quorum=1.5), r"quorum=1.5\): use a share from 0 to 1"),
        (lambda: Strategy(kind="lossy", update="late"), "use one of barrier, wait_free"),  # pyright: ignore[reportArgumentType]
        (
            lambda: once("logging", Listed()),
            r"kind=\"logging\"\) does not go with Job\(stages=1\): use one of global_checkpoint",
        ),
        (lambda: once("lossy", Listed(), PIPELINE), r"kind=\"lossy\"\) does not go with Job\(stages=2\)"),
        (lambda: once("rollback", Listed(), PIPELINE), "does not go with"),
        (lambda: once("skip", Listed(), PIPELINE), "does not go with"),
        (lambda: once("torchft", Listed(), PIPELINE), "does not go with"),
        (lambda: once("replication", Listed(), PIPELINE, update="wait_free"), "stages update when all have finished"),
        (lambda: Failure(lost=1), "either the time"),
        (lambda: Failure(at=1.0, back=1, back_s=-1.0), r"back_s=-1.0\): use a finite number that is not negative"),
        (lambda: Failure(at=1.0, workers=(1,), notice_s=9.0), "notice_s is of nodes"),
        (lambda: Failure(at=1.0, lost=1, notice_s=-1.0), r"notice_s=-1.0\): use a finite number that is not negative"),
        (lambda: Failure(at=1.0, workers=(1,), factor=0.5), r"factor=0.5\): use a finite number of at least 1"),
        (lambda: Failure(at=1.0, lost=1, factor=2.0, lasts_s=1.0), "say which workers"),
        (lambda: Failure(at=1.0, workers=(1,), lasts_s=1.0), "how many times slower"),
        (lambda: at_step(5, 4), "failure 2: 4 comes after 5"),
        (lambda: once("replication", at_step(5, lost=9)), "9 nodes are lost at once, and the job has 4"),
        (lambda: once("replication", at_step(5, workers=(7,))), "worker 7 is lost, and the job has workers 0 to 3"),
        (lambda: once("replication", at_step(500)), "step 500 of 100"),
        (lambda: once("replication", Exponential(mtbf_s=1.0, together=(0.0,) * 4 + (1.0,))), "5 nodes cannot be lost"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds,change\n10,-1\n5,1\n", "line 3: 5 comes after 10"),
        ("seconds,change\n10,-1\ninf,1\n", "line 3: 'inf,1': the time is finite"),
        ("seconds,change\nten,-1\n", "line 2: 'ten,-1': use seconds and a whole number of nodes"),
        ("seconds,change\n10,-1\n20,0\n", "line 3: '20,0'"),
        ("seconds,change\n10,-99\n", "line 2: 99 nodes are lost at once, and the job has 4"),
        ("time,nodes\n10,-1\n", "line 1: 'time,nodes': the first line is seconds,change"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        once("replication", SpotTrace.read(path))


def test_a_spot_trace_is_followed_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,change\n10,-1\n20,1\n")
    job = Job(steps=100, step_s=1.0, workers=4, spares=0, spare_nodes=0, min_workers=2, costs=Costs())
    outcome = once("replication", SpotTrace.read(path, cycle=30.0), job)
    assert outcome.finished
    assert outcome.failures == math.ceil((outcome.seconds - 10) / 30)


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    exec(text.split("```python\n")[1].split("```")[0], {})
    ours, theirs = capsys.readouterr().out.split(" h")[:2]
    assert float(ours) < float(theirs.strip(", "))
