"""Where a tensor's elements lie in memory. Kernels that update many parameters at once ("fused") go through a parameter, its
gradient and what an optimizer keeps for it in one row, whatever their strides: all must lie alike, be it as "channels_last"."""

from __future__ import annotations

import torch
from torch import Tensor


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
