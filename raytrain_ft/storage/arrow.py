"""Tensors in Arrow IPC files: one row per tensor (name, dtype, shape, bytes, checksum), other values as JSON. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.columns import bytes_column, integer_column, list_column, text_column
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.parts import Parts
from raytrain_ft.storage.tensors import DTYPES, bytes_of

FORMAT = "raytrain_ft-tensors-1"
_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("bytes", pa.large_binary()),
        ("xxh3_64", pa.uint64()),
    ]
)


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Writes tensors of any dtype and shape. The file appears under its name only once it is whole and on disk.

    Raises:
        StorageError: it could not be written; nothing is left of it.
    """
    path = Path(path)
    with suppress(OSError):  # if nothing can be written there either, that is told below
        for left in path.parent.glob(f".{path.name}.*.partial"):  # of a saver that died, or will find that it comes too late
            left.unlink(missing_ok=True)
    LocalStorage(path.parent).put(path.name, _encoded(tensors, values))


def _encoded(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Iterator[memoryview]:
    """The file, tensor by tensor: there is no copy of all of them at once."""
    schema, sink = _SCHEMA.with_metadata({"format": FORMAT, "values": json.dumps(dict(values))}), Parts()
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
        for name, tensor in tensors.items():
            data = bytes_of(tensor).cpu().numpy()
            row = [
                text_column([name]),
                text_column([str(tensor.dtype)]),
                list_column([tensor.shape], integer_column(tensor.shape)),
                bytes_column(data, [len(data)]),
                integer_column([xxhash.xxh3_64_intdigest(data.data)], pa.uint64()),
            ]
            writer.write_batch(pa.record_batch(row, schema=schema))
            yield from sink.taken()
    yield from sink.taken()


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads and verifies what `write_tensors` wrote.

    Raises:
        StorageError: the file is missing, of another format, or damaged; it names the tensor.
    """
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            metadata = reader.schema.metadata or {}
            if metadata.get(b"format") != FORMAT.encode():
                raise StorageError(f"{path} is not a {FORMAT} file (format {metadata.get(b'format')!r})")
            batches = _batches(path, reader, file.size())
            return {row["name"]: _tensor(path, row) for row in _rows(path, batches)}, json.loads(metadata[b"values"])
    except StorageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, MemoryError, RuntimeError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read: it is damaged, or none of ours ({error!r:.200})") from error


def _batches(path: str | Path, reader: Any, size: int) -> Iterator[pa.RecordBatch]:
    """One by one, so that of a file that is compressed no more than one is unpacked. Ours are not."""
    unpacked = 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        unpacked += batch.nbytes
        if unpacked > size:
            raise StorageError(f"{path} is damaged, or none of ours: it holds more than its {size} bytes")
        yield batch


def _rows(path: str | Path, batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """One for each tensor. What is in the file says where to read: it is looked at before it is followed."""
    for batch in batches:
        batch.validate(full=True)
        if not batch.schema.equals(_SCHEMA) or any(column.null_count for column in batch.columns):
            raise StorageError(f"{path} is damaged: it has other columns than {_SCHEMA.names}, or values are missing")
        yield from batch.to_pylist()


def _tensor(path: str | Path, row: dict[str, Any]) -> Tensor:
    dtype, shape, data = DTYPES.get(row["dtype"]), row["shape"], row["bytes"]
    if dtype is None or len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise StorageError(f"{path}: tensor {row['name']} says {row['dtype']} {shape} but has {len(data)} bytes")
    if xxhash.xxh3_64_intdigest(data) != row["xxh3_64"]:
        raise StorageError(f"{path}: tensor {row['name']} is damaged (its checksum differs)")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
