"""Tensors are filled in one pass that verifies what it copies; what a failed load leaves is never taken for state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from store import Versioned, own, same_bits, save
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError, FencedError, MismatchError, StorageError, UnknownFormatError
from raytrain_ft.policy.commands import Reconcile
from raytrain_ft.policy.sampling import Position
from raytrain_ft.result import load_model
from raytrain_ft.runtime import library, recovery
from raytrain_ft.runtime import trainee as trainee_module
from raytrain_ft.runtime.trainee import Trainee
from raytrain_ft.storage import checkpoint, selection, shard
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.manifest import Manifest
from raytrain_ft.storage.pieces import Pieces
from raytrain_ft.training import durable, restore, resume, stored
from raytrain_ft.training.export import state_dicts, state_of
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.restore import fill, make
from raytrain_ft.training.settings import PipelineSettings, Tie
from raytrain_ft.training.sleep import Sleep
from raytrain_ft.training.state import TrainingState, at_home

SIZES = (70_000, 0, 1, 12_000, 3, 8192, 33_333, 5)
DATA = {"dataset_size": 100, "global_batch_size": 1, "drop_last": False}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand bytes are many blocks, parts and batches."""
    monkeypatch.setattr(shard, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(shard, "BATCH_BYTES", 30_000)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """Without a checkpoint."""
    found = LocalStorage(tmp_path / "checkpoints")
    own(found)
    return found


def mapped(storage: LocalStorage, number: int = 0) -> Content:
    """A checkpoint, counted from the newest, that nobody has verified."""
    manifests = list(selection.select(storage, pytest.fail))
    return checkpoint.map_shards(storage, manifests[number])


def some() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for i, size in enumerate(SIZES)}


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_are_filled_while_they_are_verified(storage: LocalStorage, count: int) -> None:
    tensors = some() | {"transposed": torch.randn(70, 90).t(), "wide": torch.randn(50, 40)}
    save(storage.uri, 1, tensors, count)
    content = mapped(storage)
    assert not content.verified
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name != "t3"}  # not all of them
    targets["wide"] = torch.zeros(40, 50).t()
    fill(targets, content)
    assert content.verified
    assert [name for name, target in targets.items() if not same_bits(target, tensors[name])] == []
    assert same_bits(make(content, "t3"), tensors["t3"])


@pytest.mark.parametrize("count", [1, 3])
def test_pieces_are_the_same_in_columns(storage: LocalStorage, count: int) -> None:
    """Of tensors that were cut too, and by a part of their names."""
    save(storage.uri, 1, some(), count)
    pieces = mapped(storage).pieces
    names = ["t6", "t0", "t1", "t5"]
    found, parts = pieces.columns(names), [part for name in names for part in pieces[name]]
    assert [part.piece.name for part in parts] == np.repeat(names, found.counts).tolist()
    for column, of_parts in ((found.addresses, "address"), (found.starts, "piece.start"), (found.sizes, "piece.size")):
        assert column.tolist() == [attrgetter(of_parts)(part) for part in parts]
    assert pieces.described() == {name: (parts[0].piece.dtype, parts[0].piece.shape) for name, parts in pieces.items()}
    rest = pieces.under("t", but="3")
    assert list(rest) == [name.removeprefix("t") for name in pieces if name != "t3"]
    assert all(rest[name] == pieces[f"t{name}"] for name in rest)
    with pytest.raises(KeyError):
        pieces.columns(["t6", "none"])


def test_what_a_shard_says_of_its_tensors_is_looked_at_once() -> None:
    """Somebody may write into the file after that: what was found right is not read from there again."""
    pieces = [shard.Piece(f"t{n}", "torch.float32", (n, 2), 0, 8 * n) for n in range(5)]
    file = bytearray(b"".join(shard.encode(pieces, memoryview(bytes(80)))))
    found = Pieces(shard.decode(pa.py_buffer(file), "shard"))
    file[:] = b"\xff" * len(file)
    assert found.described() == {f"t{n}": ("torch.float32", (n, 2)) for n in range(5)}
    assert found["t3"][0].piece == pieces[3]


def test_each_byte_is_copied_once(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some()
    save(storage.uri, 1, tensors, 2)
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(restore, "move_blocks", lambda targets, _, sizes: copied.extend(zip(targets, sizes, strict=True)))
    fill(tensors, mapped(storage))
    assert sum(size for _, size in copied) == sum(SIZES)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(sorted(copied)))
    assert max(size for _, size in copied) == 4096, "a block, once it was verified"


