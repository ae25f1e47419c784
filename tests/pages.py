"""The code blocks of the pages, and how each of those in Python is run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
    r"^(<!-- (?P<where>on a cluster|as a script|not run: [^\n]*) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FENCED = re.compile(r"^(?P<indent> *)```(?P<language>[^`\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fenced:
    """A block of a page in any language, "" where it says none."""

    name: str
    language: str
    text: str

    @property
    def page(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Block:
    """A Python code block of a page.

    Attributes:
        where: it is run: "here", as it stands; "on a cluster" that is up; "as a script" of its own, which starts what it needs;
            or "not run", and why.
    """

    name: str
    code: str
    where: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.code, self.name)

    @property
    def page(self) -> str:
        return self.name.partition(":")[0]


def blocks(where: str | None = None) -> list[Block]:
    """All of them, or those that are run there."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Block(f"{page.relative_to(ROOT)}:{line}", match["code"], match["where"] or "here"))
    return [block for block in found if where in (None, block.where)]


def fenced(*languages: str) -> list[Fenced]:
    """All blocks in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCED.finditer(text):
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Fenced(f"{page.relative_to(ROOT)}:{line}", match["language"], match["text"]))
    return [block for block in found if block.language in languages]
