"""What a dataset looks like: a few numbers about a few of its samples, to tell it from another one of the same length.

Another processor, or another version of a decoder, may give a picture other last bits. So what was measured (real numbers, the
bytes of pictures, sound) need only be alike; what was counted or named (labels, tokens, shapes) must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

TOLERANCE = 0.01
"""Of the root mean square: far above rounding, and far below what two different pictures, texts or tables have in common."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """One sample.

    Attributes:
        exact: a digest of what must be the same; what is before ":" says how it was made.
        count, mean, rms: how many values were measured, their mean, and the root of the mean of their squares.
    """

    exact: str
    count: int
    mean: float
    rms: float


def as_records(sketches: Iterable[Sketch]) -> list[list[Any]]:
    """As a checkpoint holds them."""
    return [list(astuple(sketch)) for sketch in sketches]


def of_records(records: Any) -> tuple[Sketch, ...]:
    """Back from a checkpoint.

    Raises:
        ValueError: these are none.
    """
    if not isinstance(records, list):
        raise ValueError(f"{records!r:.200} are no sketches of samples")
    return tuple(_of_record(record) for record in records)


def _of_record(record: Any) -> Sketch:
    match record:
        case [str(exact), int(count), int() | float() as mean, int() | float() as rms] if all(map(math.isfinite, (mean, rms))):
            return Sketch(exact, count, float(mean), float(rms))
    raise ValueError(f"{record!r:.200} is no sketch of a sample")


def unlike(there: Sequence[Sketch], here: Sequence[Sketch]) -> str:
    """How the first sample that is another one differs. Empty if they are alike, or nothing is known of one side that can be
    compared with the other."""
    for number, (one, other) in enumerate(zip(there, here, strict=False)):
        if one.exact.rpartition(":")[0] != other.exact.rpartition(":")[0]:
            return ""
        if (one.exact, one.count) != (other.exact, other.count):
            return f"of the samples that were compared, number {number} has other labels, integers or shapes"
        bound = TOLERANCE * max(one.rms, other.rms)
        if abs(one.mean - other.mean) > bound or abs(one.rms - other.rms) > bound:
            return (
                f"of the samples that were compared, number {number} has mean {one.mean:.4g} and root mean square "
                f"{one.rms:.4g} there, {other.mean:.4g} and {other.rms:.4g} here"
            )
    return ""
