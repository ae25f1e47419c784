"""Asking the cluster for room that it has not got: what an autoscaler reacts to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
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
        self._made = 0

    async def keep(self, missing: Callable[[], int]) -> None:
        """Asks for as many workers as are missing, for ever; what somebody of this run's name left behind is taken back."""
        earlier = True
        while True:
            with contextlib.suppress(RayError):  # asked again in a moment
                if earlier:
                    await self._in_thread(self._forget_earlier)
                earlier = False
                await self._in_thread(self.adjust, missing())
            await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Asks for nothing any more. What cannot be taken back goes with the supervisor."""
        with contextlib.suppress(RayError):
            await self._in_thread(self.adjust, 0)

    def adjust(self, missing: int) -> None:
        """Has so many groups wait. Calls Ray and waits for its answers."""
        placed = [group for group in self._waiting if placement_group_table(group)["state"] != "PENDING"]
        surplus = self._waiting[missing:]
        for group in {id(group): group for group in [*placed, *surplus]}.values():
            self._waiting.remove(group)
            remove_placement_group(group)
        while len(self._waiting) < missing and self._bundle:
            self._made += 1
            self._waiting.append(placement_group([self._bundle], name=f"{self._prefix}{self._made}"))

    def _forget_earlier(self) -> None:
        """This supervisor may be the second: Ray started it again, and what the first one asked for still waits."""
        for known in placement_group_table().values():
            if known["name"].startswith(self._prefix) and known["state"] != "REMOVED":
                self._made = max(self._made, int(known["name"].removeprefix(self._prefix)))
                with contextlib.suppress(ValueError):  # it went meanwhile
                    remove_placement_group(get_placement_group(known["name"]))

    @staticmethod
    async def _in_thread(call: Callable[..., Any], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(None, call, *args)
