"""Calls of the task's own functions: what one of them raises says which of them it was."""

from __future__ import annotations

from typing import Any


def call(task: Any, name: str, *arguments: Any) -> Any:
    """What this function of the task returns. Its own error is raised as it is, with a note."""
    try:
        return getattr(task, name)(*arguments)
    except Exception as error:
        error.add_note(f"(raised by TrainTask.{name}() of {type(task).__name__})")
        raise
