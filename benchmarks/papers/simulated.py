"""SWIFT's Table 5 by the simulator, beside the closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from numpy.random import default_rng

from benchmarks.papers.closed_form import (
    going_back_hours,
    initialisation_s,
    replaying_hours,
    snapshot_stall_s,
    standard_error_hours,
)
from benchmarks.papers.rows import Row, number
from benchmarks.papers.swift import HOURS_SAVED
from raytrain_ft.simulate import Costs, Job, Listed, Strategy, Uniform, simulate
from raytrain_ft.simulate.presets import (
    CHECKFREQ_HOURS,
    HOROVOD_HOURS,
    HOUR,
    SNAPSHOT_BUDGET,
    SNAPSHOT_EVERY,
    SWIFT,
    WIDE_RESNET,
    SwiftModel,
)

PAPER_RUNS = 10
"""SWIFT's simulations were repeated this often (section 7.3)."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What is solved from printed numbers: one per model for SWIFT, one each for CheckFreq and Elastic Horovod."""

    initialisation_s: dict[str, float]
    checkfreq_stall_s: float
    horovod_stall_s: float


def ratio(model: SwiftModel) -> float:
    """Of replaying with helpers to computing anew, as SWIFT measured it (section 7.1); 0 where replicas are used."""
    return 1 - model.saved[1] if model.micro_batch else 0.0


def constants() -> Constants:
    """All that is fitted, by the closed form. The baselines start like SWIFT does: their only constant is the snapshot's."""
    starts = {model.name: initialisation_s(model, ratio(model)) for model in SWIFT}

    def stall_s(printed: str) -> float:
        return snapshot_stall_s(WIDE_RESNET, SNAPSHOT_EVERY, float(printed), starts[WIDE_RESNET.name])

    return Constants(starts, stall_s(CHECKFREQ_HOURS), stall_s(HOROVOD_HOURS))


def swift_strategy(model: SwiftModel) -> Strategy:
    """Replicas, or logging with helpers; the global checkpoints stay as often as Table 4 has them."""
    return Strategy(kind="logging" if model.micro_batch else "replication", every=model.interval, label="SWIFT")


def hours(job: Job, strategy: Strategy, failures: int, runs: int, redone: float = 1.0) -> tuple[float, float]:
    """Mean time, and half of its 95 % confidence interval.

    The time of a run scatters with where its failures happen to fall between two saves, by 1.5 % for Wide-ResNet-50. The mean
    of that part is known, half an interval, so it is taken instead of what these runs happened to draw (a control variate).
    `runs` is 2 at least.

    Args:
        redone: time of a lost step, as a share of a step: less than 1 where it is replayed.
    """
    every = strategy.every
    assert every is not None
    intervals, last = divmod(job.steps, every)
    expected = failures * (intervals * every**2 + last**2) / (2 * job.steps)  # steps that are lost
    rest = []
    for seed in range(runs):
        drawn = list(Uniform(number=failures).draw(job, default_rng(seed)))
        outcome = simulate(job, strategy, Listed(tuple(drawn)), seed=seed)
        if not outcome.finished:
            raise RuntimeError(f"{job.name}, {strategy.name}, seed {seed}: {outcome.reason}")
        lost = sum(failure.step % every for failure in drawn if failure.step is not None)
        rest.append(outcome.seconds - redone * job.step_s * (lost - expected))
    return fmean(rest) / HOUR, 1.96 * stdev(rest) / math.sqrt(runs) / HOUR


@dataclass(frozen=True, slots=True)
class Table5:
    """Rows, and the largest deviations (with their confidence bounds) of both columns."""

    rows: list[Row]
    global_deviations: list[tuple[float, float]]
    swift_deviations: list[tuple[float, float]]


def table_5(runs: int) -> Table5:
    """SWIFT's end-to-end times with failures."""
    fitted = constants()
    found = Table5([], [], [])
    for model in SWIFT:
        before = _global_column(model, runs, found)
        after = _swift_column(model, fitted.initialisation_s[model.name], runs, found)
        found.rows.extend(_gains(model, before, after))
    found.rows.extend(_snapshots(fitted, runs))
    return found


def _global_column(model: SwiftModel, runs: int, found: Table5) -> float:
    """Adds the row of global checkpoints; their hours."""
    ours, ci = hours(model.job(), Strategy(kind="global_checkpoint", every=model.interval), model.failures, runs)
    expected = going_back_hours(model, model.interval)
    printed = float(model.global_hours)
    error = standard_error_hours(model, PAPER_RUNS)
    found.rows.append(
        number(
            "SWIFT, Table 5",
            f"{model.name}, global checkpoints, h",
            model.global_hours,
            ours,
            "simulated",
            within=0.007,
            note=f"± {ci:.3f} h, closed form {expected:.2f} h; nothing fitted. The mean of the paper's ten "
            f"runs has a standard error of {error:.2f} h; it lies {(printed - expected) / error:.1f} of them above",
        )
    )
    found.global_deviations.append((ours / printed - 1, ci / printed))
    return ours


