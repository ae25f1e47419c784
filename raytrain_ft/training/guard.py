"""One look at thousands of tensors: are they what those before were?

To ask each in Python for its dtype, shape, device and the like takes as long as to copy a small one. torch looks at the
arguments of its compiled functions by a call that asks all of them at once, in a tenth of the time. That call is private to
torch: this is the only place that makes it, and without it nothing passes, so that each tensor is asked as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards  # pyright: ignore[reportMissingImports]
except ImportError:  # another version of torch
    TensorGuards = None


def guard(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """Tells of other tensors whether each is of the class, dtype, device, shape and strides that the one in its place was of,
    and as plain as that was (not conjugated, say). May say no of some that are: of one that is there twice, or while autocast
    is on and was not before."""
    count = len(tensors)  # they themselves are not to be kept
    try:
        shapes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        found: Any = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)  # type: ignore[misc]
        passes = found.check
        assert not tensors or isinstance(passes(*tensors), bool)
    except Exception:  # this torch has none, or another one; a sparse tensor has no strides
        return lambda _: False
    return lambda others: len(others) == count and bool(passes(*others))
