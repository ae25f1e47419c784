"""A map-style dataset over Arrow IPC and Parquet files.

IPC files on a local disk are mapped: rows are read straight from the page cache, which all workers of a node share.
Parquet, compressed IPC and remote files are decoded into memory once per worker; for data larger than memory, write
uncompressed IPC. Knows nothing of order or of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc
import pyarrow.parquet as pq
import torch

from raytrain_ft.errors import ConfigError, StorageError, UnreachableError
from raytrain_ft.places import Place, told
from raytrain_ft.storage.columns import numpy_of
from raytrain_ft.storage.filesystem import NOT_THERE, local_path

_SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet")
_HIDDEN = (".", "_")
Row = dict[str, Any]


class ArrowDataset:
    """Rows of one or several Arrow IPC or Parquet files, by number, as dicts of column name -> value.

    `path_or_paths`: files or directories (searched for .arrow, .feather, .ipc and .parquet, upper case too; what begins
    with "." or "_" is passed over), local or any URI of `pyarrow.fs`; the rows come file after file, the files in sorted
    order, so that every worker numbers them alike. `columns`: those to read; default all. `transform(row)`: a function of
    the row alone; what is random belongs in the task's `augment`.

    Numbers and booleans become tensors of shape [] and of the column's own dtype, lists of numbers 1-D tensors, fixed
    size lists and fixed shape tensors tensors of that shape; strings stay `str`, binary `bytes`. Raises ConfigError
    for what cannot be read this way (no file, no row, a null, another type), StorageError for a damaged file, and
    UnreachableError where storage does not answer.
    """

    def __init__(
        self,
        path_or_paths: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        transform: Callable[[Row], Any] | None = None,
    ) -> None:
        self._arguments = (path_or_paths, columns, transform)
        self.transform = transform
        paths = [path_or_paths] if isinstance(path_or_paths, (str, Path)) else list(path_or_paths)
        files = sorted((file for item in paths for file in _resolve(str(item))), key=lambda file: file[1])
        names = [path for _, path in files]
        if not files or len(set(names)) < len(names):
            raise ConfigError(f"No Arrow or Parquet file, or the same one twice: {names or [told(str(one)) for one in paths]}.")
        schema: pa.Schema | None = None
        rows = []
        self._readers: list[dict[str, Reader]] = []  # per record batch: column name -> how to read it
        self._files: list[tuple[str, int]] = []  # per record batch: its file, and the number of the file's first row
        for filesystem, path in files:
            table = _read(filesystem, path, columns)
            schema = schema or table.schema
            if not table.schema.equals(schema):
                raise ConfigError(
                    f"{path} has the schema\n{table.schema}\nbut {names[0]} has\n{schema}\n"
                    "Give files of one schema, or the `columns` they have in common."
                )
            first = sum(rows)
            for batch in table.to_batches():
                rows.append(batch.num_rows)
                self._readers.append(_readers(path, batch))
                self._files.append((path, first))
        self._starts = np.cumsum([0, *rows])  # of each record batch; last, the number of rows
        if len(self) == 0 or not self._readers[0]:
            raise ConfigError(f"{names} hold no row, or no column.")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Rows `indices`, in any order, repeats allowed; each record batch that holds some of them is read once."""
        rows = np.asarray(indices, dtype=np.int64)
        rows = np.where(rows < 0, rows + len(self), rows)
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"row {rows.min()} or {rows.max()} of {len(self)} rows")
        homes = np.searchsorted(self._starts, rows, side="right") - 1
        samples: list[Any] = [None] * len(rows)
        for home in np.unique(homes).tolist():
            slots = np.flatnonzero(homes == home)
            readers = self._readers[home]
            try:
                values = [read(rows[slots] - self._starts[home]) for read in readers.values()]
            except UnicodeDecodeError:
                raise self._not_text(home, rows[slots]) from None
            for slot, *row in zip(slots.tolist(), *values, strict=True):
                samples[slot] = dict(zip(readers, row, strict=True))
        if self.transform is not None:
            for slot, index in enumerate(rows.tolist()):
                try:
                    samples[slot] = self.transform(samples[slot])
                except BaseException as error:
                    error.add_note(f"(raised by sample {index})")
                    raise
        return samples

    def _not_text(self, home: int, rows: np.ndarray) -> StorageError:
        """Which of these rows of a record batch holds text that is none."""
        path, first = self._files[home]
        for row in rows.tolist():
            for name, read in self._readers[home].items():
                try:
                    read(np.array([row - self._starts[home]]))
                except UnicodeDecodeError as error:
                    where = f"{path} is damaged: column {name!r} of row {row - first} (sample {row})"
                    return StorageError(f"{where} is no text: {error}. Write or copy the file again.")
        raise AssertionError("every row is text when it is read alone")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._arguments)  # a worker opens the files itself instead of being sent their content


