"""One simulated run (being written)."""

from __future__ import annotations

from raytrain_ft.simulate.failures import Failures
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import Outcome
from raytrain_ft.simulate.strategies import Strategy


def simulate(job: Job, strategy: Strategy, failures: Failures, *, seed: int = 0) -> Outcome:
    """One run of a job under a strategy and failures.

    Raises:
        ConfigError: the failures cannot happen to this job.
    """
    raise NotImplementedError
