"""Expected times with failures, without a simulator: what the simulator is checked against, and what constants are solved from.

Failures strike points of the training that are drawn uniformly, as in SWIFT's study (section 7.3). Then each costs the same on
average, and nothing that is done again is struck again, so the expectations simply add up.
"""

from __future__ import annotations

import math

from raytrain_ft.simulate.presets import HOUR, SwiftModel


def going_back_hours(model: SwiftModel, every: int, *, stall_s: float = 0.0, per_failure_s: float = 0.0) -> float:
    """With failures, if everybody goes back to what was saved last: half an interval per failure.

    Args:
        every: steps between two times that the state is saved. stall_s: for how long training stands still for it.
        per_failure_s: what a failure costs besides.
    """
    lost = every * model.step_s / 2 + per_failure_s
    return model.hours + (saves(model, every) * stall_s + model.failures * lost) / HOUR


def replaying_hours(model: SwiftModel, ratio: float, *, per_failure_s: float = 0.0) -> float:
    """The same, if the lost stages replay their whole steps since the last checkpoint at `ratio` of a step's time each, and
    everybody does the interrupted step again. With a ratio of 0: replicas are used."""
    replay = ratio * (model.interval - 1) / 2 * model.step_s
    return model.hours + model.failures * (replay + model.step_s / 2 + per_failure_s) / HOUR


def initialisation_s(model: SwiftModel, ratio: float) -> float:
    """The one constant per model that SWIFT's column of Table 5 is allowed: what remains for each failure."""
    return (float(model.swift_hours) - replaying_hours(model, ratio)) * HOUR / model.failures


def snapshot_stall_s(model: SwiftModel, every: int, hours: float, per_failure_s: float) -> float:
    """The one constant of CheckFreq and of Elastic Horovod: for how long a snapshot holds training up, so that the total is
    the printed one."""
    return (hours - going_back_hours(model, every, per_failure_s=per_failure_s)) * HOUR / saves(model, every)


def saves(model: SwiftModel, every: int) -> int:
    """How often the state is saved; not after the last step."""
    return (model.steps - 1) // every


def best_hours(model: SwiftModel, stall_s: float, redone: float = 1.0) -> float:
    """What saving and doing again cost together at the best interval (Young): sqrt(2 T F C r).

    Args:
        redone: time of doing a step again, as a share of a step: less than 1 where it is replayed.
    """
    return math.sqrt(2 * model.hours * model.failures * redone * stall_s / HOUR)


def standard_error_hours(model: SwiftModel, runs: int) -> float:
    """Of the mean of so many runs under global checkpoints: what is lost by a failure is uniform over an interval."""
    return model.interval_s / HOUR / math.sqrt(12) * math.sqrt(model.failures / runs)
