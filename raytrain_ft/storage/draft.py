"""Files that a reader finds whole, the old one or the new one, whatever becomes of who writes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def draft_of(path: Path) -> Iterator[TextIO]:
    """A file beside this one, to be written, which takes its place at the end. Nothing stays of one that cannot be written: the
    disk may be full. It is a new one, whatever others have put into that directory, and no link is followed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
