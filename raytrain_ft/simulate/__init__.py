"""What failures will cost: discrete-event runs of the supervisor's own decisions at a job's measured or assumed costs.

`simulate` runs one job once, `compare` several strategies over several seeds, `sweep_intervals` and `sweep_failures` vary how
often is checkpointed and how often workers fail, `best_interval` searches. Everything is in seconds, steps and bytes.
"""

from raytrain_ft.simulate.engine import simulate
from raytrain_ft.simulate.failure import Failure
from raytrain_ft.simulate.failures import Exponential, Failures, Uniform, Weibull
from raytrain_ft.simulate.listed import Listed, SpotTrace
from raytrain_ft.simulate.model import Costs, Job
from raytrain_ft.simulate.outcome import Outcome, Summary, summarize
from raytrain_ft.simulate.strategies import Strategy
from raytrain_ft.simulate.study import best_interval, compare, sweep_failures, sweep_intervals

__all__ = [
    "Costs",
    "Exponential",
    "Failure",
    "Failures",
    "Job",
    "Listed",
    "Outcome",
    "SpotTrace",
    "Strategy",
    "Summary",
    "Uniform",
    "Weibull",
    "best_interval",
    "compare",
    "simulate",
    "summarize",
    "sweep_failures",
    "sweep_intervals",
]
