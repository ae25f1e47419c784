"""Where each worker is, as far as the supervisor knows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import ray

from raytrain_ft.runtime.spec import NAMESPACE, Introduction, RunSpec


class Contacts:
    """What is known of the workers of a run. `Crew` keeps it; who notices losses looks it up.

    Attributes:
        handles: Ray's, of the workers that were started or asked.
        placed: the node that each is on, or was chosen for; None while one is looked for.
        introductions: what each said of itself once it was set up.
        lines: what waits for the end of each one's process (see `lifeline`).
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.handles: dict[str, Any] = {}
        self.placed: dict[str, str | None] = {}
        self.introductions: dict[str, Introduction] = {}
        self.lines: dict[str, asyncio.Task[None]] = {}

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
