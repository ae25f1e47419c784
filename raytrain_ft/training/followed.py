"""Hearing of the updates that an optimizer makes, whoever calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from raytrain_ft.training.kept import wrapped


def follow(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Has `before` called before each of its steps, and `after` after each that was completed, until what is returned is
    called."""
    return _hooked(optimizer, before, after) if _calls_hooks(optimizer) else _wrapped(optimizer, before, after)


def _calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one that torch has put its hooks around. `Optimizer.__init__` does that, and there are wrappers of
    another optimizer that leave it out: with some of them hooks can be registered, and are never called."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _hooked(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    first = optimizer.register_step_pre_hook(lambda *_: before())
    last = optimizer.register_step_post_hook(lambda *_: after())

    def leave() -> None:
        first.remove()
        last.remove()

    return leave


def _wrapped(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Of one that wraps others a step begins when one of theirs does, if any does: where gradients are accumulated, the wrapper
    may be called for every batch, and pass on some of the calls only."""
    inner = [one for _, one in wrapped(optimizer) if _calls_hooks(one)]
    hooks = [one.register_step_pre_hook(lambda *_: begins()) for one in inner]
    waits = begun = False  # for the first of theirs, in a step of the wrapper; whether there was one
    given = vars(optimizer).get("step")
    step, following = optimizer.step, True

    def begins() -> None:
        nonlocal waits, begun
        if waits:
            waits, begun = False, True
            before()

    @functools.wraps(step)  # also what schedulers look for there
    def told(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        if not following:  # something else has been put around this meanwhile
            return step(*args, **options)
        nonlocal waits, begun
        waits, begun = True, False
        if not inner:
            begins()
        try:
            result = step(*args, **options)
        finally:
            waits = False
        if begun:
            after()
        return result

    bound = MethodType(told, optimizer)  # a scheduler that is made later binds what it finds, which leaves this as it is
    vars(optimizer)["step"] = bound

    def leave() -> None:
        nonlocal following
        following = False
        for hook in hooks:
            hook.remove()
        if vars(optimizer).get("step") is bound:
            vars(optimizer).pop("step")
            vars(optimizer).update({} if given is None else {"step": given})

    return leave
