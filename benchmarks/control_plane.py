"""What the supervisor costs: 64 members that compute nothing beat and commit as real ones do, and one of them is lost.

    python -m benchmarks.control_plane [--quick] --json FILE

The supervisor is the product's own (machine, health, event log, metrics), on one thread, without Ray: what a call costs in Ray
itself, and the pings to everybody after a loss, are not in these numbers. What it costs to pretend the members is measured
without a supervisor, in another process at the same time, and taken off stretch by stretch: what a thread that wakes for some
microseconds takes depends on what else the machine does, by more than there is to measure.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Goal, Options, Report, main
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.policy.roster import Rules
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.runtime.heartbeat import beat_interval, record_interval
from raytrain_ft.runtime.notices.notice import NoticeSpec
from raytrain_ft.runtime.spec import Beat, Pace, RunSpec
from raytrain_ft.runtime.supervisor import Supervisor
from raytrain_ft.training.settings import StepSettings

MEMBERS = 64
STEP_S = 0.2
BATCH = 4 * MEMBERS
HEARTBEAT_S = 0.25
START_S = 30.0
START_OTHER_S = 5.0
"""Until the other process pretends members."""
DIGEST = "0" * 32
"""As long as that of a record."""
GOALS = {
    "control_plane_ms_per_step_64": Goal("<=", 1.0),
    "failure_handled_s_64": Goal("<=", 2.0),
}


def spec_of(directory: Path) -> RunSpec:
    """A run of 64 members and a spare, with the times that are the product's defaults."""
    return RunSpec(
        run_id="control-plane",
        name="control-plane",
        directory=directory,
        nonce="",
        task="",
        sampling=Sampling(dataset_size=1_000_000, global_batch_size=BATCH, seed=0),
        step=StepSettings(),
        rules=Rules(min_workers=MEMBERS, max_workers=MEMBERS, max_steps=1_000_000),
        options={},
        use_gpu=False,
        undo="exact",
        checkpoints=None,
        log=None,
        log_choice=None,
        incarnation=0,
        returns=(),
        faults=(),
        notices=NoticeSpec(clouds=(), detect=False, drain=False, grace_s=None),
        heartbeat_interval=HEARTBEAT_S,
        heartbeat_timeout=0.7,
        probe_timeout=0.5,
        setup_timeout=120.0,
        lease=120.0,
        driver_timeout=15.0,
    )


class WithoutRay(Supervisor):
    """The supervisor, with pretended members in place of actors; nobody looks at nodes."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._crew: Any = Members(self)

    async def _live(self) -> dict[str, Any]:
        self.tell(m.RunStarted(run_id=self._spec.run_id))
        self.tell(m.CapacityChanged(slots=MEMBERS + 1))
        work = (self._health._watch_workers(), self._publish())
        watchers = [asyncio.create_task(one) for one in work]
        try:
            while self._machine.state not in ENDED:
                self._step(await self._events.get())
                self._events.task_done()
        finally:
            for watcher in watchers:
                watcher.cancel()
        return {}

    async def _leave(self) -> None:
        """There is no actor to end."""

    async def close(self) -> None:
        """Ends it."""
        self._life.cancel()
        await asyncio.gather(self._life, self._leaving, return_exceptions=True)
        self._crew.close()
        self._right.release()
        self._log.close()

    def expect(self, member: str) -> None:
        """From now on this member must beat."""
        self._health.expect(member)

    def forget(self, member: str) -> None:
        """This member is gone."""
        self._health.forget(member)

    @property
    def crew(self) -> Members:
        """The members."""
        return self._crew

    @property
    def machine(self) -> Any:
        """The state of the run."""
        return self._machine


class Nobody:
    """Hears the members and does nothing: in the place of a supervisor, to see what it costs to pretend them."""

    machine = RunState(Rules(min_workers=MEMBERS, max_workers=MEMBERS, max_steps=1))

    def now(self) -> float:
        return 0.0

    def tell(self, event: m.Event) -> None: ...

    def expect(self, member: str) -> None: ...

    def forget(self, member: str) -> None: ...

    async def beat(self, beat: Beat) -> Pace | None:
        del beat
        return Pace(beat_interval(HEARTBEAT_S, MEMBERS), 0.0)


@dataclass
class Member:
    """One pretended worker: `step` steps committed, in one bucket; told of as by `runtime.heartbeat`."""

    name: str
    incarnation: int = 0
    rank: int = -1
    status: str = "idle"
    step: int = 0
    has_state: bool = False
    recorded_at: float = float("-inf")
    recorded_step: int = 0
    commits: list[dict[str, Any]] = field(default_factory=list)

    def marks(self) -> Marks | None:
        """It is interrupted before its gradient was reduced."""
        return Marks(self.name, self.step, (self.step,), (None,)) if self.has_state else None

    def begin(self, rank: int, incarnation: int) -> None:
        """Training begins."""
        self.rank, self.incarnation, self.status = rank, incarnation, "running"
        self.recorded_at, self.recorded_step = float("-inf"), self.step

    def commit(self, now: float) -> bool:
        """Another step; whether a record of it is due."""
        self.step += 1
        if now - self.recorded_at < record_interval(MEMBERS):
            return False
        first, self.recorded_at, self.recorded_step = self.recorded_step, now, self.step
        place = {"epoch": 0, "start": first * BATCH, "weights": None, "ids_digest": DIGEST, "lost": []}
        steps = {"first_step": first, "stop_step": self.step, "loss": 1.0, "longest_s": STEP_S}
        self.commits.append(place | steps | {"rank": self.rank, "world_size": MEMBERS, "incarnation": self.incarnation})
        return True

    def beat(self) -> Beat:
        """What the real one's would say."""
        told = tuple(self.commits)
        return Beat(self.name, self.incarnation, self.rank, self.status, "", "", self.step, "forward", 0.1, told)


