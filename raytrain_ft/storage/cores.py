"""One piece of work on two cores at once, for what is bound by memory: one thread does not use all of its bandwidth."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress

_library = ctypes.CDLL(None)


def on_two(work: Callable[[], object]) -> None:
    """Calls `work` here and on another thread, until both have returned; raises what one of them raised.

    Each thread is kept on cores of its own: the scheduler often puts both on one, and leaves them there for the milliseconds
    that such work takes. Where no thread is to be had, or no core, this one does it alone.
    """
    cores, here = os.sched_getaffinity(0), _library.sched_getcpu()
    errors: list[BaseException] = []

    def help_out() -> None:
        try:
            _stay(cores - {here})
            work()
        except BaseException as error:
            errors.append(error)

    if len(cores) == 1 or here not in cores:
        work()
        return
    helper = threading.Thread(target=help_out, name="second-core", daemon=True)
    _stay({here})
    try:
        with suppress(RuntimeError):  # no thread is to be had
            helper.start()
        work()
    finally:
        if helper.ident is not None:
            helper.join()
        _stay(cores)
    if errors:
        raise errors[0]


def _stay(cores: set[int]) -> None:
    with suppress(OSError):  # it is not allowed, or the core is gone
        os.sched_setaffinity(0, cores)
