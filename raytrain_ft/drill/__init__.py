"""Drills: rehearse what may happen to a job, from a scenario, and measure what it costs.

    report = drill(Scenario.load("jobs/scenarios/node_loss.yaml"))

A drill trains twice in the same place: undisturbed, and struck as the scenario says. The first is the measure of the second.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from raytrain_ft.drill import faults, report
from raytrain_ft.drill.grounds import Ground, Laptop, default_storage, laptop
from raytrain_ft.drill.measure import disturbance, measure
from raytrain_ft.drill.numbers import Report
from raytrain_ft.drill.predict import job_of, known_job, predict
from raytrain_ft.drill.runs import Runs
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.drill.verdict import verdict
from raytrain_ft.errors import ConfigError, TrainingFailedError
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.scenario import Scenario
from raytrain_ft.simulate import Job, SpotTrace


def drill(
    scenario: Scenario,
    ground: Ground | None = None,
    *,
    storage_path: str | Path | None = None,
    quiet: bool = False,
    known: Job | None = None,
) -> Report:
    """Rehearses a scenario. Writes `drill.json` and `drill.md` into the directory of the run that was struck.

    Args:
        ground: where; by default a laptop cluster of its own.
        storage_path: where the records of the runs are kept; by default ~/ray_results.
        quiet: show nothing.
        known: a job of the same kind whose costs were measured (`predict.known_job`): what the simulator predicts from. By
            default the drill's own run, so that the prediction is one of how the costs add up.

    Raises:
        ScenarioError: the scenario cannot be, or cannot be carried out there. Nothing was struck.
        TrainingFailedError: the undisturbed run failed already, or was disturbed: it is the measure of nothing.
    """
    task = faults.task_of(scenario)
    planted = faults.planted(scenario, task)
    schedule = _schedule(scenario)
    if ground is None:
        with laptop(scenario) as cluster:
            return drill(scenario, Laptop(cluster), storage_path=storage_path, quiet=quiet, known=known)
    ground.refuse(scenario)
    storage = Path(storage_path) if storage_path is not None else default_storage()
    runs = Runs(scenario, task, ground, storage, quiet=quiet)
    name = f"{scenario.name[:70]}-{time.strftime('%Y%m%d-%H%M%S')}"
    reference = runs.play(f"{name}-undisturbed")
    if reference.error is not None:
        raise reference.error
    if found := disturbance(read_records(reference.path / "events.jsonl")):
        raise TrainingFailedError(
            f"the undisturbed run was disturbed ({found}), so it is no measure of the one that was to be struck: run the drill "
            f"again. Its records are in {reference.path}"
        )
    ground.refuse(scenario)  # again: the undisturbed run took its time, and others may have come
    played = runs.play(name, schedule, planted)
    if isinstance(played.error, ConfigError) and not played.struck:
        raise played.error
    found = measure(scenario, ground.name, played, reference)
    predicted, why_not = _predicted(scenario, played.path, known)
    found = replace(found, checks=verdict(found, scenario), predicted=predicted, unpredicted=why_not)
    report.write(found, played.path)
    return found


def _predicted(scenario: Scenario, run: Path, known: Job | None) -> tuple[dict[str, float], str]:
    """What the simulator says of the scenario, and why it says nothing if it does not."""
    try:
        found = predict(scenario, job_of(scenario, known or known_job(run)))
    except ConfigError as error:
        return {}, str(error)
    return ({}, f"the simulated run fails: {found.failure}") if found.failure else (found.numbers, "")


def _schedule(scenario: Scenario) -> Schedule:
    for number, event in enumerate(scenario.events):
        try:
            if event.when is not None and event.when.trace is not None:
                nodes = scenario.nodes or scenario.range[1] + scenario.spares
                SpotTrace.read(scenario.relative(event.when.trace)).check_nodes(nodes)
        except ConfigError as error:
            raise scenario.error(("events", number, "when", "trace"), str(error)) from error
    return Schedule(scenario)


__all__ = ["Report", "drill"]
