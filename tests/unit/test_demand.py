"""What a run asks the cluster for, without one: rooms of the test's own, where groups are placed as Ray places them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from raytrain_ft.policy.leaving import REQUEST
from raytrain_ft.runtime import demand as demands
from raytrain_ft.runtime.demand import Demand
from raytrain_ft.runtime.notice_board import NoticeBoard
from raytrain_ft.runtime.notices.notice import Notice


class Rooms:
    """Has room for so many groups on each node. A group is its name here."""

    def __init__(self, **room: int) -> None:
        self.room = room
        self.placed: dict[str, str] = {}  # where each group is; empty while it waits
        self.died: set[str] = set()  # groups whose node did

    def ask(self, bundles: list[dict[str, float]], name: str) -> str:
        self.placed[name] = ""
        self.place()
        return name

    def table(self, group: str | None = None) -> dict[str, Any]:
        if group is None:
            return {}
        waits = "RESCHEDULING" if group in self.died else "PENDING"
        return {"state": "CREATED" if self.placed[group] else waits, "bundles_to_node_id": {0: self.placed[group]}}

    def remove(self, group: str) -> None:
        del self.placed[group]
        self.place()

    def place(self) -> None:
        for group in [group for group, node in self.placed.items() if not node]:
            self.placed[group] = next((node for node, room in self.room.items() if room > self.taken(node)), "")

    def taken(self, node: str) -> int:
        return list(self.placed.values()).count(node)

    def lose(self, node: str) -> None:
        del self.room[node]
        self.died = {group for group, where in self.placed.items() if where == node}
        self.placed |= dict.fromkeys(self.died, "")
        self.place()


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    rooms = Rooms(n0=0, n1=1)
    monkeypatch.setattr(demands, "placement_group", rooms.ask)
    monkeypatch.setattr(demands, "placement_group_table", rooms.table)
    monkeypatch.setattr(demands, "remove_placement_group", rooms.remove)
    return rooms


@pytest.fixture
def demand() -> Demand:
    return Demand("demand:", {"CPU": 1.0})


def test_room_on_a_node_that_goes_hides_nothing_that_is_missing(rooms: Rooms, demand: Demand, monkeypatch: Any) -> None:
    """Whoever had notice has left n1. Ray places there what is to bring a replacement, and an autoscaler sees what waits."""
    monkeypatch.setattr(demands, "INTERVAL_S", 0.01)
    held: list[Counter[str]] = []

    async def play() -> None:
        keeping = asyncio.create_task(demand.keep(lambda: 1, lambda: {"n1"}, held.append))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if len(rooms.placed) > 1:
                break
        await asyncio.sleep(0.1)
        keeping.cancel()

    asyncio.run(play())
    assert sorted(rooms.placed.values()) == ["", "n1"], "one holds the room, and one waits"
    assert held[-1] == Counter(n1=1)
    rooms.room["n2"] = 1
    rooms.place()
    for _ in range(2):
        demand.adjust(1, {"n1"})
        assert list(rooms.placed.values()) == ["n1"], "what came is given up, and not asked for again before it can be counted"
    assert demand.adjust(0, {"n1"}) == Counter()
    assert rooms.placed == {}


def test_free_room_on_a_node_that_a_worker_was_asked_to_leave_hides_nothing(rooms: Rooms, demand: Demand) -> None:
    """Its replacement is not to come there, and Ray does not know that."""
    board = NoticeBoard(lambda _: None, lambda: 0.0)
    board.noticed("w2", "n1", Notice(60.0, REQUEST, "a person asked for it"))
    for _ in range(2):
        demand.adjust(1, board.going())
    assert sorted(rooms.placed.values()) == ["", "n1"]
    board.forget("w2")
    demand.adjust(1, board.going())
    assert list(rooms.placed.values()) == [], "what is free there is counted again"


def test_of_several_that_are_missing_as_many_wait(rooms: Rooms, demand: Demand) -> None:
    rooms.room["n1"] = 3
    for _ in range(3):
        demand.adjust(2, {"n1"})
    assert sorted(rooms.placed.values()) == ["", "", "n1", "n1", "n1"]
    demand.adjust(1, {"n1"})
    assert sorted(rooms.placed.values()) == ["", "n1", "n1", "n1"]


def test_others_wait_on_when_room_for_one_has_come(rooms: Rooms, demand: Demand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted before that is forgotten."""

    def a_worker_takes_its_place(group: str) -> None:
        if node := rooms.placed[group]:
            rooms.room[node] -= 1
        rooms.remove(group)

    monkeypatch.setattr(demands, "remove_placement_group", a_worker_takes_its_place)
    rooms.room["n1"] = 0
    demand.adjust(3)
    _, *others = rooms.placed
    rooms.room["n1"] = 1
    rooms.place()
    for missing in (3, 2):
        demand.adjust(missing)
        assert list(rooms.placed) == others


def test_what_held_the_room_of_a_node_asks_for_nothing_when_the_node_is_gone(rooms: Rooms, demand: Demand) -> None:
    for _ in range(2):
        demand.adjust(1, {"n1"})
    rooms.lose("n1")
    assert list(rooms.placed.values()) == ["", ""], "Ray places it anew"
    demand.adjust(1, {"n1"})
    assert list(rooms.placed.values()) == [""]


def test_a_node_that_stays_is_given_back(rooms: Rooms, demand: Demand) -> None:
    for _ in range(2):
        demand.adjust(1, {"n1"})
    demand.adjust(1)
    assert rooms.placed == {}, "its room is counted now"


def test_nothing_is_held_after_the_end(rooms: Rooms, demand: Demand) -> None:
    for _ in range(2):
        demand.adjust(1, {"n1"})
    asyncio.run(demand.close())
    assert rooms.placed == {}


def test_what_cannot_be_taken_back_now_is_taken_back_later(
    rooms: Rooms, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(group: str) -> None:
        raise RaySystemError("failed to connect to GCS")

    for _ in range(2):
        demand.adjust(1, {"n1"})
    with monkeypatch.context() as patch:
        patch.setattr(demands, "remove_placement_group", away)
        with pytest.raises(RaySystemError):
            demand.adjust(0)
    asyncio.run(demand.close())
    assert rooms.placed == {}


@pytest.mark.parametrize("error", [RaySystemError("failed to connect to GCS"), RuntimeError("the state is not connected")])
def test_the_end_of_a_run_does_not_fail_with_what_cannot_be_taken_back(
    error: Exception, rooms: Rooms, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after it would be left out: the log, the right to write."""

    def away(group: str) -> None:
        raise error

    demand.adjust(1)
    monkeypatch.setattr(demands, "remove_placement_group", away)
    asyncio.run(demand.close())
