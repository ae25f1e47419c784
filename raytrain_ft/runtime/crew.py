"""The workers as the supervisor handles them: starts them, sends commands, turns answers and silence into events.

Nothing is decided here. Every command becomes calls to workers, and every call ends as an event: an answer, or the loss of
the worker that did not give one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.topology import stage_of
from raytrain_ft.runtime import clock, lifeline, placement
from raytrain_ft.runtime.calls import BROKEN_SECONDS, DIED, Calls, cause_of, differs
from raytrain_ft.runtime.contacts import ROOM_SECONDS, Contacts
from raytrain_ft.runtime.health import Health
from raytrain_ft.runtime.leftovers import BEGIN_S, begun, named
from raytrain_ft.runtime.nodes import FORGIVE_DEAD_S, FORGIVE_SILENT_S
from raytrain_ft.runtime.software import CODE, pack
from raytrain_ft.runtime.spec import NAMESPACE, Introduction, RunSpec
from raytrain_ft.runtime.worker import Worker

WATCH_SECONDS = 60.0
KILL_SECONDS = 30.0
ROOM_POLL_SECONDS = 0.1
HINT_SECONDS = 2.0
OLDER_POLL_SECONDS = 0.05
CAUSE_SECONDS = 2.0
"""How long Ray is given to tell why a process died."""


@cache
def _worker_class() -> Any:
    """The actor class, made once. Ray gives each that is made to the whole cluster, in a call that holds up all else here, and
    nobody ever takes it back."""
    return ray.remote(Worker)


class Crew:
    """All workers of a run."""

    def __init__(self, spec: RunSpec, tell: Callable[[m.Event], None], contacts: Contacts, health: Health) -> None:
        self._spec = spec
        self._tell = tell
        self._health = health
        self._contacts = contacts
        self._calls = Calls(spec, tell, contacts, health)
        self.epoch = 0  # of the right to write checkpoints
        self._tasks: set[asyncio.Task[None]] = set()
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._left: asyncio.Task[list[str]] | None = None  # names
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._killing: set[asyncio.Task[None]] = set()
        self._sleeping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # requests of a replica do not overtake

    def carry_out(self, command: c.Command) -> None:
        """Begins to carry a command out; the results come as events."""
        match command:
            case c.StartWorker(member, anywhere):
                self._bringing[member] = self._spawn(self._bring(member, self._start(member, anywhere)))
            case c.Watch(member, node):
                self._bringing[member] = self._spawn(self._bring(member, self._attach(member, node)))
            case c.Fence(members, incarnation):
                self._health.alert(members)
                for member in members:
                    self._spawn(self._fence(member, incarnation))
            case c.Forsake(members, incarnation, worth):
                for member in members:
                    self._spawn(self._calls.hint(member, "forsake", incarnation, worth))
            case c.Reconcile():
                for member in command.world:
                    self._spawn(self._reconcile(member, command))
            case c.Fill():
                self._spawn(self._fill(command))
            case c.Replay():
                for member in chain.from_iterable(command.teams):
                    self._spawn(self._await_filled(member, command, "replay", command, load=command.load))
            case c.Trim(members, step, since):
                for member in members:
                    self._spawn(self._ask(member, "trim", step, since))
            case c.LogOnly(members, incarnation, boundaries, groups, seconds, reason):
                for member in members:
                    self._spawn(self._ask(member, "log_only", incarnation, boundaries))
                self._tell(
                    m.LogChosen(incarnation=incarnation, boundaries=boundaries, groups=groups, seconds=seconds, reason=reason)
                )
            case c.Run():
                for member in command.world:
                    self._spawn(self._ask(member, "run", command))
            case c.StopAtBoundary(members):
                for member in members:
                    self._spawn(self._ask(member, "stop_at_boundary"))
            case c.Secure(members):
                for member in members:
                    self._spawn(self._ask(member, "secure"))
            case c.Sleep(members, asleep):
                self.sleep(members, asleep)
            case c.Checkpoint(members, incarnation):
                for member in members:
                    self._spawn(self._checkpoint(member, incarnation))
            case c.Save(members, world, incarnation):
                for member in members:
                    self._spawn(self._save(member, world, incarnation))
            case c.Kill(member, avoid):
                if avoid and (node := self._contacts.node_of(member)) is not None:
                    self._health.nodes.disfavour(node)
                if member in self._bringing:
                    self._bringing.pop(member).cancel()  # else one that is struck off would be started, and keep its place
                self._spawn(self._kill(member), self._killing)
            case c.SetTimer(timer, seconds, incarnation):
                self._spawn(self._timer(timer, seconds, incarnation))
            case c.End():
                for task in self._tasks:
                    task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None) -> asyncio.Task[None]:
        tasks = self._tasks if tasks is None else tasks
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def sleep(self, members: tuple[str, ...], asleep: bool, at_once: bool = False) -> list[asyncio.Task[None]]:
        """These replicas sleep from the next step on, or take part again. Returns what tells each of them, and the others."""
        return [self._spawn(self._sleep(member, asleep, at_once)) for member in members]

    async def settled(self) -> None:
        """Waits until every worker that had to go is gone."""
        if self._killing:
            await asyncio.wait(set(self._killing), timeout=KILL_SECONDS)

    # ---------------------------------------------------------------- starting and watching

    async def _bring(self, member: str, work: Coroutine[Any, Any, None]) -> None:
        """Whatever comes in between, nobody is waited for who will not come."""
        try:
            await work
        except Exception as error:
            self._calls.lost(member, f"it could not be started: {error!r}", "supervisor")
        self._bringing.pop(member, None)

    async def _start(self, member: str, anywhere: bool) -> None:
        node = await self._choose_node(member, anywhere)
        if node is None:
            self._calls.lost(member, "no node has room for another worker", "supervisor")
            return
        actor = _worker_class().options(
            name=self._spec.member_name(member),
            namespace=NAMESPACE,
            lifetime="detached",  # workers outlive the supervisor's process; the heartbeat ends them if it is gone for good
            max_concurrency=16,
            scheduling_strategy=placement.strategy_for(node),
            **self._spec.options,
        )
        supervisor = ray.get_runtime_context().current_actor
        try:
            self._contacts.handles[member] = actor.remote(CODE, pack(self._spec), member, supervisor, self.epoch)
        except (RayError, ValueError, TypeError) as error:
            self._calls.lost(member, f"Ray refuses to start it: {error}", "ray")
            return
        await self._introduce(member)

    async def _choose_node(self, member: str, anywhere: bool = False) -> str | None:
        """The emptiest node with room whose raylet answers: Ray itself learns of a killed raylet only after many seconds. One
        that is said to go only if that is `anywhere`, and no other has room.

        Looks for a while, because what a lost worker held is free only when Ray has seen its end.
        """
        wanted, known = placement.demand(self._spec.options), self._health.nodes
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            nodes = await self._nodes()
            avoided = [known.avoided | known.disfavoured, known.avoided, *([known.unusable] if anywhere else [])]
            choices = (placement.choose(nodes, wanted, self._contacts.taken(), avoid) for avoid in avoided)
            chosen = next((node for node in choices if node is not None), None)
            self._contacts.place(member, chosen)  # taken from now on, whatever others are started meanwhile
            if chosen is None:
                if time.monotonic() > deadline:
                    return None
                await asyncio.sleep(ROOM_POLL_SECONDS)
                continue
            reaction = await placement.reaction(next(n for n in nodes if n["NodeID"] == chosen))
            if reaction == "answer":
                return chosen
            self._contacts.place(member, None)
            # A packet may get lost, but no cut cable refuses anything.
            known.avoid(chosen, FORGIVE_DEAD_S if reaction == "refusal" else FORGIVE_SILENT_S)
            known.count(nodes)

    async def _nodes(self) -> list[dict[str, Any]]:
        """None of them while Ray's own state does not answer."""
        try:
            return await asyncio.to_thread(placement.nodes)
        except (RayError, RuntimeError):
            return []

    async def _attach(self, member: str, node: str) -> None:
        if not node:  # nobody has noted where it was sent; it has its place there, which is not to be asked for once more
            self._contacts.somewhere.add(member)
        try:
            self._contacts.handle(member)
        except (ValueError, RayError):
            self._calls.lost(member, "it died while the supervisor was away", "ray")
            return
        if node:  # who has frozen meanwhile never answers
            self._look_after(member, node)
        await self._introduce(member)

    async def _introduce(self, member: str) -> None:
        known = await self._calls.call(member, "setup", seconds=self._spec.setup_timeout)
        if known is None:
            return
        if self._health.is_starting(member):
            await self._await_older()
        stored = self._spec.checkpoints
        if why := differs(
            known, self._contacts.introductions.values(), other_data=stored is not None and "dataset" in stored.override
        ):
            self._health.nodes.disfavour(known.node)
            self._tell(m.TaskFailed(member=member, rank=None, step=self._health.step, kind="mismatch", message=why))
            return
        self._contacts.introductions[member] = known
        if member not in self._watching:
            self._look_after(member, known.node)
        if known.lifeline:
            self._contacts.lines[member] = self._spawn(self._hold(member, known))
        if self._health.is_starting(member):
            self._tell(m.WorkerStarted(member=member, node=known.node, pid=known.pid, build_s=known.build_s))

    async def _await_older(self) -> None:
        """By those who have trained a newcomer is measured, not they by him, though he may answer first after the supervisor's
        restart, when all are asked again. Who does not answer is lost, and not waited for any more."""
        while not self._contacts.introductions.keys() >= set(self._health.older()):
            await asyncio.sleep(OLDER_POLL_SECONDS)

    def _look_after(self, member: str, node: str) -> None:
        self._contacts.place(member, node)
        self._health.expect(member)
        self._watching[member] = self._spawn(self._watch(member))

    async def _hold(self, member: str, known: Introduction) -> None:
        """The end of a process is seen here before Ray knows of it, but not its cause."""
        await lifeline.hold(known.host, known.lifeline)
        if member in self._watching:
            self._calls.lost(member, DIED, "lifeline")

    async def _watch(self, member: str) -> None:
        """Ray tells of a process that has come to its end within about 10 ms by failing the call that is under way.

        A connection that broke is no death: heartbeats come over another one, and tell if they do not come any more. Nor is it
        news that a worker ends that is killed here, because it leaves or is known to be lost.
        """
        while member in self._watching:
            try:
                await self._contacts.handle(member).watch.remote(WATCH_SECONDS)
            except ActorUnavailableError:
                await asyncio.sleep(BROKEN_SECONDS)
            except ValueError:
                return  # it was struck off, and is gone
            except RayError as error:
                cause = cause_of(error)
                if self._contacts.line_ended(member):
                    if cause != DIED:
                        self._tell(m.CauseFound(lost=member, cause=cause))
                elif member in self._watching:
                    self._calls.lost(member, cause, "ray", preempted=bool(getattr(error, "preempted", False)))
                return

    # ---------------------------------------------------------------- commands

    async def _ask(self, member: str, method: str, *args: Any) -> None:
        await self._calls.call(member, method, *args)

    async def _fence(self, member: str, incarnation: int) -> None:
        try:
            marks = await self._calls.answer_again(member, "fence", incarnation)
        except RayTaskError as error:
            self._calls.report(member, error, incarnation)
        except (RayError, ValueError) as error:
            self._calls.lost(member, cause_of(error), "ray")
        else:
            self._tell(m.Fenced(member=member, incarnation=incarnation, marks=marks))

    async def _reconcile(self, member: str, command: c.Reconcile) -> None:
        incarnation = command.incarnation
        step = None if command.plan is None else command.plan.interrupted
        answer = await self._calls.call(member, "reconcile", command, incarnation=incarnation, load=command.load, step=step)
        if answer is not None:
            digests, undone, kept = answer
            self._tell(m.Reconciled(member=member, incarnation=incarnation, digests=digests, undone=undone, kept=kept))

    async def _fill(self, command: c.Fill) -> None:
        extras = await self._of_each("extras", {source for _, source in command.whole}, command.incarnation)
        handed = await self._of_each("hand_over", {giver for _, giver in command.handed}, command.incarnation)
        if extras is None or handed is None:
            return
        sources, givers = dict(command.whole), dict(command.handed)
        for member in command.members:
            kept = extras[sources[member]][0] if member in sources else None
            asked = (command, kept, *(handed[givers[member]] if member in givers else ()))
            self._spawn(self._await_filled(member, command, "fill", *asked))

    async def _of_each(self, method: str, members: Collection[str], incarnation: int) -> dict[str, Any] | None:
        """What each of these gives, all of them asked at once, and nobody twice, however many receive it: to pack a whole state
        takes its time, and the phase has a deadline. None if somebody cannot."""
        calls = (self._calls.call(member, method, incarnation, incarnation=incarnation) for member in members)
        answers = dict(zip(members, await asyncio.gather(*calls), strict=True))
        return None if any(answer is None for answer in answers.values()) else answers

    async def _await_filled(self, member: str, command: c.Fill | c.Replay, method: str, *asked: Any, load: str = "") -> None:
        incarnation = command.incarnation
        digests = await self._calls.call(member, method, *asked, incarnation=incarnation, load=load)
        if digests is not None:
            stage = stage_of(command.world.index(member), self._spec.rules.stages)
            self._tell(m.Filled(member=member, incarnation=incarnation, digests=digests, stage=stage))

    async def _sleep(self, member: str, asleep: bool, at_once: bool) -> None:
        """A sleeper is spoken for by one of the others. Of who is to sleep they hear first, so that none of them wakes it for
        what was asked before; of who is to wake they hear last, or it would then say itself that it sleeps on."""

        async def itself() -> None:
            await self._ask(member, "sleep", asleep, at_once)

        async def others() -> None:
            told = (self._calls.hint(one, "speak_for", member, asleep) for one in self._health.active())
            with suppress(TimeoutError):  # who does not answer is looked after elsewhere
                await asyncio.wait_for(asyncio.gather(*told), HINT_SECONDS)

        async with self._sleeping[member]:
            for tell in (others, itself) if asleep else (itself, others):
                await tell()

    async def _checkpoint(self, member: str, incarnation: int) -> None:
        if await self._calls.call(member, "checkpoint", incarnation, incarnation=incarnation) is not None:
            self._tell(m.Checkpointed(member=member, incarnation=incarnation))

    async def _save(self, member: str, world: tuple[str, ...], incarnation: int) -> None:
        stages = self._spec.rules.stages
        file = "final.arrow" if stages == 1 else f"final-stage-{stage_of(world.index(member), stages)}.arrow"
        path = await self._calls.call(member, "save", str(self._spec.directory / file))
        if path is not None:
            self._tell(m.Saved(member=member, incarnation=incarnation, path=path))

    async def _kill(self, member: str) -> None:
        """Ray kills a process that does not answer, a frozen one too, after some seconds. Who is starting has to begin first
        (see `leftovers`)."""
        self._health.forget(member)
        watching = self._watching.pop(member, None)
        if member not in self._contacts.handles and not await self._was_left(member):
            self._contacts.vacate(member)
            return
        if watching is None:
            with suppress(ValueError, RayError, TimeoutError):  # there is none, or it has ended
                await asyncio.wait_for(asyncio.wrap_future(begun(self._contacts.handle(member)).future()), BEGIN_S)
        self._contacts.vacate(member)
        if watching is not None and self._contacts.line_ended(member):
            await asyncio.wait({watching}, timeout=CAUSE_SECONDS)  # killed meanwhile, that would be all that Ray knows
        if (line := self._contacts.lines.pop(member, None)) is not None:
            line.cancel()
        try:
            handle = self._contacts.handle(member)
        except ValueError:
            return
        ray.kill(handle)
        try:
            await asyncio.wait_for(asyncio.wrap_future(handle.ping.remote().future()), KILL_SECONDS)
        except (RayError, TimeoutError):
            self._contacts.handles.pop(member, None)

    async def _was_left(self, member: str) -> bool:
        """Whether a worker that this process never had to do with is one that its predecessor left. All are looked up at once:
        the machine names everybody who was ever lost, and to ask Ray for each of thousands takes seconds."""
        if self._left is None or self._left.done():
            self._left = asyncio.get_running_loop().create_task(asyncio.to_thread(named, self._spec.member_name("")))
        try:
            return self._spec.member_name(member) in await asyncio.shield(self._left)
        except RayError:
            return True  # perhaps

    async def _timer(self, timer: str, seconds: float, incarnation: int | None) -> None:
        await clock.run_for(seconds)
        self._tell(m.TimerFired(timer=timer, incarnation=incarnation))
