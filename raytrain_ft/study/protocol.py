"""The protocol of the study: train undisturbed, stop at chosen mini-batches, and try every arm from there (NI-28).

`Before` is the state right before such a mini-batch, `Baseline` the state after it without a failure. Every other arm cuts the
mini-batch. All arms see the same samples, gradients and random numbers. Each then goes on undisturbed for a while, which
shows whether the deviation grows or fades.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raytrain_ft.policy.sampling import Sampling, next_batch, position_at, sample_ids, share, steps_per_epoch
from raytrain_ft.study.cuts import Cut
from raytrain_ft.study.emulate import Group, Worker, distance, norm
from raytrain_ft.study.models import MODELS, data
from raytrain_ft.training.random import seed_all, step_seed

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "weight_decay": partial(torch.optim.SGD, weight_decay=1e-2),
    "adam": torch.optim.Adam,
}
THIRDS = (Cut(tensors=0.25), Cut(tensors=0.5), Cut(tensors=0.75))
TIMED = 3
"""How often a mini-batch is done to be timed."""
Progress = Callable[[], object]
"""Called after each arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStudy:
    """What is done with one model.

    Attributes:
        model: "resnet" or "nt3". lr: of plain SGD. batch: samples of a mini-batch over all workers.
        at: mini-batches, from 0, at which all arms are tried. cuts: of the back-propagation.
        adam_lr: of Adam, where optimizers are compared; the other optimizers use lr (with momentum a tenth of it).
    """

    model: str
    batch: int
    lr: float
    at: tuple[int, ...]
    cuts: tuple[Cut, ...] = THIRDS
    adam_lr: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole study.

    Attributes:
        workers: in the group. survivors: how many are left, for lossy forward.
        seeds: how many trainings of each model; they differ in the initial weights, the order of samples and dropout.
        after: undisturbed mini-batches after which every arm is measured once more.
        optimizers: which are compared when lost gradients are zeros instead of no update.
    """

    name: str
    models: tuple[ModelStudy, ...]
    workers: int = 4
    survivors: tuple[int, ...] = (1, 2, 3)
    seeds: int = 3
    after: int = 10
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)

    @property
    def count(self) -> int:
        """Arms over all points, models and seeds, and comparisons of optimizers."""
        arms = sum(len(one.at) * (2 + len(one.cuts) * (1 + len(self.survivors))) for one in self.models)
        return self.seeds * (arms + len(self.models) * len(self.optimizers))


@dataclass(frozen=True, slots=True)
class Arm:
    """What is done with a mini-batch.

    Attributes:
        kind: "before", "baseline", "rollback" or "lossy". cut: where; empty without one. survivors: of lossy forward.
    """

    kind: str
    cut: str = ""
    survivors: int = 0

    @property
    def label(self) -> str:
        """For tables."""
        end = f", {self.survivors} left" if self.survivors else ""
        return f"{self.kind} {self.cut}{end}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One arm of one training; `Summary` says what the numbers mean."""

    model: str
    seed: int
    step: int
    arm: Arm
    accuracy: float
    loss: float
    accuracy_off: float
    loss_off: float
    later_accuracy_off: float
    later_loss_off: float
    distance: float
    of_a_step: float
    later_distance: float
    updated_twice: int
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What zeros do that no update does not: a rollback at half of the tensors, with either (mechanisms NI-14).

    Attributes:
        interrupted: distance of the weights between the two when the mini-batch was cut, relative to how far an undisturbed
            mini-batch moves them. replayed: the same after the mini-batch was redone.
        rollback: distance of the rollback without zeros to Baseline, on the same scale.
    """

    model: str
    optimizer: str
    seed: int
    step: int
    interrupted: float
    replayed: float
    rollback: float


@dataclass(frozen=True, slots=True)
class Curve:
    """An undisturbed training: held-out accuracy and loss before these mini-batches."""

    model: str
    seed: int
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    contrasts: tuple[Contrast, ...]
    curves: tuple[Curve, ...]


class Training:
    """One training of one model."""

    def __init__(self, plan: Plan, what: ModelStudy, seed: int, optimizer: str = "sgd") -> None:
        self.plan, self.what, self.seed = plan, what, seed
        self._data = data(what.model)
        self.sampling = Sampling(len(self._data.labels), what.batch, seed, drop_last=True)
        seed_all(step_seed(seed, 0, 0, 0))
        model = MODELS[what.model]()
        lr = {"adam": what.adam_lr, "momentum": what.lr / 10}.get(optimizer, what.lr)
        self.group = Group(model, OPTIMIZERS[optimizer](model.parameters(), lr=lr))

    def workers(self, step: int) -> list[Worker]:
        """Everybody's part of a mini-batch."""
        batch, _ = next_batch(self.sampling, position_at(self.sampling, step))
        found = []
        for rank in range(self.plan.workers):
            ids = torch.from_numpy(sample_ids(self.sampling, batch.epoch, share(batch, rank, self.plan.workers)).copy())
            inputs, labels = self._data.inputs[ids], self._data.labels[ids]
            found.append(Worker(partial(_loss, inputs=inputs, labels=labels), step_seed(self.seed, step, rank, 0)))
        return found

    def train(self, group: Group, start: int, stop: int) -> None:
        """Undisturbed mini-batches [start, stop)."""
        for step in range(start, stop):
            group.train(group.gradients(self.workers(step)))

    @torch.no_grad()
    def measure(self, group: Group) -> tuple[float, float]:
        """(accuracy, loss) on what was held out."""
        group.model.eval()
        logits = group.model(self._data.held_out_inputs)
        labels = self._data.held_out_labels
        return float((logits.argmax(1) == labels).double().mean()), float(F.cross_entropy(logits, labels))

    def rollback(self, group: Group, step: int, done: int) -> tuple[Group, int]:
        """A mini-batch that is cut, where its back-propagation ends, and done again, undisturbed, by a copy of the survivor;
        and how many parameters were updated twice."""
        twice = group.interrupt(group.gradients(self.workers(step), done), done)
        found = group.fork()
        self.train(found, step, step + 1)
        return found, twice

    def lossy(self, group: Group, step: int, done: int, survivors: int) -> tuple[Group, int]:
        """A mini-batch that is cut and finished by the survivors."""
        group.lossy(group.gradients(self.workers(step)), done, survivors)
        return group, 0

    def baseline(self, group: Group, step: int) -> tuple[Group, int]:
        """An undisturbed mini-batch."""
        self.train(group, step, step + 1)
        return group, 0

    def arms(self, step: int) -> Iterator[tuple[Arm, Group, int, float]]:
        """Every arm, from the group's present state: what it is, the group after it, parameters updated twice, and the seconds
        that it took."""
        yield Arm("before"), self.group.fork(), 0, 0.0
        yield Arm("baseline"), *self._timed(self.baseline, step)
        for cut in self.what.cuts:
            done = cut.done(self.group.model)
            yield Arm("rollback", cut.label), *self._timed(self.rollback, step, done)
            for survivors in self.plan.survivors:
                yield Arm("lossy", cut.label, survivors), *self._timed(self.lossy, step, done, survivors)

    def _timed(self, way: Callable[..., tuple[Group, int]], *arguments: int) -> tuple[Group, int, float]:
        """With the least time of a few, which have the same bits: whatever else the machine does only adds to it."""
        found: list[tuple[Group, int, float]] = []
        for _ in range(TIMED):
            group = self.group.fork()
            began = time.perf_counter()
            found.append((*way(group, *arguments), time.perf_counter() - began))
        return min(found, key=lambda one: one[2])

    def outcomes(self, step: int, progress: Progress) -> Iterator[Outcome]:
        """Every arm, measured. The group stays where it is."""
        arms = list(self.arms(step))
        before, baseline = arms[0][1], arms[1][1]
        moved, size = distance(before, baseline), norm(baseline)
        measured = [self.measure(group) for _, group, _, _ in arms]
        distances = [distance(group, baseline) for _, group, _, _ in arms]
        for _, group, _, _ in arms:
            self.train(group, step + 1, step + 1 + self.plan.after)  # Before too: as if the mini-batch had been left out
            progress()
        later = [self.measure(group) for _, group, _, _ in arms]
        (accuracy, loss), (later_accuracy, later_loss) = measured[1], later[1]
        for number, (arm, group, twice, seconds) in enumerate(arms):
            yield Outcome(
                model=self.what.model,
                seed=self.seed,
                step=step,
                arm=arm,
                accuracy=measured[number][0],
                loss=measured[number][1],
                accuracy_off=measured[number][0] - accuracy,
                loss_off=measured[number][1] - loss,
                later_accuracy_off=later[number][0] - later_accuracy,
                later_loss_off=later[number][1] - later_loss,
                distance=relative(distances[number], size),
                of_a_step=relative(distances[number], moved),
                later_distance=relative(distance(group, baseline), norm(baseline)),
                updated_twice=twice,
                slowdown=seconds / arms[1][3],
            )


