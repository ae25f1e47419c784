"""What a run decides to log, before it starts: settings that are refused, budgets, targets, and whether it is worth it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_profile import Bad, Layers, settings

from raytrain_ft import selective
from raytrain_ft.config import LogConfig, ParallelismConfig, RecoveryConfig
from raytrain_ft.errors import ConfigError, TaskError
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import logging_cost, replacing
from raytrain_ft.policy.planning import LogChoice
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.topology import Groups
from raytrain_ft.ray_config import ScalingConfig
from raytrain_ft.selective import choose_log
from raytrain_ft.settings import TrainSettings
from raytrain_ft.training.settings import StepSettings

SECOND = timedelta(seconds=1)
SMALL, LARGE = 4 * 256, 4 * 2048
"""Bytes per step over the second and the first boundary."""


def choose(log: LogConfig | None = None, task: Any = None, every: Any = 10, step: StepSettings | None = None, **recovery: Any):
    how = RecoveryConfig(log=log or LogConfig(), **recovery)
    numbers = TrainSettings(max_steps=100, global_batch_size=16)
    return choose_log(task or Layers(), step or settings(), numbers, ScalingConfig(num_workers=3), how, every, Path("/tmp/no"))


def chosen(*arguments: Any, **more: Any) -> LogChoice:
    choice = choose(*arguments, **more)
    assert choice is not None
    return choice


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"budget_bytes": -5}, "budget_bytes=-5"),
        ({"recovery_target": timedelta()}, "longer than zero"),
        ({"recovery_target": 5}, "use a timedelta"),
        ({"budget_bytes": 5, "recovery_target": SECOND}, "exclude each other"),
        ({"budget_bytes": 5, "enabled": False}, "there is no log"),
    ],
)
def test_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LogConfig(**values)


def test_refused_where_nothing_is_logged() -> None:
    with pytest.raises(ConfigError, match=r'strategy="checkpoint".* keeps no log'):
        RecoveryConfig(strategy="checkpoint", log=LogConfig(budget_bytes=5))
    numbers = TrainSettings(max_steps=1, global_batch_size=4)
    with pytest.raises(ConfigError, match="only a pipeline"):
        numbers.check(ScalingConfig(num_workers=1), RecoveryConfig(log=LogConfig(budget_bytes=5)), ParallelismConfig())


def test_a_budget_chooses_groups() -> None:
    choice = chosen(LogConfig(budget_bytes=10 * SMALL))
    assert (choice.kept, choice.groups, choice.bytes_per_step, choice.interval) == (True, ((0, 1), (2,)), SMALL, 10)
    assert len(choice.compute_ms) == 3
    assert chosen(LogConfig(budget_bytes=10 * (SMALL + LARGE))).groups == ((0,), (1,), (2,))
    assert "budget_bytes" in choice.as_record()["reason"]
    assert choice.selective is not None, "for the workers' times"
    assert choice.selective.groups_of((1.0, 1.0, 1.0)) == ((0, 1), (2,))


def test_the_interval_of_a_budget() -> None:
    assert chosen(LogConfig(budget_bytes=100 * SMALL), every=None).interval == 100
    assert chosen(LogConfig(budget_bytes=100 * SMALL), every="auto").interval == 100


def test_a_budget_that_holds_nothing() -> None:
    with pytest.raises(ConfigError, match=r"LogConfig\(budget_bytes=...\): a budget of .* holds no boundary at all"):
        choose(LogConfig(budget_bytes=10 * SMALL - 1))


def test_a_target_that_needs_no_log() -> None:
    with pytest.warns(UserWarning, match="no log is kept.*the target is met without a log"):
        choice = chosen(LogConfig(recovery_target=1000 * SECOND))
    assert (choice.kept, choice.groups, choice.bytes_per_step) == (False, ((0, 1, 2),), 0)


def test_a_target_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match=r"LogConfig\(recovery_target=...\).*still leaves"):
        choose(LogConfig(recovery_target=timedelta(microseconds=1)))


def test_a_small_pipeline_always_logs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = chosen()
    assert (choice.kept, choice.groups, choice.bytes_per_step) == (True, (), SMALL + LARGE)
    assert "every boundary" in choice.reason


def test_a_log_far_larger_than_the_model_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_cost, "SMALL_LOG", 0)
    monkeypatch.setattr(logging_cost, "FAR_PER_STEP", 0.1)
    with pytest.warns(UserWarning, match="no log is kept.* times the model's state"):
        assert not chosen().kept
    assert chosen(strategy="logging").kept, "who insists gets it"


@pytest.mark.parametrize(("bandwidth", "kept"), [(1e9, True), (1.0, False), (None, True)])
def test_a_large_log_is_kept_if_it_fits_the_idle_time(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float | None, kept: bool
) -> None:
    """Of the stages' measured times, and of what the place of the log was measured to take (SWIFT, section 5.4)."""
    monkeypatch.setattr(selective, "SMALL_LOG", 0)
    monkeypatch.setattr(selective, "bandwidth_of", lambda directory: bandwidth)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        choice = chosen()
    assert choice.kept == kept
    assert ("idle" in choice.reason) == (bandwidth is not None)
    assert len(told) == (not kept)
    assert chosen(strategy="logging").kept, "who insists gets it"


