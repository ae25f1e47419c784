"""Drills: rehearse what may happen to a job, from a scenario, and measure what it costs.

    report = drill(Scenario.load("jobs/scenarios/kill.yaml"))

A drill trains twice in the same place: undisturbed, and struck as the scenario says. The first is the measure of the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.config import CheckpointConfig, RunConfig
from raytrain_ft.drill import faults, report
from raytrain_ft.drill.engine import Played, Rehearsal
from raytrain_ft.drill.grounds import Ground, Laptop, default_storage, laptop
from raytrain_ft.drill.measure import Report, measure
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.drill.verdict import verdict
from raytrain_ft.errors import ConfigError
from raytrain_ft.progress import Display
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Scenario, trainer_parts
from raytrain_ft.task import TrainTask
from raytrain_ft.trainer import Trainer

Make = Callable[[str, Sequence[FailAt]], Trainer]
"""A trainer for a run of this name that carries these failures within."""


def drill(
    scenario: Scenario,
    ground: Ground | None = None,
    *,
    storage_path: str | Path | None = None,
    quiet: bool = False,
) -> Report:
    """Rehearses a scenario. Writes `drill.json` and `drill.md` into the directory of the run that was struck.

    Args:
        ground: where; by default a laptop cluster of its own.
        storage_path: where the records of the runs are kept; by default ~/ray_results.
        quiet: show nothing.

    Raises:
        ScenarioError: the scenario cannot be, or cannot be carried out there. Nothing was started.
        TrainingFailedError: the undisturbed run failed already.
    """
    task = faults.task_of(scenario)
    planted = faults.planted(scenario, task)
    schedule = _schedule(scenario)
    if ground is None:
        with laptop(scenario) as cluster:
            return drill(scenario, Laptop(cluster), storage_path=storage_path, quiet=quiet)
    ground.refuse(scenario)
    storage = Path(storage_path) if storage_path is not None else default_storage()
    make = _maker(scenario, task, storage)
    name = f"{scenario.name[:70]}-{time.strftime('%Y%m%d-%H%M%S')}"

    reference = _play(ground, make(f"{name}-undisturbed", ()), storage / f"{name}-undisturbed", scenario, quiet)
    if reference.error is not None:
        raise reference.error
    within = [entry.fault for entry in planted]
    played = _play(ground, make(name, within), storage / name, scenario, quiet, schedule, planted)
    found = measure(
        scenario,
        ground.name,
        played,
        reference,
        read_records(played.path / "events.jsonl"),
        read_records(reference.path / "events.jsonl"),
    )
    found = replace(found, checks=verdict(found, scenario))
    report.write(found, played.path)
    return found


def _schedule(scenario: Scenario) -> Schedule:
    for number, event in enumerate(scenario.events):
        try:
            if event.when is not None and event.when.trace is not None:
                Schedule(scenario.model_copy(update={"events": (event,)}))
        except ConfigError as error:
            raise scenario.error(("events", number, "when", "trace"), str(error)) from error
    return Schedule(scenario)


def _play(
    ground: Ground,
    trainer: Trainer,
    path: Path,
    scenario: Scenario,
    quiet: bool,
    schedule: Schedule | None = None,
    planted: Sequence[faults.Planted] = (),
) -> Played:
    with Display(path.name, scenario.steps, quiet=quiet) as display:
        return Rehearsal(ground, trainer, path, schedule, planted, show=display.show, say=display.say).play()


def _maker(scenario: Scenario, task: TrainTask, storage: Path) -> Make:
    settings, scaling, recovery, parallelism = trainer_parts(scenario)
    fixed = {name: getattr(settings, name) for name in settings.__dataclass_fields__ if name != "faults"}
    checkpoints = CheckpointConfig(every=scenario.checkpoint_every, resume="never")

    def make(name: str, within: Sequence[FailAt]) -> Trainer:
        return Trainer(
            task,
            scaling_config=scaling,
            recovery_config=recovery,
            parallelism_config=parallelism,
            run_config=RunConfig(name=name, storage_path=str(storage), checkpoint_config=checkpoints),
            quiet=True,
            faults=tuple(within),
            **fixed,
        )

    return make


__all__ = ["Report", "drill"]
