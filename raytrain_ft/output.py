"""Where a command writes what it found: tried before the work starts, so that nothing is worked out in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import click

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
DIRECTORY = click.Path(file_okay=False, writable=True, path_type=Path)
"""Types of options: what is there already must be writable."""


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What keeps something from being written there is told in a line, with the remedy.

    Raises:
        click.ClickException: something does.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.ClickException(f"{path} cannot be written: {reason}; use a place with room where you may write") from error


def try_out(*paths: Path | None) -> None:
    """Tries whether a file can be made there, or in the nearest directory above that there is. Leaves nothing behind.

    Raises:
        click.ClickException: it cannot.
    """
    for path in paths:
        if path is not None:
            with told(path):
                there = next(place for place in (path, *path.absolute().parents) if place.exists())
                if there != path or path.is_dir():  # a file that is there is not touched yet
                    TemporaryFile(dir=there).close()


def write(path: Path | None, text: str) -> None:
    """Writes a file, in a directory that is made if need be.

    Raises:
        click.ClickException: it cannot be written.
    """
    if path is not None:
        with told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
