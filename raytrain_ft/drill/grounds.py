"""Where a drill takes place: a laptop cluster, or a running one. What is not possible there is refused beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_ft.chaos.cluster import LocalCluster, drain_node
from raytrain_ft.chaos.hand import Hand
from raytrain_ft.chaos.hosts import HostCluster
from raytrain_ft.chaos.network import why_unavailable
from raytrain_ft.drill.faults import is_planted
from raytrain_ft.errors import ConfigError
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.bystanders import driver_node, head_nodes, other_actors, other_jobs
from raytrain_ft.scenario import Scenario
from raytrain_ft.scenario.events import WHOLE_NODES

ANSWER_S = 10.0
"""How long a hand on another node may take."""


class Ground(Protocol):
    """Where runs are struck. Nodes by their Ray id; `pid` is of a process on that node."""

    name: str

    def refuse(self, scenario: Scenario) -> None:
        """Raises `ScenarioError` for an event that cannot be carried out here."""
        ...

    def prepare(self, nodes: list[str]) -> None:
        """These are the nodes that the run is on now."""
        ...

    def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
        """Lets the hand on a node do something (a method of `Hand`) to a process; False if the process is gone."""
        ...

    def kill_node(self, node: str) -> bool:
        """Kills a whole node of the run; False if it is gone, or could not be killed."""
        ...

    def lives(self, node: str) -> bool:
        """Whether a node is there."""
        ...

    def unplug(self, node: str) -> None:
        """Pulls a node's cable out."""
        ...

    def plug(self, node: str) -> None:
        """Puts it in again."""
        ...

    def drain(self, node: str, seconds: float) -> None:
        """Gives notice that a node will be gone after so many seconds."""
        ...

    def add_node(self) -> str:
        """Brings a node, unless others do that here; returns which, for the report."""
        ...

    def clock(self) -> float:
        """Seconds, of the clock by which strikes are timed here."""
        ...

    def struck_at(self, marker: list[str]) -> float:
        """The time by that clock in a `FailAt`'s marker."""
        ...


class Laptop:
    """A `LocalCluster`. A node can be unplugged only where nodes have cables (`HostCluster`).

    Nodes are added from the main thread only: Ray installs a handler of signals.
    """

    name = "local"

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._hand = Hand()
        self._hosts = cluster if isinstance(cluster, HostCluster) else None  # each of them has a clock of its own, too

    def refuse(self, scenario: Scenario) -> None:
        """See `Ground`."""
        for place, action in _events(scenario):
            if action == "unplug" and self._hosts is None:
                raise scenario.error(place, "unplug: all nodes of this cluster share one network; use a HostCluster, or freeze")

    def prepare(self, nodes: list[str]) -> None:
        """See `Ground`."""

    def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
        """See `Ground`."""
        return getattr(self._hand, what)(pid, *more)

    def kill_node(self, node: str) -> bool:
        """See `Ground`."""
        if not self.lives(node):
            return False
        try:
            self._cluster.kill_node(node)
        except psutil.NoSuchProcess:
            return False
        return True

    def lives(self, node: str) -> bool:
        """See `Ground`."""
        return node in self._cluster.node_ids()

    def unplug(self, node: str) -> None:
        """See `Ground`."""
        assert self._hosts is not None
        self._hosts.unplug(node)

    def plug(self, node: str) -> None:
        """See `Ground`."""
        assert self._hosts is not None
        self._hosts.plug(node)

    def drain(self, node: str, seconds: float) -> None:
        """See `Ground`."""
        self._cluster.drain_node(node, seconds)

    def add_node(self) -> str:
        """See `Ground`."""
        self._cluster.add_node()
        return "a node joined"

    def clock(self) -> float:
        """See `Ground`."""
        return time.time() if self._hosts is not None else time.monotonic()

    def struck_at(self, marker: list[str]) -> float:
        """See `Ground`."""
        return float(marker[2 if self._hosts is not None else 0])


