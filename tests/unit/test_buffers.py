"""Buffers that the forward pass changes, leaves alone, or replaces by other tensors; and gradients that come twice."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, NonFiniteLossError, TaskError, UndoRefusedError
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.storage.tensors import hash_of
from raytrain_ft.training import durable, passes
from raytrain_ft.training import tail as tail_module
from raytrain_ft.training.build import build_replica, check_model, check_undo
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.step import Replica
from raytrain_ft.training.tail import HEADER, Tail


class Buffered(nn.Module):
    """Constants of all kinds, a mean that is put in the place of the last one, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("turns", torch.polar(torch.ones(5), torch.arange(5.0)))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("hundred", torch.tensor(100.0))
        self.register_buffer("fine", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += 1
        return self.layer(self.norm(x))


class Task(ft.TrainTask):
    """Sixteen samples, of which the second batch may be poisoned."""

    def __init__(self, model: Callable[[], nn.Module], *, poisoned: bool = False) -> None:
        self.make, self.poisoned = model, poisoned

    def model(self, stage: int) -> nn.Module:
        return self.make()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        if self.poisoned:
            inputs[5] = float("nan")
        return TensorDataset(inputs, torch.zeros(16, 2))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


def replica_of(task: Task, **settings: Any) -> tuple[Replica, Links]:
    sampling = Sampling(16, 4, seed=0, shuffle=False)
    replica = build_replica(task, sampling, StepSettings(**settings), use_gpu=False, undo_mode="exact", probe=None)
    replica.loader.start(Position(), 0, 1)
    fence = Fence(1)
    return replica, Links(fence, 0, 1, Solo(fence))


def test_kernels_are_deterministic_on_a_gpu_and_new_memory_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the task builds anything, which may decide otherwise."""

    class Built(Exception):
        pass

    def look() -> nn.Module:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        raise Built

    sampling = Sampling(16, 4, seed=0)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        with pytest.raises(Built):
            build_replica(Task(look), sampling, StepSettings(), use_gpu=True, undo_mode="exact", probe=None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_after_an_update_nothing_is_read_that_a_device_would_have_to_finish_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks said is read before it, at once: so the next step's passes are begun while the update goes on."""
    replica, links = replica_of(Task(lambda: nn.Linear(3, 2)))
    reads: list[str] = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__"):
        read = getattr(torch.Tensor, name)

        def noted(self: Tensor, name: str = name, read: Any = read) -> Any:
            reads.append(name)
            return read(self)

        monkeypatch.setattr(torch.Tensor, name, noted)
    replica.train_step(links)  # the first one looks at more
    step = replica.state.optimizer.step

    def update(*_: Any) -> None:
        assert reads.count("tolist") == 2, "how much is missing, and what was said"
        step()
        reads.clear()

    reads.clear()
    monkeypatch.setattr(replica.state.optimizer, "step", update)
    commit = replica.train_step(links)
    assert reads == []
    assert math.isfinite(commit.loss)


class Following(nn.Module):
    """A teacher that follows the student: frozen parameters that each forward pass changes."""

    def __init__(self, *, trained: bool = False, by_data: bool = False) -> None:
        super().__init__()
        self.by_data = by_data
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.teacher.weight.data if self.by_data else self.teacher.weight).lerp_(self.student.weight, 0.1)
        return self.student(x) + self.teacher(x)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize(
    ("update", "trained"), [("barrier", False), ("wait_free", False), ("barrier", True), ("wait_free", True)]
)
def test_a_forward_pass_that_changes_a_parameter_is_refused(update: Any, trained: bool, by_data: bool) -> None:
    """Nothing puts it back, so a step that is redone would change it twice; and nobody's hash would differ."""
    replica, links = replica_of(Task(lambda: Following(trained=trained, by_data=by_data)), update=update)
    with pytest.raises(TaskError, match=r"changed the parameter teacher\.weight"):
        replica.train_step(links)


class Halves(nn.Module):
    """A trained and a frozen parameter, cut out of one tensor: an update moves on the version of both."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        whole, self.changes = torch.ones(2, 4, 3), changes
        self.scale = nn.Parameter(torch.ones(3))  # the backward pass goes on with it when the weight was updated
        self.weight, self.fixed = nn.Parameter(whole[0]), nn.Parameter(whole[1], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.fixed.data.add_(1.0)
        return ((x * self.scale) @ (self.weight + self.fixed).T)[:, :2]


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
@pytest.mark.parametrize("changes", [False, True])
def test_an_update_changes_no_frozen_parameter_that_is_cut_out_of_the_same_tensor(update: Any, changes: bool) -> None:
    replica, links = replica_of(Task(lambda: Halves(changes=changes)), update=update, first_bucket_bytes=1, bucket_bytes=1)
    with pytest.raises(TaskError, match="changed the parameter fixed") if changes else nullcontext():
        replica.train_step(links)


def test_the_first_parameter_that_changed_is_named_among_many() -> None:
    named = [(f"p{number}", torch.zeros(2)) for number in range(3)]
    with torch.inference_mode():
        named.append(("without a version", torch.zeros(2)))
    unchanged = passes._Unchanged(named)  # pyright: ignore[reportPrivateUsage]
    for by_data in (False, True):
        unchanged.begin(look=by_data)
        unchanged.check()
        unchanged.begin(look=by_data)
        for _, p in named[1:3]:
            (p.data if by_data else p).add_(1)
        with pytest.raises(TaskError, match="changed the parameter p1 in place"):
            unchanged.check()


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_the_bytes_of_parameters_are_looked_at_in_the_first_step_of_a_launch(
    update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later step, and no recovery, takes longer for it."""
    looked: list[Tensor] = []
    monkeypatch.setattr(passes, "hash_of", lambda tensor: looked.append(tensor) or hash_of(tensor))
    for first, times in ((1, 2), (2, 0)):  # before the passes and after them; not at all
        replica, links = replica_of(Task(Buffered), update=update, gradient_accumulation_steps=2)
        replica.passes.first_incarnation = first
        for _ in range(2):
            replica.train_step(links)
        assert len(looked) == times * len(list(replica.state.model.parameters()))
        replica.loader.stop()
        looked.clear()


