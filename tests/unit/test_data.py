"""The loader delivers what the order of the epoch says, whatever the world, however often it is restarted."""

from __future__ import annotations

import errno
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from raytrain_ft import TrainTask, prepare
from raytrain_ft.errors import ConfigError, FencedError, StorageError, TaskError, UnreachableError
from raytrain_ft.policy.sampling import Position, Sampling, next_batch, sample_ids, share
from raytrain_ft.settings import TrainSettings
from raytrain_ft.training.arrow_dataset import ArrowDataset
from raytrain_ft.training.build import build_loader
from raytrain_ft.training.data import Loader, MicroBatch, dataset_size, task_size
from raytrain_ft.training.determinism import check_deterministic
from raytrain_ft.training.random import sample_seed, seed_all, step_seed

quick = settings(max_examples=40)


class Squares(Dataset):
    """sample i = (i, i * i) as plain numbers; `visit(i)` is called at each load."""

    def __init__(self, size: int, visit: Callable[[int], None] = lambda i: None) -> None:
        self.size, self.visit = size, visit

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[int, float]:
        self.visit(i)
        return i, float(i * i)


def noisy(sample: tuple[int, float], generator: torch.Generator) -> tuple[int, torch.Tensor]:
    return sample[0], sample[1] + torch.rand((), generator=generator)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def read(loader: Loader, steps: int) -> list[list[MicroBatch]]:
    return [loader.next() for _ in range(steps)]


# ---------------------------------------------------------------- what is delivered


@quick
@given(st.data())
def test_loader_equals_direct_computation_from_any_start(data: st.DataObject) -> None:
    size, world_size, count = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    sampling = Sampling(size, data.draw(st.integers(1, 12)), 7)
    position, rank = Position(data.draw(st.integers(0, 3)), data.draw(st.integers(0, size))), world_size - 1
    kind = data.draw(st.sampled_from(["rows", "tensors", "subset"]))
    tensors = TensorDataset(torch.arange(size), torch.arange(size, dtype=torch.float64) ** 2)
    dataset = {"rows": Squares(size), "tensors": tensors, "subset": Subset(tensors, list(range(size)))}[kind]
    loader = Loader(dataset, sampling)
    loader.start(position, rank, world_size, count)
    for pieces in read(loader, 4):
        batch, position = next_batch(sampling, position)
        expected = sample_ids(sampling, batch.epoch, share(batch, rank, world_size)).tolist()
        assert len(pieces) == count
        assert [i for piece in pieces for i in piece.ids.tolist()] == expected
        for piece in pieces:
            assert (piece.batch, piece.after) == (batch, position)
            assert sample_ids(sampling, piece.batch.epoch, piece.positions).tolist() == piece.ids.tolist()
            if len(piece.ids) == 0:
                assert piece.data is None
            else:
                ids, squares = piece.data
                assert isinstance(piece.data, list), "the type that torch's default_collate returns"
                assert torch.equal(ids, torch.from_numpy(piece.ids))
                assert torch.equal(squares, torch.from_numpy(piece.ids.astype(np.float64) ** 2))
    loader.stop()


@quick
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 3))
def test_augmentation_depends_on_sample_and_epoch_only(world_size: int, count: int, epoch: int, step: int) -> None:
    sampling, after = Sampling(16, 4, 3), {}
    for rank in range(world_size):
        loader = Loader(Squares(16), sampling, augment=noisy)
        loader.start(Position(epoch, 4 * step), rank, world_size, count)
        for piece in loader.next():
            if piece.data is not None:
                after |= dict(zip(piece.ids.tolist(), piece.data[1].tolist(), strict=True))
        loader.stop()
    batch, _ = next_batch(sampling, Position(epoch, 4 * step))
    for i in sample_ids(sampling, epoch, range(batch.start, batch.stop)).tolist():
        generator = torch.Generator().manual_seed(sample_seed(3, epoch, i))
        assert after.pop(i) == noisy((i, float(i * i)), generator)[1].item()
    assert not after


