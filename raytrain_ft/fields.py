"""Whether the fields of a dataclass hold what their annotations say, told in the words that users write."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from raytrain_ft.errors import ConfigError
from raytrain_ft.places import Place


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    own = inspect.get_annotations(cls)
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(cls).items() if name in own}


def check_types(given: Any, cls: type, called: str = "") -> None:
    """Checks the fields that the dataclass `cls` itself declares; not those of the classes that it is derived from.

    Args:
        called: what users call it; by default its class.

    Raises:
        ConfigError: a value is of another type. Nothing is converted: 60 is no timedelta, and "0.5" no number.
    """
    for name, adapter in _adapters(cls).items():
        value = getattr(given, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            wanted = re.sub(r"Literal\[(.*?)\]", r"\1", str(inspect.get_annotations(cls)[name])).replace(" | ", " or ")
            hint = ", such as timedelta(seconds=60)" if wanted.startswith("timedelta") else ""
            found = Place(str(value)).told(repr(value))
            raise ConfigError(f"{called or cls.__name__}({name}={found}): use {wanted}{hint}") from None
