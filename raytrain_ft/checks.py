"""Checks of numbers that a user gave: each error names the field, the value found and what is allowed."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from raytrain_ft.errors import ConfigError


def seconds(owner: object, *names: str, positive: bool = False, least: float = 0.0) -> None:
    """These fields are finite numbers that are not negative; with `positive`, greater than 0, or of at least `least`.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(owner, name)
        if not is_finite(value) or value < least or (positive and value == 0):
            allowed = f"of at least {least:g}" if least else "greater than 0" if positive else "that is not negative"
            raise ConfigError(f"{type(owner).__name__}({name}={value!r}): use a finite number {allowed}")


def whole(owner: object, *names: str, least: int = 1) -> None:
    """These fields are whole numbers of at least `least`.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(owner, name)
        if not is_whole(value, least) or not is_finite(value):
            raise ConfigError(
                f"{type(owner).__name__}({name}={value!r}): use a whole number of at least {least}{_at_most(value)}"
            )


def _at_most(value: Any) -> str:
    return f", at most {sys.float_info.max:.2g}" if is_whole(value, 0) and not is_finite(value) else ""


def text(owner: object, *names: str) -> None:
    """These fields are text.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, str):
            raise ConfigError(f"{type(owner).__name__}({name}={value!r}): use text, in quotes if it looks like something else")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number, perhaps NaN or infinite, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Whether it is a finite number, and not a whole one that no float can hold: nothing could be computed with it."""
    return is_number(value) and abs(value) <= sys.float_info.max


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether it is a whole number of at least `least`, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
