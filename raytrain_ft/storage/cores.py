"""One piece of work on two cores at once, for what is bound by memory: one thread does not use all of its bandwidth."""

from __future__ import annotations

import _thread
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

_library = ctypes.CDLL(None)


def on_two(work: Callable[[], object]) -> None:
    """Calls `work` here and on another thread, until both have returned; raises what one of them raised.

    Each thread is kept on cores of its own: the scheduler often puts both on one, and leaves them there for the milliseconds
    that such work takes. Where no thread is to be had, or no core, this one does it alone.
    """
    cores, here = os.sched_getaffinity(0), _library.sched_getcpu()
    if len(cores) == 1 or here not in cores:
        work()
        return
    errors: list[BaseException] = []
    ended = _thread.allocate_lock()

    def help_out() -> None:
        try:
            _stay(cores - {here})
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    _stay({here})
    ended.acquire()
    try:
        try:
            _thread.start_new_thread(help_out, ())  # `Thread.start` waits until it runs, a tenth of a millisecond
        except RuntimeError:  # no thread is to be had
            ended.release()
        work()
    finally:
        ended.acquire()
        _stay(cores)
    if errors:
        raise errors[0]


def _stay(cores: set[int]) -> None:
    with suppress(OSError):  # it is not allowed, or the core is gone
        os.sched_setaffinity(0, cores)
