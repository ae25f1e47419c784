"""Silence and standstill, without a cluster: what is told, and what is forgiven."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.detection import false_alarms
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.states import State
from raytrain_ft.runtime import health as health_module
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.health import NODE_DIED, Health
from raytrain_ft.runtime.nodes import Nodes
from raytrain_ft.runtime.notices.notice import Notice
from raytrain_ft.runtime.spec import Beat

TIMES = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.2, "probe_timeout": 0.1, "lease": 5.0}
SPEC: Any = SimpleNamespace(options={"num_cpus": 1}, rules=SimpleNamespace(hang_timeout=0.3), **TIMES)
PATIENT: Any = SimpleNamespace(**vars(SPEC) | {"heartbeat_timeout": 10.0, "probe_timeout": 0.5, "lease": 60.0})
"""However long this process is held up, nobody has been silent for long."""


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Mute(Contacts):
    """Workers that answer no question."""

    def __init__(self) -> None:
        super().__init__(SPEC)

    def handle(self, member: str) -> Any:
        call = SimpleNamespace(future=Future)
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: call), unreached=SimpleNamespace(remote=lambda _: call))

    def node_of(self, member: str) -> str:
        return f"node-of-{member}"


def beat(member: str, **about: Any) -> Beat:
    fields = {"incarnation": 1, "rank": 0, "status": "idle", "detail": "", "kind": "", "step": 0, "where": "", "since": 0.0}
    return Beat(member=member, **({"commits": ()} | fields | about))


def told(*beats_of: str) -> list[m.Event]:
    """What is told when w0 is asked and does not answer, while these workers beat."""
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Mute())
        for member in ("w0", "w1"):
            health.expect(member)
        health.alert(["w0"])
        await asyncio.sleep(0)  # it is asked
        for member in beats_of:
            health.heard(beat(member))
        await until(lambda: not health._probing)

    asyncio.run(run())
    return events


def test_who_answers_nothing_and_does_not_beat_is_lost() -> None:
    (lost,) = told("w1")
    assert isinstance(lost, m.WorkerLost)
    assert (lost.member, lost.noticed_by) == ("w0", "heartbeat")


def test_a_beat_is_an_answer() -> None:
    assert told("w0", "w1") == []


def test_the_only_one_gets_the_patience_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all others do that are silent together: nothing would go on without it, so a busy machine must not cost it."""
    monkeypatch.setattr(health_module, "PATIENCE_WITH_ALL", 12)

    async def lost_after(members: tuple[str, ...]) -> float:
        events: list[m.Event] = []
        health = Health(PATIENT, events.append, time.monotonic, Mute())
        for member in members:
            health.expect(member)
        health._heard["w0"] -= 2 * health._timeout
        asked = time.monotonic()
        health.alert(["w0"])
        await until(lambda: bool(events))
        return time.monotonic() - asked

    one_of_two, the_only_one = asyncio.run(lost_after(("w0", "w1"))), asyncio.run(lost_after(("w0",)))
    assert the_only_one > 6 * PATIENT.probe_timeout > one_of_two


