"""Which recovery for which loss, what it keeps, the reason in words: the account that a run gives of every recovery."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise

from raytrain_ft.policy.reconcile import Changed, Plan
from raytrain_ft.policy.sampling import samples_in
from raytrain_ft.policy.units import counted


class Strategy(StrEnum):
    """How lost state is restored (docs/choose-a-strategy.md)."""

    REPLICATION = "replication"
    """Survivors become consistent, replacements are filled from them."""
    LOGGING = "logging"
    """Survivors stay as they are, replacements load the newest checkpoint and replay their logged inputs (SWIFT, section 5)."""
    CHECKPOINT = "checkpoint"
    """Everybody loads the newest checkpoint; what was committed since is done again."""
    SNAPSHOT = "snapshot"
    """The same from a copy in the memory of another node (Elastic Horovod)."""
    LOSSY = "lossy"
    """Survivors finish the interrupted step with their own gradients (Nicolae et al.)."""
    ROLLBACK = "rollback"
    """The partial update of a survivor stays, and the step is redone (Nicolae et al.)."""
    SKIP = "skip"
    """The interrupted step is left out (torchft)."""


class Guarantee(StrEnum):
    """What a recovery kept of "as if nothing had happened"."""

    EXACT = "exact"
    """Every bit."""
    ROUNDING = "rounding"
    """The same samples, other bits: an undo or sums in another order, which rounding bounds; or other shares of the batch, by
    which random masks and batch statistics differ, and no rounding bounds that."""
    LOSSY = "lossy"
    """Samples were lost, or parameters updated twice: the record says how many."""


def weakest(*guarantees: str) -> Guarantee:
    """Of several, what they keep together; exact if there are none."""
    return max(map(Guarantee, guarantees), key=list(Guarantee).index, default=Guarantee.EXACT)


def with_reason(cause: str, lost: str, why: str) -> str:
    """The cause of a recovery, with why this member died, if it does not say that."""
    return cause if why in cause else f"{cause}; {lost}: {why}"


GOING_ON = (Strategy.LOSSY, Strategy.ROLLBACK, Strategy.SKIP)
"""Those that go on without redoing the interrupted step."""
GOING_BACK = (Strategy.CHECKPOINT, Strategy.SNAPSHOT)
"""Those that take everybody back."""

PHASES = {"fence": "fenced", "replace": "reconciled", "rebuild": "filled", "resume": "resumed"}
"""Of a recovery, in order, each with the mark that it ends with; the first one begins when the loss was `detected`."""
MARKS = ("detected", *PHASES.values())


def spans(at: Callable[[str], float | None]) -> list[tuple[str, float, float]]:
    """The phases of a recovery that have ended, each with when it began and when it ended.

    Args:
        at: the time of a mark, if it is known.
    """
    known = [(name, time) for name, mark in (("", MARKS[0]), *PHASES.items()) if (time := at(mark)) is not None]
    return [(name, begin, end) for (_, begin), (name, end) in pairwise(known)]


@dataclass(slots=True)
class Recovery:
    """One recovery or planned resize, from the first sign to the first step committed afterwards.

    Attributes:
        cause: what went wrong, in words; what went wrong during the recovery is added.
        noticed_by: how the first sign came.
        lost: members that were lost, those lost during the recovery included.
        left: members that had notice and left.
        incarnation: the incarnation that went on.
        attempts: how often it began: more than once if there was a further loss before it had come to its end.
        strategy, guarantee, reason: what was done, what it kept, and why.
        step: the step that training went on from.
        completes: whether the interrupted step was completed rather than redone.
        redone: committed steps that are done again, because they came after the checkpoint.
        replayed: committed steps that lost stages computed again from the log, while everybody else kept them.
        undone: parameters whose update was undone (on each survivor), unless everybody went back to before it.
        updated_twice: parameters whose update was kept although their step was redone; as for `undone`.
        samples_lost: samples whose gradients are missing in some or all of an interrupted step, unless it was redone.
        repaired: buckets whose hash differed between survivors and that were copied from the majority.
        world_before, world_after: numbers of workers.
        detected, fenced, reconciled, filled, resumed: seconds since the run began; of the last attempt but for the first.
    """

    cause: str
    noticed_by: str
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    incarnation: int = 0
    attempts: int = 0
    strategy: Strategy = Strategy.REPLICATION
    guarantee: Guarantee = Guarantee.EXACT
    reason: str = ""
    step: int = 0
    completes: bool = False
    redone: int = 0
    replayed: int = 0
    undone: int = 0
    updated_twice: int = 0
    samples_lost: int = 0
    repaired: int = 0
    world_before: int = 0
    world_after: int = 0
    detected: float = 0.0
    fenced: float | None = None
    reconciled: float | None = None
    filled: float | None = None
    resumed: float | None = None

    @property
    def seconds(self) -> float | None:
        """From the first sign to the first step committed afterwards."""
        return None if self.resumed is None else self.resumed - self.detected

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Those that have ended, each with when it began and when it ended."""
        return spans(partial(getattr, self))

    def begin_again(self) -> None:
        """Everybody is fenced, for the first time or because there was a further loss."""
        self.attempts += 1
        self.fenced = self.reconciled = self.filled = None

    def follow(self, plan: Plan) -> None:
        """The survivors are told to carry out this plan."""
        self.step, self.completes = plan.step, plan.completes
        if plan.lost or plan.keep:
            self.strategy = Strategy.SKIP if plan.skips else Strategy.ROLLBACK if plan.keep else Strategy.LOSSY

    def replay(self, stages: str, step: int, source: str, workers: int) -> None:
        """Lost stages replay from this step on, each with so many workers; nobody else goes back."""
        self.strategy = Strategy.LOGGING
        self.replayed = max(self.replayed, self.step - step)
        if step == self.step:
            self.reason += f"; {stages} had no replica left, and {source} is all that there is to it"
            return
        self.reason += f"; {stages} had no replica left: steps {step} to {self.step - 1} are replayed from {source}"
        if workers > 1:
            self.reason += f" by {workers} workers"

    def go_back(self, step: int, committed: int, source: str, strategy: Strategy) -> None:
        """Everybody goes back to this step: the same samples and the same bits once more."""
        self.strategy = strategy
        self.redone = max(self.redone, committed - step)  # also if it goes further back than it wanted to at first
        self.step, self.completes = step, False
        self.reason += (
            f": everybody goes back to step {step} ({source}), {counted(self.redone, 'step')} or a few more are done again"
        )