class Mixing(Task):
    """Its `inputs` mixes labels, in place."""

    seen: list[Tensor]

    def inputs(self, batch: Any) -> Tensor:
        batch[1].fill_(7.0)
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.seen.append(batch[1])
        return super().loss(output, batch)


@pytest.mark.parametrize("moves", [False, True])
def test_labels_that_inputs_changes_in_place_reach_the_loss_on_any_device(moves: bool) -> None:
    """A micro-batch is moved there once, and not held for longer than its loss."""
    task = Mixing(lambda: nn.Linear(3, 2))
    task.seen = []
    replica, links = replica_of(task)
    moved: list[Any] = []

    def move(data: Any) -> Any:
        moved.append([tensor.clone() for tensor in data])
        return moved[-1]

    if moves:
        replica.passes._on_device = move  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):
        replica.train_step(links)
    assert [labels.unique().tolist() for labels in task.seen] == [[7.0], [7.0]]
    assert len(moved) == 2 * moves
    assert replica.passes._moved is None  # pyright: ignore[reportPrivateUsage]
    replica.loader.stop()


def test_what_nobody_changes_keeps_its_bits() -> None:
    replica, links = replica_of(Task(Buffered))
    before = {name: buffer.clone() for name, buffer in replica.state.model.named_buffers()}
    for _ in range(3):
        replica.train_step(links)
    model: Any = replica.state.model
    for name in ("turns", "mask", "hundred", "fine"):
        assert torch.equal(getattr(model, name), before[name]), name
    assert int(model.seen) == 3
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
    replica.loader.stop()


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_a_replica_that_nobody_needs_is_freed(update: Any) -> None:
    """Those that help with a replay build one each time."""
    replica, links = replica_of(Task(Buffered), update=update)
    for _ in range(2):
        replica.train_step(links)
    replica.loader.stop()
    gone = [weakref.ref(replica), weakref.ref(replica.state.model), weakref.ref(replica.reducer)]
    del replica
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def more_of(tails: list[Tail], total: Tensor) -> Tensor | None:
    """What is reduced after the last bucket, over these ranks, if its tail says that anything is."""
    size = tails[0].needs(total)
    parts = [torch.full((size,), math.nan) for _ in tails]
    for tail, part in zip(tails, parts, strict=True):
        assert tail.needs(total) == size
        if size:
            tail.fill_more(total, part)
    return torch.stack(parts).sum(0) if size else None


@pytest.mark.parametrize("large", [1, 4, 2**16])
@pytest.mark.parametrize("ranks", [2, 3, 10, 100])
def test_a_constant_survives_the_mean_over_many_ranks(ranks: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "LARGE", large)
    models = [Buffered() for _ in range(ranks)]
    tails = [Tail(model) for model in models]
    for tail, model, value in zip(tails, models, range(ranks), strict=True):
        tail.begin()
        model.norm.running_mean.fill_(float(value))
    sent = [torch.zeros(tail.size) for tail in tails]
    for rank, tail in enumerate(tails):
        tail.fill(sent[rank], 1, ranks, rank, leads=rank == 0)
    total = torch.stack(sent).sum(0)
    more = more_of(tails, total)
    for tail in tails:
        tail.apply(total, more)
    fresh = Buffered()
    for model in models:
        assert all(torch.equal(getattr(model, name), getattr(fresh, name)) for name in ("turns", "mask", "hundred", "fine"))
        torch.testing.assert_close(model.norm.running_mean, torch.full((3,), (ranks - 1) / 2))


