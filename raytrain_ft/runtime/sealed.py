"""The task on its way from the driver to the workers: pickled, in a file of the run's directory.

It is no argument of an actor. Ray keeps in its object store what is larger than 100 kB, and only as long as somebody refers to
it: a supervisor that was lost would not be started again (Ray's issue 53727). Nor has the supervisor any use for it.

The hash of what the driver has written is in the `RunSpec`, which travels through Ray. Nothing else is unpickled, whatever the
file holds.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import Any

import ray.cloudpickle

from raytrain_ft.errors import StorageError
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage.filesystem import LocalStorage

OURS = re.compile(r"\.?task-[0-9a-f]{12}\.pickle(\.[0-9a-f]+\.partial)?")
"""What a driver writes, or leaves if it is killed meanwhile."""


def digest_of(task: bytes) -> str:
    """What `RunSpec` says of a pickled task."""
    return hashlib.sha256(task).hexdigest()


def write(spec: RunSpec, task: bytes) -> None:
    """Leaves the pickled task where workers find it. Whose right it is to write there is known.

    Raises:
        StorageError: it cannot be written.
    """
    LocalStorage(spec.directory).put(_name(spec), [memoryview(task)])


def load(spec: RunSpec) -> Any:
    """The task. What it is made of is imported for this, so only a worker does it.

    Raises:
        StorageError: it cannot be read, or it is not what the driver has written; then nothing was unpickled.
    """
    name = _name(spec)
    task = LocalStorage(spec.directory).view(name).to_pybytes()  # a copy: what is unpickled is what was hashed
    if digest_of(task) != spec.task:
        raise StorageError(f"{spec.directory / name} is not what the run's driver has written there: run the job again")
    return ray.cloudpickle.loads(task)


def remove(spec: RunSpec) -> None:
    """The run is over."""
    _delete(spec, [_name(spec)])


def remove_others(spec: RunSpec) -> None:
    """What is there of earlier runs of this name, whose driver and supervisor were both lost."""
    with suppress(StorageError):
        left = LocalStorage(spec.directory).names()
        _delete(spec, [name for name in left if OURS.fullmatch(name) and name != _name(spec)])


def _delete(spec: RunSpec, names: list[str]) -> None:
    for name in names:
        with suppress(StorageError):  # it is in nobody's way
            LocalStorage(spec.directory).delete(name)


def _name(spec: RunSpec) -> str:
    return f"task-{spec.run_id}.pickle"
