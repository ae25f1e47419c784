"""Sizes, times and numbers in words."""

from __future__ import annotations


def in_bytes(size: float) -> str:
    """A size in words."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def in_seconds(seconds: float) -> str:
    """A time in words."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """So many of something; `nouns`: of several, where that is not `noun` with an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"