class Running:
    """A running cluster that this process is connected to, with a hand (an actor without CPUs) on each node of the drill's run.

    Args:
        confirmed: the address of the cluster that may be broken, as the person who asks for the drill wrote it.

    Raises:
        ConfigError: the process is connected to another cluster than the one that was named.
    """

    name = "cluster"

    def __init__(self, confirmed: str | None) -> None:
        address = ray.get_runtime_context().gcs_address
        if confirmed != address:
            found = f"{confirmed!r} was given" if confirmed else "none was given"
            raise ConfigError(
                f"a drill kills processes and nodes of the cluster at {address}, and needs that address as its confirmation; "
                f"{found}. If this is the cluster to break, add --yes-break-this-cluster {address}"
            )
        self._hands: dict[str, Any] = {}

    def refuse(self, scenario: Scenario) -> None:
        """See `Ground`. Node losses are refused where they could hit the head node, this drill or somebody else's job."""
        for place, action in _events(scenario):
            if action == "unplug":
                raise scenario.error(place, "unplug: the network of a running cluster is not ours to cut; use freeze")
            if action == "bring_back":
                raise scenario.error(place, "bring_back: a running cluster has its autoscaler for that; leave this event out")
            if action in WHOLE_NODES:
                number = int(place[1])
                event = scenario.events[number]
                if event.lasts is not None and action != "unplug":
                    raise scenario.error(
                        (*place[:2], "lasts"), "a running cluster has its autoscaler to bring nodes: leave it out"
                    )
                if is_planted(event):
                    raise scenario.error(
                        place,
                        f"{action}: a worker that takes its node down at a step does not ask who else is there by then: give "
                        "seconds, or without at: who: {node: ...}",
                    )
                if reason := self._harm():
                    raise scenario.error(place, f"{action}: {reason}")

    def _harm(self) -> str:
        """Why the loss of a node that hosts a worker could harm more than the drill's own run; "" if it cannot."""
        hosting = [node for node in head_nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        if hosting:
            return (
                f"the head node {hosting[0]['NodeManagerAddress']} has room for workers, and without it the cluster is gone: "
                "start it with --num-cpus=0"
            )
        if own := driver_node():
            return (
                f"this drill itself runs on node {own['NodeManagerAddress']}, which has room for workers, and would go down "
                "with it: submit it without --entrypoint-num-cpus and other resources, so that it runs on the head node"
            )
        if jobs := other_jobs():
            return f"job {jobs[0]} is alive on this cluster, and a node takes everybody down that is on it: wait for its end"
        if actors := other_actors():
            return (
                f"the actor {actors[0]!r} of another job is alive on this cluster, and a node takes everybody down that is on "
                "it: end it, or wait for its end"
            )
        return ""

    def prepare(self, nodes: list[str]) -> None:
        """Starts hands where there are none, before they are needed."""
        for node in nodes:
            if node not in self._hands:
                affinity = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(Hand).options(num_cpus=0, scheduling_strategy=affinity, max_concurrency=4)
                self._hands[node] = actor.remote(ray.get_runtime_context().get_job_id())

    def hand(self, node: str, what: str, pid: int, *more: float) -> bool:
        """See `Ground`."""
        self.prepare([node])
        hand = self._hands[node]
        up, _ = ray.wait([hand.__ray_ready__.remote()], timeout=ANSWER_S)
        if not up:
            return False  # it would strike whenever its process has started
        order = getattr(hand, what).remote(pid, *more)
        try:
            done: Any = ray.get(order, timeout=ANSWER_S)
        except GetTimeoutError:
            ray.cancel(order)
            return False
        except RayError:
            self._hands.pop(node, None)
            return False
        return bool(done)

    def kill_node(self, node: str) -> bool:
        """See `Ground`. Ray itself says only later whether it is gone; what its raylet's port says counts."""
        self._spare(node)
        if not self.lives(node):
            return False  # a hand that is started there now would wait for it for ever
        self.prepare([node])
        hand = self._hands.pop(node)
        ray.wait([hand.kill_node.remote()], timeout=ANSWER_S)
        if not self.lives(node):
            return True
        ray.kill(hand)
        return False

    def lives(self, node: str) -> bool:
        """See `Ground`."""
        known = next((one for one in placement.nodes() if one["NodeID"] == node and one["Alive"]), None)
        return known is not None and _answers(known)

    def _spare(self, node: str) -> None:
        """Once more it is made sure that nobody else is hit: jobs come and go."""
        if reason := self._harm():
            raise ConfigError(f"node {node} was spared: {reason}")

    def unplug(self, node: str) -> None:
        """Refused beforehand."""
        raise ConfigError("the network of a running cluster is not ours to cut")

    def plug(self, node: str) -> None:
        """Refused beforehand."""
        raise ConfigError("the network of a running cluster is not ours to mend")

    def drain(self, node: str, seconds: float) -> None:
        """See `Ground`. Ray takes no drain back, so it is told only if the node may be killed as things are."""
        self._spare(node)
        drain_node(ray.get_runtime_context().gcs_address, node, seconds)

    def add_node(self) -> str:
        """See `Ground`. What a trace gives is not refused beforehand: the same recording is of use here, too."""
        return "left to the cluster's autoscaler"

    def clock(self) -> float:
        """The time of day, which machines agree upon to milliseconds if their clocks are kept."""
        return time.time()

    def struck_at(self, marker: list[str]) -> float:
        """See `Ground`."""
        return float(marker[2])

    def close(self) -> None:
        """Ends the hands."""
        for hand in self._hands.values():
            ray.kill(hand)
        self._hands.clear()


def _answers(node: dict[str, Any]) -> bool:
    return asyncio.run(placement.reaction(node)) == "answer"


def _events(scenario: Scenario) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for number, event in enumerate(scenario.events):
        yield ("events", number, "action"), event.action


def laptop(scenario: Scenario) -> LocalCluster:
    """A laptop cluster with room for the scenario's workers and spares; of hosts with cables if one is unplugged.

    Raises:
        ScenarioError: a node is to be unplugged, and this machine cannot have such hosts.
    """
    wanted = scenario.range[1] + scenario.spares
    nodes = scenario.nodes or wanted
    unplugged = next((place for place, action in _events(scenario) if action == "unplug"), None)
    if unplugged is None:
        return LocalCluster(nodes, -(-wanted // nodes))
    if reason := why_unavailable():
        raise scenario.error(unplugged, f"unplug: this machine cannot have hosts with cables: {reason}")
    return HostCluster(nodes, -(-wanted // nodes))


def default_storage() -> Path:
    """Where the records of drills are kept."""
    return Path("~/ray_results").expanduser()
