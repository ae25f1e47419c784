"""Mappings whose pages are all there, brought in while other threads run.

Python's `mmap` with MAP_POPULATE does not let them: until the last page is read from a slow disk, or zeroed, nothing else in
the process runs, and it does not beat, answer or renew its right to write.

A page that is not there and cannot be had kills whoever touches it (SIGBUS). So what the disk does not give back, and memory
that nobody grants, are errors here.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pyarrow as pa

POPULATE_READ, POPULATE_WRITE = 22, 23
"""Since Linux 5.14; Python's mmap has no names for them."""
PART_BYTES = 64 * 2**20
READ_BYTES = 2**20
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def for_reading(descriptor: int, size: int) -> mmap.mmap:
    """Maps a file, which nobody may cut short.

    Raises:
        OSError: some of it cannot be read.
    """
    # Private, which is the same where nothing is written: FUSE with direct I/O has no shared mappings.
    mapping = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
    if not _populate(mapping, POPULATE_READ):
        _read_through(descriptor, size)
    return mapping


def for_writing(descriptor: int, size: int, used: int) -> mmap.mmap:
    """Maps memory that other processes map too. What lies beyond the first `used` bytes is new, and nobody uses it yet.

    Raises:
        OSError: there is not so much.
    """
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    if not _populate(mapping, POPULATE_WRITE):
        os.posix_fallocate(descriptor, used, size - used)
        ctypes.memset(_address(mapping) + used, 0, size - used)
    return mapping


def give_back(address: int, size: int) -> None:
    """Gives the pages that lie wholly in this memory to the system, as far as it takes them: not what is locked or shared.
    Whoever touches them next finds zeros there, in new ones."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        _madvise(first, last - first, mmap.MADV_DONTNEED)


def _populate(mapping: mmap.mmap, advice: int) -> bool:
    """Whether the kernel knows how.

    Raises:
        OSError: a page cannot be had.
    """
    address = _address(mapping)
    for start in range(0, len(mapping), PART_BYTES):
        size = min(PART_BYTES, len(mapping) - start)
        if _madvise(address + start, size, advice) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                return False
            raise OSError(number, f"bytes {start} to {start + size} cannot be brought into memory")
    return True


def _read_through(descriptor: int, size: int) -> None:
    """Where the kernel cannot fetch a mapping's pages, whoever touches them finds them in its cache.

    Raises:
        OSError: some cannot be read.
    """
    part = bytearray(READ_BYTES)
    reached = 0
    while reached < size:
        count = os.preadv(descriptor, [part], reached)
        if not count:
            raise OSError(errno.EIO, f"it ends at byte {reached} of {size}")
        reached += count


def _address(mapping: mmap.mmap) -> int:
    return pa.py_buffer(mapping).address
