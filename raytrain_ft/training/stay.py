"""While tensors are copied, their memory stays where it is.

Whoever holds a storage does not hold its memory: a tensor that goes to another process (an argument of one that is spawned, a
queue, `share_memory()`) is moved into shared memory, and what it had before is freed. torch has a lock under which that begins;
whoever copies keeps it until the end. It is private to torch: this is the only place that uses it, and where there is none,
nobody is kept waiting.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any

import torch

PATIENCE_S = 5.0
"""How long whoever has begun to move a tensor is waited for: it copies as much as a snapshot does."""

_lock: Any = getattr(torch.storage, "_share_memory_lock", None)
_moving: dict[int, Any] = getattr(torch.storage, "_share_memory_map", {})  # what is being moved, and what to wait for
_keeping: Any = threading.Lock()
_kept: set[Stay] = set()  # all that have not ended share the lock


class Stay:
    """From entering it on nothing moves, until `end` is called, by any thread; leaving it with an error calls that."""

    def __enter__(self) -> Stay:
        if _lock is not None:
            with _keeping:
                if _kept or _acquire(time.monotonic() + PATIENCE_S):
                    _kept.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """What waits may move. Safe to call again."""
        with _keeping:
            if self in _kept:
                _kept.remove(self)
                if not _kept:
                    _lock.release()


def _acquire(deadline: float) -> bool:
    """Takes the lock once nothing is being moved; whether that was in time."""
    while _lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        under_way = next(iter(_moving.values()), None)
        if under_way is None:
            return True
        _lock.release()
        if not under_way.acquire(timeout=max(0.0, deadline - time.monotonic())):
            break
        under_way.release()
    return False


def _end_in_child() -> None:
    """In a process that was forked nothing is copied, nobody would end what it has from its parent, and no other thread holds
    a lock: not even torch's own, which the fork may have come into the midst of."""
    _kept.clear()
    for lock in (_keeping, _lock):
        if lock is not None:
            lock._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_end_in_child)
