"""One run that is struck: training goes on in a thread, the main one watches it and strikes. Drills and campaigns share it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from raytrain_ft.chaos.faults import ChaosError, FailAt
from raytrain_ft.drill.faults import Planted
from raytrain_ft.drill.grounds import Ground
from raytrain_ft.drill.played import Played, Struck
from raytrain_ft.drill.schedule import Due, Schedule, View, spares_one
from raytrain_ft.drill.watch import ABORT_S, Watch
from raytrain_ft.errors import ConfigError, FTError
from raytrain_ft.policy.states import State
from raytrain_ft.result import Result
from raytrain_ft.scenario import Event
from raytrain_ft.signals import at_sighup, at_sigterm
from raytrain_ft.trainer import Trainer

POLL_S = 0.05
STALE_S = 1.0
"""An account of the run that is older than this is not acted upon."""
HANDS = {"kill": "kill", "freeze": "freeze", "slow_down": "slow"}
"""What the hand on a node does for an action on a process."""
AFTERWARDS = {"freeze": "thaw", "slow_down": "quicken"}
"""And what it does when that is over."""

TRAINS_ON = ("slow_down", "silence")
"""Actions after which who was struck still has the training state."""

Show = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]
Later = tuple[float, Callable[[], object], bool]
"""When something is to be done, what, and whether also if the run has ended before."""


class Rehearsal:
    """Plays one run.

    Args:
        trainer: whose `fit` is called; `planted` are the failures that it carries within.
        schedule: what strikes from outside. path: where the run's records will be.
        most: times that it is struck.
    """

    def __init__(
        self,
        ground: Ground,
        trainer: Trainer,
        path: Path,
        schedule: Schedule | None = None,
        planted: Sequence[Planted] = (),
        *,
        show: Show = lambda account: None,
        say: Say = lambda words: None,
        most: float = math.inf,
    ) -> None:
        self._ground = ground
        self._trainer = trainer
        self._schedule = schedule
        self._planted = list(planted)
        self._show, self._say, self._most = show, say, most
        self._watch = Watch(path.name, ground.clock)
        self._view = View()
        self._began: float | None = None
        self._struck_at = 0.0
        self._waiting: list[Due] = []
        self._later: list[Later] = []
        self._known: dict[tuple[str, int], str] = {}  # all members that there ever were, by their node and process
        self._gone: set[str] = set()  # members that were struck and are not back, whether or not it is noticed
        self._dropped: set[int] = set()  # events at random that came when they could not strike
        self._drained: list[tuple[Due, str]] = []  # nodes that have notice, and are still to be taken
        self._seen = 0.0
        self.played = Played(path=path)

    def play(self) -> Played:
        """Trains to the end, and strikes meanwhile. On the main thread: only there can Ray add nodes to a laptop cluster."""
        ended = signal.default_int_handler  # as Ctrl-C: the run is ended, and nothing stays frozen
        with at_sigterm(ended), at_sighup(ended), ThreadPoolExecutor(1) as pool:
            training = pool.submit(self._trainer.fit)
            try:
                self._strike_until(training)
            except FTError as error:  # the drill breaks off; what it has struck until then is still to be told
                self.played.error = error
            finally:
                self._end_all()  # first: a frozen supervisor cannot be asked for anything
                deadline = time.monotonic() + ABORT_S
                while not training.done() and time.monotonic() < deadline:  # Ctrl-C, or an error here
                    self._watch.abort("the drill was interrupted")
                    wait([training], timeout=POLL_S)
            try:
                self.played.result = training.result()
            except FTError as error:
                self.played.error = self.played.error or error
        self._find_markers()
        self._finish()
        return self.played

    def _strike_until(self, training: Future[Result]) -> None:
        while not training.done():
            if self._watch.look(POLL_S):
                assert self._watch.account is not None
                self._view = View.of(self._watch.account)
                self._known |= {(self._view.nodes.get(one, ""), pid): one for one, pid in self._view.pids.items()}
                self._seen = time.monotonic()
                self._show(self._watch.account)
                self._ground.prepare(self._view.hosts())
            now = time.monotonic()
            if self._began is None and self._view.state == State.RUNNING:
                self._began = now
            self._find_markers()
            for entry in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove(entry)
                entry[1]()
            if self._schedule is not None and self._began is not None and len(self.played.struck) < self._most:
                self._waiting += self._schedule.due(now - self._began, self._view.step)
                impossible = [due for due in self._waiting if not self._strike(due)]
                self._waiting = [due for due in impossible if due.persistent]
                dropped = [due.event for due in impossible if not due.persistent]
                self.played.dropped += len(dropped)
                self._dropped.update(dropped)

    def _finish(self) -> None:
        """Nothing stays frozen or slow; nodes need no longer come or go."""
        self.played.offsets = [offset - self._watch.zero for offset in self._watch.offsets.values()]
        left = [due.event for due in (*self._waiting, *(self._schedule.left if self._schedule is not None else ()))]
        struck = {struck.event for struck in self.played.struck}
        left += self._dropped - struck  # came, and never struck
        if self._schedule is not None:
            self.played.absent = sorted(self._schedule.at_random - struck - self._dropped)
        self.played.missed = sorted({*self.played.missed, *left, *(planted.event for planted in self._planted)})
        self._struck_at = self._ground.clock()
        for due, node in self._drained:  # the notice was given, and whoever it was for may have left in time
            self._note(due, (), node, "the run ended before this node was to be taken")
        self._end_all()

    def _end_all(self) -> None:
        ends, self._later = [end for _, end, always in self._later if always], []
        for end in ends:
            end()

    # ---------------------------------------------------------------- strikes from outside

    def _strike(self, due: Due) -> bool:
        """Carries out what is due; False if that is not possible now."""
        self._struck_at = self._ground.clock()
        if due.back:
            note = ""
            for _ in range(due.nodes):
                note = self._ground.add_node()
            self._note(due, note=note)
            return True
        if not self._view.ready or self._schedule is None or time.monotonic() - self._seen > STALE_S:
            return False
        nodes = due.what.action in ("kill_node", "drain", "unplug")
        struck = self._strike_nodes(due, self._schedule) if nodes else self._strike_members(due, self._schedule)
        if struck:
            self._schedule.struck(due.event)
        return struck

    def _strike_members(self, due: Due, schedule: Schedule) -> bool:
        event, view = due.what, self._view
        assert event.who is not None
        if event.who.role == "supervisor":
            return self._strike_supervisor(due)
        members = schedule.members(event.who, view)
        if not members or (not due.persistent and not spares_one(members, (), view, self._gone)):
            return False
        done = [member for member in members if self._touch(event, view.nodes.get(member), view.pids.get(member))]
        if done:
            self._note(due, done)
            self._note_missing(due, len(done), len(members))
        return bool(done)

    def _touch(self, event: Event, node: str | None, pid: int | None) -> bool:
        if node is None or pid is None:
            return False
        lasts, end = self._end_of(event, node, pid)
        how = (event.factor, lasts if event.action == "freeze" else None)
        more = [number for number in how if number is not None]
        return self._strike_for(lasts, lambda: self._ground.hand(node, HANDS[event.action], pid, *more), end)

    def _strike_supervisor(self, due: Due) -> bool:
        if not self._touch(due.what, self._node_of("supervisor") or "", self._view.supervisor):
            return False
        self._note(due, ["supervisor"])
        return True

    def _strike_nodes(self, due: Due, schedule: Schedule) -> bool:
        view = self._view
        hosts = schedule.hosts(due, view)
        if not hosts or (not due.persistent and not spares_one((), hosts, view, self._gone)):
            return False
        done = 0
        for node in hosts:
            members = [member for member in view.pids if view.nodes.get(member) == node]
            try:
                if not self._take_down(node, due):
                    continue
            except (ConfigError, ChaosError) as error:
                self._note_spared(due, node, error)
            else:
                self._note(due, members, node)
            done += 1
        if done:
            self._note_missing(due, done, due.nodes if due.what.who is None else len(hosts))
        return bool(done)

    def _note_missing(self, due: Due, done: int, meant: int) -> None:
        """An event that struck fewer than it was to has not come about as it was written."""
        if done < meant:
            self.played.missed.append(due.event)

    def _take_down(self, node: str, due: Due) -> bool:
        """Begins a node's absence, and sees to its end; False if the node is gone already."""
        ground, event, lasts = self._ground, due.what, due.what.lasts
        if event.action == "unplug":
            return self._strike_for(lasts, lambda: self._unplug(node), lambda: self._plug(node))
        if event.action == "drain":
            assert event.notice is not None
            ground.drain(node, event.notice)
            self._drained.append((due, node))
            self._after(event.notice, lambda: self._kill_drained(node, due))
        elif not ground.kill_node(node):
            return False
        if lasts is not None:
            self._after(lasts + (event.notice or 0.0), ground.add_node)
        return True

    def _unplug(self, node: str) -> bool:
        self._ground.unplug(node)
        return True

    def _plug(self, node: str) -> None:
        self._ground.plug(node)
        self._gone.difference_update(member for member, at in self._view.nodes.items() if at == node)

    def _kill_drained(self, node: str, due: Due) -> None:
        self._drained.remove((due, node))
        try:
            if not self._ground.kill_node(node) and self._ground.lives(node):  # else it has ended by itself: nobody was left
                raise ChaosError(f"node {node} is still there")
        except (ConfigError, ChaosError) as error:  # somebody came while it had notice, or its hand did nothing
            self._struck_at = self._ground.clock()
            self._note_spared(due, node, error)

    def _note_spared(self, due: Due, node: str, error: Exception) -> None:
        self._note(due, (), node, f"{due.what.action} was not carried out: {error}")
        self.played.missed.append(due.event)

    def _end_of(self, event: Event, node: str, pid: int) -> tuple[float | None, Callable[[], object]]:
        """After how long what is done to a process is over, if ever, and what ends it."""
        lasts = event.lasts if event.action in AFTERWARDS else None
        return lasts, lambda: self._release(node, AFTERWARDS[event.action], pid)

    def _release(self, node: str, how: str, pid: int) -> None:
        view = self._view
        if self._ground.hand(node, how, pid):
            self._gone -= {one for one, known in view.pids.items() if (view.nodes.get(one), known) == (node, pid)}

    def _strike_for(self, lasts: float | None, strike: Callable[[], bool], end: Callable[[], object]) -> bool:
        """Strikes, and sees to the end of it, also if Ctrl-C comes before the strike has returned. False if there was none."""
        if lasts is None:
            return strike()
        interrupted = self._after(math.inf, end, always=True)
        done = strike()
        if done:
            self._after(lasts, end, always=True)
        self._later.remove(interrupted)
        return done

    def _after(self, seconds: float, do: Callable[[], object], *, always: bool = False) -> Later:
        later = time.monotonic() + seconds, do, always
        self._later.append(later)
        return later

    def _note(self, due: Due, members: Sequence[str] = (), node: str = "", note: str = "") -> None:
        self._add(due.event, due.what.action, self._struck_at, members, node, note)

    def _add(self, event: int, action: str, clock: float, members: Sequence[str], node: str = "", note: str = "") -> None:
        at = clock - self._watch.zero
        struck = Struck(event=event, action=action, at=at, step=self._view.step, members=tuple(members), node=node, note=note)
        self.played.struck.append(struck)
        self._gone |= set(members) if action not in TRAINS_ON else set()
        who = ", ".join(members) or (f"node {node[:8]}" if node else "")
        self._say(f"  {at:8.2f} s  step {struck.step}  {action} {who} {note}".rstrip())

    # ---------------------------------------------------------------- strikes from within

    def _find_markers(self) -> None:
        """Failures at exact points leave a marker when they strike."""
        directory = self.played.path / "faults"
        for planted in list(self._planted):
            marker = _read_marker(directory, planted.fault)
            if marker is None:
                continue
            self._planted.remove(planted)
            pid, node = int(marker[1]), marker[3]
            member = "supervisor" if planted.fault.role == "supervisor" else self._known.get((node, pid))
            action, lasts = planted.what.action, planted.what.lasts
            self._add(planted.event, action, self._ground.struck_at(marker), [member] if member else ())
            if action == "kill_node" and lasts is not None:
                self._after(lasts, self._ground.add_node)
            else:
                lasts, end = self._end_of(planted.what, node, pid)
                if lasts is not None:
                    self._after(lasts, end, always=True)
                    self._ground.hand(node, "wake_later", pid, lasts)  # it has frozen itself

    def _node_of(self, member: str | None) -> str | None:
        account = self._watch.account or {}
        return account.get("node") if member == "supervisor" else self._view.nodes.get(member or "")


def _read_marker(directory: Path, fault: FailAt) -> list[str] | None:
    try:
        found = (directory / fault.name).read_text().split()
    except FileNotFoundError:
        return None
    return found if len(found) == 4 else None  # empty: it waits for others who are to fail with it
