"""Files that a reader finds whole, the old one or the new one, whatever becomes of who writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file beside this one, to be written, which takes its place at the end. Nothing stays of one that cannot be written: the
    disk may be full."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
