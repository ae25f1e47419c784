"""A cluster of pretended workers for the supervisor's decisions: pure Python, no clock, every order of events.

A worker does in one line what the real one does, and the promises that must hold at any moment are checked after each event.
What happens next is drawn from a seeded source, so a story that fails can be told again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.machine import handle, replay
from raytrain_ft.policy.reconcile import Marks, Share
from raytrain_ft.policy.roster import MemberState, Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.simulate.promises import Promises

Actions = list[Callable[[], object]]
OUT_OF_STEP = ("idle", "suspect", "diverged")
KINDS = ("cluster", "crash", "letter", "checkpoint", "notice", "timer", "death", "silence", "trouble")
"""Of what may go wrong."""
PARTED = m.Parted(member="w0", incarnation=1, step=1)


@dataclass
class Worker:
    """What a worker is, as far as the supervisor can tell: `step` steps committed, one bucket. In a pipeline, `reduced` is that
    it knows of the agreement of all stages at the step's end. `left_out`: the step that it has skipped, unless it has gone on
    since. `inexact`: the incarnations that its state is not exact since; `resized`: the present one, if more or fewer train
    than before. `replayed`: the incarnation in which it has computed again what must be what was logged."""

    member: str
    ready: bool = False
    dead: bool = False
    frozen: bool = False
    incarnation: int = 0
    world: tuple[str, ...] = ()
    filled: bool = False
    inexact: frozenset[int] = frozenset()
    resized: frozenset[int] = frozenset()
    step: int = 0
    reduced: bool = False
    stage: int = 0
    agreed: int | None = None
    left_out: int | None = None
    replayed: int = 0
    stop: bool = False
    stops_at: int | None = None
    status: str = "idle"
    told: tuple[int, str] | None = None

    def marks(self, chance: Random, max_steps: int) -> Marks | None:
        """Perhaps it has begun the next step, perhaps it has its own gradients already."""
        if not self.filled:
            return None
        gradient = self.step if self.reduced else None
        agreed = None if self.agreed is None else (self.agreed, (0.5,))
        share = None
        if self.member in self.world and self.step < max_steps and chance.random() < 0.7:
            rank = self.world.index(self.member)
            share = Share(self.step, (0, len(self.world)), (rank, rank + 1), whole=chance.random() < 0.7)
        lost = None if self.left_out is None else (self.left_out, ((0, 1),))
        unwritten = (self.step + self.incarnation) % 3 == 0  # its disk is slow
        about = (self.member, self.step, (self.step,), (gradient,), self.stage, agreed, share, lost, self.left_out)
        return Marks(*about, unwritten=unwritten)


@dataclass
class Call:
    """A command on its way to one worker; a slow one may be overtaken by much."""

    member: str
    what: str
    work: Callable[[Worker], None]
    slow: bool


@dataclass
class Cluster:
    """One run on pretended workers.

    Attributes:
        calls: commands that were not carried out yet; mail: events that were not delivered yet; timers: not fired yet.
        edges: every (event, state before, state after) so far.
        disk: checkpoints, the newest last. inexact: of each, as of a worker's state.
        late: checkpoints that are still being written, perhaps in the name of a world that is over.
    """

    rules: Rules
    chance: Random
    capacity: int = 0
    corruption: float = 0.02
    slowness: float = 0.05
    run: RunState = field(init=False)
    log: list[m.Event] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    mail: list[m.Event] = field(default_factory=list)
    timers: list[c.SetTimer] = field(default_factory=list)
    edges: set[tuple[type[m.Event], State, State]] = field(default_factory=set)
    now: float = 0.0
    disk: list[m.Stored] = field(default_factory=list)
    inexact: dict[str, frozenset[int]] = field(default_factory=dict)
    late: list[m.Stored] = field(default_factory=list)
    promises: Promises = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunState(self.rules)
        self.promises = Promises(self.rules, self._holds)

    def _holds(self, member: str) -> tuple[int, int] | None:
        """What a worker holds that waits for the command to run."""
        worker = self.workers.get(member)
        if worker is None or worker.incarnation != self.run.incarnation or worker.status != "idle":
            return None
        return (worker.stage, worker.step) if worker.filled else (-1, -1)

    # ---------------------------------------------------------------- the supervisor's actor

    def tell(self, event: m.Event, *, crash: bool = False) -> list[c.Command]:
        """Log, decide, check, carry out; or crash before anything is carried out, and come back."""
        self.now += 0.01
        event = replace(event, at=self.now)
        before = self.run.state
        self.log.append(event)
        commands = handle(self.run, event)
        self.edges.add((type(event), before, self.run.state))
        self.promises.after(self.run, event, before, commands)
        if before == State.RESUME and isinstance(event, m.StepsCommitted) and self.run.state != before:
            self._check_guarantee()
        if crash:
            self.restart()
        else:
            for command in commands:
                self._carry_out(command)
        return commands

    def _check_guarantee(self) -> None:
        """The recovery that has just ended is exact only if nothing is left of what its incarnations did inexactly."""
        ended = [recovery for recovery in self.run.recoveries if recovery.resumed is not None]
        since = ended[-2].incarnation if len(ended) > 1 else 0
        here = [worker.inexact for member in self.run.world if (worker := self.workers.get(member)) is not None]
        left = [number for found in here for number in found if number > since]
        assert not ended or not left or ended[-1].guarantee != Guarantee.EXACT

    def restart(self) -> None:
        """The supervisor dies. Timers, answers and some commands are lost; what workers say again and again is not."""
        again = replay(self.rules, self.log)
        assert again == self.run, "the state is not a fold of the event log"
        self.run = again
        self.timers.clear()
        self.mail.clear()
        for call in self.calls:
            worker = self.workers.get(call.member)
            if worker is not None and not worker.dead and call.what != "start" and self.chance.random() < 0.5:
                call.work(worker)
        self.mail.clear()
        self.calls.clear()
        for worker in self.workers.values():
            worker.told = None
        if self.run.state not in ENDED:
            self.now += (0.0, 1.0, 40.0)[len(self.log) % 3]  # it was away; not drawn, for all known lives would be others then
            self.tell(m.SupervisorRestarted())
            self.tell(self._room())

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.StartWorker(member):
                self.workers[member] = Worker(member)
                self._call(member, "start", self._become_ready)
            case c.Watch(member, _):
                self._call(member, "watch", self._become_ready)
            case c.Fence(members, incarnation):
                for member in members:
                    self._call(member, "fence", lambda w: self._leave(w, incarnation))
            case c.FindCheckpoints(incarnation):
                error = "the storage does not answer" if self.chance.random() < self.corruption else ""
                self._post(m.CheckpointsFound(incarnation=incarnation, stored=tuple(reversed(self.disk)), error=error))
                self._commit_late()  # just after it was looked
            case c.Replay():
                for member in [member for team in command.teams for member in team]:
                    self._call(member, "replay", lambda w: self._replay(w, command))
            case c.Reconcile(world):
                for member in world:
                    self._call(member, "reconcile", lambda w: self._reconcile(w, command))
            case c.Fill():
                for member in command.members:
                    self._call(member, "fill", lambda w: self._fill(w, command))
            case c.Run(world, incarnation):
                for member in world:
                    self._call(member, "run", lambda w: self._start_steps(w, incarnation))
            case c.StopAtBoundary(members):
                for member in members:
                    self._call(member, "stop", lambda w: setattr(w, "stop", True))
            case c.Sleep(members, asleep):
                for member in members:
                    self._call(member, "sleep", lambda w: self._sleep(w, asleep))
            case c.Checkpoint(members, incarnation):
                for member in members:
                    self._call(member, "checkpoint", lambda w: self._last_checkpoint(w, incarnation))
            case c.Save(members, _, incarnation):
                for member in members:
                    self._call(member, "save", lambda w: self._save(w, incarnation))
            case c.Kill(member):
                self.workers.pop(member, None)
            case c.SetTimer():
                self.timers.append(command)

    def _call(self, member: str, what: str, work: Callable[[Worker], None]) -> None:
        self.calls.append(Call(member, what, work, slow=self.chance.random() < self.slowness))

    def _post(self, event: m.Event) -> None:
        self.mail.append(event)

    def _sleep(self, worker: Worker, asleep: bool) -> None:
        """It does so from its next step on; nothing that the supervisor decides depends on when that is."""
        self._post(m.Dormant(member=worker.member, incarnation=worker.incarnation, step=worker.step, asleep=asleep))

    def _report_loss(self, member: str, cause: str = "the process died") -> None:
        self._post(m.WorkerLost(member=member, cause=cause, noticed_by="ray"))

    def _perform(self, call: Call) -> None:
        worker = self.workers.get(call.member)
        if worker is None or worker.dead:
            self._report_loss(call.member)
        else:
            call.work(worker)

    # ---------------------------------------------------------------- what a worker does

    def _become_ready(self, worker: Worker) -> None:
        if self.run.members.get(worker.member) == MemberState.STARTING:
            worker.ready = True
            node = f"n{self.chance.randrange(6)}"
            self._post(m.WorkerStarted(member=worker.member, node=node, pid=1))

    def _fail_to_set_up(self, worker: Worker) -> None:
        """Its node lacks something; it will never be ready."""
        worker.dead = True
        self._post(m.TaskFailed(member=worker.member, rank=None, step=0, kind="config", message="no such directory"))

    def _lacks_something(self, worker: Worker, incarnation: int) -> bool:
        """Its node has other code, perhaps: it cannot take what the others have."""
        if worker.member in self.run.world or self.chance.random() >= self.corruption:
            return False
        about = {"rank": None, "step": 0, "kind": "task", "message": "another model", "incarnation": incarnation}
        self._post(m.TaskFailed(member=worker.member, **about))
        return True

    def _leave(self, worker: Worker, incarnation: int) -> None:
        if incarnation > worker.incarnation:  # else the call is refused, and the supervisor hears nothing
            worker.incarnation, worker.status = incarnation, "idle"
            self._post(
                m.Fenced(member=worker.member, incarnation=incarnation, marks=worker.marks(self.chance, self.rules.max_steps))
            )

    def _enter(self, worker: Worker, incarnation: int, world: tuple[str, ...]) -> bool:
        """Whether this worker is of the incarnation, and nobody whom it will meet there has left or died."""
        if incarnation < worker.incarnation:
            return False
        worker.incarnation, worker.world = incarnation, world
        peers = [self.workers.get(member) for member in world]
        if all(peer is not None and not peer.dead and peer.incarnation <= incarnation for peer in peers):
            return True
        if self.chance.random() < 0.5:  # the collective failed; else it hangs
            self._post(m.Suspected(incarnation=incarnation, reason="a collective failed", noticed_by=worker.member))
        return False

    def _reconcile(self, worker: Worker, command: c.Reconcile) -> None:
        if not self._enter(worker, command.incarnation, command.world) or self._refuses_undo(worker, command):
            return
        if self.run.world and self._lacks_something(worker, command.incarnation):
            return
        if self._finds_no_number(worker, command):
            return
        worker.stop = False
        stage = command.world.index(worker.member) % self.rules.stages
        if worker.stage != stage:
            worker.stage, worker.filled, worker.agreed = stage, False, None
        worker.filled = worker.filled and worker.member in command.holders
        if command.plan is None:
            stored = [stored for stored in self.disk if stored.name == command.load]
            if command.load and (not stored or self.chance.random() < self.corruption):
                about = {"incarnation": command.incarnation, "name": command.load, "reason": "its hash differs"}
                self._post(m.CheckpointRejected(member=worker.member, **about))
                return
            worker.filled, worker.step, worker.reduced = True, stored[0].step if stored else 0, False
            worker.agreed, worker.inexact = None, self.inexact.get(command.load, frozenset())
        elif worker.filled:
            if command.plan.undo or command.plan.keep or command.plan.lost:
                worker.inexact |= {command.incarnation}
            assert self.rules.stages == 1 or worker.reduced <= command.plan.completes
            here = [peer for member in command.holders if (peer := self.workers.get(member)) is not None]
            step = command.plan.interrupted
            skipped = any(peer.left_out == step for peer in here)
            assert command.plan.skips or not skipped, "some have left out what others are told to complete"
            worker.left_out = step if command.plan.skips else None
            worker.inexact |= worker.resized if worker.step < command.plan.step else frozenset()
            worker.step, worker.reduced, worker.resized = command.plan.step, False, frozenset()
            worker.agreed = command.plan.step - 1 if command.plan.agreed else worker.agreed
        digests = (self._digest(worker),) if worker.filled else ()
        self._post(m.Reconciled(member=worker.member, incarnation=command.incarnation, digests=digests))

    def _finds_no_number(self, worker: Worker, command: c.Reconcile) -> bool:
        """The loss of the step that it was to complete is NaN."""
        if not (self.rules.roll_back and command.plan is not None and command.plan.completes and worker.filled):
            return False
        if self.chance.random() >= 5 * self.corruption:
            return False
        about = {"rank": None, "step": command.plan.step - 1, "kind": "non_finite", "message": "the loss is NaN"}
        self._post(m.TaskFailed(member=worker.member, incarnation=command.incarnation, **about))
        return True

    def _digest(self, worker: Worker) -> str:
        return "other bits" if self.chance.random() < self.corruption else f"step {worker.step}"

    def _fill(self, worker: Worker, command: c.Fill) -> None:
        if not self._enter(worker, command.incarnation, command.world) or self._lacks_something(worker, command.incarnation):
            return
        for source in [self.workers[source] for member, source in command.whole if member == worker.member]:
            assert source.filled
            assert source.stage == worker.stage
            assert source.incarnation == command.incarnation
            worker.filled, worker.step, worker.reduced, worker.inexact = True, source.step, False, source.inexact
        for giver in [giver for member, giver in command.handed if member == worker.member]:
            source = self.workers.get(giver)
            assert giver not in command.world
            if source is None or source.dead:
                self._report_loss(giver)
                return
            if source.incarnation != command.incarnation:
                return
            assert source.filled
            assert source.stage == worker.stage
            worker.filled, worker.step, worker.reduced, worker.inexact = True, source.step, False, source.inexact
        self._post(m.Filled(member=worker.member, incarnation=command.incarnation, digests=(self._digest(worker),)))

    def _replay(self, worker: Worker, command: c.Replay) -> None:
        if not self._enter(worker, command.incarnation, command.world):
            return
        helps = worker.member not in [team[0] for team in command.teams]
        assert helps or worker.stage in command.stages
        assert command.stages != tuple(range(self.rules.stages))
        about = {"member": worker.member, "incarnation": command.incarnation}
        stored = [stored for stored in self.disk if stored.name == command.load]
        if command.load and (not stored or self.chance.random() < 2 * self.corruption):
            self._post(m.CheckpointRejected(**about, name=command.load, reason="its hash differs"))
        elif self.chance.random() < 2 * self.corruption:
            self._post(m.LogMissing(**about, reason="a record is damaged"))
        else:
            assert not stored or stored[0].step <= command.until
            if not helps:
                worker.filled, worker.step, worker.reduced, worker.agreed = True, command.until, False, None
                worker.inexact = self.inexact.get(command.load, frozenset())
                worker.inexact |= frozenset() if command.exact else {command.incarnation}
                worker.replayed = command.incarnation if command.exact else 0
            assert worker.filled
            assert worker.step == command.until
            self._post(m.Filled(**about, digests=(self._digest(worker),)))

    def _start_steps(self, worker: Worker, incarnation: int) -> None:
        if incarnation == worker.incarnation and worker.status == "idle":
            assert worker.filled
            worker.status, worker.stop, worker.stops_at, worker.left_out = "running", False, None, None
            worker.resized = frozenset({incarnation} if self._is_resized() else ())
            if worker.step >= self.rules.max_steps:
                worker.status = "completed"
            elif worker.replayed == incarnation and self.chance.random() < 2 * self.corruption:
                worker.status, worker.filled = "diverged", False

    def _is_resized(self) -> bool:
        """Whether so many train that a step that is done now is not what it would have been without the recovery under way."""
        history = self.run.history
        if history.open is None or history.attempt is None:
            return False
        step, workers = history.attempt
        return history._trained(step) not in (0, workers)

    def _peers(self, worker: Worker) -> list[Worker] | None:
        """All of its world, if all of them run; then it can commit a step as soon as nobody is behind."""
        peers = [self.workers.get(member) for member in worker.world]
        running = [p for p in peers if p and not p.dead and p.incarnation == worker.incarnation and p.status not in OUT_OF_STEP]
        return running if len(running) == len(peers) and all(p.step >= worker.step for p in running) else None

    def _commit(self, worker: Worker) -> None:
        """A step; or, of its two halves, the first. They agree on whether to stop after it."""
        peers = self._peers(worker)
        assert peers is not None
        if all(peer.step == worker.step and not peer.reduced for peer in peers):
            stop = any(peer.stop for peer in peers)
            for peer in peers:
                peer.stops_at = worker.step + 1 if stop else None
        if not worker.reduced and self.chance.random() < 0.3:
            worker.reduced, worker.agreed = True, worker.step
            return
        worker.agreed = worker.step
        worker.inexact |= worker.resized
        step, worker.step, worker.reduced = worker.step, worker.step + 1, False
        place = {"rank": worker.world.index(worker.member), "world_size": len(peers), "epoch": 0, "start": 0}
        steps = {"incarnation": worker.incarnation, "first_step": step, "stop_step": step + 1}
        self._post(m.StepsCommitted(member=worker.member, **place, **steps, ids_digest="", loss=0.0, longest_s=0.1))
        if self.rules.checkpoints and place["rank"] == 0 and self.chance.random() < 0.5:
            self._checkpoint(worker)
        if worker.stops_at == worker.step:
            worker.status = "stopped"
        elif worker.step >= self.rules.max_steps:
            worker.status = "completed"

    def _checkpoint(self, worker: Worker) -> None:
        """It is durable, and the one before is deleted; but perhaps the worker does not live to tell, or that comes late."""
        stored = m.Stored(f"step {worker.step} of {worker.incarnation}", worker.step, worker.incarnation)
        self.inexact[stored.name] = worker.inexact
        # in long runs alone: else every life that is known by its seed would become another one
        if self.rules.max_steps > 4 and (worker.step + 2 * worker.incarnation) % 3 == 0:
            self.late = [stored]
            return
        self.disk = [*self.disk[-1:], stored]
        self._tell_of_checkpoint(worker, "" if self.chance.random() < 0.5 else "disk full")

    def _last_checkpoint(self, worker: Worker, incarnation: int) -> None:
        """Of where all have stopped. Who was fenced meanwhile says nothing."""
        if worker.incarnation != incarnation:
            return
        assert worker.status == "stopped"
        peers = [self.workers[member] for member in worker.world if member in self.workers]
        assert {(peer.status, peer.step) for peer in peers if peer.incarnation == incarnation} == {("stopped", worker.step)}
        if worker.world[0] == worker.member:
            self._checkpoint(worker)
        self._post(m.Checkpointed(member=worker.member, incarnation=incarnation))

    def _save(self, worker: Worker, incarnation: int) -> None:
        """Told late, perhaps, of an incarnation that is over. A node that is about to go may lose its storage first."""
        if worker.member in self.run.leaving and incarnation % 2:
            about = {"rank": None, "step": worker.step, "kind": "storage", "message": "stale file handle"}
            self._post(m.TaskFailed(member=worker.member, **about))
            return
        self._post(m.Saved(member=worker.member, incarnation=incarnation, path=f"step {worker.step}"))

    def _tell_of_checkpoint(self, worker: Worker, error: str) -> None:
        about = {"member": worker.member, "incarnation": worker.incarnation, "step": worker.step}
        if error:
            self._post(m.CheckpointFailed(**about, reason=error))
        else:
            times = {"snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
            self._post(m.CheckpointCommitted(**about, name=f"step {worker.step} of {worker.incarnation}", bytes=1, **times))
        bounds = {"k": 2, "mode": "cpu", "k_persist": 2, "k_overhead": 1, "k_failures": 0}
        times = {"iteration_s": 1.0, "update_s": 0.1, "copy_s": 0.1, "persist_s": 1.0, "overhead_s": 0.0}
        room = {"snapshot_bytes": 1, "free_bytes": 0, "budget": 0.035}
        self._post(m.IntervalChosen(**about, **bounds, **times, **room, observed=None, reason="profiled"))

    def _beat(self, worker: Worker) -> None:
        worker.told = (worker.incarnation, worker.status)
        member, incarnation = worker.member, worker.incarnation
        if worker.status == "stopped":
            self._post(m.Stopped(member=member, incarnation=incarnation, step=worker.step))
        elif worker.status == "completed":
            self._post(m.Completed(member=member, incarnation=incarnation, digest=self._digest(worker)))
        elif worker.status == "suspect":
            self._post(m.Suspected(incarnation=incarnation, reason="a collective failed", noticed_by=member))
        elif worker.status == "diverged":
            about = {"reason": "the activation is another than before", "diverged": True}
            self._post(m.LogMissing(member=member, incarnation=incarnation, **about))

    # ---------------------------------------------------------------- what may happen next

    def fair(self) -> list[Callable[[], object]]:
        """What happens by itself in a cluster in which nothing goes wrong any more."""
        actions: list[Callable[[], object]] = []
        for i, call in enumerate(self.calls):
            worker = self.workers.get(call.member)
            if (worker is None or not worker.frozen) and (not call.slow or self.chance.random() < 0.05):
                actions.append(lambda i=i: self._perform(self.calls.pop(i)))
        actions += [lambda i=i: self.tell(self.mail.pop(i)) for i in range(len(self.mail))]
        for worker in self.workers.values():
            if worker.dead or worker.frozen:
                continue
            if worker.told != (worker.incarnation, worker.status) and worker.status not in ("idle", "running"):
                actions.append(lambda w=worker: self._beat(w))
            if worker.status == "running" and self._peers(worker) is not None:
                actions.append(lambda w=worker: self._commit(w))
        return actions

    def faults(self) -> list[tuple[str, Callable[[], object]]]:
        """What may go wrong, and of which of `KINDS` each is."""
        by_kind = {
            "cluster": [lambda: self.resize(self.chance.randrange(self.rules.max_workers + 3)), *self._told_of_nodes()],
            "crash": [self.restart, *self._crashes()],
            "letter": self._letters(),
            "checkpoint": [*[self._commit_late] * len(self.late), *self._told_of_checkpoints()],
            "notice": self._notices() if self.workers else [],
            "timer": self._timers(),
            "death": [lambda w=worker: self._die(w, noticed=self.chance.random() < 0.5) for worker in self.workers.values()],
            "silence": [action for worker in self.workers.values() for action in self._silences(worker)],
            "trouble": [action for worker in self.workers.values() for action in self._troubles(worker)],
        }
        assert tuple(by_kind) == KINDS
        return [(kind, action) for kind, actions in by_kind.items() for action in actions]

    def _told_of_nodes(self) -> Actions:
        unavailable = m.NoticesUnavailable(member=None, source="aws", reason="the metadata service does not answer")
        found = m.CauseFound(lost=self.chance.choice([*self.run.roster.gone] or ["w0"]), cause="killed for memory")
        return [lambda: self._post(unavailable if self.run.step % 3 != 1 else PARTED), lambda: self._post(found)]

    def _crashes(self) -> Actions:
        if not self.mail:
            return []
        return [lambda: self.tell(self.mail.pop(self.chance.randrange(len(self.mail))), crash=True)]

    def _letters(self) -> Actions:
        """What a worker says, perhaps late."""
        if not self.promises.formed or not self.workers:
            return []
        incarnation, step = self.run.incarnation, self.run.step
        member = self.chance.choice(list(self.workers))
        lost = m.SamplesLost(incarnation=incarnation, step=0, epoch=0, start=0, stop=1, why="not finite")
        late = m.Suspected(incarnation=incarnation, reason="a collective failed", noticed_by="w0")
        dormant = m.Dormant(member=member, incarnation=incarnation, step=step, asleep=True)
        unseen = m.StateUnseen(member=member, incarnation=incarnation, step=step, names="task.seen")
        said: list[m.Event] = [lost, late, dormant, unseen]
        if self.rules.stages > 1:
            about = {"member": member, "incarnation": incarnation, "step": step}
            sizes = {"records": 1, "payload_bytes": 1, "file_bytes": 1, "stalls": 0, "stalled_s": 0.0}
            told = [
                m.SetAside(**about, size=1, seconds=0.1),
                m.LogWritten(**about, **sizes),
                m.StageTimed(**about, seconds=0.1),
                m.LogChosen(incarnation=incarnation, boundaries=(), groups=(), seconds=(), reason=""),
            ]
            failed = m.LogFailed(**about, reason="disk full") if len(self.log) % 2 else m.LogWhole(**about)
            said += [failed, self.chance.choice(told)]
        return [lambda event=event: self._post(event) for event in said]

    def _told_of_checkpoints(self) -> Actions:
        if not self.promises.formed or not self.workers:
            return []
        actions: Actions = []
        worker = self.workers[self.chance.choice(list(self.workers))]
        if self.rules.checkpoints:
            actions.append(lambda: self._tell_of_checkpoint(worker, "disk full"))
        if self.disk:  # a letter that was on its way for long
            stored = self.disk[-1]
            times = {"bytes": 1, "snapshot_s": 0.0, "stall_s": 0.0, "persist_s": 0.0}
            about = {"member": worker.member, "incarnation": self._teller(stored), "step": stored.step, "name": stored.name}
            actions.append(lambda: self._post(m.CheckpointCommitted(**about, **times)))
        return actions

    def _notices(self) -> Actions:
        """One worker's turn: a notice for each would crowd out everything else."""
        member, seconds = self.chance.choice(list(self.workers)), self.chance.choice([0.0, 30.0])
        source = self.chance.choice(["aws spot", "request"])
        fewer = source == "request" and self.chance.random() < 0.3
        notice = m.Noticed(member=member, deadline_s=seconds, source=source, reason="terminate", replaced=not fewer)
        return [lambda: self._post(notice)]

    def _timers(self) -> Actions:
        actions: Actions = [lambda: self._fire(self.chance.randrange(len(self.timers)))] if self.timers else []
        if self.run.abort_reason:
            actions += [lambda: self.tell(m.TimerFired(timer="stop", incarnation=None))] * 2
        return actions + [lambda i=i: self._fire(i) for i, timer in enumerate(self.timers) if timer.timer == "leave"]

    def _silences(self, worker: Worker) -> Actions:
        return [
            lambda: setattr(worker, "frozen", not worker.frozen),
            lambda: self._report_loss(worker.member, "silent for 2.0 s"),
        ]

    def _troubles(self, worker: Worker) -> Actions:
        """What goes wrong within it."""
        actions: Actions = []
        if self.run.world and not worker.ready and not worker.dead:
            actions.append(lambda: self._fail_to_set_up(worker))
        if worker.status == "running":
            if self.rules.roll_back:
                about = {"member": worker.member, "rank": 0, "step": worker.step}
                nan = m.TaskFailed(**about, kind="non_finite", message="the loss is NaN")
                actions.append(lambda: self._post(nan))
            actions.append(lambda: setattr(worker, "status", "suspect"))
            actions.append(lambda: setattr(worker, "stop", True))  # a call that was under way since a resize before
        return actions

    def _commit_late(self) -> None:
        """Whoever began to write it may be gone."""
        self.disk = sorted([*self.disk, *self.late], key=lambda stored: (stored.incarnation, stored.step))[-2:]
        self.late = []

    def _teller(self, stored: m.Stored) -> int:
        """The incarnation that tells of it, be it late."""
        return stored.incarnation if self.rules.max_steps > 4 and stored.incarnation else self.run.incarnation

    def end_early(self) -> None:
        """The user's code raises, the user gives up, or another run takes the right to write."""
        training = [member for member in self.run.world or self.workers if member in self.workers]
        if training and self.chance.random() < 0.5:
            member = self.chance.choice(training)
            self.tell(m.TaskFailed(member=member, rank=0, step=0, kind="task", message="ZeroDivisionError"))
        elif self.chance.random() < 0.5:
            self.tell(m.RightLost(reason="run another has taken the right to write"))
        else:
            self.tell(m.AbortRequested(reason="Ctrl-C"))

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.tell(self._room())

    def _room(self) -> m.CapacityChanged:
        """In long runs, there are also nodes that are said to go; in those alone, as of `_checkpoint`."""
        return m.CapacityChanged(slots=self.capacity, last_resort=2 if self.rules.max_steps > 4 else 0)

    def lose(self, member: str) -> None:
        """This worker dies, and Ray tells of it."""
        self._die(self.workers[member], noticed=True)

    def _die(self, worker: Worker, *, noticed: bool) -> None:
        worker.dead = True
        if noticed:
            preempted = self.chance.random() < 0.3
            self._post(m.WorkerLost(member=worker.member, cause="it died", noticed_by="ray", preempted=preempted))

    def _fire(self, index: int) -> None:
        timer = self.timers.pop(index)
        if timer.timer == "leave":  # whether it is time to leave, or a notice lapses, depends on the time
            self.now += timer.seconds
        self.tell(m.TimerFired(timer=timer.timer, incarnation=timer.incarnation))

    def calm_down(self) -> None:
        """Nothing goes wrong any more, and whoever is dead or frozen is noticed."""
        self.corruption = 0.0
        self.resize(max(self.capacity, self.rules.min_workers))
        for worker in self.workers.values():
            if worker.dead or worker.frozen:
                self._report_loss(worker.member)

    def go_on(self) -> None:
        """One thing happens, and nothing goes wrong. Deadlines pass only when nothing else can happen."""
        actions = self.fair()
        slow = [call for call in self.calls if call.slow]
        if actions:
            self.chance.choice(actions)()
        elif slow:
            slow[0].slow = False
        else:
            assert self.timers, f"stuck in {self.run.state}: nobody is asked, no deadline is set"
            self._fire(0)

    def finish(self, most_events: int = 4000) -> None:
        """Goes on to the end of the run."""
        for _ in range(most_events):
            if self.run.state in ENDED:
                return
            self.go_on()
        raise AssertionError(f"no end after {most_events} events; state {self.run.state}")

    def _refuses_undo(self, worker: Worker, command: c.Reconcile) -> bool:
        """Wait-free, a survivor may find that it cannot undo an update."""
        may_undo = command.plan is not None and worker.member in command.holders and not self.rules.whole_update
        if not may_undo or self.chance.random() >= self.corruption:
            return False
        self._post(m.UndoRefused(member=worker.member, incarnation=command.incarnation, reason="SGD cannot be undone"))
        return True
