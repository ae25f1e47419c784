"""What torch does to an optimizer as it loads its state, put right: of the one that is loaded, and of those in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raytrain_ft.errors import ConfigError
from raytrain_ft.training.kept import optimizers_in
from raytrain_ft.training.placing import laid_out_like


@contextmanager
def put_right(value: Any, state: Any) -> Iterator[None]:
    """Around the `load_state_dict` of an optimizer, or of an object that may have some, with this state.

    Raises:
        ConfigError: what optimizers had in common is no longer one, and which of them is to take its place cannot be told.
    """
    optimizers = optimizers_in(value)
    common = _in_common(optimizers)
    given = {id(value): state}  # to each that is loaded; to those in it by whoever has them
    with ExitStack() as hooks:
        for one in optimizers:
            with suppress(AttributeError):  # without Optimizer.__init__ it has no hooks, and torch's method cannot load it
                hook = one.register_load_state_dict_pre_hook(lambda loaded, part: given.update({id(loaded): part}))
                hooks.callback(hook.remove)
        yield
    for before, places in common:
        _have_in_common(before, places)
    for one in optimizers:
        if isinstance(kept := getattr(one, "state", None), MutableMapping):  # a wrapper may have none
            _undo_casts(kept, one.param_groups, given.get(id(one)))
            _lay_out(kept)


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
    new = list({id(one): one for one in now if one is not before}.values())
    if not new:
        return
    if (one := _joined(before, new)) is None:
        kinds, what = ", ".join(sorted({type(place.optimizer).__name__ for place in places})), places[0].attribute
        raise ConfigError(
            f"{kinds} had one `{what}` in common, and no longer have as it is loaded: let load_state_dict() of the one that "
            f"wraps the others give them one again (for o in self.optimizers: o.{what} = self.{what})"
        )
    for place, found in zip(places, now, strict=True):
        if found is not one:
            place.put(one)


def _joined(before: Any, new: list[Any]) -> Any:
    """What is to be had in common, of what each has now; None if that cannot be told. Where each has loaded its own, all are
    the same, or a state is that of some parameters each."""
    if not all(_fits(before, one) for one in new):
        return None
    first, *others = new
    for one in others:
        if not _agree(first, one):
            return None
        if isinstance(first, MutableMapping) and "params" not in first:
            first.update(one)
    return first


def _fits(before: Any, now: Any) -> bool:
    """A group of other parameters is another group, and so are groups of others."""
    if isinstance(before, list):
        return isinstance(now, list) and len(now) == len(before) and all(map(_fits, before, now))
    if not isinstance(before, dict) or "params" not in before:
        return isinstance(now, MutableMapping)
    return isinstance(now, dict) and list(map(id, now.get("params", []))) == list(map(id, before["params"]))


def _agree(one: Any, other: Any) -> bool:
    """Whether what both of them have is the same: of two groups all but the parameters, which are compared before."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        common = one.keys() & other.keys() - {"params"}
        complete = "params" not in one or one.keys() == other.keys()
        return complete and all(_agree(one[key], other[key]) for key in common)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_agree, one, other))
    return bool(one == other)


# ---------------------------------------------------------------- what is kept for each parameter


def _undo_casts(kept: MutableMapping[Any, Any], now: list[dict[str, Any]], given: Any) -> None:
    """torch casts all that an optimizer keeps for a parameter to the parameter's dtype as it loads it. What was given in
    another one takes its place again. `now`: the groups."""
    match given:
        case {"state": dict(stored), "param_groups": list(groups)}:
            numbers = chain.from_iterable(group["params"] for group in groups)
            params = chain.from_iterable(group["params"] for group in now)
            for number, p in zip(numbers, params, strict=True):
                if number in stored and p in kept:
                    kept[p] = _not_cast(kept[p], stored[number])


def _lay_out(kept: Mapping[Any, Any]) -> None:
    """What is kept for a parameter is to lie in memory as the parameter does."""
    for p, state in kept.items():
        if isinstance(state, dict) and isinstance(p, Tensor):  # what is kept for all of them may have a name as its key
            state.update({key: laid_out_like(one, p) for key, one in state.items() if isinstance(one, Tensor)})


def _not_cast(loaded: Any, stored: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        cast = loaded.dtype != stored.dtype and _equal(loaded, stored.to(loaded))
        return stored.to(loaded.device) if cast else loaded
    if isinstance(loaded, dict) and isinstance(stored, dict):
        for key, one in loaded.items():  # not by `update`, with which a Counter adds
            loaded[key] = _not_cast(one, stored.get(key))
    elif isinstance(loaded, list | tuple) and isinstance(stored, list | tuple) and len(loaded) == len(stored):
        return type(loaded)(map(_not_cast, loaded, stored))
    return loaded


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two of one dtype are, where each NaN equals any other."""
    if torch.equal(one, other):  # mostly
        return True
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
