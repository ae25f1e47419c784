"""Where workers go: spread, the emptiest node first, and only where there is room that nobody else uses."""

from __future__ import annotations

import ast
import asyncio
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from pages import ROOT
from ray.exceptions import RaySystemError

from raytrain_ft.errors import ConfigError
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.lifeline import CONNECT_SECONDS
from raytrain_ft.runtime.placement import apart, capacity, check_ray, choose, demand, is_silent, lacking, reaction, room


def node(name: str, cpus: float, free: float, alive: bool = True) -> dict:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus}, "Available": {"CPU": free}}


ONE = {"CPU": 1.0}


def test_what_others_use_is_not_to_be_had() -> None:
    assert room(node("a", 4, 1), ONE, taken=0) == 1
    assert room(node("a", 4, 1), ONE, taken=2) == 3
    assert room(node("a", 4, 4), ONE, taken=2) == 4  # ours are not yet seen by Ray: no more than there is in all
    assert room(node("a", 4, 4, alive=False), ONE, taken=2) == 0


def test_shares_of_a_processor_fill_it() -> None:
    """1.0 // 0.2 is 4."""
    for size, share, times in ((1, 0.2, 5), (1, 0.1, 10), (3, 0.3, 10), (4, 0.8, 5), (1, 0.3, 3)):
        assert room(node("a", size, size), {"CPU": share}, taken=0) == times


def test_what_no_node_has_is_told() -> None:
    """Also while all of it is in use: that ends."""
    nodes = [node("a", 2, 0), node("b", 1, 1), node("dead", 8, 8, alive=False)]
    assert lacking(nodes, {"CPU": 2.0}) == lacking(nodes, {}) == ""
    assert lacking(nodes, {"CPU": 4.0, "GPU": 1.0}) == (
        "each worker takes 4 CPU, 1 GPU, and no node has all of it (the most of each: 2 CPU, 0 GPU)"
    )
    assert "each: 0 CPU" in lacking([], ONE)


def test_the_emptiest_node_with_room_is_chosen() -> None:
    nodes = [node("a", 2, 1), node("b", 2, 2), node("c", 1, 0)]
    assert choose(nodes, ONE, Counter(a=1), set()) == "b"
    assert choose(nodes, ONE, Counter(a=1, b=1), {"b"}) == "a"
    assert choose(nodes, {"GPU": 1.0}, Counter(), set()) is None


def test_what_workers_have_least_to_do_with_is_a_node_without_room_for_any() -> None:
    """Else the one with room for the fewest: what a holder keeps there outlives the others."""
    nodes = [node("a", 1, 1), node("b", 2, 2), node("head", 0, 0), node("dead", 0, 0, alive=False)]
    assert apart(nodes, ONE) == "head"
    assert apart(nodes[:2], ONE) == "a"
    assert apart(nodes[3:], ONE) is None


def test_capacity_counts_ours_and_what_is_free() -> None:
    nodes = [node("a", 2, 0), node("b", 2, 2), node("c", 1, 1)]
    assert capacity(nodes, ONE, Counter(a=1), Counter(), Counter(), {"c"}) == 3


def test_a_place_that_ray_has_not_given_back_yet_is_counted_once() -> None:
    """Else there seems to be a worker's room less for a moment after each loss."""
    for free, vacated in ((0, 1), (1, 1), (1, 0)):
        assert capacity([node("a", 4, free)], ONE, Counter(a=1), Counter(a=vacated), Counter(), set()) == 2
    assert capacity([node("a", 2, 0, alive=False)], ONE, Counter(a=1), Counter(a=1), Counter(), set()) == 0
    assert choose([node("a", 2, 0)], ONE, Counter(a=1), set()) is None, "it is to be had only then"


def test_a_place_that_is_held_for_ours_is_counted_once() -> None:
    """What was asked for may have taken the place of who is gone, as soon as Ray gave it back."""
    for free, vacated, held in ((0, 1, 1), (0, 0, 1), (0, 1, 0)):
        assert capacity([node("a", 4, free)], ONE, Counter(a=1), Counter(a=vacated), Counter(a=held), set()) == 2


def test_demand_in_rays_words() -> None:
    assert demand({"num_cpus": 2, "num_gpus": 0, "resources": {"tpu": 1}}) == {"CPU": 2.0, "tpu": 1}
    assert demand({"num_cpus": 1, "memory": 4e9}) == {"CPU": 1.0, "memory": 4e9}


def test_a_node_that_answered_while_this_process_was_held_up_is_not_silent() -> None:
    """It would be avoided, and a run would begin with a worker less than there is room for."""

    async def knock_and_stand_still(port: int) -> str:
        knocking = asyncio.create_task(reaction({"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}))
        await asyncio.sleep(0)
        time.sleep(CONNECT_SECONDS + 0.3)
        return await knocking

    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        assert asyncio.run(knock_and_stand_still(port)) == "answer"
    assert asyncio.run(knock_and_stand_still(port)) == "refusal"


def test_a_node_without_a_cable_is_silent() -> None:
    with socket.socket() as full:  # its queue takes one, and nobody takes them from it: more get no answer
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": full.getsockname()[1]}
            assert asyncio.run(reaction(node)) == "silence"
            assert asyncio.run(is_silent(node))


def test_a_ray_that_has_renamed_what_room_is_counted_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no worker would ever be started, and after minutes the advice would be to add nodes."""
    monkeypatch.setattr(placement.ray, "__version__", "2.99.0")
    monkeypatch.delattr("ray._private.state.available_resources_per_node")
    with pytest.raises(
        ConfigError, match=r"^Ray 2\.99\.0 does not .* cannot import name 'available_resources_per_node'"
    ) as told:
        check_ray()
    assert "needs Ray 2.59 or newer, and was tested with 2.60.0" in str(told.value)


def test_a_ray_that_does_not_answer_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor asks again, once a second."""

    def away() -> None:
        raise RaySystemError("the head is busy")

    monkeypatch.setattr("ray._private.state.available_resources_per_node", away)
    check_ray()


def test_the_versions_of_ray_that_are_named_are_those_of_the_project() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = (one for one in map(Requirement, needed) if one.name == "ray")
    assert str(ray.specifier) == f">={placement.OLDEST_RAY}"
    assert f'"ray[default,train]=={placement.TESTED_RAY}"' in (ROOT / "cluster.yaml").read_text()


def test_what_is_private_to_ray_is_imported_where_it_is_used() -> None:
    """Whoever does not use it need not care whether a version of Ray has renamed it."""

    def imported() -> Iterator[str]:
        for path in (ROOT / "raytrain_ft").rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                yield from (f"{path.name}: {name}" for name in names if name.startswith("ray.") and "._" in name)

    assert list(imported()) == []
