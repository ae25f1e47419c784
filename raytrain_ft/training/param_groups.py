"""An optimizer's parameter groups stay as they were made: so they are made by a replacement, and by a run that resumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ft.errors import TaskError


class ParamGroups:
    """Which parameter is in which group."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._known = _lists(optimizer)

    def check(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Once a step: some 10 ns for each parameter, of which only the identity is compared. Their order within a group is
        the optimizer's own affair: what it keeps of them goes by their names.

        Raises:
            TaskError: another one is in a group by now, naming it.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        if len(groups) == len(self._known) and all(map(_same, self._known, groups)):
            return
        before, now = _group_of(self._known), _group_of(groups)
        if len(groups) == len(self._known) and before == now:
            self._known = _lists(optimizer)
            return
        if len(groups) != len(self._known):
            what = f"has {len(groups)} parameter groups now, and had {len(self._known)} when it was made"
        else:
            moved = next(key for key in before | now if before.get(key) != now.get(key))
            name = next((name for name, p in model.named_parameters() if id(p) == moved), "one that is not the model's")
            what = f"has the parameter {name} in {_words(now.get(moved))} now, and had it in {_words(before.get(moved))}"
        raise TaskError(
            f"the {type(optimizer).__name__} {what}. A replacement, and a run that resumes, would make the groups as they were "
            "at first, and could not take over what was trained since. Make all of them from the start: what is to be trained "
            "later on in a group of its own, whose learning rate the scheduler keeps at 0 until then"
        )


def _lists(optimizer: Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _same(known: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))


def _group_of(groups: Iterable[Iterable[Tensor]]) -> dict[int, int]:
    """By a parameter's id, the number of its group."""
    return {id(p): number for number, params in enumerate(groups) for p in params}


def _words(group: int | None) -> str:
    return "no group" if group is None else f"group {group}"