def test_nothing_is_made_of_what_was_not_verified(storage: LocalStorage) -> None:
    save(storage.uri, 1, some())
    with pytest.raises(AssertionError):
        make(mapped(storage), "t0")


def test_an_error_of_a_copy_is_not_lost_in_its_thread(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    save(storage.uri, 1, some())
    calls = iter(range(10**6))

    def move_blocks(*blocks: object) -> None:
        if next(calls) == 20:
            raise OSError("once")

    monkeypatch.setattr(restore, "move_blocks", move_blocks)
    with pytest.raises(OSError, match="once"):
        fill(some(), mapped(storage))


def test_no_flipped_bit_is_loaded(storage: LocalStorage) -> None:
    """Wherever it is: in a tensor, in what is said of it, or between the two."""
    tensors = some()
    save(storage.uri, 1, tensors, 2)
    random = np.random.default_rng(0)
    for file in sorted(storage.root.glob("*/*.arrow")):
        original = file.read_bytes()
        headers = [i for i in range(0, len(original), 64) if original[i : i + 64].count(0) > 30]  # random bytes have few zeros
        places = [*random.integers(len(original), size=150), *(random.choice(headers, 350) + random.integers(64, size=350))]
        for position in (min(int(place), len(original) - 1) for place in places):
            damaged = bytearray(original)
            damaged[position] ^= 1 << random.integers(8)
            file.write_bytes(damaged)
            with pytest.raises(StorageError, match=f"{file.parent.name}/{file.name} is damaged at or after byte") as found:
                fill(tensors, mapped(storage))
            block = int(str(found.value).split("byte ")[1].split(":")[0])
            assert block == position // 4096 * 4096
        for size in (*range(0, len(original), 4096), len(original) - 1):
            file.write_bytes(original[:size])
            with pytest.raises(StorageError, match=file.name):
                mapped(storage)
        file.write_bytes(original)
    fill(tensors, mapped(storage))


# ---------------------------------------------------------------- the trainer's state


def trained(step: int) -> TrainingState:
    """A state of a model that has made an update or more."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(60, 70), nn.BatchNorm1d(70), nn.Linear(70, 9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / step)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.randn(8, 60)).sum().backward()
        optimizer.step()
        schedule.step()
    state = TrainingState(model, optimizer, schedule, bucket_bytes=10_000, first_bucket_bytes=5000)
    state.step, state.position, state.filled = step, Position(0, step), True
    return state


def store(storage: LocalStorage, state: TrainingState) -> None:
    tensors, values = durable.capture(state, DATA, [])
    save(storage.uri, state.step, dict(tensors), 2, values=values)


def all_of(state: TrainingState) -> tuple[Any, ...]:
    assert state.scheduler is not None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    return state.digests(), state.step, state.position, groups, state.scheduler.state_dict()


def damage(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_the_state_is_restored_in_one_pass(storage: LocalStorage) -> None:
    old, here = trained(3), trained(1)
    old.position = Position(2, 90, ((3, 7), (40, 50)))
    store(storage, old)
    durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == all_of(old)
    assert here.filled


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, with one state."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        super().__init__(params, {})
        self.optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        for each in self.optimizers:
            each.state = self.state

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()


def with_both(updates: int) -> TrainingState:
    torch.manual_seed(updates)
    model = nn.Linear(3, 2)
    state = TrainingState(model, Both(model.parameters()), None, bucket_bytes=1000, first_bucket_bytes=1000)
    update(state, updates)
    state.filled = True
    return state


def update(state: TrainingState, times: int) -> None:
    for number in range(times):
        state.optimizer.zero_grad()
        state.model(torch.full((4, 3), 1.0 + number)).square().sum().backward()
        state.optimizer.step()


@pytest.mark.parametrize("updates", [0, 3])
def test_a_wrapper_of_optimizers_with_one_state_is_restored(storage: LocalStorage, updates: int) -> None:
    """What the wrapper gets, those within have."""
    old, here = with_both(2), with_both(updates)
    store(storage, old)
    durable.restore(here, mapped(storage), DATA)
    assert here.digests() == old.digests()
    for state in (old, here):
        update(state, 2)
    assert here.digests() == old.digests()
    assert {key for kept in here.optimizer.state.values() for key in kept} == {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


class Shampoo(torch.optim.SGD):
    """Keeps matrices of a parameter in a list, as some optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["GG"] = [torch.eye(size) for size in p.shape]


def test_an_optimizer_with_tensors_in_a_list_is_refused_once_it_has_them() -> None:
    """Not at all would be: without them, a checkpoint would be whole to look at. The end of a run without checkpoints too."""
    model = nn.Linear(3, 2)
    optimizer = Shampoo(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, None, bucket_bytes=1000, first_bucket_bytes=1000)
    durable.capture(state, DATA, [])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer/weight/GG/0 .* under a key of its own"):
        durable.capture(state, DATA, [])
    for use in (state.digest, state.pack):
        with pytest.raises(ConfigError, match=r"state\.[01]\.GG/0 .* under a key of its own"):
            use(state.buckets[0])


@pytest.mark.parametrize("key", [7, "of/two", ("a", 1)])
def test_what_an_optimizer_keeps_under_a_key_that_is_no_name_is_refused(key: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, None, bucket_bytes=1000, first_bucket_bytes=1000)
    optimizer.state[model.bias] |= {"momentum_buffer": torch.ones(2), key: torch.ones(2)}
    with pytest.raises(ConfigError, match=f"SGD keeps {re.escape(repr(key))} for bias"):
        durable.capture(state, DATA, [])


class Counting(torch.optim.SGD):
    """Keeps values of many types for a parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].update(seen=np.int64(3), shape=p.shape, by_rank={1: 0.5}, last=float("-inf"), name=None)


def test_what_an_optimizer_keeps_besides_tensors_is_the_same_on_a_replacement() -> None:
    """Of the same types: who compares a shape with a list finds that they differ, on the replacement alone."""
    old, new = (nn.Linear(3, 2) for _ in range(2))
    states = [
        TrainingState(model, Counting(model.parameters(), lr=0.1), None, bucket_bytes=1000, first_bucket_bytes=1000)
        for model in (old, new)
    ]
    old(torch.ones(1, 3)).sum().backward()
    states[0].optimizer.step()
    states[1].unpack(states[1].buckets[0], states[0].pack(states[0].buckets[0]))
    assert states[0].digests() == states[1].digests()
    kept = states[1].optimizer.state[new.weight]
    expected = {"seen": np.int64(3), "shape": torch.Size([2, 3]), "by_rank": {1: 0.5}, "last": float("-inf"), "name": None}
    assert {key: (type(kept[key]), kept[key]) for key in expected} == {key: (type(v), v) for key, v in expected.items()}


@pytest.mark.parametrize("read", [lambda state, content: durable.restore(state, content, DATA), lambda _, c: state_dicts(c)])
def test_a_checkpoint_without_the_tensors_of_a_list_is_not_taken_for_whole(
    storage: LocalStorage, read: Callable[[TrainingState, Content], object]
) -> None:
    """As earlier versions wrote it."""
    old, here = trained(2), trained(1)
    tensors, values = durable.capture(old, DATA, [])
    values["numbers"]["optimizer/0.weight/GG"] = {"list": [{"tensor": "optimizer/0.weight/GG/0"}]}
    save(storage.uri, 2, dict(tensors), values=values)
    before = all_of(here)
    content = mapped(storage)
    content.verify()
    with pytest.raises(StorageError, match=r"optimizer/0\.weight/GG/0 is not there"):
        read(here, content)
    assert all_of(here) == before, "and nothing was changed"


def test_what_stages_agreed_upon_before_does_not_outlive_a_restore(storage: LocalStorage) -> None:
    old, here = trained(3), trained(1)
    store(storage, old)
    here.agreed = (3, (0.5,))
    durable.restore(here, mapped(storage), DATA)
    assert here.agreed is None
    here.agreed = (3, (0.5,))
    here.take(old.extras())
    assert here.agreed is None


class Warmed(torch.optim.lr_scheduler.SequentialLR):
    """A schedule that is put together of others."""

    def __init__(self, optimizer: torch.optim.Optimizer, then: type[Any]) -> None:
        first = torch.optim.lr_scheduler.LinearLR(optimizer)
        super().__init__(optimizer, [first, then(optimizer, 2)], [1])


def regrouped(state: TrainingState) -> None:
    """Puts its parameters into two groups: the last module's into the second."""
    params = list(state.model.parameters())
    state.optimizer = torch.optim.Adam([{"params": params[:-2]}, {"params": params[-2:], "lr": 0.5}], lr=0.1)
    state.scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 2)
    state.optimizer.step()


