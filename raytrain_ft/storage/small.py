"""Reads the small files that lie beside checkpoints. One that is not small was not written by us, and is not read."""

from __future__ import annotations

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.filesystem import Storage

LONGEST = 65_536
"""Bytes."""


def read_small(storage: Storage, name: str, longest: int = LONGEST) -> bytes | None:
    """The content of a file; None if there is none.

    Args:
        longest: bytes that it may have.

    Raises:
        StorageError: it has more, or cannot be read.
    """
    size = storage.size(name)
    if size is None:
        return None
    if size > longest:
        raise StorageError(f"{storage.uri}/{name} has {size} bytes, and {longest} at most if raytrain_ft wrote it")
    return storage.view(name).to_pybytes()
