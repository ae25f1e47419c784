"""From a checkpoint back into tensors: everything is compared before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.shard import Piece
from raytrain_ft.training.memory import is_plain, move

THREADS = 2
PART_BYTES = 4 * 2**20
_DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)}, as `checkpoint.differences` takes it."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], content: Content) -> None:
    """Overwrites tensors with those of the same names in a checkpoint. They must be of the same dtype and shape.

    Raises:
        StorageError: one is not there, or of another size; nothing was changed.
    """
    for name, tensor in tensors.items():
        parts = content.pieces.get(name)
        size = tensor.numel() * tensor.element_size()
        if parts is None or sum(piece.size for piece, _ in parts) != size:
            raise StorageError(f"{content.manifest.name} holds tensor {name} not at all, or not with {size} bytes")
    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="restore") as pool:
        large = [
            pool.submit(move, *copy) for name, tensor in tensors.items() for copy in _fill_one(tensor, content.pieces[name])
        ]
        for copy in large:
            copy.result()


def _fill_one(tensor: Tensor, parts: list[tuple[Piece, memoryview]]) -> list[tuple[int, int, int]]:
    """Fills a tensor, and leaves large copies to the caller: (target, source, size)."""
    large: list[tuple[int, int, int]] = []
    if not tensor.numel():
        return large
    if is_plain(tensor):
        target = tensor.data_ptr()
        for piece, data in parts:
            source = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0] if piece.size else 0
            if piece.size < PART_BYTES:
                move(target + piece.start, source, piece.size)
                continue
            for start in range(0, piece.size, PART_BYTES):
                size = min(PART_BYTES, piece.size - start)
                large.append((target + piece.start + start, source + start, size))
        return large
    whole = np.concatenate([np.frombuffer(data, dtype=np.uint8) for _, data in parts])
    tensor.copy_(torch.from_numpy(whole).view(tensor.dtype).reshape(tensor.shape))
    return large


def make(content: Content, name: str, device: torch.device | str = "cpu") -> Tensor:
    """A new tensor with the content of one in a checkpoint.

    Raises:
        StorageError: it is not there, or does not have the bytes that its dtype and shape ask for.
    """
    parts = content.pieces.get(name)
    if parts is None:
        raise StorageError(f"{content.manifest.name} holds no tensor {name}")
    first = parts[0][0]
    dtype = _DTYPES.get(first.dtype)
    size = sum(len(data) for _, data in parts)
    if dtype is None or min(first.shape, default=0) < 0 or math.prod(first.shape) * dtype.itemsize != size:
        what = f"{first.dtype} {list(first.shape)}"
        raise StorageError(f"{content.manifest.name}: tensor {name} says {what} but has {size} bytes")
    try:
        tensor = torch.empty(first.shape, dtype=dtype)
    except RuntimeError as error:
        raise StorageError(f"{content.manifest.name}: tensor {name}, {first.dtype} {list(first.shape)}: {error}") from error
    for copy in _fill_one(tensor, parts):
        move(*copy)
    return tensor.to(device)
