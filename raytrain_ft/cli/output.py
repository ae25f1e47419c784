"""How commands show what they find, and where they write it: tried before the work starts, so that nothing is done in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from raytrain_ft.progress import printable

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
DIRECTORY = click.Path(file_okay=False, writable=True, path_type=Path)
"""Types of options: what is there already must be writable."""
WIDE = 10_000
"""Characters that a table may take, and none does: it takes as many as its longest row needs."""


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As by rich, which would cut what does not fit into a column: such words are folded."""
        for table in objects:
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
        super().print(*objects, **options)


def console() -> Console:
    """As all commands print: a terminal wraps long lines, numbers have no colours, and nothing that is in a table is cut.
    Without a terminal, as in a pipe or a job's log, each row is one line."""
    made = _Console(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = WIDE
    return made


def row(table: Table, *cells: str) -> None:
    """Adds a row of text, in which nothing is markup and no character moves the terminal's cursor."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def warn(message: str) -> None:
    """A line on the standard error."""
    click.echo(printable(message), err=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and nothing where there is none; what it gives is to be called after each part of the work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


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
