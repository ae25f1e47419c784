"""CheckFreq's bounds and end-to-end times, and what Nicolae's failures cost, by the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

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
    TINY_RESNET50,
    CheckFreqModel,
    NicolaeModel,
    Scenario,
)
from raytrain_ft.simulate.study import run_seeds

EPOCH = 1000
"""Steps of an epoch in the experiments on the formulas, of a second each."""
K = 40
SEEDS = 50
POINTS = 200
"""Of Figure 8, and of the experiments on the formulas."""
CUTS = (0.25, 0.5, 0.75)
"""Of back-propagation, after which Nicolae et al. let workers fail; it takes two thirds of a mini-batch."""
SURVIVORS = (2, 4, 6)
"""Of eight workers; nobody replaces the others (section IV-F)."""
LOSSY = Strategy(kind="lossy", quorum=0.0)
"""However few are left."""
NOTICING_S = 0.3
"""What benchmarks.forward allows a lossy pause of this project beyond the mini-batch, to notice the loss and to agree. In the
paper nobody is lost: casualties go on with zeros."""


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
        found = replay_s(model, scenario)
        expected = replayed(model, scenario.mini_batch) * model.step_s
        rows.append(
            claim(
                f"{WHERE}, Figure 2c",
                f"{model.name}: replay at mini-batch {scenario.mini_batch}, s",
                "(a bar)",
                f"{found:.1f}",
                "simulated",
                holds=math.isclose(found, expected, rel_tol=1e-6),
                note=f"section IV-E: mini-batches since the epoch began times the mean, {expected:.1f} s",
            )
        )
    return rows


def replay_s(model: NicolaeModel, scenario: Scenario) -> float:
    """Seconds of work that checkpoint-restart does again."""
    strategy = Strategy(kind="global_checkpoint", every=model.whole_batches)
    return simulate(model.job(), strategy, Listed((Failure(step=float(scenario.mini_batch), lost=1),))).lost_work_s


def late_s(
    model: NicolaeModel, scenario: Scenario, strategy: Strategy, cut: float, survivors: int, noticing_s: float = 0.0
) -> float:
    """By how many seconds later than undisturbed a run ends whose last mini-batch is the one that fails.

    Raises:
        RuntimeError: it does not end.
    """
    job = replace(
        model.job(),
        steps=scenario.mini_batch + 1,
        spares=0,
        spare_nodes=0,
        min_workers=survivors,
        costs=Costs(detect_s=noticing_s),
    )
    failure = Failure(step=scenario.mini_batch + (1 + 2 * cut) / 3, lost=job.workers - survivors)
    found = simulate(job, strategy, Listed((failure,)))
    if not found.finished:
        raise RuntimeError(f"{model.name}, {strategy.name}, mini-batch {scenario.mini_batch}: {found.reason}")
    return found.seconds - job.useful_s


def lossy(model: NicolaeModel) -> list[Row]:
    """What lossy forward recovery costs: nearly nothing, as far as the paper counts."""
    points = [(scenario, LOSSY, cut, left) for scenario in model.scenarios for cut in CUTS for left in SURVIVORS]
    most = max(abs(late_s(model, *point)) for point in points)
    replays = [replay_s(model, scenario) for scenario in model.scenarios]
    noticed = max(late_s(model, *point, NOTICING_S) for point in points)
    ratios = " ".join(f"{replay / noticed:.0f}" for replay in replays)
    return [
        claim(
            f"{WHERE}, Figure {'3b' if model is TINY_RESNET50 else '4b'}",
            f"{model.name}: the failed mini-batch takes about Baseline's time with lossy",
            "about 1",
            f"{1 + most / model.step_s:.2f}",
            "simulated",
            holds=most <= 0.05 * model.step_s,
            note="the longest of all scenarios at 25, 50 and 75 % with 2, 4 and 6 of 8 left: it is finished, never redone. To "
            "notice a loss costs nothing here, as in the paper, whose casualties go on with zeros",
        ),
        claim(
            f"{WHERE}, section IV-F",
            f"{model.name}: lossy costs two orders of magnitude less than checkpoint-restart",
            ">= 100",
            f"{most:.2f} s against {' '.join(f'{replay:.1f}' for replay in replays)} s",
            "simulated",
            holds=100 * most <= min(replays),
            note=f"the loss of progress alone, and nothing for noticing it. If that takes {NOTICING_S} s, which "
            f"benchmarks.forward allows this project, it is {ratios} times less",
        ),
    ]


def rows() -> list[Row]:
    """All of them."""
    nicolae = [row for model in NICOLAE for row in (*figure_2c(model), *lossy(model))]
    return [*formulas(), *figure_8(), *nicolae]