class Members:
    """All of them: they answer every command at once, beat, and commit steps together."""

    def __init__(self, supervisor: WithoutRay | Nobody) -> None:
        self._supervisor = supervisor
        self._living: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spawn(self._train())

    def close(self) -> None:
        """Nobody beats any more."""
        for task in self._tasks:
            task.cancel()

    def node_of(self, member: str) -> str:
        """Each has a node of its own."""
        return f"node of {member}"

    def lose(self, member: str) -> None:
        """It dies, which Ray tells the supervisor within milliseconds."""
        del self._living[member]
        self._supervisor.tell(m.WorkerLost(member=member, cause="SIGKILL", noticed_by="ray"))

    def carry_out(self, command: c.Command) -> None:
        """Answers at once."""
        match command:
            case c.StartWorker(name):
                self._start(name)
            case c.Kill(name):
                self._living.pop(name, None)
                self._supervisor.forget(name)
            case c.Fence(members, incarnation):
                for member in self._of(members):
                    member.incarnation, member.status = incarnation, "idle"
                    self._tell(m.Fenced, member, marks=member.marks())
            case c.Reconcile():
                for member in self._of(command.world):
                    member.incarnation = command.incarnation
                    member.has_state = command.plan is None or member.name in command.holders
                    member.step = command.plan.step if command.plan is not None else 0
                    self._tell(m.Reconciled, member, digests=(f"{member.step}",) if member.has_state else ())
            case c.Fill():
                for member in self._of(command.members):
                    member.has_state = True
                    self._tell(m.Filled, member, digests=(f"{member.step}",))
            case c.Run(world, incarnation):
                for rank, member in enumerate(self._of(world)):
                    member.begin(rank, incarnation)

    def _of(self, names: tuple[str, ...]) -> list[Member]:
        return [self._living[name] for name in names if name in self._living]

    def _tell(self, event: Callable[..., m.Event], member: Member, **fields: Any) -> None:
        about = {"at": self._supervisor.now(), "member": member.name, "incarnation": member.incarnation}
        self._supervisor.tell(event(**about, **fields))

    def _start(self, name: str) -> None:
        member = self._living[name] = Member(name)
        self._supervisor.expect(name)
        self._supervisor.tell(m.WorkerStarted(at=self._supervisor.now(), member=name, node=self.node_of(name), pid=1))
        self._spawn(self._beat_on(member))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat_on(self, member: Member) -> None:
        await asyncio.sleep(HEARTBEAT_S * len(self._living) / MEMBERS)  # not all at one moment
        while self._living.get(member.name) is member:
            await asyncio.sleep(await self._beat(member) or HEARTBEAT_S)

    async def _beat(self, member: Member) -> float | None:
        beat = member.beat()
        pace = await self._supervisor.beat(beat)
        if pace is not None:
            member.commits = [commit for commit in member.commits if commit not in beat.commits]
        elif member.name in self._supervisor.machine.members:
            raise RuntimeError(f"{member.name} is a member, and its heartbeat is refused")
        return None if pace is None else pace.pause

    async def _train(self) -> None:
        """Steps of all together, as collectives have it."""
        due = time.monotonic()
        while True:
            due = max(due + STEP_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            running = [member for member in self._living.values() if member.status == "running"]
            if len(running) == MEMBERS:
                for member in running:
                    if member.commit(time.monotonic()):
                        self._spawn(self._beat(member))


async def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Waits until it is true.

    Raises:
        TimeoutError: it does not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        await asyncio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Costs:
    """What there was to see.

    Attributes:
        ms_per_step: CPU milliseconds of the thread per step, in each stretch that was looked at. pretence_ms: what it takes to
            pretend the members, in about the same stretches.
        handled_s: seconds from each loss to the next commit.
    """

    ms_per_step: list[float]
    pretence_ms: list[float]
    handled_s: list[float]


async def cpu_ms_per_step(seconds: int) -> list[float]:
    """CPU time of this thread per step, over and over for as long as it takes everybody to make a record."""
    found, window = [], record_interval(MEMBERS)
    for _ in range(round(seconds / window)):
        began, before = time.monotonic(), time.thread_time()
        await asyncio.sleep(window)
        found.append(1000 * (time.thread_time() - before) * STEP_S / (time.monotonic() - began))
    return found


async def measure_pretence(seconds: int) -> list[float]:
    """CPU milliseconds per step without a supervisor."""
    members = Members(Nobody())
    names = tuple(f"w{number}" for number in range(MEMBERS))
    try:
        for name in names:
            members.carry_out(c.StartWorker(name))
        members.carry_out(c.Run(names, 1))
        await asyncio.sleep(2.0)
        return await cpu_ms_per_step(seconds)
    finally:
        members.close()


def pretend(seconds: int) -> list[float]:
    """Body of the other process."""
    return asyncio.run(measure_pretence(seconds))


async def measure(directory: Path, seconds: int, losses: int) -> Costs:
    """Looks at undisturbed training, then lets members be lost one after the other."""
    spec = spec_of(directory)
    (directory / "nonce").write_text(spec.nonce)  # as a driver leaves it; else the supervisor asks Ray if it has come back
    supervisor = WithoutRay(spec)
    machine = supervisor.machine
    try:
        await until(lambda: machine.state == State.RUNNING, "training", START_S)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            pretence = asyncio.wrap_future(other.submit(pretend, seconds))
            await asyncio.sleep(START_OTHER_S)
            per_step = await cpu_ms_per_step(seconds)
            pretence_ms = await pretence
        handled = []
        for number in range(losses):
            await until(lambda: list(machine.members.values()).count("spare") > 0, "spare", START_S)
            began = time.monotonic()
            supervisor.crew.lose(machine.world[number])
            await until(
                lambda n=number: len(machine.recoveries) > n and machine.recoveries[n].resumed is not None, "recovery", START_S
            )
            handled.append(time.monotonic() - began)
            await asyncio.sleep(1.0)
        if machine.state != State.RUNNING or machine.step == 0:
            raise RuntimeError(f"the run is {machine.state} at step {machine.step}: {machine.failure}")
        return Costs(per_step, pretence_ms, handled)
    finally:
        await supervisor.close()


def add_to(report: Report, quick: bool) -> None:
    """The metrics of the control plane."""
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        costs = asyncio.run(measure(Path(directory), 16 if quick else 120, 3 if quick else 20))
    own = [ms - pretence for ms, pretence in zip(costs.ms_per_step, costs.pretence_ms, strict=True)]
    report.add("control_plane_ms_per_step_64", own)
    report.add("failure_handled_s_64", costs.handled_s)
    report.note(
        f"control plane: {MEMBERS} members, steps of {STEP_S} s; from each a heartbeat every "
        f"{beat_interval(HEARTBEAT_S, MEMBERS):g} s, a record every {record_interval(MEMBERS):g} s: median "
        f"{statistics.median(costs.ms_per_step):.2f} ms of CPU per step, {statistics.median(costs.pretence_ms):.2f} of it for "
        f"pretending the members (no calls of Ray in either); {len(costs.handled_s)} losses, each handled within "
        f"{max(costs.handled_s):.2f} s, the next step included"
    )


def run(options: Options) -> Report:
    """All of it."""
    report = Report("control plane", GOALS)
    add_to(report, options.quick)
    return report


if __name__ == "__main__":
    main(run, __doc__)