def test_another_schedule_leaves_less_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fits(**about: Any) -> logging_cost.Worth:
        asked.append(about["micro_batches"])
        assert about["log_bytes"] == (SMALL + LARGE) / 2, "the middle stage sends half of what crosses either boundary"
        return logging_cost.fits_idle_time(**about)

    monkeypatch.setattr(selective, "SMALL_LOG", 0)
    monkeypatch.setattr(selective, "bandwidth_of", lambda directory: 1e9)
    monkeypatch.setattr(selective, "fits_idle_time", fits)
    pipeline = settings().pipeline
    assert pipeline is not None
    for schedule in ("1f1b", "zero_bubble"):
        chosen(step=replace(settings(), pipeline=replace(pipeline, schedule=schedule)))
    assert asked == [pipeline.micro_batches, 3 * pipeline.micro_batches]


def test_nothing_is_decided_where_nothing_is_logged() -> None:
    assert choose(LogConfig(enabled=False)) is None
    assert choose(strategy="checkpoint") is None
    assert choose(step=replace(settings(), pipeline=None)) is None


class Sudden(Layers):
    def model(self, stage: int) -> torch.nn.Module:
        return torch.nn.Sequential(*super().model(stage), torch.nn.Linear(5, 4))


def test_a_task_that_fails_here_is_left_to_the_workers() -> None:
    choice = chosen(task=Sudden())
    assert choice.kept
    assert "is not known" in choice.reason
    with pytest.raises(TaskError, match="stage 2 fails"):
        choose(LogConfig(budget_bytes=10 * SMALL), task=Bad())


@pytest.mark.parametrize(
    ("groups", "nodes", "logged"),
    [
        ((), "abc", (0, 1)),
        (((0, 1), (2,)), "abc", (1,)),
        (((0, 1), (2,)), "abb", ()),
        (((0,), (1, 2)), "abb", (0,)),
        (((0, 1, 2),), "abc", ()),
    ],
)
def test_what_is_logged_crosses_groups_and_nodes(groups: Groups, nodes: str, logged: tuple[int, ...]) -> None:
    run = RunState(Rules(min_workers=3, max_workers=3, max_steps=10, stages=3, logging=True), groups=groups)
    world = tuple(f"w{rank}" for rank in range(3))
    run.roster.nodes = dict(zip(world, nodes, strict=True))
    (told,) = [command for command in replacing.join(run, world) if isinstance(command, c.Reconcile)]
    assert told.logged == logged


@pytest.mark.parametrize(
    ("nodes", "leaving", "world"),
    [
        ("abcd", (), "0123"),
        ("abab", (), "0213"),
        ("abcb", (), "0132"),
        ("aabb", (), "0123"),
        ("ababc", (1,), "0234"),  # who had notice comes last, so here it is not needed
    ],
)
def test_neighbours_share_a_node_where_they_can(nodes: str, leaving: tuple[int, ...], world: str) -> None:
    run = RunState(Rules(min_workers=4, max_workers=4, max_steps=10, stages=4, logging=True))
    members = [f"w{number}" for number in range(len(nodes))]
    for member, node in zip(members, nodes, strict=True):
        run.roster.members[member] = MemberState.SPARE
        run.roster.nodes[member] = node
    run.roster.leaving = frozenset(members[number] for number in leaving)
    (told,) = [command for command in replacing.replace(run, waited=True) if isinstance(command, c.Reconcile)]
    assert told.world == tuple(members[int(number)] for number in world)


@pytest.mark.parametrize(
    ("nodes", "rules", "logged"),
    [
        ("abcdefgh", {}, ()),
        ("abcdefgh", {"strategy": "logging"}, (0, 1, 2)),
        ("abcdefgh", {"checkpoints": False}, (0, 1, 2)),
        ("abcdabcd", {}, (0, 1, 2)),  # each replica would be lost with the other
        ("abcdebfg", {}, (0, 1)),  # only stage 1 would be
        ("abcdebfg", {"groups": ((0, 1), (2, 3))}, (1,)),
        ("aabbccdd", {}, ()),
    ],
)
def test_what_is_filled_from_replicas_is_not_logged(nodes: str, rules: dict[str, Any], logged: tuple[int, ...]) -> None:
    """Four stages, two replicas."""
    groups = rules.get("groups", ())
    how = {"stages": 4, "logging": True, "checkpoints": True, **{name: rules[name] for name in rules if name != "groups"}}
    run = RunState(Rules(min_workers=8, max_workers=8, max_steps=10, **how), groups=groups)
    world = tuple(f"w{rank}" for rank in range(8))
    run.roster.nodes = dict(zip(world, nodes, strict=True))
    (told,) = [command for command in replacing.join(run, world) if isinstance(command, c.Reconcile)]
    assert told.logged == logged
