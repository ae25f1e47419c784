"""Selective logging: which boundaries of a pipeline to log, under a byte budget (SWIFT, section 5.3).

Machines are put into groups of neighbours. What crosses from group to group is logged; if a machine is lost, its whole group
goes back to the checkpoint and replays. Fewer groups log less and recover more slowly. `greedy` is the paper's algorithm,
`optimal` finds the best grouping, `cheapest` answers the reverse question. Pure: times and sizes come in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from raytrain_ft.checks import is_number, whole
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.constrained_path import Floats, Search

Groups = tuple[tuple[int, ...], ...]
"""Consecutive stage numbers, left to right: ((0, 1), (2,)) logs what crosses between stages 1 and 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured of a pipeline. The paper's names are in brackets.

    Attributes:
        compute: seconds that each stage computes per step, the mean of a few steps [R(G_i)].
        crossing: bytes per step that cross from each stage to the next, both directions together [M(G_i, G_i+1)].
        bandwidth: of the network, bytes per second [B].
        interval: steps from one checkpoint to the next [T].
        machines: that host the stages, the same number of consecutive ones each; 0 means one machine per stage [N]. Stages
            that share a machine are lost together: they stay in one group, and what passes between them is not counted.
        parallel: whether surviving machines help to replay (section 5.2): a group of n is N // n times as fast.
        teams: what a run does instead: how many replay each machine if it is a group by itself; a larger group has no help.
        tied: (machine, a later one, bytes per step, both directions) for all that share parameters: logged if they are in
            different groups.
    """

    compute: tuple[float, ...]
    crossing: tuple[float, ...]
    bandwidth: float
    interval: int
    machines: int = 0
    parallel: bool = False
    teams: tuple[int, ...] = ()
    tied: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.compute)
        if not stages or len(self.crossing) != stages - 1:
            raise ConfigError(
                f"Profile: {stages} values in compute and {len(self.crossing)} in crossing: give one per stage (at least 1), "
                "and one less for the boundaries between them"
            )
        for name, least in (("compute", "not negative"), ("crossing", "greater than 0")):
            for index, value in enumerate(getattr(self, name)):
                if not (is_number(value) and math.isfinite(value) and value >= 0 and (value > 0 or name == "compute")):
                    raise ConfigError(f"Profile: {name}[{index}]={value!r}: use a finite number that is {least}")
        if not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"Profile: bandwidth={self.bandwidth!r}: use bytes per second, greater than 0")
        whole(self, "interval")
        whole(self, "machines", least=0)
        if self.teams and (len(self.teams) != self.size or min(self.teams) < 1):
            raise ConfigError(f"Profile: teams={self.teams!r} of {self.size} machines: give one number of at least 1 for each")
        if stages % self.size:
            raise ConfigError(
                f"Profile: {stages} stages on machines={self.machines}: every machine must host the same number of them. "
                "If yours do not, give one value per machine instead of one per stage"
            )

    @property
    def size(self) -> int:
        """Machines [N]."""
        return self.machines or len(self.compute)

    def replay_seconds(self, start: int, stop: int) -> float:
        """Per lost step, if machines start..stop-1 are one group: R(G), shared among helpers if there are any."""
        per = max(1, len(self.compute) // self.size)
        first, last = start * per, stop * per
        sent = math.fsum(self.crossing[first + per - 1 : last - 1 : per])
        seconds = math.fsum(self.compute[first:last]) + sent / self.bandwidth
        return seconds / self._workers(start, stop)

    def _workers(self, start: int, stop: int) -> int:
        """How many share a replay of machines start..stop-1."""
        if self.teams:
            return self.teams[start] if stop - start == 1 else 1
        return self.size // (stop - start) if self.parallel else 1

    def expected_seconds(self, start: int, stop: int) -> float:
        """The same times the chance that a lost machine is one of them: the group's part in the objective."""
        return self.replay_seconds(start, stop) * (stop - start) / self.size

    def logged_bytes(self, cut: int) -> float:
        """From one checkpoint to the next, of the boundary to the left of this machine."""
        return self.crossing[cut * (len(self.compute) // self.size) - 1] * self.interval

    def shared_bytes(self, start: int, middle: int, stop: int) -> float:
        """The same of what machines start..middle-1 share with machines middle..stop-1, if these are in other groups."""
        return self.interval * math.fsum(size for one, other, size in self.tied if start <= one < middle <= other < stop)


def objective(profile: Profile, groups: Groups) -> float:
    """Expected seconds of recovery per lost step: the sum of R(G) |G| / N. Every machine is equally likely to be lost."""
    total = 0.0  # left to right, as the search adds up: rounding differs in no bit
    for start, stop in pairwise(_bounds(profile, groups)):
        total += profile.expected_seconds(start, stop)
    return total


def log_bytes(profile: Profile, groups: Groups) -> float:
    """Bytes of log from one checkpoint to the next: the sum of what crosses between groups, times the interval."""
    total = 0.0
    for start, stop in pairwise(_bounds(profile, groups)):
        total += _logged_bytes(profile, start, stop)
    return total


def _logged_bytes(profile: Profile, start: int, stop: int) -> float:
    """The part in it of what crosses from the group of machines start..stop-1 to later ones."""
    return profile.logged_bytes(stop) + profile.shared_bytes(start, stop, profile.size) if stop < profile.size else 0.0


def greedy(profile: Profile, budget_bytes: float) -> Groups:
    """The paper's algorithm: merge the neighbours with the smallest gain of time per byte saved, until the log fits.

    Raises:
        ConfigError: the budget is not a size.
    """
    budget = _check("budget_bytes", budget_bytes, "bytes")
    bounds = list(range(profile.size + 1))
    while log_bytes(profile, _groups(profile, bounds)) > budget:

        def price(index: int, bounds: list[int] = bounds) -> float:
            left, middle, right = bounds[index - 1 : index + 2]
            apart = profile.expected_seconds(left, middle) + profile.expected_seconds(middle, right)
            saved = profile.logged_bytes(middle) + profile.shared_bytes(left, middle, right)
            return (profile.expected_seconds(left, right) - apart) / saved

        del bounds[min(range(1, len(bounds) - 1), key=price)]
    return _groups(profile, bounds)


def optimal(profile: Profile, budget_bytes: float) -> Groups:
    """The grouping with the least expected recovery time whose log fits the budget. A budget of 0: one group, no log.

    Exact for up to 16 machines; for more of them mostly, else near the best: see `constrained_path`.

    Raises:
        ConfigError: the budget is not a size.
    """
    budget = _check("budget_bytes", budget_bytes, "bytes")
    seconds, logged = arcs(profile)
    return _groups(profile, Search(seconds, logged, budget).best([0, profile.size]))


def cheapest(profile: Profile, target_seconds: float) -> Groups:
    """The grouping with the least log whose expected recovery time per lost step meets the target.

    Raises:
        ConfigError: the target is not a time, or no grouping meets it.
    """
    target = _check("target_seconds", target_seconds, "seconds")
    apart = list(range(profile.size + 1))
    fastest = objective(profile, _groups(profile, apart))
    if fastest > target:
        helped = profile.parallel or any(team > 1 for team in profile.teams)
        raise ConfigError(
            f"target_seconds={target!r}: logging every boundary still leaves {fastest:g} seconds of recovery per lost step. "
            f"Use a target of at least that{'' if helped else ', or parallel recovery'}"
        )
    seconds, logged = arcs(profile)
    return _groups(profile, Search(logged, seconds, target).best(apart))


def arcs(profile: Profile) -> tuple[Floats, Floats]:
    """[i, j]: expected seconds of the group of machines i..j-1, and bytes of log of what crosses to later ones."""
    size = profile.size
    seconds, logged = np.zeros((size + 1, size + 1)), np.zeros((size + 1, size + 1))
    for stop in range(1, size + 1):
        logged[:stop, stop] = [_logged_bytes(profile, start, stop) for start in range(stop)]
        seconds[:stop, stop] = [profile.expected_seconds(start, stop) for start in range(stop)]
    return seconds, logged


def _groups(profile: Profile, bounds: Sequence[int]) -> Groups:
    per = len(profile.compute) // profile.size
    return tuple(tuple(range(start * per, stop * per)) for start, stop in pairwise(bounds))


def _bounds(profile: Profile, groups: Groups) -> list[int]:
    """The machines at which groups begin, and the number of machines."""
    per = len(profile.compute) // profile.size
    ends = [0, *np.cumsum([len(group) for group in groups]).tolist()]
    bounds = [end // per for end in ends]
    if not all(groups) or ends[-1] != len(profile.compute) or _groups(profile, bounds) != tuple(map(tuple, groups)):
        raise ConfigError(
            f"groups={groups!r} of {len(profile.compute)} stages on {profile.size} machines: give every stage once, in "
            "order, and keep the stages of a machine together"
        )
    return bounds


def _check(name: str, value: float, unit: str) -> float:
    if not (is_number(value) and value >= 0):
        raise ConfigError(f"{name}={value!r}: use {unit}, a number that is not negative (0 for none)")
    return float(value)
