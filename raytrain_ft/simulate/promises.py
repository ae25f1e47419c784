"""What must be true after every event of a run, whoever plays its workers: the machine's promises.

`Promises` looks at each event and what the machine answers; `Record` writes the event log that such a run would leave, so that
`policy.history` can check it as it checks a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import Leave, MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.sampling import Sampling, digest_of_ids, next_batch, position_at, sample_ids, share
from raytrain_ft.policy.states import ENDED, LIVE, TRAINING, State

Holds = Callable[[str], tuple[int, int] | None]
"""Of a member that is told to run, the stage and the step of the state that it holds, (-1, -1) if it holds none; None if it
cannot be asked."""


class PromiseBroken(AssertionError):
    """The machine did what it must never do. An error of ours."""


def _must(is_true: bool, promise: str) -> None:
    if not is_true:
        raise PromiseBroken(promise)


@dataclass(slots=True)
class Promises:
    """Checks a run event by event.

    Attributes:
        holds: asks a worker for what it holds.
        formed: the newest incarnation that was formed.
    """

    rules: Rules
    holds: Holds
    formed: int = 0
    _members: dict[str, MemberState] = field(default_factory=dict)
    _had_notice: dict[str, Leave] = field(default_factory=dict)
    _charged: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _trained: tuple[str, ...] = ()
    _fenced: int = 0
    _to_fill: int = 0
    _answered: set[tuple[type[m.Event], str, int]] = field(default_factory=set)
    _saved: set[int] = field(default_factory=set)
    _saving: dict[str, int] = field(default_factory=dict)
    _loaded: list[tuple[int, int]] = field(default_factory=list)

    def after(self, run: RunState, event: m.Event, before: State, commands: list[c.Command]) -> None:
        """An event was handled.

        Raises:
            PromiseBroken: something that must hold does not.
        """
        if isinstance(event, m.Saved) and event.member in self._members and event.incarnation == run.incarnation:
            self._saved.add(self._stage_in(run.world, event.member))
            self._saving.pop(event.member, None)
        if isinstance(event, m.SupervisorRestarted):
            self._saving.clear()  # perhaps nobody was asked any more
        if before == State.SHUTTING_DOWN != run.state:  # what was saved before a recovery is saved again after it
            self._saving.clear()
            self._saved.clear()
        if isinstance(event, m.Reconciled | m.Filled):
            self._answered.add((type(event), event.member, event.incarnation))
        kills = {command.member for command in commands if isinstance(command, c.Kill)}
        lost = self._members.keys() - run.members.keys()
        _must(lost <= kills, "a member was lost and not killed")
        for member in lost:
            self._saving.pop(member, None)
        _must(len(set(run.world)) == len(run.world) <= self.rules.max_workers, "a world has a member twice, or too many")
        _must(len(run.world) % self.rules.stages == 0, "a world is not of whole replicas")
        if run.state in TRAINING | {State.REBUILD}:
            _must(set(run.joining) == set(run.roster.active()), "the active members are not those of the world")
        if run.state in TRAINING:
            _must(run.world == run.joining, "those who train are not the world")
        if run.state in ENDED and before not in ENDED:
            said = run.failure is not None and bool(run.failure[1])
            _must(run.state == State.FINISHED or said, "the run ended and does not say why")
            _must(kills >= set(run.members), "the run ended and left a worker")
        self._check_times(run)
        self._check_budgets(run, event, before, {member: self._members[member] for member in lost})
        for command in commands:
            self._check_command(run, command, kills)
        self._members, self._had_notice = dict(run.members), dict(run.leaving)

    def _stage_in(self, world: tuple[str, ...], member: str) -> int:
        return world.index(member) % self.rules.stages

    def _check_command(self, run: RunState, command: c.Command, kills: set[str]) -> None:
        match command:
            case c.StartWorker(member):
                allowed = run.state in LIVE - {State.SHUTTING_DOWN} or member in kills
                _must(allowed, "a worker was started when the run was ending")
            case c.Fence(members, incarnation):
                _must(incarnation > max(self._fenced, self.formed), "an incarnation was fenced twice")
                _must(set(members) <= set(run.members), "who is no member was fenced")
                self._fenced = incarnation
            case c.Reconcile(world, incarnation, plan):
                _must(incarnation == run.incarnation > self.formed, "an incarnation was formed twice")
                _must(incarnation >= self._fenced, "an incarnation that is over was formed")
                self.formed = incarnation
                if plan is None:
                    self._check_load(run, command)
                if plan is None or len(world) != len(self._trained):
                    self._trained = ()  # who loads, or is in a world of another size, may sit elsewhere, and stay there
            case c.Fill() | c.Replay():
                self._to_fill = command.incarnation
            case c.Trim(members, _):
                _must(set(members) <= set(run.members), "who is no member was told to trim its log")
            case c.Save(members, world, _):
                _must(not self._saving.keys() & set(members), "who saves is asked again")
                self._saving |= {member: self._stage_in(world, member) for member in members}
                saved = sorted([*self._saving.values(), *self._saved])
                _must(len(set(saved)) == len(saved), "a stage is saved twice")
                _must(saved == list(range(self.rules.stages)), "not every stage is saved")
            case c.Run(world, incarnation):
                self._check_run(run, world, incarnation)

    def _check_load(self, run: RunState, command: c.Reconcile) -> None:
        """What everybody loads is of the training that goes on, and not of one that they had gone back from."""
        for stored in [one for one in run.stored if one.name == command.load]:
            given_up = [at for at, step in self._loaded if stored.incarnation < at and stored.step > step]
            _must(not given_up or not stored.incarnation, "everybody loads what they had gone back from before")
        self._loaded.append((command.incarnation, run.step))

    def _check_run(self, run: RunState, world: tuple[str, ...], incarnation: int) -> None:
        """All who are told to run hold the same state; replacements sit where those sat whom they replace."""
        _must(incarnation == run.incarnation == self.formed, "an incarnation runs that was not formed")
        asked = m.Filled if self._to_fill == incarnation else m.Reconciled
        _must({(asked, member, incarnation) for member in world} <= self._answered, "somebody runs who has not answered")
        held = {member: found for member in world if (found := self.holds(member)) is not None}
        right = all(stage == rank % self.rules.stages for rank, m_ in enumerate(world) if m_ in held for stage in [held[m_][0]])
        _must(right, "somebody holds the state of another stage")
        _must(len({step for _, step in held.values()}) <= 1, "those who run stand at different steps")
        is_done = run.plan is not None and run.plan.step >= self.rules.max_steps
        _must(is_done or self.rules.min_workers <= len(world), "fewer run than allowed")
        if len(world) == len(self._trained):
            same = all(a == b or a not in world for a, b in zip(self._trained, world, strict=True))
            _must(same, "a survivor changed its rank")
        self._trained = world

    def _check_times(self, run: RunState) -> None:
        for recovery in run.recoveries[-1:]:
            _must(all(begin <= end for _, begin, end in recovery.phases), f"times out of order: {recovery}")

    def _check_budgets(self, run: RunState, event: m.Event, before: State, lost: dict[str, MemberState]) -> None:
        standing = {member for member, leave in self._had_notice.items() if event.at < leave.lapses}
        warned = standing | {member for recovery in run.recoveries for member in recovery.left}
        if before != State.SHUTTING_DOWN or run.state != before:
            for member, was in lost.items():
                preempted = member in warned or (isinstance(event, m.WorkerLost) and event.preempted)
                self._charged[preempted] += was in (MemberState.ACTIVE, MemberState.LEAVING)
        for budget, used in ((self.rules.max_preemption_failures, True), (self.rules.max_failures, False)):
            over = 0 <= budget < self._charged[used]
            _must(run.state == State.ERRORED or not over, "the budget for failures is used up, and the run goes on")


@dataclass(slots=True)
class Record:
    """The event log that a simulated run would leave, as `policy.history.check` and `calibrate` read it."""

    rules: Rules
    sampling: Sampling
    lines: list[dict[str, Any]] = field(default_factory=list)

    def after(self, run: RunState, event: m.Event, before: State, commands: list[c.Command]) -> None:
        """An event was handled."""
        if isinstance(event, m.RunStarted):
            rules = self.rules
            workers = [rules.min_workers, rules.max_workers]
            about = {"name": event.run_id, "max_steps": rules.max_steps, "num_workers": workers}
            about |= {"replacement": rules.replacement, "stages": rules.stages, "strategy": rules.strategy}
            details = asdict(self.sampling) | about
            self._line("RunStarted", run_id=event.run_id, details=details)
        elif isinstance(event, m.StepsCommitted):
            self._line("StepsCommitted", **asdict(self._with_samples(event)))
        elif isinstance(event, m.SamplesLost):
            begin = position_at(self.sampling, event.step)
            at = {"epoch": begin.epoch, "start": begin.consumed + event.start, "stop": begin.consumed + event.stop}
            self._line("SamplesLost", **(asdict(event) | at))
        else:
            self._line(type(event).__name__, **asdict(event))
        if run.state != before:
            self._line("State", at=event.at, state=str(run.state), incarnation=run.incarnation)
        for command in commands:
            if isinstance(command, c.Run):
                step = run.recoveries[-1].step if run.history.open is not None else run.step
                world_size = len(command.world) // self.rules.stages
                self._line("Resumed", at=event.at, incarnation=command.incarnation, step=step, world_size=world_size)
        if run.state in ENDED and before not in ENDED:
            for recovery in run.recoveries:
                self._line("Recovery", **asdict(recovery))
            finished = run.state == State.FINISHED
            end = {"steps": run.step} if finished else {"error": run.failure}
            self._line("RunFinished" if finished else "RunFailed", at=event.at, **end)

    def _with_samples(self, event: m.StepsCommitted) -> m.StepsCommitted:
        """What this rank would have drawn for these steps."""
        begin = position = position_at(self.sampling, event.first_step)
        ids = []
        for _ in range(event.first_step, event.stop_step):
            batch, position = next_batch(self.sampling, position)
            ids.append(sample_ids(self.sampling, batch.epoch, share(batch, event.rank, event.world_size)))
        return replace(event, epoch=begin.epoch, start=begin.consumed, ids_digest=digest_of_ids(ids))

    def _line(self, event: str, /, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})