# ---------------------------------------------------------------- files


def _resolve(path: str) -> list[tuple[pafs.FileSystem, str]]:
    """The files that `path` (a local path or a URI) stands for.

    Raises ConfigError when there is none, UnreachableError when storage does not answer.
    """
    place = Place(path)
    local = local_path(place)
    try:
        if local is None:
            filesystem, path = pafs.FileSystem.from_uri(place.with_credentials)
        else:
            filesystem, path = pafs.LocalFileSystem(), str(local)
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.File:
            return [(filesystem, path)]
        if info.type == pafs.FileType.Directory:
            if local is not None:
                return [(filesystem, file) for file in _files_below(path, (os.path.realpath(path),))]
            inside = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            files = [i.path for i in inside if i.type == pafs.FileType.File and i.path.lower().endswith(_SUFFIXES)]
            return [(filesystem, file) for file in files if not _is_hidden(file, info.path)]
    except (*NOT_THERE, PermissionError, pa.ArrowException) as error:
        raise ConfigError(f"{place} cannot be opened: {place.told(str(error))}") from None
    except OSError as error:  # another attempt may succeed
        reason = place.told(str(error))
        raise UnreachableError(
            f"{place} cannot be opened now: {reason}. Look at the storage, and at what may read it."
        ) from None
    raise ConfigError(f"{path} does not exist on {filesystem.type_name}. Every node must be able to read it.")


