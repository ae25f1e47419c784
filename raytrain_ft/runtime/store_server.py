"""The supervisor's side of torch's rendezvous (`rendezvous.py` is the workers')."""

from __future__ import annotations

import asyncio


class StoreServer:
    """The server's side: keys and values of the present incarnation, in an asyncio actor."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, incarnation: int, key: str, value: bytes) -> None:
        """Sets a key; a new incarnation begins with an empty store, an old one is refused."""
        async with self._changed:
            if self._admits(incarnation):
                self._put(key, value)

    async def add(self, incarnation: int, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value; 0 to an old incarnation."""
        async with self._changed:
            if not self._admits(incarnation):
                return 0
            value = int(self._values.get(key, b"0")) + amount
            self._put(key, str(value).encode())
            return value

    def _admits(self, incarnation: int) -> bool:
        if incarnation > self._incarnation:
            self._incarnation, self._values = incarnation, {}
        return incarnation == self._incarnation

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()

    async def get(self, incarnation: int, keys: list[str], seconds: float) -> list[bytes] | None:
        """The values once all keys are there, or None after `seconds`."""

        def ready() -> bool:
            return incarnation == self._incarnation and all(key in self._values for key in keys)

        if ready():
            return [self._values[key] for key in keys]
        try:
            async with asyncio.timeout(seconds):
                async with self._changed:
                    await self._changed.wait_for(ready)
                    return [self._values[key] for key in keys]
        except TimeoutError:
            return None
