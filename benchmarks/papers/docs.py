"""Writes the tables of docs/papers.md anew:    python -m benchmarks.papers.docs

What stands around the tables is written by hand; tests/unit/test_papers.py checks that the tables are of this code.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import fill
from benchmarks.papers import OUT_OF_REACH, arithmetic, simulations
from benchmarks.papers.rows import markdown, markdown_missing

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
TABLES = ("arithmetic", "simulated", "out of reach")


def main() -> None:
    """Simulates, and writes them."""
    new = (markdown(arithmetic()), markdown(simulations()[0]), markdown_missing(OUT_OF_REACH))
    fill(PAGE, dict(zip(TABLES, new, strict=True)))


if __name__ == "__main__":
    main()
