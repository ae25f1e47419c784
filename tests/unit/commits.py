"""One commit of a checkpoint by two workers, and what is found then. No torch: `python commits.py ROOT STEP` is traced."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, lock, persister, retention, selection
from raytrain_ft.storage.filesystem import LocalStorage, Storage, open_storage
from raytrain_ft.storage.job import Job
from raytrain_ft.storage.lock import Owner
from raytrain_ft.storage.shard import Piece, encode

SIZE = 20_000
OWNER = Owner(owner="test", epoch=1, host="nowhere", pid=1, started=0.0)


def job(root: Path, step: int, number: int, incarnation: int = 1) -> Job:
    """Half of the tensors is in each shard, and "both" is in both. Every byte of a checkpoint is that of its step."""
    mine = [Piece(name, "torch.uint8", (SIZE,), 0, SIZE) for name in (("a", "b"), ("c", "d"))[number]]
    both = Piece("both", "torch.uint8", (2 * SIZE,), number * SIZE, SIZE)
    return Job(
        place=Place(str(root)),
        owner=OWNER.owner,
        epoch=OWNER.epoch,
        step=step,
        incarnation=incarnation,
        number=number,
        count=2,
        pieces=[*mine, both],
        values={"step": step},
        keep=2,
        files={"profile.json": '{"key": ""}'},
        timeout_s=1.0,
    )


def commit(root: Path, step: int, incarnation: int = 1) -> None:
    """What the persisters of two workers do. The one that commits comes last, so that it does not wait."""
    data = memoryview(bytes([step]) * 3 * SIZE)
    for number in (1, 0):
        carry_out(job(root, step, number, incarnation), data, set())


def carry_out(job: Job, data: memoryview, cancelled: set[str], **more: Any) -> None:
    """What a persister does with these bytes."""
    persister.carry_out(job, encode(job.pieces, data), cancelled, **more)


def prepare(root: Path) -> None:
    """Checkpoints 10 and 20, and the right to write a third."""
    storage = LocalStorage(root)
    lock._write(storage, replace(OWNER))
    for step in (10, 20):
        commit(root, step)


def newest(storage: Storage, warnings: list[str] | None = None) -> int | None:
    """The step of the newest checkpoint that can be read.

    Raises:
        AssertionError: it is a mix of two steps, or not whole.
    """
    told = [] if warnings is None else warnings
    for manifest in selection.select(storage, told.append):
        try:
            content = checkpoint.read(storage, manifest)
        except StorageError as error:
            told.append(str(error))
            continue
        expected = dict.fromkeys("abcd", SIZE) | {"both": 2 * SIZE}
        found = {name: b"".join(bytes(part.data) for part in parts) for name, parts in content.pieces.items()}
        assert {name: len(data) for name, data in found.items()} == expected
        assert {byte for data in found.values() for byte in set(data)} == {manifest.step}, "a mix of steps"
        assert manifest.values == {"step": manifest.step}
        return manifest.step
    return None


def check_recovery(root: Path) -> None:
    """Training goes on: the next owner sweeps, a world commits, and leaves nothing of what broke off."""
    storage = open_storage(str(root))
    retention.sweep(storage, OWNER.epoch + 1, new=True)
    commit(root, 40, incarnation=2)
    assert newest(storage) == 40
    assert all(found.complete for found in checkpoint.found(storage))
    assert len(checkpoint.found(storage)) == 2
    assert not list(root.rglob("*.partial"))


if __name__ == "__main__":
    try:
        commit(Path(sys.argv[1]), int(sys.argv[2]))
    except StorageError as failure:
        print(failure)
        sys.exit(3)
