"""Writes the tables of docs/papers.md anew:    python -m benchmarks.papers.docs

What stands around the tables is written by hand; tests/unit/test_papers.py checks that the tables are of this code.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.papers import OUT_OF_REACH, arithmetic, simulations
from benchmarks.papers.rows import markdown, markdown_missing

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
TABLES = ("arithmetic", "simulated", "out of reach")


def table(page: str, name: str) -> str:
    """What stands between the marks of a table.

    Raises:
        ValueError: the page has no such marks.
    """
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE}: no table between <!-- {name} --> and <!-- end -->")
    return found[1]


def main() -> None:
    """Simulates, and writes them."""
    page = PAGE.read_text()
    new = (markdown(arithmetic()), markdown(simulations()[0]), markdown_missing(OUT_OF_REACH))
    for name, text in zip(TABLES, new, strict=True):
        page = page.replace(f"<!-- {name} -->\n{table(page, name)}<!-- end -->", f"<!-- {name} -->\n{text}<!-- end -->")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
