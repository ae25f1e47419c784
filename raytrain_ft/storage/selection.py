"""Which of the checkpoints in a directory a run may go on from.

A run that was told to begin anew where there were some leaves a note: from then on only checkpoints of its own epoch and later
ones count, also in the launches after it, which no longer say so. Those of before lie there until new ones take their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from raytrain_ft.errors import NoCheckpointError, StorageError
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage import manifest as manifests
from raytrain_ft.storage.filesystem import Storage
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.small import read_small

BEGUN_FILE = "begun.json"
"""Says from which writer's epoch on checkpoints count."""
MOST_REASONS = 4
"""Checkpoints that cannot be read of which an error says why: the newest."""


def begin_anew(storage: Storage, epoch: int) -> None:
    """From now on only checkpoints of writers from `epoch` on count."""
    if checkpoint.names(storage):
        storage.put(BEGUN_FILE, [memoryview(json.dumps({"epoch": epoch}).encode())])


def begun(storage: Storage) -> int:
    """From which writer's epoch on checkpoints count.

    Raises:
        StorageError: the note of a new beginning is damaged.
    """
    note = read_small(storage, BEGUN_FILE)
    if note is None:
        return 0
    with suppress(ValueError, RecursionError):
        match json.loads(note):
            case {"epoch": int(epoch)}:
                return epoch
    raise StorageError(f"{storage.uri}/{BEGUN_FILE} is damaged: remove it to go on from the newest checkpoint")


def counting(storage: Storage) -> list[Name]:
    """The complete checkpoints that count, newest first.

    Raises:
        StorageError: the note of a new beginning is damaged.
    """
    first = begun(storage)
    return [found.name for found in checkpoint.found(storage) if found.complete and found.name.epoch >= first]


def _attempt(storage: Storage, name: Name) -> tuple[Name, Manifest | StorageError] | None:
    """Its manifest, or why that cannot be read; None if it is not complete.

    Raises:
        StorageError: it cannot be told whether it is.
    """
    if storage.size(f"{name}/{manifests.FILE}") is None:
        return None
    try:
        return name, checkpoint.patiently(lambda: checkpoint.read_manifest(storage, name))
    except StorageError as error:
        return name, error


def select(storage: Storage, warn: Callable[[str], None]) -> Iterator[Manifest]:
    """Manifests of those, newest first; whoever has enough of them leaves off, and the others are not looked at. If none can be
    read, perhaps a newer one has taken their place meanwhile: as long as there are others than before, it looks again.

    Args:
        warn: is told of each one that is passed over because it is damaged.

    Raises:
        NoCheckpointError: there are some, and no manifest can be read: to whoever reads this, that must not look like none.
        StorageError: the note of a new beginning is damaged.
    """
    while True:
        first, readable = begun(storage), False
        passed: dict[Name, str] = {}
        there = [name for name in checkpoint.names(storage) if name.epoch >= first]
        for name, found in filter(None, checkpoint.side_by_side(partial(_attempt, storage), there)):
            if isinstance(found, StorageError):
                passed[name] = f"checkpoint {name} is passed over: {found}"
                warn(passed[name])
            else:
                readable = True
                yield found
        if readable:
            return
        now = counting(storage)
        if not now and not passed:
            return
        if not now or now == [*passed]:
            reasons = "; ".join([*passed.values()][:MOST_REASONS])
            raise NoCheckpointError(f"{storage.uri}: no checkpoint can be read; {reasons}")
