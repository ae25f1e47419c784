"""Arrow columns from Python's values and back, without pandas.

`pa.array`, `pa.scalar` and `to_numpy` look whether they were given something of pandas, and load it to that end where it is
installed: a quarter of a second in which nothing else of the process runs. In a training process that would come in the middle
of a step, or of a recovery, while all wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def integer_column(values: Sequence[int] | np.ndarray[Any, Any], kind: pa.DataType | None = None) -> pa.Array:
    """A column of int64, or of another `kind` of 8 bytes."""
    kind = kind or pa.int64()
    buffer = pa.py_buffer(np.ascontiguousarray(values, np.dtype(str(kind))))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def text_column(values: Sequence[str]) -> pa.Array:
    """A column of strings."""
    encoded = [value.encode() for value in values]
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, _ends(encoded), pa.py_buffer(b"".join(encoded))])


def bytes_column(data: memoryview | np.ndarray[Any, Any], sizes: Sequence[int]) -> pa.Array:
    """A column of large binaries of these sizes; `data` is what is in them, one after the other, and is not copied."""
    ends = pa.py_buffer(np.cumsum([0, *sizes], dtype=np.int64))
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), [None, ends, pa.py_buffer(data)])


def list_column(values: Sequence[Sequence[Any]], flat: pa.Array) -> pa.Array:
    """A column of lists; `flat` is the column of what is in them, one after the other."""
    kind = pa.list_(flat.type)
    return pa.Array.from_buffers(kind, len(values), [None, _ends(values)], children=[flat])


def numpy_of(column: pa.Array) -> np.ndarray[Any, Any]:
    """The memory of a column of numbers, none of which is null or a boolean. Not copied, and not to be written to."""
    kind, memory = np.dtype(column.type.to_pandas_dtype()), column.buffers()[1]
    return np.frombuffer(memory if memory is not None else b"", kind, len(column), column.offset * kind.itemsize)


def own(column: pa.Array) -> pa.Array:
    """The same column of text or of numbers, in memory of its own: what lies in a file may change there."""
    buffers = [None if buffer is None else pa.py_buffer(buffer.to_pybytes()) for buffer in column.buffers()]
    return pa.Array.from_buffers(column.type, len(column), buffers, offset=column.offset)


def own_lists(column: pa.ListArray) -> pa.ListArray:
    """The same column of lists of numbers, in memory of its own."""
    return pa.ListArray.from_arrays(own(column.offsets), own(column.values))


def _ends(values: Sequence[Sequence[Any] | bytes]) -> pa.Buffer:
    """Where each begins and ends, for values that lie one after the other."""
    return pa.py_buffer(np.fromiter(itertools.accumulate(map(len, values), initial=0), np.int32, len(values) + 1))
