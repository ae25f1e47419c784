"""The loops that docs/checkfreq.md recommends: however they are left, a resume has the same bits."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkfreq import Setup, journal

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.policy.sampling import Position

EPOCHS = 3


class Scheduled(Setup):
    """A schedule that takes a step after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def epochs(self, run: checkfreq.Run, stop_at: int | None, *, both: bool) -> None:
        """`stop_at`: the step at which a signal comes; `both`: both loops are left then, as is recommended."""
        for _ in self.loader.epochs(EPOCHS):
            for inputs, labels in self.loader:
                self.step(inputs, labels)
                if stop_at is not None and run.step >= stop_at:
                    break
            if both and self.loader.done:
                break
            self.scheduler.step()


def scheduled(directory: Path, stop_at: int | None = None, *, both: bool = True) -> Scheduled:
    setup = Scheduled()
    with checkfreq.open(directory, every=100, **setup.objects) as run:
        setup.epochs(run, stop_at, both=both)
    return setup


@pytest.mark.parametrize(
    ("stop_at", "left_at"), [(7, Position(1, 16)), (5, Position(1, 8)), (10, Position(2, 8)), (15, Position(3, 0))]
)
def test_a_loop_over_epochs_that_is_left_has_the_same_schedule(tmp_path: Path, stop_at: int, left_at: Position) -> None:
    """Five batches are an epoch: a signal at its last one does not lose the schedule's step, nor is there one too many."""
    torch.manual_seed(3)
    whole = scheduled(tmp_path / "a")
    torch.manual_seed(3)
    assert scheduled(tmp_path / "b", stop_at).loader.at == left_at
    torch.manual_seed(4)
    resumed = scheduled(tmp_path / "b")
    assert resumed.scheduler.last_epoch == EPOCHS
    assert resumed.state() == whole.state()
    assert journal(tmp_path / "b", "EpochNotOver") == []


def test_an_epoch_that_is_given_again_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scheduled(tmp_path, 7, both=False)
    (told,) = journal(tmp_path, "EpochNotOver")
    assert told["step"] == 7
    assert told["reason"].startswith(
        "loader.epochs gives epoch 1 again, for the loop over loader was left after 2 of its 5 batches"
    )
    assert "`if loader.done: break`" in told["reason"]
    assert "EpochNotOver" in caplog.text


def forever(loader: checkfreq.Loader) -> Iterator[Any]:
    for _ in loader.epochs(1_000_000):
        yield from loader


def mixed(directory: Path, until: int, *, commits: bool) -> str:
    """The state after a loop that draws from which of two loaders the next batch is."""
    setup = Setup()
    loaders: dict[str, Any] = {"loader": setup.loader, "other": Setup(seed=5).loader}
    with checkfreq.open(directory, every=2, **(setup.objects | loaders)) as run:
        under_way = {name: forever(loader) for name, loader in loaders.items()}
        while run.step < until:
            if commits:
                run.commit()
            setup.step(*next(under_way[random.choice(sorted(loaders))]))
    assert journal(directory, "EpochsNotAsked") == []
    return setup.state() + repr([loader.at for loader in loaders.values()])


@pytest.mark.parametrize("commits", [True, False])
def test_a_loop_that_draws_before_it_asks_for_a_batch_commits_before_it_draws(tmp_path: Path, commits: bool) -> None:
    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)

    seed(3)
    whole = mixed(tmp_path / "a", 23, commits=commits)
    found = []
    for until in (5, 6, 8, 9):
        seed(3)
        mixed(tmp_path / f"{until}", until, commits=commits)
        seed(4)
        found.append(mixed(tmp_path / f"{until}", 23, commits=commits) == whole)
    assert all(found) is commits, "the draw belongs to the step that it begins"


def one_after_the_other(directory: Path, stop_after: int | None = None) -> tuple[int, int, str]:
    """A loop over two loaders in each epoch, perhaps killed after an update: steps, updates in this launch, state."""
    setup, first = Setup(), Setup(samples=24, seed=5).loader
    updates = 0

    def train(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        nonlocal updates
        setup.step(inputs, labels)
        updates += 1
        if updates == stop_after:
            raise KeyboardInterrupt

    with checkfreq.open(directory, every=1, keep=1, keep_epochs=True, first=first, **setup.objects) as run:
        torch.rand(1)  # whatever draws before the loop, the run goes on where it was
        for epoch in setup.loader.epochs(EPOCHS):
            for _ in first.epochs(epoch + 1):
                run.commit()
                for batch in first:
                    train(*batch)
            run.commit()
            for batch in setup.loader:
                train(*batch)
    return run.step, updates, setup.state() + repr(first.at)


def test_two_loaders_that_are_trained_on_one_after_the_other_count_each_update(tmp_path: Path) -> None:
    """A request of another loader ends no step by itself, for that may be a validation: the loop says that it is over."""
    torch.manual_seed(3)
    step, updates, whole = one_after_the_other(tmp_path / "whole")
    assert step == updates == 8 * EPOCHS
    kept = [int(found.name[5:14]) for found in sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))]
    assert kept == [3, 8, 11, 16, 19, 24], "the ends of both loaders' epochs"
    for stop_after in (2, 4, 6, 9):  # in an epoch, and right after one, of either loader
        torch.manual_seed(3)
        with pytest.raises(KeyboardInterrupt):
            one_after_the_other(tmp_path / f"{stop_after}", stop_after)
        torch.manual_seed(4)
        step, _, resumed = one_after_the_other(tmp_path / f"{stop_after}")
        assert (step, resumed) == (8 * EPOCHS, whole), stop_after
