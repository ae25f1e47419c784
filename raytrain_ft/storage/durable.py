"""Bytes that are on the disk when a call returns, and what to do about those that cannot be."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

WRITE_BACK_BYTES = 32 * 2**20
"""How much is written before it is sent on its way to the disk, so that the last fsync finds little left to do."""

NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP)
"""What fsync says of a directory on a file system that cannot do that, as some do over FUSE and CIFS."""
_warned_of: set[int] = set()


class _WriteBack:
    """Sends what was written on its way to the disk while more is being written, on a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._wanted = threading.Event()
        self._ended = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._ended:  # looked at after clear(), which also wipes out what `end` has set
                return
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._error = error  # the kernel tells of it only once, so it must not be lost here
                return

    def go(self) -> None:
        self._wanted.set()

    def end(self) -> None:
        """Waits for the thread.

        Raises:
            OSError: something did not reach the disk.
        """
        self._ended = True
        self._wanted.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def write_durably(descriptor: int, parts: Iterable[memoryview]) -> None:
    """Writes the parts of a file; they are on the disk when this returns.

    Raises:
        OSError: something is not. Never to be tried again on the same file: after a failed fsync the kernel forgets it.
    """
    write_back: _WriteBack | None = None
    waiting = 0
    try:
        for part in parts:
            left = part
            while len(left):
                written = os.write(descriptor, left)
                left, waiting = left[written:], waiting + written
            if waiting >= WRITE_BACK_BYTES:
                write_back = write_back or _WriteBack(descriptor)
                write_back.go()
                waiting = 0
    finally:
        if write_back is not None:
            write_back.end()
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """The names in a directory, as they are now, are on the disk when this returns: on a file system that has such a call."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise
        device = os.fstat(descriptor).st_dev
        if device not in _warned_of:
            _warned_of.add(device)
            warnings.warn(
                f"{path} is on a file system that cannot fsync directories ({error.strerror}): the names of new files are as "
                "durable as it makes them by itself. After a power cut, training may resume from an older checkpoint",
                stacklevel=2,
            )
    finally:
        os.close(descriptor)


def advice(error: OSError) -> str:
    """What to do about it; empty if there is nothing to say."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ". Free some space, or choose another storage_path; earlier checkpoints are untouched"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ". Look at its mount and its permissions; earlier checkpoints are untouched"
    return ""
