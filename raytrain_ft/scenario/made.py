"""Where in a Python file a part of a scenario was made, so that an error about it can name the line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType

PASSED = ("pydantic", __name__.rpartition(".")[0])
"""Packages through which a call goes on its way from who makes something: pydantic, and the one of scenarios."""


@dataclass(frozen=True, slots=True)
class Made:
    """The file and the line of the call that made something. All are equal: two things are the same wherever they were made."""

    path: str = field(compare=False)
    line: int = field(compare=False)


def here() -> Made:
    """By whom something is made now."""
    frame = sys._getframe()
    while frame.f_back is not None and _only_passes(frame):
        frame = frame.f_back
    return Made(frame.f_code.co_filename, frame.f_lineno)


def _only_passes(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == package or module.startswith(f"{package}.") for package in PASSED)
