"""What earlier runs of this name left in their records: the last incarnation, and when everybody went back."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from raytrain_ft.errors import StorageError
from raytrain_ft.policy.lineage import Return, Returns, telling
from raytrain_ft.runtime.event_log import each_record, earlier_logs
from raytrain_ft.runtime.spec import RunSpec

RECORDS_S, AGAIN_S = 10.0, 1.0
"""How long records that cannot be read are tried again, and how often."""


def after_earlier_runs(spec: RunSpec) -> RunSpec:
    """The same run as one that follows the others of its name, none of which may be about to end any more.

    Raises:
        StorageError: what they have recorded cannot be read. A run that did not know of them would begin with incarnations that
            there were, and a later one take its checkpoints for what an earlier one had left behind.
    """
    deadline = time.monotonic() + RECORDS_S
    while True:
        try:
            incarnation, returns = earlier_runs(spec.directory)
            return replace(spec, incarnation=incarnation, returns=returns)
        except OSError as error:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{spec.directory}: the records of earlier runs of this name cannot be read, and this one must go on from "
                    f"them: {error}. Look at the mount and the permissions of its file system and run the job again, or choose "
                    "another RunConfig(name=...)"
                ) from error
        time.sleep(AGAIN_S)


def earlier_runs(directory: Path) -> tuple[int, tuple[Return, ...]]:
    """The last incarnation of earlier runs of this name, for later ones have greater numbers, in records and checkpoints; and
    when everybody went back in them, as far as that tells which of their checkpoints are of the training that went on.

    Every run begins its log with what it knows of those before it, so mostly only the last one is read.

    Raises:
        OSError: a log cannot be read.
    """
    last = 0
    returns: list[Return] = []
    for log in reversed([*earlier_logs(directory), directory / "events.jsonl"]):
        before, latest, own = _one_run(log)
        last, returns = max(last, latest), [*own, *returns]
        if before is not None:
            return max(last, before[0]), telling([*before[1], *returns])
    return last, telling(returns)


def _one_run(log: Path) -> tuple[tuple[int, list[Return]] | None, int, list[Return]]:
    """What a run knew of those before it, if it came to say so; its last incarnation; and when everybody went back in it."""
    before: tuple[int, list[Return]] | None = None
    last, returns = 0, Returns()
    with suppress(FileNotFoundError):
        for record in each_record(log, lambda error: warnings.warn(f"{error}: it is passed over", stacklevel=6)):
            incarnation = record.get("incarnation")
            last = max(last, incarnation) if isinstance(incarnation, int) else last
            returns.take(record)
            match record:
                case {"event": "RunStarted", "incarnation": int(earlier), "returns": list(known)}:
                    before = earlier, [Return(one["incarnation"], one["step"]) for one in known]
    return before, last, returns.all
