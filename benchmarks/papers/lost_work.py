"""CheckFreq's bounds and end-to-end times, and Nicolae's replays, by the simulator."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.papers.nicolae import WHERE, replayed
from benchmarks.papers.rows import Row, claim, number
from raytrain_ft.simulate import Costs, Exponential, Failure, Job, Listed, Strategy, simulate
from raytrain_ft.simulate.presets import (
    CHECKFREQ,
    CHECKFREQ_EPOCHS,
    CHECKFREQ_MTBF,
    HOUR,
    NICOLAE,
    CheckFreqModel,
    NicolaeModel,
)
from raytrain_ft.simulate.study import run_seeds

EPOCH = 1000
"""Steps of an epoch in the experiments on the formulas, of a second each."""
K = 40
SEEDS = 50
POINTS = 200
"""Of Figure 8, and of the experiments on the formulas."""


def lost_steps(job: Job, strategy: Strategy, step: float) -> float:
    """Steps that one failure at this point of the training costs."""
    outcome = simulate(job, strategy, Listed((Failure(step=step, lost=1),)))
    return outcome.lost_work_s / job.step_s


def formulas(points: int = POINTS) -> list[Row]:
    """Formulas 1 to 3: failures all over an epoch, and over a checkpoint that takes as long as it may."""
    chance = np.random.default_rng(0)
    job = Job(name="formulas", steps=4 * EPOCH, step_s=1.0, workers=2)
    per_epoch = Strategy(kind="global_checkpoint", every=EPOCH)
    spread = EPOCH + EPOCH * (np.arange(points) + chance.random(points)) / points
    lost = [lost_steps(job, per_epoch, float(step)) for step in spread]
    slow = Job(name="slow disk", steps=4 * EPOCH, step_s=1.0, workers=2, costs=Costs(persist_s=K - 1e-3))
    checkfreq = Strategy(kind="checkfreq", every=K)
    starts = 10 * K + K * (np.arange(points) + 0.999) / points
    bounded = [lost_steps(slow, checkfreq, float(step)) for step in starts]
    return [
        number(
            "CheckFreq, formula 1",
            "mean lost work with a checkpoint per epoch, of an epoch",
            "0.5",
            float(np.mean(lost)) / EPOCH,
            "simulated",
            within=0.01,
        ),
        claim(
            "CheckFreq, formula 2",
            "lost work with a checkpoint per epoch, of an epoch",
            "0 to 1",
            f"{min(lost) / EPOCH:.3f} to {max(lost) / EPOCH:.3f}",
            "simulated",
            holds=min(lost) >= 0 and max(lost) <= EPOCH,
        ),
        claim(
            "CheckFreq, formula 3",
            "lost work with CheckFreq, of k iterations",
            "0 to 2",
            f"{min(bounded) / K:.3f} to {max(bounded) / K:.3f}",
            "simulated",
            holds=min(bounded) >= 0 and max(bounded) <= 2 * K,
            note=f"k = {K}, each checkpoint durable only just before the next one",
        ),
    ]


def figure_8(seeds: int = SEEDS) -> list[Row]:
    """Twice as fast at an interruption every five hours?"""
    rows = []
    for model in CHECKFREQ:
        job = model.job(CHECKFREQ_EPOCHS)
        epoch = job.steps // CHECKFREQ_EPOCHS
        slow = Strategy(kind="global_checkpoint", every=epoch)
        fast = Strategy(kind="checkfreq", every=math.ceil(epoch / model.per_epoch[1]))
        source = Exponential(mtbf_s=CHECKFREQ_MTBF)
        times = [run_seeds(job, strategy, source, seeds).seconds for strategy in (slow, fast)]
        regular = Listed(tuple(Failure(at=CHECKFREQ_MTBF * (n + 1), lost=1) for n in range(400)))
        even = [simulate(job, strategy, regular).seconds for strategy in (slow, fast)]
        mean = CHECKFREQ_MTBF / (CHECKFREQ_MTBF - model.lost_hours * HOUR)
        needed = CHECKFREQ_MTBF / HOUR * (1 - 1 / float(model.speedup))
        rows.append(
            number(
                "CheckFreq, Figure 8",
                f"{model.name}: end-to-end speed-up, an interruption every 5 h",
                model.speedup,
                times[0] / times[1],
                "simulated",
                within=0.05,
                note=f"interruptions without memory, closed form {renewals(model):.2f}; {even[0] / even[1]:.2f} at one exactly "
                f"every 5 h, {mean:.2f} if each costs the mean; the printed speed-up needs {needed:.1f} h lost by each, "
                f"Table 6 has {model.lost_hours} h",
            )
        )
    return rows


def renewals(model: CheckFreqModel) -> float:
    """Expected time of an epoch that begins anew at each interruption, over the epoch: (exp(L / M) - 1) M / L."""
    per_interruption = model.epoch_s / CHECKFREQ_MTBF
    return math.expm1(per_interruption) / per_interruption


def figure_2c(model: NicolaeModel) -> list[Row]:
    """Replay of checkpoint-restart in each scenario. The paper has bars, and says that they are this product."""
    rows = []
    for scenario in model.scenarios:
        strategy = Strategy(kind="global_checkpoint", every=model.whole_batches)
        found = simulate(model.job(), strategy, Listed((Failure(step=float(scenario.mini_batch), lost=1),)))
        expected = replayed(model, scenario.mini_batch) * model.step_s
        rows.append(
            claim(
                f"{WHERE}, Figure 2c",
                f"{model.name}: replay at mini-batch {scenario.mini_batch}, s",
                "(a bar)",
                f"{found.lost_work_s:.1f}",
                "simulated",
                holds=math.isclose(found.lost_work_s, expected, rel_tol=1e-6),
                note=f"section IV-E: mini-batches since the epoch began times the mean, {expected:.1f} s",
            )
        )
    return rows


def rows() -> list[Row]:
    """All of them."""
    return [*formulas(), *figure_8(), *(row for model in NICOLAE for row in figure_2c(model))]