STEPS, COSINE = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (lambda o: STEPS(o, 2), lambda o: COSINE(o, 9), "scheduler StepLR in the checkpoint, CosineAnnealingLR here"),
        (lambda o: None, lambda o: STEPS(o, 2), "scheduler None in the checkpoint, StepLR here"),
        (lambda o: STEPS(o, 2), lambda o: None, "scheduler StepLR in the checkpoint, None here"),
        (
            lambda o: Warmed(o, STEPS),
            lambda o: Warmed(o, COSINE),
            r"scheduler Warmed\(LinearLR, StepLR\) in the checkpoint, Warmed\(LinearLR, CosineAnnealingLR\) here",
        ),
    ],
)
def test_another_schedule_is_no_schedule_to_go_on_with(
    storage: LocalStorage, before: Callable[..., Any], now: Callable[..., Any], message: str
) -> None:
    """torch loads the state of any of them into any other without a word."""
    old, here = trained(3), trained(1)
    old.scheduler, here.scheduler = before(old.optimizer), now(here.optimizer)
    store(storage, old)
    unchanged = here.digests(), here.extras()
    with pytest.raises(MismatchError, match=message):
        durable.restore(here, mapped(storage), DATA)
    assert (here.digests(), here.extras()) == unchanged
    durable.restore(here, mapped(storage), DATA, override=("optimizer",))
    assert (here.extras().groups, here.extras().scheduler) == (unchanged[1].groups, unchanged[1].scheduler)
    assert here.step == 3
    assert same_bits(next(here.model.parameters()), next(old.model.parameters()))


