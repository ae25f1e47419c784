"""The supervisor as Ray knows it: what it is asked by others, and nothing of what it is made of.

Ray loads an actor's class wherever a handle of it arrives. Every worker gets the supervisor's, and would spend a tenth of a
second of its start on the machine, the reports and whatever else it has no use for.
"""

from __future__ import annotations

import signal
from typing import Any

import ray.actor

from raytrain_ft.runtime.software import unpack
from raytrain_ft.runtime.spec import Beat, Pace

END_S = 3.0
"""How long the process may take to end, once the run is over and it has been told to."""


class SupervisorActor:
    """One run's supervisor; `Supervisor` has what these methods do.

    Args:
        code: of raytrain_ft, that the script which started the run has in memory.
        packed: by that script, the run's `RunSpec`.
    """

    def __init__(self, code: str, packed: bytes) -> None:
        self._name = "a run's"  # first: if it cannot begin, Ray asks for a name before it passes on why
        # Also if Ray starts it again, and the files are others now.
        spec = unpack(code, packed, "the script that started the run")
        self._name = spec.name
        from raytrain_ft.runtime.supervisor import Supervisor

        self._supervisor = Supervisor(spec)

    def __repr__(self) -> str:
        """What Ray calls it, in logs and in its dashboard."""
        return f"{self._name} supervisor"

    async def run(self) -> dict[str, Any]:
        return await self._supervisor.run()

    async def follow(self, known: int = 0) -> dict[str, Any]:
        return await self._supervisor.follow(known)

    async def status(self) -> dict[str, Any]:
        return await self._supervisor.status()

    async def abort(self, reason: str) -> None:
        await self._supervisor.abort(reason)

    async def end(self) -> None:
        """Ends this process, after whatever it is doing. Unlike `ray.kill`, this lets Ray collect its last metrics."""
        # Ray (2.60) takes an actor for dead before its process has ended, and does not see that one hangs. The kernel ends it.
        signal.setitimer(signal.ITIMER_REAL, END_S)
        ray.actor.exit_actor()

    async def notice(self, member: str, deadline_s: float, reason: str, replaced: bool = True) -> None:
        await self._supervisor.notice(member, deadline_s, reason, replaced)

    async def sleep(self, rank: int, asleep: bool, at_once: bool) -> None:
        await self._supervisor.sleep(rank, asleep, at_once)

    async def beat(self, beat: Beat) -> Pace | None:
        return await self._supervisor.beat(beat)

    async def store_set(self, incarnation: int, key: str, value: bytes) -> None:
        await self._supervisor.store_set(incarnation, key, value)

    async def store_get(self, incarnation: int, keys: list[str], seconds: float) -> list[bytes] | None:
        return await self._supervisor.store_get(incarnation, keys, seconds)

    async def store_add(self, incarnation: int, key: str, amount: int) -> int:
        return await self._supervisor.store_add(incarnation, key, amount)
