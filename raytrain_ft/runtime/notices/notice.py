"""What a notice is, and what every source of notices offers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from raytrain_ft.policy.leaving import REQUEST, SIGTERM

NODE_STAYS = frozenset({SIGTERM, REQUEST})
"""Sources that speak of a process, and not of its node."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Somebody will take this node, or this process, away.

    Attributes:
        deadline_s: seconds that are left, 0 or more.
        source: who says so, "aws spot" for example.
        reason: in words.
        replaced: whether another worker is to take the place.
    """

    deadline_s: float
    source: str
    reason: str
    replaced: bool = True


@dataclass(frozen=True, slots=True)
class NoticeSpec:
    """Which notices a run heeds.

    Attributes:
        clouds: whose metadata services workers ask.
        detect: first find out which of them there is.
        drain: heed Ray's own drain of a node.
        grace_s: how long a worker goes on after SIGTERM; None leaves the signal to Ray, which ends the process.
    """

    clouds: tuple[str, ...]
    detect: bool
    drain: bool
    grace_s: float | None


class Source(Protocol):
    """Where notices come from. Every call returns within a deadline of its own."""

    name: str

    def detect(self) -> bool:
        """Whether this is a machine of this cloud."""
        ...

    def poll(self) -> list[Notice]:
        """What stands now.

        Raises:
            MetadataError: no answer in time, or none that can be believed.
        """
        ...


def seconds_until(moment: datetime, most: float) -> float:
    """Seconds from now until a moment that a cloud named, within [0, most]: clocks differ, and services are wrong at times."""
    return min(max((moment - datetime.now(UTC)).total_seconds(), 0.0), most)
