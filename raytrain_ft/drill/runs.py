"""The runs of a scenario: how each is set up, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from raytrain_ft.chaos.faults import FailAt
from raytrain_ft.drill.engine import Rehearsal
from raytrain_ft.drill.faults import Planted
from raytrain_ft.drill.grounds import Ground
from raytrain_ft.drill.played import Played
from raytrain_ft.drill.schedule import Schedule
from raytrain_ft.progress import Display
from raytrain_ft.ray_config import CheckpointConfig, RunConfig
from raytrain_ft.scenario import Scenario, trainer_parts
from raytrain_ft.task import TrainTask
from raytrain_ft.trainer import Trainer


class Runs:
    """Plays runs of a scenario's job.

    Args:
        storage: where their records are kept. quiet: show nothing.
    """

    def __init__(self, scenario: Scenario, task: TrainTask, ground: Ground, storage: Path, *, quiet: bool = False) -> None:
        self._scenario = scenario
        self._task = task
        self._ground = ground
        self._storage = storage
        self._quiet = quiet

    def play(
        self, name: str, schedule: Schedule | None = None, planted: Sequence[Planted] = (), most: float = math.inf
    ) -> Played:
        """One run, undisturbed but for what these say; see `Rehearsal`."""
        trainer = self._trainer(name, [entry.fault for entry in planted])
        path = self._storage.resolve() / name
        with Display(name, self._scenario.steps, quiet=self._quiet) as display:
            about = {"show": display.show, "say": display.say, "most": most}
            return Rehearsal(self._ground, trainer, path, schedule, planted, **about).play()

    def _trainer(self, name: str, within: Sequence[FailAt]) -> Trainer:
        settings, scaling, recovery, parallelism = trainer_parts(self._scenario)
        fixed = {field: getattr(settings, field) for field in settings.__dataclass_fields__ if field != "faults"}
        checkpoints = CheckpointConfig(every=self._scenario.checkpoint_every, resume="never")
        return Trainer(
            self._task,
            scaling_config=scaling,
            recovery_config=recovery,
            parallelism_config=parallelism,
            run_config=RunConfig(name=name, storage_path=str(self._storage), checkpoint_config=checkpoints),
            quiet=True,
            faults=tuple(within),
            **fixed,
        )
