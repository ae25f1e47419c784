"""The members of a run: who starts, who waits as a spare, who trains; and what the budgets for failures still allow."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.planning import Selective


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked for, as far as decisions need it. Times in seconds; a budget of -1 has no limit.

    Attributes:
        stages: of the pipeline; a world is of whole replicas, so its size is a multiple of this.
        logging: whether what crosses between stages is logged: every boundary between nodes, but where replicas make it
            needless if the strategy is "auto". selective: what is asked for if some boundaries are enough.
        joined: stages that wait for each other though they are no neighbours.
        replay_workers: how many replay one lost stage, if there are so many.
        exact_sums: whether these add gradients in the order in which one alone would.
        quorum: of a batch's samples, the share that a lossy recovery needs to be left.
    """

    min_workers: int
    max_workers: int
    max_steps: int
    stages: int = 1
    logging: bool = False
    selective: Selective | None = None
    joined: tuple[tuple[int, ...], ...] = ()
    replay_workers: int = 1
    exact_sums: bool = True
    spares: int = 1
    whole_update: bool = True
    strategy: Literal["auto", "replication", "logging", "checkpoint", "snapshot", "lossy", "rollback", "skip"] = "auto"
    quorum: float = 0.5
    checkpoints: bool = False
    roll_back: bool = False
    measure_failures: bool = False
    wait_for_replacement: bool = True
    sleeps_on_notice: bool = False
    schedule_timeout: float = 120.0
    replacement_timeout: float = 60.0
    fence_timeout: float = 10.0
    hang_timeout: float = 60.0
    phase_timeout: float = 60.0
    stop_timeout: float = 30.0
    max_failures: int = -1
    max_preemption_failures: int = -1
    max_fruitless_recoveries: int = 10
    max_start_failures: int = 5

    @property
    def leaves_checkpoint(self) -> bool:
        """Whether a run that is to end before its time leaves a checkpoint; snapshots in memory end with it."""
        return self.checkpoints and self.strategy != "snapshot"

    @property
    def replacement(self) -> Literal["wait", "shrink"]:
        """What `wait_for_replacement` says, in the user's words."""
        return "wait" if self.wait_for_replacement else "shrink"

    def whole(self, workers: int) -> int:
        """How many of these workers make whole replicas."""
        return workers // self.stages * self.stages


@dataclass(frozen=True, slots=True)
class Leave:
    """When a member must be gone (seconds since the run began), why, and when this lapses: who lives then is not taken away.
    If nobody is to take its place, by how many `fewer` workers the run may have for that; else 0."""

    deadline: float
    why: str
    lapses: float
    fewer: int = 0


class MemberState(StrEnum):
    """What a member is to the run."""

    STARTING = "starting"
    SPARE = "spare"
    ACTIVE = "active"
    LEAVING = "leaving"
    """It hands its state over and goes."""


