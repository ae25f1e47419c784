"""`raytrain_ft.checkfreq` notices where no step ends any more, or updates are not seen, and says nothing of other loops."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkfreq import Setup, journal
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.training.forgotten import FORGOTTEN, LOOKS, Forgotten

MANY = FORGOTTEN + LOOKS + 10


def over_and_over(loader: checkfreq.Loader, count: int) -> Iterator[Any]:
    """Batches, epoch after epoch; each is asked for only when the one before was trained on."""
    for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), 1):
        yield batch
        if number == count:
            return


def test_batches_that_are_kept_and_repeated_are_noticed(tmp_path: Path) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, every=1, **setup.objects) as run:
        for _, batch in zip(range(3 * FORGOTTEN), itertools.cycle(setup.loader), strict=False):
            setup.step(*batch)
        assert run.step == len(setup.loader), "no step has ended since the first epoch"
    (told,) = journal(tmp_path, "NothingToStore")
    assert "itertools.cycle(loader)" in told["reason"]
    assert "run.batches(loader, until_step=...)" in told["reason"]


@pytest.mark.parametrize("accumulated", [1, 4])
def test_an_optimizer_that_is_made_anew_is_missed(tmp_path: Path, accumulated: int) -> None:
    setup = Setup()
    with checkfreq.open(tmp_path, every=1, **setup.objects) as run:
        for inputs, labels in run.batches(setup.loader, until_step=7):
            setup.step(inputs, labels)
        another = torch.optim.AdamW(setup.model.parameters(), lr=0.001)
        for number, (inputs, labels) in enumerate(over_and_over(setup.loader, 2 * MANY)):
            nn.functional.cross_entropy(setup.model(inputs), labels).backward()
            if number % accumulated == 0:
                another.step()
                another.zero_grad()
        assert run.step == 7
    (told,) = journal(tmp_path, "NothingToStore")
    assert "made anew after checkfreq.open" in told["reason"]
    assert "with run.update():" in told["reason"]


# ---------------------------------------------------------------- what loops may do


def validates(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    """With other weights in place of those that are trained, which have become NaN."""
    setup.train(run, 7)
    with torch.no_grad():
        setup.model[0].bias.fill_(math.nan)
    trained = copy.deepcopy(setup.model.state_dict())
    for _ in range(3):
        setup.model.load_state_dict({name: tensor * 2 for name, tensor in trained.items()})
        for (inputs,) in over_and_over(val, MANY):
            setup.model(inputs)
        setup.model.load_state_dict(trained)


def validates_with_the_same_loader(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for _ in range(2):
        for inputs, _ in over_and_over(setup.loader, MANY):
            setup.model(inputs)
        setup.train(run, run.step + 3)


def accumulates(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for number, (inputs, labels) in enumerate(over_and_over(setup.loader, 2 * MANY), 1):
        nn.functional.cross_entropy(setup.model(inputs), labels).backward()
        if number % MANY == 0:
            setup.optimizer.step()


def skips_steps(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    """As a GradScaler does while gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu")
    setup.train(run, 7)
    for inputs, labels in over_and_over(setup.loader, MANY):
        scaler.scale(nn.functional.cross_entropy(setup.model(inputs * math.inf), labels)).backward()
        scaler.step(setup.optimizer)
        scaler.update()


