"""What came of one run, as whoever struck it saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from raytrain_ft.errors import FTError
from raytrain_ft.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """Something that was done to a run.

    Attributes:
        event: number of the scenario's event. action: of it. members: who was struck; () if it was nobody.
        at: seconds since the run began (see `Played.offsets`). step: the last one known to be committed then.
        note: what else there is to say.
    """

    event: int
    action: str
    at: float
    step: int
    members: tuple[str, ...] = ()
    node: str = ""
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of one run.

    Attributes:
        path: its records. result: None if it failed. error: why.
        offsets: of each life of the supervisor, what to add to the times in its records for the driver's clock. Seconds; the
            first is 0, and so are the others, nearly, as long as the supervisor comes back on the same machine.
        missed: the numbers of events that did not come about. absent: those of events at random that never came.
        dropped: how often an event at random came when it could not strike; it is not tried again.
    """

    path: Path
    result: Result | None = None
    error: FTError | None = None
    struck: list[Struck] = field(default_factory=list)
    offsets: list[float] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    dropped: int = 0
