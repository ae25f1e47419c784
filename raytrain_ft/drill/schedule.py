"""What strikes a run from outside, when and whom: decided from the scenario, its seed and how the run stands."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from raytrain_ft.drill.faults import casualties, is_planted
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.scenario import Event, Scenario, Who
from raytrain_ft.simulate.listed import SpotTrace

UNREADY = ENDED | {State.INITIALIZING, State.SCHEDULING, State.SHUTTING_DOWN}
"""States in which nothing is struck: there is no training yet, or no longer."""


@dataclass(frozen=True, slots=True)
class Due:
    """Something that is to happen now.

    Attributes:
        event: its number. back: it is a node that joins, of a trace or of bring_back.
        nodes: how many nodes a trace takes or gives at once.
    """

    event: int
    what: Event
    back: bool = False
    nodes: int = 1

    @property
    def persistent(self) -> bool:
        """Whether it is tried again until it is possible: all but what comes at random."""
        return self.what.when is None or self.what.when.mtbf is None


@dataclass(slots=True)
class View:
    """How a run stands, from the supervisor's account. Members by name.

    Attributes:
        world: the members by rank. pids, nodes: of all members, spares too. holders: who holds the training state.
    """

    state: str = "INITIALIZING"
    step: int = 0
    world: tuple[str, ...] = ()
    pids: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    holders: tuple[str, ...] = ()
    supervisor: int = 0

    @classmethod
    def of(cls, account: dict[str, Any]) -> View:
        """From the account."""
        return cls(
            state=account["state"],
            step=account["step"],
            world=tuple(account["world"]),
            pids={member: pid for member, pid in account["pids"].items() if pid},
            nodes={member: node for member, node in account["nodes"].items() if node},
            holders=tuple(account["holders"]),
            supervisor=account["pid"],
        )

    @property
    def ready(self) -> bool:
        """Whether there is something to strike."""
        return self.state not in UNREADY and bool(self.pids)

    def hosts(self) -> list[str]:
        """The nodes of the run, in the order of the lowest rank on each; those of spares last."""
        members = [*self.world, *sorted(set(self.nodes) - set(self.world))]
        return list(dict.fromkeys(self.nodes[member] for member in members if member in self.nodes))


class Schedule:
    """The events that come from outside."""

    def __init__(self, scenario: Scenario, seed: object = 0) -> None:
        self._chance = random.Random(f"{scenario.seed} {seed}")
        self._once: list[tuple[float | None, int | None, Due]] = []  # (seconds, step, what)
        self._random: dict[int, tuple[float, float, float]] = {}  # event -> (when next, mean time between, how many are left)
        self._events = scenario.events
        for number, event in enumerate(scenario.events):
            if not is_planted(event):
                self._add(scenario, number, event)

    def _add(self, scenario: Scenario, number: int, event: Event) -> None:
        when = event.when
        assert when is not None
        if when.mtbf is not None:
            self._random[number] = (self._chance.expovariate(1 / when.mtbf), when.mtbf, when.count or math.inf)
        elif when.trace is not None:
            for change in SpotTrace.read(scenario.relative(when.trace)).failures:
                at = (change.at or 0.0) / (when.speed or 1.0)
                for nodes, back in ((change.lost, False), (change.back, True)):
                    if nodes:
                        self._once.append((at, None, Due(number, event, back, nodes)))
        else:
            self._once.append((when.seconds, when.step, Due(number, event, event.action == "bring_back")))

    def due(self, seconds: float, step: int) -> list[Due]:
        """What is to happen by now, so many seconds after training began; each is given once."""
        now = [entry for entry in self._once if _reached(entry[0], seconds) or _reached(entry[1], step)]
        self._once = [entry for entry in self._once if not (_reached(entry[0], seconds) or _reached(entry[1], step))]
        due = [what for _, _, what in now]
        for number, (at, mtbf, left) in self._random.items():
            if at <= seconds and left > 0:
                due.append(Due(number, self._events[number]))
                self._random[number] = (seconds + self._chance.expovariate(1 / mtbf), mtbf, left)
        return due

    def struck(self, number: int) -> None:
        """An event at random was carried out."""
        if number in self._random:
            at, mtbf, left = self._random[number]
            self._random[number] = (at, mtbf, left - 1)

    @property
    def left(self) -> list[Due]:
        """What has not come yet, but for what comes at random."""
        return [what for _, _, what in self._once]

    @property
    def at_random(self) -> set[int]:
        """The events that come at random, whether or not they did."""
        return set(self._random)

    def members(self, who: Who, view: View) -> list[str]:
        """Who is meant of those who live; empty if not all of them are there."""
        alive = [member for member in view.world if member in view.pids]
        if who.role == "any":
            return [self._chance.choice(sorted(view.pids))] if view.pids else []
        if who.role == "spare":
            spares = sorted(set(view.pids) - set(view.world))
            return [self._chance.choice(spares)] if spares else []
        if who.node is not None:
            hosts = view.hosts()
            return [m for m in sorted(view.pids) if who.node < len(hosts) and view.nodes.get(m) == hosts[who.node]]
        wanted = [who.rank] if who.rank is not None else who.ranks
        if wanted is not None:
            meant = [view.world[rank] for rank in wanted if rank < len(view.world)]
            return meant if len(meant) == len(wanted) and set(meant) <= set(alive) else []
        count = casualties(who, len(alive if who.survivors is not None else view.world))
        is_there = max(count, who.count or 0) <= len(alive)
        return sorted(self._chance.sample(alive, count)) if is_there else []

    def hosts(self, due: Due, view: View) -> list[str]:
        """The nodes that are meant: those of the members meant, or so many as a trace takes."""
        if due.what.who is not None:
            members = self.members(due.what.who, view)
            return list(dict.fromkeys(view.nodes[member] for member in members if member in view.nodes))
        hosts = view.hosts()
        return self._chance.sample(hosts, min(due.nodes, len(hosts)))


def _reached(wanted: float | None, now: float) -> bool:
    return wanted is not None and now >= wanted


def spares_one(members: Sequence[str], hosts: Sequence[str], view: View, struck: Set[str] = frozenset()) -> bool:
    """Whether somebody who holds the training state is left when these members, or all on these nodes, are gone.

    Args:
        struck: who was struck before, though it may not have been noticed yet.
    """
    gone = {member for member in view.pids if member in members or view.nodes.get(member) in hosts}
    return any(holder not in gone and holder not in struck for holder in view.holders)
