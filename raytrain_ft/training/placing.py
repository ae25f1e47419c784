"""Where tensors are that come from elsewhere: on which device, and in which order their elements lie in memory.

Kernels that update many parameters at once ("fused") go through a parameter, its gradient and what an optimizer keeps for it in
one row, whatever their strides: all must lie alike, be it as "channels_last".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_devices_of(value: Any, present: Any) -> Any:
    """A state with its tensors on the devices of those in the same places of another one.

    What was stored comes back on the CPU, and there it would stay with whoever takes over the tensors that he is given.
    """
    match value, present:
        case Tensor(), Tensor():
            return value.to(present.device)
        case dict(), dict():
            for key in value.keys() & present.keys():  # not by `update`, with which a Counter adds
                value[key] = on_devices_of(value[key], present[key])
        case (list(), list()) | (tuple(), tuple()) if len(value) == len(present) and type(value) in (list, tuple):
            return type(value)(map(on_devices_of, value, present))
    return value


def laid_out_like(value: Tensor, like: Tensor) -> Tensor:
    """A tensor whose elements lie in memory as those of another one of its shape do; itself if they do, or cannot."""
    if value.shape != like.shape or value.stride() == like.stride() or not _is_dense(like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def view_like(row: Tensor, like: Tensor) -> Tensor:
    """A row of elements as a tensor of another one's shape, in the order in which that one's elements lie in memory."""
    if _is_dense(like):
        return row.as_strided(like.shape, like.stride(), row.storage_offset())
    return row.view(like.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each place in a range of memory is that of one element: then a new tensor like it has the same strides."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
