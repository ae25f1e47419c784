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


def test_at_most_as_many_are_under_way_as_stages_follow() -> None:
    for stage in range(4):
        under_way = most = 0
        for action in order("1f1b", stage, 4, 16):
            under_way += 1 if action.kind == "forward" else -1
            most = max(most, under_way)
        assert most == 4 - stage


def test_fewer_micro_batches_than_stages_work_too() -> None:
    assert [a.kind for a in order("1f1b", 0, 4, 1)] == ["forward", "backward"]