@dataclass(slots=True)
class Cost:
    """What a recovery has cost in one step; numbers as of a `Recovery`.

    Attributes:
        at_most: what is kept at most whatever becomes of the step, which is redone perhaps with all of its samples.
    """

    at_most: Guarantee = Guarantee.EXACT
    samples_lost: int = 0
    undone: int = 0
    updated_twice: int = 0

    @property
    def guarantee(self) -> Guarantee:
        """What is kept."""
        return Guarantee.LOSSY if self.samples_lost else self.at_most


@dataclass(slots=True)
class Recoveries:
    """All recoveries and planned resizes of a run.

    Attributes:
        all: in order; the last one is perhaps still open.
        costs: by step, what the last recovery has cost. Nobody stores anything of a step before it is committed, so a
            checkpoint of this very step is from before.
        attempt: the step from which the recovery under way went on the last time, and how many trained then: nobody may have
            told of what they committed.
        sleepers: members that sleep. awake_from: the step from which on the last one that slept has not.
        shared_otherwise: in the last recovery, somebody slept; after it, all take part in a step.
        returned: why everybody went back in the last recovery, and to where, in words; what comes after that adds to it.
    """

    all: list[Recovery] = field(default_factory=list)
    costs: dict[int, Cost] = field(default_factory=dict)
    attempt: tuple[int, int] | None = None
    sleepers: set[str] = field(default_factory=set)
    awake_from: int = 0
    shared_otherwise: bool = False
    returned: str = ""

    @property
    def open(self) -> Recovery | None:
        """The recovery that is under way, if one is."""
        return self.all[-1] if self.all and self.all[-1].resumed is None else None

    def begin(self, at: float, cause: str, noticed_by: str, world_size: int) -> Recovery:
        """A disturbance: a recovery begins, or the one under way has one more cause."""
        recovery = self.open
        if recovery is None:
            recovery = Recovery(cause, noticed_by, world_before=world_size, detected=at)
            self.all.append(recovery)
            self.costs, self.attempt, self.shared_otherwise, self.returned = {}, None, bool(self.sleepers), ""
        elif cause not in recovery.cause:
            recovery.cause += f"; then {cause}"
        return recovery

    def follow(self, plan: Plan) -> None:
        """The survivors are told to carry out this plan. An undo costs the guarantee even if this attempt is interrupted, or
        refused by some of them: in the next one, the others may copy from who has carried it out."""
        self._keep(plan.step)
        recovery, cost = self.all[-1], self._cost(plan.interrupted)
        recovery.follow(plan)
        recovery.reason = "; then ".join(words for words in (self.returned, plan.reason) if words)
        if plan.lost or plan.interrupted == plan.step:  # who redoes it has all of its samples again
            cost.samples_lost = samples_in(plan.lost)
        if plan.undo or plan.keep:
            cost.at_most = weakest(cost.at_most, Guarantee.LOSSY if plan.keep else Guarantee.ROUNDING)
        self._add_up()
        if recovery.strategy in GOING_ON and recovery.guarantee != Guarantee.LOSSY:
            recovery.strategy = Strategy.REPLICATION

    def carried_out(self, plan: Plan, *, undone: int, kept: int) -> None:
        """A survivor has carried out this plan: of so many parameters the update was undone, or kept."""
        self._count(plan.interrupted, undone, kept)

    def had_carried_out(self, changed: Changed, incarnation: int) -> None:
        """In this incarnation, a survivor says what it did to carry out a plan. It counts if that was in an attempt of this
        recovery, which may have been broken off before anybody heard of it."""
        if changed.incarnation > incarnation - self.all[-1].attempts:
            self._count(changed.step, changed.undone, changed.kept)

    def _count(self, step: int, undone: int, kept: int) -> None:
        cost = self._cost(step)
        cost.undone, cost.updated_twice = max(cost.undone, undone), max(cost.updated_twice, kept)
        self._add_up()

    def rounded(self, step: int) -> None:
        """From this step on, what the recovery under way leads to is not certain to have every bit."""
        cost = self._cost(step)
        cost.at_most = weakest(cost.at_most, Guarantee.ROUNDING)
        self._add_up()

    def trains(self, workers: int) -> None:
        """All is consistent and filled: so many train."""
        recovery = self.open
        if recovery is not None:
            self.attempt = recovery.step, workers

    def _keep(self, step: int) -> None:
        """The next attempt goes on from this step. What the last one did before it stays, with sums in another order if it had
        another number of workers."""
        attempt, self.attempt = self.attempt, None
        if attempt is None or step <= attempt[0]:
            return
        recovery, (began, workers) = self.all[-1], attempt
        if self._trained(began) not in (0, workers):
            self.rounded(began)
        recovery.world_before = recovery.world_before or workers  # if nobody had trained before, somebody has now

    def go_back(self, step: int, committed: int, source: str, strategy: Strategy) -> None:
        """Everybody goes back to this step: nothing is left of what was done inexactly in later ones, or in this one."""
        self._keep(step)
        self.costs = {at: cost for at, cost in self.costs.items() if at < step}
        self._add_up()
        self.all[-1].go_back(step, committed, source, strategy)
        self.returned = self.all[-1].reason

    def _cost(self, step: int) -> Cost:
        return self.costs.setdefault(step, Cost())

    def _add_up(self) -> None:
        recovery, costs = self.all[-1], self.costs.values()
        recovery.guarantee = weakest(*(cost.guarantee for cost in costs))
        recovery.samples_lost = sum(cost.samples_lost for cost in costs)
        recovery.undone = sum(cost.undone for cost in costs)
        recovery.updated_twice = sum(cost.updated_twice for cost in costs)

    def slept(self, member: str, step: int, *, asleep: bool) -> None:
        """This member sleeps from this step on, or does so no longer: it takes part again, or is gone."""
        if asleep:
            self.sleepers.add(member)
            self.shared_otherwise |= self.open is not None
        elif member in self.sleepers:
            self.sleepers.remove(member)
            self.awake_from = max(self.awake_from, step)

    def explain(self, lost: str, cause: str) -> None:
        """Why this member died has become known."""
        recovery = next((one for one in reversed(self.all) if lost in one.lost), None)
        if recovery is not None:
            recovery.cause = with_reason(recovery.cause, lost, cause)

    def close(self, at: float, max_steps: float = math.inf) -> None:
        """A step was committed, or the run completed. After the last of `max_steps` nothing is added in another order."""
        recovery = self.open
        if recovery is None:
            return
        if not recovery.attempts:  # a resize that the end of the run came before
            self.all.pop()
            return
        recovery.resumed = at
        # the same gradients are added in another order
        resized = self._trained(recovery.step) not in (0, recovery.world_after)
        resized |= self.shared_otherwise or recovery.step < self.awake_from
        if self.shared_otherwise:  # nobody may have told of the last steps that it slept in
            self.awake_from = max(self.awake_from, recovery.step)
        # those of an earlier attempt may have done steps that nobody has told of
        resized &= recovery.step < max_steps or recovery.attempts > 1
        # where survivors differed, a majority is no proof; nor is a checkpoint, to which each of them gave a part
        if (resized or recovery.repaired) and recovery.guarantee == Guarantee.EXACT:
            recovery.guarantee = Guarantee.ROUNDING

    def _trained(self, step: int) -> int:
        """How many trained when this step was first begun, 0 if nobody did: who goes back may do again what more or fewer had
        done."""
        workers = self.all[-1].world_before
        for recovery in reversed(self.all[:-1]):
            if recovery.step <= step:
                break
            workers = recovery.world_before or workers
        return workers
