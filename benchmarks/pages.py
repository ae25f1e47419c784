"""Pages of the documentation whose tables are written by code, between marks; what stands around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def table(page: Path, name: str) -> str:
    """What stands between the marks of a table.

    Raises:
        ValueError: the page has no such marks.
    """
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- end -->", page.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{page}: no table between <!-- {name} --> and <!-- end -->")
    return found[1]


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Writes the tables anew.

    Raises:
        ValueError: the page has no marks for one of them.
    """
    text = page.read_text()
    for name, new in tables.items():
        text = text.replace(f"<!-- {name} -->\n{table(page, name)}<!-- end -->", f"<!-- {name} -->\n{new}<!-- end -->")
    page.write_text(text)
