"""How far back the log of what crosses between stages reaches: from which checkpoints a lost stage can be replayed."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from raytrain_ft.policy import messages as m


@dataclass(slots=True)
class LogCover:
    """What the log covers.

    Attributes:
        boundaries: between stages that are logged, each named by the stage before it.
        start: the step from which on the log is complete for the present world, but for those who have `broken` off.
        broken: members whose own log has, and who have not told yet from which step on it is whole again. Nobody else knows: it
            takes records again when it hears of a checkpoint, which may be long after the supervisor did.
        incarnation: records of earlier ones are of another world, and count no more.
        rounded: since a checkpoint of an earlier step than this, a stage was replayed with sums in another order: from there, a
            replay may compute other bits than were logged.
        torn: stages of which something that they sent is missing, and the step from which on all is there again: a worker was
            lost and filled from a replica, or has left, and what it had not written yet nobody logs again; or a boundary beside
            was not logged before.
    """

    boundaries: frozenset[int] = frozenset()
    start: int = 0
    broken: set[str] = field(default_factory=set)
    incarnation: int = 0
    rounded: int = 0
    torn: dict[int, int] = field(default_factory=dict)

    @property
    def since(self) -> int | None:
        """The step from which on the log is complete; None if it is not."""
        return None if self.broken else self.start

    def begin(self, step: int, incarnation: int) -> None:
        """It begins anew, with this step of this incarnation."""
        self.start, self.broken = step, set()
        self.incarnation, self.rounded, self.torn = incarnation, 0, {}

    def goes_on(self, step: int, torn: Collection[int], replayed: Collection[int], there: Container[str]) -> None:
        """It goes on with this step. Of what the stages `torn` sent before something is missing; those `replayed` log all of it
        again. Those who had broken off and are not `there` any more never tell: who takes their places logs from here on."""
        self.torn |= dict.fromkeys(torn, step)
        for stage in replayed:
            self.torn.pop(stage, None)
        for member in [member for member in self.broken if member not in there]:
            self.whole_again(member, step)

    def torn_since(self, step: int) -> frozenset[int]:
        """Stages of which something that they sent in this step or later may be missing."""
        return frozenset(stage for stage, whole in self.torn.items() if whole > step)

    def broke_off(self, member: str) -> None:
        """Some of what this one logs is missing."""
        self.broken.add(member)

    def whole_again(self, member: str, step: int) -> None:
        """From this step on, all that this one sends is logged again."""
        if member in self.broken:
            self.broken.remove(member)
            self.begins_with(step)

    def begins_with(self, step: int) -> None:
        """Of the steps before this one something is not there, or not needed."""
        self.start = max(self.start, step)

    def source(self, stored: Iterable[m.Stored], rejected: Collection[str], until: int) -> m.Stored | None:
        """The checkpoint to replay from, up to step `until`: the newest that the log reaches back to; a checkpoint without a
        name is the beginning of the run. None if there is none."""
        since = self.since
        if since is None:
            return None
        usable = [one for one in stored if one.name not in rejected and since <= one.step <= until]
        return max(usable, key=lambda one: one.step, default=m.Stored("", 0) if since == 0 else None)
