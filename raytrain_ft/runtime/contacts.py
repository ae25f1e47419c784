"""Where each worker is, as far as the supervisor knows it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import ray

from raytrain_ft.runtime.spec import NAMESPACE, Introduction, RunSpec

ROOM_SECONDS = 10.0
"""How long Ray may take to see the end of a worker that was killed, a frozen one too, and to give back what it held."""


class Contacts:
    """What is known of the workers of a run. `Crew` keeps it; who notices losses looks it up.

    Attributes:
        handles: Ray's, of the workers that were started or asked.
        placed: the node that each is on, or was chosen for; None while one is looked for.
        somewhere: who was on its way when the supervisor was lost, and takes a place that is not known here yet.
        introductions: what each said of itself once it was set up.
        lines: what waits for the end of each one's process (see `lifeline`).
        held: places on each node that are kept from others for this run (see `Demand`).
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.handles: dict[str, Any] = {}
        self.placed: dict[str, str | None] = {}
        self.somewhere: set[str] = set()
        self.introductions: dict[str, Introduction] = {}
        self.lines: dict[str, asyncio.Task[None]] = {}
        self.held: Counter[str] = Counter()
        self._vacated: list[tuple[str, float]] = []  # by those who are gone: the node, and until when to believe in it

    def place(self, member: str, node: str | None) -> None:
        """A worker is on this node, or on its way there, perhaps in the place of one that is gone."""
        free = [place for place in self._vacated if place[0] == node]
        if free and node != self.placed.get(member):
            self._vacated.remove(free[0])
        self.placed[member] = node
        self.somewhere.discard(member)

    def hold(self, held: Counter[str]) -> None:
        """So many places on each node are kept from others for this run now."""
        self.held = held

    def any_seeks(self) -> bool:
        """Whether a place is being looked for."""
        return None in self.placed.values()

    def vacate(self, member: str) -> None:
        """This worker is gone. Its place will be free when Ray has seen that."""
        self.somewhere.discard(member)
        node = self.placed.pop(member, None)
        if node is not None:
            self._vacated.append((node, time.monotonic() + ROOM_SECONDS))

    def vacated(self) -> Counter[str]:
        """Places on each node that are free, or about to be, because workers of ours are gone."""
        now = time.monotonic()
        self._vacated = [(node, until) for node, until in self._vacated if now < until]
        return Counter(node for node, _ in self._vacated)

    def taken(self) -> Counter[str]:
        """Workers of ours on each node, those on their way included."""
        return Counter(node for node in self.placed.values() if node)

    def node_of(self, member: str) -> str | None:
        """The Ray node of a worker."""
        known = self.introductions.get(member)
        return known.node if known else self.placed.get(member)

    def pid_of(self, member: str) -> int | None:
        """The process of a worker on its node."""
        known = self.introductions.get(member)
        return known.pid if known else None

    def handle(self, member: str) -> Any:
        """A worker's actor handle, found by name after the supervisor's own restart."""
        if member not in self.handles:
            self.handles[member] = ray.get_actor(self._spec.member_name(member), namespace=NAMESPACE)
        return self.handles[member]

    def ended_on(self, node: str) -> list[str]:
        """Workers there whose processes were seen to end a moment ago."""
        return [member for member in self.lines if self.line_ended(member) and self.node_of(member) == node]

    def line_ended(self, member: str) -> bool:
        """Whether this worker's process was seen to end."""
        line = self.lines.get(member)
        # One that failed tells nothing: then it is for Ray to say that the worker is lost.
        return line is not None and line.done() and not line.cancelled() and line.exception() is None
