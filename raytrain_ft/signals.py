"""What SIGTERM does to a process that a person, or `ray job stop`, ends; and SIGHUP, when its terminal is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def at_sigterm(handler: Handler) -> Iterator[None]:
    """SIGTERM is met by this handler meanwhile. Only the main thread may set one: on any other this does nothing."""
    with _met(signal.SIGTERM, handler):
        yield


@contextmanager
def at_sighup(handler: Handler) -> Iterator[None]:
    """The same of SIGHUP; but under `nohup`, which has it ignored, it stays so."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        yield
        return
    with _met(signal.SIGHUP, handler):
        yield


@contextmanager
def _met(number: signal.Signals, handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before or signal.SIG_DFL)  # None: it was not set from Python
