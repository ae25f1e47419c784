"""The nodes of a simulated cluster, and which members are on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raytrain_ft.simulate.model import Job


@dataclass(slots=True)
class Nodes:
    """Nodes that live, filled in order.

    Attributes:
        hosts: the members on each live node. node_of: the node of each live member.
        waiting: members that are to be started and have no place yet.
        going: nodes that will be taken away: nobody else is placed there.
    """

    job: Job
    hosts: dict[int, set[str]] = field(default_factory=dict)
    node_of: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    going: set[int] = field(default_factory=set)
    _with_room: dict[int, None] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        self.add(self.job.number_of_nodes + self.job.spares + (self.job.spare_nodes or 0))

    @property
    def slots(self) -> int:
        """Workers that the nodes that stay have room for."""
        return (len(self.hosts) - len(self.going)) * self.job.per_node

    @property
    def paid(self) -> int:
        """Nodes that the job holds: no more than it asks for."""
        return min(len(self.hosts), self.job.number_of_nodes + self.job.spares)

    def add(self, number: int) -> None:
        """New nodes."""
        for node in range(self._number, self._number + number):
            self.hosts[node] = set()
            self._with_room[node] = None
        self._number += number

    def place(self, member: str) -> bool:
        """Puts a member on a node; whether there was room."""
        if not self._with_room:
            return False
        node = next(iter(self._with_room))
        self.hosts[node].add(member)
        self.node_of[member] = node
        if len(self.hosts[node]) >= self.job.per_node:
            del self._with_room[node]
        return True

    def condemn(self, nodes: Iterable[int]) -> list[str]:
        """These nodes will be gone; returns who is on them. Where nodes are not scarce, others take their place."""
        on_them: list[str] = []
        for node in nodes:
            on_them += sorted(self.hosts[node])
            if node not in self.going:
                self.going.add(node)
                self._with_room.pop(node, None)
                self.add(1 if self.job.spare_nodes is None else 0)
        return on_them

    def lose(self, nodes: Iterable[int]) -> list[str]:
        """These nodes are gone, those of them that still were there; returns who was on them."""
        nodes = [node for node in nodes if node in self.hosts]
        casualties = self.condemn(nodes)
        for member in casualties:
            del self.node_of[member]
        for node in nodes:
            del self.hosts[node]
        self.going.difference_update(nodes)
        return casualties

    def remove(self, member: str) -> None:
        """A member is gone, its node stays."""
        node = self.node_of.pop(member, None)
        if node is not None:
            self.hosts[node].discard(member)
            if node not in self.going:
                self._with_room[node] = None
        if member in self.waiting:
            self.waiting.remove(member)
