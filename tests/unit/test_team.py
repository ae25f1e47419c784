"""Several workers that replay a stage together add gradients to the bits that one worker would have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_process_group import groups
from torch import Tensor
from torch.nn import Parameter

from raytrain_ft.training import process_group
from raytrain_ft.training.team import Team

SHAPES = ((7, 3), (1,), (5,), (4, 4))


def gradients(chunk: int, number: int) -> list[Tensor | None]:
    """Of one pass: of all sizes, two dtypes, the last one never, and others not always."""
    generator = torch.Generator().manual_seed(100 * chunk + number)
    found: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=torch.float64 if i == 2 else torch.float32) * 10.0 ** (number % 5)
        for i, shape in enumerate(SHAPES)
    ]
    found[1] = None if number % 3 == 0 else -torch.zeros(1)
    found[3] = None
    return found


def parameters() -> list[Parameter]:
    return [Parameter(torch.zeros(shape, dtype=torch.float64 if i == 2 else torch.float32)) for i, shape in enumerate(SHAPES)]


def alone(chunks: int, count: int) -> list[list[Tensor | None]]:
    """What one worker's backward passes leave."""
    sums: list[list[Tensor | None]] = []
    for chunk in range(chunks):
        total: list[Tensor | None] = [None] * len(SHAPES)
        for number in range(count):
            for i, gradient in enumerate(gradients(chunk, number)):
                before = total[i]
                total[i] = before if gradient is None else gradient.clone() if before is None else before.add_(gradient)
        sums.append(total)
    return sums


@pytest.mark.parametrize(("size", "count", "chunks"), [(2, 4, 1), (3, 8, 1), (3, 2, 1), (2, 5, 2)])
def test_a_team_adds_to_the_bits_that_one_worker_would_have(size: int, count: int, chunks: int) -> None:
    world = groups(7, size)

    def replay(rank: int) -> list[list[Tensor | None]]:
        team = Team(world[rank], count, exact=True)
        params = [parameters() for _ in range(chunks)]
        for chunk in range(chunks):
            for number in team.numbers:
                for p, gradient in zip(params[chunk], gradients(chunk, number), strict=True):
                    p.grad = gradient
                team.collect(chunk * count + number, params[chunk])
                assert all(p.grad is None for p in params[chunk])
        team.add_up(params)
        return [[p.grad for p in chunk] for chunk in params]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(replay, range(size)))
    for group in world:
        process_group.abandon(group)
    for sums in found:
        for chunk, wanted in zip(sums, alone(chunks, count), strict=True):
            for got, total in zip(chunk, wanted, strict=True):
                assert (got is None) == (total is None)
                if got is not None and total is not None:
                    assert got.shape == total.shape
                    assert torch.equal(got.view(-1).view(torch.uint8), total.view(-1).view(torch.uint8)), "bits, signs of 0 too"


def test_a_team_knows_what_all_of_it_sent() -> None:
    """As one worker would have summed it up, which keeps 48 bits."""
    world = groups(8, 3)
    numbers = [2**48 - 1, 5, 2**47]
    teams = [Team(group, 4, exact=True) for group in world]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: teams[rank].total(numbers[rank]), range(3)))
    assert found == [sum(numbers) % 2**48] * 3
    for group in world:
        process_group.abandon(group)
