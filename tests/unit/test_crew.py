"""The workers as the supervisor handles them, with actors of the test's own: what no timing of real ones surely brings."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayTaskError

from raytrain_ft.errors import (
    AbsentError,
    ConfigError,
    FencedError,
    NonFiniteLossError,
    StorageError,
    UndoRefusedError,
    UnknownFormatError,
    UnreachableError,
)
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.leaving import REQUEST, SIGTERM
from raytrain_ft.policy.reconcile import Marks, Plan
from raytrain_ft.policy.sketch import Sketch
from raytrain_ft.runtime import crew as crews
from raytrain_ft.runtime.calls import cause_of, differs
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.crew import Crew
from raytrain_ft.runtime.nodes import FORGIVE_DEAD_S, FORGIVE_SILENT_S, Nodes
from raytrain_ft.runtime.notice_board import NoticeBoard
from raytrain_ft.runtime.notices.notice import Notice
from raytrain_ft.runtime.software import CODE
from raytrain_ft.runtime.spec import Introduction
from raytrain_ft.runtime.worker import Worker
from raytrain_ft.training.fence import Fence


class Method:
    """One method of an actor."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def remote(self, *args: Any) -> Any:
        return self.answer()


class Health:
    """Notes who is to be heard of."""

    def __init__(self) -> None:
        self.expected: list[str] = []
        self.members: list[str] = []
        self.starting: set[str] = set()
        self.step = 7
        self.nodes = SimpleNamespace(
            avoided=set(), disfavoured=set(), avoid=lambda *_: None, disfavour=lambda _: None, count=lambda *_: None
        )

    def expect(self, member: str) -> None:
        self.expected.append(member)

    def forget(self, member: str) -> None: ...

    def is_starting(self, member: str) -> bool:
        return member in self.starting

    def older(self) -> list[str]:
        return [member for member in self.members if member not in self.starting]

    def silence(self, member: str) -> float | None:
        return None


@pytest.fixture
def told() -> list[m.Event]:
    return []


