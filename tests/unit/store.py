"""What the tests of storage share: a worker's part of a checkpoint written in this process, and what a reader makes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, selection
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import LocalStorage, Storage, open_storage
from raytrain_ft.storage.job import Job
from raytrain_ft.storage.lock import Owner
from raytrain_ft.storage.lock import _write as write_owner
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.persister import carry_out
from raytrain_ft.storage.shard import Part, decode, encode
from raytrain_ft.training.layout import share, total_size
from raytrain_ft.training.restore import make
from raytrain_ft.training.snapshot import copy_all

OWNER = Owner(owner="test", epoch=1, host="nowhere", pid=os.getpid(), started=0.0)


class Versioned(nn.Linear):
    """The weights of its first version were transposed. It refuses what says no version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if "version" not in local_metadata:
            raise ValueError("a state without a version")
        if local_metadata["version"] == 1:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def own(storage: Storage, owner: Owner = OWNER) -> None:
    """Gives an owner the right to write."""
    write_owner(storage, owner)


def save(place: Place | str, step: int, tensors: Mapping[str, Tensor], count: int = 1, **more: object) -> None:
    """Writes and commits a checkpoint as `count` workers would; number 0 comes last, so that it need not wait."""
    pairs = list(tensors.items())
    for number in reversed(range(count)):
        mine = share(pairs, number, count)
        memory = memoryview(bytearray(mine.layout.size))
        copy_all(mine.pending(), memory)
        job = Job(
            place=place if isinstance(place, Place) else Place(place),
            step=step,
            number=number,
            count=count,
            pieces=mine.layout.pieces,
            size=total_size(pairs),
            **({"owner": OWNER.owner, "epoch": OWNER.epoch, "incarnation": 1, "keep": 2} | more),  # pyright: ignore
        )
        carry_out(job, encode(job.pieces, memory), set())


def parts_of(file: bytes) -> list[Part]:
    """The pieces of a shard's file, in its order."""
    return [rows.part(n) for rows in decode(pa.py_buffer(file), "the shard") for n in range(len(rows.names))]


def newest(storage: Storage, warnings: list[str]) -> Content | None:
    """The newest checkpoint that can be read whole, as every reader chooses it."""
    for manifest in selection.select(storage, warnings.append):
        try:
            return checkpoint.read(storage, manifest)
        except StorageError as error:
            warnings.append(str(error))
    return None


def tensors_of(content: Content) -> dict[str, Tensor]:
    """New tensors with all that a checkpoint holds."""
    return {name: make(content, name) for name in content.pieces}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where a value is not equal to itself."""
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return not a.numel() or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def state(step: int) -> dict[str, Tensor]:
    """A small state in which every element says which step it is of."""
    return {
        "weight": torch.full((300, 20), float(step)),
        "bias": torch.full((7,), float(step), dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "count": torch.tensor(step),
    }


def step_of(content: Content) -> int:
    """The step that all tensors of a `state` are of.

    Raises:
        AssertionError: they are not of one step.
    """
    found = {float(value) for tensor in tensors_of(content).values() for value in tensor.unique()}
    assert found == {float(content.manifest.step)}, f"a mix of steps: {found}"
    return content.manifest.step


def two_checkpoints(path: Path, keep: int = 2) -> LocalStorage:
    """Checkpoints of steps 10 and 20."""
    storage = open_storage(str(path))
    assert isinstance(storage, LocalStorage)
    own(storage)
    for step in (10, 20):
        save(storage.uri, step, state(step), keep=keep)
    return storage


def complete_steps(reader: LogReader, sender: int, receiver: int, kind: str, micro_batches: int, replica: int = 0) -> set[int]:
    """The steps of which micro-batches 0 to `micro_batches` - 1 have all been found in a tensor log."""
    edge = (sender, receiver, kind, replica)
    found = [
        k.step for k in reader._places if (k.sender, k.receiver, k.kind, k.replica) == edge and k.micro_batch < micro_batches
    ]
    return {step for step in found if found.count(step) == micro_batches}