@dataclass(slots=True)
class Roster:
    """Every live member, and how many more there should be.

    Attributes:
        members: every live member and what it is to the run.
        nodes: where each of them is, as far as it is known.
        gone: members that are no more, in order, and how they were lost; None of those that left after a notice.
        slots: how many workers the cluster could host; None until that is known. last_resort: how many more, on nodes that
            are said to go.
        leaving: members that will be gone soon; their places do not count.
        start_failures: rounds of starts in a row of which no worker became ready. Workers that were started together and
            are lost together, with their node perhaps, are one round.
        join_failures: the same of newcomers: rounds of those who became ready, and failed as they joined others who had trained
            or in their first step. That somebody becomes ready does not end such a row: one of them must do a step.
        in_vain: why the last one that was started did not become ready, or failed then; empty if one has become so since.
    """

    rules: Rules
    members: dict[str, MemberState] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    gone: dict[str, m.WorkerLost | None] = field(default_factory=dict)
    slots: int | None = None
    last_resort: int = 0
    leaving: frozenset[str] = frozenset()
    start_failures: int = 0
    join_failures: int = 0
    in_vain: str = ""
    _started: int = 0
    _round_began: int = 0
    _joins_began: int = 0
    _failures: int = 0
    _preemptions: int = 0

    def of(self, what: MemberState) -> list[str]:
        """The members that are this, longest-lived first."""
        return [member for member, kind in self.members.items() if kind == what]

    def spares(self) -> list[str]:
        """Workers that are ready and do not train; those that had notice last."""
        return sorted(self.of(MemberState.SPARE), key=lambda member: member in self.leaving)

    def lasting(self) -> list[str]:
        """Spares that had no notice."""
        return [member for member in self.spares() if member not in self.leaving]

    def active(self) -> tuple[str, ...]:
        """Workers that train, or did until the present disturbance."""
        return tuple(self.of(MemberState.ACTIVE))

    def taking_part(self) -> tuple[str, ...]:
        """Workers that train, and those that hand their state over."""
        return (*self.active(), *self.of(MemberState.LEAVING))

    def all_take_part_in(self, members: Container[str]) -> bool:
        """Whether all of these workers are among `members`."""
        part = (MemberState.ACTIVE, MemberState.LEAVING)
        return all(member in members for member, kind in self.members.items() if kind in part)

    def any_starting(self) -> bool:
        """Whether another worker may come soon."""
        return MemberState.STARTING in self.members.values()

    def lacking(self) -> int:
        """How many workers the cluster has no room for: an autoscaler may make some."""
        return 0 if self.slots is None else max(0, self.rules.max_workers + self.rules.spares - self.slots)

    def provision(self) -> list[c.Command]:
        """Starts what is missing, as far as the cluster has room. Where a node that is said to go is all that there is, it will
        do for those without whom the run could not go on: nothing may come of the notice."""
        slots = self.slots or 0
        wanted = min(self.rules.max_workers + self.rules.spares, slots)
        needed = min(self.rules.min_workers, slots + self.last_resort)
        if self.cannot_start():
            return []
        commands: list[c.Command] = []
        while len(self.members) - len(self.leaving) < wanted:
            commands.append(c.StartWorker(self._enrol()))
        while len(self.members) < needed:
            commands.append(c.StartWorker(self._enrol(), anywhere=True))
        return commands

    def _enrol(self) -> str:
        member = f"w{self._started}"
        self._started += 1
        self.members[member] = MemberState.STARTING
        return member

    def cannot_start(self) -> bool:
        """Whether starts failed so often, or who was started, that trying again is no use until the cluster changes."""
        return max(self.start_failures, self.join_failures) >= self.rules.max_start_failures

    def resized(self, slots: int, last_resort: int = 0) -> None:
        """The cluster can host so many workers now, and so many more as a last resort."""
        if slots > (self.slots or 0):
            self.start_failures = self.join_failures = 0
        self.slots, self.last_resort = slots, last_resort

    def ready(self, member: str, node: str = "") -> None:
        """A worker that was starting is a spare."""
        if node:
            self.nodes[member] = node
        self.members[member] = MemberState.SPARE
        self.start_failures, self.in_vain = 0, ""

    def could_not_join(self, members: list[str], why: str) -> None:
        """These newcomers are of no use where they were."""
        self.in_vain = why
        if any(int(member[1:]) >= self._joins_began for member in members):
            self.join_failures += 1
            self._joins_began = self._started

    def lose(self, member: str, how: m.WorkerLost | None, *, trained: bool = True) -> MemberState:
        """Strikes a member off; returns what it was. `how`: see `gone`. `trained`: whether it has done a step, if it worked."""
        was = self.members.pop(member)
        self.nodes.pop(member, None)
        self.gone[member] = how
        if was == MemberState.STARTING and how is not None:
            self.in_vain = how.cause
            if int(member[1:]) >= self._round_began:
                self.start_failures += 1
                self._round_began = self._started
        elif was in (MemberState.ACTIVE, MemberState.LEAVING):
            self.start_failures = 0  # a place is free that was not when those starts failed
            if trained:
                self.join_failures = 0  # and one that was of use
        return was

    def charge(self, preempted: bool) -> str:
        """Charges the loss of a working member to its budget; returns in words what is used up, if anything is."""
        if preempted:
            self._preemptions += 1
        else:
            self._failures += 1
        used = (("max_failures", self._failures), ("max_preemption_failures", self._preemptions))
        for name, count in used:
            budget = getattr(self.rules, name)
            if 0 <= budget < count:
                return f"{count} failures, and FailureConfig.{name} allows {budget}"
        return ""
