"""File systems of a size that a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size ("1M") at `path`; skips the test where mounting is not permitted."""
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not permitted here: {error}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
