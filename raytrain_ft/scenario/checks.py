"""What cannot be although each field of a scenario by itself could: found before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raytrain_ft.config import ParallelismConfig, RecoveryConfig
from raytrain_ft.errors import ConfigError
from raytrain_ft.ray_config import CheckpointConfig, ScalingConfig
from raytrain_ft.scenario.events import AT_A_POINT, IN_A_STEP, TAKES_TIME, Event, Who
from raytrain_ft.scenario.file import FIELD, Place
from raytrain_ft.scenario.points import (
    BUCKET_PHASES,
    MICRO_BATCH_PHASES,
    NEVER,
    OF_A_PIPELINE,
    STATES,
    STEP_PHASES,
    WORKER_PHASES,
)
from raytrain_ft.settings import TrainSettings
from raytrain_ft.simulate import Costs

if TYPE_CHECKING:
    from raytrain_ft.scenario.model import Scenario

Problem = tuple[Place, Any, str]
"""The place of a field, its value, and what is wrong with it."""
NAMES = {
    "max_steps": "steps",
    "global_batch_size": "batch",
    "gradient_accumulation_steps": "micro_batches",
    "num_workers": "workers",
    "num_spares": "spares",
    "pipeline_parallel_degree": "stages",
    "num_pp_microbatches": "micro_batches",
}
"""Of arguments of `Trainer` and its configurations: what a scenario calls them, where that is something else."""


def problems(scenario: Scenario) -> Iterator[Problem]:
    """Everything that cannot be."""
    yield from _of_the_job(scenario)
    yield from _of_events(scenario)
    if scenario.assumed is not None:
        yield from _of_costs(scenario.assumed.costs, scenario.assumed.step_s)


def _of_costs(costs: Mapping[str, float], step_s: float) -> Iterator[Problem]:
    """What the simulator would refuse."""
    names = tuple(Costs.__dataclass_fields__)
    for name, value in costs.items():
        place = ("assumed", "costs", name)
        if name not in names:
            yield place, value, f"there is no such cost. Allowed here: {', '.join(names)}"
            continue
        try:
            Costs(**{name: value})
        except ConfigError as error:
            yield place, value, str(error)
            continue
        if name == "update_s" and value >= step_s:
            yield place, value, f"an update is part of a step: use less than step_s, which is {step_s:g}"


def _of_the_job(scenario: Scenario) -> Iterator[Problem]:
    """What `Trainer` itself would refuse, before a task is loaded."""
    least, most = scenario.range
    if least > most:
        yield ("workers",), scenario.workers, "the least number of workers is greater than the most"
        return
    try:
        settings, _, recovery, _ = trainer_parts(scenario)
    except ConfigError as error:
        named = FIELD.match(str(error))
        name = NAMES.get(named[2], named[2]) if named else ""
        yield (name,) if name else (), getattr(scenario, name, None), str(error)
        return
    try:
        settings.check_checkpoints(CheckpointConfig(every=scenario.checkpoint_every), recovery)
    except ConfigError as error:
        yield ("checkpoint_every",), scenario.checkpoint_every, str(error)


def trainer_parts(scenario: Scenario) -> tuple[TrainSettings, ScalingConfig, RecoveryConfig, ParallelismConfig]:
    """What `Trainer` is given for a scenario.

    Raises:
        ConfigError: the parts do not go together.
    """
    pipeline = scenario.stages > 1
    settings = TrainSettings(
        max_steps=scenario.steps,
        global_batch_size=scenario.batch,
        seed=scenario.seed,
        gradient_accumulation_steps=1 if pipeline else scenario.micro_batches or 1,
        drop_last=pipeline,
        bucket_bytes=scenario.bucket_bytes,
        first_bucket_bytes=scenario.first_bucket_bytes,
    )
    scaling = ScalingConfig(num_workers=scenario.workers)
    names = ("strategy", "quorum", "lost_samples", "update", "replacement")
    choices: dict[str, Any] = {name: getattr(scenario, name) for name in names}
    recovery = RecoveryConfig(
        num_spares=scenario.spares,
        hang_timeout=timedelta(seconds=scenario.hang_timeout),
        replacement_timeout=timedelta(seconds=scenario.replacement_timeout),
        max_fruitless_recoveries=scenario.max_fruitless_recoveries,
        **choices,
    )
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=scenario.stages,
        num_pp_microbatches=scenario.micro_batches if pipeline else None,
        split="auto" if pipeline else "task",
    )
    settings.check(scaling, recovery, parallelism)
    return settings, scaling, recovery, parallelism


def _of_events(scenario: Scenario) -> Iterator[Problem]:
    for number, event in enumerate(scenario.events):
        place = ("events", number)
        for problem in (*_of_who(scenario, event), *_of_when(scenario, event), *_of_point(scenario, event)):
            yield (*place, *problem[0]), *problem[1:]
        for name, actions in (("factor", ("slow_down",)), ("notice", ("drain",)), ("lasts", TAKES_TIME)):
            if getattr(event, name) is not None and event.action not in actions:
                yield (*place, name), getattr(event, name), f"{name} goes with {', '.join(actions)} only"
        if event.action == "freeze" and event.who is not None and event.who.role == "supervisor" and not event.lasts:
            yield (*place, "action"), event.action, "a frozen supervisor needs lasts: nothing else wakes it"
        for action, names in (("slow_down", ("factor", "lasts")), ("drain", ("notice",))):
            for name in names:
                if event.action == action and getattr(event, name) is None:
                    yield (*place, "action"), action, f"{action} needs {name}"


def _of_who(scenario: Scenario, event: Event) -> Iterator[Problem]:
    who, most = event.who, scenario.range[1]
    if event.action == "bring_back" or (event.when is not None and event.when.trace is not None):
        if who is not None:
            yield ("who",), None, "nobody is named here: the nodes of a trace are drawn, and bring_back adds one"
        return
    if who is None:
        yield ("action",), event.action, f"{event.action} needs who"
        return
    for name, ranks in (("rank", (who.rank,)), ("ranks", who.ranks or ())):
        beyond = [rank for rank in ranks if rank is not None and rank >= most]
        if beyond:
            yield ("who", name), beyond[0], f"there are {most} workers: ranks go from 0 to {most - 1}"
    nodes = scenario.nodes or most
    if who.node is not None and who.node >= nodes:
        yield ("who", "node"), who.node, f"the run is on {nodes} nodes at most: use 0 to {nodes - 1}"
    if who.count is not None and who.count > most:
        yield ("who", "count"), who.count, f"more casualties than there are workers: use 1 to {most}"
    if who.survivors is not None and who.survivors >= most:
        yield ("who", "survivors"), who.survivors, f"of {most} workers at most {most - 1} can survive a failure"
    if who.role == "supervisor" and event.action not in ("kill", "freeze"):
        yield ("action",), event.action, "the supervisor can be killed or frozen"
    if who.node is not None and event.action in IN_A_STEP:
        yield ("who", "node"), who.node, f"{event.action} happens in a worker: name it by its rank"
    if event.action == "silence":
        yield from _of_silence(scenario, event, who)
    if who.role == "spare" and scenario.spares == 0:
        yield ("who", "role"), "spare", "the scenario has spares: 0"


def _of_silence(scenario: Scenario, event: Event, who: Who) -> Iterator[Problem]:
    most = scenario.range[1]
    left = [rank for rank in range(most) if rank != who.rank and rank not in (who.ranks or ())]
    if who.count == most or who.survivors == 0 or math.ceil((who.share or 0) * most) == most or not left:
        yield ("who",), None, "if all fall silent, there is nothing to go on with"
    if scenario.stages > 1 or scenario.update != "barrier":
        yield ("action",), "silence", "silence goes with update: barrier, and without stages"
    if event.at is not None and event.at.strikes_in != "backward" and (event.at.phase or event.at.micro_batch is not None):
        yield ("at", "phase"), event.at.phase, "a rank falls silent in phase backward"


def _of_when(scenario: Scenario, event: Event) -> Iterator[Problem]:
    when = event.when
    if when is None:
        if event.at is None or event.at.strikes_in in STEP_PHASES:
            yield ("action",), event.action, "say when: step, seconds, mtbf or trace"
        return
    if when.step is not None and when.step >= scenario.steps:
        yield ("when", "step"), when.step, f"the run has {scenario.steps} steps: use 0 to {scenario.steps - 1}"
    if when.trace is not None and event.action not in ("kill_node", "drain"):
        yield ("when", "trace"), when.trace, "a trace is of nodes: it goes with kill_node and drain"
    if when.step is None and event.action in IN_A_STEP:
        yield ("when",), None, f"{event.action} happens in the step itself: give a step"
    if when.mtbf is not None and event.action == "bring_back":
        yield ("when", "mtbf"), when.mtbf, "bring_back happens at a step or a time; after a loss, use lasts"


def _worker_phases(scenario: Scenario) -> tuple[str, ...]:
    """Those that a worker of this run can come to."""
    never = NEVER if scenario.stages > 1 else (*NEVER, *OF_A_PIPELINE)
    return tuple(phase for phase in WORKER_PHASES if phase not in never)


def _of_point(scenario: Scenario, event: Event) -> Iterator[Problem]:
    at = event.at
    if at is None:
        return
    if event.action not in AT_A_POINT:
        yield ("at",), None, f"{event.action} comes from outside: only {', '.join(AT_A_POINT)} can strike at a point"
    if event.when is not None and event.when.step is None:
        yield ("at",), None, "a point goes with a step; a time, a rate or a trace strikes wherever the run is"
    if event.who is not None and event.who.role == "spare":
        yield ("at",), None, "a spare is in no step"
    of_supervisor = event.who is not None and event.who.role == "supervisor"
    known = STATES if of_supervisor else _worker_phases(scenario)
    if at.strikes_in not in known:
        whose = "supervisor has the states" if of_supervisor else "worker has the phases"
        without = ", in a run without stages" if at.strikes_in in OF_A_PIPELINE and not of_supervisor else ""
        yield ("at", "phase"), at.strikes_in, f"a {whose} {', '.join(known)}{without}"
        return
    places = at.places
    if len(places) > 1:
        yield ("at", places[1]), getattr(at, places[1]), f"{' and '.join(places)} exclude each other"
    if places and at.strikes_in not in BUCKET_PHASES:
        yield ("at", places[0]), getattr(at, places[0]), f"{at.strikes_in} has no buckets: {', '.join(BUCKET_PHASES)} have"
    if places and at.strikes_in in ("update", "updated") and scenario.update == "barrier":
        yield ("at", places[0]), getattr(at, places[0]), f"with update: barrier all buckets are updated at once: no {places[0]}"
    if at.micro_batch is not None:
        count = scenario.count_micro_batches
        if at.strikes_in not in MICRO_BATCH_PHASES:
            yield ("at", "micro_batch"), at.micro_batch, f"only {', '.join(MICRO_BATCH_PHASES)} are of a micro-batch"
        elif at.micro_batch >= count:
            yield ("at", "micro_batch"), at.micro_batch, f"a replica has {count} micro-batches: use 0 to {count - 1}"
