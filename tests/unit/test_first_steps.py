"""A log that is to be smaller than it could be: which boundaries are logged is decided by what the first steps take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.machine import handle, replay
from raytrain_ft.policy.planning import Measured, Selective, Wish
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.topology import Groups
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Switchboard
from raytrain_ft.training.stopwatch import TIMED_STEPS, UNTIMED_STEPS, FirstSteps

STAGES = 3
MEASURED = Measured(compute=(1.0, 1.0, 1.0), crossing=(100.0, 100.0), state=(1, 1, 1), micro_batches=4)


class Told:
    """A run of three stages that trains, with all it was told."""

    def __init__(self, replicas: int = 1, **wish: Any) -> None:
        workers = replicas * STAGES
        self.rules = Rules(
            min_workers=workers,
            max_workers=workers,
            max_steps=100,
            stages=STAGES,
            logging=True,
            strategy="logging",
            selective=Selective(Wish(interval=10, **wish), replace(MEASURED, replicas=replicas)),
        )
        self.run, self.events = RunState(self.rules), []
        self.tell(m.RunStarted(run_id="r"))
        self.tell(m.CapacityChanged(slots=workers))
        for number in range(workers):
            self.tell(m.WorkerStarted(member=f"w{number}", node=f"n{number}", pid=1))
        for member in self.run.joining:
            self.tell(m.Reconciled(member=member, incarnation=1, digests=("d",)))

    def tell(self, event: m.Event) -> list[c.Command]:
        self.events.append(event)
        return handle(self.run, event)

    def time(self, *seconds: float, incarnation: int = 1) -> list[c.Command]:
        found: list[c.Command] = []
        for member, each in zip(self.run.world, seconds, strict=False):
            assert found == [], "not before all have told"
            found = self.tell(m.StageTimed(member=member, incarnation=incarnation, step=4, seconds=each))
        return found


@pytest.mark.parametrize(
    ("seconds", "groups", "boundaries"),
    [((9.0, 1.0, 1.0), ((0,), (1, 2)), (0,)), ((1.0, 1.0, 9.0), ((0, 1), (2,)), (1,))],
)
def test_the_stages_times_decide(seconds: tuple[float, ...], groups: Groups, boundaries: tuple[int, ...]) -> None:
    """Of two boundaries that are as wide, a budget for one holds that which leaves the slow stage alone."""
    told = Told(budget_bytes=1000)
    assert told.run.log.boundaries == {0, 1}, "all, while nothing is known"
    (command,) = told.time(*seconds)
    assert isinstance(command, c.LogOnly)
    assert (command.groups, command.boundaries, command.seconds) == (groups, boundaries, seconds)
    assert (told.run.groups, tuple(told.run.log.boundaries)) == (groups, boundaries)
    assert told.time(*seconds) == [], "once in a run"
    assert replay(told.rules, told.events) == told.run


def test_what_was_decided_is_said_again_when_the_supervisor_was_lost() -> None:
    """It may have died before anybody heard of it."""
    told = Told(budget_bytes=1000)
    assert of_log(told.tell(m.SupervisorRestarted())) == [], "nothing is decided yet"
    (first,) = told.time(9.0, 1.0, 1.0)
    assert isinstance(first, c.LogOnly)
    (again,) = of_log(told.tell(m.SupervisorRestarted()))
    assert (again.boundaries, again.groups, again.seconds) == (first.boundaries, first.groups, first.seconds)


def of_log(commands: list[c.Command]) -> list[c.LogOnly]:
    return [command for command in commands if isinstance(command, c.LogOnly)]


def test_the_slowest_replica_of_a_stage_counts() -> None:
    (command,) = Told(replicas=2, budget_bytes=2000).time(1.0, 1.0, 1.0, 9.0, 1.0, 1.0)
    assert isinstance(command, c.LogOnly)
    assert (command.seconds, command.groups) == ((9.0, 1.0, 1.0), ((0,), (1, 2)))


def test_what_was_timed_in_another_world_does_not_count() -> None:
    """Its workers may host other stages now."""
    told = Told(budget_bytes=1000)
    told.time(9.0, 1.0)
    told.tell(m.Suspected(incarnation=1, reason="a collective failed", noticed_by="w0"))
    assert told.time(9.0, 1.0, 1.0) == [], "it is over"
    told.run.timed.clear()
    assert told.run.groups == ()


def test_a_target_that_the_workers_cannot_meet_has_everything_logged() -> None:
    told = Told(target_seconds=0.5)
    (command,) = told.time(2.0, 2.0, 2.0)
    assert isinstance(command, c.LogOnly)
    assert command.boundaries == (0, 1)
    assert "every boundary between nodes is logged" in command.reason
    assert told.run.warnings == [command.reason]


def test_the_fastest_of_the_first_steps_counts_but_for_the_very_first() -> None:
    first_steps = FirstSteps()
    given = [0.1, *([5.0] * (UNTIMED_STEPS + TIMED_STEPS - 2)), 3.0]
    assert [first_steps.add(seconds) for seconds in given] == [None] * (len(given) - 1) + [3.0]


def test_edges_that_are_not_logged_any_more_send_on() -> None:
    logged: list[Any] = []
    world: Any = SimpleNamespace(fence=Fence(1), rank=lambda: 1, size=lambda: 3, post_send=lambda *about: about)
    log: Any = SimpleNamespace(
        synchronous=False, idle=nullcontext, append=lambda key, *_: logged.append((key.sender, key.receiver))
    )
    board = Switchboard(world, world, STAGES, frozenset({0, 1}), log)
    before, after = (board._outbound(neighbour, "activation", frozenset(), None) for neighbour in (0, 2))
    for tap in (before, after):
        tap.give(0, [])
    board.log_only(frozenset({1}))
    for tap in (before, after):
        tap.give(1, [])
    assert logged == [(1, 0), (1, 2), (1, 2)]
    assert board._outbound(0, "activation", frozenset(), None)._log is None, "nor are those that are connected later"  # pyright: ignore
