"""The order in which a stage works on the micro-batches of a step. Pure.

All schedules flush the pipeline in every step, so that training is synchronous (SWIFT, section 2.1): with p stages and m
micro-batches, a stage is idle for (p - 1) / (m + p - 1) of the step, or less with "zero_bubble". They are the orders of
torch.distributed.pipelining, which the tests compare them with. A replay follows the same order, so its sums are the same to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe", "zero_bubble"]
MOST_MICRO_BATCHES = 4096
"""Of a step and replica."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a stage does: the forward or the backward pass of one micro-batch; or, of the latter, only the gradients
    of the stage's inputs, or only those of its weights.

    Attributes:
        number: of the micro-batch. A stage of several chunks numbers its passes: n of chunk c is c * micro-batches + n.
    """

    kind: Literal["forward", "backward", "backward_input", "backward_weight"]
    number: int


def order(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """What stage `stage` of `stages` does in a step, one after the other.

    "gpipe" does all forward passes first; "1f1b" (PipeDream-Flush) has at most `stages - stage` micro-batches under way, which
    bounds the memory for activations. "zero_bubble" (ZB-H1 in Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24) sends the
    gradients of its inputs on before it computes those of its weights, which fill what would be bubbles.

    With several chunks of layers per stage, each for another round through the pipeline, these are the looped GPipe, the
    interleaved 1F1B (Narayanan et al., SC'21) and ZB1P.
    """
    if schedule == "gpipe":
        return _forward_first(micro_batches, chunks)
    if schedule == "zero_bubble" or chunks > 1:
        return _interleaved(stage, stages, micro_batches, chunks, in_parts=schedule == "zero_bubble")
    ahead = min(micro_batches, stages - stage)
    actions = [Action("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(Action("backward", number))
        if ahead + number < micro_batches:
            actions.append(Action("forward", ahead + number))
    return tuple(actions)


def _forward_first(micro_batches: int, chunks: int) -> tuple[Action, ...]:
    forward = [Action("forward", number) for number in range(chunks * micro_batches)]
    back = [chunk * micro_batches + number for chunk in reversed(range(chunks)) for number in range(micro_batches)]
    return (*forward, *(Action("backward", number) for number in back))


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int, *, in_parts: bool) -> tuple[Action, ...]:
    """Some micro-batches go through a chunk, then through the next one; so do their backward passes, from the last chunk on.

    In parts, the later the stage, the longer its weights wait. Whose inputs nobody computes has whole backward passes.
    """
    rounds = max(n for n in range(1, max(1, micro_batches // stages) + 1) if micro_batches % n == 0)
    together, total = micro_batches // rounds, chunks * micro_batches
    ahead = min(total, (chunks - 1) * together + (1 if in_parts else 2) * (stages - 1 - stage))
    there = [_pass(place, together, chunks, micro_batches) for place in range(total)]
    back = [_pass(place, together, chunks, micro_batches, from_the_last=True) for place in range(total)]
    actions = [Action("forward", number) for number in there[:ahead]]
    for place, number in enumerate(back):
        actions += [Action("forward", following) for following in there[ahead + place : ahead + place + 1]]
        if not in_parts or (stage == 0 and number < micro_batches):
            actions.append(Action("backward", number))
        else:
            actions.append(Action("backward_input", number))
        actions += _weights(
            back[place - stage : place - stage + 1] if in_parts and place >= stage else [], stage, micro_batches
        )
    return (*actions, *_weights(back[max(0, total - stage) :] if in_parts else [], stage, micro_batches))


def _pass(place: int, together: int, chunks: int, micro_batches: int, *, from_the_last: bool = False) -> int:
    """The number of the pass at this place in a stage's sequence."""
    round_of, rest = divmod(place, together * chunks)
    chunk, within = divmod(rest, together)
    return (chunks - 1 - chunk if from_the_last else chunk) * micro_batches + round_of * together + within


def _weights(numbers: list[int], stage: int, micro_batches: int) -> list[Action]:
    return [Action("backward_weight", number) for number in numbers if stage > 0 or number >= micro_batches]
