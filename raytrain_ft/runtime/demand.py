"""Asking the cluster for room that it has not got: what an autoscaler reacts to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


class Demand:
    """The workers that a run lacks room for, each as a placement group that waits.

    Ray's autoscaler starts nodes for whatever waits to be placed, on a cloud, on Kubernetes and in tests alike. A placement
    group needs no process to wait, it belongs to this run alone (`request_resources` would overwrite what other runs ask for),
    and it goes with the supervisor. One that was placed is given up again: its room is counted, and a worker takes it.

    Args:
        prefix: of the groups' names, unique to the run.
        bundle: what one worker takes, in Ray's words.
    """

    def __init__(self, prefix: str, bundle: dict[str, float]) -> None:
        self._prefix = prefix
        self._bundle = bundle
        self._waiting: list[PlacementGroup] = []
        self._came: list[float] = []
        self._thread = ThreadPoolExecutor(1, "demand")  # one call after the other, also if nobody waits for it any more
        self._made = 0

    async def keep(self, missing: Callable[[], int]) -> None:
        """Asks for as many workers as are missing, for ever; what somebody of this run's name left behind is taken back."""
        earlier = True
        while True:
            with contextlib.suppress(RayError):  # asked again in a moment
                if earlier:
                    await self._in_thread(self.forget_earlier)
                earlier = False
                await self._in_thread(self.adjust, missing())
            await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Asks for nothing any more. What cannot be taken back goes with the supervisor."""
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._in_thread(self.adjust, 0), CLOSE_S)
        self._thread.shutdown(wait=False)

    def adjust(self, missing: int) -> None:
        """Has so many groups wait. Calls Ray and waits for its answers."""
        now = time.monotonic()
        self._came = [at for at in self._came if now - at < COUNTED_WITHIN_S]
        for group in list(self._waiting):
            if placement_group_table(group).get("state") != "PENDING":
                self._came.append(now)
                self._give_up(group)
        wanted = max(0, missing - len(self._came))
        for group in self._waiting[wanted:]:
            self._give_up(group)
        while len(self._waiting) < wanted and self._bundle:
            self._made += 1
            self._waiting.append(placement_group([self._bundle], name=f"{self._prefix}{self._made}"))

    def _give_up(self, group: PlacementGroup) -> None:
        self._waiting.remove(group)
        remove_placement_group(group)

    def forget_earlier(self) -> None:
        """This supervisor may be the second: Ray started it again, and what the first one asked for still waits."""
        for known in placement_group_table().values():
            if known["name"].startswith(self._prefix) and known["state"] != "REMOVED":
                self._made = max(self._made, int(known["name"].removeprefix(self._prefix)))
                with contextlib.suppress(ValueError):  # it went meanwhile
                    remove_placement_group(get_placement_group(known["name"]))

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
