"""What the supervisor knows of notices, from workers, Ray and whoever asks: news becomes events, such nodes are avoided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from raytrain_ft.policy import messages as m
from raytrain_ft.policy.leaving import DRAIN, REQUEST, lapses_after
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.notices.notice import NODE_STAYS, Notice

SOONER_S = 1.0
"""By how much a notice must be more urgent than what is known of a worker already to be news."""


class NoticeBoard:
    """Every notice that was heard of. Times are those of the run's clock."""

    def __init__(self, tell: Callable[[m.Event], None], now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._until: dict[str, dict[str, float]] = {}  # of each worker, by source
        self._gone: dict[str, dict[str, float]] = {}  # of each node, by source: when it is gone, if that was true
        # of each process that goes while its node stays: that node, and until when
        self._going: dict[str, tuple[str, float]] = {}
        self._drained: set[str] = set()

    def recall(self, event: m.Noticed, node: str | None) -> None:
        """This was told before the supervisor's own restart."""
        until = event.at + event.deadline_s
        self._until.setdefault(event.member, {})[event.source] = until
        self._shun(event.member, node, event.source, until)

    def noticed(self, member: str, node: str | None, notice: Notice) -> None:
        """This worker will be taken away. Told only if it is more urgent than all that was told of this worker so far.

        The same source may be told of again: a cloud may be in more of a hurry than it said, and what `now` says lags behind
        after a restart, by the time that the supervisor was away. A person is not repeating what they said: what they ask for
        is told whenever it is sooner than what was asked before, or that was in vain; what a cloud said meanwhile may come to
        nothing. Who is wrong about a node is not believed about it again.
        """
        known, now = self._until.setdefault(member, {}), self._now()
        until, asked = now + notice.deadline_s, notice.source == REQUEST
        if self._is_refuted(node, notice.source):
            return
        self._shun(member, node, notice.source, until)
        for source in [source for source in known if source != DRAIN and known[source] + lapses_after(source) <= now]:
            del known[source]  # what Ray says of a drain is said for as long as that lasts
        earlier = [at for source, at in known.items() if source == REQUEST or not asked]
        if until >= min(earlier, default=math.inf) - (0.0 if asked else SOONER_S) and notice.replaced:
            return
        known[notice.source] = min(until, known.get(notice.source, until))
        about = {"source": notice.source, "reason": notice.reason, "replaced": notice.replaced}
        self._tell(m.Noticed(member=member, deadline_s=round(notice.deadline_s, 3), **about))

    def _is_refuted(self, node: str | None, source: str) -> bool:
        """Whether this source said long ago that a node would be gone, which has a worker that says so again."""
        return source not in (*NODE_STAYS, DRAIN) and self._gone.get(node or "", {}).get(source, math.inf) <= self._now()

    def _shun(self, member: str, node: str | None, source: str, until: float) -> None:
        """Nothing is placed there any more; if it is the process that goes, not before it is gone, or the deadline is over."""
        if node is None:
            return
        if source in NODE_STAYS:
            self._going[member] = node, max(until, self._going.get(member, (node, until))[1])
            return
        gone = self._gone.setdefault(node, {})
        gone[source] = min(until + lapses_after(source), gone.get(source, math.inf))

    def forget(self, member: str) -> None:
        """This worker is gone."""
        self._going.pop(member, None)

    def drained(self, nodes: dict[str, float], members: Iterable[str], contacts: Contacts) -> None:
        """Ray drains these nodes, each with so many seconds left: their workers have notice."""
        self._drained = set(nodes)
        for member in members:
            node = contacts.node_of(member)
            if node in nodes:
                self.noticed(member, node, Notice(nodes[node], DRAIN, f"Ray drains node {node[:8]}"))

    def condemned(self) -> set[str]:
        """Nodes where nothing should be placed now."""
        return self._taken_away() | self._left_by().keys() | self._drained

    def going(self) -> set[str]:
        """Those of them of which Ray knows nothing, and where it places what it is asked to: all but those that it drains."""
        return self.condemned() - self._drained

    def staying(self, taken: Counter[str]) -> Counter[str]:
        """Of the workers on each node, those that keep their places there though nothing is placed there: only others go."""
        left_by = self._left_by()
        stay = left_by.keys() - self._taken_away() - self._drained
        return Counter({node: max(0, taken[node] - left_by[node]) for node in stay})

    def _taken_away(self) -> set[str]:
        now = self._now()
        return {node for node, gone in self._gone.items() if now < max(gone.values())}

    def _left_by(self) -> Counter[str]:
        """How many processes go whose node stays, of each such node."""
        now = self._now()
        return Counter(node for node, until in self._going.values() if now < until)
