"""A process that compiles nothing does not load torch's compiler.

Every `Optimizer.step()`, `zero_grad()` and `init_process_group()` of torch loads `torch._dynamo`, a second of CPU time and
70 MB, to tell a compiler that is not there to keep out. A worker that takes a lost one's place would spend a third of its
start on that. So a stand-in answers these calls, and gives way to the real module as soon as anybody asks for more:
`torch.compile` works as ever.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"
"""Where `torch._compile` keeps, on a function of torch's, what `disable` made of it."""


def load_compiler_late() -> None:
    """Puts the load of `torch._dynamo` in this process off until it is needed. Does nothing if it is loaded."""
    sys.modules.setdefault(_NAME, _StandIn())


def compiler_is_loaded() -> bool:
    """Whether this process has loaded `torch._dynamo`."""
    return not isinstance(sys.modules.get(_NAME), _StandIn | None)


class _StandIn(ModuleType):
    """`torch._dynamo` for those who only say where it shall not compile."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.trace_rules = _TraceRules()
        self._passed: list[Callable[..., Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """Where compiled code would end."""

    def disable(self, fn: Callable[..., Any] | None = None, *arguments: Any, **more: Any) -> Any:
        """As torch asks it for its own functions, the function as it is; whoever else asks is answered by the real one."""
        if fn is None or more != {"wrapping": False}:
            return self.__getattr__("disable")(fn, *arguments, **more)
        self._passed.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        # What looks through all modules asks for dunder names, as `inspect` does; an import of a submodule asks for __path__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            for fn in self._passed:
                vars(fn).pop(_CACHE, None)  # the real `disable` is asked at the next call
        return getattr(importlib.import_module(_NAME), name)


class _TraceRules:
    """`torch._dynamo.trace_rules` for those who only make it forget."""

    def clear_lru_cache(self) -> None:
        """Nothing was remembered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{_NAME}.trace_rules"), name)