def test_parameters_in_other_groups_are_told_apart(storage: LocalStorage) -> None:
    """As many groups as before, of which one has other members: these would get the settings of others."""
    old, here = trained(3), trained(1)
    regrouped(old)
    regrouped(here)
    moved = here.optimizer.param_groups[0]["params"].pop()
    here.optimizer.param_groups[1]["params"].append(moved)
    store(storage, old)
    with pytest.raises(MismatchError, match=r"1\.bias is of parameter group 0 in the checkpoint, 1 here") as caught:
        durable.restore(here, mapped(storage), DATA)
    assert str(caught.value).count("parameter group") == 1
    durable.restore(here, mapped(storage), DATA, override=("optimizer",))
    assert here.filled
    here.optimizer.param_groups[1]["params"].pop()  # of no group now: it is not trained any more
    with pytest.raises(MismatchError, match=r"1\.bias is of parameter group 0 in the checkpoint, None here"):
        durable.restore(here, mapped(storage), DATA)
    here.optimizer.param_groups[0]["params"].insert(0, moved)  # in another order: what is kept of it goes by its name
    durable.restore(here, mapped(storage), DATA)
    assert here.digests() == old.digests()


def test_another_dataset_of_the_same_length_is_refused(storage: LocalStorage) -> None:
    old, here = trained(3), trained(1)
    before = DATA | {"samples": [["a", 10, 0.5, 1.0], ["b", 10, 0.7, 1.0]]}
    after = DATA | {"samples": [["a", 10, 0.501, 1.0], ["b", 10, 0.9, 1.0]]}
    tensors, values = durable.capture(old, before, [])
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    unchanged = all_of(here)
    with pytest.raises(MismatchError, match=r"same length with other content: .* number 1 has mean 0\.7 .* there, 0\.9"):
        durable.restore(here, mapped(storage), after)
    assert all_of(here) == unchanged
    durable.restore(here, mapped(storage), after, override=("dataset",))
    assert all_of(here) == all_of(old)


def test_a_checkpoint_of_an_earlier_version_is_taken_to_be_of_the_same(storage: LocalStorage) -> None:
    old, here = trained(3), trained(1)
    tensors, values = durable.capture(old, DATA, [])
    del values["scheduler"], values["params"]
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == all_of(old)


HERE = PipelineSettings(stages=2, micro_batches=2, cuts=(1, 2, 3), chunks=2, ties=(Tie({1: "b", 0: "a"}, 8),))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunks": 1}, r"chunks of the pipeline: 2 in the checkpoint, 1 here"),
        ({"cuts": None}, r"cuts of the pipeline: \[1, 2, 3\] in the checkpoint, None here"),
        ({"layers": ("a", "b")}, r"layers of the pipeline: None in the checkpoint, \['a', 'b'\] here"),
        ({"ties": ()}, r"ties of the pipeline: \[\[\[0, 'a'\], \[1, 'b'\]\]\] in the checkpoint, \[\] here"),
        ({}, ""),
    ],
)
def test_stages_that_are_cut_otherwise_are_told_apart(storage: LocalStorage, changed: dict[str, Any], message: str) -> None:
    """Though all of their tensors have the same names and shapes."""
    old, here = trained(3), trained(1)
    old.stage = here.stage = 0
    tensors, values = durable.capture(old, DATA, [], HERE)
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    if not message:
        durable.restore(here, mapped(storage), DATA, pipeline=HERE)
        assert all_of(here) == all_of(old)
        return
    before = all_of(here)
    with pytest.raises(MismatchError, match=message):
        durable.restore(here, mapped(storage), DATA, pipeline=replace(HERE, **changed))
    assert all_of(here) == before


