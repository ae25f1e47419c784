"""What SIGTERM does to a process that a person, or `ray job stop`, ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def at_sigterm(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """SIGTERM is met by this handler meanwhile. Only the main thread may set one: on any other this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: it was not set from Python
