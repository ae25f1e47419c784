"""Which parameters an optimizer has, by name: what it keeps is stored by their order, which nothing else would tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

Names = Sequence[Sequence[str | None]]


def known(modules: Mapping[str, Any]) -> dict[int, str]:
    """By id, what each parameter of these is called; of those of several, by the first, in whatever order they were given."""
    found: dict[int, str] = {}
    for name in sorted(modules):
        if isinstance(modules[name], nn.Module):
            for key, parameter in modules[name].named_parameters():
                found.setdefault(id(parameter), f"{name}/{key}")
    return found


def of_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str | None]]:
    """Group by group; None for one that is of none of the modules."""
    return [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]


def reordered(name: str, before: Names, now: Names) -> list[str]:
    """In words: which have changed places. One that is called otherwise now, or of which nothing is known, is left alone."""
    places, others = dict(_places(before)), dict(_places(now))
    here = set(others.values())
    return [
        f"{name}: group {group}, parameter {index} is {places[group, index]} in the checkpoint, {other} here"
        for (group, index), other in others.items()
        if places.get((group, index), other) != other and places[group, index] in here
    ]


def _places(names: Names) -> Iterator[tuple[tuple[int, int], str]]:
    for group, row in enumerate(names):
        yield from (((group, index), one) for index, one in enumerate(row) if one is not None)
