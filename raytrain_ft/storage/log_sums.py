"""Checksums that a log's thread makes while the caller waits, who needs them by the end of the step."""

from __future__ import annotations

from collections import deque

from raytrain_ft.storage.log_format import Checksum


class Sums:
    """Those that wait to be made, in the order in which they came. Belongs to whoever holds the log's lock.

    Attributes:
        size: bytes of their tensors.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Checksum, int]] = deque()
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, checksum: Checksum, size: int) -> None:
        """One more, of so many bytes."""
        self._waiting.append((checksum, size))
        self.size += size

    def take(self) -> Checksum:
        """The first; there must be one."""
        checksum, size = self._waiting.popleft()
        self.size -= size
        return checksum

    def forget_known(self) -> None:
        """Where there are no bubbles, the caller makes all of them itself."""
        while self._waiting and self._waiting[0][0].is_known:
            self.take()
