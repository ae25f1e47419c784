"""Asking the cluster for room that it has not got: what an autoscaler reacts to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

INTERVAL_S = 1.0
COUNTED_WITHIN_S = 3.0
"""How long it may take until room that came is counted. It must not be asked for again meanwhile: it would be taken again."""
CLOSE_S = 10.0
WAITING = ("PENDING", "PREPARED", "RESCHEDULING")
"""States of a group that was not placed yet, or not again since its node died."""

T = TypeVar("T")


class Demand:
    """The workers that a run lacks room for, each as a placement group that waits.

    Ray's autoscaler starts nodes for whatever waits to be placed, on a cloud, on Kubernetes and in tests alike. A placement
    group needs no process to wait, it belongs to this run alone (`request_resources` would overwrite what other runs ask for),
    and it goes with the supervisor. One that was placed is given up again: its room is counted, and a worker takes it. But no
    worker goes to a node that is said to go, of which Ray knows nothing, unless as a last resort: a group that was placed there
    stays as long as anything is missing. Else the next one would be placed there, too, and no autoscaler would see one that
    waits.

    Args:
        prefix: of the groups' names, unique to the run.
        bundle: what one worker takes, in Ray's words.
    """

    def __init__(self, prefix: str, bundle: dict[str, float]) -> None:
        self._prefix = prefix
        self._bundle = bundle
        self._groups: list[PlacementGroup] = []
        self._came: list[float] = []
        self._thread = ThreadPoolExecutor(1, "demand")  # one call after the other, also if nobody waits for it any more
        self._made = 0

    async def keep(
        self, missing: Callable[[], int], going: Callable[[], Collection[str]], hold: Callable[[Counter[str]], None]
    ) -> None:
        """Asks for as many workers as are missing, for ever; what somebody of this run's name left behind is taken back.

        Args:
            going: the nodes that are said to go.
            hold: is told how many places are held on each of those.
        """
        earlier = True
        while True:
            with contextlib.suppress(RayError, RuntimeError):  # its own state may not answer: asked again in a moment
                if earlier:
                    await self._in_thread(self.forget_earlier)
                earlier = False
                hold(await self._in_thread(self.adjust, missing(), going()))
            await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Asks for nothing any more. What cannot be taken back goes with the supervisor."""
        with contextlib.suppress(RayError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self._in_thread(self.adjust, 0), CLOSE_S)
        self._thread.shutdown(wait=False)

    def adjust(self, missing: int, going: Collection[str] = ()) -> Counter[str]:
        """Has so many groups wait; returns how many hold a place, on each node. Calls Ray and waits for its answers."""
        now = time.monotonic()
        self._came = [at for at in self._came if now - at < COUNTED_WITHIN_S]
        waiting: list[PlacementGroup] = []
        held: Counter[str] = Counter()
        for group in list(self._groups):
            node = _node_of(group)
            if node is None:
                waiting.append(group)
            elif not missing or node not in going:
                self._came.append(now)
                self._give_up(group)
            else:
                held[node] += 1
        for group in waiting[missing:]:  # not for what came: that is counted by now, perhaps
            self._give_up(group)
        for _ in range(missing - len(self._came) - len(waiting) if self._bundle else 0):
            self._made += 1
            self._groups.append(placement_group([self._bundle], name=f"{self._prefix}{self._made}"))
        return held

    def _give_up(self, group: PlacementGroup) -> None:
        remove_placement_group(group)
        self._groups.remove(group)  # not before: one that could not be taken back now is taken back later

    def forget_earlier(self) -> None:
        """This supervisor may be the second: Ray started it again, and what the first one asked for still waits."""
        for known in placement_group_table().values():
            if known["name"].startswith(self._prefix) and known["state"] != "REMOVED":
                self._made = max(self._made, int(known["name"].removeprefix(self._prefix)))
                with contextlib.suppress(ValueError):  # it went meanwhile
                    remove_placement_group(get_placement_group(known["name"]))

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


def _node_of(group: PlacementGroup) -> str | None:
    """Where it was placed; None as long as it waits, and empty if somebody removed it."""
    known = placement_group_table(group)
    if known.get("state") in WAITING:
        return None
    return known["bundles_to_node_id"][0] if known.get("state") == "CREATED" else ""