def test_augmentation_in_place_cannot_reach_a_tensor_dataset() -> None:
    def in_place(sample: tuple[torch.Tensor], generator: torch.Generator) -> tuple[torch.Tensor]:
        return (sample[0].add_(1),)

    values = torch.zeros(4)
    loader = Loader(TensorDataset(values), Sampling(4, 4, 0), augment=in_place)
    loader.start(Position(), 0, 1)
    assert loader.next()[0].data[0].tolist() == [1, 1, 1, 1]
    loader.stop()
    assert values.tolist() == [0, 0, 0, 0]


def test_collate_and_weights() -> None:
    loader = Loader(Squares(8), Sampling(8, 8, 0, shuffle=False), collate=list)
    loader.start(Position(), 1, 3, weights=[1, 3, 0])
    assert loader.next()[0].data == [(i, float(i * i)) for i in range(2, 8)]
    loader.start(Position(), 2, 3, weights=[1, 3, 0])
    assert loader.next()[0].data is None
    loader.stop()


def test_batched_fetch_is_used_and_its_length_checked() -> None:
    class Batched(Squares):
        def __getitems__(self, ids: list[int]) -> list[int]:
            assert all(type(i) is int for i in ids)
            return [10 * i for i in ids if i != 3]

    loader = Loader(Batched(8), Sampling(8, 2, 0, shuffle=False))
    loader.start(Position(), 0, 1)
    assert loader.next()[0].data.tolist() == [0, 10]
    with pytest.raises(ConfigError, match="returned 1 samples for 2 ids"):
        loader.next()
    loader.stop()


# ---------------------------------------------------------------- restarts


@quick
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 3), st.integers(0, 4)), max_size=6))
def test_a_restart_never_delivers_what_an_earlier_start_prepared(starts: list[tuple[int, int, int, int]]) -> None:
    sampling = Sampling(30, 7, 1)
    loader = Loader(Squares(30), sampling, prefetch=3)
    for epoch, consumed, world_size, steps in starts:
        position = Position(epoch, consumed)
        loader.start(position, 0, world_size)
        for pieces in read(loader, steps):
            batch, position = next_batch(sampling, position)
            assert (pieces[0].batch, pieces[0].positions) == (batch, share(batch, 0, world_size))
    loader.stop()


def test_two_threads_are_never_inside_the_dataset() -> None:
    inside, worst = [0], [0]

    def visit(i: int) -> None:
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    loader = Loader(Squares(64, visit), Sampling(64, 16, 0))
    for start in range(10):
        loader.start(Position(start, 0), 0, 2)
        time.sleep(0.003)
    assert loader.next()[0].batch.epoch == 9
    loader.stop()
    assert worst == [1]


def test_a_rebuild_waits_until_the_loader_before_has_left_the_dataset() -> None:
    inside, worst = [0], [0]

    def visit(i: int) -> None:
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1

    dataset = Squares(64, visit)

    class Same(TrainTask):
        def dataset(self) -> Any:
            return dataset

    before = Loader(dataset, Sampling(64, 16, 0), prefetch=4)
    before.start(Position(), 0, 1)
    until(lambda: inside[0] == 1)
    build_loader(Same(), Sampling(64, 16, 0), reads=True)
    before.stop()
    assert worst == [1]


def test_the_thread_reads_ahead_as_far_as_it_was_told_and_ends_when_stopped() -> None:
    seen: list[int] = []
    loader = Loader(Squares(100, seen.append), Sampling(100, 4, 0), prefetch=3)
    loader.start(Position(), 0, 1)
    assert loader._feed is not None
    thread = loader._feed.thread
    assert thread is not None
    read(loader, 2)
    until(lambda: len(seen) >= 4 * (2 + 3 + 1))
    time.sleep(0.1)  # in which it could read more
    assert len(seen) == 4 * (2 + 3 + 1), "two delivered, three ready, one in the thread's hands"
    assert thread.is_alive()
    loader.stop()
    thread.join(20)
    assert not thread.is_alive()
    loader.stop()  # again: nothing to do


def test_garbage_may_be_collected_on_the_loaders_own_thread() -> None:
    """A finalizer that stops the loader runs there then, and cannot wait for itself."""
    stopped: list[BaseException | None] = []
    done = threading.Event()

    def visit(i: int) -> None:
        try:
            loader.stop()
            stopped.append(None)
        except RuntimeError as error:
            stopped.append(error)
        done.set()

    loader = Loader(Squares(4, visit), Sampling(4, 1, 0))
    loader.start(Position(), 0, 1)
    assert done.wait(20)
    assert stopped == [None]


