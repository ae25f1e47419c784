"""Plain copies of memory: of a tensor's bytes, without what torch does for every operation (most of a small one)."""

from __future__ import annotations

import ctypes

from torch import Tensor

SMALL_BYTES = 64 * 2**10
PART_BYTES = 512 * 2**10
"""What fits into a core's own cache the C library copies in another way, about an eighth faster than a large block at once."""
_long, _short = ctypes.CDLL(None).memmove, ctypes.PyDLL(None).memmove  # the first lets other threads run meanwhile
for _function in (_long, _short):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


def move(target: int, source: int, size: int) -> None:
    """Copies `size` bytes from an address to another. A short copy is over before it would pay to let others run."""
    if size < SMALL_BYTES:
        _short(target, source, size)
        return
    for start in range(0, size, PART_BYTES):
        _long(target + start, source + start, min(PART_BYTES, size - start))


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes lie one after the other from `data_ptr()` on, in this process."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