def relative(length: float, to: float) -> float:
    """One distance in terms of another; NaN if nothing moved at all."""
    return length / to if to else math.nan


def _loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), labels)


def epoch_of(what: ModelStudy, step: int) -> tuple[int, int]:
    """The epoch that a mini-batch is in, and how many mini-batches of it came before: what a restart from a checkpoint at the
    epoch's beginning would compute again."""
    return divmod(step, steps_per_epoch(Sampling(len(data(what.model).labels), what.batch, 0, drop_last=True)))


def run(plan: Plan, progress: Progress = lambda: None) -> Results:
    """All of a study, on one thread: whatever the machine, a sum is taken in the same order."""
    threads, generators = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    contrasts: list[Contrast] = []
    curves: list[Curve] = []
    try:
        for what in plan.models:
            for seed in range(plan.seeds):
                curves.append(_train(Training(plan, what, seed), outcomes, progress))
                for optimizer in plan.optimizers:
                    contrasts.append(contrast(Training(plan, what, seed, optimizer), optimizer))
                    progress()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generators)
    return Results(plan, tuple(outcomes), tuple(contrasts), tuple(curves))


def _train(training: Training, outcomes: list[Outcome], progress: Progress) -> Curve:
    """One training with all of its points; what it is like on the way."""
    last = max(training.what.at)
    shown = sorted({*training.what.at, *range(0, last + 1, max(1, last // 40))})
    values: list[Any] = []
    for step in range(last + 1):
        if step in shown:
            values.append(training.measure(training.group))
        if step in training.what.at:
            outcomes.extend(training.outcomes(step, progress))
        training.train(training.group, step, step + 1)
    accuracy, loss = zip(*values, strict=True)
    return Curve(training.what.model, training.seed, tuple(shown), accuracy, loss)


def contrast(training: Training, optimizer: str) -> Contrast:
    """Zeros against no update, at the second of the study's points and half of the tensors."""
    step = training.what.at[min(1, len(training.what.at) - 1)]
    training.train(training.group, 0, step)
    before, done = training.group, Cut(tensors=0.5).done(training.group.model)
    gradients = before.gradients(training.workers(step))
    baseline, skipped, zeroed = before.fork(), before.fork(), before.fork()
    baseline.train(gradients)
    skipped.interrupt(gradients, done)
    zeroed.interrupt(gradients, done, "zero")
    moved, interrupted = distance(before, baseline), distance(skipped, zeroed)
    for group in (skipped, zeroed):
        training.train(group, step, step + 1)
    return Contrast(
        model=training.what.model,
        optimizer=optimizer,
        seed=training.seed,
        step=step,
        interrupted=relative(interrupted, moved),
        replayed=relative(distance(skipped, zeroed), moved),
        rollback=relative(distance(skipped, baseline), moved),
    )