def _files_below(directory: str, above: tuple[str, ...]) -> Iterator[str]:
    """What pyarrow would find in a directory of this machine. It passes over links that lead nowhere, so part of the data would
    be missing, and follows a link to a directory that the link lies in, so rows would be there many times.

    `above`: where the directory really is, and those that it was found in. Raises ConfigError for such links.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_HIDDEN):
                continue
            if entry.is_symlink() and not Path(entry.path).exists():
                raise ConfigError(
                    f"{entry.path} is a link to {Path(entry.path).readlink()}, which is not there: mount it, or remove the link"
                )
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    raise ConfigError(f"{entry.path} is a link to {real}, which it lies in itself: remove the link")
                yield from _files_below(entry.path, (*above, real))
            elif entry.is_file() and entry.name.lower().endswith(_SUFFIXES):
                yield entry.path


def _is_hidden(file: str, directory: str) -> bool:
    """Whether the file, or a directory on the way to it, is meant for others: logs of tables, trash, unfinished files."""
    return any(part.startswith(_HIDDEN) for part in PurePosixPath(file).relative_to(directory).parts)


def _read(filesystem: pafs.FileSystem, path: str, columns: Sequence[str] | None) -> pa.Table:
    """The table in `path`, mapped where that is possible. Raises ConfigError or StorageError."""
    try:
        local = isinstance(filesystem, pafs.LocalFileSystem)
        source = pa.memory_map(path) if local else filesystem.open_input_file(path)
        magic = source.read(6)
        source.seek(0)
        if magic.startswith(b"PAR1"):
            file = pq.ParquetFile(source)
            _check_columns(path, columns, file.schema_arrow.names)
            table = file.read(columns)
        elif magic == b"ARROW1":
            table = pyarrow.ipc.open_file(source).read_all()
            _check_columns(path, columns, table.schema.names)
        else:
            raise ConfigError(
                f"{path} is neither an Arrow IPC file nor Parquet: it begins with {magic!r}. "
                "(An Arrow *stream* has no random access: write it with pyarrow.ipc.new_file.)"
            )
    except ConfigError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:  # names that are no text are no ArrowException
        raise StorageError(f"{path} is damaged or cannot be read: {told(str(error))}. Write or copy it again.") from None
    return table if columns is None else table.select(list(columns))


def _check_columns(path: str, columns: Sequence[str] | None, names: list[str]) -> None:
    missing = sorted(set(columns or ()) - set(names))
    if missing:
        raise ConfigError(f"{path} has no column {missing}; it has {names}.")
    wanted = names if columns is None else columns
    if twice := sorted(name for name in set(wanted) if names.count(name) > 1):
        raise ConfigError(f"{path} has several columns {twice}; it has {names}. Rename them, or give columns=... without them.")


# ---------------------------------------------------------------- values

Reader = Callable[[np.ndarray], Sequence[Any]]  # row numbers, int64 -> one value per row


def _readers(path: str, batch: pa.RecordBatch) -> dict[str, Reader]:
    """Of each column. Raises ConfigError as `_reader` does, StorageError for a file whose memory would be read at random."""
    try:
        batch.validate()
        return {name: _reader(name, batch.column(name)) for name in batch.schema.names}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (pa.ArrowException, ValueError) as error:
        raise StorageError(f"{path} is damaged: {error}. Write or copy it again.") from None


def _reader(name: str, column: pa.Array) -> Reader:
    """How to read rows of one column of one record batch. Raises ConfigError for nulls and for types without a tensor.

    Numbers are read through numpy views of Arrow's memory, not by pyarrow's `take`: on a slice of nested fixed size
    lists that returns what lies beyond the slice (pyarrow 26), and slices are what larger files consist of.
    """
    kind = column.type
    if _is_text(kind):
        return _text(name, column)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        _refuse_nulls(name, column)
        offsets = _in_order(name, numpy_of(column.offsets), len(column.values))
        offsets = offsets - offsets[0]
        flat = _numbers(name, column.flatten())
        return lambda rows: [torch.from_numpy(flat[offsets[row] : offsets[row + 1]].copy()) for row in rows]
    shape: tuple[int, ...] = (len(column),)
    if isinstance(kind, pa.FixedShapeTensorType):
        _refuse_nulls(name, column)
        in_order = kind.permutation in (None, list(range(len(kind.shape))))
        shape, column = (*shape, *kind.shape), column.storage.flatten() if in_order else column
    while pa.types.is_fixed_size_list(column.type):
        _refuse_nulls(name, column)
        shape, column = (*shape, column.type.list_size), column.flatten()
    if not _is_number(column.type):
        raise ConfigError(
            f"Column {name!r} of type {kind} is not made of numbers or text: leave it out with `columns=`, or "
            "convert it when the file is written."
        )
    view = _numbers(name, column).reshape(shape)
    return lambda rows: torch.from_numpy(view[rows]).unbind(0)  # indexing copies: the tensors own their memory


def _text(name: str, column: pa.Array) -> Reader:
    """Strings and binary, which pyarrow's `take` would read without a look at where they are said to be."""
    _refuse_nulls(name, column)
    kind = column.type
    if pa.types.is_dictionary(kind):
        numbers, value = numpy_of(column.indices), _text(name, column.dictionary)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(column.dictionary):
            raise ValueError(f"column {name!r} refers to more than the {len(column.dictionary)} values of its dictionary")
        return lambda rows: value(numbers[rows])
    _, places, data = column.buffers()
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    offsets = np.frombuffer(places or bytes(8), np.int64 if wide else np.int32)[column.offset :][: len(column) + 1]
    memory = memoryview(data or b"").cast("B")
    _in_order(name, offsets, len(memory))
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)

    def read(rows: np.ndarray) -> list[Any]:
        pieces = [memory[begin:end] for begin, end in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)]
        return [str(piece, "utf-8") for piece in pieces] if is_string else list(map(bytes, pieces))

    return read


def _in_order(name: str, offsets: np.ndarray, size: int) -> np.ndarray:
    """Offsets of values that lie one after the other in so many elements. Raises ValueError for others."""
    if len(offsets) and (offsets[0] < 0 or offsets[-1] > size or (np.diff(offsets) < 0).any()):
        raise ValueError(f"column {name!r} says that values lie outside its memory")
    return offsets


def _numbers(name: str, flat: pa.Array) -> np.ndarray:
    """The column's memory itself; a copy of it only for booleans, which Arrow packs eight to a byte."""
    _refuse_nulls(name, flat)
    return flat.to_numpy(zero_copy_only=False) if pa.types.is_boolean(flat.type) else numpy_of(flat)


def _refuse_nulls(name: str, values: pa.Array) -> None:
    if values.null_count:
        raise ConfigError(f"Column {name!r} holds {values.null_count} null values: fill them when the file is written.")


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