def test_a_checkpoint_that_does_not_tell_what_layers_are_called_is_taken_to_be_of_the_same(storage: LocalStorage) -> None:
    old, here = trained(3), trained(1)
    old.stage = here.stage = 0
    tensors, values = durable.capture(old, DATA, [], HERE)
    del values["layers"]  # as an earlier version wrote it
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    durable.restore(here, mapped(storage), DATA, pipeline=replace(HERE, layers=("a", "b")))
    assert all_of(here) == all_of(old)


@pytest.mark.parametrize(
    ("consumed", "changed", "left"),
    [
        (60, {}, 0),
        (60, {"global_batch_size": 25}, 40),
        (60, {"global_batch_size": 25, "drop_last": True}, 0),
        (50, {"global_batch_size": 25}, 0),
        (0, {"global_batch_size": 25}, 0),
        (60, {"dataset_size": 110}, 50),
        (60, {"dataset_size": 40}, 0),  # so short that the epoch begins anew
    ],
)
def test_a_pipeline_does_not_go_on_towards_a_smaller_batch(
    storage: LocalStorage, consumed: int, changed: dict[str, Any], left: int
) -> None:
    """All stages would fail on it, in every launch, at the end of the epoch that was begun with other batches."""
    old, here = trained(3), trained(1)
    old.stage = here.stage = 0
    old.position = Position(1, consumed)
    data = DATA | {"global_batch_size": 20}
    tensors, values = durable.capture(old, data, [], HERE)
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    how: Any = {"override": ("dataset",), "pipeline": HERE}
    if not left:
        durable.restore(here, mapped(storage), data | changed, **how)
        assert here.digests() == old.digests()
        return
    before, now = all_of(here), data | changed
    words = (
        rf"{left} samples are left\. global_batch_size={now['global_batch_size']} does not divide them.*Set drop_last=True, "
        rf"choose a batch that divides both {left} and the {now['dataset_size']} samples.*\(global_batch_size=20\) until"
    )
    with pytest.raises(MismatchError, match=words):
        durable.restore(here, mapped(storage), now, **how)
    assert all_of(here) == before


def test_an_export_has_all_names_of_what_a_stage_has_twice(storage: LocalStorage) -> None:
    old = trained(3)
    twice = old.model[0]
    assert isinstance(old.model, nn.Sequential)
    old.model.append(twice)
    old.stage = 1
    pipeline = replace(HERE, cuts=(4,), chunks=1, ties=())
    tensors, values = durable.capture(old, DATA, [], pipeline)
    save(storage.uri, old.step, dict(tensors), 2, values=values)
    content = mapped(storage)
    content.verify()
    found = state_of(content)["model"]
    assert same_bits(found["4.weight"], found["7.weight"])
    assert found.keys() == {f"{4 + int(name.partition('.')[0])}.{name.partition('.')[2]}" for name in old.model.state_dict()}


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizers_state_is_where_torch_keeps_it(fused: bool) -> None:
    p = torch.empty(3, device="meta")
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=fused)
    step, average = torch.tensor(4.0), torch.tensor(0.5)  # of a parameter without dimensions
    assert at_home(optimizer, p, "step", step).device.type == ("meta" if fused else "cpu")
    assert at_home(optimizer, p, "exp_avg", average).device.type == "meta"
    assert at_home(optimizer, p, "decay", 0.1) == 0.1


