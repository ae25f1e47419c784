"""Noticing: late heartbeats, silence, hangs, standstill -> events. `tidings` is what heartbeats tell; `nodes` looks at nodes.

Suspicion is cheap (a late beat, a slow step) and is confirmed before it counts: a silent worker is asked directly, with a short
deadline. Ray by itself tells of a process 10 ms after the kernel has ended it, but of a killed node in seconds, and of a frozen
or unplugged node only after a minute. `lifeline` and `node_links` tell of killed processes and nodes at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import RunState
from raytrain_ft.policy.states import TRAINING, State
from raytrain_ft.runtime import standstill
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.heartbeat import beat_interval
from raytrain_ft.runtime.nodes import FORGIVE_DEAD_S, FORGIVE_SILENT_S, Nodes
from raytrain_ft.runtime.notice_board import NoticeBoard
from raytrain_ft.runtime.notices.notice import Notice
from raytrain_ft.runtime.spec import Beat, RunSpec
from raytrain_ft.runtime.tidings import Tidings

CHECK_INTERVAL_S = 0.1
"""Often enough to notice that this process itself was held up, on which false alarms depend: looking only when somebody may be
late gave workers up in half of the starts of a pipeline on a busy machine. But each look wakes it, which is most of what this
costs."""
CHECKED_PER_S = 320
"""Workers that are looked at in a second, each as often as the others."""
HANG_CHECK_INTERVAL_S = 0.5
HANG_CHECK_SHARE = 0.02
"""Of what is a hang: how late it may be seen."""
HOLD_UPS = 1000
"""So many of the last ones are remembered, which is minutes on a machine that is always too busy."""
PATIENCE_WITH_ALL = 10
"""Times the usual patience for an answer when everybody is silent at once."""
WAITING = "wait"
"""The place where a worker waits for others: who is elsewhere holds them up."""
REPLAYED = frozenset({"data", "forward", "backward_pass", "weight_pass", "update"})
"""The places of a step where a replay computes. It has none of a recovery's own, where a worker may wait for its turn."""
STORING = "checkpoint"
"""The place where a worker waits for storage. The `Checkpointer` gives up by itself, after minutes if checkpoints take minutes,
and training then goes on without the checkpoint: no step's time says how long that may be."""
NODE_DIED = "its node died (the raylet closed its connection and refuses another)"
STORING_S = 3600.0
"""Who is there for so long hangs nevertheless."""


