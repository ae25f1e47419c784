"""Each of four workers is killed once, each in another phase of the step. Where a loop says it best, a scenario is Python.

raytrain-ft drill jobs/scenarios/every_phase.py
"""

from raytrain_ft.scenario import Event, Point, Scenario, Thresholds, When, Who

PHASES = ("data", "forward", "backward", "commit")

scenario = Scenario(
    name="every-phase",
    about="four workers; each is killed once, each in another phase of the step",
    workers=len(PHASES),
    spares=1,
    steps=200,
    batch=64,
    events=tuple(
        Event(action="kill", who=Who(rank=rank), when=When(step=40 * (rank + 1)), at=Point(phase=phase))
        for rank, phase in enumerate(PHASES)
    ),
    pass_if=Thresholds(samples_lost=0, guarantee="exact"),
)