class Masked(nn.Module):
    """Masks, a table, and a codebook that is written to through `.data` in the forward passes that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(256, 256, dtype=torch.bool).tril())
        self.register_buffer("turns", torch.polar(torch.ones(2**16), torch.arange(2.0**16)))
        self.register_buffer("book", torch.arange(2.0**16))
        self.register_buffer("seen", torch.zeros(2**16, dtype=torch.int64))
        self.changes: Any = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.changes(self)
        return self.layer(x)


def test_of_large_buffers_that_nobody_changes_nothing_is_computed_and_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, links = replica_of(Task(Masked))
    refuse = pytest.fail
    for name in ("change_of", "after", "_integer_change"):
        monkeypatch.setattr(tail_module, name, lambda *_, name=name: refuse(f"{name} was called"))
    before = {name: (buffer.clone(), buffer._version) for name, buffer in replica.state.model.named_buffers()}
    for _ in range(2):
        replica.train_step(links)
    assert replica.state.tail.size == HEADER + 1 + 4
    assert replica.state.buckets[-1].more is None
    for name, buffer in replica.state.model.named_buffers():
        assert torch.equal(buffer, before[name][0])
        assert buffer._version == before[name][1], "it is not written to"
    replica.loader.stop()


def test_large_buffers_that_are_changed_now_and_then_are_agreed_upon() -> None:
    """By one rank, by another, by both, by none; in place, through `.data`, or by another tensor."""

    def in_place(model: Any) -> None:
        model.seen[7] += 1
        model.book += 0.5

    def by_data(model: Any) -> None:
        model.book.data[5] = 2.0
        model.seen.data[9] = 3
        model.mask.data[0, 1] = True

    def replaced(model: Any) -> None:
        model.book, model.turns = model.book * 2, model.turns.conj().resolve_conj()

    models: list[Any] = [Masked() for _ in range(2)]
    tails = [Tail(model) for model in models]
    stay: Callable[[Any], None] = lambda _: None  # noqa: E731
    needed = []
    for who in [(stay, stay), (by_data, by_data), (stay, in_place), (in_place, stay), (replaced, by_data), (stay, stay)]:
        olds = {name: buffer.clone() for name, buffer in models[0].named_buffers()}
        owns = []
        for change, model, tail in zip(who, models, tails, strict=True):
            tail.begin()
            change(model)
            owns.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        sent = [torch.zeros(tail.size) for tail in tails]
        for rank, tail in enumerate(tails):
            tail.fill(sent[rank], 1, 2, rank, leads=rank == 0)
        total = sent[0] + sent[1]
        needed.append(tails[0].needs(total))
        more = more_of(tails, total)
        for tail in tails:
            tail.apply(total, more)
            tail.settled()
        for name, old in olds.items():
            one, other = (model.get_buffer(name) for model in models)
            mine, theirs = (own[name] for own in owns)
            assert hash_of(one) == hash_of(other), name
            is_float = old.is_floating_point() or old.is_complex()
            torch.testing.assert_close(one, (mine + theirs) / 2 if is_float else mine, atol=1e-6, rtol=1e-6)
            if hash_of(mine) == hash_of(theirs) == hash_of(old):
                assert hash_of(one) == hash_of(old), name
    book, seen, mask, turns = 2 * 2**16, 2**16, 2**16, 4 * 2**16
    assert needed == [0, book + seen + mask, book, book + seen, book + turns, 0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_minimum_that_begins_infinite_becomes_what_was_seen(ranks: int) -> None:
    """What changes is a difference, and there is none to infinity."""

    class Lowest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor([math.inf, math.inf, -math.inf]))

    models = [Lowest() for _ in range(ranks)]
    tails = [Tail(model) for model in models]
    for tail, model in zip(tails, models, strict=True):
        tail.begin()
        model.low[0] = 0.5
    models[0].low[1] = 0.25
    sent = [torch.zeros(tail.size) for tail in tails]
    for rank, tail in enumerate(tails):
        tail.fill(sent[rank], 1, ranks, rank, leads=rank == 0)
    total = torch.stack(sent).sum(0)
    for tail, model in zip(tails, models, strict=True):
        tail.apply(total)
        torch.testing.assert_close(model.low, torch.tensor([0.5, 0.25 if ranks == 1 else math.inf, -math.inf]))


class Lazy(nn.Module):
    """Makes a buffer in its first forward pass."""

    def __init__(self, empty: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", empty)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().mean(0)
        return self.layer(x / self.scale)


@pytest.mark.parametrize("empty", [None, torch.empty(0)])
def test_a_buffer_that_comes_into_being_in_a_forward_pass_is_refused(empty: Tensor | None) -> None:
    """No replacement would have it, and no checkpoint that has it could be loaded."""
    replica, links = replica_of(Task(lambda: Lazy(empty)))
    with pytest.raises(TaskError, match="made the buffer scale, which was None, empty or another one's before"):
        replica.train_step(links)


def test_so_is_one_in_a_stage_that_has_no_loss() -> None:
    """Of a pipeline, only the last stage has one."""
    model = Lazy(None)
    tail = Tail(model)
    tail.begin()
    model(torch.ones(2, 3))
    with pytest.raises(TaskError, match="made the buffer scale"):
        tail.fill(torch.zeros(tail.size), 1, 1, 0, leads=True)


class Noisy(torch.optim.SGD):
    """As for Langevin dynamics."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)


