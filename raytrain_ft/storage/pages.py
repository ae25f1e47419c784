"""Mappings whose pages are all there, brought in while other threads run.

Python's `mmap` with MAP_POPULATE does not let them: until the last page is read from a slow disk, or zeroed, nothing else in
the process runs, and it does not beat, answer or renew its right to write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap

import pyarrow as pa

POPULATE_READ, POPULATE_WRITE = 22, 23
"""Since Linux 5.14; Python's mmap has no names for them."""
PART_BYTES = 64 * 2**20
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def for_reading(descriptor: int, size: int) -> mmap.mmap:
    """Maps a file. A kernel that cannot fetch its pages leaves that to whoever reads them."""
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    _populate(mapping, POPULATE_READ)
    return mapping


def for_writing(descriptor: int, size: int, used: int) -> mmap.mmap:
    """Maps memory that other processes map too. What lies beyond the first `used` bytes is new, and nobody uses it yet."""
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    if not _populate(mapping, POPULATE_WRITE):
        ctypes.memset(_address(mapping) + used, 0, size - used)
    return mapping


def _populate(mapping: mmap.mmap, advice: int) -> bool:
    """Whether the kernel knows how. A page that it cannot bring in is an error for whoever uses it."""
    address = _address(mapping)
    for start in range(0, len(mapping), PART_BYTES):
        if _madvise(address + start, min(PART_BYTES, len(mapping) - start), advice) != 0:
            return ctypes.get_errno() != errno.EINVAL
    return True


def _address(mapping: mmap.mmap) -> int:
    return pa.py_buffer(mapping).address
