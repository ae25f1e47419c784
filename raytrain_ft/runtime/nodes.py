"""The cluster's nodes as the supervisor sees them: how many workers they have room for, which died, which Ray takes away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain_ft.policy import messages as m
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.node_links import NodeLinks
from raytrain_ft.runtime.notice_board import NoticeBoard
from raytrain_ft.runtime.spec import RunSpec

INTERVAL_S = 1.0
FORGIVE_DEAD_S = 90.0
"""How long a node that refuses connections is avoided. By then Ray knows of its death."""
FORGIVE_SILENT_S = 15.0
"""How long a node is avoided whose worker fell silent: most often it was that process alone, which Ray kills in seconds."""
DISFAVOUR_S = 600.0
"""How long other nodes are preferred to one where a worker could not do what others can."""
UNTIMED_DRAIN_S = 3600.0
"""How long a node is taken to stay that Ray drains without a deadline."""


class Nodes:
    """Looked at once a second, on a task of its own: Ray may take its time to answer, and silence is noticed meanwhile.

    Args:
        died: is told of a node whose raylet is gone.
    """

    def __init__(
        self,
        spec: RunSpec,
        tell: Callable[[m.Event], None],
        board: NoticeBoard,
        contacts: Contacts,
        died: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._tell = tell
        self._board = board
        self._contacts = contacts
        self.links = NodeLinks(died)
        self._avoid: dict[str, float] = {}
        self._disfavour: dict[str, float] = {}
        self._ahead: dict[str, float] = {}  # of the time of day here, seconds
        self._counted: m.CapacityChanged | None = None

    async def watch(self, members: Callable[[], list[str]]) -> None:
        """For ever."""
        sees_drains = await self._sees_drains()
        while True:
            if sees_drains:
                with suppress(Exception):  # as below
                    until = await asyncio.to_thread(draining)
                    left = {node: self._seconds_left(node, at) for node, at in until.items()}
                    self._board.drained(left, members(), self._contacts)
            try:
                nodes = await asyncio.to_thread(placement.nodes)
            except Exception:  # the call is private to Ray, whose own state may not answer: what was known holds
                pass
            else:
                self.links.follow(nodes, self._contacts.taken())
                self.count(nodes)
            await asyncio.sleep(INTERVAL_S)

    def tells_time(self, node: str | None, clock: float) -> None:
        """What time of day it is on a node."""
        if node is not None:
            self._ahead[node] = clock - time.time()

    def _seconds_left(self, node: str, until: float) -> float:
        """Until a time of day by the clock of this host or by the node's, whichever leaves less: whose clock Ray's deadline is
        by it does not say, and a node that is told to end takes its own."""
        left = until - time.time() - max(self._ahead.get(node, 0.0), 0.0)
        return UNTIMED_DRAIN_S if math.isinf(until) else max(left, 0.0)

    def avoid(self, node: str, seconds: float) -> None:
        """Nothing is placed there for so long, whatever Ray still thinks of it."""
        self._avoid[node] = max(time.monotonic() + seconds, self._avoid.get(node, 0.0))

    def disfavour(self, node: str) -> None:
        """It may lack what others have: for some time nothing is placed there if another node has room."""
        self._disfavour[node] = time.monotonic() + DISFAVOUR_S

    @property
    def disfavoured(self) -> set[str]:
        """See `disfavour`."""
        now = time.monotonic()
        return {node for node, until in self._disfavour.items() if now < until}

    @property
    def avoided(self) -> set[str]:
        """Where nothing should be placed now."""
        return self._silent() | self._board.condemned()

    def going(self) -> set[str]:
        """Nodes that are said to go, where Ray still places what it is asked to: a last resort."""
        return self._board.going()

    @property
    def unusable(self) -> set[str]:
        """Where nothing can be placed now."""
        return self.avoided - self.going() | self._silent()

    def _silent(self) -> set[str]:
        now = time.monotonic()
        return {node for node, until in self._avoid.items() if now < until}

    def recount(self) -> None:
        """Other nodes are avoided than a moment ago: whoever acts upon why is to know first what room there is."""
        if self._counted is not None:
            self.count(self.links.nodes)

    def count(self, nodes: list[dict[str, Any]]) -> None:
        """Tells how many workers these nodes have room for, if that is news."""
        wanted, ours, unusable = placement.demand(self._spec.options), self._contacts, self.unusable
        about = (nodes, wanted, ours.taken(), ours.vacated(), ours.held)
        free, most = (placement.capacity(*about, avoid) + len(ours.somewhere) for avoid in (self.avoided, unusable))
        stay = self._board.staying(ours.taken())
        slots = free + sum(stay[node] for node in stay.keys() - unusable)
        counted = m.CapacityChanged(slots=slots, last_resort=most - slots)
        if counted != self._counted:
            self._counted = counted
            self._tell(counted)

    async def _sees_drains(self) -> bool:
        """Whether this version of Ray still has the call that tells of them."""
        if not self._spec.notices.drain:
            return False
        try:
            await asyncio.to_thread(draining)
        except (AttributeError, ImportError, TypeError) as error:  # it is private to Ray
            reason = f"this version of Ray does not tell of drains: {type(error).__name__}: {error}"[:300]
            self._tell(m.NoticesUnavailable(member=None, source="ray", reason=reason))
            return False
        except Exception:  # Ray's own state does not answer now
            pass
        return True


def draining() -> dict[str, float]:
    """The nodes that Ray drains, and until when each of them stays, Unix seconds. Private to Ray: there is no public call for
    that."""
    from ray._private.state import state

    drained: dict[str, int] = state.get_draining_nodes()  # in milliseconds; 0 without a deadline
    return {node: until / 1000 if until else math.inf for node, until in drained.items()}