# ---------------------------------------------------------------- when the dataset hangs or raises


@pytest.fixture
def hang() -> Any:
    """A visit that hangs at sample 5 until the test is over."""
    over = threading.Event()

    def visit(i: int) -> None:
        if i == 5:
            over.wait(20)

    yield visit
    over.set()


def test_a_fence_leaves_the_wait_for_a_hung_dataset_at_once(hang: Callable[[int], None]) -> None:
    loader = Loader(Squares(8, hang), Sampling(8, 4, 0, shuffle=False))
    loader.start(Position(), 0, 1)
    loader.next(check=lambda: None)
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 10:
            raise FencedError("incarnation 3 is over")

    with pytest.raises(FencedError):
        loader.next(check)
    assert np.median(np.diff(calls)) < 0.2
    began = time.monotonic()
    loader.stop(timedelta(seconds=0.05))
    assert time.monotonic() - began < 10, "the stuck thread is left behind"


def test_a_hung_dataset_ends_the_wait_with_its_sample(hang: Callable[[int], None]) -> None:
    seen: list[int] = []

    def visit(i: int) -> None:
        seen.append(i)
        hang(i)

    loader = Loader(Squares(8, visit), Sampling(8, 4, 0, shuffle=False))
    loader.start(Position(), 0, 1)
    loader.next()
    until(lambda: 5 in seen)
    loader._timeout_s = 0.1
    with pytest.raises(TaskError, match=r"hangs while it loads sample ids \[4, 5, 6, 7\], positions \[4, 8\) of epoch 0"):
        loader.next()
    loader.start(Position(), 0, 1)  # the old thread is still in there: the new one must not follow it
    with pytest.raises(TaskError, match=r"restart this process|hangs"):
        loader.next()
    loader.stop(timedelta(0))


def test_loading_goes_on_when_a_dataset_has_hung_for_a_while() -> None:
    slow = threading.Event()
    loader = Loader(Squares(8, lambda i: slow.wait(20) and None), Sampling(8, 4, 0, shuffle=False))
    loader.start(Position(), 0, 1)
    time.sleep(0.02)
    loader.start(Position(1, 4), 0, 1)
    threading.Timer(0.05, slow.set).start()
    assert loader.next()[0].ids.tolist() == [4, 5, 6, 7]
    loader.stop()


@pytest.mark.parametrize("error", [ValueError("torn file"), StopIteration(), SystemExit(3)])
def test_an_exception_surfaces_after_the_batches_before_it(error: BaseException) -> None:
    def visit_that_raises(i: int) -> None:
        if i == 9:
            raise error

    loader = Loader(Squares(12, visit_that_raises), Sampling(12, 4, 0, shuffle=False))
    loader.start(Position(), 0, 1)
    read(loader, 2)
    for _ in range(2):  # it stays broken until it is started again
        with pytest.raises(type(error)) as caught:
            loader.next()
        assert caught.value is error
        assert "visit_that_raises" in "".join(traceback.format_exception(caught.value)), "the user's own frames"
        where = "(raised while loading sample ids [8, 9, 10, 11], positions [8, 12) of epoch 0)"
        assert error.__notes__ == ["(raised by sample 9)", where]
    loader.start(Position(1, 0), 0, 1)
    assert loader.next()[0].batch.epoch == 1
    loader.stop()


def test_exceptions_of_augment_and_collate_surface_too() -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    for arguments in ({"augment": broken}, {"collate": broken}):
        loader = Loader(Squares(12), Sampling(12, 4, 0, shuffle=False), **arguments)
        loader.start(Position(0, 4), 0, 1)
        with pytest.raises(ZeroDivisionError) as caught:
            loader.next()
        assert ("(raised by sample 4)" in caught.value.__notes__) == ("augment" in arguments)
        loader.stop()


# ---------------------------------------------------------------- what is refused


