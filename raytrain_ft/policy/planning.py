"""Which recovery for which stage of a pipeline, and which boundaries to log: decided before a run, from measured numbers. Pure.

Replication where a stage has a replica on another node, else logging, else checkpoints (SWIFT, section 3). A run asks
`choose_groups` and `in_proportion`; `raytrain-ft plan` shows all of it with the times that go with it.

Workers are taken to be started one by one, each on the emptiest node, and to be seated as a run seats them: those of one node
in a row (`world.by_node`), so that neighbouring stages share a node where they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import grouping
from raytrain_ft.policy.grouping import Groups, Profile
from raytrain_ft.policy.logging_cost import Worth, in_proportion
from raytrain_ft.policy.topology import between, groups_by_node, groups_of, logged_edges, replicated
from raytrain_ft.policy.units import in_bytes, in_seconds

BANDWIDTH = 1.25e9
"""Of the network, bytes per second, where none is given: 10 Gbit/s. It matters only where transfers take longer than stages."""
ASSUMED_INTERVAL = 100
"""Steps from one checkpoint to the next where the run itself will choose: more than most choose, so that a budget holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of the stages of one replica.

    Attributes:
        compute: seconds that each stage computes per step. crossing: bytes per step over each boundary, both directions.
        state: bytes of each stage's weights, buffers and optimizer.
        micro_batches: of a step. replicas: of the pipeline; each logs what its own stages send.
        tied: (stage, another, bytes per step, both directions) for all that share parameters: gradients of these.
    """

    compute: tuple[float, ...]
    crossing: tuple[float, ...]
    state: tuple[int, ...]
    micro_batches: int
    replicas: int = 1
    tied: tuple[tuple[int, int, float], ...] = ()

    @property
    def stages(self) -> int:
        """Of a replica."""
        return len(self.compute)

    @property
    def step_seconds(self) -> float:
        """Of a step of the whole pipeline: the first micro-batch passes all stages, the others follow at the slowest's pace."""
        return (sum(self.compute) + (self.micro_batches - 1) * max(self.compute)) / self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for.

    Attributes:
        interval: steps from one checkpoint to the next. bandwidth: of the network, bytes per second.
        nodes: that the workers are spread over; 0 is one for each.
        budget_bytes: of log from one checkpoint to the next, all workers together. target_seconds: of recovery per lost step.
            At most one of them; with neither, every boundary between nodes is logged.
        replay_workers: how many replay one lost stage.
    """

    interval: int
    bandwidth: float = BANDWIDTH
    nodes: int = 0
    budget_bytes: float | None = None
    target_seconds: float | None = None
    replay_workers: int = 1


@dataclass(frozen=True, slots=True)
class Selective:
    """What is asked for of a log that is to be smaller than it could be, and all but the stages' times."""

    wish: Wish
    measured: Measured

    def groups_of(self, seconds: tuple[float, ...]) -> Groups:
        """The groups for stages that compute for so many seconds per step. Raises ConfigError: see `choose_groups`."""
        return choose_groups(replace(self.measured, compute=seconds), self.wish)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """What a run decided about its log, with the numbers that it was decided by. Goes into the run's record.

    Attributes:
        kept: whether there is a log. reason: why, in words.
        groups: of stages, only what crosses between them is logged; () is every boundary between nodes. With `selective` they
            are an estimate: they are chosen by what the first steps take on the workers.
        bytes_per_step: of the log at most, all workers together: if each stage is on a node of its own, with all its replicas.
        state_bytes: of the model and its optimizer. interval: steps between checkpoints that were reckoned with.
        compute_ms: per stage and step, if they were timed.
    """

    kept: bool
    reason: str
    groups: Groups = ()
    bytes_per_step: int = 0
    state_bytes: int = 0
    interval: int = 0
    compute_ms: tuple[float, ...] = ()
    selective: Selective | None = None

    def as_record(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(replace(self, selective=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is recommended, what it costs, and why.

    Attributes:
        strategies: of each stage: "replication", "logging" or "checkpoint".
        groups: the best ones; greedy: those of the paper's algorithm, for the same log; every: if all is logged. In the first
            two, stages that are filled from replicas are together.
        log: bytes per step of `groups`, all workers together.
        wish, measured: what it follows from.
        worth: whether to log at all. See `plan_words` for why.
    """

    strategies: tuple[str, ...]
    groups: Groups
    greedy: Groups
    every: Groups
    log: float
    wish: Wish
    measured: Measured
    worth: Worth

    @property
    def all_replicated(self) -> bool:
        """Whether each stage is filled from a replica, whichever node is lost: then there is no log."""
        return set(self.strategies) == {"replication"}

    def seconds(self, groups: Groups, replay_workers: int | None = None) -> float:
        """Expected seconds of replay per lost step with these groups, by as many workers as were wished for, or by these."""
        wish = self.wish if replay_workers is None else replace(self.wish, replay_workers=replay_workers)
        return _objective(self.measured, wish, self.every, groups)

    def most_helpers(self, group: tuple[int, ...]) -> int:
        """How many others may help a group with its replay, if as many are asked for as there are."""
        return _team(self.measured, group, self.measured.stages) - 1

    def log_between(self, groups: Groups) -> float:
        """Bytes of log from one checkpoint to the next with these groups, all workers together."""
        return log_per_step(self.measured, groups) * self.wish.interval


# ---------------------------------------------------------------- what a run asks


def interval_of(every: int | str | None, max_steps: int) -> int:
    """Steps whose log is kept, as far as that is known beforehand: the interval of checkpoints, `ASSUMED_INTERVAL` where it
    will be chosen from measurements, all steps without checkpoints; never more than the run has."""
    interval = max_steps if every is None else every if isinstance(every, int) else ASSUMED_INTERVAL
    return max(1, min(interval, max_steps))


def choose_groups(measured: Measured, wish: Wish) -> Groups:
    """Which stages form a group: the fastest recovery within the budget, the least log that meets the target, or all apart.

    Raises:
        ConfigError: no boundary fits the budget, or no grouping meets the target.
    """
    together = _domains(measured, wish)
    profile = _profile(measured, wish, together)
    if wish.target_seconds is not None:
        return _expand(grouping.cheapest(profile, wish.target_seconds), together)
    if wish.budget_bytes is None or len(together) == 1:
        return together
    groups = _within(measured, wish, together, grouping.optimal)
    if len(groups) == 1:
        apart = [_split(measured.stages, group[-1]) for group in together[:-1]]
        least = min(log_per_step(measured, two) for two in apart) * wish.interval
        raise ConfigError(
            f"a budget of {in_bytes(wish.budget_bytes)} of log between two checkpoints holds no boundary at all: the smallest "
            f"takes {in_bytes(least)} in {wish.interval} steps. Use at least that ({math.ceil(least)} bytes), checkpoint more "
            "often, or do without a log"
        )
    return groups


def _within(measured: Measured, wish: Wish, together: Groups, search: Callable[[Profile, float], Groups]) -> Groups:
    """What a search finds within the budget."""
    budget = (wish.budget_bytes or 0.0) / measured.replicas
    return _expand(search(_profile(measured, wish, together), budget), together)


def _split(stages: int, boundary: int) -> Groups:
    return tuple(range(boundary + 1)), tuple(range(boundary + 1, stages))


def log_per_step(measured: Measured, groups: Groups) -> float:
    """Bytes per step that cross between groups, all replicas together."""
    crossing = sum(measured.crossing[group[-1]] for group in groups[:-1])
    group_of = {stage: number for number, group in enumerate(groups) for stage in group}
    tied = sum(size for one, other, size in measured.tied if group_of[one] != group_of[other])
    return measured.replicas * (crossing + tied)


def most_per_stage(measured: Measured, groups: Groups) -> float:
    """Bytes per step that the stage sends across groups that sends most: half of what crosses there."""
    sent = [0.0] * measured.stages
    group_of = {stage: number for number, group in enumerate(groups) for stage in group}
    next_to = [(stage, stage + 1, size) for stage, size in enumerate(measured.crossing)]
    for one, other, size in (*next_to, *measured.tied):
        if group_of[one] != group_of[other]:
            sent[one] += size / 2
            sent[other] += size / 2
    return max(sent)


# ---------------------------------------------------------------- what `raytrain-ft plan` asks


def plan(measured: Measured, wish: Wish) -> Plan:
    """Recommends a strategy for each stage, and the groups.

    Raises:
        ConfigError: a number that cannot be used, or see `choose_groups`.
    """
    _check(measured, wish)
    every = _domains(measured, wish)
    chosen = choose_groups(measured, wish)
    most = log_per_step(measured, chosen) * wish.interval
    same = wish if wish.budget_bytes is not None else replace(wish, budget_bytes=most, target_seconds=None)
    filled = replicated(*_nodes(measured, wish), measured.stages)
    groups = _without(chosen, filled)
    worth = _worth(measured, wish, every, groups)
    otherwise = "logging" if worth.worth else "checkpoint"
    return Plan(
        strategies=tuple("replication" if stage in filled else otherwise for stage in range(measured.stages)),
        groups=groups,
        greedy=_without(_within(measured, same, every, grouping.greedy), filled),
        every=every,
        log=log_per_step(measured, groups),
        wish=wish,
        measured=measured,
        worth=worth,
    )


def named(groups: Groups) -> str:
    """Groups as they are printed: 0-1 | 2 | 3-5."""
    return " | ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


# ---------------------------------------------------------------- numbers


def _check(measured: Measured, wish: Wish) -> None:
    if wish.budget_bytes is not None and wish.target_seconds is not None:
        raise ConfigError("a budget and a target exclude each other: give one of them")
    workers = measured.stages * measured.replicas
    if not 0 <= wish.nodes <= workers:
        raise ConfigError(f"nodes={wish.nodes}: {workers} workers need 1 to {workers} of them")


def _nodes(measured: Measured, wish: Wish) -> tuple[tuple[str, ...], dict[str, str]]:
    """A world as a run seats it at first, and the node of each of its members: number r is on node r modulo their number."""
    count = measured.stages * measured.replicas
    nodes = wish.nodes or count
    members = sorted(range(count), key=lambda number: number % nodes)  # as `world.by_node` does, which imports this module
    return tuple(f"w{number}" for number in members), {f"w{number}": f"n{number % nodes}" for number in members}


def _domains(measured: Measured, wish: Wish) -> Groups:
    """Neighbours that are lost together whatever is logged, because they share a node."""
    return groups_by_node(*_nodes(measured, wish), measured.stages)


def _without(groups: Groups, filled: frozenset[int]) -> Groups:
    """What a run makes of these groups if these stages have replicas on other nodes."""
    return groups_of(logged_edges(groups) - between(filled), sum(map(len, groups)))


def _team(measured: Measured, group: tuple[int, ...], replay_workers: int) -> int:
    """How many replay a group, as `topology.replay_teams` has it: neighbours, and replicas, replay in step and have no help."""
    return min(replay_workers, measured.stages) if len(group) == measured.replicas == 1 else 1


def _profile(measured: Measured, wish: Wish, together: Groups) -> Profile:
    """What grouping needs to know: one value for all stages that are together anyway."""
    part = {stage: number for number, group in enumerate(together) for stage in group}
    tied = [(*sorted((part[one], part[other])), size) for one, other, size in measured.tied]
    return Profile(
        compute=tuple(sum(measured.compute[stage] for stage in group) for group in together),
        crossing=tuple(measured.crossing[group[-1]] for group in together[:-1]),
        bandwidth=wish.bandwidth,
        interval=wish.interval,
        teams=tuple(_team(measured, group, wish.replay_workers) for group in together),
        tied=tuple((one, other, size) for one, other, size in tied if one != other),
    )


def _expand(chosen: Groups, together: Groups) -> Groups:
    return tuple(tuple(stage for part in group for stage in together[part]) for group in chosen)


def _objective(measured: Measured, wish: Wish, every: Groups, groups: Groups) -> float:
    part = {group[0]: number for number, group in enumerate(every)}
    chosen = tuple(tuple(part[stage] for stage in group if stage in part) for group in groups)
    return grouping.objective(_profile(measured, wish, every), chosen)


def _worth(measured: Measured, wish: Wish, every: Groups, groups: Groups) -> Worth:
    """Whether logging beats going back to the checkpoint."""
    if len(groups) == 1:
        return Worth(False, "nothing is logged: all stages are one group, so a loss takes all of them back")
    size = in_proportion(log_per_step(measured, groups), sum(measured.state))
    if not size.worth:
        return size
    replay = _objective(measured, wish, every, groups)
    again = measured.step_seconds
    if replay < again:
        gain = f"replaying a lost step takes {in_seconds(replay)} where going back takes {in_seconds(again)}"
    else:  # the stages of a group overlap in a replay as in training; the paper adds them up
        gain = f"replaying a lost step takes hardly less than going back, {in_seconds(again)}, for the groups are large"
    return Worth(True, f"{size.reason}; {gain}, and survivors lose nothing")
