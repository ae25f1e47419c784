"""Every sample of every epoch exactly once, wherever a run is cut and whatever the worlds before and after."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import sampling as sampling_module
from raytrain_ft.policy.sampling import (
    GlobalBatch,
    Position,
    Sampling,
    after_loss,
    digest_of_ids,
    micro_batches,
    next_batch,
    order,
    position_at,
    sample_ids,
    share,
    steps_per_epoch,
)

quick = settings(max_examples=60)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    size = draw(st.integers(1, 60))
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, size if drop_last else 70))
    return Sampling(size, batch, draw(st.integers(0, 2**64 - 1)), draw(st.booleans()), drop_last)


# ---------------------------------------------------------------- the order of an epoch


@quick
@given(samplings(), st.integers(0, 1000))
def test_order_is_a_permutation_and_a_function_of_seed_and_epoch(sampling: Sampling, epoch: int) -> None:
    ids = order(sampling, epoch)
    np.random.seed(0)  # must not matter
    sampling_module._block.cache_clear()
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(sampling.dataset_size))
    assert np.array_equal(ids, order(sampling, epoch))
    other_batch = Sampling(sampling.dataset_size, 1, sampling.seed, sampling.shuffle)
    assert np.array_equal(ids, order(other_batch, epoch)), "the batch size must not change the order"


def test_order_never_changes_between_releases() -> None:
    """Golden: a run of an older version must resume in the same order."""
    assert order(Sampling(8, 4, seed=0), 0).tolist() == [4, 6, 0, 7, 5, 2, 1, 3]
    digest = hashlib.sha256(order(Sampling(1000, 4, seed=2**64 - 1), 7).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "e343adb7bf555347"


def test_epochs_and_seeds_differ_and_the_first_sample_is_uniform() -> None:
    firsts = [int(order(Sampling(10, 2, seed), epoch)[0]) for seed in range(50) for epoch in range(20)]
    counts = np.bincount(firsts, minlength=10)
    assert counts.min() > 60, counts  # 1000 draws, expectation 100, deviation 9.5
    assert counts.max() < 140, counts
    assert len({tuple(order(Sampling(50, 2, seed), epoch)) for seed in range(10) for epoch in range(10)}) == 100


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    assert order(Sampling(5, 2, 0, shuffle=False), 3).tolist() == [0, 1, 2, 3, 4]


def test_order_is_shared_and_so_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        order(Sampling(5, 2, 0), 0)[0] = 1


# ---------------------------------------------------------------- exactly once


@quick
@given(samplings(), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=8))
def test_exactly_once_over_any_cuts_and_any_worlds(sampling: Sampling, lives: list[tuple[int, int, int]]) -> None:
    """A run of several lives, each with its own world and number of micro-batches; two integers pass between."""
    position, drawn = Position(), []
    for world_size, count, steps in lives:
        position = Position(position.epoch, position.consumed)  # all that is kept
        for _ in range(steps):
            batch, position = next_batch(sampling, position)
            for rank in range(world_size):
                for piece in micro_batches(share(batch, rank, world_size), count):
                    drawn += [(batch.epoch, i) for i in sample_ids(sampling, batch.epoch, piece).tolist()]
    uncut, reference = Position(), []
    for _ in range(sum(steps for *_, steps in lives)):
        batch, uncut = next_batch(sampling, uncut)
        reference += [(batch.epoch, i) for i in sample_ids(sampling, batch.epoch, range(batch.start, batch.stop))]
    assert drawn == reference, "the same samples, in the same order, as without a cut"
    assert position == uncut
    assert len(set(drawn)) == len(drawn), "none twice"
    for epoch in range(position.epoch):
        used = sum(1 for e, _ in drawn if e == epoch)
        dropped = sampling.dataset_size % sampling.global_batch_size if sampling.drop_last else 0
        assert used == sampling.dataset_size - dropped, "none missing"


@quick
@given(samplings(), st.data())
def test_what_is_lost_comes_again_at_the_end_of_its_epoch(sampling: Sampling, data: st.DataObject) -> None:
    """Any losses in any batches, also in those that read again what was lost before."""
    position, counts, lost_in_all = Position(), np.zeros(sampling.dataset_size, int), 0
    while position.epoch == 0:
        batch, after = next_batch(sampling, position)
        assert len(batch) == sampling.global_batch_size or not sampling.drop_last
        np.add.at(counts, sample_ids(sampling, 0, range(batch.start, batch.stop), batch.owed), 1)
        start = data.draw(st.integers(batch.start, batch.stop)) if lost_in_all < 3 else batch.stop
        if start < batch.stop:
            lost = (start, data.draw(st.integers(start + 1, batch.stop)))
            np.add.at(counts, sample_ids(sampling, 0, range(*lost), batch.owed), -1)
            after, lost_in_all = after_loss(sampling, batch, [lost]), lost_in_all + 1
        position = after
    assert position == Position(1, 0)
    if not sampling.drop_last:
        assert set(counts) == {1}
    else:  # no batch is short: less than one of what was lost, and less than one of the epoch's own, stay away
        assert counts.max() <= 1
        assert np.sum(counts == 0) < 2 * sampling.global_batch_size


def test_checkfreq_figure_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """CF-20: order 1 5 8 2 6 4 7 3, cut after four items; the remainder is 6 4 7 3."""
    monkeypatch.setattr(sampling_module, "_block", lambda *_: np.array([1, 5, 8, 2, 6, 4, 7, 3]))
    sampling, position, seen = Sampling(8, 2, 0), Position(), []
    while position.consumed < 4:
        batch, position = next_batch(sampling, position)
        seen += sample_ids(sampling, batch.epoch, range(batch.start, batch.stop)).tolist()
    assert (seen, position) == ([1, 5, 8, 2], Position(0, 4))
    rest = []
    while position.epoch == 0:
        batch, position = next_batch(sampling, position)
        rest += sample_ids(sampling, batch.epoch, range(batch.start, batch.stop)).tolist()
    assert rest == [6, 4, 7, 3]


@quick
@given(samplings(), st.integers(0, 200))
def test_position_at_is_the_position_after_so_many_steps(sampling: Sampling, step: int) -> None:
    position = Position()
    for _ in range(step):
        _, position = next_batch(sampling, position)
    assert position_at(sampling, step) == position
    assert position.epoch == step // steps_per_epoch(sampling)


@quick
@given(samplings(), st.integers(0, 60))
def test_any_position_can_be_gone_on_from(sampling: Sampling, consumed: int) -> None:
    """Also one that is not a multiple of the batch, as after a change of the global batch size."""
    consumed = min(consumed, sampling.dataset_size)
    batch, after = next_batch(sampling, Position(3, consumed))
    left = sampling.dataset_size - consumed
    if left == 0 or (sampling.drop_last and left < sampling.global_batch_size):
        assert (batch.epoch, batch.start) == (4, 0)
    else:
        assert (batch.epoch, batch.start) == (3, consumed)
    assert 1 <= len(batch) <= sampling.global_batch_size
    assert not sampling.drop_last or len(batch) == sampling.global_batch_size
    assert after == Position(batch.epoch, batch.stop) or after == Position(batch.epoch + 1, 0)


# ---------------------------------------------------------------- who reads what


@quick
@given(st.integers(0, 50), st.integers(1, 80), st.integers(1, 12))
def test_shares_partition_the_batch(start: int, size: int, world_size: int) -> None:
    shares = [share(GlobalBatch(0, start, start + size), rank, world_size) for rank in range(world_size)]
    assert [i for piece in shares for i in piece] == list(range(start, start + size))
    sizes = [len(piece) for piece in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 200), st.lists(st.floats(0, 1e9) | st.sampled_from([0, 0.1, 1, 3]), min_size=1, max_size=9))
def test_weighted_shares_partition_the_batch_in_proportion(size: int, weights: list[float]) -> None:
    batch, world_size = GlobalBatch(0, 5, 5 + size), len(weights)
    if sum(weights) == 0:
        with pytest.raises(ConfigError, match="not all 0"):
            share(batch, 0, world_size, weights)
        return
    shares = [share(batch, rank, world_size, weights) for rank in range(world_size)]
    assert [i for piece in shares for i in piece] == list(range(5, 5 + size))
    for piece, weight in zip(shares, weights, strict=True):
        assert abs(len(piece) - size * weight / sum(weights)) < 1 + 1e-6
        assert weight > 0 or len(piece) == 0, "a dormant rank reads nothing"


@quick
@given(st.integers(1, 100), st.integers(1, 9))
def test_equal_weights_are_no_weights(size: int, world_size: int) -> None:
    batch = GlobalBatch(0, 0, size)
    for rank in range(world_size):
        assert share(batch, rank, world_size, [2.5] * world_size) == share(batch, rank, world_size)


@quick
@given(st.integers(0, 30), st.integers(0, 40), st.integers(1, 9))
def test_micro_batches_are_exactly_so_many(start: int, size: int, count: int) -> None:
    pieces = micro_batches(range(start, start + size), count)
    assert len(pieces) == count
    assert [i for piece in pieces for i in piece] == list(range(start, start + size))
    sizes = [len(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


# ---------------------------------------------------------------- the rest


def test_digest_depends_on_ids_and_order_but_not_on_the_pieces() -> None:
    whole = digest_of_ids([np.arange(10)])
    assert whole == digest_of_ids([np.arange(4, dtype=np.int32), np.arange(4, 4), np.arange(4, 10)])
    assert whole != digest_of_ids([np.arange(10)[::-1]])
    assert whole != digest_of_ids([np.arange(9)])
    assert len(whole) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_size": 0}, "dataset is empty"),
        ({"dataset_size": 2.5}, "dataset_size=2.5"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": True}, "global_batch_size=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"drop_last": True, "global_batch_size": 11}, "drops every sample"),
    ],
)
def test_unusable_values_are_refused_with_a_remedy(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**{"dataset_size": 10, "global_batch_size": 4, "seed": 0, **arguments})


def test_positions_of_another_dataset_are_refused() -> None:
    sampling = Sampling(10, 4, 0)
    for wrong in (Position(0, 11), Position(-1, 0), Position(0, -1)):
        with pytest.raises(ConfigError, match="Has the dataset changed"):
            next_batch(sampling, wrong)
    with pytest.raises(ConfigError, match="rank=2"):
        share(GlobalBatch(0, 0, 4), 2, 2)
    with pytest.raises(ConfigError, match="one finite number"):
        share(GlobalBatch(0, 0, 4), 0, 2, [1.0, float("inf")])
    with pytest.raises(ConfigError, match="at least 1"):
        micro_batches(range(4), 0)
    with pytest.raises(ConfigError, match="step=-1"):
        position_at(sampling, -1)
