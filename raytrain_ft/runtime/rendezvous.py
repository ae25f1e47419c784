"""torch's rendezvous Store over a Ray actor: Ray's token guards it, and no port is open for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import ray
from torch._C._distributed_c10d import Store

from raytrain_ft.training.fence import Fence

_POLL = 0.5


class RayStore(Store):
    """The client's side. Every wait is left when the incarnation is fenced.

    Args:
        part: a name for the group, if there are several in one incarnation.
    """

    def __init__(self, server: Any, fence: Fence, timeout: timedelta, part: str = "") -> None:
        super().__init__()
        self._part = part
        self._server = server
        self._fence = fence
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        data = value.encode() if isinstance(value, str) else bytes(value)
        ray.get(
            self._server.store_set.remote(self._fence.incarnation, self._part + key, data),
            timeout=self._timeout.total_seconds(),
        )

    def _values(self, names: list[str], timeout: timedelta) -> list[bytes]:
        keys = [self._part + name for name in names]
        left = timeout.total_seconds()
        while left > 0:
            self._fence.check()
            seconds = min(left, _POLL)
            values = ray.get(
                self._server.store_get.remote(self._fence.incarnation, keys, seconds),
                timeout=self._timeout.total_seconds() + seconds,
            )
            if values is not None:
                return values
            left -= seconds
        raise RuntimeError(f"rendezvous of incarnation {self._fence.incarnation}: {keys} did not come within {timeout}")

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self._values([key], self._timeout)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:  # type: ignore[override]
        return self._values(list(keys), self._timeout)

    def multi_set(self, keys: list[str], values: list[str]) -> None:  # type: ignore[override]
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._values(list(keys), timeout or self._timeout)

    def add(self, key: str, value: int) -> int:  # type: ignore[override]
        return ray.get(
            self._server.store_add.remote(self._fence.incarnation, self._part + key, value),
            timeout=self._timeout.total_seconds(),
        )

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        names = [self._part + key for key in keys]
        return ray.get(self._server.store_get.remote(self._fence.incarnation, names, 0.0), timeout=10) is not None

    def delete_key(self, key: str) -> bool:  # type: ignore[override]
        del key
        return False

    def num_keys(self) -> int:  # type: ignore[override]
        return 0

    def has_extended_api(self) -> bool:
        return True
