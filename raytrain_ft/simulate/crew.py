"""What the workers of a simulated run do: they answer the supervisor's commands, each after as long as the job's costs say.

All hold the same state, so one number (`step`) says where all stand who hold any. Nobody answers a command that needs others of
whom one is dead: in reality such a collective fails or hangs, and the loss is what ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Marks, Plan, Share
from raytrain_ft.policy.sampling import GlobalBatch, share
from raytrain_ft.policy.topology import replica_of, stage_of
from raytrain_ft.simulate.ledger import Ledger, step_seconds
from raytrain_ft.simulate.model import Job
from raytrain_ft.simulate.nodes import Nodes
from raytrain_ft.simulate.pace import At, Pace, Stand, Training
from raytrain_ft.simulate.strategies import GOING_BACK, RESTARTING, Strategy

BEGINNING = m.Stored("the beginning", 0)
"""What the kinds that go back always have: the state before the first step."""
FIRST_UPDATE = 0.5
"""Share of a step after which the first parameters are updated, where updates do not wait for the last gradient."""


@dataclass(slots=True)
class Crew:
    """The workers.

    Attributes:
        at: calls a function at a time. tell: gives the supervisor events.
        holding: who holds state, and of which stage. step: where they all stand.
        reduced: whether every gradient of the interrupted step had been reduced, so that the step can be completed. rest: how
            long that takes, seconds; into: how long it had been computed.
        disk: what was saved and is durable, newest first.
        training: the stretch that is under way. stand: where the last one came to.
        reached: the most steps that were ever committed.
        dead: who is gone without the supervisor knowing yet.
        slowed: who runs slower for now, and how many times.
    """

    job: Job
    strategy: Strategy
    ledger: Ledger
    nodes: Nodes
    at: At
    tell: Callable[[Iterable[m.Event]], None]
    world: tuple[str, ...] = ()
    incarnation: int = 0
    holding: dict[str, int] = field(default_factory=dict)
    step: int = 0
    reduced: bool = False
    into: float = 0.0
    rest: float = 0.0
    disk: list[m.Stored] = field(default_factory=list)
    training: Training | None = None
    reached: int = 0
    began: bool = False
    dead: set[str] = field(default_factory=set)
    slowed: dict[str, float] = field(default_factory=dict)
    _told: int = 0
    _last: Training | None = None
    _starting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.strategy.kind in GOING_BACK and self.strategy.kind != "checkpoint":
            self.disk.append(BEGINNING)

    def holds(self, member: str) -> tuple[int, int] | None:
        """The stage and the step of the state that a member holds."""
        return (self.holding[member], self.step) if member in self.holding else None

    # ---------------------------------------------------------------- commands

    def carry_out(self, command: c.Command, now: float) -> None:
        """Begins what the supervisor asks for; the answers come later."""
        costs = self.job.costs
        match command:
            case c.StartWorker(member):
                self._start(member, now)
            case c.Kill(member):
                self._forget(member, now)
            case c.Fence(members, incarnation):
                self.interrupt(now)
                self.at(now + costs.fence_s, lambda at: self._fenced(members, incarnation, at))
            case c.FindCheckpoints(incarnation):
                found = m.CheckpointsFound(at=now, incarnation=incarnation, stored=self._stored(), reached=self.step)
                self.at(now, lambda at: self.tell([found]))
            case c.Reconcile():
                self.at(now + self._joining_s(command), lambda at: self._reconciled(command, at))
            case c.Fill():
                seconds = costs.filling_s if command.copies or command.handed else 0.0
                self.at(now + seconds, lambda at: self._filled(command, command.members, at))
            case c.Replay():
                self.at(now + self._replay_s(command), lambda at: self._replayed(command, at))
            case c.Run(world, incarnation):
                seconds = costs.resume_s if self._last is not None else 0.0
                self.at(now + seconds, lambda at: self._begin(world, incarnation, at))
            case c.StopAtBoundary(members):
                self._stop(members, now)
            case c.Save(members, _, incarnation):
                at = now + costs.end_s
                saved = [m.Saved(at=at, member=one, incarnation=incarnation, path="final") for one in reversed(members)]
                self.at(at, lambda _: self.tell(saved))
            case c.SetTimer(timer, seconds, incarnation):
                fired = m.TimerFired(at=now + seconds, timer=timer, incarnation=incarnation)
                self.at(now + seconds, lambda at: self.tell([fired]))

    def lose(self, members: Iterable[str], now: float, cause: str) -> None:
        """These are dead; the supervisor hears of it when it is detected."""
        members = [member for member in members if member not in self.dead]
        if self.training is not None and not set(members).isdisjoint(self.training.world):
            self.interrupt(now)
        self.dead.update(members)
        for member in members:
            self.holding.pop(member, None)
        at = now + self.job.costs.detect_s
        lost = [m.WorkerLost(at=at, member=member, cause=cause, noticed_by="simulation") for member in members]
        self.at(at, lambda _: self.tell(lost))

    def slow(self, members: Sequence[str], factor: float, seconds: float, now: float) -> None:
        """These run so many times slower for a while. Who is slowed twice is quick again when the first time is over."""
        self.slowed |= dict.fromkeys(members, factor)
        self._keep_pace(now)
        self.at(now + seconds, lambda at: self._quicken(members, at))

    def _quicken(self, members: Sequence[str], now: float) -> None:
        for member in members:
            self.slowed.pop(member, None)
        self._keep_pace(now)

    def place_waiting(self, now: float) -> None:
        """Members that had no place are started, as far as there is room now."""
        waiting, self.nodes.waiting = self.nodes.waiting, []
        for member in waiting:
            self._start(member, now)

    def _start(self, member: str, now: float) -> None:
        if not self.nodes.place(member):
            self.nodes.waiting.append(member)
            return
        self._starting.add(member)
        seconds = self.job.costs.start_s if self.began else 0.0
        self.at(now + seconds, lambda at: self._started(member, at))

    def _started(self, member: str, now: float) -> None:
        if member in self._starting and member not in self.dead:
            self._starting.discard(member)
            self.tell([m.WorkerStarted(at=now, member=member, node=f"n{self.nodes.node_of[member]}", pid=1)])

    def _forget(self, member: str, now: float) -> None:
        del now
        self.nodes.remove(member)
        self.dead.discard(member)
        self._starting.discard(member)
        self.holding.pop(member, None)

    # ---------------------------------------------------------------- recovery

    def _fenced(self, members: tuple[str, ...], incarnation: int, now: float) -> None:
        answers = (
            m.Fenced(at=now, member=member, incarnation=incarnation, marks=self._marks(member))
            for member in reversed(members)
            if member not in self.dead
        )
        self.incarnation = max(self.incarnation, incarnation)
        self.tell(answers)

    def _marks(self, member: str) -> Marks | None:
        if member not in self.holding:
            return None
        step, stage = self.step, self.holding[member]
        gradient = step if self.reduced else None
        agreed = (step, (0.0,)) if self.reduced else None
        if not self.strategy.updates_early:
            return Marks(member, step, (step,), (gradient,), stage, agreed, self._share(member))
        updated = step + (self.into >= FIRST_UPDATE * (self.into + self.rest) > 0)
        return Marks(member, step, (updated, step), (gradient, gradient), stage, agreed, self._share(member))

    def _share(self, member: str) -> Share | None:
        """What it reads of the batch of the interrupted step. Survivors come to the end of their backward passes."""
        last = self._last
        if not self.into or last is None or member not in last.world:
            return None
        batch, stages = GlobalBatch(0, 0, self.job.batch), self.job.stages
        mine = share(batch, replica_of(last.world.index(member), stages), len(last.world) // stages)
        return Share(self.step, (0, self.job.batch), (mine.start, mine.stop), whole=True)

    def _stored(self) -> tuple[m.Stored, ...]:
        """What there is to go back to. Snapshots in the memory of workers are gone with the last of these."""
        if self.strategy.kind == "elastic_horovod" and self.holding.keys().isdisjoint(self.world):
            self.disk = [BEGINNING]
        return tuple(self.disk)

    def _joining_s(self, command: c.Reconcile) -> float:
        costs = self.job.costs
        if not self.began:
            return costs.begin_s
        if command.plan is not None:
            return costs.rendezvous_s + (self.rest if command.plan.completes else 0.0)
        seconds = costs.rendezvous_s + (costs.restart_s if self.strategy.kind in RESTARTING else 0.0)
        if self.strategy.kind != "elastic_horovod":
            return seconds + costs.load_s
        is_new = any(member not in self.holding for member in command.world)
        return seconds + costs.restore_s + (costs.filling_s if is_new else 0.0)

    def _meets(self, world: tuple[str, ...], incarnation: int) -> bool:
        """Whether all of them are there, and nobody was called away since."""
        if incarnation < self.incarnation or any(member in self.dead or member not in self.nodes.node_of for member in world):
            return False
        self.incarnation = incarnation
        return True

    def _reconciled(self, command: c.Reconcile, now: float) -> None:
        world, stages = command.world, self.job.stages
        if not self._meets(world, command.incarnation):
            return
        self.world, self.began = world, True
        if command.plan is None:
            self.step = next((stored.step for stored in self.disk if stored.name == command.load), 0)
            self.holding = {member: stage_of(rank, stages) for rank, member in enumerate(world)}
            self.ledger.went_back(self.step)
        else:
            outside = {member: stage for member, stage in self.holding.items() if member not in world}  # who is not told
            self.holding = {member: self.holding[member] for member in command.holders if member in self.holding}
            if command.plan.step > self.step and self._last is not None:
                self._commit_interrupted(command.plan, self._last, now)
            self.step = command.plan.step
            self.holding |= outside
        self.reached = max(self.reached, self.step)
        self.reduced, self.into, self.rest = False, 0.0, 0.0
        digests = self._digests()
        self.tell(
            m.Reconciled(
                at=now, member=member, incarnation=command.incarnation, digests=digests if member in self.holding else ()
            )
            for member in reversed(world)
        )

    def _digests(self) -> tuple[str, ...]:
        return (f"{self.step}",) * (2 if self.strategy.updates_early else 1)

    def _commit_interrupted(self, plan: Plan, training: Training, now: float) -> None:
        """Survivors commit the interrupted step, as members of the world that had begun it; or leave it out."""
        if plan.skips:
            self.ledger.skipped(self.step)
        else:
            self.ledger.completed(self.into, self.rest, len(training.world))
        rank, member = next((rank, member) for rank, member in enumerate(training.world) if member in self.holding)
        committed = self._committed(training, self.step, self.step + 1, now, member, rank // self.job.stages)
        where = {"incarnation": training.incarnation, "step": self.step, "epoch": 0, "why": plan.reason}
        where["returned"] = self.strategy.lost_samples == "return"
        lost = [m.SamplesLost(at=now, **where, start=start, stop=stop) for start, stop in plan.lost]
        self.ledger.lost(self.step, self.step + 1, sum(event.stop - event.start for event in lost if not event.returned))
        self.tell([committed, *lost])

    def _filled(self, command: c.Fill | c.Replay, members: Iterable[str], now: float) -> None:
        givers = [giver for _, giver in command.handed] if isinstance(command, c.Fill) else []
        if not self._meets((*command.world, *givers), command.incarnation):
            return
        stages = self.job.stages
        stage = {member: stage_of(rank, stages) for rank, member in enumerate(command.world)}
        digests, about = self._digests(), {"at": now, "incarnation": command.incarnation}
        members = list(members)
        self.holding |= {member: stage[member] for member in members}
        self.tell(m.Filled(**about, member=member, digests=digests, stage=stage[member]) for member in reversed(members))

    def _replay_s(self, command: c.Replay) -> float:
        since = next((stored.step for stored in self.disk if stored.name == command.load), 0)
        workers = max(len(team) for team in command.teams)
        ratio = self.job.replay_ratio(workers, len(command.stages))
        return self.job.costs.load_s + (command.until - since) * self.job.step_s * ratio

    def _replayed(self, command: c.Replay, now: float) -> None:
        self._filled(command, [member for team in command.teams for member in team], now)

    # ---------------------------------------------------------------- training

    def _begin(self, world: tuple[str, ...], incarnation: int, now: float) -> None:
        if not self._meets(world, incarnation):
            return
        stall = self.strategy.stall_s(self.job)
        pace = Pace(self.step, step_seconds(self.job, self.strategy, len(world)), self.strategy.interval(self.job), stall)
        self.training = training = Training(self.at, now, pace, world, incarnation, self._factor(world))
        self._told = self.step
        if self.step < self.job.steps:
            training.when_at(self.step + 1, lambda at: self._first_step(training, at))  # which may be the last one too
        training.when_at(self.job.steps, lambda at: self._complete(training, at))

    def _factor(self, world: tuple[str, ...]) -> float:
        """How many times longer everything takes: every step waits for the slowest."""
        return max(self.slowed.get(member, 1.0) for member in world)

    def _keep_pace(self, now: float) -> None:
        """Somebody is slower or faster from now on."""
        if self.training is not None:
            self.ledger.book("slowed", self.training.slowed_s(now))
            self.training.turn(self._factor(self.training.world), now)

    def _first_step(self, training: Training, now: float) -> None:
        self.ledger.resumed(now)
        self._told = training.pace.begin + 1
        self.tell([self._committed(training, training.pace.begin, self._told, now)])

    def _committed(
        self, training: Training, first: int, stop: int, now: float, member: str = "", rank: int = 0
    ) -> m.StepsCommitted:
        """One rank tells of these steps, by default rank 0; which samples they used is not said."""
        size = len(training.world) // self.job.stages
        where = {"member": member or training.world[0], "rank": rank, "world_size": size}
        steps = {"incarnation": training.incarnation, "first_step": first, "stop_step": stop}
        data = {"epoch": 0, "start": 0, "ids_digest": "", "loss": 0.0}
        return m.StepsCommitted(at=now, **where, **steps, **data, longest_s=training.pace.step_s * training.factor)

    def interrupt(self, now: float) -> None:
        """Training ends here, wherever it stands."""
        if self.training is not None:
            self._end(self.training.pace.after(self.training.done(now)), now)

    def _end(self, stand: Stand, now: float) -> None:
        training = self.training
        assert training is not None
        training.end()
        self.training, self._last = None, training
        pace, costs = training.pace, self.job.costs
        self.ledger.trained(pace.begin, stand, len(training.world))
        self.ledger.book("slowed", training.slowed_s(now))
        self.step, self.into = stand.step, stand.into
        self.reached = max(self.reached, stand.step)
        self.rest = pace.step_s - stand.into
        self.reduced = stand.step < self.job.steps and costs.update_s > 0 and self.rest <= costs.update_s
        saved = pace.saved(training.done(now), self.strategy.durable_s(self.job))
        events: list[m.Event] = []
        if stand.step > self._told:
            events.append(self._committed(training, self._told, stand.step, now))
        if saved:
            names = [m.Stored(f"step {step} of {training.incarnation}", step, training.incarnation) for step in saved]
            self.disk = [*names, *self.disk][:2]
            events.append(self._saved(training, names[0], now))
        self.tell(events)

    def _saved(self, training: Training, stored: m.Stored, now: float) -> m.CheckpointCommitted:
        costs = self.job.costs
        return m.CheckpointCommitted(
            at=now,
            member=training.world[0],
            incarnation=training.incarnation,
            step=stored.step,
            name=stored.name,
            bytes=round(costs.state_bytes),
            snapshot_s=costs.copy_s,
            stall_s=training.pace.stall_s,
            persist_s=costs.persist_s,
        )

    def _complete(self, training: Training, now: float) -> None:
        if training.pace.begin == self.job.steps:  # a recovery has completed the last step
            self.ledger.resumed(now)
        self._end(Stand(self.job.steps, 0.0, self._stalled(training, self.job.steps)), now)
        self.tell(
            m.Completed(at=now, member=member, incarnation=training.incarnation, digest=f"{self.step}", stage=stage)
            for member, stage in reversed(self.holding.items())
            if member in training.world
        )

    def _stalled(self, training: Training, step: int) -> float:
        return training.pace.until(step) - (step - training.pace.begin) * training.pace.step_s

    def _stop(self, members: tuple[str, ...], now: float) -> None:
        """They stop at the next boundary between steps."""
        training = self.training
        if training is None:
            return
        step = training.pace.after(training.done(now)).step + 1
        if step >= self.job.steps:
            return  # the run ends before that
        training.when_at(step, lambda at: self._stopped(training, members, step, at))

    def _stopped(self, training: Training, members: tuple[str, ...], step: int, now: float) -> None:
        self._end(Stand(step, 0.0, self._stalled(training, step)), now)
        incarnation = training.incarnation
        self.tell(m.Stopped(at=now, member=member, incarnation=incarnation, step=step) for member in reversed(members))
