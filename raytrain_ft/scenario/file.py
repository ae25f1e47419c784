"""A scenario's file: YAML without surprises, and errors that name the line, the value found and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from raytrain_ft.errors import ScenarioError
from raytrain_ft.fields import did_you_mean

LARGEST = 2**20
"""Bytes of a scenario's file."""
LONGEST_VALUE = 80
TEXT = "tag:yaml.org,2002:str"
Place = tuple[str | int, ...]
"""Where a value is: names of fields and numbers of items, from the outermost in."""
FIELD = re.compile(r"^(\w+)\((\w+)=")
"""What a message of a check begins with: the class and the field that it is about."""


class _Loader(yaml.SafeLoader):
    """Plain values only, and none of them twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()
            raise yaml.MarkedYAMLError(problem=f"*{event.anchor}: references are not supported", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # looks like a date, or is tagged as a number, and is none
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{_short(node.value)}: there is no such {kind}; if it is text, write it in quotes",
                problem_mark=node.start_mark,
            ) from error


@dataclass(frozen=True, slots=True)
class Source:
    """Where a scenario's fields came from; empty if nobody knows.

    Attributes:
        path: of the file. lines: of each field and item in a YAML file; in a Python file, of the calls that made the parts.
    """

    path: Path | None = None
    lines: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, plain: Place | None = None) -> tuple[Source, dict[str, Any]]:
        """The source and its fields.

        Args:
            plain: fields whose values are plain data: in these, keys need not be text.

        Raises:
            ScenarioError: there is no such file, or it is no YAML mapping.
        """
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST + 1)
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{path} cannot be read: {error}") from error
        if len(data) > LARGEST:
            raise ScenarioError(f"{path} is larger than a scenario can be ({LARGEST:,} bytes)")
        strange = _Loader.NON_PRINTABLE.search(text)
        if strange is not None:
            line = text.count("\n", 0, strange.start()) + 1
            raise ScenarioError(f"{path}, line {line}: {strange[0]!r}: there is no place for such a character: take it out")
        loader = _Loader(text)
        lines: dict[Place, int] = {(): 1}
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise yaml.MarkedYAMLError(
                    problem="a scenario is a mapping of fields, such as `steps: 100`",
                    problem_mark=getattr(node, "start_mark", None),
                )
            _note_lines(node, (), lines, plain)
            fields = loader.construct_document(node)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None) or loader.get_mark()
            raise ScenarioError(f"{path}, line {mark.line + 1}: {getattr(error, 'problem', None) or error}") from error
        finally:
            loader.dispose()
        return cls(path, lines), fields

    @property
    def directory(self) -> Path:
        """What relative paths in a scenario are relative to."""
        return self.path.parent if self.path is not None else Path()

    def at(self, place: Place, message: str) -> str:
        """A message with the file, the line and the name of the field that it is about."""
        name = ".".join(str(part) for part in place)
        return f"{self.where(place)}{name}: {message}" if name else f"{self.where(place)}{message}"

    def where(self, place: Place) -> str:
        """The file and the line of a place, or of what it lies in, for the beginning of a message."""
        if self.path is None:
            return ""
        line = self.line(place)
        return f"{self.path}, line {line}: " if line is not None else f"{self.path}: "

    def line(self, place: Place) -> int | None:
        """The line of a place, or of what it lies in; None if it is not known."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)

    def explain(self, error: ValidationError, root: type[BaseModel]) -> str:
        """Every fault on a line of its own, in the order of the file."""
        found: dict[Place, str] = {}
        faults = error.errors(include_url=False)
        for fault in faults:
            place = _place(fault, root, self.lines)
            if place not in found:  # of a union, pydantic says each of its members' complaints
                found[place] = self.at(place, _words(fault, place, root))
        for place in [_place(fault, root, self.lines) for fault in faults if fault["type"] == "too_short"]:
            if any(other[: len(place)] == place != other for other in found):
                found.pop(place, None)  # it is said of a list of which no item is valid
        order = sorted(found, key=lambda place: self.lines.get(place, 0))
        return "\n".join(found[place] for place in order)


def _place(fault: Any, root: type[BaseModel], known: Collection[Place]) -> Place:
    """The place of a fault, without what pydantic puts in it for the members of a union. Keys of a mapping are fields of no
    model, but `known` places of the file."""
    place: Place = ()
    for part in fault["loc"]:
        model = _model_at(root, place)
        if isinstance(part, int) or (model is not None and part in model.model_fields) or (*place, part) in known:
            place = (*place, part)
    last = fault["loc"][-1:]
    return (*place, *last) if fault["type"] == "extra_forbidden" and place[-1:] != last else place


def _note_lines(node: yaml.Node, place: Place, lines: dict[Place, int], plain: Place | None) -> None:
    """The line of every field and item, from 1.

    Raises:
        yaml.MarkedYAMLError: a field is given twice, or its name is no text.
    """
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*place, str(key.value))
            if isinstance(key, yaml.ScalarNode) and key.tag != TEXT and not _lies_in(plain, place):
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value}: a field's name is text: write it in quotes", problem_mark=key.start_mark
                )
            if name in lines:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
            _note_lines(value, name, lines, plain)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines[*place, number] = value.start_mark.line + 1
            _note_lines(value, (*place, number), lines, plain)


def _lies_in(outer: Place | None, place: Place) -> bool:
    return outer is not None and len(place) > len(outer) and place[: len(outer)] == outer


def _model_at(model: type[BaseModel] | None, place: Place) -> type[BaseModel] | None:
    """The model that is at a place; None for a plain value."""
    for part in place:
        if isinstance(part, str):
            known = model.model_fields.get(part) if model is not None else None
            model = _model_in(known.annotation) if known is not None else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _words(fault: Any, place: Place, root: type[BaseModel]) -> str:
    """What is wrong, the value found, and what is allowed."""
    model = _model_at(root, place[:-1])
    if fault["type"] == "extra_forbidden" and model is not None:
        hint = did_you_mean(place[-1], model.model_fields)
        return f"there is no such field{hint}. Allowed here: {', '.join(model.model_fields)}".replace("?.", "?")
    if fault["type"] == "missing":
        return "this field is required"
    plain = isinstance(fault["input"], str | int | float | bool)
    return f"{_short(fault['input'])}: {fault['msg']}" if plain else fault["msg"]


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST_VALUE else shown[:LONGEST_VALUE] + "…"
