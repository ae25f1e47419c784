"""What an optimizer keeps, as it is after its first update: whether all of it is where it is stored from, and sent from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ft.errors import TaskError
from raytrain_ft.training.state import kept

ONE_STATE = (
    "It would neither be stored nor sent to a replacement, which would go on with another one. A wrapper and what it wraps can "
    "have one state: for o in self.optimizers: o.state = self.state"
)


def check_stored(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that keeps something which is not the state of one of the model's parameters, or cannot be sent.

    Raises:
        ConfigError: it cannot be sent. TaskError: it is not of a parameter. Both name where it is.
    """
    for name, p in model.named_parameters():
        kept(optimizer, name, p)
    known = {id(p) for p in model.parameters()}
    for key, value in optimizer.state.items():
        if id(key) not in known and _is_something(value):
            what = f"a tensor of shape {list(key.shape)}" if isinstance(key, Tensor) else f"{key!r:.80}"
            raise TaskError(
                f"the {type(optimizer).__name__} keeps a state of {what}, which is no parameter of the model. It would neither "
                "be stored nor sent to a replacement, which would go on with another one. Keep it for each parameter, "
                "self.state[p][...], or, if it is a number, in the parameter groups, self.param_groups[0][...]"
            )
    for where, inner in wrapped(optimizer):
        if inner.state is not optimizer.state and any(map(_is_something, inner.state.values())):
            raise TaskError(f"the {where}, of class {type(inner).__name__}, has a state of its own. {ONE_STATE}")


def _is_something(value: Any) -> bool:
    return not isinstance(value, dict) or bool(value)


def optimizers_in(value: Any) -> list[Optimizer]:
    """Those whose state it may have to load: itself, if it is one, and those that it wraps."""
    return [*([value] if isinstance(value, Optimizer) else []), *(one for _, one in wrapped(value))]


def wrapped(of: Any) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers that one of them, or another object, has in its attributes, and that those have, and where."""
    yield from _wrapped(of, type(of).__name__, {id(of)})


def _wrapped(of: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    for attribute, value in getattr(of, "__dict__", {}).items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            if isinstance(part, Optimizer) and id(part) not in seen:
                seen.add(id(part))
                where = f"optimizer in {name}.{attribute}"
                yield where, part
                yield from _wrapped(part, f"{name}.{attribute}", seen)
