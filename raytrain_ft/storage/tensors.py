"""A tensor's dtype by its name, and its bytes: what every format of a file and every hash begins with."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""By name. Quantized ones are left out: their bytes do not say everything."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes in contiguous order, wherever it lies: uint8 [size]. A view where that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def hash_of(tensor: Tensor) -> int:
    """Stands for the tensor's bytes."""
    return xxhash.xxh3_64_intdigest(bytes_of(tensor).cpu().numpy().data)
