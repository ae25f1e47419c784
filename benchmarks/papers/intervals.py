"""SWIFT's Figures 13 and 14: every method at the interval that is best for it, and what failures then cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.papers.closed_form import best_hours
from benchmarks.papers.rows import Row, claim, number
from benchmarks.papers.simulated import Constants, constants, hours, ratio, snapshot_job, swift_strategy
from benchmarks.papers.swift import wide_resnet_parameters
from raytrain_ft.simulate import Costs, Job, Strategy
from raytrain_ft.simulate.presets import BERT, BERT_CHECKPOINT, HOUR, WIDE_RESNET, SwiftModel

TORCH_SAVE = 20e9 / 32
"""Bytes per second of torch.save in torchsnapshot's published benchmark (20 GB in 32 s): SWIFT prints no time for saving
Wide-ResNet-50, and this is not fitted to it."""
MTBF_HOURS = (5, 10, 17, 30, 60, 120)
"""Of Figure 14's sweep, whose axis the text does not give."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method at the interval that is best for it. `redone`: time of a lost step, as a share of a step."""

    model: SwiftModel
    job: Job
    strategy: Strategy
    redone: float = 1.0

    def hours(self, failures: int, runs: int) -> float:
        """Mean time with so many failures."""
        return hours(self.job, self.strategy, failures, runs, self.redone)[0]

    def at_best(self, runs: int) -> Method:
        """At the interval that takes the least time with the failures of Table 5. `best_interval` of the simulator searches
        over whatever was drawn; here chance is taken out (see `hours`), so the valley is smooth and can be halved."""
        known: dict[int, float] = {}

        def at(every: int) -> float:
            if every not in known:
                known[every] = self._every(every).hours(self.model.failures, runs)
            return known[every]

        low, high = 1, self.model.interval
        while high - low > max(2, low // 50):
            left, right = (round(low ** (1 - part) * high**part) for part in (1 / 3, 2 / 3))
            low, high = (low, right) if at(left) <= at(right) else (left, high)
        return self._every(min(known, key=at))

    def _every(self, every: int) -> Method:
        return replace(self, strategy=replace(self.strategy, every=every))


@dataclass(frozen=True, slots=True)
class Rival:
    """A method of Figure 13 beside SWIFT. stall_s: what training sees of a save. source: where that is from."""

    name: str
    method: Method
    swift: Method
    printed: str
    stall_s: float
    source: str


def wide_resnet_save_s() -> float:
    """A global checkpoint of Wide-ResNet-50, parameters and momentum."""
    return 8 * wide_resnet_parameters(2 * 320) / TORCH_SAVE


def swift(model: SwiftModel, save_s: float, fitted: Constants) -> Method:
    """SWIFT with global checkpoints that hold training up for so long, as often as Table 4 has them."""
    costs = Costs(
        copy_s=save_s + model.step_s,  # all but a step of it is seen
        rendezvous_s=fitted.initialisation_s[model.name],
        replay_ratio=ratio(model) or 1.0,
    )
    return Method(model, model.job(costs), swift_strategy(model), ratio(model))


def global_checkpoints(model: SwiftModel, save_s: float, fitted: Constants) -> Method:
    """Everybody goes back, and starts as SWIFT's replacements do."""
    job = model.job(Costs(persist_s=save_s, restart_s=fitted.initialisation_s[model.name]))
    return Method(model, job, Strategy(kind="global_checkpoint", every=model.interval))


def rivals(at_best: Callable[[Method], Method]) -> list[Rival]:
    """All of Figure 13, at the intervals that `at_best` finds. With replicas, SWIFT's own stays (section 7.3); with logging it
    is the best one, too."""
    fitted = constants()
    save_s = wide_resnet_save_s()
    wide = swift(WIDE_RESNET, save_s, fitted)
    found = [
        Rival(
            "global checkpoints",
            at_best(global_checkpoints(WIDE_RESNET, save_s, fitted)),
            wide,
            "11.8",
            save_s,
            "the published speed of torch.save, for SWIFT prints none",
        )
    ]
    for name, stall_s, printed in (
        ("CheckFreq", fitted.checkfreq_stall_s, "7.1"),
        ("Elastic Horovod", fitted.horovod_stall_s, "7.2"),
    ):
        method = Method(WIDE_RESNET, *snapshot_job(name, stall_s, fitted))
        found.append(Rival(name, at_best(method), wide, printed, stall_s, "the constant of section 7.3's total"))
    own = at_best(swift(BERT, BERT_CHECKPOINT, fitted))
    other = at_best(global_checkpoints(BERT, BERT_CHECKPOINT, fitted))
    found.append(Rival("global checkpoints", other, own, "1.3", BERT_CHECKPOINT, "printed; nothing is fitted"))
    return found


def figure_13(found: list[Rival], runs: int) -> list[Row]:
    """What SWIFT saves of the time of each other method at its best."""
    rows = []
    for rival in found:
        model = rival.method.model
        saved = rival.method.hours(model.failures, runs) - rival.swift.hours(model.failures, runs)
        if model is BERT:
            young = best_hours(model, rival.stall_s) - best_hours(model, rival.stall_s, ratio(model))
        else:
            own = (model.steps - 1) // model.interval * wide_resnet_save_s() / HOUR
            young = best_hours(model, rival.stall_s) - own
        swifts = f", SWIFT's every {rival.swift.strategy.every}" if model is BERT else ""
        rows.append(
            number(
                "SWIFT, Figure 13",
                f"{model.name}: saved of {rival.name}, h",
                rival.printed,
                saved,
                "simulated",
                shape=True,
                note=f"best every {rival.method.strategy.every} steps{swifts}; a save holds training up for "
                f"{rival.stall_s:.2f} s: {rival.source}; closed form {young:.2f} h",
            )
        )
    return rows


def figure_14(found: list[Rival], runs: int) -> list[Row]:
    """Speed-up of SWIFT over the mean time between failures, all at the intervals of Figure 13."""
    rows = []
    for rival in found:
        model = rival.method.model
        counts = [round(model.hours / mtbf) for mtbf in MTBF_HOURS]
        ratios = [rival.method.hours(n, runs) / rival.swift.hours(n, runs) for n in counts]
        falling = all(before > after for before, after in pairwise(ratios))
        rows.append(
            claim(
                "SWIFT, Figure 14",
                f"{model.name} over {rival.name}: the more failures, the greater the speed-up, and never slower",
                "yes",
                " ".join(f"{found:.3f}" for found in ratios),
                "simulated",
                holds=falling and min(ratios) >= 1,
                note=f"at {', '.join(map(str, MTBF_HOURS))} h between failures",
            )
        )
    return rows
