"""The order of a stage's work is that of torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from raytrain_ft.policy.schedule import Action, order

CLASSES = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 4), (4, 4), (4, 9)])
def test_the_order_is_torchs(schedule: Any, stages: int, micro_batches: int) -> None:
    theirs: Any = object.__new__(CLASSES[schedule])
    theirs._num_stages, theirs._n_microbatches = stages, micro_batches
    theirs._stage = SimpleNamespace(num_stages=stages, group_size=stages)
    pipeline_order = theirs._get_pipeline_order()
    for stage in range(stages - (schedule == "1f1b")):  # torch 2.13 counts the last one's forward passes from 1 there
        actions = [action for action in pipeline_order[stage] if action is not None]
        found = [
            Action("forward" if action.computation_type == schedules.FORWARD else "backward", action.microbatch_index)
            for action in actions
            if action.computation_type in (schedules.FORWARD, schedules.FULL_BACKWARD)
        ]
        assert list(order(schedule, stage, stages, micro_batches)) == found


KINDS = {
    schedules.FORWARD: "forward",
    schedules.FULL_BACKWARD: "backward",
    schedules.BACKWARD_INPUT: "backward_input",
    schedules.BACKWARD_WEIGHT: "backward_weight",
}
LOOPED = {"1f1b": schedules.ScheduleInterleaved1F1B, "zero_bubble": schedules.ScheduleInterleavedZeroBubble}


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 2), ("1f1b", 3), ("zero_bubble", 1), ("zero_bubble", 2)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 4), (4, 4), (4, 8), (4, 10), (4, 1), (4, 2)])
def test_the_order_of_chunks_is_torchs(schedule: Any, stages: int, micro_batches: int, chunks: int) -> None:
    theirs: Any = object.__new__(LOOPED[schedule])
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = stages, chunks, micro_batches
    theirs.number_of_rounds = max(1, micro_batches // stages)
    theirs.microbatches_per_round = micro_batches // theirs.number_of_rounds
    for stage in range(stages):
        theirs.rank = stage
        actions = [action for action in theirs._calculate_single_rank_operations(stage) if action is not None]
        found = [
            Action(KINDS[a.computation_type], a.stage_index // stages * micro_batches + a.microbatch_index)  # pyright: ignore
            for a in actions
        ]
        if stage == 0:  # the gradients of the model's inputs are nobody's: both parts of these passes are one
            whole = [a for a in found if not (a.kind == "backward_input" and a.number < micro_batches)]
            parts = ("backward_weight", "backward")
            found = [Action("backward", a.number) if a.kind in parts and a.number < micro_batches else a for a in whole]
        assert list(order(schedule, stage, stages, micro_batches, chunks)) == found


def idle(schedule: Any, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Of the last stage to end, how long it was idle, if a chunk's pass takes 1 and its whole backward pass 2.

    AssertionError: stages wait for each other for ever.
    """
    times = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
    waiting = {stage: list(order(schedule, stage, stages, micro_batches, chunks)) for stage in range(stages)}
    for actions in waiting.values():
        kinds = [("b" if a.kind == "backward_input" else a.kind[0] + a.kind[-1], a.number) for a in actions]
        assert len(set(kinds)) == len(kinds)
        assert {a.number for a in actions if a.kind == "forward"} == set(range(micro_batches * chunks))
    now: dict[int, int] = dict.fromkeys(range(stages), 0)
    done: dict[tuple[str, int, int], int] = {}  # by kind, part of the model, micro-batch
    while any(waiting.values()):
        before = sum(len(actions) for actions in waiting.values())
        for stage, actions in waiting.items():
            while actions:
                kind, (chunk, number) = actions[0].kind, divmod(actions[0].number, micro_batches)
                part = chunk * stages + stage
                needs = {"forward": [("f", part - 1, number)] if part else [], "backward_weight": [("b", part, number)]}.get(
                    kind, [("f", part, number), *([("b", part + 1, number)] if part + 1 < stages * chunks else [])]
                )
                if not all(need in done for need in needs):
                    break
                now[stage] = max([now[stage], *(done[need] for need in needs)]) + times[kind]
                done["f" if kind == "forward" else "w" if kind == "backward_weight" else "b", part, number] = now[stage]
                actions.pop(0)
        assert sum(len(actions) for actions in waiting.values()) < before, "all wait for each other"
    return max(now.values()) - 3 * micro_batches * chunks


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_a_third_of_the_idle_time_is_left(micro_batches: int) -> None:
    assert idle("1f1b", 4, micro_batches) == idle("gpipe", 4, micro_batches) == 9
    assert idle("zero_bubble", 4, micro_batches) == 3


@pytest.mark.parametrize("chunks", [2, 4])
def test_with_chunks_the_pipeline_fills_sooner(chunks: int) -> None:
    """A chunk takes a part of the time of a stage, so what is idle is that part of what it was."""
    assert idle("1f1b", 4, 8, chunks) == 9
    assert idle("zero_bubble", 4, 8, chunks) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_nobody_waits_for_ever(schedule: Any) -> None:
    for stages in range(2, 6):
        for micro_batches in range(1, 14):
            for chunks in range(1, 4):
                idle(schedule, stages, micro_batches, chunks)


def test_at_most_as_many_are_under_way_as_stages_follow() -> None:
    for stage in range(4):
        under_way = most = 0
        for action in order("1f1b", stage, 4, 16):
            under_way += 1 if action.kind == "forward" else -1
            most = max(most, under_way)
        assert most == 4 - stage


def test_fewer_micro_batches_than_stages_work_too() -> None:
    assert [a.kind for a in order("1f1b", 0, 4, 1)] == ["forward", "backward"]