def updates_often_for_a_batch(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for batch in itertools.islice(setup.loader, 2):
        for _ in range(MANY):
            setup.step(*batch)


def updates_often_and_commits_itself(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for _ in range(2):
        run.commit()
        for _ in range(MANY):
            setup.step(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


def takes_a_batch_at_a_time(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for _ in range(MANY):
        setup.step(*next(iter(setup.loader)))
        for _ in itertools.islice(val, 1):
            pass


@pytest.mark.parametrize(
    "loop",
    [
        validates,
        validates_with_the_same_loader,
        accumulates,
        skips_steps,
        updates_often_for_a_batch,
        updates_often_and_commits_itself,
        takes_a_batch_at_a_time,
    ],
)
def test_nothing_is_said_of_a_loop_that(tmp_path: Path, loop: Callable[[Setup, checkfreq.Run, checkfreq.Loader], None]) -> None:
    for _ in range(2):  # and resumed
        setup = Setup()
        val = checkfreq.Loader(TensorDataset(torch.ones(16, 8)), global_batch_size=4, shuffle=False)
        with checkfreq.open(tmp_path, every=50, val=val, **setup.objects) as run:
            loop(setup, run, val)
    assert journal(tmp_path, "NothingToStore") == []


def test_each_of_many_optimizers_is_counted_for_itself(tmp_path: Path) -> None:
    """As where every parameter has one, which takes its step within the backward pass."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(FORGOTTEN + 1))
    optimizers = {f"optimizer{number}": torch.optim.SGD([p], lr=0.1) for number, p in enumerate(model)}
    loader = checkfreq.Loader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
    with checkfreq.open(tmp_path, model=model, loader=loader, **optimizers) as run:
        for _ in range(4):
            (batch,) = next(iter(loader))
            sum((p * batch).sum() for p in model).backward()  # pyright: ignore
            for optimizer in optimizers.values():
                optimizer.step()
        assert run.step == 4
    assert journal(tmp_path, "NothingToStore") == []


def test_parameters_of_another_kind_are_not_looked_at() -> None:
    """They may have no elements that can be read one by one."""

    class Packed(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            raise NotImplementedError

    told: list[str] = []
    packed = nn.Parameter(torch.ones(3).as_subclass(Packed))
    plain = nn.Parameter(torch.ones(3, 2))
    forgotten = Forgotten(told.append, lambda: [packed, plain, nn.Parameter(torch.ones(0))], follows=True)
    for _ in range(MANY):
        forgotten.asked(by_hand=False)
    assert told == []
    for _ in range(FORGOTTEN):
        plain.data.add_(1.0)
        forgotten.asked(by_hand=False)
    assert len(told) == 1


def looked(loop: Callable[[Forgotten, int], None], parameters: list[Tensor], batches: int) -> tuple[list[int], list[str]]:
    """At which batches the parameters were asked for in such a loop, and what was told."""
    asked: list[int] = []
    told: list[str] = []
    number = 0

    def given() -> list[Tensor]:
        asked.append(number)
        return parameters

    forgotten = Forgotten(told.append, given, follows=True)
    for number in range(1, batches + 1):
        forgotten.asked(by_hand=False)
        loop(forgotten, number)
    return asked, told


def test_a_long_validation_is_looked_at_less_and_less() -> None:
    asked, told = looked(lambda _, number: None, [nn.Parameter(torch.ones(3))], 2150)
    assert asked == [100, 200, 1000, 2000], "parameters are chosen once for some looks"
    assert told == []


def test_after_an_update_each_hundred_is_looked_at_again() -> None:
    def loop(forgotten: Forgotten, number: int) -> None:
        if number == 350:
            forgotten.updated(None, reading=True)

    assert looked(loop, [nn.Parameter(torch.ones(3))], 850)[0] == [100, 200, 450, 550]


@pytest.mark.parametrize("replaced", [False, True])
def test_updates_are_seen_after_a_long_validation_and_where_they_make_new_parameters(replaced: bool) -> None:
    parameters: list[Tensor] = [nn.Parameter(torch.ones(3)) for _ in range(100)]

    def loop(forgotten: Forgotten, number: int) -> None:
        if number < 950:
            return
        for place, one in enumerate(parameters):
            if replaced:
                parameters[place] = nn.Parameter(one.detach() + 1)
            else:
                one.data += 1

    assert looked(loop, parameters, 1023)[1] == []
    assert len(looked(loop, parameters, 1024)[1]) == 1


def test_parameters_of_several_dtypes_are_looked_at() -> None:
    parameters: list[Tensor] = [
        nn.Parameter(torch.ones(2, dtype=one)) for one in (torch.bfloat16, torch.float64, torch.complex64)
    ]

    def loop(forgotten: Forgotten, number: int) -> None:
        parameters[1].data += 1

    assert len(looked(loop, parameters, 124)[1]) == 1


# ---------------------------------------------------------------- a loop over range(n) after a resume


def over_range(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    for _ in range(3):
        for inputs, labels in setup.loader:
            setup.step(inputs, labels)


def prints_the_step(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader) -> None:
    assert run.step >= 0
    for _ in range(3):
        for inputs, labels in setup.loader:
            setup.step(inputs, labels)
        assert run.step


@pytest.mark.parametrize("loop", [over_range, prints_the_step])
def test_a_loop_over_range_is_told_after_a_resume(tmp_path: Path, loop: Callable[..., None]) -> None:
    for launch in range(2):
        setup = Setup()
        with checkfreq.open(tmp_path, every=5, **setup.objects) as run:
            loop(setup, run, setup.loader)
        assert len(journal(tmp_path, "EpochsNotAsked")) == launch, "once, and only after the resume"
    (told,) = journal(tmp_path, "EpochsNotAsked")
    assert "loader was resumed in epoch 3" in told["reason"]
    assert "trains 3 epochs too many" in told["reason"]
    assert "for epoch in loader.epochs(n):" in told["reason"]


def asks_for_epochs(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader, launch: int) -> None:
    for _ in setup.loader.epochs(launch * 2):
        for _ in val:
            pass
        for inputs, labels in setup.loader:
            setup.step(inputs, labels)


def reads_the_epoch(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader, launch: int) -> None:
    for _ in range(setup.loader.position.epoch, launch * 2):
        for (inputs, labels), _ in zip(setup.loader, itertools.cycle(val), strict=False):
            setup.step(inputs, labels)


def counts_steps(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader, launch: int) -> None:
    assert setup.loader.position is not None
    while run.step < launch * 12:
        for inputs, labels in setup.loader:
            setup.step(inputs, labels)


def reads_batches(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader, launch: int) -> None:
    setup.train(run, launch * 12)


def trains_on_two(setup: Setup, run: checkfreq.Run, val: checkfreq.Loader, launch: int) -> None:
    for _ in val.epochs(launch * 2):
        for _, batch in zip(val, setup.loader, strict=False):
            setup.step(*batch)


@pytest.mark.parametrize("loop", [asks_for_epochs, reads_the_epoch, counts_steps, reads_batches, trains_on_two])
def test_a_loop_that_knows_which_epochs_are_left_is_told_nothing(tmp_path: Path, loop: Callable[..., None]) -> None:
    for launch in (1, 2, 3):
        setup = Setup()
        val = checkfreq.Loader(TensorDataset(torch.ones(16, 8)), global_batch_size=4, shuffle=False)
        with checkfreq.open(tmp_path, every=5, val=val, **setup.objects) as run:
            before = run.step
            loop(setup, run, val, launch)
            assert run.step > before
    assert journal(tmp_path, "EpochsNotAsked") == []
