"""The order in which a stage works on the micro-batches of a step. Pure.

Both schedules flush the pipeline in every step, so that training is synchronous (SWIFT, section 2.1): with p stages and m
micro-batches, a stage is idle for (p - 1) / (m + p - 1) of the step. They are the orders of torch.distributed.pipelining, which
the tests compare them with. A replay follows the same order, so its sums are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["1f1b", "gpipe"]
SCHEDULES = get_args(Schedule)
MOST_MICRO_BATCHES = 4096
"""Of a step and replica."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a stage does: the forward or the backward pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def order(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What stage `stage` of `stages` does in a step, one after the other.

    "gpipe" does all forward passes first; "1f1b" (PipeDream-Flush) has at most `stages - stage` micro-batches under way, which
    bounds the memory for activations.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    actions = [Action("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(Action("backward", number))
        if ahead + number < micro_batches:
            actions.append(Action("forward", ahead + number))
    return tuple(actions)
