"""Where pyarrow's writers write to, so that nothing is copied on the way."""

from __future__ import annotations

import pyarrow as pa


class Parts:
    """A file for pyarrow's writer that keeps what it is given instead of copying it."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[memoryview] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        part = memoryview(data).cast("B")
        self.parts.append(part)
        return len(part)

    def taken(self) -> list[memoryview]:
        """What was written since it was last asked."""
        parts, self.parts = self.parts, []
        return parts

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""
