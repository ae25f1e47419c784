"""From a scenario to its task, and to the failures that strike inside of a run, at an exact point (`FailAt`)."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ray.cloudpickle
from torch import nn

from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.checks import is_number
from raytrain_ft.drill.tasks import STEP_S, Tiny
from raytrain_ft.errors import ConfigError
from raytrain_ft.loading import load_task
from raytrain_ft.scenario import Event, Point, Scenario, Who
from raytrain_ft.scenario.events import AT_A_POINT
from raytrain_ft.scenario.points import ALONE_PHASES, OF_SOME_PHASES
from raytrain_ft.study.cuts import Cut, backward_order
from raytrain_ft.task import TrainTask
from raytrain_ft.training.buckets import partition

ACTIONS = {"kill": "sigkill", "kill_node": "sigkill_node", "freeze": "sigstop"}


@dataclass(frozen=True, slots=True)
class Planted:
    """A failure that the run carries within itself. `event`: the number of the scenario's event that it is of."""

    event: int
    what: Event
    fault: FailAt


def task_of(scenario: Scenario) -> TrainTask:
    """The task that a scenario names.

    Raises:
        ScenarioError: there is none of this name, or it cannot be made.
    """
    name, arguments = scenario.job.task, dict(scenario.job.arguments)
    try:
        if name == "tiny":
            return _tiny(scenario, arguments)
        place, colon, expression = name.partition(":")
        of_a_file = place.endswith(".py")
        task = load_task(f"{scenario.relative(place) if of_a_file else place}{colon}{expression}", arguments)
    except ConfigError as error:
        raise scenario.error(("job", "task"), str(error)) from error
    module = sys.modules.get(type(task).__module__)
    if module is not None and of_a_file:
        ray.cloudpickle.register_pickle_by_value(module)  # it travels whole, as a script's classes do: no worker can import it
    return task


def _tiny(scenario: Scenario, arguments: dict[str, Any]) -> TrainTask:
    unknown = set(arguments) - {"step_seconds"}
    seconds = arguments.get("step_seconds", STEP_S)
    if unknown or not is_number(seconds) or not 0 <= seconds < 3600:
        raise ConfigError(f"the arguments of tiny are step_seconds, from 0 to 3600; found {arguments}")
    return Tiny(seconds, scenario.count_micro_batches)


def is_planted(event: Event) -> bool:
    """Whether this event strikes inside of the run, at an exact point, rather than from outside."""
    by_step = event.when is None or event.when.step is not None
    of_a_member = event.who is not None and event.who.role != "spare" and event.who.node is None
    return by_step and of_a_member and event.action in AT_A_POINT and (event.at is not None or not _supervisor(event))


def _supervisor(event: Event) -> bool:
    return event.who is not None and event.who.role == "supervisor"


def planted(scenario: Scenario, task: TrainTask) -> list[Planted]:
    """The failures at exact points, with ranks drawn from the scenario's seed where it does not name them.

    Raises:
        ScenarioError: a bucket, layer or parameter that the model does not have, or the same failure twice.
    """
    chance = random.Random(f"{scenario.seed} who")
    found: list[Planted] = []
    for number, event in enumerate(scenario.events):
        if event.at is not None:
            _check_place(scenario, task, number, event.at)
        if is_planted(event):
            assert event.who is not None
            struck = ranks(event.who, scenario.range[1], chance)
            together = len(struck) if _all_get_there(scenario, event, struck) else 1
            faults = [_fault(scenario, task, event, rank, together) for rank in struck]
            if same := [one.event for one in found if one.fault.name in {fault.name for fault in faults}]:
                what = f"events.{same[0]} strikes there and then already; for more casualties give ranks or a count"
                raise scenario.error(("events", number), what)
            found += [Planted(number, event, fault) for fault in faults]
    return found


def _all_get_there(scenario: Scenario, event: Event, struck: Sequence[int | None]) -> bool:
    """Whether each of these comes to the event's point while the others wait there: stages of a pipeline feed one another."""
    point = _point(scenario, event).strikes_in
    if point in OF_SOME_PHASES or event.action == "silence":  # whose casualties nobody notices
        return False
    of_one_stage = len({rank % scenario.stages for rank in struck if rank is not None}) <= 1
    return of_one_stage or point in ALONE_PHASES


def _point(scenario: Scenario, event: Event) -> Point:
    """Where in its step an event strikes. Without a point, in a pipeline, where every stage comes by itself."""
    if event.action == "silence":
        return (event.at or Point()).model_copy(update={"phase": "backward"})
    in_pipeline = scenario.stages > 1 and not _supervisor(event)
    return event.at or Point(phase="data" if in_pipeline else "")


