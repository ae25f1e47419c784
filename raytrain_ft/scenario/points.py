"""The points at which a failure can strike, in a step, in a recovery or in the supervisor; docs/faults.md describes them."""

from __future__ import annotations

from typing import get_args

from raytrain_ft.chaos.faults import SUPERVISOR_PHASES, Phase

WORKER_PHASES: tuple[str, ...] = get_args(Phase)
STATES = SUPERVISOR_PHASES
BUCKET_PHASES = ("backward", "reduce", "reduced", "update", "updated")
"""Phases that have a bucket."""
MICRO_BATCH_PHASES = ("forward", "receive", "backward_pass", "send", "weight_pass")
"""Phases that have a micro-batch."""
STEP_PHASES = ("data", "tied", "commit", "checkpoint", *BUCKET_PHASES, *MICRO_BATCH_PHASES)
"""Phases of a step: a step must be given, or the first one of the run would be meant."""
OF_A_PIPELINE = ("receive", "backward_pass", "send", "tied")
"""Phases that only a run with stages has."""
NEVER = ("weight_pass",)
"""Phases of schedules that a scenario cannot choose."""
ALONE_PHASES = ("data", "fence", "join", "reconcile")
"""Phases that every stage of a pipeline gets to without another one's help."""
OF_SOME_PHASES = ("transfer_source", "transfer_receiver", "replay")
"""Phases that only some of the workers come to, according to the recovery."""
