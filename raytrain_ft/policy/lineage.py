"""Of which training a checkpoint is: of the one that goes on, or of one that everybody has gone back from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_ft.policy.strategy import GOING_BACK

MOST_RETURNS = 1000
"""Returns that a run is told of. Of those that say something, each went back to a later checkpoint than the one before it: what
none of the newest says is of checkpoints that are older than so many others."""


@dataclass(frozen=True, slots=True)
class Return:
    """Everybody went back to where `step` steps were committed, and went on from there in `incarnation`."""

    incarnation: int
    step: int


@dataclass(slots=True)
class Returns:
    """The returns of one run, read from its log line by line.

    Where training goes on for the first time after it was looked for checkpoints, everybody has gone back. The account of that
    recovery need not say so: it may have been interrupted once more, and then has what was done last. Nor does it matter that
    nobody went back after all, though it was looked: of what an earlier incarnation stored beyond where a later one went on,
    nothing is of the training that the audit follows. Only of a run that ended before it went on does the account tell.

    Nobody looks before a run has trained: if it cannot load what it was to begin from, it goes on from an older checkpoint.

    Attributes:
        all: so far.
    """

    all: list[Return] = field(default_factory=list)
    _looked: int | None = None  # in which incarnation, if training has not gone on since
    _rejected: bool = False  # a checkpoint could not be loaded, and training has not gone on since

    def take(self, record: dict[str, Any]) -> None:
        """The next line."""
        match record:
            case {"event": "CheckpointsFound", "incarnation": int(incarnation)}:
                self._looked = incarnation
            case {"event": "CheckpointRejected"}:
                self._rejected = True
            case {"event": "Resumed", "incarnation": int(incarnation), "step": int(step)}:
                if self._looked is not None or self._rejected:
                    self.all.append(Return(incarnation, step))
                self._looked, self._rejected = None, False
            case {"event": "Recovery", "strategy": how, "step": int(step)} if self._looked is not None and how in GOING_BACK:
                self.all.append(Return(self._looked, step))


def stands(incarnation: int, step: int, returns: Iterable[Return]) -> bool:
    """Whether what an incarnation stored after so many steps is of the training that goes on (incarnation 0: nobody knows).

    A checkpoint that is being written as everybody goes back to the one before may be committed all the same. What happened in
    steps after the older one, samples lost or sums that were rounded, has been struck from the run's record since.
    """
    return not incarnation or all(incarnation >= one.incarnation or step <= one.step for one in returns)


def telling(returns: Sequence[Return]) -> tuple[Return, ...]:
    """Of these returns, in their order, the newest that say of a checkpoint what no later one says: by the others, nothing
    `stands` or falls. Where everybody goes back often there are thousands, and a run is told of them as it starts."""
    kept: list[Return] = []
    for one in reversed(returns):
        if not any(later.incarnation >= one.incarnation and later.step <= one.step for later in kept):
            kept.append(one)
        if len(kept) == MOST_RETURNS:
            break
    return tuple(reversed(kept))
