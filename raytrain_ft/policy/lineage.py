"""Of which training a checkpoint is: of the one that goes on, or of one that everybody has gone back from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Return:
    """Everybody went back to where `step` steps were committed, and went on from there in `incarnation`."""

    incarnation: int
    step: int


def stands(incarnation: int, step: int, returns: Iterable[Return]) -> bool:
    """Whether what an incarnation stored after so many steps is of the training that goes on (incarnation 0: nobody knows).

    A checkpoint that is being written as everybody goes back to the one before may be committed all the same. What happened in
    steps after the older one, samples lost or sums that were rounded, has been struck from the run's record since.
    """
    return not incarnation or all(incarnation >= one.incarnation or step <= one.step for one in returns)
