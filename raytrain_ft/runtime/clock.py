"""The clock of a run's records: seconds since it began, which go on while its supervisor is away. And the one of its deadlines,
which stands still while it is held up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SLICE_S = 0.5
"""Whose end comes later than that by as much again was slept through by the whole process, not only by who waits."""


def origin(began: float) -> dict[str, Any]:
    """What a supervisor that is started again needs to know. `began`: `time.monotonic()` at the run's beginning."""
    return {"boot": _boot(), "monotonic": began, "wall": time.time() - (time.monotonic() - began)}


def began(origin: Any, last: float, most_away: float) -> float:
    """`time.monotonic()` at the run's beginning, as of this process.

    Exact on the machine where the run began. Elsewhere, or after a boot, it is the time of day that tells how long the
    supervisor was away: clocks differ, so no longer than it could have been, and never less than not at all.

    Args:
        origin: as recorded; anything else is an absence of no time.
        last: seconds of the latest record. most_away: seconds that the run's workers go on without a supervisor.
    """
    now = time.monotonic()
    try:
        if origin["boot"] and origin["boot"] == _boot():
            return min(float(origin["monotonic"]), now - last)
        away = time.time() - float(origin["wall"]) - last
    except (TypeError, KeyError, ValueError):
        away = 0.0
    return now - last - min(max(away, 0.0), most_away)


async def run_for(seconds: float) -> None:
    """Waits until this process has run for so long. While it was held up (stopped, or on a machine that was), others went on,
    and what they said is still to be read: that time does not count, nor does it end the wait at once."""
    late = 0.0
    while seconds > 0:
        began, piece = time.monotonic(), min(seconds, SLICE_S)
        await asyncio.sleep(piece)
        late = time.monotonic() - began - piece
        seconds -= piece + (late if late <= SLICE_S else 0.0)
    if late > SLICE_S:
        await asyncio.sleep(SLICE_S)


def _boot() -> str:
    """What tells one boot of one machine from all others; empty where that is not known."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