def test_what_an_optimizer_draws_is_the_same_on_all_replicas() -> None:
    """Their generators stand where the last forward pass has left them, each elsewhere."""

    class Drawn(Task):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            return Noisy(params, lr=0.0)

    found = []
    for rank in range(2):
        torch.manual_seed(7)
        replica, _ = replica_of(Drawn(lambda: nn.Linear(3, 2)))
        with torch.no_grad():
            for p in replica.state.model.parameters():
                p.zero_()
                p.grad = torch.zeros_like(p)
        for bucket in replica.state.buckets:
            bucket.flat.zero_()
        torch.manual_seed(rank)
        replica.state.tail.begin()
        replica.update()
        found.append([p.detach().clone() for p in replica.state.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].abs().sum() > 0


class Keeping(torch.optim.SGD):
    """Compares each gradient with the one before."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["previous"] = p.grad.clone() if group["nesterov"] else p.grad


@pytest.mark.parametrize("copies", [True, False])
def test_an_optimizer_that_keeps_a_gradient_keeps_a_copy(copies: bool) -> None:
    """Its memory is that of the next step's gradients."""

    class Kept(Task):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            return Keeping(params, lr=0.1, momentum=0.9, nesterov=copies)

    replica, links = replica_of(Kept(lambda: nn.Linear(3, 2)))
    if copies:
        replica.train_step(links)
        replica.loader.stop()
        return
    with pytest.raises(TaskError, match="keeps a parameter's gradient itself as 'previous'"):
        replica.train_step(links)


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for what else there is, with one state or each with its own."""

    def __init__(self, params: Any, *, one: bool, hold: Callable[[list[Any]], Any] = list) -> None:
        params = list(params)
        found: list[torch.optim.Optimizer] = [
            torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02),
            torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-3),
        ]
        super().__init__(params, {})
        self.param_groups = [group for each in found for group in each.param_groups]
        self.optimizers = hold(found)
        for each in found if one else ():
            each.state = self.state

    def step(self, closure: Any = None) -> Any:
        held: Any = self.optimizers
        for each in held.values() if isinstance(held, dict) else held:
            each.step()


def with_both(**how: Any) -> Task:
    class Wrapped(Task):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            return Both(params, **how)

    return Wrapped(lambda: nn.Linear(3, 2))


@pytest.mark.parametrize("hold", [list, lambda found: dict(enumerate(found))])
def test_a_wrapper_of_optimizers_that_have_states_of_their_own_is_refused(hold: Any) -> None:
    replica, links = replica_of(with_both(one=False, hold=hold))
    with pytest.raises(TaskError, match=r"optimizer in Both\.optimizers, of class Muon, has a state of its own.*o\.state = "):
        replica.train_step(links)


def test_a_wrapper_of_optimizers_that_have_one_state_is_stored_and_sent() -> None:
    """Both into an optimizer that has updated already, and into one that has not."""
    first, links = replica_of(with_both(one=True))
    first.train_step(links)
    states = [first.state.pack(bucket) for bucket in first.state.buckets]
    tensors = {name: tensor.detach().clone() for name, tensor in durable.capture(first.state, first.loader.data, [])[0]}
    assert {"optimizer/weight/momentum_buffer", "optimizer/bias/exp_avg"} <= tensors.keys()
    first.train_step(links)
    wanted = first.state.digests()
    for behind in (False, True):
        other, links = replica_of(with_both(one=True))
        for _ in range(2 if behind else 0):
            other.train_step(links)
        for bucket, content in zip(other.state.buckets, states, strict=True):
            other.state.unpack(bucket, content)
        other.state.take(replace(first.state.extras(), step=1, position=Position(0, 4)))
        optimizer: Any = other.state.optimizer
        assert all(each.state is optimizer.state for each in optimizer.optimizers)
        other.loader.start(Position(0, 4), 0, 1)
        other.train_step(links)
        assert other.state.digests() == wanted
        other.loader.stop()
    first.loader.stop()


class Counting(torch.optim.SGD):
    """Keeps something under a key of its own."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state[self.key] = {"k": 1} if self.full else {}  # pyright: ignore


@pytest.mark.parametrize(("key", "words"), [("k", "a state of 'k'"), (torch.zeros(4, 1), r"a tensor of shape \[4, 1\]")])
def test_a_state_that_is_none_of_a_parameter_is_refused(key: Any, words: str) -> None:
    for full in (True, False):
        replica, links = replica_of(Task(lambda: nn.Linear(3, 2)))
        optimizer: Any = Counting(replica.state.model.parameters(), lr=0.1)
        optimizer.key, optimizer.full = key, full
        replica.state.optimizer = optimizer
        replica.state.step = 7  # of a launch that resumes, perhaps with another optimizer
        for bucket in replica.state.buckets:
            bucket.version = 7
        if full:
            with pytest.raises(TaskError, match=words):
                replica.train_step(links)
        else:
            replica.train_step(links)
            replica.loader.stop()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (0, torch.zeros(1), r"Keeping keeps 0 for weight: what it keeps is stored by name"),
        ("a/b", 1, r"Keeping keeps 'a/b' for weight"),
        ("GG", [torch.zeros(1)], r"optimizer/weight/GG.* is a tensor that the optimizer keeps in a list"),
    ],
)
def test_what_could_not_be_sent_to_a_replacement_is_refused_in_the_first_step(key: Any, value: Any, words: str) -> None:
    """Also without checkpoints: the first recovery is too late, and the hash of the end is, too."""

    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]][key] = value

    replica, links = replica_of(Task(lambda: nn.Linear(3, 2)))
    replica.state.optimizer = Keeping(replica.state.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        replica.train_step(links)
    replica.loader.stop()


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + self.teacher(x)


class Teaching(torch.optim.SGD):
    """Moves the teacher, the faster the earlier."""

    def __init__(self, params: Any, model: Taught) -> None:
        super().__init__(params, lr=0.1)
        self.pairs = list(zip(model.student.parameters(), model.teacher.parameters(), strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for student, teacher in self.pairs:
            kept = self.state[teacher]
            kept["n"] = kept.get("n", 0) + 1
            teacher.lerp_(student, 1 / (1 + kept["n"]))


def test_what_an_optimizer_keeps_for_frozen_parameters_is_hashed_and_sent() -> None:
    replicas = [replica_of(Task(Taught)) for _ in range(2)]
    for replica, _ in replicas:
        replica.state.optimizer = Teaching(replica.state.model.student.parameters(), replica.state.model)
    (first, links), (other, _) = replicas
    for _ in range(3):
        first.train_step(links)
    assert first.state.digests() != other.state.digests()
    for bucket in first.state.buckets:
        other.state.unpack(other.state.buckets[bucket.index], first.state.pack(bucket))
    other.state.take(first.state.extras())
    optimizer: Any = other.state.optimizer
    assert [optimizer.state[teacher]["n"] for _, teacher in optimizer.pairs] == [3, 3]
    assert first.state.digests() == other.state.digests()
    optimizer.state[optimizer.pairs[0][1]]["n"] = 1
    assert first.state.digests() != other.state.digests(), "it is a part of the state"
    for replica, _ in replicas:
        replica.loader.stop()


def test_a_buffer_in_the_place_of_another_is_agreed_upon_hashed_and_put_back() -> None:
    replica, links = replica_of(Task(Buffered))
    state, model = replica.state, replica.state.model
    replica.train_step(links)
    here: Any = model.mean
    assert here.any()
    digest = state.digests()
    here += 1
    assert state.digests() != digest, "the hash is of the tensor that is there now"
    here -= 1
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    assert model.mean is not here
    state.tail.restore()
    torch.testing.assert_close(model.mean, here)
    packed = state.pack(state.buckets[-1])
    other = TrainingState(
        Buffered(), torch.optim.SGD(model.parameters(), 0.1), None, bucket_bytes=2**20, first_bucket_bytes=2**20
    )
    other.unpack(other.buckets[-1], packed)
    assert torch.equal(other.model.mean, model.mean)  # pyright: ignore[reportArgumentType]
    replica.loader.stop()


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(len(self.seen) + 1)
        return self.layer(x)


def test_a_buffer_that_changes_its_shape() -> None:
    replica, links = replica_of(Task(Growing))
    with pytest.raises(TaskError, match=r"the buffer seen from torch.float32 \(1,\) to torch.float32 \(2,\)"):
        replica.train_step(links)
    replica.loader.stop()


def test_a_step_that_is_skipped_leaves_no_statistics_behind() -> None:
    replica, links = replica_of(Task(Buffered, poisoned=True), on_non_finite="skip")
    replica.train_step(links)
    kept = {name: value.clone() for name, value in replica.state.model.state_dict().items()}
    skipped = replica.train_step(links)
    assert skipped.lost == ((4, 8),)
    assert all(torch.equal(value, kept[name]) for name, value in replica.state.model.state_dict().items())
    assert replica.train_step(links).lost == ()
    assert all(value.isfinite().all() for name, value in replica.state.model.state_dict().items() if name != "mask")
    replica.loader.stop()


class Root(nn.Module):
    """The gradient of a square root is infinite at zero, and its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() @ self.weight.abs()).sqrt()


class Zeros(Task):
    """The second batch has a sample of nothing."""

    def dataset(self) -> TensorDataset:
        inputs, targets = super().dataset().tensors
        inputs[5] = 0.0
        return TensorDataset(inputs, targets + 1)


def test_an_infinite_gradient_is_noticed_where_its_norm_is_needed() -> None:
    replica, links = replica_of(Zeros(Root), on_non_finite="skip", max_grad_norm=1.0)
    replica.train_step(links)
    model: Any = replica.state.model
    kept = model.weight.detach().clone()
    skipped = replica.train_step(links)
    assert math.isfinite(skipped.loss)
    assert skipped.lost == ((4, 8),)
    assert torch.equal(model.weight, kept)
    assert replica.train_step(links).lost == ()
    assert model.weight.isfinite().all()
    replica.loader.stop()
    replica, links = replica_of(Zeros(Root), max_grad_norm=1.0)
    replica.train_step(links)
    with pytest.raises(NonFiniteLossError, match=r"the norm of the gradients of step 1 is nan.*Nothing was updated"):
        replica.train_step(links)
    replica.loader.stop()


class Shared(nn.Module):
    """One weight in two segments that compute their activations again, the one way or the other."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.reentrant = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def test_a_gradient_that_comes_twice_is_refused_and_not_lost() -> None:
    replica, links = replica_of(Task(lambda: Shared(reentrant=True)))
    with pytest.raises(TaskError, match="use_reentrant=False"):
        replica.train_step(links)
    replica.loader.stop()
    replica, links = replica_of(Task(lambda: Shared(reentrant=False)))
    replica.train_step(links)
    replica.loader.stop()


def test_the_tail_is_as_long_as_its_buffers() -> None:
    """Of floating buffers there are two numbers for each value, of complex ones four."""
    model = Buffered()
    floats = sum(
        2 * b.numel() * (2 if b.is_complex() else 1) for b in model.buffers() if b.is_floating_point() or b.is_complex()
    )
    integers = sum(b.numel() for b in model.buffers() if not (b.is_floating_point() or b.is_complex()))
    assert floats > 0 < integers
    assert Tail(model).size == HEADER + 1 + integers + floats


class Sentinels(nn.Module):
    """Buffers that begin as what no data is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(math.nan))
        self.register_buffer("least", torch.tensor(1e9))
        self.register_buffer("far", torch.tensor(1e20))
        self.register_buffer("most", torch.tensor(torch.finfo(torch.float32).min))
        self.register_buffer("exact", torch.tensor(1e300, dtype=torch.float64))
        self.register_buffer("zero", torch.tensor([-0.0, 1.0]))
        self.register_buffer("never", torch.tensor([math.nan, -1e9, math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.detach().abs().mean()
            self.scale.copy_(torch.where(self.scale.isnan(), mean, 0.9 * self.scale + 0.1 * mean))
            self.least.copy_(torch.minimum(self.least, x.detach().min()))
            self.far.copy_(torch.minimum(self.far, x.detach().square().mean()))
            self.most.copy_(torch.maximum(self.most, x.detach().max()))
            self.exact.copy_(torch.minimum(self.exact, x.detach().double().square().mean()))
            self.zero[1] += mean
        return self.layer(x) * self.scale


@pytest.mark.parametrize("large", [1, 3, 2**16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 12, 32])
def test_what_all_ranks_set_a_sentinel_to_is_what_it_becomes(ranks: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "LARGE", large)
    models = [Sentinels() for _ in range(ranks)]
    tails = [Tail(model) for model in models]
    x = torch.tensor([[0.5, -3.25, 2.0]])
    expected = Sentinels()
    for _ in range(3):
        expected(x)
        for tail, model in zip(tails, models, strict=True):
            tail.begin()
            model(x)
        sent = [torch.zeros(tail.size) for tail in tails]
        for rank, tail in enumerate(tails):
            tail.fill(sent[rank], 3 + rank % 2, sum(3 + one % 2 for one in range(ranks)), rank, leads=rank == 0)
        total = sent[0]
        for other in sent[1:]:
            total = total + other
        more = more_of(tails, total)
        for tail in tails:
            tail.apply(total, more)
            tail.settled()
        for model in models:
            for name, buffer in model.named_buffers():
                there = expected.get_buffer(name)
                same = torch.equal(buffer.nan_to_num(7), there.nan_to_num(7)) and torch.equal(buffer.signbit(), there.signbit())
                close = torch.allclose(buffer, there, rtol=3e-6, equal_nan=True)
                assert same if ranks == 1 or name == "never" else close, (name, buffer, there)


@pytest.mark.parametrize("large", [1, 2, 2**16])
def test_a_buffer_that_nobody_changes_is_not_written_to(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "LARGE", large)
    model = Sentinels()
    tail = Tail(model)
    tail.begin()
    model(torch.ones(1, 3))
    before = {name: buffer._version for name, buffer in model.named_buffers()}
    total = torch.zeros(tail.size)
    tail.fill(total, 1, 1, 0, leads=True)
    tail.apply(total, more_of([tail], total))
    written = {name for name, buffer in model.named_buffers() if buffer._version != before[name]}
    assert written == {"scale", "least", "far", "most", "exact", "zero"}


@pytest.mark.parametrize("large", [1, 2, 2**16])
@pytest.mark.parametrize("ranks", [2, 6, 8, 13])
def test_what_is_scaled_because_samples_are_missing_is_no_less_exact(
    ranks: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the ranks was lost, and the others make up the mean."""
    monkeypatch.setattr(tail_module, "LARGE", large)
    models = [Sentinels() for _ in range(ranks)]
    tails = [Tail(model) for model in models]
    for tail, model in zip(tails, models, strict=True):
        tail.begin()
        model(torch.tensor([[0.5, 3.25, 2.0]]))
    sent = [torch.zeros(tail.size) for tail in tails]
    for rank, tail in enumerate(tails):
        tail.fill(sent[rank], 1, ranks, rank, leads=rank == 0)
    total = sent[0]
    for other in sent[1:-1]:
        total = total + other
    more = more_of(tails[:-1], total)
    tails[0].scale(total, ranks / (ranks - 1), more)
    tails[0].apply(total, more)
    expected = Sentinels()
    expected(torch.tensor([[0.5, 3.25, 2.0]]))
    for name, buffer in models[0].named_buffers():
        torch.testing.assert_close(buffer, expected.get_buffer(name), rtol=3e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("large", [1, 2**16])
def test_replicas_have_the_same_bits_also_of_zero_and_of_what_is_no_number(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "LARGE", large)
    models = [nn.Module() for _ in range(2)]
    for model in models:
        model.register_buffer("zero", torch.zeros(2))
        model.register_buffer("unset", torch.full((2,), math.nan))
    tails = [Tail(model) for model in models]
    for tail in tails:
        tail.begin()
    models[0].zero.copy_(torch.tensor([-0.0, 0.0]))  # pyright: ignore
    models[1].unset.copy_(torch.zeros(2) / torch.zeros(2))  # pyright: ignore
    sent = [torch.zeros(tail.size) for tail in tails]
    for rank, tail in enumerate(tails):
        tail.fill(sent[rank], 1, 2, rank, leads=rank == 0)
    more = more_of(tails, sent[0] + sent[1])
    for tail in tails:
        tail.apply(sent[0] + sent[1], more)
    for name in ("zero", "unset"):
        one, other = (model.get_buffer(name).view(torch.int32).tolist() for model in models)
        assert one == other, name


def test_a_buffer_that_cannot_be_written_to_is_refused_before_the_training() -> None:
    """Else that would be found when a step is redone, or a replacement filled."""
    model = nn.Linear(3, 2)
    model.register_buffer("ones", torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=r"buffer ones is an expanded tensor.*contiguous"):
        check_model(model)


def test_a_buffer_beside_a_parameter_in_one_block_of_memory_is_its_own() -> None:
    block = torch.randn(10)
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(block[:6]))
    model.register_buffer("other", block[6:])
    check_model(model)


def test_a_buffer_that_is_the_memory_of_a_trained_parameter_is_refused_before_the_training() -> None:
    """What is agreed upon would be written over its update."""
    model = nn.Linear(3, 2)
    model.register_buffer("start", model.weight.detach())
    with pytest.raises(ConfigError, match="buffer start is the memory of the trained parameter weight"):
        check_model(model)
    model.weight.requires_grad_(False)
    check_model(model)


class Extra(nn.Module):
    """Has state that is neither parameter nor buffer."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(3, 2), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"calls": 3}, None, torch.ones(2)])
def test_state_that_would_be_lost_is_refused_before_the_training(state: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Extra(state))
    with pytest.raises(ConfigError, match=rf"holds 1\._extra_state, a {type(state).__name__}: .*register_buffer"):
        check_model(model)
    check_model(Buffered())


def test_a_buffer_without_bytes_in_a_row_is_refused_before_the_training() -> None:
    model = nn.Linear(3, 2)
    for persistent in (True, False):
        model.register_buffer("edges", torch.eye(3).to_sparse(), persistent=persistent)
        with pytest.raises(ConfigError, match=r"edges is a torch\.sparse_coo tensor"):
            check_model(model)


class Replacing(nn.Module):
    """Puts something else in the place of a buffer, in its forward pass."""

    def __init__(self, make: Any, begin: Any = None) -> None:
        super().__init__()
        self.layer, self.make, self.calls = nn.Linear(3, 2), make, 0
        self.register_buffer("last", torch.zeros(2, 3) if begin is None else begin)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.make(self, x)
        return self.layer(x)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model, x: model.layer.weight.detach(), "put a trained parameter itself in the place of the buffer last"),
        (lambda model, x: model.last.double(), r"the buffer last from torch.float32 \(2, 3\) to torch.float64 \(2, 3\)"),
        (lambda model, x: None, r"the buffer last from torch.float32 \(2, 3\) to None"),
    ],
)
@pytest.mark.parametrize("redone", [False, True])
def test_what_cannot_be_agreed_upon_in_the_place_of_a_buffer_is_refused(make: Any, words: str, redone: bool) -> None:
    """And if the step is redone before that is seen, nothing is written to it."""
    replica, links = replica_of(Task(lambda: Replacing(make)))
    model: Any = replica.state.model
    before = model.layer.weight.clone()
    if redone:
        replica.begin(replica.loader.next(), links, 0.0)
        model(torch.ones(1, 3))
        replica.state.tail.restore()
        assert torch.equal(model.layer.weight, before)
        assert torch.equal(model.last, torch.zeros(2, 3))
    else:
        with pytest.raises(TaskError, match=words):
            replica.train_step(links)
    replica.loader.stop()


def test_an_expanded_tensor_in_the_place_of_a_buffer_is_taken_over() -> None:
    replica, links = replica_of(Task(lambda: Replacing(lambda model, x: x.detach().mean().expand(2, 3))))
    for _ in range(3):
        replica.train_step(links)
    model: Any = replica.state.model
    assert model.last.is_contiguous()
    assert bool(model.last.any())
    replica.loader.stop()


def test_a_buffer_that_comes_into_being_after_some_steps_is_refused_too() -> None:
    class Late(Lazy):
        def __init__(self) -> None:
            super().__init__(None)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls > 2 else self.layer(x)

    replica, links = replica_of(Task(Late))
    replica.train_step(links)
    replica.train_step(links)
    with pytest.raises(TaskError, match="made the buffer scale"):
        replica.train_step(links)
    replica.loader.stop()


def test_numbers_of_eight_bits_and_compiled_modules_are_agreed_upon() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 2), torch.jit.script(nn.BatchNorm1d(2))
            self.register_buffer("short", torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x))

    replica, links = replica_of(Task(Short))
    for _ in range(2):
        replica.train_step(links)
    model: Any = replica.state.model
    assert model.short.float().tolist() == [0.5, 2.0]
    assert int(model.norm.num_batches_tracked) == 2
    replica.loader.stop()


def test_an_optimizer_with_hooks_does_not_update_bucket_by_bucket() -> None:
    """They would clip gradients that are not all there."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert check_undo(optimizer, "exact") == []
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "has hooks" in check_undo(optimizer, "exact")[0]


def test_nor_does_one_that_the_schedule_has_given_hooks() -> None:
    """Also if it did not on the driver."""

    class Hooked(Task):
        def scheduler(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.register_step_post_hook(lambda *_: None)

    replica, _ = replica_of(Hooked(lambda: nn.Linear(3, 2)))
    replica.loader.stop()
    with pytest.raises(UndoRefusedError, match=r'update="wait_free".*has hooks'):
        replica_of(Hooked(lambda: nn.Linear(3, 2)), update="wait_free")


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_nor_does_any_while_all_optimizers_have_hooks(register: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    handle = register(lambda *_: None)
    try:
        assert "has hooks" in check_undo(optimizer, "exact")[0]
    finally:
        handle.remove()
    assert check_undo(optimizer, "exact") == []


@pytest.mark.parametrize("large", [1, 2**16])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_becomes_infinite_stays_so_when_samples_are_missing(
    factor: float, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "LARGE", large)
    model = nn.Module()
    model.register_buffer("b", torch.tensor([1.0, 1e10, 3.0]))
    tail = Tail(model)
    tail.begin()
    model.b.copy_(torch.tensor([-math.inf, math.inf, 4.0]))  # pyright: ignore
    total = torch.zeros(tail.size)
    tail.fill(total, 4, int(4 * factor), 0, leads=True)
    more = more_of([tail], total)
    tail.scale(total, factor, more)
    tail.apply(total, more)
    assert model.b.tolist() == [-math.inf, math.inf, 4.0]  # pyright: ignore


def test_a_large_buffer_that_some_ranks_leave_alone_is_the_mean_of_all() -> None:
    models = [nn.Module() for _ in range(4)]
    for model in models:
        model.register_buffer("sum", torch.tensor([8e9, 100.0]))
    tails = [Tail(model) for model in models]
    for tail in tails:
        tail.begin()
    models[0].sum.copy_(torch.tensor([4e9, 200.0]))  # pyright: ignore
    total = torch.zeros(tails[0].size)
    for rank, tail in enumerate(tails):
        part = torch.zeros(tail.size)
        tail.fill(part, 1, 4, rank, leads=rank == 0)
        total += part
    tails[1].apply(total)
    assert models[1].sum.tolist() == [7e9, 125.0]  # pyright: ignore


def test_layers_that_the_first_forward_pass_adds_are_refused() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "norm"):
                self.norm = nn.BatchNorm1d(2, affine=False)
            return self.norm(self.layer(x))

    replica, links = replica_of(Task(Adds))
    with pytest.raises(TaskError, match=r"made the buffer norm\."):
        replica.train_step(links)
    replica.loader.stop()


def test_parameters_that_the_first_forward_pass_adds_are_refused() -> None:
    """The optimizer has nothing of them."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 2), None

        def forward(self, x: Tensor) -> Tensor:
            if self.head is None:
                self.head = nn.Linear(2, 2)
            return self.head(self.layer(x))

    replica, links = replica_of(Task(Adds))
    with pytest.raises(TaskError, match=r"made the parameter head\.weight, which was not there"):
        replica.train_step(links)
    replica.loader.stop()


class Thawing(nn.Module):
    """Its first layer is frozen until it has seen so many batches."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)
        self.left = frozen

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.first.requires_grad_(True)
        return self.last(self.first(x))


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_a_parameter_that_is_trained_later_on_is_refused(update: Any) -> None:
    """It is looked for now and then: until then it is not updated, so nobody's state is another."""
    replica, links = replica_of(Task(lambda: Thawing(2)), update=update)
    model: Any = replica.state.model
    before = model.first.weight.clone()
    for _ in range(passes.LOOKS_EVERY):
        replica.train_step(links)
    assert torch.equal(model.first.weight, before)
    with pytest.raises(TaskError, match=r"first\.weight requires a gradient now.*in a group of its own"):
        replica.train_step(links)
    replica.loader.stop()


class Regrouping(torch.optim.lr_scheduler.LambdaLR):
    """After two steps it changes the groups of its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], None]) -> None:
        self.change = change
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 2:
            self.change(self.optimizer)


class Grouped(Task):
    """The last layer is in a group of its own, but for its bias, which stands still at first."""

    def __init__(self, change: Callable[[torch.optim.Optimizer], None]) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        self.change = change

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        first, bias, last, _ = params
        return torch.optim.SGD([{"params": [first, bias]}, {"params": [last], "lr": 0.5}], lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return Regrouping(optimizer, self.change)


def unfreeze(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def swap(optimizer: torch.optim.Optimizer) -> None:
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


def move(optimizer: torch.optim.Optimizer) -> None:
    one, other = (group["params"] for group in optimizer.param_groups)
    other.append(one.pop())


def drop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].clear()


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "has 3 parameter groups now, and had 2 when it was made"),
        (swap, r"has the parameter 0\.weight in group 1 now, and had it in group 0"),
        (move, r"has the parameter 0\.bias in group 1 now, and had it in group 0"),
        (drop, r"has the parameter 1\.weight in no group now, and had it in group 1"),
    ],
)
def test_parameter_groups_that_change_are_refused_in_that_step(update: Any, change: Any, words: str) -> None:
    """A replacement would make them as they were at first."""
    replica, links = replica_of(Grouped(change), update=update)
    replica.train_step(links)
    with pytest.raises(TaskError, match=words + ".*group of its own, whose learning rate the scheduler keeps at 0"):
        replica.train_step(links)
    assert replica.state.step == 1
    replica.loader.stop()


def test_the_order_within_a_group_is_the_optimizers_affair() -> None:
    def turn(optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["params"] = group["params"][::-1]

    replica, links = replica_of(Grouped(turn))
    for _ in range(3):
        replica.train_step(links)
    replica.loader.stop()


def test_a_state_of_other_groups_is_refused_before_any_of_it_is_taken() -> None:
    replica, links = replica_of(Grouped(lambda optimizer: None))
    replica.train_step(links)
    extras = replica.state.extras()
    for groups in (extras.groups[:1], (*extras.groups, {"lr": 1.0})):
        with pytest.raises(TaskError, match=f"has {len(groups)} parameter groups where its state comes from, and 2 here"):
            replica.state.take(replace(extras, step=7, groups=({**groups[0], "lr": 9.0}, *groups[1:])))
        assert replica.state.extras() == extras
    replica.loader.stop()


def test_a_parameter_that_is_frozen_later_on_is_not() -> None:
    class Freezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            output = self.last(self.first(x))
            self.first.requires_grad_(False)
            return output

    replica, links = replica_of(Task(Freezing))
    replica.train_step(links)
    model: Any = replica.state.model
    before = [model.first.weight.clone(), model.last.weight.clone()]
    for _ in range(2):
        replica.train_step(links)
    assert torch.equal(model.first.weight, before[0])
    assert not torch.equal(model.last.weight, before[1])
    replica.loader.stop()


def test_a_group_whose_learning_rate_the_scheduler_keeps_at_zero_stands_still_until_then() -> None:
    """The remedy for what is to be trained later on."""

    class Later(Task):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            first, last = params[:2], params[2:]
            return torch.optim.AdamW([{"params": first}, {"params": last}], lr=0.1)

        def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: float(step >= 2), lambda step: 1.0])

    replica, links = replica_of(Later(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))))
    model: Any = replica.state.model
    before = model[0].weight.clone()
    for still in (True, True, False):
        replica.train_step(links)
        assert torch.equal(model[0].weight, before) == still
    replica.loader.stop()
