"""Parameters that stages share: how they are found, that copies begin alike, and that their gradients are added up alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.model_checks import check_stages
from raytrain_ft.policy.planning import Measured, Wish, choose_groups, log_per_step
from raytrain_ft.policy.topology import replay_teams
from raytrain_ft.training.build import build_model
from raytrain_ft.training.edges import WHOLE_STEP, describe
from raytrain_ft.training.links import TiedEdge
from raytrain_ft.training.pipeline import build_stage
from raytrain_ft.training.settings import PipelineSettings, StepSettings, Tie
from raytrain_ft.training.state import TrainingState
from raytrain_ft.training.ties import Shared, find_ties


class Cut(ft.TrainTask):
    """A model in one piece, the first layer of which is the last as well."""

    def model(self, stage: int) -> nn.Module:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        return nn.Sequential(first, nn.Linear(4, 4), last, last)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


class Given(ft.TrainTask):
    """Stages by the task; `names` is what it says they share."""

    def __init__(self, *names: tuple[str, ...]) -> None:
        self.names = names

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + stage))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def tied(self) -> tuple[tuple[str, ...], ...]:
        return self.names


@pytest.mark.parametrize(
    ("cuts", "names"),
    [
        ((1, 2), [{0: "0.weight", 2: "0.weight"}]),
        ((2,), [{0: "0.weight", 1: "0.weight"}]),
        ((1, 3), [{0: "0.weight", 1: "1.weight", 2: "0.weight"}, {1: "1.bias", 2: "0.bias"}]),
    ],
)
def test_what_a_cut_tears_apart_is_found(cuts: tuple[int, ...], names: list[dict[int, str]]) -> None:
    assert [tie.names for tie in find_ties(Cut(), len(cuts) + 1, cuts)] == names
    assert find_ties(Cut(), 1, ()) == (), "within a stage there is nothing to do"


def test_what_is_not_trained_needs_no_tie() -> None:
    task = Cut()
    whole = task.model(0)
    whole.requires_grad_(False)
    task.model = lambda stage: whole  # type: ignore[method-assign]
    assert find_ties(task, 3, (1, 2)) == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([("0.0.weight", "1.0.wait")], "there is no '1.0.wait' to train"),
        ([("0.0.weight",)], "two or more parameters"),
        ([("0.0.weight", "0.0.weight")], "each of another stage"),
        ([()], "names nothing"),
        ([("0.1.weight", "1.1.weight")], r"\(2, 4\) torch.float32, \(3, 4\) torch.float32"),
        ([("0.0.weight", "1.0.weight"), ("1.0.weight", "2.0.weight")], "1.0.weight was named before"),
    ],
)
def test_what_a_task_says_is_checked(names: list[tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_ties(Given(*names), 3, None)


def test_copies_begin_alike() -> None:
    task = Given(("0.0.weight", "2.0.weight"))
    ties = find_ties(task, 3, None)
    step = StepSettings(seed=3, pipeline=PipelineSettings(stages=3, micro_batches=1, ties=ties))
    first, middle, last = (build_model(task, stage, step) for stage in range(3))
    weights = [model.get_parameter("0.weight") for model in (first, middle, last)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(first.get_parameter("0.bias"), last.get_parameter("0.bias")), "only what is shared"


def test_copies_are_updated_alike_or_not_at_all() -> None:
    class Uneven(Given):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.1 * len(params[-1]))

    task = Uneven(("0.0.weight", "2.0.weight"))
    pipeline = PipelineSettings(stages=3, micro_batches=1, ties=find_ties(task, 3, None))
    with pytest.raises(ConfigError, match=r"stages 0 and 2 share 0.weight.*in another way in each"):
        check_stages(task, pipeline)


@dataclass
class Wire:
    """Both ends of an edge."""

    sent: dict[int, list[Tensor]] = field(default_factory=dict)

    def begin(self, *about: Any) -> None: ...

    def arrived(self, number: int) -> None: ...

    def give(self, number: int, tensors: Any) -> None:
        self.sent[number] = list(tensors)

    def take(self, number: int) -> list[Tensor]:
        return self.sent.pop(number)


class Waits(Exception):
    """Where a stage would wait for the others."""


def wait(phase: str) -> None:
    if phase == "wait":
        raise Waits


class Stages:
    """All stages of a model in this process, between which tensors go."""

    def __init__(self, task: Any, cuts: tuple[int, ...], seeds: Sequence[int] = (0, 0, 0)) -> None:
        count = len(cuts) + 1
        self.ties = find_ties(task, count, cuts)
        pipeline = PipelineSettings(stages=count, micro_batches=1, cuts=cuts, ties=self.ties)
        self.states = [self._state(task, stage, pipeline, seed) for stage, seed in zip(range(count), seeds, strict=False)]
        self.shared = [Shared(stage, pipeline, state) for stage, state in enumerate(self.states)]
        wires = {(a, b): Wire() for a in range(count) for b in range(count) if a != b}
        pairs = {(a, b) for a, b in wires for tie in self.ties if {a, b} <= tie.names.keys()}
        self.edges = [[TiedEdge(b, wires[a, b], wires[b, a]) for a, b in sorted(pairs) if a == stage] for stage in range(count)]
        self._wires = wires

    def _state(self, task: Any, stage: int, pipeline: PipelineSettings, seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model = build_stage(task, stage, pipeline)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainingState(model, optimizer, None, bucket_bytes=40, first_bucket_bytes=40, stage=stage)
        for bucket in state.buckets:
            bucket.flat.copy_(torch.randn(bucket.flat.shape) * 10.0**stage)
            for p, view in zip(bucket.params, bucket.views, strict=True):
                p.grad = view
        return state

    def add_up(self, step: int) -> None:
        """Each sends, and gets as far as to where it waits; then each has all."""
        for shared, edges in zip(self.shared, self.edges, strict=True):
            with pytest.raises(Waits) if edges else nullcontext():
                shared.add_up(step, edges, wait)
        sent = {key: dict(wire.sent) for key, wire in self._wires.items()}
        for shared, edges in zip(self.shared, self.edges, strict=True):
            for key, wire in self._wires.items():
                wire.sent = dict(sent[key])
            shared.add_up(step, edges, lambda phase: None)


def test_all_add_the_same_in_the_same_order() -> None:
    """Three stages share one parameter, and two of them another; sums of floats depend on the order."""
    stages = Stages(Cut(), (1, 3))
    parts = [[view.clone() for view in views(state)] for state in stages.states]
    for stage, (shared, edges) in enumerate(zip(stages.shared, stages.edges, strict=True)):
        with pytest.raises(Waits):
            shared.add_up(0, edges, wait)
        assert all(torch.equal(a, b) for a, b in zip(parts[stage], views(stages.states[stage]), strict=True)), "too early"
    stages.add_up(0)
    for tie in stages.ties:
        params = [stages.states[stage].model.get_parameter(name) for stage, name in tie.names.items()]
        grads = [p.grad for p in params]
        assert all(grad is not None and torch.equal(grad, grads[0]) for grad in grads)
        kept = [
            view for s in stages.states for view, p in zip(views(s), params_of(s), strict=True) if any(p is q for q in params)
        ]
        assert all(torch.equal(view, grads[0]) for view in kept), "a survivor may yet complete the step with it"
        expected = sum(
            part
            for state, before in zip(stages.states, parts, strict=True)
            for part, p in zip(before, params_of(state), strict=True)
            if any(p is one for one in params)
        )
        torch.testing.assert_close(grads[0], expected)
    counted = [sum(view.numel() for view in one.counted()) for one in stages.shared]
    assert sum(counted) == sum(p.numel() for p in Cut().model(0).parameters()), "each parameter counts once in the norm"


def test_what_nobody_used_has_no_gradient() -> None:
    stages = Stages(Cut(), (1, 2))
    weights = [stages.states[stage].model.get_parameter("0.weight") for stage in (0, 2)]
    weights[0].grad = None
    stages.add_up(7)
    assert weights[0].grad is not None, "the other stage used it"
    assert weights[1].grad is not None
    for weight in weights:
        weight.grad = None
    stages.add_up(7)
    assert weights[0].grad is None
    assert weights[1].grad is None


def test_copies_that_are_no_longer_the_same_are_found() -> None:
    stages = Stages(Cut(), (1, 2), seeds=(0, 0, 1))
    stages.add_up(7)  # it would take too long in every step
    with pytest.raises(TaskError, match=r"step 100: stages 0 and 2 share 0.weight.*no longer the same"):
        stages.add_up(100)


def test_many_may_be_shared() -> None:
    """What stages send each other is described by few numbers."""

    class Many(Cut):
        def model(self, stage: int) -> nn.Module:
            block = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)), nn.Linear(2, 2).double())
            return nn.Sequential(block, block)

    stages = Stages(Many(), (1,))
    assert len(stages.ties) == 42
    stages.add_up(0)
    (edge,) = stages.edges[0]
    with pytest.raises(Waits):
        stages.shared[0].add_up(0, [edge], wait)
    describe(edge.outbound.sent[WHOLE_STEP])  # type: ignore[attr-defined]
    for first, last in zip(params_of(stages.states[0]), params_of(stages.states[1]), strict=True):
        assert first.grad is not None
        assert last.grad is not None
        assert torch.equal(first.grad, last.grad)


def test_statistics_cannot_be_shared() -> None:
    class Normed(Cut):
        def model(self, stage: int) -> nn.Module:
            norm = nn.BatchNorm1d(4)
            return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)

    with pytest.raises(ConfigError, match=r"stages 0 and 1 share 1, a BatchNorm1d with running statistics"):
        find_ties(Normed(), 2, (2,))


def test_chunks_of_a_stage_share_nothing() -> None:
    ties = find_ties(Cut(), 2, (1, 2, 3), 2)
    pipeline = PipelineSettings(stages=2, micro_batches=1, cuts=(1, 2, 3), ties=ties, chunks=2)
    with pytest.raises(ConfigError, match=r"chunks 0 and 1 of stage 0 share the parameter 0.weight"):
        check_stages(Cut(), pipeline)


def test_tied_is_for_stages_that_the_task_gives() -> None:
    class Both(Cut):
        def model(self, stage: int) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def tied(self) -> list[tuple[str, str]]:
            return [("0.0.weight", "1.0.weight")]

    with pytest.raises(ConfigError, match="no two layers of the model that is cut do"):
        find_ties(Both(), 2, (1,))


@pytest.mark.parametrize("wrong", [None, [1], [(0, 1)], ["0.0.weight"], [("0.0.weight", None)]])
def test_tied_that_is_no_list_of_names(wrong: Any) -> None:
    task = Given()
    task.names = wrong
    with pytest.raises(ConfigError, match="use a list of lists of names"):
        find_ties(task, 3, None)


def params_of(state: TrainingState) -> list[nn.Parameter]:
    return [p for bucket in state.buckets for p in bucket.params]


def views(state: TrainingState) -> list[Tensor]:
    return [view for bucket in state.buckets for view in bucket.views]


def test_stages_that_wait_for_each_other_have_no_helpers() -> None:
    world = ("a0", "a1", "a2", "a3")
    assert replay_teams(world, frozenset({0, 3}), 4, 1) == (("a0", "a1"), ("a3", "a2"))
    assert replay_teams(world, frozenset({0, 3}), 4, 1, ((0, 3),)) == (("a0",), ("a3",))
    assert replay_teams(world, frozenset({0, 2}), 4, 1, ((0, 3),)) == (("a0", "a1"), ("a2", "a3"))


def test_what_is_shared_is_in_the_plan() -> None:
    measured = Measured(
        compute=(1.0, 1.0, 1.0), crossing=(10.0, 10.0), state=(1, 1, 1), micro_batches=1, tied=((0, 2, 100.0),), replicas=2
    )
    assert log_per_step(measured, ((0,), (1,), (2,))) == 2 * 120
    assert log_per_step(measured, ((0, 1), (2,))) == 2 * 110
    assert log_per_step(measured, ((0, 1, 2),)) == 0
    one = Wish(interval=1, budget_bytes=2 * 110)
    assert choose_groups(measured, one) in (((0,), (1, 2)), ((0, 1), (2,)))
    with pytest.raises(ConfigError, match="220 bytes"):
        choose_groups(measured, Wish(interval=1, budget_bytes=2 * 109))


def test_a_tie_is_of_a_whole_step() -> None:
    assert WHOLE_STEP not in range(4096)
    assert PipelineSettings(stages=3, micro_batches=1, ties=(Tie({2: "a", 0: "b"}, 4),)).sharing == ((0, 2),)
