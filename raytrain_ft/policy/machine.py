"""The supervisor's decisions: events in, commands out, one table. No torch, no Ray, no clock, no file.

`Machine.handle(event)` returns what to do next. The actor around it carries the commands out and feeds each result back as an
event, so every interleaving of losses can be tested without a cluster, and the machine's state is a fold of its event log.

There is one path for every disturbance. A loss, a suspicion or a planned resize leads to FENCE (everybody leaves the step and
reports where it stands) -> REPLACE (get workers; join a new group; make the survivors consistent) -> REBUILD (fill
replacements, repair what differs) -> RESUME (until the first step is committed) -> RUNNING. A loss in any phase goes back to
FENCE with the larger set of lost workers; answers of an older incarnation are ignored; who does not answer in time is lost.
"""

from __future__ import annotations

from collections import deque

from raytrain_ft.errors import IllegalEventError
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Marks, Plan, reconcile
from raytrain_ft.policy.roster import MemberState, Roster, Rules
from raytrain_ft.policy.states import ENDED, RECOVERING, TRANSITIONS, State
from raytrain_ft.policy.strategy import Recovery, fills, guarantee_of, repairs

S = State


class Machine:
    """The state of one run, and every decision about it.

    Attributes:
        state: where the run stands.
        incarnation: the number of the present world; 0 before the first.
        world: active members in rank order.
        roster: the members, and what the budgets allow.
        recoveries: every recovery and resize so far, the last one perhaps still under way.
        failure: (error class name, message) once ERRORED or ABORTED.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = S.INITIALIZING
        self.incarnation = 0
        self.world: tuple[str, ...] = ()
        self.roster = Roster(rules)
        self.recoveries: list[Recovery] = []
        self.failure: tuple[str, str] | None = None
        self.result: dict[str, str] = {}
        self.step = 0
        self.longest_step = 0.0
        self.story: deque[str] = deque(maxlen=40)
        self._answers: dict[str, m.Event] = {}
        self._plan: Plan | None = None
        self._joining: tuple[str, ...] = ()
        self._holders: tuple[str, ...] = ()
        self._fruitless = 0

    @property
    def members(self) -> dict[str, MemberState]:
        """Every live member and what it is to the run."""
        return self.roster.members

    def handle(self, event: m.Event) -> list[m.Command]:
        """Takes one event and says what to do.

        Raises:
            IllegalEventError: the table does not allow the event in this state; nothing was changed.
        """
        if self.state in ENDED:
            return []  # answers that were under way when the run ended
        self.story.append(f"{event.at:9.3f} {self.state:<13} {_short(event)}")
        before = self.state
        if self._is_stale(event):
            return []
        allowed = TRANSITIONS.get(type(event), {}).get(before)
        if allowed is None:
            raise IllegalEventError(f"{_short(event)} cannot come in state {before}. Story:\n" + "\n".join(self.story))
        handler = getattr(self, f"_on_{type(event).__name__}")
        commands: list[m.Command] = handler(event)
        if self.state not in allowed:
            raise IllegalEventError(
                f"{_short(event)} led from {before} to {self.state}, which the table lacks. Story:\n" + "\n".join(self.story)
            )
        return commands

    def _is_stale(self, event: m.Event) -> bool:
        if isinstance(event, m.StepsCommitted | m.SamplesLost):
            return event.incarnation != self.incarnation and self.state != S.FENCE
        incarnation = getattr(event, "incarnation", self.incarnation)
        if incarnation != self.incarnation:
            return True
        member = getattr(event, "member", None)
        return isinstance(event, m.WorkerLost | m.WorkerStarted) and member not in self.members

    # ---------------------------------------------------------------- workers come and go

    def _on_RunStarted(self, event: m.RunStarted) -> list[m.Command]:
        self.state = S.SCHEDULING
        return [m.SetTimer("schedule", self.rules.schedule_timeout, self.incarnation), *self._provision()]

    def _provision(self) -> list[m.Command]:
        return self.roster.provision(self.rules.min_workers if self.state == S.SCHEDULING else 0)

    def _on_CapacityChanged(self, event: m.CapacityChanged) -> list[m.Command]:
        self.roster.resized(event.slots)
        return [*self._provision(), *(self._begin_if_ready() if self.state == S.SCHEDULING else [])]

    def _on_WorkerStarted(self, event: m.WorkerStarted) -> list[m.Command]:
        self.members[event.member] = MemberState.SPARE
        self.roster.start_failures = 0
        if self.state == S.SCHEDULING:
            return self._begin_if_ready()
        if self.state == S.REPLACE and not self._joining:
            return self._replace()
        return self._grow(event.at) if self.state == S.RUNNING else []

    def _begin_if_ready(self, at_least: int | None = None) -> list[m.Command]:
        enough = min(self.rules.max_workers, self.roster.slots) if self.roster.any_starting() else self.rules.min_workers
        needed = max(at_least or enough, self.rules.min_workers)
        if len(self.roster.spares()) < needed:
            return []
        self.incarnation += 1
        return self._join(tuple(self.roster.spares()[: self.rules.max_workers]), plan=None)

    def _grow(self, at: float) -> list[m.Command]:
        """A planned resize: everybody stops at a step boundary that all agree upon."""
        if len(self.world) >= self.rules.max_workers or not self.roster.spares() or self.step >= self.rules.max_steps:
            return []
        self.state = S.RESIZING
        self._answers = {}
        self._open_recovery(at, f"{len(self.roster.spares())} more workers are ready", "supervisor")
        return [m.StopAtBoundary(self.world)]

    def _on_Stopped(self, event: m.Stopped) -> list[m.Command]:
        if self.state != S.RESIZING:
            return []
        self._answers[event.member] = event
        return self._fence(event.at) if set(self._answers) >= set(self.world) else []

    def _on_WorkerLost(self, event: m.WorkerLost) -> list[m.Command]:
        was = self.members.pop(event.member)
        commands: list[m.Command] = [m.Kill(event.member)]
        if was != MemberState.ACTIVE and event.member not in self._joining:
            self.roster.start_failures += was == MemberState.STARTING
            if self.roster.cannot_start() and self.state == S.SCHEDULING:
                return [*commands, *self._fail("RecoveryError", f"workers cannot be started: {event.cause}")]
            commands += self._provision()
            return commands + (self._replace() if self.state == S.REPLACE and not self._joining else [])
        if self.state == S.SHUTTING_DOWN:
            return commands + self._save()
        exhausted = self.roster.charge(event.preempted)
        self._open_recovery(event.at, event.cause, event.noticed_by)
        self.recoveries[-1].lost.append(event.member)
        if exhausted:
            return [*commands, *self._fail("RetryBudgetError", f"{exhausted}; last cause: {event.cause}")]
        if self.state == S.FENCE:
            return commands + self._provision() + self._fenced(event.at)
        return commands + self._fence(event.at) + self._provision()

    # ---------------------------------------------------------------- FENCE: stop, report

    def _open_recovery(self, at: float, cause: str, noticed_by: str) -> None:
        if not self.recoveries or self.recoveries[-1].resumed is not None:
            self.recoveries.append(Recovery(cause, noticed_by, world_before=len(self.world), detected=at))
        elif self.recoveries[-1].cause != cause:
            self.recoveries[-1].cause += f"; then {cause}"

    def _on_Suspected(self, event: m.Suspected) -> list[m.Command]:
        if self.state in (S.FENCE, S.SHUTTING_DOWN):
            return []
        self._open_recovery(event.at, event.reason, event.noticed_by)
        return self._fence(event.at)

    def _fence(self, at: float) -> list[m.Command]:
        del at
        if self.state in RECOVERING:
            self.recoveries[-1].attempts += 1
        self._fruitless += 1
        if self._fruitless > self.rules.max_fruitless_recoveries:
            return self._fail(
                "RetryBudgetError",
                f"{self.rules.max_fruitless_recoveries} recoveries in a row committed no step at step {self.step}; "
                f"last cause: {self.recoveries[-1].cause}",
            )
        self.state = S.FENCE
        self.incarnation += 1
        self._answers = {}
        self._plan = None
        self._joining = ()
        members = self.roster.active()
        seconds = max(self.rules.fence_timeout, 3 * self.longest_step)
        if not members:
            return self._fenced(0.0)
        return [m.Fence(members, self.incarnation), m.SetTimer("fence", seconds, self.incarnation)]

    def _on_Fenced(self, event: m.Fenced) -> list[m.Command]:
        self._answers[event.member] = event
        return self._fenced(event.at)

    def _fenced(self, at: float) -> list[m.Command]:
        """Goes on to REPLACE once every active member has answered or is lost."""
        active = self.roster.active()
        if any(member not in self._answers for member in active):
            return []
        for member in active:
            answer = self._answers[member]
            assert isinstance(answer, m.Fenced)
            if answer.marks is None:  # a replacement whose filling was interrupted holds nothing: it is a spare again
                self.members[member] = MemberState.SPARE
        survivors = self._survivors()
        if not survivors and self._was_trained():
            return self._fail(
                "NoSurvivorError",
                f"every replica is gone at step {self.step} ({self.recoveries[-1].cause}) and there is no checkpoint to go "
                "back to. Spread the workers over more nodes.",
            )
        self.recoveries[-1].fenced = at
        self.state = S.REPLACE
        self._plan = reconcile(survivors, whole_update=self.rules.whole_update) if survivors else None
        seconds = self.rules.replacement_timeout
        return [m.SetTimer("replacement", seconds, self.incarnation), *self._provision(), *self._replace()]

    def _was_trained(self) -> bool:
        return bool(self.world)

    def _survivors(self) -> list[Marks]:
        answers = [answer for answer in self._answers.values() if isinstance(answer, m.Fenced)]
        return [answer.marks for answer in answers if answer.marks is not None and answer.member in self.members]

    # ---------------------------------------------------------------- REPLACE: get workers, make survivors consistent

    def _replace(self, *, waited: bool = False) -> list[m.Command]:
        """Forms the next world, or waits for workers to come."""
        survivors = [marks.member for marks in self._survivors()]
        if self._plan is not None and self._plan.step >= self.rules.max_steps:
            return self._join(tuple(member for member in self.world if member in survivors), self._plan)
        wanted = self.rules.max_workers
        ready = len(survivors) + len(self.roster.spares())
        may_come = self.rules.wait_for_replacement and not waited and self.roster.any_starting()
        if ready < min(wanted, len(self.world) or wanted) and may_come:
            return []
        if ready < self.rules.min_workers:
            if not waited:
                return []
            return self._fail(
                "RecoveryError",
                f"{ready} workers are left and none came within {self.rules.replacement_timeout:g} s, but num_workers asks "
                f"for at least {self.rules.min_workers}. Add nodes, or lower the minimum.",
            )
        return self._join(_seats(self.world, survivors, self.roster.spares(), wanted), self._plan)

    def _join(self, world: tuple[str, ...], plan: Plan | None) -> list[m.Command]:
        self.state = S.REPLACE
        self._joining = world
        self._plan = plan
        for member in world:
            self.members[member] = MemberState.ACTIVE
        fenced, self._answers = self._answers, {}
        self._holders = tuple(e.member for e in fenced.values() if isinstance(e, m.Fenced) and e.marks is not None)
        return [
            m.Reconcile(world, self.incarnation, plan),
            m.SetTimer("phase", self.rules.phase_timeout, self.incarnation),
        ]

    def _on_Reconciled(self, event: m.Reconciled) -> list[m.Command]:
        self._answers[event.member] = event
        if set(self._answers) != set(self._joining):
            return []
        world = self._joining
        digests = {e.member: e.digests for e in self._answers.values() if isinstance(e, m.Reconciled)}
        holders = [member for member in world if member in self._holders] or list(world)
        fresh = [member for member in world if member not in holders]
        repaired = repairs(world, {member: digests[member] for member in holders})
        sound = [member for member in holders if all(member not in copy.targets for copy in repaired)] or holders
        filling = fills(sound, fresh, len(digests[holders[0]]))
        if self.recoveries and self.recoveries[-1].resumed is None:
            self._note_reconciled(event, world, len(repaired))
        self.world = world
        self._answers = {}
        if not repaired and not filling:
            return self._resume(event.at)
        self.state = S.REBUILD
        return [
            m.Fill(world, self.incarnation, (*repaired, *filling), tuple(fresh), sound[0]),
            m.SetTimer("phase", self.rules.phase_timeout, self.incarnation),
        ]

    def _note_reconciled(self, event: m.Reconciled, world: tuple[str, ...], repaired: int) -> None:
        recovery, plan = self.recoveries[-1], self._plan
        recovery.reconciled = event.at
        recovery.undone = max(e.undone for e in self._answers.values() if isinstance(e, m.Reconciled))
        recovery.repaired = repaired
        recovery.incarnation = self.incarnation
        recovery.world_after = len(world)
        if plan is not None:
            recovery.step, recovery.completes, recovery.reason = plan.step, plan.completes, plan.reason
            recovery.guarantee = max(recovery.guarantee, guarantee_of(plan, recovery.world_before, len(world)))

    # ---------------------------------------------------------------- REBUILD and RESUME

    def _on_Filled(self, event: m.Filled) -> list[m.Command]:
        self._answers[event.member] = event
        if set(self._answers) != set(self.world):
            return []
        digests = {e.member: e.digests for e in self._answers.values() if isinstance(e, m.Filled)}
        if repairs(self.world, digests):
            self._open_recovery(event.at, "the state still differs between replicas after filling", "hash")
            return self._fence(event.at)
        return self._resume(event.at)

    def _resume(self, at: float) -> list[m.Command]:
        if self.recoveries and self.recoveries[-1].resumed is None:
            self.recoveries[-1].filled = at
        self.state = S.RESUME
        self._answers = {}
        self._joining = ()
        return [m.Run(self.world, self.incarnation)]

    def _on_StepsCommitted(self, event: m.StepsCommitted) -> list[m.Command]:
        self.step = max(self.step, event.stop_step)
        self.longest_step = max(self.longest_step, event.longest_s)
        if event.incarnation != self.incarnation:
            return []
        self._fruitless = 0
        if self.state != S.RESUME:
            return []
        self._close_recovery(event.at)
        self.state = S.RUNNING
        return []

    def _close_recovery(self, at: float) -> None:
        if self.recoveries and self.recoveries[-1].resumed is None:
            self.recoveries[-1].resumed = at

    def _on_SamplesLost(self, event: m.SamplesLost) -> list[m.Command]:
        del event
        return []

    # ---------------------------------------------------------------- the end

    def _on_Completed(self, event: m.Completed) -> list[m.Command]:
        self._answers[event.member] = event
        digests = {e.member: e.digest for e in self._answers.values() if isinstance(e, m.Completed)}
        if set(digests) != set(self.world):
            return []
        if len(set(digests.values())) > 1:
            return self._fail("RecoveryError", f"the replicas differ at the end of the run: {digests}")
        self._close_recovery(event.at)
        self.result["digest"] = event.digest
        self.step = self.rules.max_steps
        self.state = S.SHUTTING_DOWN
        return self._save()

    def _save(self) -> list[m.Command]:
        active = [member for member in self.world if member in self.members]
        if not active:
            return self._fail("NoSurvivorError", "every worker was lost before the final state was saved")
        return [m.Save(active[0]), m.SetTimer("save", self.rules.phase_timeout, self.incarnation)]

    def _on_Saved(self, event: m.Saved) -> list[m.Command]:
        self.result["path"] = event.path
        return self._end(S.FINISHED)

    def _on_TaskFailed(self, event: m.TaskFailed) -> list[m.Command]:
        kinds = {"task": "TaskError", "non_finite": "NonFiniteLossError", "config": "ConfigError"}
        where = f"rank {event.rank} ({event.member}), step {event.step}"
        return self._fail(kinds[event.kind], f"{where}: {event.message}")

    def _on_AbortRequested(self, event: m.AbortRequested) -> list[m.Command]:
        self.failure = ("AbortedError", event.reason)
        return self._end(S.ABORTED)

    def _fail(self, kind: str, message: str) -> list[m.Command]:
        self.failure = (kind, message)
        return self._end(S.ERRORED)

    def _end(self, state: State) -> list[m.Command]:
        self.state = state
        return [*(m.Kill(member) for member in self.members), m.End()]

    # ---------------------------------------------------------------- deadlines, and the supervisor's own restart

    def _on_TimerFired(self, event: m.TimerFired) -> list[m.Command]:
        if event.timer == "schedule" and self.state == S.SCHEDULING:
            if len(self.roster.spares()) >= self.rules.min_workers:
                return self._begin_if_ready(at_least=self.rules.min_workers)
            return self._fail(
                "ConfigError",
                f"{len(self.roster.spares())} workers could be placed within {self.rules.schedule_timeout:g} s, num_workers asks "
                f"for at least {self.rules.min_workers}. Add nodes, lower num_workers or resources_per_worker.",
            )
        if event.timer == "replacement" and self.state == S.REPLACE and not self._joining:
            return self._replace(waited=True)
        waiting = {"fence": S.FENCE, "phase": self.state if self._joining or self.state == S.REBUILD else None}
        if event.timer == "save" and self.state == S.SHUTTING_DOWN:
            return self._lose(event.at, [self.world[0]], "it did not save the final state in time")
        if waiting.get(event.timer) != self.state or self.state not in (S.FENCE, S.REPLACE, S.REBUILD):
            return []
        expected = self._joining or self.roster.active()
        silent = [member for member in expected if member not in self._answers]
        return self._lose(event.at, silent, f"no answer in state {self.state}")

    def _lose(self, at: float, members: list[str], cause: str) -> list[m.Command]:
        commands: list[m.Command] = []
        for member in members:
            if member in self.members and self.state not in ENDED:
                commands += self._on_WorkerLost(m.WorkerLost(at=at, member=member, cause=cause, noticed_by="deadline"))
        return commands

    def _on_SupervisorRestarted(self, event: m.SupervisorRestarted) -> list[m.Command]:
        watch: list[m.Command] = [m.Watch(member) for member in self.members]
        if self.state in (S.REPLACE, S.REBUILD):  # answers were lost with the old process: ask everybody again
            return watch + self._fence(event.at)
        if self.state == S.FENCE:
            return [
                *watch,
                m.Fence(self.roster.active(), self.incarnation),
                m.SetTimer("fence", self.rules.fence_timeout, self.incarnation),
            ]
        again: dict[State, list[m.Command]] = {
            S.SCHEDULING: [m.SetTimer("schedule", self.rules.schedule_timeout, self.incarnation)],
            S.RESIZING: [m.StopAtBoundary(self.world)],
            S.RESUME: [m.Run(self.world, self.incarnation)],
        }
        return watch + (self._save() if self.state == S.SHUTTING_DOWN else again.get(self.state, []))


def _seats(world: tuple[str, ...], survivors: list[str], spares: list[str], wanted: int) -> tuple[str, ...]:
    """The next world in rank order. A replacement takes the rank of who it replaces, so that sums keep their order."""
    pool = list(spares)
    seats = [member if member in survivors else (pool.pop(0) if pool else None) for member in world]
    seats += [member for member in survivors if member not in world]
    filled = [member for member in seats if member is not None]
    return tuple((filled + pool)[: max(wanted, len(survivors))])


def _short(event: m.Event) -> str:
    shown = {
        k: getattr(event, k)
        for k in ("member", "incarnation", "cause", "reason", "timer", "step", "slots")
        if hasattr(event, k)
    }
    return f"{type(event).__name__}({', '.join(f'{k}={v}' for k, v in shown.items())})"


def replay(rules: Rules, events: list[m.Event]) -> Machine:
    """The machine after these events: its state is a fold of its event log."""
    machine = Machine(rules)
    for event in events:
        machine.handle(event)
    return machine
