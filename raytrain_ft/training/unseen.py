"""State that nothing stores: what the passes change in Python attributes, and in modules that the task has beside its model.

Most of what a forward pass leaves in attributes is no state: shapes, caches, what it has just computed for somebody to look at.
So of numbers only those count that go on in two steps as a counter or a decay does, and of tensors only the buffers of modules,
which are there to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from raytrain_ft.storage.tensors import hash_of
from raytrain_ft.training.layout import is_plain

STEPS = 2
"""So many are looked at."""
LONG = 100


class Watch:
    """Compares what is there before the passes of a step with what is there after them."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        self._task, self._model = task, model
        self._numbers: list[dict[str, float]] = []  # before and after each step
        self._buffers: list[dict[str, int]] = []

    def begin(self) -> None:
        """Before the passes of a step."""
        self._look()

    def end(self) -> list[str] | None:
        """After them. The names of what changed as state does; None as long as more is to be seen."""
        self._look()
        if len(self._numbers) < 2 * STEPS:
            return None
        numbers = [name for name in self._numbers[0] if _goes_on([seen.get(name, math.nan) for seen in self._numbers])]
        before, after = self._buffers[:2]
        return numbers + [name for name in before if after.get(name, before[name]) != before[name]]

    def _look(self) -> None:
        beside = dict(_beside(self._task, self._model))
        inside = {f"model.{name}" if name else "model": module for name, module in self._model.named_modules()}
        owners = {"task": self._task, **inside, **beside}
        self._numbers.append({f"{place}.{name}": value for place, one in owners.items() for name, value in _of(one)})
        buffers = ((f"{place}.{name}", b) for place, one in beside.items() for name, b in one.named_buffers(recurse=False))
        self._buffers.append({name: hash_of(buffer) for name, buffer in buffers if is_plain(buffer)})


def _beside(task: Any, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a task's attributes that are none of the model's."""
    known = {id(module) for module in model.modules()}
    for place, part in _parts(task):
        if isinstance(part, nn.Module) and id(part) not in known:
            yield from ((f"{place}.{name}" if name else place, one) for name, one in part.named_modules())


def _parts(task: Any) -> Iterator[tuple[str, Any]]:
    """What a task has in its attributes, and in lists and mappings there, unless these are long: data, that is."""
    for attribute, value in getattr(task, "__dict__", {}).items():
        if isinstance(value, list | tuple | dict):
            if len(value) > LONG:
                continue
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"task.{attribute}[{key!r}]", part) for key, part in parts)
        else:
            yield f"task.{attribute}", value


def _of(owner: Any) -> Iterator[tuple[str, float]]:
    """Its numbers, but for what is its own affair: torch's modules, and names with an underscore."""
    if type(owner).__module__.startswith("torch."):
        return
    for name, value in getattr(owner, "__dict__", {}).items():
        if name.startswith("_"):
            continue
        if type(value) in (int, float):  # True is no number here
            yield name, value
        elif isinstance(value, Tensor) and is_plain(value) and value.numel() == 1 and not value.is_complex():
            yield name, value.item()


def _goes_on(seen: list[float]) -> bool:
    """Whether a number changed in both steps, and not between them, by the same sum or factor."""
    first, then, again, last = seen
    if then != again or first == then:
        return False
    same_sum = math.isclose(then - first, last - then, rel_tol=1e-6)
    same_factor = first != 0 and then != 0 and last != 0 and math.isclose(then / first, last / then, rel_tol=1e-6)
    return same_sum or same_factor