def _swift_column(model: SwiftModel, started: float, runs: int, found: Table5) -> float:
    """Adds the rows of SWIFT, without and with its constant; the hours without."""
    redone, printed = ratio(model), float(model.swift_hours)
    both: list[tuple[float, float]] = []
    for seconds, fit in ((0.0, ""), (started, f"{started:.0f} s of initialisation per failure")):
        costs = Costs(rendezvous_s=seconds, replay_ratio=redone or 1.0)
        ours, ci = hours(model.job(costs), swift_strategy(model), model.failures, runs, redone)
        expected = replaying_hours(model, redone, per_failure_s=seconds)
        found.rows.append(
            number(
                "SWIFT, Table 5",
                f"{model.name}, SWIFT, h",
                model.swift_hours,
                ours,
                "simulated",
                within=0.005,
                constants=fit,
                note=f"± {ci:.3f} h, closed form {expected:.2f} h" + ("" if fit else "; nothing fitted"),
            )
        )
        both.append((ours, ci))
    ours, ci = both[1]
    found.swift_deviations.append((ours / printed - 1, ci / printed))
    return both[0][0]


def _gains(model: SwiftModel, before: float, after: float) -> list[Row]:
    """What SWIFT gains by the simulated times alone: the speed-up, and the hours where the paper prints them."""
    note = "by the two simulated times, nothing fitted"
    own = float(model.global_hours) / float(model.swift_hours)
    if f"{own:.2f}" != model.speedup:
        note += f"; {own:.3f} by the printed ones, too"
    rows = [
        number("SWIFT, Table 5", f"{model.name}: speed-up", model.speedup, before / after, "simulated", within=0.007, note=note)
    ]
    for other, printed in HOURS_SAVED:
        if other is model:
            short = float(printed) - (before - after)
            error = standard_error_hours(model, PAPER_RUNS)
            rows.append(
                number(
                    "SWIFT, section 7.3",
                    f"{model.name}: hours saved",
                    printed,
                    before - after,
                    "simulated",
                    within=0.02,
                    note=f"by the two simulated times, nothing fitted: {short:.1f} h less. The mean of the paper's ten runs "
                    f"with global checkpoints alone has a standard error of {error:.1f} h",
                )
            )
    return rows


def _snapshots(fitted: Constants, runs: int) -> list[Row]:
    rows = []
    budget = SNAPSHOT_BUDGET * SNAPSHOT_EVERY * WIDE_RESNET.step_s
    for name, printed, stall in (
        ("CheckFreq", CHECKFREQ_HOURS, fitted.checkfreq_stall_s),
        ("Elastic Horovod", HOROVOD_HOURS, fitted.horovod_stall_s),
    ):
        for seconds, within in ((budget, 0.0), (stall, 0.01)):
            job, strategy = snapshot_job(name, seconds, fitted)
            ours, ci = hours(job, strategy, WIDE_RESNET.failures, runs)
            share = 100 * seconds / (SNAPSHOT_EVERY * WIDE_RESNET.step_s)
            constants = f"{seconds:.2f} s per snapshot, {share:.1f} % of the time" if within else ""
            note = "" if within else f"; snapshots cost {share:.1f} %, the most that their interval was chosen for"
            what = f"Wide-ResNet-50, {name}, h"
            rows.append(
                number(
                    "SWIFT, section 7.3",
                    what,
                    printed,
                    ours,
                    "simulated",
                    within=within,
                    constants=constants,
                    note=f"± {ci:.3f} h{note}",
                )
            )
    return rows


def snapshot_job(name: str, stall_s: float, fitted: Constants) -> tuple[Job, Strategy]:
    """Wide-ResNet-50 under CheckFreq or Elastic Horovod, if training sees so much of each snapshot."""
    start = fitted.initialisation_s[WIDE_RESNET.name]
    if name == "CheckFreq":  # the copy that a step does not hide
        costs = Costs(copy_s=stall_s + WIDE_RESNET.step_s, restart_s=start)
        return WIDE_RESNET.job(costs), Strategy(kind="checkfreq", every=SNAPSHOT_EVERY, label=name)
    costs = Costs(copy_s=stall_s, rendezvous_s=start)
    return WIDE_RESNET.job(costs), Strategy(kind="elastic_horovod", every=SNAPSHOT_EVERY, label=name)
