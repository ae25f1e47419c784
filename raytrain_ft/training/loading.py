"""What torch does to an optimizer as it loads its state, put right: of the one that is loaded, and of those in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from raytrain_ft.errors import ConfigError
from raytrain_ft.training.kept import optimizers_in


@contextmanager
def put_right(value: Any) -> Iterator[None]:
    """Around the `load_state_dict` of an optimizer, or of an object that may have some.

    Raises:
        ConfigError: what optimizers had in common is no longer one, and which of them is to take its place cannot be told.
    """
    common = _in_common(optimizers_in(value))
    yield
    for before, places in common:
        _have_in_common(before, places)


# ---------------------------------------------------------------- what a wrapper and what it wraps have in common


@dataclass(frozen=True, slots=True)
class _Place:
    """An attribute of an optimizer, or a group of its parameters."""

    optimizer: Optimizer
    attribute: str
    group: int | None = None

    def get(self) -> Any:
        """None if there is nothing."""
        found = getattr(self.optimizer, self.attribute, None)
        if self.group is None:
            return found
        return found[self.group] if isinstance(found, list) and self.group < len(found) else None

    def put(self, value: Any) -> None:
        if self.group is None:
            setattr(self.optimizer, self.attribute, value)
        else:
            getattr(self.optimizer, self.attribute)[self.group] = value


def _in_common(optimizers: list[Optimizer]) -> list[tuple[Any, list[_Place]]]:
    """What several of them have, and where. torch loads a state into a new `state` and new groups, which none but the one that
    is loaded would have: the others would go on with what they had."""
    held: dict[int, Any] = {}  # so that nothing made meanwhile has the address of one
    places: defaultdict[int, list[_Place]] = defaultdict(list)
    for one in optimizers:
        groups = range(len(getattr(one, "param_groups", [])))
        for place in (_Place(one, "state"), _Place(one, "param_groups"), *(_Place(one, "param_groups", i) for i in groups)):
            if (found := place.get()) is not None:
                held[id(found)] = found
                places[id(found)].append(place)
    return [(held[key], found) for key, found in places.items() if len(found) > 1]


def _have_in_common(before: Any, places: list[_Place]) -> None:
    """What took its place in one of them does so in the others."""
    now = [place.get() for place in places]
    new = {id(one): one for one in now if one is not before}
    if not new:
        return
    if len(new) > 1 or not _fits(before, one := next(iter(new.values()))):
        kinds = ", ".join(sorted({type(place.optimizer).__name__ for place in places}))
        raise ConfigError(
            f"{kinds} had one `{places[0].attribute}` in common, and no longer have as it is loaded: let load_state_dict() of "
            "the one that wraps the others give them one again (for o in self.optimizers: o.state = self.state)"
        )
    for place, found in zip(places, now, strict=True):
        if found is not one:
            place.put(one)


def _fits(before: Any, now: Any) -> bool:
    """A group of other parameters is another group."""
    if not isinstance(before, dict) or "params" not in before:
        return now is not None
    return isinstance(now, dict) and list(map(id, now.get("params", []))) == list(map(id, before["params"]))
