"""How far back the log of what crosses between stages reaches: from which checkpoints a lost stage can be replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from raytrain_ft.policy import messages as m


@dataclass(slots=True)
class LogCover:
    """What the log covers.

    Attributes:
        boundaries: between stages that are logged, each named by the stage before it.
        since: the step from which on the log is complete for the present world; None if it is not.
        revived: the step from which on a log that had broken off is whole again, if it is known.
        incarnation: records of earlier ones are of another world, and count no more.
        rounded: since a checkpoint of an earlier step than this, a stage was replayed with sums in another order: from there, a
            replay may compute other bits than were logged.
        torn: stages of which something that they sent is missing, and the step from which on all is there again: a worker was
            lost and filled from a replica, or has left, and what it had not written yet nobody logs again; or a boundary beside
            was not logged before.
    """

    boundaries: frozenset[int] = frozenset()
    since: int | None = None
    revived: int | None = None
    incarnation: int = 0
    rounded: int = 0
    torn: dict[int, int] = field(default_factory=dict)

    def begin(self, step: int, incarnation: int) -> None:
        """It begins anew, with this step of this incarnation."""
        self.since, self.revived = step, None
        self.incarnation, self.rounded, self.torn = incarnation, 0, {}

    def goes_on(self, step: int, torn: Collection[int], replayed: Collection[int]) -> None:
        """It goes on with this step. Of what the stages `torn` sent before something is missing; those `replayed` log all of it
        again."""
        self.torn |= dict.fromkeys(torn, step)
        for stage in replayed:
            self.torn.pop(stage, None)

    def torn_since(self, step: int) -> frozenset[int]:
        """Stages of which something that they sent in this step or later may be missing."""
        return frozenset(stage for stage, whole in self.torn.items() if whole > step)

    def broke_off(self) -> None:
        """Some of it is missing."""
        self.since = self.revived = None

    def trimmed(self, step: int, reached: int) -> None:
        """A checkpoint of `step` is durable, so nothing before it is needed; steps are committed up to `reached`."""
        if self.since is not None:
            self.since = max(self.since, step)
        elif self.revived is None:  # it broke off; the trimming that follows revives it, from one of the next steps on
            self.revived = max(reached, step) + 2
        elif step >= self.revived:
            self.since = step

    def source(self, stored: Iterable[m.Stored], rejected: Collection[str], until: int) -> m.Stored | None:
        """The checkpoint to replay from, up to step `until`: the newest that the log reaches back to; a checkpoint without a
        name is the beginning of the run. None if there is none."""
        since = self.since
        if since is None:
            return None
        usable = [one for one in stored if one.name not in rejected and since <= one.step <= until]
        return max(usable, key=lambda one: one.step, default=m.Stored("", 0) if since == 0 else None)
