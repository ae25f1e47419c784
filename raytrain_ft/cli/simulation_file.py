"""A simulation's file: the job, the strategies to compare and the failures, as YAML or JSON. Errors name the line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import did_you_mean
from raytrain_ft.scenario.file import FIELD, Place, Source
from raytrain_ft.simulate import Costs, Exponential, Failure, Failures, Job, Listed, SpotTrace, Strategy, Uniform, Weibull
from raytrain_ft.simulate.strategies import check_names

SOURCES: dict[str, type[Any]] = {"exponential": Exponential, "weibull": Weibull, "uniform": Uniform}
"""Kinds of `failures` that are a distribution; "list" gives failures one by one, "trace" reads them from a CSV file."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What is to be simulated."""

    job: Job
    strategies: tuple[Strategy, ...]
    failures: Failures


def load(path: Path) -> Simulation:
    """A simulation from a file.

    Raises:
        ConfigError: it cannot be read, or a field of it is unknown, missing or impossible; the message names the line and what
            is allowed.
    """
    return _File(*Source.read(path)).simulation()


class _File:
    """A file's values, and on which line each of them is."""

    def __init__(self, source: Source, fields: dict[str, Any]) -> None:
        self._source = source
        self._values = fields

    def _at(self, place: Place, message: str) -> str:
        return self._source.where(place) + message

    def simulation(self) -> Simulation:
        """All of it."""
        top = self._fields((), ("job", "strategies", "failures"), self._values)
        for name in ("job", "failures"):
            if name not in top:
                raise ConfigError(self._at((), f"{name} is missing: a simulation has a job, strategies and failures"))
        given = self._fields(("job",), [field.name for field in dataclasses.fields(Job)], top["job"])
        costs = self._make(Costs, ("job", "costs"), given.pop("costs", {}))
        job = self._make(Job, ("job",), given, costs=costs)
        strategies = top.get("strategies", [{"kind": "replication"}])
        if not isinstance(strategies, list) or not strategies:
            raise ConfigError(self._at(("strategies",), "strategies is a list of at least one, such as [{kind: replication}]"))
        made = tuple(self._make(Strategy, ("strategies", number), fields) for number, fields in enumerate(strategies))
        for number, strategy in enumerate(made):
            self._checked(("strategies", number), partial(strategy.check, job))
            self._checked(("strategies", number), partial(check_names, made[: number + 1]))
        return Simulation(job, made, self._failures(job, top["failures"]))

    def _failures(self, job: Job, fields: Any) -> Failures:
        kinds = (*SOURCES, "list", "trace")
        kind = fields.get("kind") if isinstance(fields, dict) else None
        if kind not in kinds:
            raise ConfigError(self._at(("failures", "kind"), f"kind={kind!r}: failures are of a kind: {', '.join(kinds)}"))
        rest = {name: value for name, value in fields.items() if name != "kind"}
        if kind == "trace":
            known = self._fields(("failures",), ("kind", "path", "cycle"), fields)
            trace = self._source.directory / str(known.get("path", ""))
            cycle = _numbers(known.get("cycle", 0.0))
            found: Failures = self._checked(("failures",), lambda: SpotTrace.read(trace, cycle))
        elif kind == "list":
            known = self._fields(("failures",), ("kind", "failures"), fields)
            listed = known.get("failures", [])
            if not isinstance(listed, list):
                raise ConfigError(
                    self._at(("failures", "failures"), f"{listed!r}: use a list, such as [{{at: 3600, lost: 1}}]")
                )
            made = [self._make(Failure, ("failures", "failures", number), each) for number, each in enumerate(listed)]
            lines = [self._at(("failures", "failures", number), "").removesuffix(": ") for number in range(len(made))]
            found = self._checked(("failures",), lambda: Listed(tuple(made), tuple(lines)))
        else:
            found = self._make(SOURCES[str(kind)], ("failures",), rest)
            self._checked(("failures",), partial(found.check, job))
        found.check(job)  # of a list or a trace: what it complains of names its line
        return found

    def _make(self, kind: type[Any], place: Place, fields: Any, **more: Any) -> Any:
        """One of the simulator's dataclasses."""
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        known = self._fields(place, list(types), fields)
        values = {name: value if types[name] == "str" else _numbers(value) for name, value in known.items()}
        required = [
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        missing = [name for name in required if name not in values]
        if missing:
            raise ConfigError(self._at(place, f"{missing[0]} is missing"))
        return self._checked(place, lambda: kind(**values, **more))

    def _fields(self, place: Place, allowed: Any, fields: Any) -> dict[str, Any]:
        if not isinstance(fields, dict):
            raise ConfigError(self._at(place, f"{fields!r}: use fields: {', '.join(allowed)}"))
        for name in fields:
            if name not in allowed:
                hint = did_you_mean(name, allowed) or "."
                raise ConfigError(self._at((*place, name), f"there is no field {name}{hint} Allowed: {', '.join(allowed)}"))
        return dict(fields)

    def _checked(self, place: Place, make: Callable[[], Any]) -> Any:
        """What a check complains of, with the line of the field that it names."""
        try:
            return make()
        except ConfigError as error:
            named = FIELD.match(str(error))
            where = (*place, named[2]) if named and (*place, named[2]) in self._source.lines else place
            if named and named[1] == "Costs" and (*place, "costs", named[2]) in self._source.lines:
                where = (*place, "costs", named[2])
            raise ConfigError(self._at(where, str(error))) from error


def _numbers(value: Any) -> Any:
    """YAML takes 1e5 for text. Lists become tuples."""
    if isinstance(value, list):
        return tuple(_numbers(each) for each in value)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