class Health:
    """What is known of every worker's health.

    Attributes:
        pace: seconds between two heartbeats of a worker, which each of them is told in answer to one.
        tidings: what they tell of their training.
    """

    def __init__(self, spec: RunSpec, tell: Callable[[m.Event], None], now: Callable[[], float], contacts: Contacts) -> None:
        self._spec = spec
        self._tell = tell
        self._contacts = contacts
        self._heard: dict[str, float] = {}
        self._beats: dict[str, Beat] = {}
        self.tidings = Tidings(spec, tell)
        self._board = NoticeBoard(self._tell_notice, now)
        self._probing: set[str] = set()
        self._members: dict[str, MemberState] = {}
        self.pace = spec.heartbeat_interval
        self.nodes = Nodes(spec, tell, self._board, contacts, self._died)
        self.state = State.INITIALIZING
        self.incarnation = 0
        self.step = 0
        self.reached = 0  # the furthest step that any worker told of, since a world began to train
        self._counts_from = 0  # the incarnation of that world
        self._longest = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held_up: deque[tuple[float, float]] = deque(maxlen=HOLD_UPS)  # of this process: when it went on, after how long
        self._fruitless = 0  # recoveries in a row
        self._started_on: dict[str, str] = {}  # the nodes of those who were started before the supervisor's own restart
        self._stood_still = -1  # the latest incarnation in which everybody waited
        self._resumed = time.monotonic()  # since then all active workers should train

    def follow(self, machine: RunState) -> None:
        """Keeps what decides about noticing in line with the machine."""
        self._members = dict(machine.members)
        self._set_pace()
        if machine.state == State.RESUME and self.state != State.RESUME:
            self.reached, self._counts_from, self._resumed = 0, machine.incarnation, time.monotonic()
        self.state, self.incarnation = machine.state, machine.incarnation
        self.step, self._longest, self._fruitless = machine.step, machine.longest_step, machine.fruitless

    def recall(self, event: m.Event) -> None:
        """What was recorded before the supervisor's own restart is not recorded again."""
        self.tidings.recall(event)
        if isinstance(event, m.Noticed):
            self._board.recall(event, self._started_on.get(event.member))
        elif isinstance(event, m.WorkerStarted):
            self._started_on[event.member] = event.node

    def expect(self, member: str) -> None:
        """From now on this worker must beat."""
        self._heard[member] = time.monotonic()
        self._set_pace()

    def forget(self, member: str) -> None:
        """This worker is gone."""
        for known in (self._heard, self._beats):
            known.pop(member, None)
        self.tidings.forget(member)
        self._board.forget(member)

    def silence(self, member: str) -> float | None:
        """Seconds since this worker was heard last; None if it never was."""
        heard = self._heard.get(member)
        return None if heard is None else time.monotonic() - heard

    def _set_pace(self) -> None:
        """Those who are being set up beat as well. Not with every beat, of which it would be a quarter of the cost."""
        self.pace = beat_interval(self._spec.heartbeat_interval, max(len(self._heard), len(self._members)))

    @property
    def _timeout(self) -> float:
        """Seconds of silence after which a worker is asked: as many heartbeats may fail to come as with few workers."""
        return self._spec.heartbeat_timeout * self.pace / self._spec.heartbeat_interval

    @property
    def _patience(self) -> float:
        """Seconds that a worker has to answer, if only by a beat: as many of these come meanwhile as with few workers."""
        return self._spec.probe_timeout * self.pace / self._spec.heartbeat_interval

    def active(self) -> list[str]:
        """Who trains, as far as the machine knows."""
        return [member for member, what in self._members.items() if what == MemberState.ACTIVE]

    def older(self) -> list[str]:
        """Who has been ready before, as far as the machine knows."""
        return [member for member, what in self._members.items() if what != MemberState.STARTING]

    def is_starting(self, member: str) -> bool:
        """Whether the machine still waits for this worker to become ready."""
        return self._members.get(member) == MemberState.STARTING

    # ---------------------------------------------------------------- heartbeats

    def heard(self, beat: Beat) -> None:
        """Takes a heartbeat: what is new in it becomes events, once."""
        if beat.member in self._heard:
            self._heard[beat.member] = time.monotonic()
        self._beats[beat.member] = beat
        if beat.status == "running" and beat.incarnation >= self._counts_from:
            self.reached = max(self.reached, beat.step)
        self.tidings.tell_of_training(beat)
        self.nodes.tells_time(self._contacts.node_of(beat.member), beat.clock)
        for notice in beat.notices:
            self.noticed(beat.member, notice)
        self.tidings.tell_status(beat)

    # ---------------------------------------------------------------- notices

    def noticed(self, member: str, notice: Notice) -> None:
        """This worker will be taken away."""
        self._board.noticed(member, self._contacts.node_of(member), notice)

    def _tell_notice(self, event: m.Event) -> None:
        self.nodes.recount()  # nothing is placed where it goes
        self._tell(event)

    # ---------------------------------------------------------------- silence

    async def watch_cluster(self) -> None:
        """Looks at everything that changes by itself, for ever. If one part fails, all do, and whoever waits sees it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.nodes.watch(lambda: list(self._members)))
            group.create_task(self._watch_workers())

    async def _watch_workers(self) -> None:
        before = looked = time.monotonic()
        while True:
            await asyncio.sleep(self._check_interval)
            now = time.monotonic()
            if now - before > self._timeout / 2:
                # This process itself was held up (a suspended machine, a busy one): silence proves nothing, and no hang either.
                self._held_up.append((now, now - before))
                for member in self._heard:
                    self._heard[member] = max(self._heard[member], now - self._timeout / 2)
            before = now
            late = now - self._timeout
            if min(self._heard.values(), default=now) < late:
                self._probe(member for member, heard in self._heard.items() if heard < late)
            if now - looked > max(HANG_CHECK_INTERVAL_S, HANG_CHECK_SHARE * self._hang_limit):
                looked = now
                self._find_hang()

    @property
    def _check_interval(self) -> float:
        """Seconds between two looks: with many workers fewer of them, as they beat less often."""
        return min(max(CHECK_INTERVAL_S, len(self._heard) / CHECKED_PER_S), self._timeout / 4)

    @property
    def _hang_limit(self) -> float:
        """Seconds in one place that are a hang."""
        return max(self._spec.rules.hang_timeout, 10 * self._longest)

    def alert(self, members: Iterable[str]) -> None:
        """Something happened: asks all these workers directly whether they live, and after a fruitless recovery, also whether
        they reach each other."""
        asked = list(members)
        self._probe(asked)
        if self._fruitless > 1:
            self._spawn(self._leave_out_cut(asked))

    def _probe(self, members: Iterable[str]) -> None:
        for member in [name for name in members if name not in self._probing and name in self._heard]:
            self._probing.add(member)
            self._spawn(self._ask(member))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, member: str) -> None:
        """A direct question with a short deadline: the confirmation of a suspicion. A beat meanwhile is an answer, too."""
        asked = time.monotonic()
        silent = asked - self._heard.get(member, asked)
        patience = self._patience * (PATIENCE_WITH_ALL if self._all_silent() else 1)
        try:
            ping = self._contacts.handle(member).ping.remote()
            await asyncio.wait_for(asyncio.wrap_future(ping.future()), patience)
            if member in self._heard:
                self._heard[member] = time.monotonic()
        except ActorDiedError:
            pass  # Ray knows already, and the call that watches this worker tells it with its cause
        except (RayError, ValueError, TimeoutError) as error:
            if isinstance(error, ActorUnavailableError):
                await asyncio.sleep(patience)  # a connection broke, at once: a beat comes over another one
            if self._heard.get(member, math.inf) <= asked and not await self._is_cut_off():
                node = self._contacts.node_of(member)
                if node is not None and not self._others_heard_on(node, member):
                    # perhaps all of it is frozen or unplugged, which Ray learns after a minute
                    self.nodes.avoid(node, FORGIVE_SILENT_S)
                    self.nodes.recount()
                cause = f"silent for {silent + patience:.1f} s (frozen, or cut off)"
                silent_s = self.silence(member)
                self._heard.pop(member, None)
                self._tell(m.WorkerLost(member=member, cause=cause, noticed_by="heartbeat", silent_s=silent_s))
        finally:
            self._probing.discard(member)

    def _others_heard_on(self, node: str, member: str) -> bool:
        late = time.monotonic() - self._timeout
        return any(at >= late for other, at in self._heard.items() if other != member and self._contacts.node_of(other) == node)

    def _all_silent(self) -> bool:
        """Whether nobody at all is heard, be it one or many: then it is rather this process, or the machine, that is held up;
        and if they were lost, nobody could go on at once."""
        late = time.monotonic() - self._timeout
        return all(heard < late for heard in self._heard.values())

    async def _is_cut_off(self) -> bool:
        """Whether it is rather this process that nobody reaches: then nobody is given up, while their leases last."""
        now = time.monotonic()
        silent = now - max(self._heard.values(), default=now)
        late = silent > self._timeout
        return silent < self._spec.lease and await self.nodes.links.are_cut(silent if late else 0.0)

    # ---------------------------------------------------------------- hangs

    def _find_hang(self) -> None:
        """A worker that lives and beats, but has been in the same place far longer than any step took."""
        if self.state == State.REBUILD:
            self._find_hang_in_replay()
        if self.state not in TRAINING:
            return
        now, limit = time.monotonic(), self._hang_limit
        self._find_idle(limit)
        waiting: list[str] = []
        for member, beat in list(self._beats.items()):
            silent = now - self._heard.get(member, now)
            age = beat.since + max(0.0, silent - self.pace)  # until its next beat is due, it may be elsewhere by now
            if age <= limit or self._members.get(member) != MemberState.ACTIVE or beat.status != "running":
                continue
            age -= sum(seconds for ended, seconds in self._held_up if ended > now - age)
            longest = max(limit, STORING_S) if beat.where == STORING else limit
            if age <= longest or beat.incarnation != self.incarnation or silent > self._timeout:
                continue  # a silent worker may have moved on since: silence is judged elsewhere
            if beat.where == WAITING:
                waiting.append(member)
            else:
                cause = f"hung for {age:.0f} s in {beat.where!r} of step {beat.step}"
                self._beats.pop(member)
                self._tell(m.WorkerLost(member=member, cause=cause, noticed_by="step time", silent_s=age))
        if not waiting:
            return
        active = self.active()
        done = [member for member in active if member in self._beats and self._beats[member].status in ("completed", "stopped")]
        if len(waiting) == len(active) - len(done) and self._stood_still < self.incarnation:
            self._stood_still = self.incarnation
            self._spawn(self._break_standstill(active))

    def _find_hang_in_replay(self) -> None:
        """The same of a replay, which is made of steps; whoever waits there has a deadline, or is fenced."""
        now, limit = time.monotonic(), self._hang_limit
        for member, beat in list(self._beats.items()):
            silent = now - self._heard.get(member, now)
            age = beat.since + max(0.0, silent - self.pace)
            age -= sum(seconds for ended, seconds in self._held_up if ended > now - age)
            if beat.where in REPLAYED and beat.status == "idle" and age > limit and silent <= self._timeout:
                cause = f"hung for {age:.0f} s in {beat.where!r} of step {beat.step}, which it replays"
                self._beats.pop(member)
                self._tell(m.WorkerLost(member=member, cause=cause, noticed_by="step time", silent_s=age))

    def _find_idle(self, limit: float) -> None:
        """Who still says that it does nothing, long after all were told to train, was not reached by that, and others wait."""
        held_up = sum(seconds for ended, seconds in self._held_up if ended > self._resumed)
        for member, beat in self._beats.items():
            idle = self._heard.get(member, 0.0) - self._resumed - held_up
            if beat.status == "idle" and self._members.get(member) == MemberState.ACTIVE and idle > limit:
                reason = f"{member} was told to train {idle:.0f} s ago and has not begun to"
                self._tell(m.Suspected(incarnation=self.incarnation, reason=reason, noticed_by="step time"))
                return

    async def _break_standstill(self, active: list[str]) -> None:
        """Each waits for another: some connection is gone, or somebody hangs where one seems to wait."""
        incarnation = self.incarnation
        if not await self._leave_out_cut(active):
            reason = "everybody waits for somebody else"
            self._tell(m.Suspected(incarnation=incarnation, reason=reason, noticed_by="step time"))

    async def _leave_out_cut(self, members: list[str]) -> bool:
        """Gives up who cannot reach others; whether there was anybody."""
        found = await standstill.find_cut(self._contacts, members, self.nodes.links.nodes)
        for member, cause in found.items():
            if member in self._heard and (node := self._contacts.node_of(member)) is not None:
                self.nodes.avoid(node, FORGIVE_DEAD_S)
                self.nodes.recount()
                self._tell(m.WorkerLost(member=member, cause=cause, noticed_by="peers"))
        return bool(found)

    # ---------------------------------------------------------------- nodes

    def _died(self, node: str) -> None:
        """A node's raylet is gone, and its workers with it or in a moment."""
        self.nodes.avoid(node, FORGIVE_DEAD_S)
        self.nodes.recount()
        for member in [member for member in self._members if self._contacts.node_of(member) == node]:
            silent_s = self.silence(member)
            self.forget(member)
            self._tell(m.WorkerLost(member=member, cause=NODE_DIED, noticed_by="raylet", silent_s=silent_s))
        for member in self._contacts.ended_on(node):
            self._tell(m.CauseFound(lost=member, cause=NODE_DIED))
