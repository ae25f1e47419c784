"""Which checkpoints stay, and what becomes of those that broke off.

One is deleted only after the next is committed. The last but one is what a reader falls back to when the last is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress

from raytrain_ft.errors import StorageError
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage import manifest as manifests
from raytrain_ft.storage.checkpoint import Found
from raytrain_ft.storage.filesystem import PARTIAL, Storage
from raytrain_ft.storage.manifest import Name

KEEP_ALL = sys.maxsize
"""How many stay if none is deleted."""
LOOKED_BACK = 16
"""What broke off before so many complete ones has been seen to when they were new. There may be thousands."""
_kept: set[tuple[str, Name]] = set()
"""Those that were seen to be marked as kept: a manifest does not change."""


def retain(
    storage: Storage,
    committed: Name,
    keep: int,
    rejected: Collection[str] = (),
    begun: int | None = None,
    unread: Collection[str] = (),
) -> list[Name]:
    """Deletes what is not needed any more now that `committed` is durable; returns what was deleted.

    The newest `keep` complete ones stay, and those marked as kept. What is incomplete and older broke off. The manifest
    goes first, so that what is left when this breaks off is no checkpoint.

    Args:
        rejected: those that were found to be damaged: they are nothing to fall back to, and do not count.
        begun: the step at which the incarnation of `committed` began. What older ones stored beyond it is of a training that
            everybody has gone back from, and does not count either.
        unread: those that could not be read. They do not count, because what was gone on from instead must stay; but they stay,
            because they may be whole.

    Raises:
        StorageError: some could not be deleted; all others are.
    """
    names = [name for name in checkpoint.names(storage) if name <= committed]
    candidates = _newest(storage, names) if keep >= KEEP_ALL else [*checkpoint.looked_at(storage, names)]
    complete = [candidate.name for candidate in candidates if candidate.complete and candidate.name != committed]
    void = {str(name) for name in complete if begun is not None and _is_void(name, committed, begun)}
    stay = {committed} | _staying(storage, complete, keep - 1, {*rejected, *void, *unread})
    stay |= {name for name in complete if str(name) in unread and str(name) not in void}
    gone, errors = [], []
    for name in (candidate.name for candidate in candidates if candidate.name not in stay):
        try:
            storage.delete(f"{name}/{manifests.FILE}")
            storage.delete(str(name))
            gone.append(name)
        except StorageError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return gone


def _newest(storage: Storage, names: Sequence[Name]) -> list[Found]:
    """What they are, up to the `LOOKED_BACK`th that is complete."""
    found: list[Found] = []
    complete = 0
    for one in checkpoint.looked_at(storage, names):
        found.append(one)
        complete += one.complete
        if complete == LOOKED_BACK:
            break
    return found


def _is_void(name: Name, committed: Name, begun: int) -> bool:
    return name.epoch == committed.epoch and name.incarnation < committed.incarnation and name.step > begun


def _staying(storage: Storage, complete: Sequence[Name], keep: int, rejected: Collection[str]) -> set[Name]:
    """Of complete ones, the newest first. One whose manifest cannot be read stays, but does not count: nobody knows whether it
    was to be kept. Perhaps it is only the storage that gave no answer, and what is deleted is gone."""
    if keep >= KEEP_ALL - 1:
        return set(complete)  # without a look at each of them, of which there may be many
    stay: set[Name] = set()
    for name in complete:
        counts = keep > 0 and str(name) not in rejected
        if not counts and (storage.uri, name) in _kept:  # of which there may be one of every epoch
            stay.add(name)
            continue
        try:
            kept = checkpoint.read_manifest(storage, name).kept
            _kept.update([(storage.uri, name)] if kept else [])
        except StorageError:
            kept, counts = True, False
        if kept or counts:
            stay.add(name)
        keep -= counts
    return stay


def make_room(storage: Storage, name: Name) -> None:
    """Before a checkpoint of this name is written: deletes what broke off since the newest that is complete. Else it would stay
    until the next commit, which never comes on a disk that it fills. What is older, retention has seen to.

    Raises:
        StorageError: it cannot be told what is there.
    """
    for older in (one for one in checkpoint.names(storage) if one < name):
        if storage.size(f"{older}/{manifests.FILE}") is not None:
            return
        with suppress(StorageError):  # somebody may still be writing there; the next one tries again
            give_up(storage, older)


def give_up(storage: Storage, name: Name) -> None:
    """Deletes a checkpoint that was not committed, unless it is by now.

    Somebody may be about to do that: the persister of a world that is over. First its notes go, without which it would still be
    a checkpoint; only if there is no manifest then do the shards. Who commits looks for notes and shards after that. So one of
    the two sees what the other has done, and what is deleted was never said to be committed.

    Raises:
        StorageError: something could not be deleted.
    """
    for file in storage.names(str(name)):
        if checkpoint.NOTE.fullmatch(file) or PARTIAL.fullmatch(file):
            storage.delete(f"{name}/{file}")
    if storage.size(f"{name}/{manifests.FILE}") is None:
        storage.delete(str(name))


def sweep(storage: Storage, epoch: int, *, new: bool) -> None:
    """Removes what earlier writers that were killed left half written: nobody can commit it any more.

    Args:
        epoch: of the present right to write. What is written with it is let be: its workers outlive a supervisor's restart, and
            may be writing now.
        new: whether nobody can have written with it before. Files beside the checkpoints do not say whose they are.
    """
    for one in _newest(storage, checkpoint.names(storage)):
        if not one.complete and one.name.epoch < epoch:
            with suppress(StorageError):  # it keeps nobody from beginning
                give_up(storage, one.name)
    for name in storage.names() if new else ():
        if PARTIAL.fullmatch(name):
            with suppress(StorageError):
                storage.delete(name)
