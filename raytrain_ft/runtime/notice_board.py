"""What the supervisor knows of notices, from workers, Ray and whoever asks: news becomes events, such nodes are avoided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from raytrain_ft.policy import messages as m
from raytrain_ft.runtime.notices.notice import DRAIN, NODE_STAYS, REQUEST, Notice

SOONER_S = 1.0
"""By how much a notice must be more urgent than what is known of a worker already to be news."""


class NoticeBoard:
    """Every notice that was heard of."""

    def __init__(self, tell: Callable[[m.Event], None], now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._until: dict[str, dict[str, float]] = {}  # of each worker, by source
        self._avoid: dict[str, float] = {}
        self._drained: set[str] = set()

    def recall(self, event: m.Noticed, node: str | None) -> None:
        """This was told before the supervisor's own restart."""
        until = event.at + event.deadline_s
        self._until.setdefault(event.member, {})[event.source] = until
        self._shun(node, event.source, until - self._now())

    def noticed(self, member: str, node: str | None, notice: Notice) -> None:
        """This worker will be taken away. Told only if it is more urgent than all that was told of this worker so far.

        The same source may be told of again: a worker fixes its deadline once, but what `now` says lags behind after a restart,
        by the time that the supervisor was away. A person is not repeating what they said: what they ask for is told whenever
        it is sooner, or was asked in vain before.
        """
        self._shun(node, notice.source, notice.deadline_s)
        known, now = self._until.setdefault(member, {}), self._now()
        if known.get(REQUEST, math.inf) <= now:
            del known[REQUEST]
        until, asked = now + notice.deadline_s, notice.source == REQUEST
        if until >= min(known.values(), default=math.inf) - (0.0 if asked else SOONER_S):
            return
        known[notice.source] = until
        left = round(notice.deadline_s, 3)
        self._tell(m.Noticed(at=self._now(), member=member, deadline_s=left, source=notice.source, reason=notice.reason))

    def _shun(self, node: str | None, source: str, seconds: float) -> None:
        """Nothing is placed there any more, or not before the deadline if the node may stay."""
        if node is not None:
            until = time.monotonic() + seconds if source in NODE_STAYS else math.inf
            self._avoid[node] = max(until, self._avoid.get(node, until))

    def drained(self, nodes: dict[str, float], members: Iterable[str], crew: Any) -> None:
        """Ray drains these nodes, each with so many seconds left: their workers have notice."""
        self._drained = set(nodes)
        for member in members:
            node = crew.node_of(member)
            if node in nodes:
                self.noticed(member, node, Notice(nodes[node], DRAIN, f"Ray drains node {node[:8]}"))

    def condemned(self) -> set[str]:
        """Nodes where nothing should be placed any more."""
        now = time.monotonic()
        return {node for node, until in self._avoid.items() if now < until} | self._drained