def test_a_counter_is_placed_by_the_flags_that_come_with_it(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the run that loads it are gone by then, and a fused kernel would not find it."""
    before, here, seen = trained(3), trained(1), []
    before.optimizer.param_groups[0]["fused"] = True
    store(storage, before)

    def at_home(optimizer: torch.optim.Optimizer, p: Tensor, key: str, value: Any) -> Any:
        seen.append(optimizer.param_groups[0]["fused"])
        return value

    monkeypatch.setattr(durable, "at_home", at_home)
    durable.restore(here, mapped(storage), DATA)
    assert set(seen) == {True}


def test_a_state_whose_restore_failed_counts_for_nothing_until_another_succeeds(storage: LocalStorage) -> None:
    before, here = trained(3), trained(1)
    store(storage, before)
    store(storage, trained(5))
    last = max(storage.root.glob("*/*.arrow"))
    damage(last, last.stat().st_size // 2)
    _, *rest = all_of(here)
    with pytest.raises(StorageError, match=f"{last.name} is damaged at or after byte"):
        durable.restore(here, mapped(storage), DATA)
    assert not here.filled
    assert recovery.marks("w0", SimpleNamespace(state=here, attempt=None)) is None  # pyright: ignore
    assert list(all_of(here)[1:]) == rest  # what is no tensor is taken over last
    durable.restore(here, mapped(storage, 1), DATA)
    assert all_of(here) == all_of(before)
    assert here.filled


def test_a_fence_leaves_a_load_in_its_midst(storage: LocalStorage) -> None:
    """A checkpoint may take minutes to read, and a worker that does not leave its step in time is given up."""
    old, here = trained(3), trained(1)
    store(storage, old)
    manifest = next(selection.select(storage, pytest.fail))
    fence, seen = Fence(1), []

    def check() -> None:
        seen.append(len(seen))
        if len(seen) == 4:  # the two files are mapped by now, and some blocks are hashed
            fence.trip()
        fence.check()

    with pytest.raises(FencedError):
        durable.restore(here, checkpoint.map_shards(storage, manifest, check=check), DATA)
    assert not here.filled, "what it holds is no use to anybody"
    durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == all_of(old)


def test_a_damaged_name_is_damage_and_no_other_model(storage: LocalStorage) -> None:
    here = trained(1)
    store(storage, trained(2))
    unchanged = all_of(here)
    for name in (b"model/0.weight", b"torch.float32", b"optimizer/0.weight/exp_avg"):
        file = next(path for path in sorted(storage.root.glob("*/*.arrow")) if name in path.read_bytes())
        position = file.read_bytes().index(name) + len(name) - 1
        damage(file, position)
        with pytest.raises(StorageError, match=f"{file.name} is damaged at or after byte"):
            durable.restore(here, mapped(storage), DATA)
        damage(file, position)
    assert all_of(here)[1:] == unchanged[1:]


def test_a_checkpoint_of_checkfreq_is_of_another_kind(storage: LocalStorage) -> None:
    """Both lay their directories out alike, so one may be found where the other is looked for."""
    here = trained(1)
    save(storage.uri, 1, some(), values=resume.values({"model": here.model}, {}, {}, 1, ()))
    unchanged = all_of(here)
    with pytest.raises(MismatchError, match=r"another kind, raytrain_ft\.checkfreq-1"):
        durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == unchanged
    assert here.filled


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {"step": "3"},
        {"position": [0]},
        {"position": [0, -1]},
        {"owed": [[7, 3]]},
        {"owed": 5},
        {"loss": "?"},
        {"loss": None},
        {"data": None},
        {"optimizer": None},
        {"params": 5},
        {"params": [["0.weight"], 5]},
        {"scheduler": 5},
        {"params": [[None]]},
        {"numbers": []},
        {"numbers": {"optimizer/0.weight/x": {"what": 1}}},
        {"numbers": {"optimizer/stranger/x": 1}},
        {"settings": None},
        {"settings": {"dict": []}},
        {"settings": {"dict": [["groups", {"list": [1, 2]}], ["scheduler", None]]}},
        {"settings": {"dict": [["groups", {"list": [{"dict": [["lr", {"tensor": "stranger"}]]}]}], ["scheduler", None]]}},
        {"settings": {"dict": [["groups", {"list": [{"dict": []}]}]]}},
    ],
    ids=str,
)
def test_values_that_are_forged_are_damage(storage: LocalStorage, forged: dict[str, Any]) -> None:
    """The hash of the manifest says nothing of who wrote it. The checkpoint before is used then."""
    tensors, values = durable.capture(trained(3), DATA, [])
    save(storage.uri, 3, dict(tensors), 2, values=values | forged if forged else {})
    here = trained(1)
    unchanged = all_of(here)
    with pytest.raises(StorageError, match="step-000000003"):
        durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == unchanged
    assert here.filled


@pytest.mark.parametrize("stages", [0, "2", None])
def test_a_number_of_stages_that_is_forged_is_damage(storage: LocalStorage, stages: Any) -> None:
    save(storage.uri, 3, some(), values={"stages": stages})
    with pytest.raises(StorageError, match="stages"):
        durable.holds(next(selection.select(storage, pytest.fail)), 1)


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"optimizer": 1}'])
def test_values_of_a_stage_that_are_forged_are_damage(storage: LocalStorage, content: bytes) -> None:
    old, here = trained(3), trained(1)
    old.stage = here.stage = 0
    tensors, values = durable.capture(old, DATA, [], HERE)
    own_values = {"stage-0/values": torch.tensor(list(content), dtype=torch.uint8)}
    save(storage.uri, old.step, dict(tensors) | own_values, 2, values=values)
    with pytest.raises(StorageError, match="step-000000003"):
        durable.restore(here, mapped(storage), DATA, pipeline=HERE)


@pytest.mark.parametrize("records", [5, [1], [{}], [{"lost": [{}]}], [{"at": 1.0, "lost": []}]])
def test_records_that_are_forged_are_none(records: Any) -> None:
    manifest = Manifest(step=1, epoch=1, incarnation=1, shards=[], values={"records": records})
    assert library._records(manifest) == []


def test_a_state_of_another_model_changes_nothing(storage: LocalStorage) -> None:
    here = trained(1)
    store(storage, trained(2))
    here.model.add_module("more", nn.Linear(1, 1))
    unchanged = all_of(here)
    with pytest.raises(MismatchError, match=r"model/more\.weight is missing"):
        durable.restore(here, mapped(storage), DATA)
    assert all_of(here) == unchanged
    assert here.filled


def test_a_model_with_the_weights_of_a_checkpoint(storage: LocalStorage) -> None:
    old = trained(3)
    store(storage, old)
    (place,) = storage.root.glob("step-*")
    task = SimpleNamespace(model=lambda stage: trained(1).model)
    model = load_model(task, str(place))
    assert model.state_dict().keys() == old.model.state_dict().keys()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), old.model.parameters(), strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.buffers(), old.model.buffers(), strict=True))
    larger = SimpleNamespace(model=lambda stage: nn.Sequential(*old.model, nn.Linear(1, 1)))
    with pytest.raises(MismatchError, match=r"3\.weight"):
        load_model(larger, str(place))
    smaller = SimpleNamespace(model=lambda stage: nn.Sequential(*list(old.model.children())[:-1]))
    with pytest.raises(MismatchError, match=r'Unexpected key.*"2\.weight"'):
        load_model(smaller, str(place))
    with pytest.raises(StorageError, match="is no checkpoint"):
        load_model(task, str(storage.root))


def test_a_final_state_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    """Also that of a pipeline: the names are those of the whole model."""
    layers = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    smaller, same = (SimpleNamespace(model=lambda stage, n=n: nn.Sequential(*layers[:n])) for n in (2, 3))
    whole, first, second = (tmp_path / name for name in ("final.arrow", "final-stage-0.arrow", "final-stage-1.arrow"))
    write_tensors(whole, nn.Sequential(*layers).state_dict(), {"step": 1})
    write_tensors(first, nn.Sequential(*layers[:1]).state_dict(), {"step": 1, "stages": 2, "cuts": [1]})
    write_tensors(second, nn.Sequential(*layers[1:]).state_dict(), {"step": 1, "stages": 2, "cuts": [1]})
    for file in (whole, first):
        load_model(same, str(file))
        with pytest.raises(MismatchError, match=r'Unexpected key.*"2\.weight", "2\.bias"'):
            load_model(smaller, str(file))


def test_what_a_state_dict_leaves_out_is_no_surplus(storage: LocalStorage) -> None:
    """Buffers that are not persistent, also those that a model has by two names."""

    def make(stage: int = 0) -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        for layer in model:
            layer.register_buffer("scratch", torch.ones(2) if layer is model[0] else model[0].scratch, persistent=False)
        return model

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store(storage, TrainingState(model, optimizer, None, bucket_bytes=1000, first_bucket_bytes=1000))
    (place,) = storage.root.glob("step-*")
    found: Any = load_model(SimpleNamespace(model=make), str(place))
    assert found[1].weight is found[0].weight
    assert torch.equal(found[0].weight, model[0].weight)


@pytest.mark.parametrize("final", [False, True])
def test_a_model_is_told_of_which_version_its_state_is(storage: LocalStorage, tmp_path: Path, final: bool) -> None:
    def make(stage: int = 0) -> Any:
        return nn.Sequential(Versioned(2, 2))

    model, place = make(), tmp_path / "final.arrow"
    if final:
        write_tensors(place, model.state_dict(), {"step": 1})
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        store(storage, TrainingState(model, optimizer, None, bucket_bytes=1000, first_bucket_bytes=1000))
        (place,) = storage.root.glob("step-*")
    found = load_model(SimpleNamespace(model=make), str(place))
    assert torch.equal(found[0].weight, model[0].weight)

    class Newer(Versioned):
        def _load_from_state_dict(self, *others: Any) -> None:
            raise ValueError("its third version has another shape")

    with pytest.raises(MismatchError, match="is not of this task's model: its third version"):
        load_model(SimpleNamespace(model=lambda stage: nn.Sequential(Newer(2, 2))), str(place))


def unfilled() -> Any:
    """The state of a replica that holds nothing yet."""
    return SimpleNamespace(filled=False, tail=SimpleNamespace(sleep=Sleep()))


def test_who_begins_anew_after_a_load_that_failed_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = object.__new__(Trainee)
    closed: list[bool] = []

    def replica(stage: int = 0) -> Any:
        checkpointer = SimpleNamespace(close=lambda: closed.append(True))
        return SimpleNamespace(checkpointer=checkpointer, state=unfilled(), stage=stage)

    def load(*_: Any) -> None:
        raise StorageError("damaged")

    first = replica()
    trainee.replica, trainee._used, trainee._spec = first, False, SimpleNamespace()  # pyright: ignore
    monkeypatch.setattr(recovery, "load", load)
    monkeypatch.setattr(trainee, "_build_replica", replica)
    with pytest.raises(StorageError):
        trainee._begin_from("step-000000001-e1-i1", Fence(1))
    assert not first.state.filled
    first.state.tail.sleep.ask(asleep=True, at_once=True)
    trainee._begin_from("", Fence(1))
    assert trainee.replica is not first
    assert (trainee.replica.state.tail.sleep.wanted, trainee.replica.state.tail.sleep.at_once) == (True, True)
    assert trainee.replica.state.filled
    assert closed == [True]


@pytest.mark.parametrize("override", [(), ("optimizer",)])
def test_what_a_checkpoint_leaves_alone_is_as_it_was_built(monkeypatch: pytest.MonkeyPatch, override: tuple[str, ...]) -> None:
    """Who goes back to a checkpoint of another optimizer has trained with its own, and a newcomer has not."""
    trainee = object.__new__(Trainee)

    def replica(stage: int = 0) -> Any:
        return SimpleNamespace(checkpointer=None, state=unfilled(), stage=stage)

    monkeypatch.setattr(recovery, "load", lambda *_: None)
    monkeypatch.setattr(trainee, "_build_replica", replica)
    first, spec = replica(), SimpleNamespace(checkpoints=SimpleNamespace(override=override))
    trainee.replica, trainee._used, trainee._spec = first, False, spec  # pyright: ignore
    trainee._begin_from("step-000000001-e1-i1", Fence(1))
    assert trainee.replica is first
    trainee._begin_from("step-000000001-e1-i1", Fence(1))
    assert (trainee.replica is first) == (override == ())


def test_a_trainee_knows_whether_the_world_began_with_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one world know the same, whatever each has done in those before."""
    found: Any = object.__new__(Trainee)
    replica = SimpleNamespace(state=SimpleNamespace(filled=True, digests=tuple, step=3, device="cpu"), stage=0, attempt=None)
    found.__dict__.update(
        _member="w0",
        replica=replica,
        log=None,
        _past=None,
        _asleep=False,
        _host="",
        _supervisor=None,
        _heartbeat=None,
        _spec=SimpleNamespace(use_gpu=False, rules=SimpleNamespace(stages=1), sampling=None),
        _probe_recovery=lambda phase: None,
        _begin_from=lambda load, fence: None,
    )
    for name in ("RayStore", "Connections", "Transfer"):
        monkeypatch.setattr(trainee_module, name, lambda *about: None)
    monkeypatch.setattr(trainee_module.process_group, "build", lambda *about, **more: None)
    monkeypatch.setattr(recovery, "reconcile", lambda *about: recovery.Outcome(0, 0, None))
    plan: Any = SimpleNamespace()
    for incarnation, (given, loaded) in enumerate([(None, True), (plan, False), (None, True)], start=1):
        command = Reconcile(("w0",), incarnation, given, "step-000000003-e1-i1", ("w0",))
        found.reconcile(Fence(incarnation), command)
        assert found._loaded is loaded


@pytest.mark.parametrize("values", [{"step": 1}, {"step": 1, "of another": "version"}])
def test_values_that_this_version_does_not_know_are_no_damage(values: dict[str, Any]) -> None:
    """Their hash is right: a checkpoint of a later version is not deleted because an earlier one was tried once more."""
    manifest = Manifest(step=1, epoch=1, incarnation=1, shards=[], values=values)
    with pytest.raises(UnknownFormatError, match=r"step-000000001-e1-i1 .* another version"):
        stored.decode(manifest, values)
