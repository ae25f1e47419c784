"""How a simulated job protects itself: a strategy and its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from raytrain_ft import checks
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy import forward
from raytrain_ft.policy.frequency import Profile, check_budget, choose
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.outcome import HOPELESS

Kind = Literal[
    "global_checkpoint",
    "checkfreq",
    "elastic_horovod",
    "torchft",
    "checkpoint",
    "replication",
    "logging",
    "lossy",
    "rollback",
    "skip",
]
"""`global_checkpoint`: training stands still while a checkpoint is copied and written; on a loss all workers restart and load
it. `checkfreq`: the same with CheckFreq's pipelined checkpoints. `elastic_horovod`: snapshots in memory, to which all
survivors go back. `torchft`: the interrupted step is dropped, survivors go on at once with fewer, the replacement heals in.
`checkpoint`: raytrain_ft's, pipelined, and survivors stay up. `replication`, `logging`: SWIFT's, as raytrain_ft carries them
out. `lossy`, `rollback`: Nicolae et al.'s. `skip`: the interrupted step is dropped."""

ONLY_GIVEN = frozenset({"global_checkpoint", "elastic_horovod"})
"""Kinds that save as often as they are told: nothing chooses for them."""
RESTARTING = frozenset({"global_checkpoint", "checkfreq"})
"""Kinds after whose losses all workers restart."""
HEEDLESS = RESTARTING | {"torchft"}
"""Kinds that do nothing upon a notice: what is to be lost is lost when the time has come."""
GOING_BACK = frozenset({"global_checkpoint", "checkfreq", "checkpoint", "elastic_horovod"})
"""Kinds that go back to what was saved last."""
PIPELINED = frozenset({"checkfreq", "checkpoint", "replication", "logging", "lossy", "rollback", "skip", "torchft"})
"""Kinds whose checkpoints are written while training goes on."""


def fits(kind: Kind, job: Job) -> bool:
    """Stages cannot go on without one of them, and only what crosses between stages is logged."""
    return kind not in (*forward.STRATEGIES, "torchft") if job.stages > 1 else kind != "logging"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy.

    Attributes:
        kind: see `Kind`.
        every: steps between checkpoints (of "elastic_horovod": snapshots). None: by CheckFreq's Algorithm 1 for the kinds that
            write them while training goes on and are meant to go back to them, else none.
        budget: the share of the time that checkpoints may cost, where Algorithm 1 chooses [CheckFreq's p].
        slowdown: what the strategy costs of a step's time without failures beyond what `Costs` says, as a share: a constant
            that is measured or fitted.
        replay_workers: how many replay one lost stage ("logging").
        quorum, lost_samples, replacement: as in `RecoveryConfig`. There are no epochs here: samples returned at the end of one
            do not count as lost.
        update: the same; None: wait-free for "rollback", for which there is nothing to keep otherwise, else with a barrier.
        label: for tables and plots; by default the kind.
    """

    kind: Kind
    every: int | None = None
    budget: float = 0.035
    slowdown: float = 0.0
    replay_workers: int = 1
    quorum: float = 0.5
    lost_samples: Literal["drop", "return"] = "drop"
    replacement: Literal["wait", "shrink"] = "wait"
    update: Literal["barrier", "wait_free"] | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"Strategy(kind={self.kind!r}): use one of {', '.join(get_args(Kind))}")
        if self.every is not None:
            checks.whole(self, "every")
        elif self.kind in ONLY_GIVEN:
            raise ConfigError(f'Strategy(kind="{self.kind}", every=None): say every how many steps the state is saved')
        check_budget(self.budget)
        checks.text(self, "label")
        checks.seconds(self, "slowdown")
        checks.whole(self, "replay_workers")
        checks.seconds(self, "quorum")
        if self.quorum > 1:
            raise ConfigError(f"Strategy(quorum={self.quorum!r}): use a share from 0 to 1")
        words_of = {
            "lost_samples": ("drop", "return"),
            "replacement": ("wait", "shrink"),
            "update": ("barrier", "wait_free", None),
        }
        for name, allowed in words_of.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(str(word) for word in allowed)
                raise ConfigError(f"Strategy({name}={getattr(self, name)!r}): use one of {words}")

    def check(self, job: Job) -> None:
        """Whether a run of this job could be told this strategy.

        Raises:
            ConfigError: it would be refused.
        """
        if not fits(self.kind, job):
            others = ", ".join(kind for kind in get_args(Kind) if fits(kind, job))
            raise ConfigError(f'Strategy(kind="{self.kind}") does not go with Job(stages={job.stages}): use one of {others}')
        if self.update == "wait_free" and job.stages > 1:
            raise ConfigError(
                f'Strategy(update="wait_free") does not go with Job(stages={job.stages}): stages update when all have finished'
            )

    @property
    def updates_early(self) -> bool:
        """Whether parameters are updated before the last gradient of the step is there."""
        return self.kind == "rollback" if self.update is None else self.update == "wait_free"

    @property
    def name(self) -> str:
        """For tables and plots."""
        return self.label or self.kind

    def interval(self, job: Job) -> int | None:
        """Steps between two times that the state is saved; None if it never is."""
        if self.every is not None or self.kind not in ("checkfreq", "checkpoint", "logging"):
            return self.every
        costs = job.costs
        profile = Profile(iteration=job.step_s, update=costs.update_s, copy=costs.copy_s, persist=costs.persist_s)
        return choose(profile, self.budget).k

    def stall_s(self, job: Job) -> float:
        """For how long training stands still each time that the state is saved."""
        costs, k = job.costs, self.interval(job)
        if self.kind == "elastic_horovod":
            return costs.copy_s
        if self.kind == "global_checkpoint":
            return costs.copy_s + costs.persist_s
        waits = costs.copy_s + costs.persist_s - (k or 0) * job.step_s  # at most one is under way
        return max(0.0, costs.copy_s - (job.step_s - costs.update_s), waits)

    def durable_s(self, job: Job) -> float:
        """From the end of the step that is saved until a recovery can go back to it."""
        costs = job.costs
        return costs.copy_s + costs.persist_s if self.kind in PIPELINED else self.stall_s(job)

    def step_s(self, job: Job) -> float:
        """Seconds of a step under this strategy, saving apart."""
        logged = job.costs.log_s if self.kind == "logging" else 0.0
        return job.step_s * (1 + self.slowdown) + logged

    def undisturbed_s(self, job: Job) -> float:
        """Seconds that all steps take without failures."""
        k = self.interval(job)
        saved = 0 if k is None else math.floor((job.steps - 1) / k)
        return job.steps * self.step_s(job) + saved * self.stall_s(job)


def longest_s(job: Job, strategy: Strategy) -> float:
    """How long a run may take before it is given up. Of a run that is as short as that, a single recovery may be the most."""
    costs = job.costs
    recovery_s = costs.detect_s + costs.fence_s + costs.start_s + costs.restart_s + costs.rendezvous_s + costs.load_s
    recovery_s += costs.restore_s + costs.filling_s + costs.resume_s
    undisturbed_s = max(job.useful_s, strategy.undisturbed_s(job))  # of a pace that was fitted, the latter may be less
    return HOPELESS * (costs.begin_s + undisturbed_s + costs.end_s + recovery_s)


def check_names(strategies: Sequence[Strategy]) -> None:
    """Whether strategies can be told apart.

    Raises:
        ConfigError: two have one name.
    """
    names = [strategy.name for strategy in strategies]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"{name} is the name of another strategy too: give it a label")
