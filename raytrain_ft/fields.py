"""Whether a dataclass has the fields that it is given, and these hold what their annotations say, told in users' words."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from raytrain_ft.errors import ConfigError
from raytrain_ft.places import Place

C = TypeVar("C", bound=type)
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
    timedelta: "a timedelta, such as timedelta(seconds=60)",
}


@cache
def _fields(cls: type) -> dict[str, tuple[TypeAdapter[Any], str]]:
    own = inspect.get_annotations(cls)
    return {name: (TypeAdapter(hint), _in_words(hint)) for name, hint in get_type_hints(cls).items() if name in own}


def _in_words(hint: Any) -> str:
    """What to use, of a field with this type: `Literal["a", "b"] | None` is "a", "b" or None."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    either = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    words = [word for one in either for word in _each(one)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _each(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [f'"{value}"' for value in get_args(hint)]
    return [WORDS.get(hint) or _named(hint)]


def _named(hint: Any) -> str:
    """Of `collections.abc.Sequence[my.module.Class]`, Sequence[Class]."""
    if hint is Ellipsis:
        return "..."
    of = f"[{', '.join(map(_named, get_args(hint)))}]" if get_args(hint) else ""
    return getattr(hint, "__name__", str(hint)) + of


def check_types(given: Any, cls: type, called: str = "") -> None:
    """Checks the fields that the dataclass `cls` itself declares; not those of the classes that it is derived from.

    Args:
        called: what users call it; by default its class.

    Raises:
        ConfigError: a value is of another type. Nothing is converted: 60 is no timedelta, and "0.5" no number.
    """
    for name, (adapter, wanted) in _fields(cls).items():
        value = getattr(given, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            found = Place(str(value)).told(repr(value))
            raise ConfigError(f"{called or cls.__name__}({name}={found}): use {wanted}") from None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The nearest of the known names, as a question for the end of a sentence; empty if none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def knows_its_names(cls: C) -> C:
    """For a dataclass: what it does not have is refused with the nearest name, where Python would only say that it is
    unexpected. Its signature stays what it is, for editors and type checkers too.

    The class then raises:
        ConfigError: a keyword is none of its fields.
    """
    init: Any = cls.__init__
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *values: Any, **fields: Any) -> None:
        for name in fields:
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no argument {name!r}{did_you_mean(name, known)}")
        init(self, *values, **fields)

    cls.__init__ = checked
    return cls