@pytest.mark.parametrize("why", ["notice", "silence", "cut"])
def test_what_room_there_is_without_a_node_is_told_before_why_it_is_avoided(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a replacement is started for which there is no place, and looks for one in vain for ten seconds."""
    events: list[m.Event] = []

    async def cut(*_: object) -> dict[str, str]:
        return {"w0": "w1 cannot reach it"}

    def room(self: Nodes, nodes: list[dict[str, Any]]) -> None:
        events.append(m.CapacityChanged(slots=len(nodes) - len(self.avoided)))

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Mute())
        health.nodes.links.nodes = [{"NodeID": f"node-of-{member}"} for member in ("w0", "w1")]
        health.nodes._counted = m.CapacityChanged(slots=2)
        for member in ("w0", "w1"):
            health.expect(member)
        if why == "notice":
            health.noticed("w0", Notice(30.0, "aws spot", "terminate"))
        elif why == "silence":
            health.alert(["w0"])
        else:
            await health._leave_out_cut(["w0", "w1"])
        await until(lambda: len(events) >= 2)

    monkeypatch.setattr(Nodes, "count", room)
    monkeypatch.setattr(health_module.standstill, "find_cut", cut)
    asyncio.run(run())
    first, second = events
    assert first == m.CapacityChanged(slots=1)
    assert isinstance(second, m.Noticed if why == "notice" else m.WorkerLost)


def test_who_finds_out_in_its_first_step_that_it_replayed_something_else_says_so_once() -> None:
    events: list[m.Event] = []
    health = Health(PATIENT, events.append, lambda: 0.0, Mute())
    for _ in range(2):
        health.heard(beat("w0", status="diverged", detail="it is another than before"))
    assert events == [m.LogMissing(member="w0", incarnation=1, reason="it is another than before", diverged=True)]


def test_a_log_may_fail_twice_in_a_step() -> None:
    """It was revived between the two; and what a beat tells again, because the first was not acknowledged, is told once."""
    events: list[m.Event] = []
    health = Health(PATIENT, events.append, time.monotonic, Mute())
    for number in (1, 2, 2):
        about = {"incarnation": 1, "step": 3, "reason": "disk full", "number": number}
        health.heard(beat("w0", notes=(("LogFailed", about),)))
    assert [event.number for event in events if isinstance(event, m.LogFailed)] == [1, 2]


def test_samples_that_were_lost_are_told_though_the_supervisor_fell_before_it_said_so() -> None:
    """Its log has that the step was committed, and not yet what it went without: the worker tells both again."""
    events: list[m.Event] = []
    health = Health(PATIENT, events.append, time.monotonic, Mute())
    where = {"rank": 0, "world_size": 1, "epoch": 0, "start": 0, "ids_digest": "", "loss": 1.0, "longest_s": 0.1}
    steps = {"incarnation": 1, "first_step": 3, "stop_step": 4, **where}
    lost = {"step": 3, "epoch": 0, "start": 0, "stop": 8, "why": "the loss of step 3 is nan"}
    health.recall(m.StepsCommitted(at=1.0, member="w0", **steps))  # pyright: ignore[reportArgumentType]
    assert health.tidings.loss == 1.0, "perhaps nobody tells of another one before the end"
    for _ in range(2):
        health.heard(beat("w0", status="running", commits=({**steps, "lost": (lost,)},)))
    assert [type(event) for event in events] == [m.SamplesLost]


@pytest.mark.parametrize(("workers", "seconds", "asked"), [(4, 20.0, True), (100, 1.0, False)])
def test_of_many_workers_each_may_be_silent_for_longer(workers: int, seconds: float, asked: bool) -> None:
    """A hundred beat every half second here, so the silence after which one of four is asked says nothing."""
    questions: list[str] = []
    spec: Any = SimpleNamespace(**vars(SPEC) | {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5})

    class Asked(Mute):
        def handle(self, member: str) -> Any:
            questions.append(member)
            return super().handle(member)

    async def run() -> None:
        health = Health(spec, lambda _: None, time.monotonic, Asked())
        for number in range(workers):
            health.expect(f"w{number}")
        watch = asyncio.create_task(health._watch_workers())
        deadline = time.monotonic() + seconds
        while not questions and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        watch.cancel()

    asyncio.run(run())
    assert bool(questions) == asked


class Split(Mute):
    """Workers that say whom they do not reach."""

    def __init__(self, unreached: dict[str, list[str]]) -> None:
        super().__init__()
        self.unreached = unreached

    def handle(self, member: str) -> Any:
        answer: Future[list[str]] = Future()
        answer.set_result(self.unreached.get(member, []))
        call = SimpleNamespace(future=lambda: answer)
        return SimpleNamespace(unreached=SimpleNamespace(remote=lambda _: call))


def standstill(unreached: dict[str, list[str]], places: dict[str, str], silent: float = 0.0) -> list[m.Event]:
    """What is told of a world whose workers have been at these places for longer than they may, `silent` seconds after their
    beats."""
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Split(unreached))
        health.nodes.links.nodes = [{"NodeID": f"node-of-{member}"} for member in places]
        health.state, health.incarnation = State.RUNNING, 1
        health._members = dict.fromkeys(places, MemberState.ACTIVE)
        for member, where in places.items():
            health.expect(member)
            health.heard(beat(member, status="running", where=where, since=1.0))
            health._heard[member] -= silent
        for _ in range(3):
            health._find_hang()
            await until(lambda: not health._tasks)

    asyncio.run(run())
    return events


def test_a_machine_that_was_suspended_hangs_nowhere() -> None:
    """All processes of a host are stopped and go on: what the workers then say of their places holds the pause."""
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(SPEC, events.append, time.monotonic, Split({}))
        health.state, health.incarnation = State.RUNNING, 1
        health._members = dict.fromkeys(("w0", "w1"), MemberState.ACTIVE)
        for member in health._members:
            health.expect(member)
            health.heard(beat(member, status="running", where="forward", since=0.1))
        watch = asyncio.create_task(health._watch_workers())
        await asyncio.sleep(0.15)
        time.sleep(1.5)  # all processes of this machine, as it were
        health.heard(beat("w0", status="running", where="forward", since=1.6))
        health.heard(beat("w1", status="running", where="forward", since=2.5))
        await asyncio.sleep(0.02)
        health._find_hang()
        watch.cancel()

    asyncio.run(run())
    (lost,) = [event for event in events if isinstance(event, m.WorkerLost)]
    assert (lost.member, lost.noticed_by) == ("w1", "step time"), "that one had been there for long before"


@pytest.mark.parametrize(
    ("where", "state", "lost"),
    [
        ("forward", State.REBUILD, True),
        ("data", State.REBUILD, True),
        ("wait", State.REBUILD, False),
        ("reconcile", State.REBUILD, False),
        ("replayed", State.REBUILD, False),
        ("forward", State.REPLACE, False),
    ],
)
def test_who_hangs_in_a_replay_is_found_as_in_a_step(where: str, state: State, lost: bool) -> None:
    """Not who builds or loads, which may take any time, nor who waits for others, or is done."""
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Mute())
        health.state, health.incarnation = state, 2
        health._members = dict.fromkeys(("w0", "w1"), MemberState.ACTIVE)
        for member, since in (("w0", 0.2), ("w1", 0.5)):
            health.expect(member)
            health.heard(beat(member, where=where, step=7, since=since))
        health._find_hang()

    asyncio.run(run())
    found = [(event.member, event.cause) for event in events if isinstance(event, m.WorkerLost)]
    assert found == ([("w1", f"hung for 0 s in {where!r} of step 7, which it replays")] if lost else [])


def test_of_what_a_step_lost_each_sample_is_listed_once() -> None:
    """Who was the first to tell is lost, and with it more of the step; or the record of who had not begun it comes late."""
    events: list[m.Event] = []
    about: dict[str, Any] = {"step": 7, "epoch": 0, "why": "a worker was lost", "returned": False}

    def said(*ranges: tuple[int, int]) -> dict[str, Any]:
        return {"incarnation": 1, "lost": [about | {"start": start, "stop": stop} for start, stop in ranges]}

    def listed() -> list[tuple[int, int]]:
        return [(event.start, event.stop) for event in events if isinstance(event, m.SamplesLost)]

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Mute())
        health.tidings.samples_lost(said((16, 32)))
        health.tidings.samples_lost(said((16, 32)))
        health.tidings.samples_lost(said((0, 48)))
        assert listed() == [(16, 32), (0, 16), (32, 48)]
        health.heard(beat("w1", notes=(("SamplesLost", {"incarnation": 1, **about, "start": 40, "stop": 50}),)))
        assert listed()[3:] == [(48, 50)]
        apart = said((100, 116), (132, 148))
        for _ in range(2):
            health.tidings.samples_lost(apart)
        health.tidings.samples_lost({"incarnation": 1, "lost": apart["lost"][::-1]})
        assert listed()[4:] == [(100, 116), (132, 148)], "those between were drawn by somebody who lives"
        again = Health(PATIENT, events.append, time.monotonic, Mute())
        for event in events:
            again.recall(event)
        again.tidings.samples_lost(said((0, 50), (132, 148)))
        assert len(listed()) == 6

    asyncio.run(run())


def test_what_a_world_had_reached_does_not_count_for_the_next_one() -> None:
    async def run() -> None:
        machine: Any = SimpleNamespace(members={}, state=State.RUNNING, incarnation=1, step=9, longest_step=0.0, fruitless=0)
        health = Health(SPEC, lambda _: None, time.monotonic, Mute())
        health.follow(machine)
        health.heard(beat("w0", status="running", step=9))
        machine.state, machine.incarnation = State.FENCE, 2
        health.follow(machine)
        health.heard(beat("w1", status="running", step=10))
        assert health.reached == 10, "said late, but of the world that is looked back upon"
        machine.state = State.RESUME
        health.follow(machine)
        health.heard(beat("w1", status="running", step=10))
        health.heard(beat("w0", status="running", incarnation=2, step=5))
        assert health.reached == 5

    asyncio.run(run())


def test_who_has_come_to_the_end_waits_for_nobody() -> None:
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(PATIENT, events.append, time.monotonic, Split({}))
        health.nodes.links.nodes = [{"NodeID": "node-of-w0"}, {"NodeID": "node-of-w1"}]
        health.state, health.incarnation = State.RUNNING, 1
        health._members = dict.fromkeys(("w0", "w1"), MemberState.ACTIVE)
        health.expect("w0")
        health.expect("w1")
        health.heard(beat("w0", status="stopped", detail="4"))
        health.heard(beat("w1", status="running", where="wait", since=1.0))
        health._find_hang()
        await until(lambda: not health._tasks)

    asyncio.run(run())
    assert [type(event) for event in events] == [m.Stopped, m.Suspected]


def test_when_everybody_waits_who_does_not_reach_others_is_lost() -> None:
    waiting = dict.fromkeys(("w0", "w1", "w2"), "wait")
    (lost,) = standstill({"w0": ["w2"], "w2": ["w0"]}, waiting)
    assert isinstance(lost, m.WorkerLost)
    assert (lost.member, lost.noticed_by) == ("w2", "peers")
    assert "w0" in lost.cause


def test_when_everybody_waits_and_all_reach_each_other_all_are_suspected_once() -> None:
    (suspected,) = standstill({}, dict.fromkeys(("w0", "w1", "w2"), "wait"))
    assert isinstance(suspected, m.Suspected)


def test_who_is_silent_may_have_moved_on() -> None:
    assert standstill({}, {"w0": "wait", "w1": "forward", "w2": "wait"}, silent=11.0) == []


def test_who_is_not_waiting_holds_the_others_up() -> None:
    (lost,) = standstill({}, {"w0": "wait", "w1": "forward", "w2": "wait"})
    assert isinstance(lost, m.WorkerLost)
    assert (lost.member, lost.noticed_by) == ("w1", "step time")


def test_who_waits_for_storage_does_not_hang() -> None:
    assert standstill({}, {"w0": "checkpoint", "w1": "wait", "w2": "wait"}) == []


@pytest.mark.parametrize("part", ["nodes", "workers"])
def test_a_watcher_that_fails_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: Any) -> None:
        raise KeyError("what Ray tells of its nodes has changed")

    async def last(*args: Any) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        health = Health(SPEC, lambda _: None, time.monotonic, Mute())
        monkeypatch.setattr(health.nodes, "watch", fail if part == "nodes" else last)
        monkeypatch.setattr(health, "_watch_workers", fail if part == "workers" else last)
        with pytest.raises(ExceptionGroup) as seen:
            await asyncio.wait_for(health.watch_cluster(), 5)
        assert seen.group_contains(KeyError, match="nodes has changed")

    asyncio.run(run())


def test_a_node_that_dies_explains_workers_whose_end_was_seen_before() -> None:
    """On a machine that is switched off, processes end in any order."""
    events: list[m.Event] = []

    async def run() -> None:
        contacts = Contacts(SPEC)
        contacts.placed |= {"w0": "n1", "w1": "n1", "w2": "n2"}
        contacts.lines["w0"] = asyncio.create_task(asyncio.sleep(0))
        await contacts.lines["w0"]
        health = Health(SPEC, events.append, time.monotonic, contacts)
        health._members = {"w1": MemberState.ACTIVE, "w2": MemberState.ACTIVE}
        health._died("n1")

    asyncio.run(run())
    assert [event.member for event in events if isinstance(event, m.WorkerLost)] == ["w1"]
    assert [(event.lost, event.cause) for event in events if isinstance(event, m.CauseFound)] == [("w0", NODE_DIED)]


def test_the_benchmark_counts_every_way_to_give_up_who_lives_as_a_false_alarm() -> None:
    ways = ("heartbeat", "lifeline", "peers", "ray", "raylet", "step time")
    records: list[dict[str, Any]] = []
    for number, way in enumerate(ways):
        records.append({"event": "WorkerStarted", "member": f"w{number}"})
        records.append({"event": "WorkerLost", "member": f"w{number}", "noticed_by": way})
    records.append({"event": "WorkerLost", "member": "w9", "noticed_by": "ray"})  # Ray refused to start it
    assert [record["noticed_by"] for record in false_alarms(records, {"w0"})] == list(ways[1:])


MANY: Any = SimpleNamespace(**vars(SPEC) | {"heartbeat_interval": 0.1})
"""For a hundred workers, each of which then beats every half second."""


def test_of_many_workers_each_has_time_for_a_beat_to_answer_with() -> None:
    """A fence asks everybody, also who was heard a moment ago and is not due for longer than few would be."""
    events: list[m.Event] = []

    async def run() -> None:
        health = Health(MANY, events.append, time.monotonic, Mute())
        for number in range(100):
            health.expect(f"w{number}")
        health.alert(["w0"])
        await asyncio.sleep(0.3)  # however busy the machine is: the loop comes to this before it comes to what is due later
        health.heard(beat("w0"))
        while health._probing:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert events == []


@pytest.mark.parametrize(("since", "hangs"), [(0.0, False), (0.35, True)])
def test_of_many_workers_none_hangs_because_its_next_beat_is_not_due(
    since: float, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("raytrain_ft.runtime.health.time", SimpleNamespace(monotonic=lambda: clock[0]))
    events: list[m.Event] = []
    health = Health(MANY, events.append, lambda: clock[0], Mute())
    health.state, health.incarnation = State.RUNNING, 1
    health._members = {f"w{number}": MemberState.ACTIVE for number in range(100)}
    for member in health._members:
        health.expect(member)
    health.heard(beat("w0", status="running", where="forward", since=since))
    clock[0] += 0.4
    health._find_hang()
    assert [type(event) for event in events] == ([m.WorkerLost] if hangs else [])


@pytest.mark.parametrize("status", ["idle", "running"])
def test_who_was_told_to_train_and_never_begins_is_suspected(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was lost. The others wait for it, so nobody else is to blame, and they do not all wait. A replacement has not
    been in this incarnation before, and was filled long before the others were."""
    clock = [100.0]
    monkeypatch.setattr("raytrain_ft.runtime.health.time", SimpleNamespace(monotonic=lambda: clock[0]))
    events: list[m.Event] = []
    members = dict.fromkeys(("w0", "w1"), MemberState.ACTIVE) | {"w2": MemberState.SPARE}
    how = {"state": State.REBUILD, "incarnation": 2, "step": 9, "longest_step": 0.0, "fruitless": 1}
    machine: Any = SimpleNamespace(members=members, **how)
    health = Health(SPEC, events.append, lambda: clock[0], Mute())
    health.follow(machine)
    for member in machine.members:
        health.expect(member)

    def look(after: float) -> None:
        clock[0] += after
        health.heard(beat("w0", incarnation=2, status="running", where="wait", since=after))
        health.heard(beat("w1", incarnation=2 if status == "running" else 0, status=status, where=status, since=0.0))
        health.heard(beat("w2", incarnation=0, since=clock[0]))
        health._find_hang()

    look(after=50.0)
    machine.state = State.RESUME
    health.follow(machine)
    look(after=0.2)
    assert events == []
    look(after=0.2)
    if status == "running":
        assert events == []
        return
    reason = "w1 was told to train 0 s ago and has not begun to"
    assert events == [m.Suspected(incarnation=2, reason=reason, noticed_by="step time")]
