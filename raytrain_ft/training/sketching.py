"""Takes the sketch of a sample: see `policy.sketch`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raytrain_ft.policy.sketch import Sketch

CHUNK = 2**20
"""Values that are turned into float64 at a time."""
NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


VERSION = "2:"
"""Before what must be the same: sketches of different versions cannot be compared (`policy.sketch.unlike`)."""


def sketch_of(sample: Any, *, batch: bool = False) -> Sketch:
    """The sketch of any sample: tensors, arrays, pictures and numbers, in dictionaries, sequences and objects. `batch`: it is a
    batch of one.

    Text says nothing: it may be the path of a file, which is another one on each node.
    """
    taken = _Taken(batch)
    taken.take(sample)
    mean = taken.total / taken.finite if taken.finite else 0.0
    rms = math.sqrt(taken.squares / taken.finite) if taken.finite else 0.0
    return Sketch(VERSION + taken.exact.hexdigest(), taken.count, *(float(np.nan_to_num(value)) for value in (mean, rms)))


class _Taken:
    """What has been seen of a sample so far."""

    def __init__(self, batch: bool) -> None:
        self._batch = batch
        self._within: set[int] = set()  # what is looked at lies in these, by `id`: an object may refer to what it is part of
        self.exact = hashlib.blake2b(digest_size=8)
        self.count = self.finite = 0
        self.total = self.squares = 0.0

    def take(self, value: Any) -> None:
        if id(value) not in self._within:
            self._within.add(id(value))
            self._take(value)
            self._within.discard(id(value))

    def _take(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_nested:
                return self.exact.update(f"{value.layout}{value.dtype}".encode())
            return self._array(_as_array(value), str(value.dtype))
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), str(value.dtype))
        self.exact.update(type(value).__name__.encode())
        if isinstance(value, str):
            return None
        if isinstance(value, bool | int):
            self.exact.update(repr(value).encode())
        elif isinstance(value, float | complex):
            self._array(np.asarray(value), "")
        elif isinstance(value, bytes):
            self.exact.update(value)
        elif isinstance(value, Mapping):
            for name, item in sorted(((str(key), item) for key, item in value.items()), key=lambda pair: pair[0]):
                self.exact.update(name.encode())  # in an order that does not depend on the process, as that of a set does
                self.take(item)
        elif isinstance(value, Sequence):
            self.exact.update(str(len(value)).encode())
            for item in value:
                self.take(item)
        elif callable(getattr(value, "tobytes", None)):  # PIL images
            self._measure(np.frombuffer(value.tobytes(), np.uint8))
        elif hasattr(value, "__dict__"):
            self.take(vars(value))
        return None

    def _array(self, array: np.ndarray, dtype: str) -> None:
        """Of whole numbers, rows of what fits into two bytes, and what has rows and columns, are a picture or sound rather than
        labels or tokens."""
        if self._batch and len(array.shape) and len(array) == 1:
            array = array.reshape(array.shape[1:])
        kind = dtype if array.dtype.kind in "iubfc" else ""  # that of text tells how long it is
        self.exact.update(f"{kind}{array.shape}".encode())
        if array.dtype.kind == "c":
            array = np.ascontiguousarray(array).reshape(-1).view(f"f{array.itemsize // 2}")
        wide = array.ndim >= 2 or (array.ndim == 1 and array.itemsize <= 2)
        if array.dtype.kind == "f" or (array.dtype.kind in "iu" and wide):
            self._measure(array.reshape(-1))
        elif array.dtype.kind in "iub":
            self.exact.update(array.tobytes())

    def _measure(self, values: np.ndarray) -> None:
        self.count += len(values)
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK].astype(np.float64)
            part = part[np.isfinite(part)]
            self.finite += len(part)
            self.total += float(part.sum())
            with np.errstate(over="ignore"):
                self.squares += float(part @ part)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """Numpy has none of the short kinds of real numbers that torch has."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    short = tensor.dtype.is_floating_point and tensor.dtype not in NUMPY_FLOATS
    return (tensor.float() if short else tensor).numpy()