def ranks(who: Who, workers: int, chance: random.Random) -> list[int | None]:
    """Which of so many workers are meant; None is whoever comes first, or the supervisor."""
    if who.rank is not None:
        return [who.rank]
    if who.ranks is not None:
        return list(who.ranks)
    if who.role is not None:
        return [None]
    return [*sorted(chance.sample(range(workers), casualties(who, workers)))]


def casualties(who: Who, workers: int) -> int:
    """How many of so many workers are struck where a number or a share is given; never more than there are."""
    if who.survivors is not None:
        return max(0, workers - who.survivors)
    return min(workers, who.count if who.count is not None else math.ceil(Fraction(str(who.share or 0)) * workers))


def _fault(scenario: Scenario, task: TrainTask, event: Event, rank: int | None, together: int) -> FailAt:
    action: Any = ACTIONS.get(event.action, event.action)
    at = _point(scenario, event)
    step = event.when.step if event.when is not None else None
    if _supervisor(event):
        return FailAt(role="supervisor", phase=at.strikes_in, step=step, action=action, nth=at.nth)
    bucket = _bucket(scenario, task, at)
    place: dict[str, Any] = {
        "step": step,
        "phase": at.strikes_in,
        "bucket": bucket,
        "micro_batch": at.micro_batch,
        "nth": at.nth,
    }
    return FailAt(rank=rank, action=action, together=together, **place)


# ---------------------------------------------------------------- places in back-propagation


def _check_place(scenario: Scenario, task: TrainTask, number: int, at: Point) -> None:
    place = ("events", number, "at")
    if not at.places:
        return
    if scenario.stages > 1:
        raise scenario.error(
            (*place, at.places[0]), "the stages of a pipeline differ in their buckets: give a phase and a micro_batch"
        )
    model = task.model(0)
    buckets, layers = _layout(scenario, model)
    if at.bucket is not None and at.bucket >= len(buckets):
        raise scenario.error(
            (*place, "bucket"), f"{at.bucket}: the model has {len(buckets)} buckets of gradients: use 0 to {len(buckets) - 1}"
        )
    if at.layer is not None and at.layer >= len(layers):
        raise scenario.error(
            (*place, "layer"), f"{at.layer}: the model has {len(layers)} layers with parameters: use 0 to {len(layers) - 1}"
        )
    if at.name is not None:
        try:
            Cut(name=at.name).done(model)
        except ConfigError as error:
            raise scenario.error((*place, "name"), f"{at.name}: {error}") from error


def share_before(scenario: Scenario, number: int, at: Point) -> float:
    """The share of the gradients, in bytes, that back-propagation has come to before a bucket, a layer or a parameter.

    Raises:
        ScenarioError: the model has no such place.
    """
    task = task_of(scenario)
    _check_place(scenario, task, number, at)
    sizes = [sum(p.numel() * p.element_size() for p in params) for params in _layout(scenario, task.model(0))[0]]
    return sum(sizes[: _bucket(scenario, task, at)]) / sum(sizes)


def _layout(scenario: Scenario, model: nn.Module) -> tuple[list[list[nn.Parameter]], list[nn.Module]]:
    """The buckets of a model, in the order in which they are reduced, and its layers with parameters of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    buckets = partition(trained, scenario.bucket_bytes, scenario.first_bucket_bytes)
    return buckets, [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]


def _bucket(scenario: Scenario, task: TrainTask, at: Point) -> int | None:
    """The bucket that a point is at."""
    if not {"layer", "name", "share", "tensors"}.intersection(at.places):
        return at.bucket
    model = task.model(0)
    buckets, layers = _layout(scenario, model)
    if at.share is not None:
        sizes = [sum(p.numel() * p.element_size() for p in params) for params in buckets]
        before = [sum(sizes[:number]) for number in range(len(sizes))]
        goal = at.share * sum(sizes)
        return min(range(len(sizes)), key=lambda number: (abs(before[number] - goal), number))
    if at.layer is not None:
        lost = {id(p) for p in layers[at.layer].parameters(recurse=False)}
    else:
        lost = {id(p) for _, p in backward_order(model)[Cut(name=at.name, tensors=at.tensors).done(model) :]}
    last = len(buckets) - 1
    return next((number for number, params in enumerate(buckets) if any(id(p) in lost for p in params)), last)