def test_unusable_datasets_and_arguments_are_refused() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match="Stream is not map-style"):
        Loader(Stream(), Sampling(1, 1, 0))
    with pytest.raises(ConfigError, match="Squares is empty"):
        Loader(Squares(0), Sampling(1, 1, 0))
    with pytest.raises(ConfigError, match="has 4 samples, but the run was planned for 5"):
        Loader(Squares(4), Sampling(5, 1, 0))
    with pytest.raises(ConfigError, match="prefetch=0"):
        Loader(Squares(4), Sampling(4, 1, 0), prefetch=0)
    loader = Loader(Squares(4), Sampling(4, 1, 0))
    for wrong in ((Position(), 2, 2, 1), (Position(), 0, 1, 0), (Position(0, 5), 0, 1, 1)):
        with pytest.raises(ConfigError):
            loader.start(*wrong)


class Counted(IterableDataset[int]):
    """A stream that knows its length. torch's class inherits a __getitem__, which only raises."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Wrapped:
    """Has the length of what it wraps, which has none."""

    def __len__(self) -> int:
        return len(cast(Any, iter(())))

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("stream", [Counted(), Wrapped()])
def test_a_stream_with_a_length_is_refused_by_the_driver_too(stream: Any) -> None:
    name = type(stream).__name__
    with pytest.raises(ConfigError, match=f"^{name} is not map-style"):
        dataset_size(stream)
    task: Any = SimpleNamespace(dataset=lambda: stream)
    with pytest.raises(ConfigError, match=rf"^TrainTask\.dataset\(\): {name} is not map-style"):
        prepare._sampling(task, TrainSettings(max_steps=1, global_batch_size=4), None)
    with pytest.raises(ConfigError, match=r"^TrainTask\.dataset\(\): Squares is empty"):
        task_size(Squares(0))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            DataLoader(Squares(4), batch_size=2),
            r"DataLoader is not map-style: .*\(loader\.dataset\); the batch size is Trainer\(",
        ),
        (Squares, r"Squares is a class; .*add parentheses"),
    ],
    ids=["loader", "class"],
)
def test_what_is_not_yet_or_no_longer_a_dataset_is_told_what_to_give_instead(returned: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^TrainTask\.dataset\(\): {words}") as refused:
        task_size(returned)
    assert "Arrow" not in str(refused.value)


class Rows(Dataset):
    """Samples by a function, for check_deterministic."""

    def __init__(self, load: Callable[[int], Any]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.load(i)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


_own = torch.Generator()


@pytest.mark.parametrize(
    ("load", "word"),
    [
        (lambda i: torch.rand(3), "global generator of torch"),
        (lambda i: {"x": [np.random.rand()]}, "global generator of numpy.random"),
        (lambda i: random.random(), "global generator of random"),
        (lambda i: (torch.manual_seed(i), torch.rand(2))[1], "global generator of torch"),
        (lambda i: torch.rand(2, generator=_own), "returned other bits when sample"),
        (lambda i: Box(np.frombuffer(random.SystemRandom().randbytes(8))), "returned other bits when sample"),
    ],
)
def test_a_dataset_that_is_random_by_itself_is_refused(load: Callable[[int], Any], word: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    with pytest.raises(ConfigError, match=rf"dataset.__getitem__.*{word}.*augment\(sample, generator\)"):
        check_deterministic(Rows(load), Sampling(20, 4, 0))
    assert torch.equal(states[0], torch.get_rng_state()), "the generators are put back"
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tobytes())


def test_a_dataset_that_is_a_function_is_accepted() -> None:
    kept = torch.tensor([float("nan"), -0.0])
    for load in (
        lambda i: {"x": kept * i, "name": str(i), "y": (i, None, 1.5), "z": Box(np.arange(i))},
        lambda i: torch.rand(2, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16),
        lambda i: torch.tensor(i),
    ):
        check_deterministic(Rows(load), Sampling(20, 4, 0))
    check_deterministic(Squares(20), Sampling(20, 4, 0), noisy)
    check_deterministic(TensorDataset(torch.zeros(20)), Sampling(20, 4, 0))


def test_another_thread_that_uses_random_now_and_then_is_no_reason_to_refuse() -> None:
    loads = iter(range(1000))
    check_deterministic(Rows(lambda i: next(loads) == 3 and random.random() and False), Sampling(20, 4, 0))


def test_an_augmentation_with_other_randomness_or_that_writes_is_refused() -> None:
    kept = torch.zeros(20)
    with pytest.raises(ConfigError, match="augment draws from, or seeds, the global generator of torch"):
        check_deterministic(Squares(20), Sampling(20, 4, 0), lambda x, g: x[1] + torch.rand(()))
    with pytest.raises(ConfigError, match="augment writes into the dataset's own sample"):
        check_deterministic(Rows(lambda i: kept[i]), Sampling(20, 4, 0), lambda x, g: x.add_(1))
    with pytest.raises(ConfigError, match="augment returned other bits"):
        check_deterministic(Squares(20), Sampling(20, 4, 0), lambda x, g: torch.rand((), generator=_own))


def test_a_collation_that_draws_or_writes_is_refused() -> None:
    kept = torch.zeros(20, 2)
    draws: list[tuple[Callable[[list[Any]], Any], str]] = [
        (lambda samples: torch.tensor([s[1] for s in samples]) + torch.rand(()), "collate draws from, or seeds, the global"),
        (lambda samples: torch.rand((), generator=_own), "collate returned other bits"),
    ]
    for collate, words in draws:
        with pytest.raises(ConfigError, match=rf"{words}.*augment\(sample, generator\)"):
            check_deterministic(Squares(20), Sampling(20, 4, 0), None, collate)
    with pytest.raises(ConfigError, match="collate writes into the dataset's own samples"):
        check_deterministic(Rows(lambda i: kept[i]), Sampling(20, 4, 0), None, lambda samples: [s.fill_(1) for s in samples])


class Batches:
    """A `BatchSource` by a function of the ids."""

    def __init__(self, load: Callable[[list[int]], Any]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 20

    def load_batch(self, ids: np.ndarray, epoch: int, seed: int) -> Any:
        return self.load(ids.tolist())


def drawn(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "load",
    [
        lambda ids: [drawn(ids[0], len(ids)), torch.tensor(ids)],
        lambda ids: {"x": torch.tensor(ids), "y": (drawn(min(ids), len(ids)),)},
        lambda ids: drawn(max(ids), len(ids)),
        lambda ids: torch.tensor(sorted(ids)),
    ],
)
def test_a_source_whose_samples_depend_on_their_company_is_refused(load: Callable[[list[int]], Any]) -> None:
    with pytest.raises(ConfigError, match=r"gave other bits for sample \d+ beside 7 others than for it alone.*sample_seed"):
        check_deterministic(Batches(load), Sampling(20, 4, 0))


def test_a_source_that_is_a_function_of_each_id_is_accepted() -> None:
    for load in (
        lambda ids: [torch.stack([drawn(i, 3) for i in ids]), torch.tensor(ids)],
        lambda ids: torch.nn.utils.rnn.pad_sequence([torch.arange(i) for i in ids], batch_first=True),
        lambda ids: {"x": torch.tensor(ids) * float("nan"), "names": [str(i) for i in ids], "count": torch.tensor(len(ids))},
        lambda ids: (torch.cat([torch.arange(i) for i in ids]), torch.tensor([0, *ids]).cumsum(0)),
        lambda ids: [torch.tensor([i]) for i in ids],
    ):
        check_deterministic(Batches(load), Sampling(20, 4, 0))
    check_deterministic(Batches(lambda ids: torch.tensor(ids)), Sampling(1, 1, 0))


def test_a_collation_may_use_its_samples_up() -> None:
    def collate(samples: list[dict[str, Any]]) -> Any:
        return torch.tensor([sample.pop("label") for sample in samples])

    check_deterministic(Rows(lambda i: {"label": i}), Sampling(20, 4, 0), None, collate)


def test_a_task_may_put_samples_together_itself() -> None:
    class Texts(TrainTask):
        def dataset(self) -> Any:
            return Rows(lambda i: torch.arange(i + 1))

        def augment(self, sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return sample + torch.randint(10, sample.shape, generator=generator)

        def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    loader = build_loader(Texts(), Sampling(20, 4, 0, shuffle=False), reads=True)
    loader.start(Position(0, 4), 0, 1)
    [micro_batch] = loader.next()
    loader.stop()
    assert micro_batch.data.shape == (4, 8)
    assert (micro_batch.data == -1).sum(1).tolist() == [3, 2, 1, 0]


# ---------------------------------------------------------------- random streams


def test_seeds_differ_in_every_argument_and_never_change_between_releases() -> None:
    points = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1)]
    seeds = {step_seed(*point) for point in points} | {sample_seed(*point[:3]) for point in points[:4]}
    assert len(seeds) == 10
    many = [step_seed(0, step, rank, micro) & 0xFFFF_FFFF for step in range(50) for rank in range(8) for micro in range(8)]
    assert len(set(many)) == len(many), "also in the 32 bits that torch's CPU generator keeps"
    assert (step_seed(1, 2, 3, 4, 5), sample_seed(1, 2, 3)) == (3084904661444353506, 4396446119868275404)
    assert 0 <= step_seed(2**64 - 1, 2**40, 0, 0) < 2**64


def test_seed_all_seeds_what_a_model_may_draw_from() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed_all(2**64 - 1)
    first = draw()
    seed_all(5)
    assert draw() != first
    seed_all(2**64 - 1)
    assert draw() == first
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


# ---------------------------------------------------------------- Arrow and Parquet files


def table(first: int, rows: int) -> pa.Table:
    numbers = range(first, first + rows)
    pairs = pa.array([[i, i + 0.5] for i in numbers], pa.list_(pa.float32(), 2))
    shaped = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6 * rows, dtype=np.int16).reshape(rows, 2, 3))
    columns = {
        "id": pa.array(numbers, pa.int64()),
        "half": pa.array(np.arange(first, first + rows, dtype=np.float16)),
        "flag": pa.array([i % 2 == 0 for i in numbers]),
        "pair": pairs,
        "nested": pa.array([[[i, 0], [0, i]] for i in numbers], pa.list_(pa.list_(pa.int32(), 2), 2)),
        "shaped": shaped,
        "tokens": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int64())),
        "name": pa.array([f"n{i}" for i in numbers]),
        "label": pa.array([f"l{i % 3}" for i in numbers]).dictionary_encode(),
        "raw": pa.array([bytes([i % 256]) for i in numbers]),
    }
    return pa.table(columns)


def write(path: Path, content: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(content, path, row_group_size=4)
    else:
        with pyarrow.ipc.new_file(path, content.schema) as writer:
            writer.write_table(content, max_chunksize=5)
    return path


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize("as_uri", [False, True])
def test_rows_of_arrow_files(tmp_path: Path, suffix: str, as_uri: bool) -> None:
    write(tmp_path / "b" / f"2{suffix}", table(12, 7))
    write(tmp_path / f"a{suffix}", table(0, 12))
    write(tmp_path / f"_hidden{suffix}", table(0, 12))
    (tmp_path / "readme.txt").write_text("not data")
    rows = ArrowDataset(tmp_path.as_uri() if as_uri else tmp_path)
    assert len(rows) == 19
    shuffled = [*np.random.default_rng(0).permutation(19).tolist(), 3, 3, -1]
    for i, row in zip(shuffled, rows.__getitems__(shuffled), strict=True):
        i %= 19
        assert list(row) == table(0, 1).schema.names
        assert torch.equal(row["id"], torch.tensor(i))
        assert torch.equal(row["half"], torch.tensor(float(i), dtype=torch.float16))
        assert row["flag"].dtype == torch.bool
        assert row["flag"].item() == (i % 2 == 0)
        assert torch.equal(row["pair"], torch.tensor([i, i + 0.5]))
        assert torch.equal(row["nested"], torch.tensor([[i, 0], [0, i]], dtype=torch.int32))
        place = i if i < 12 else i - 12
        assert torch.equal(row["shaped"], torch.arange(6 * place, 6 * place + 6, dtype=torch.int16).reshape(2, 3))
        assert row["tokens"].tolist() == list(range(i % 4))
        assert (row["name"], row["label"], row["raw"]) == (f"n{i}", f"l{i % 3}", bytes([i]))
    assert rows[5]["name"] == "n5"
    with pytest.raises(IndexError):
        rows[19]


def test_columns_transform_and_the_loader(tmp_path: Path) -> None:
    files = [write(tmp_path / name, table(first, 10)) for name, first in (("2.arrow", 10), ("1.arrow", 0))]
    rows = ArrowDataset(files, columns=["pair", "id"], transform=transform)
    check_deterministic(rows, Sampling(20, 6, 0))
    for dataset in (rows, pickle.loads(pickle.dumps(rows))):
        loader = Loader(dataset, Sampling(20, 6, 0))
        loader.start(Position(), 0, 1)
        piece = loader.next()[0]
        assert piece.data["id"].tolist() == piece.ids.tolist(), "files in sorted order"
        assert torch.equal(piece.data["pair"], torch.from_numpy(piece.ids)[:, None] + torch.tensor([0, 0.5]))
        loader.stop()
    assert default_collate(rows.__getitems__([1, 2]))["id"].dtype == torch.int64


def transform(row: dict[str, Any]) -> dict[str, Any]:
    assert list(row) == ["pair", "id"]
    return {**row, "seen": True}


def test_arrow_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "good" / "a.arrow", table(0, 8))
    cases: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "none.arrow", ConfigError, "does not exist"),
        ("nowhere://x/y", ConfigError, "cannot be opened"),
        ([], ConfigError, "No Arrow or Parquet file"),
        ([good, str(good)], ConfigError, "the same one twice"),
        (write(tmp_path / "empty.arrow", table(0, 8).slice(0, 0)), ConfigError, "no row"),
        ([good, write(tmp_path / "other.arrow", pa.table({"id": [1]}))], ConfigError, "schema"),
        (write(tmp_path / "null.arrow", pa.table({"x": [1, None]})), ConfigError, r"null\.arrow: Column 'x' holds 1 null"),
        (
            write(tmp_path / "when.arrow", pa.table({"t": pa.array([1], pa.timestamp("s"))})),
            ConfigError,
            r"when\.arrow: Column 't' of type",
        ),
        (write(tmp_path / "deep.arrow", pa.table({"t": [{"a": 1}]})), ConfigError, "'t' of type"),
        (write(tmp_path / "twice.arrow", pa.table([[1], [2]], ["a", "a"])), ConfigError, r"several columns \['a'\]"),
    ]
    (tmp_path / "text.arrow").write_text("hello, I am not Arrow")
    cases.append((tmp_path / "text.arrow", ConfigError, "neither an Arrow IPC file nor Parquet"))
    (tmp_path / "torn.arrow").write_bytes(good.read_bytes()[:-100])
    cases.append((tmp_path / "torn.arrow", StorageError, "torn.arrow is damaged"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1" + bytes(50))
    cases.append((tmp_path / "torn.parquet", StorageError, "torn.parquet is damaged"))
    for paths, error, word in cases:
        with pytest.raises(error, match=word):
            ArrowDataset(paths)
    hidden = [write(tmp_path / "good" / part / "b.arrow", table(0, 8)) for part in (".Trash-1000", "_temporary")]
    assert all(path.exists() for path in hidden)
    assert len(ArrowDataset(tmp_path / "good")) == 8, "what lies in hidden directories is meant for others"
    for suffix in (".arrow", ".parquet"):
        path = write(tmp_path / f"columns{suffix}", table(0, 8))
        with pytest.raises(ConfigError, match=r"no column \['nope'\]"):
            ArrowDataset(path, columns=["id", "nope"])
    holes = write(tmp_path / "holes.arrow", pa.table({"x": pa.array([[1, None]], pa.list_(pa.int64(), 2))}))
    with pytest.raises(ConfigError, match="'x' holds 1 null"):
        ArrowDataset(holes)


def test_all_files_of_a_directory_are_found_whatever_links_it_has(tmp_path: Path) -> None:
    """Part of the data, or some of it many times, would be trained on without a word."""
    home = tmp_path / "rows"
    write(home / "a.arrow", table(0, 8))
    write(tmp_path / "elsewhere" / "deep" / "b.arrow", table(8, 8)).rename(tmp_path / "elsewhere" / "deep" / "B.ARROW")
    (home / "linked").symlink_to(tmp_path / "elsewhere")
    (home / "_gone").symlink_to(tmp_path / "away")  # passed over, as all that begins so
    rows = ArrowDataset(home)
    assert [rows[i]["id"].item() for i in range(len(rows))] == list(range(16))
    for link in (home / "part", home / "1.parquet", tmp_path / "elsewhere" / "deep" / "part"):
        link.symlink_to(tmp_path / "away")
        with pytest.raises(ConfigError, match=f"{link.name} is a link to .*away, which is not there: mount it"):
            ArrowDataset(home)
        link.unlink()
    (tmp_path / "elsewhere" / "deep" / "up").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"linked/deep/up is a link to .*elsewhere, which it lies in itself"):
        ArrowDataset(home)


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EIO, UnreachableError), (errno.ESTALE, UnreachableError), (errno.ENOENT, ConfigError), (errno.EACCES, ConfigError)],
)
def test_a_directory_that_cannot_be_listed_now_may_be_tried_again(
    number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    write(tmp_path / "a.arrow", table(0, 8))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        with pytest.raises((ConfigError, StorageError), match=f"{tmp_path}.*{os.strerror(number)}") as caught:
            ArrowDataset(tmp_path)
    assert type(caught.value) is error
    assert len(ArrowDataset(tmp_path)) == 8


def damaged(path: Path, kind: str) -> Path:
    """A file in which one value is said to lie far outside the memory of its column."""
    texts = ["ab", "cd", "ef", "gh"]
    column, right = {
        "text": (pa.array(texts), np.array([0, 2, 4, 6, 8], np.int32)),
        "binary": (pa.array([text.encode() for text in texts], pa.large_binary()), np.array([0, 2, 4, 6, 8], np.int64)),
        "tokens": (pa.array([[1, 2], [3, 4], [5, 6]]), np.array([0, 2, 4, 6], np.int32)),
        "label": (pa.array(["a", "b", "c", "a"]).dictionary_encode(), np.array([0, 1, 2, 0], np.int32)),
    }[kind]
    write(path, pa.table({kind: column}))
    wrong = right.copy()
    wrong[2] = 2**31 - 1
    content = path.read_bytes()
    assert content.count(right.tobytes()) == 1
    path.write_bytes(content.replace(right.tobytes(), wrong.tobytes()))
    return path


@pytest.mark.parametrize("kind", ["text", "binary", "tokens", "label"])
def test_a_damaged_place_of_a_value_is_not_followed(tmp_path: Path, kind: str) -> None:
    with pytest.raises(StorageError, match=rf"rows.arrow is damaged: .*'{kind}'"):
        ArrowDataset(damaged(tmp_path / "rows.arrow", kind))


def test_text_that_is_none_is_told_when_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", pa.table({"name": ["a long enough name", "another"]}))
    path.write_bytes(path.read_bytes().replace(b"long", b"l\xffng"))
    rows = ArrowDataset(path)
    assert rows[1]["name"] == "another"
    other = write(tmp_path / "before.arrow", pa.table({"name": ["a first", "a second", "a third"]}))
    for number, files in ((0, [path]), (3, [path, other])):
        with pytest.raises(
            StorageError, match=rf"rows.arrow is damaged: column 'name' of row 0 \(sample {number}\) is no text"
        ):
            ArrowDataset(files).__getitems__([number + 1, number])


def test_what_a_transform_raises_says_of_which_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.table({"x": [3, 2, 1, 0]}))
    rows = ArrowDataset(tmp_path, transform=lambda row: 6 // row["x"].item())
    assert rows.__getitems__([2, 0]) == [6, 2]
    for ids in ([3], [0, -1]):
        with pytest.raises(ZeroDivisionError) as caught:
            rows.__getitems__(ids)
        assert caught.value.__notes__ == ["(raised by sample 3)"]


FLIPS = """
import random, sys
from pathlib import Path
from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.training.arrow_dataset import ArrowDataset
path, draws = Path(sys.argv[1]), random.Random(7)
content, refused = path.read_bytes(), 0
other = path.with_name("flipped.arrow")
for _ in range(400):
    flipped = bytearray(content)
    flipped[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    other.unlink(missing_ok=True)  # the one before is still mapped
    other.write_bytes(flipped)
    try:
        rows = ArrowDataset(other)
        rows.__getitems__(range(len(rows)))
    except (ConfigError, StorageError):
        refused += 1
print(refused)
"""


def test_no_flipped_bit_ends_the_process_or_escapes_as_another_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", table(0, 7))
    done = subprocess.run([sys.executable, "-c", FLIPS, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20