@pytest.fixture
def crew(told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setattr(crews, "named", lambda prefix: [f"w{number}" for number in range(10)])
    about = {"options": {"num_cpus": 1}, "checkpoints": None, "lease": 60.0, "setup_timeout": 60.0}
    spec: Any = SimpleNamespace(**about, member_name=lambda member: member)
    health: Any = Health()
    return Crew(spec, told.append, Contacts(spec), health)


def not_begun(cause: BaseException) -> ActorDiedError:
    """What Ray tells of an actor whose constructor raised this."""
    try:
        raise cause
    except Exception:
        raised = traceback.format_exc()
    about = {"proctitle": "ray::Worker.__init__", "pid": 4711, "ip": "10.0.0.3", "actor_id": "a" * 32}
    return ActorDiedError(RayTaskError("Worker.__init__", raised, cause, actor_repr="digits w3", **about))


def gone(member: str) -> Any:
    raise ValueError(f"no actor {member}")


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that within 5 s")


def test_who_is_struck_off_while_a_node_is_chosen_is_not_started(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its place would be taken for ever, and no spare could be started there."""
    started: list[str] = []
    answered = asyncio.Event()

    async def reaction(node: Any) -> str:
        await answered.wait()
        return "answer"

    def worker_class() -> Any:
        started.append("started")
        raise AssertionError("nobody is to be started")

    node = {"NodeID": "n1", "Alive": True, "Resources": {"CPU": 1.0}, "Available": {"CPU": 1.0}}
    monkeypatch.setattr(crews.placement, "nodes", lambda: [node])
    monkeypatch.setattr(crews.placement, "reaction", reaction)
    monkeypatch.setattr(crews, "_worker_class", worker_class)
    monkeypatch.setattr(crew._contacts, "handle", gone)

    async def play() -> None:
        crew.carry_out(c.StartWorker("w5"))
        await until(lambda: crew._contacts.taken() == Counter({"n1": 1}))
        crew.carry_out(c.Kill("w5"))
        answered.set()
        await crew.settled()
        await asyncio.sleep(0.05)

    asyncio.run(play())
    assert crew._contacts.taken() == Counter()
    assert started == told == []


def test_the_class_of_workers_is_made_once(crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with each start, of which there are thousands in a long run. What differs are the options."""
    made: list[Any] = []
    started: list[tuple[Any, ...]] = []

    def options(**given: Any) -> Any:
        where = given["name"], given["scheduling_strategy"]
        return SimpleNamespace(remote=lambda code, spec, member, *_: started.append((code, spec, member, *where)))

    def remote(actor: Any) -> Any:
        made.append(actor)
        return SimpleNamespace(options=options)

    async def introduce(member: str) -> None: ...

    async def choose(member: str, anywhere: bool) -> str:
        return f"node of {member}"

    monkeypatch.setattr(crews.placement, "strategy_for", lambda node: node)
    monkeypatch.setattr(crews, "pack", lambda spec: b"spec")
    monkeypatch.setattr(crews.ray, "remote", remote)
    monkeypatch.setattr(crews.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    monkeypatch.setattr(crew, "_introduce", introduce)
    monkeypatch.setattr(crew, "_choose_node", choose)
    monkeypatch.setattr(crews, "_worker_class", cache(crews._worker_class.__wrapped__))
    for member in ("w5", "w6"):
        asyncio.run(crew._start(member, False))
    assert made == [Worker]
    assert started == [(CODE, b"spec", member, member, f"node of {member}") for member in ("w5", "w6")]
    assert told == []


def two_nodes(
    crew: Crew, told: list[m.Event], reaction: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Nodes, list[dict[str, Any]]]:
    """n1 and n2, each with room for one worker."""
    there: list[dict[str, Any]] = [
        {"NodeID": name, "Alive": True, "Resources": {"CPU": 1.0}, "Available": {"CPU": 1.0}} for name in ("n1", "n2")
    ]
    monkeypatch.setattr(crews.placement, "nodes", lambda: there)
    monkeypatch.setattr(crews.placement, "reaction", reaction)
    health: Any = crew._health
    health.nodes = Nodes(crew._spec, told.append, NoticeBoard(told.append, lambda: 0.0), crew._contacts, fail)
    return health.nodes, there


def test_a_node_that_may_lack_something_is_used_where_there_is_no_other(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reaction(_: Any) -> str:
        return "answer"

    nodes, there = two_nodes(crew, told, reaction, monkeypatch)
    monkeypatch.setattr(crew._contacts, "handle", gone)
    crew._contacts.place("w1", "n1")

    async def play() -> list[str | None]:
        crew.carry_out(c.Kill("w1", avoid=True))
        await crew.settled()
        return [await crew._choose_node(member) for member in ("w5", "w6")]

    assert asyncio.run(play()) == ["n2", "n1"]
    nodes.count(there)
    assert told == [m.CapacityChanged(slots=2)], "there is as much room as before"


def test_a_node_that_is_said_to_go_is_the_last_resort(crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, a worker was asked to leave one, and a cloud takes the other, where what waits for room holds the only place."""
    nodes, there = two_nodes(crew, told, at_once, monkeypatch)
    monkeypatch.setattr(crews, "ROOM_SECONDS", 0.2)
    contacts = crew._contacts
    contacts.place("w1", "n1")
    nodes._board.noticed("w1", "n1", Notice(60.0, REQUEST, "a person asked for it"))
    nodes._board.noticed("w2", "n2", Notice(30.0, "aws spot", "terminate"))
    there[1]["Available"] = {}
    contacts.hold(Counter(n2=1))
    nodes.count(there)
    assert told[2:] == [m.CapacityChanged(slots=0, last_resort=2)]

    async def play() -> None:
        assert await crew._choose_node("w3") is None
        contacts.vacate("w3")
        assert not contacts.any_seeks()
        seeking = asyncio.create_task(crew._choose_node("w4", anywhere=True))
        await until(contacts.any_seeks)  # so nothing is asked for any more, and nothing is held
        there[1]["Available"] = {"CPU": 1.0}
        assert await seeking == "n2"

    asyncio.run(play())
    nodes._board.drained({"n1": 30.0}, (), contacts)
    nodes.avoid("n2", 30.0)
    nodes.count(there)
    assert told[3:] == [m.CapacityChanged(slots=0, last_resort=0)], "nothing can be placed where Ray drains, or nobody answers"


def test_who_was_on_its_way_when_the_supervisor_was_lost_has_a_place(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is, nobody has noted. It would be asked for once more, and a world formed without who is about to come."""
    nodes, there = two_nodes(crew, told, at_once, monkeypatch)
    there[0]["Available"] = {}
    monkeypatch.setattr(crew, "_introduce", at_once)
    monkeypatch.setattr(crew._contacts, "handle", lambda member: gone(member) if member == "w2" else None)

    async def play() -> None:
        for member in ("w1", "w2"):
            crew.carry_out(c.Watch(member, ""))
        await asyncio.gather(*crew._bringing.values())

    asyncio.run(play())
    nodes.count(there)
    assert told[-1] == m.CapacityChanged(slots=3), "until it is known that w2 is lost"
    crew._contacts.vacate("w2")
    nodes.count(there)
    assert told[-1] == m.CapacityChanged(slots=2)
    crew._contacts.place("w1", "n1")
    nodes.count(there)
    assert told[-1] == m.CapacityChanged(slots=2)
    assert not crew._contacts.somewhere


def test_who_stays_on_a_node_that_others_are_to_leave_keeps_its_place(crew: Crew, told: list[m.Event]) -> None:
    """Of two nodes with room for three each, one is full, and one of its workers is asked to leave: one place is lacking."""
    board = NoticeBoard(lambda _: None, lambda: 0.0)
    nodes = Nodes(crew._spec, told.append, board, crew._contacts, fail)
    there = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 3.0}, "Available": {}} for name in ("n1", "n2")]
    for rank in range(6):
        crew._contacts.place(f"w{rank}", f"n{rank // 3 + 1}")
    board.noticed("w5", "n2", Notice(60.0, REQUEST, "a person asked for it"))
    nodes.count(there)
    board.noticed("w4", "n2", Notice(30.0, SIGTERM, "the process was asked to end"))
    nodes.count(there)
    board.noticed("w0", "n1", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w1", "n1", Notice(60.0, REQUEST, "a person asked for it"))
    nodes.count(there)
    nodes.avoid("n2", 30.0)
    nodes.count(there)
    counts = [(event.slots, event.last_resort) for event in told if isinstance(event, m.CapacityChanged)]
    assert counts == [(5, 1), (4, 2), (1, 5), (0, 3)]


@pytest.mark.parametrize(("says", "seconds"), [("refusal", FORGIVE_DEAD_S), ("silence", FORGIVE_SILENT_S)])
def test_a_node_whose_raylet_does_not_answer_is_left_out_and_counted_no_more(
    says: str, seconds: float, crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reaction(node: Any) -> str:
        return says if node["NodeID"] == "n1" else "answer"

    nodes, _ = two_nodes(crew, told, reaction, monkeypatch)
    began = time.monotonic()
    assert asyncio.run(crew._choose_node("w5")) == "n2"
    assert nodes._avoid["n1"] == pytest.approx(began + seconds, abs=5)
    assert crew._contacts.taken() == Counter({"n2": 1})
    (event,) = told
    assert isinstance(event, m.CapacityChanged)
    assert event.slots == 1


def fail(node: str) -> None:
    raise AssertionError(f"node {node} did not die")


def test_a_connection_that_breaks_is_no_death(crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    async def broken() -> None:
        calls.append(0.0)
        raise ActorUnavailableError("RpcError: Socket closed", None) if len(calls) < 4 else ActorDiedError()

    monkeypatch.setattr(crew._contacts, "handle", lambda member: SimpleNamespace(watch=Method(broken)))

    async def play() -> None:
        crew._look_after("w0", "n1")
        await until(lambda: len(calls) == 3)
        assert told == []
        await until(lambda: bool(told))

    asyncio.run(play())
    assert [type(event) for event in told] == [m.WorkerLost]
    assert len(calls) == 4


def test_who_was_ready_is_watched_at_once_after_a_restart(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has frozen meanwhile, and never answers `setup`."""
    never = asyncio.Event()
    future: Any = SimpleNamespace(future=lambda: asyncio.run_coroutine_threadsafe(never.wait(), asyncio.get_running_loop()))
    actor = SimpleNamespace(watch=Method(never.wait), setup=Method(lambda: future))
    monkeypatch.setattr(crew._contacts, "handle", lambda member: actor)

    async def play() -> None:
        crew.carry_out(c.Watch("w0", "n1"))
        crew.carry_out(c.Watch("w1"))  # was starting: nothing is known of it
        await asyncio.sleep(0.05)

    asyncio.run(play())
    assert crew._contacts.taken() == Counter({"n1": 1})
    health: Any = crew._health
    assert health.expected == ["w0"]
    assert told == []


def test_the_end_of_a_process_is_told_at_once_and_its_cause_when_ray_knows_it(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, known, killed = asyncio.Event(), asyncio.Event(), []

    async def watch() -> None:
        await known.wait()
        raise OutOfMemoryError("Task was killed due to the node running low on memory")

    async def hold(host: str, port: int) -> None:
        await ended.wait()

    async def call(member: str, method: str, **_: Any) -> Introduction:
        assert method == "setup"
        return Introduction("n1", 7, "127.0.0.1", 4000, 10, 1, "torch 2.13")

    gone: Future[None] = Future()
    gone.set_exception(ActorDiedError())
    handle = SimpleNamespace(watch=Method(watch), ping=Method(lambda: SimpleNamespace(future=lambda: gone)))
    monkeypatch.setattr(crew._contacts, "handle", lambda member: handle)
    monkeypatch.setattr(crew._calls, "call", call)
    monkeypatch.setattr(crews.lifeline, "hold", hold)
    monkeypatch.setattr(crews.ray, "kill", lambda handle: killed.append(known.is_set()))

    async def play() -> None:
        await crew._introduce("w0")
        await asyncio.sleep(0)
        ended.set()
        await until(lambda: bool(told))
        assert [(type(event), event.member, event.noticed_by) for event in told] == [(m.WorkerLost, "w0", "lifeline")]  # pyright: ignore
        crew.carry_out(c.Kill("w0"))
        await asyncio.sleep(0.05)
        assert killed == [], "Ray would know of nothing but this kill"
        known.set()
        await until(lambda: len(told) == 2)
        await crew.settled()

    asyncio.run(play())
    assert isinstance(told[1], m.CauseFound)
    assert told[1].lost == "w0"
    assert "memory" in told[1].cause
    assert killed == [True]


def test_the_end_of_who_leaves_is_no_loss(crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives until it is killed, and Ray then fails the call that watches it."""
    killed = asyncio.Event()

    async def watch() -> None:
        await killed.wait()
        raise ActorDiedError

    crew._contacts.handles["w0"] = SimpleNamespace(watch=Method(watch), ping=answers(ActorDiedError()))
    monkeypatch.setattr(crews.ray, "kill", lambda handle: killed.set())

    async def play() -> None:
        crew._look_after("w0", "n1")
        watching = crew._watching["w0"]
        await asyncio.sleep(0)
        crew.carry_out(c.Kill("w0"))
        await asyncio.wait_for(watching, 5)
        await crew.settled()

    asyncio.run(play())
    assert killed.is_set()
    assert told == []


@pytest.mark.parametrize("begins", [True, False])
def test_who_is_starting_begins_before_it_is_killed(
    begins: bool, crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Ray may never give back what it held. It keeps its place until then; and is killed if nothing comes of it."""
    monkeypatch.setattr(crews, "BEGIN_S", 60.0 if begins else 0.05)
    start: Future[None] = Future()
    ready = SimpleNamespace(future=lambda: start)
    killed: list[bool] = []
    handle = SimpleNamespace(__ray_ready__=Method(lambda: ready), ping=answers(ActorDiedError()))
    crew._contacts.handles["w0"] = handle
    crew._contacts.place("w0", "n1")
    monkeypatch.setattr(crews.ray, "kill", lambda handle: killed.append(start.done()))

    async def play() -> None:
        crew.carry_out(c.Kill("w0"))
        await asyncio.sleep(0.02)
        assert killed == []
        assert crew._contacts.taken()["n1"] == 1
        assert crew._contacts.vacated()["n1"] == 0
        if begins:
            start.set_result(None)
        await crew.settled()

    asyncio.run(play())
    assert len(killed) == 1
    assert crew._contacts.vacated()["n1"] == 1
    assert told == []


def test_the_place_of_who_was_killed_is_room_while_ray_does_not_know_it(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the room is counted: else a run that is to wait for a replacement goes on with one worker less instead."""
    clock = [100.0]
    monkeypatch.setattr("raytrain_ft.runtime.contacts.time", SimpleNamespace(monotonic=lambda: clock[0]))
    health: Any = crew._health
    health.nodes = Nodes(crew._spec, told.append, NoticeBoard(told.append, lambda: 0.0), crew._contacts, fail)
    monkeypatch.setattr(crew._contacts, "handle", fail_to_find)
    monkeypatch.setattr(crews.placement, "reaction", at_once)
    there = {"NodeID": "n1", "Alive": True, "Resources": {"CPU": 4.0}, "Available": {"CPU": 0.0}}  # two are another run's
    monkeypatch.setattr(crews.placement, "nodes", lambda: [there])

    def slots() -> int:
        health.nodes.count([there])
        (event,) = told
        assert isinstance(event, m.CapacityChanged)
        return event.slots

    async def play() -> None:
        crew._contacts.placed |= {"w0": "n1", "w1": "n1"}
        assert slots() == 2
        await crew._kill("w1")
        assert slots() == 2
        starting = asyncio.create_task(crew._choose_node("w2"))
        await asyncio.sleep(0.01)
        assert not starting.done(), "the place cannot be had yet"
        there["Available"] = {"CPU": 1.0}
        assert slots() == 2
        assert await starting == "n1"
        there["Available"] = {"CPU": 0.0}
        assert slots() == 2
        crew._contacts.place("w2", "n1")  # as it says itself
        await crew._kill("w2")
        assert slots() == 2
        clock[0] += crews.ROOM_SECONDS
        told.clear()
        assert slots() == 1, "it was taken by somebody else"

    asyncio.run(play())


def fail_to_find(member: str) -> Any:
    raise ValueError(f"no actor {member}")


async def at_once(node: Any) -> str:
    return "answer"


def test_who_takes_longer_than_allowed_to_be_set_up_is_given_up(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    never: Future[None] = Future()
    handle = SimpleNamespace(setup=Method(lambda: SimpleNamespace(future=lambda: never)))
    monkeypatch.setattr(crew._contacts, "handle", lambda member: handle)
    crew._spec.setup_timeout = 0.05  # pyright: ignore[reportAttributeAccessIssue]
    asyncio.run(crew._introduce("w0"))
    (event,) = told
    assert isinstance(event, m.WorkerLost)
    assert (event.cause, event.noticed_by) == ("no answer to setup within 0.05 s", "deadline")


@pytest.mark.parametrize(("incarnation", "kind"), [(0, m.TaskFailed), (2, m.UndoRefused)])
def test_an_undo_that_is_refused_in_a_recovery_is_no_refusal_of_settings(
    crew: Crew, told: list[m.Event], incarnation: int, kind: type[m.Event]
) -> None:
    error = RayTaskError("reconcile", "Traceback ...", UndoRefusedError("SGD cannot be undone:\n  - lr=10.0"))
    crew._calls.report("w0", error, incarnation)
    (event,) = told
    assert isinstance(event, kind)
    assert getattr(event, "incarnation", None) == (incarnation or None)


def test_a_traceback_that_quotes_a_uri_is_told_without_its_credentials(crew: Crew, told: list[m.Event]) -> None:
    trace = "Traceback ...\n    return ft.ArrowDataset('s3://KEY:SESAME@bucket/train')\nOSError: 403"
    crew._calls.report("w0", RayTaskError("setup", trace, OSError("403")), 0)
    (event,) = told
    assert isinstance(event, m.TaskFailed)
    assert event.message.endswith("\n    return ft.ArrowDataset('s3://bucket/train')\nOSError: 403")
    assert "\x1b" not in event.message, "Ray colours its tracebacks"


def test_a_file_that_cannot_be_written_is_no_error_of_the_task(crew: Crew, told: list[m.Event]) -> None:
    """Told as what it is, in its own words, with nothing of Ray's around them."""
    words = "/runs/digits/final.arrow could not be written: No space left on device. Free some space"
    crew._calls.report("w0", RayTaskError("save", "ray::Worker.save() ...", StorageError(words)), 0)
    (event,) = told
    assert isinstance(event, m.TaskFailed)
    assert (event.kind, event.message) == ("storage", words)


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (StorageError("its hash differs"), True),
        (UnreachableError("503"), False),
        (AbsentError("not there"), False),
        (UnknownFormatError("a version"), False),
    ],
)
def test_what_is_out_of_reach_is_no_damaged_checkpoint(
    crew: Crew, told: list[m.Event], error: Exception, damaged: bool
) -> None:
    crew._calls.report("w0", RayTaskError("reconcile", "Traceback ...", error), 2, "step-000000006-e1-i1")
    (event,) = told
    assert isinstance(event, m.CheckpointRejected)
    assert event.damaged is damaged


@pytest.mark.parametrize("error", [TimeoutError(), ObjectLostError("00" * 28, None, "")], ids=["deadline", "lost"])
@pytest.mark.parametrize(("incarnation", "kind"), [(0, m.TaskFailed), (2, m.Suspected)])
def test_a_deadline_that_a_recovery_ran_into_is_no_error_of_the_task(
    crew: Crew, told: list[m.Event], incarnation: int, kind: type[m.Event], error: Exception
) -> None:
    """That of a long replay, say, or something that a peer had: the worker is as good as before. Who is set up asks no peer:
    what was lost is the task's own."""
    crew._calls.report("w0", RayTaskError("replay", "Traceback ...", error), incarnation)
    (event,) = told
    assert isinstance(event, kind)


def test_a_loss_that_is_not_finite_in_a_recovery_is_told_as_that(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the step that was to be completed; and it is no reason to avoid the node."""
    raised: Future[Any] = Future()
    raised.set_exception(RayTaskError("reconcile", "Traceback ...", NonFiniteLossError("the loss of step 8 is nan")))
    actor = SimpleNamespace(reconcile=Method(lambda: SimpleNamespace(future=lambda: raised)))
    avoided: list[str] = []
    health: Any = crew._health
    health.nodes.disfavour = avoided.append
    monkeypatch.setattr(crew._contacts, "handle", lambda member: actor)
    monkeypatch.setattr(crew._contacts, "node_of", lambda member: "n1")
    asyncio.run(crew._reconcile("w0", c.Reconcile(("w0",), 2, Plan(step=9, completes=True), holders=("w0",))))
    about: dict[str, Any] = {"rank": None, "step": 8, "kind": "non_finite", "message": "the loss of step 8 is nan"}
    assert told == [m.TaskFailed(at=0.0, member="w0", incarnation=2, **about)]
    assert avoided == []


def test_a_lifeline_that_fails_leaves_it_to_ray(crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours there must not hide a loss."""
    failed = asyncio.Event()

    async def watch() -> None:
        await failed.wait()
        await asyncio.sleep(0.05)
        raise ActorDiedError

    async def hold(host: str, port: int) -> None:
        failed.set()
        raise RuntimeError("cannot schedule new futures after shutdown")

    async def call(member: str, method: str, **_: Any) -> Introduction:
        return Introduction("n1", 7, "127.0.0.1", 4000, 10, 1, "torch 2.13")

    monkeypatch.setattr(crew._contacts, "handle", lambda member: SimpleNamespace(watch=Method(watch)))
    monkeypatch.setattr(crew._calls, "call", call)
    monkeypatch.setattr(crews.lifeline, "hold", hold)

    async def play() -> None:
        await crew._introduce("w0")
        await until(lambda: bool(told))

    asyncio.run(play())
    assert [(type(event), event.noticed_by) for event in told] == [(m.WorkerLost, "ray")]  # pyright: ignore


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_who_has_another_dataset_is_told_of_randomness_and_on_another_node_of_its_files(host: str) -> None:
    one = Introduction("n1", 7, "127.0.0.1", 0, 10, 1, "torch 2.13", (Sketch("", 1, 0.5, 1.0),))
    words = differs(replace(one, host=host, samples=(Sketch("", 1, 0.6, 1.0),)), [one])
    assert "TrainTask.dataset() makes it with randomness that has no fixed seed" in words
    assert ("put the same data on every node" in words) == (host != one.host)


def test_who_has_another_model_never_becomes_a_spare(crew: Crew, told: list[m.Event]) -> None:
    """Else that would be seen in a recovery, when it is needed."""

    async def introduce(member: str, parameters: int, torch: str = "2.13", mean: float | None = None) -> None:
        samples = () if mean is None else (Sketch("", 1, mean, 1.0),)
        known = Introduction("n1", 7, "127.0.0.1", 0, parameters, 1, f"torch {torch}", samples)
        actor = SimpleNamespace(setup=Method(lambda: answered(known)), watch=Method(lambda: asyncio.sleep(9)))
        crew._contacts.handles[member] = actor
        await crew._introduce(member)

    def answered(known: Introduction) -> Any:
        answer: Future[Introduction] = Future()
        answer.set_result(known)
        return SimpleNamespace(future=lambda: answer)

    async def run() -> None:
        await introduce("w0", 10, mean=0.5)
        await introduce("w1", 11)
        await introduce("w2", 10)  # a stage in the middle reads no samples
        await introduce("w3", 10, "2.12")
        await introduce("w4", 10, mean=0.6)
        vars(crew._spec)["checkpoints"] = SimpleNamespace(override=("dataset",))
        await introduce("w5", 10, mean=0.6)

    asyncio.run(run())
    failed, other, reads = [event for event in told if isinstance(event, m.TaskFailed)]
    assert (failed.member, failed.kind, other.member) == ("w1", "mismatch", "w3")
    assert (reads.member, reads.kind) == ("w4", "mismatch")
    assert "two workers on node 127.0.0.1 have different datasets: of the samples" in reads.message
    assert "11 parameters in 1 buckets, with torch 2.13; on node 127.0.0.1 it has 10 parameters" in failed.message
    assert "torch 2.12" in other.message
    assert set(crew._contacts.introductions) == {"w0", "w2", "w5"}


def test_by_those_who_have_trained_a_newcomer_is_measured_though_he_answers_first(crew: Crew, told: list[m.Event]) -> None:
    """After the supervisor's restart all are asked again, and those in the midst of a step may be slower."""
    health: Any = crew._health
    health.members, health.starting = ["w0", "w1", "w3", "w4"], {"w3", "w4"}

    def answered(torch: str) -> Any:
        answer: Future[Introduction] = Future()
        answer.set_result(Introduction("n1", 7, "127.0.0.1", 0, 10, 1, f"torch {torch}", ()))
        return SimpleNamespace(future=lambda: answer)

    async def run() -> None:
        for member, torch in (("w0", "2.13"), ("w1", "2.13"), ("w3", "2.12"), ("w4", "2.13")):
            actor = SimpleNamespace(setup=Method(lambda torch=torch: answered(torch)), watch=Method(lambda: asyncio.sleep(9)))
            crew._contacts.handles[member] = actor
        newcomers = [asyncio.create_task(crew._introduce(member)) for member in ("w3", "w4")]
        await crew._introduce("w0")
        await asyncio.sleep(3 * crews.OLDER_POLL_SECONDS)
        assert told == [], "w1 is still to be heard"
        health.members.remove("w1")  # it is lost
        await asyncio.gather(*newcomers)

    asyncio.run(run())
    (failed, started) = sorted(told, key=lambda event: type(event).__name__)
    assert (type(failed), failed.member) == (m.TaskFailed, "w3")  # pyright: ignore[reportAttributeAccessIssue]
    assert (type(started), started.member) == (m.WorkerStarted, "w4")  # pyright: ignore[reportAttributeAccessIssue]


def test_of_thousands_who_were_lost_ray_is_asked_once_after_a_restart(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions for each would hold up the supervisor for seconds, and no heartbeat would be answered meanwhile."""
    listed: list[str] = []
    killed: list[Any] = []
    alive = SimpleNamespace(ping=Method(lambda: SimpleNamespace(future=lambda: failed)), __ray_ready__=None)
    failed: Future[None] = Future()
    failed.set_exception(ActorDiedError())

    def names(prefix: str) -> list[str]:
        listed.append(prefix)
        return ["w77"]

    def handle(member: str) -> Any:
        assert member == "w77"
        return alive

    monkeypatch.setattr(crews, "named", names)
    monkeypatch.setattr(crews, "begun", lambda actor: SimpleNamespace(future=lambda: failed))
    monkeypatch.setattr(crews.ray, "kill", killed.append)
    monkeypatch.setattr(crew._contacts, "handle", handle)

    async def play() -> None:
        for number in range(2000):
            crew.carry_out(c.Kill(f"w{number}"))
        await crew.settled()

    asyncio.run(play())
    assert killed == [alive]
    assert len(listed) < 5


def test_each_stage_is_saved_under_its_number_also_if_others_are_saved_already(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(member: str, method: str, path: str) -> str:
        return path

    crew._spec = SimpleNamespace(rules=SimpleNamespace(stages=2), directory=Path("/runs"))  # pyright: ignore
    monkeypatch.setattr(crew._calls, "call", call)

    async def play() -> None:
        crew.carry_out(c.Save(("w3",), ("w0", "w1", "w2", "w3"), 3))
        await until(lambda: bool(told))

    asyncio.run(play())
    assert told == [m.Saved(at=0.0, member="w3", incarnation=3, path="/runs/final-stage-1.arrow")]


def test_who_hands_its_state_over_packs_it_once_for_all_who_receive_it(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a deadline. Where two stages are handed over, both do it at the same time."""
    givers: list[str] = []
    received: dict[str, Any] = {}

    async def call(member: str, method: str, *asked: Any, **_: Any) -> Any:
        if method == "hand_over":
            givers.append(member)
            while len(givers) < 2:
                await asyncio.sleep(0.01)
            return (f"the state of {member}",)
        received[member] = asked[1:]
        return ("d",)

    crew._spec = SimpleNamespace(rules=SimpleNamespace(stages=2))  # pyright: ignore
    monkeypatch.setattr(crew._calls, "call", call)
    world = ("w2", "w3", "w4", "w5")
    handed = (("w2", "w0"), ("w4", "w0"), ("w3", "w1"), ("w5", "w1"))

    async def play() -> None:
        crew.carry_out(c.Fill(world, 3, world, (), (), handed))
        await until(lambda: len(told) == 4)

    asyncio.run(play())
    assert sorted(givers) == ["w0", "w1"]
    assert received == {member: (None, f"the state of {giver}") for member, giver in handed}


def answers(*outcomes: Any) -> Method:
    """One after the other, for each call."""
    left = list(outcomes)

    def answer() -> Any:
        future: Future[Any] = Future()
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return SimpleNamespace(future=lambda: future)

    return Method(answer)


BROKEN = ActorUnavailableError("RpcError: Socket closed", None)


def test_a_fence_whose_connection_breaks_is_asked_for_again(crew: Crew, told: list[m.Event]) -> None:
    marks = Marks("w0", 3, (3,), (None,))
    crew._contacts.handles["w0"] = SimpleNamespace(fence=answers(BROKEN, BROKEN, marks))
    asyncio.run(crew._fence("w0", 2))
    assert told == [m.Fenced(at=0.0, member="w0", incarnation=2, marks=marks)]


def test_a_fence_is_not_asked_for_for_ever(crew: Crew, told: list[m.Event]) -> None:
    vars(crew._spec)["lease"] = 0.0
    crew._contacts.handles["w0"] = SimpleNamespace(fence=answers(BROKEN, BROKEN, BROKEN))
    asyncio.run(crew._fence("w0", 2))
    assert [type(event) for event in told] == [m.WorkerLost]


def test_a_recovery_whose_connection_breaks_is_suspected_and_begins_anew(crew: Crew, told: list[m.Event]) -> None:
    """It may or may not have been carried out."""
    crew._contacts.handles["w0"] = SimpleNamespace(reconcile=answers(BROKEN))
    asyncio.run(crew._reconcile("w0", c.Reconcile(("w0",), 2, Plan(step=9, completes=False), holders=("w0",))))
    why = "the connection to w0 broke"
    assert told == [m.Suspected(at=0.0, incarnation=2, reason=why, noticed_by="supervisor")]


def test_what_may_come_twice_is_asked_again(crew: Crew, told: list[m.Event]) -> None:
    actor = SimpleNamespace(stop_at_boundary=answers(BROKEN, None), save=answers(BROKEN, "/runs/final.arrow"))
    crew._contacts.handles["w0"] = actor
    crew._spec = SimpleNamespace(rules=SimpleNamespace(stages=1), directory=Path("/runs"), lease=60.0)  # pyright: ignore
    asyncio.run(crew._ask("w0", "stop_at_boundary"))
    asyncio.run(crew._save("w0", ("w0",), 3))
    assert told == [m.Saved(at=0.0, member="w0", incarnation=3, path="/runs/final.arrow")]


def test_others_hear_first_of_a_sleep_and_last_of_a_waking(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come at once are carried out one after the other; who does not answer is not waited for."""
    heard: list[tuple[str, str, bool]] = []

    async def hears(member: str, method: str, *args: Any) -> None:
        await asyncio.sleep(0.01)  # else none could overtake another
        heard.append((member, method, args[1] if method == "speak_for" else args[0]))
        if member == "frozen":
            await asyncio.Event().wait()

    monkeypatch.setattr("raytrain_ft.runtime.crew.HINT_SECONDS", 1.0)
    monkeypatch.setattr(crew._calls, "hint", hears)
    monkeypatch.setattr(crew, "_ask", hears)
    monkeypatch.setattr(crew._health, "active", lambda: ["w0", "w1", "frozen"], raising=False)

    async def requests() -> None:
        crew.sleep(("w1",), True)
        crew.sleep(("w1",), False)
        await until(lambda: len(heard) == 8)

    asyncio.run(requests())
    others = ["w0", "w1", "frozen"]
    asked = [(member, "speak_for", True) for member in others]
    woken = [(member, "speak_for", False) for member in others]
    assert heard == [*asked, ("w1", "sleep", True), ("w1", "sleep", False), *woken]


def test_a_fence_may_be_asked_for_twice() -> None:
    """The first answer was lost on its way."""
    parked: list[tuple[int, int]] = []
    marks = Marks("w0", 3, (3,), (None,))
    trainee = SimpleNamespace(park=lambda *about: parked.append(about) or marks)
    about = {"_lock": Lock(), "_fence": Fence(1), "_parking": {}, "_trainee": trainee, "_training": ThreadPoolExecutor(1)}
    worker = Worker.__new__(Worker)
    vars(worker).update(about)
    assert worker.fence(2) is worker.fence(2) is marks
    assert parked == [(2, 1)]
    assert worker.fence(3) is marks
    with pytest.raises(FencedError, match="incarnation 2 is over; this worker is in 3"):
        worker.fence(2)


@pytest.mark.parametrize(
    "cause",
    [
        OSError(28, "No space left on device", "/mnt/shared/" + "x" * 200),
        ValueError("exit code 3 of ldconfig,\n  which is not there:\nthe node died"),
    ],
)
def test_what_a_worker_that_cannot_begin_raised_is_its_cause(cause: Exception) -> None:
    """Before it Ray tells where that was raised, in more than a line; and what is quoted is no sign of anything else."""
    own = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    assert cause_of(not_begun(cause)) == f"it could not begin: {own}"


def test_a_worker_that_refuses_to_begin_is_a_node_that_lacks_something(
    crew: Crew, told: list[m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no loss, which would be met by starting another one there."""
    health: Any = crew._health
    health.starting, disfavoured = {"w3"}, []
    health.nodes.disfavour = disfavoured.append
    answer: Future[Introduction] = Future()
    answer.set_exception(not_begun(ConfigError("node 10.0.0.3 has other code of raytrain_ft than the supervisor of the run")))
    actor = SimpleNamespace(setup=Method(lambda: SimpleNamespace(future=lambda: answer)))
    monkeypatch.setattr(crew._contacts, "handle", lambda member: actor)
    crew._contacts.place("w3", "n3")
    asyncio.run(crew._introduce("w3"))
    words = "node 10.0.0.3 has other code of raytrain_ft than the supervisor of the run"
    assert told == [m.TaskFailed(member="w3", rank=None, step=7, kind="config", message=words)]
    assert disfavoured == ["n3"]
