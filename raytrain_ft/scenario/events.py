"""What can happen in a scenario: who, when, where in the step, and what."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from raytrain_ft.checks import is_number
from raytrain_ft.scenario.made import Made, here

UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 1e9
"""Seconds, some 30 years: what clocks and timers of Python can take."""
DURATION = re.compile(rf"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*({'|'.join(UNITS)})\s*", re.IGNORECASE)

Action = Literal[
    "kill", "kill_node", "freeze", "unplug", "drain", "slow_down", "bring_back", "silence", "exception", "exit", "hang"
]
IN_A_STEP = ("silence", "exception", "exit", "hang")
"""Actions that are of the step itself, so that nobody can carry them out from outside."""
AT_A_POINT = ("kill", "kill_node", "freeze", *IN_A_STEP)
"""Actions that can strike inside of a step, at an exact point."""
TAKES_TIME = ("slow_down", "freeze", "kill_node", "unplug", "drain")
"""Actions that can be over after a while."""
PLACES = ("bucket", "layer", "name", "share", "tensors")
"""Fields of a point that are a place in back-propagation."""
WHOLE_NODES = ("kill_node", "unplug", "drain", "bring_back")


def _seconds(value: Any) -> Any:
    if isinstance(value, str) and (found := DURATION.fullmatch(value)):
        return float(found[1]) * UNITS[found[2].lower()]
    if not is_number(value):
        raise PydanticCustomError("duration", "give seconds as a number, or a time such as 30s, 5min, 17h")
    return value


def _share(value: Any) -> Any:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            pass  # it is no number: refused below
    if not is_number(value):
        raise PydanticCustomError("share", "give a share such as 25% or 0.25")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=LONGEST)]
Share = Annotated[float, BeforeValidator(_share), Field(gt=0, le=1, allow_inf_nan=False)]
ShareBelowAll = Annotated[float, BeforeValidator(_share), Field(ge=0, lt=1, allow_inf_nan=False)]
ShareOrNone = Annotated[float, BeforeValidator(_share), Field(ge=0, le=1, allow_inf_nan=False)]
Index = Annotated[int, Field(strict=True, ge=0)]
Whole = Annotated[int, Field(strict=True, ge=1)]


class Model(BaseModel):
    """No other fields than those that are known, and none changes. Each remembers who made it, for errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _made: Made = PrivateAttr(default_factory=here)


class Who(Model):
    """Who is struck: exactly one of these.

    Attributes:
        rank, ranks: workers by their rank; with an action on nodes, the nodes that host them.
        node: the nth of the run's nodes, in the order of the lowest rank on each, from 0.
        count, share: so many of the workers, or this share of them, drawn from the seed.
        survivors: all but so many, drawn from the seed.
        role: "any" worker or warm spare, drawn anew at each strike; the "supervisor"; a "spare".
    """

    rank: Index | None = None
    ranks: tuple[Index, ...] | None = Field(default=None, min_length=1)
    node: Index | None = None
    count: Whole | None = None
    share: Share | None = None
    survivors: Index | None = None
    role: Literal["any", "spare", "supervisor"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Who:
        _one_of(self, tuple(type(self).model_fields))
        if self.ranks is not None and len(set(self.ranks)) < len(self.ranks):
            raise PydanticCustomError("ranks", "a rank is named twice")
        return self


class When(Model):
    """When it happens: exactly one of step, seconds, mtbf and trace.

    Attributes:
        step: while this step is computed, from 0.
        seconds: after training has begun.
        mtbf: at random (Poisson), with this mean time between two of them.
        trace: as a recorded spot trace says (CSV: seconds,change of the number of nodes); relative to the scenario's file.
        count: with mtbf: at most so many times. speed: with trace: how much faster than it was recorded.
    """

    step: Index | None = None
    seconds: Seconds | None = None
    mtbf: Seconds | None = None
    trace: str | None = None
    count: Whole | None = None
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> When:
        _one_of(self, ("step", "seconds", "mtbf", "trace"))
        if self.count is not None and self.mtbf is None:
            raise PydanticCustomError("count", "count goes with mtbf only")
        if self.speed is not None and self.trace is None:
            raise PydanticCustomError("speed", "speed goes with trace only")
        return self


class Point(Model):
    """Where in the step, or in a recovery (docs/faults.md has the phases). At most one place in back-propagation.

    Attributes:
        phase: by default `backward` if a place in back-propagation is given, else `forward`.
        bucket: of gradients, in the order in which they are reduced.
        layer: of those that have parameters, as the forward pass meets them; the bucket that holds it.
        name: of the parameter whose gradient is the first that is lost; the bucket that holds it.
        share: of back-propagation (by bytes of gradients): 25% strikes when a quarter has been handed over.
        tensors: the same by their number, as Nicolae et al. cut: the bucket that holds the first tensor that is lost.
        micro_batch: of the replica's share of the step.
        nth: the nth time that this point is reached in a process.
    """

    phase: str = ""
    bucket: Index | None = None
    layer: Index | None = None
    name: str | None = None
    share: ShareBelowAll | None = None
    tensors: ShareBelowAll | None = None
    micro_batch: Index | None = None
    nth: Whole = 1

    @property
    def places(self) -> tuple[str, ...]:
        """Which places in back-propagation are given."""
        return tuple(name for name in PLACES if getattr(self, name) is not None)

    @property
    def strikes_in(self) -> str:
        """The phase, given or not."""
        return self.phase or ("backward" if self.places else "forward")


class Event(Model):
    """One thing that happens, once or again and again.

    Attributes:
        action: kill (the process), kill_node, freeze (SIGSTOP), unplug (the node's cable), drain (a notice, then the node is
            gone), slow_down, bring_back (another node joins); silence (a simulated loss: from this bucket on, zeros instead of
            gradients); exception, exit, hang (in the user's code).
        who: not with a trace, whose nodes are drawn from the seed, nor with bring_back.
        at: a point inside the step; only with `when: {step: ...}` or, for the phases of a recovery, without it.
        lasts: until it is over: the process thaws, runs at full speed again, or another node takes the place of the lost one.
        factor: of slow_down: how many times slower.
        notice: of drain: from the notice to the moment when the node is gone.
    """

    action: Action
    who: Who | None = None
    when: When | None = None
    at: Point | None = None
    lasts: Seconds | Literal[0] | None = None
    factor: Annotated[float, Field(gt=1, le=1000, allow_inf_nan=False)] | None = None
    notice: Seconds | None = None


def _one_of(model: BaseModel, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "nothing is given"
        raise PydanticCustomError("one_of", "{what}: give exactly one of {names}", {"what": what, "names": ", ".join(names)})
