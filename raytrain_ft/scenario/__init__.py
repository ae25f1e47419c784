"""Scenarios: which job, and what happens to it. The same one drives a laptop cluster, a running cluster and the simulator.

    scenario = Scenario.load("jobs/scenarios/node_loss.yaml")   # or Scenario(name=..., steps=..., events=(Event(...),), ...)
    scenario = Scenario.load("jobs/scenarios/every_phase.py")   # which is executed, and says scenario = Scenario(...)

What cannot be is refused here, before anything starts: `load` raises `ScenarioError` with file and line, the constructors raise
pydantic's `ValidationError`. What only the model can tell (how many buckets it has) is checked by `drill`, which names the line
as well: of a YAML file, or of the call that made the part.
"""

from raytrain_ft.scenario.checks import trainer_parts
from raytrain_ft.scenario.events import Event, Point, When, Who
from raytrain_ft.scenario.model import Assumed, Job, Scenario, Thresholds

__all__ = ["Assumed", "Event", "Job", "Point", "Scenario", "Thresholds", "When", "Who", "trainer_parts"]
