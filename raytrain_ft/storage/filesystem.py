"""A directory of files, anywhere that `pyarrow.fs` reaches. A file appears under its name whole and durable, or not at all.

On a file system of the machine a file is written under another name, fsynced, renamed, and the directory is fsynced. An object
store shows an object only when its upload is complete, so there the upload is all; elsewhere (hdfs), a file is written under
another name and moved. Names are checked against an allow-list and
never leave the directory, and symbolic links are not followed: the directory may hold what others have put there.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from raytrain_ft.errors import AbsentError, ConfigError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.storage import pages
from raytrain_ft.storage.durable import advice, sync_directory, write_durably

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PARTIAL = re.compile(r"\.[A-Za-z0-9._-]+\.partial")
HALF_A_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/(?!/)|file://(?!/)")
"""What is meant to be a URI and is none. Of "s3://bucket" pathlib makes "s3:/bucket", which would name a directory here."""
S3_LIMITS = {"connect_timeout": 5.0, "request_timeout": 20.0, "retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=3)}
GCS_LIMIT = timedelta(minutes=1)
"""An endpoint that does not answer is an error after about a minute at most, not after many, or never."""
NOT_THERE = (FileNotFoundError, NotADirectoryError)
OBJECT_STORES = ("s3", "gcs", "abfs")
"""Of the kinds that pyarrow knows, those that show a file only when it is whole, or empty until then (abfs)."""
SETTLE_S = 1.0
"""Between the moment when one writer finds no file and the end of its own write no more than this passes, as a rule."""
UNSENT_BYTES = 64 * 2**20
"""Parts of an upload are sent in the background, several at once, but no more than this: pyarrow itself has no bound, and would
hold all of a shard in memory where the network is slower than the disk."""
S3_LARGEST = 10_000 * 10 * 2**20
"""Bytes. S3 takes an upload in 10,000 parts at most, and those of pyarrow have 10 MiB."""


class Storage(Protocol):
    """One directory. Names are relative: "file" or "directory/file".

    Attributes:
        place: what `open_storage` was given; uri: the same as it may be told.
    """

    place: Place
    uri: str

    def put(self, name: str, parts: Iterable[memoryview]) -> None:
        """Writes a file that is there whole and durable when this returns, replacing one of this name."""
        ...

    def claim(self, name: str) -> bool:
        """Makes a file; False if there is one, or somebody else makes it at the same moment."""
        ...

    def view(self, name: str) -> pa.Buffer:
        """The content of a file; mapped where that is possible."""
        ...

    def names(self, directory: str = "") -> list[str]:
        """What a directory holds, in order; empty if there is none."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file, or a directory and the files in it. What is absent is no error.

        Raises:
            StorageError: something could not be removed, such as a directory within; everything else is.
        """
        ...


def open_storage(place: Place | str) -> Storage:
    """The storage at a path, or at any URI that `pyarrow.fs` knows ("s3://bucket/runs", "gs://...", "hdfs://...").

    Raises:
        ConfigError: the URI is none, or of no known kind. UnreachableError: its server cannot be reached.
    """
    place = place if isinstance(place, Place) else Place(place)
    local = local_path(place)
    if local is not None:
        return LocalStorage(local)
    try:
        filesystem, path = pafs.FileSystem.from_uri(place.with_credentials)
        if isinstance(filesystem, pafs.S3FileSystem):
            remake, (options,) = filesystem.__reduce__()  # a URI cannot say how long to wait
            filesystem = remake(options | S3_LIMITS)
        elif filesystem.type_name == "gcs":
            remake, (options,) = filesystem.__reduce__()
            filesystem = remake(options | {"retry_time_limit": options["retry_time_limit"] or GCS_LIMIT})
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # which is not named as the cause: it may say the whole URI
        raise ConfigError(
            f"storage {place!r} is of no kind that pyarrow.fs knows (s3, gs, hdfs, file): {place.told(str(error))}"
        ) from None
    except OSError as error:  # it asks the server where the bucket is
        raise UnreachableError(f"storage {place!r} cannot be reached: {place.told(str(error))}") from None
    if not path.strip("/"):
        raise ConfigError(f"storage {place!r} names no directory")
    return RemoteStorage(place, filesystem, path)


def local_path(place: Place) -> Path | None:
    """The directory of this machine that a path or URI names, absolute; None if it is elsewhere.

    Raises:
        ConfigError: it is meant to be a URI, and is none; or it says what names no directory ("#", "~nobody").
    """
    path = place.with_credentials
    if HALF_A_URI.match(path):
        raise ConfigError(
            f"storage {place!r} is no URI, but looks like one: write s3://bucket/path, file:///path or the like; "
            "before the path of a directory that is named so, write ./"
        )
    if path.startswith("file://"):
        if "?" in path:  # else what is added to it would go before that, and be another directory's
            raise ConfigError(f'storage {place!r} has a "?": of a file:// URI nothing may follow it; in a name, write %3F')
        return Path(unquote(path.removeprefix("file://")))
    if "://" in path:
        if "#" in path:  # what follows it is not sent to a server, so all that differ only in that would be one directory
            raise ConfigError(f'storage {place!r} has a "#", and what follows it is no part of a URI\'s path: write %23')
        return None
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"storage {place!r} begins with the home of a user, which cannot be told here ({error}): write the whole path, "
            "or ./ before the path of a directory that is named so"
        ) from None


def within(place: Place, *names: str) -> Place:
    """The place of something inside a directory. What a URI says after "?" (of an S3 endpoint, say) stays at its end."""
    directory, options = _apart(place)
    return Place("/".join([directory.rstrip("/"), *names]) + options)


def parent(place: Place) -> tuple[Place, str]:
    """The directory that a place is in, and its last name: what `within` puts together."""
    path, options = _apart(place)
    directory, slash, name = path.rstrip("/").rpartition("/")
    return Place((directory or slash or ".") + options), name


def _apart(place: Place) -> tuple[str, str]:
    """Where it is, and what a URI says after that, from "?" on."""
    path, mark, options = place.with_credentials.partition("?")
    return (path, mark + options) if "://" in place.with_credentials else (place.with_credentials, "")


def checked(name: str) -> str:
    """The name, if it is one that we write.

    Raises:
        StorageError: it could lead out of the directory.
    """
    if not all(NAME.fullmatch(part) for part in name.split("/")):
        raise StorageError(f"{name!r} is no name of a file of ours: letters, digits, '.', '_' and '-' only")
    return name


def check_size(storage: Storage, size: int) -> None:
    """Looks whether a file of so many bytes can be written there, before most of it is.

    Raises:
        StorageError: it is too large.
    """
    if isinstance(storage, RemoteStorage) and storage.is_s3 and size > S3_LARGEST:
        raise StorageError(
            f"{storage.uri}: a file of {size} bytes cannot be written to S3, where pyarrow writes {S3_LARGEST} at most: "
            "have more workers, each of which writes a part of the state, or store it elsewhere"
        )


class LocalStorage:
    """A directory of a file system of this machine, or of one that it mounts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = Place(str(root))
        self.uri = str(root)
        self._made: set[Path] = set()

    def put(self, name: str, parts: Iterable[memoryview]) -> None:
        path = self._path(name)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            self._make(path.parent)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                write_durably(descriptor, parts)
            finally:
                os.close(descriptor)
            partial.rename(path)
            sync_directory(path.parent)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StorageError(f"{path} could not be written: {error.strerror or error}{advice(error)}") from error

    def claim(self, name: str) -> bool:
        path = self._path(name)
        try:
            self._make(path.parent)
            try:  # around nothing else: that something is in the way of the directory does not say that this is claimed
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                return False
            os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{path} could not be written: {error.strerror or error}{advice(error)}") from error
        return True

    def _path(self, name: str) -> Path:
        path = self.root / checked(name)
        try:
            leads_away = path.parent != self.root and path.parent.is_symlink()
        except OSError as error:
            raise UnreachableError(f"{path} cannot be reached: {error.strerror or error}") from error
        if leads_away:
            raise StorageError(f"{path.parent} is a symbolic link, which is not followed")
        return path

    def _make(self, directory: Path) -> None:
        """Makes a directory. Its name, and those of the ones made for it, are durable before anything is written into it:
        also if whoever made it was killed before it could see to that.

        Raises:
            StorageError: a link on the way leads to what is not there, such as a disk that is not mounted.
        """
        if directory in self._made:
            return
        missing, path = [], directory
        while not path.exists():
            if path.is_symlink():
                raise StorageError(
                    f"{path} is a link to {path.readlink()}, which is not there: mount or make it, or remove the link"
                )
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        for path in dict.fromkeys([*missing, directory, self.root]):
            sync_directory(path.parent)
        self._made.add(directory)

    def view(self, name: str) -> pa.Buffer:
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise StorageError(f"{path} is no regular file")
                if not found.st_size:
                    return pa.py_buffer(b"")
                return pa.py_buffer(pages.for_reading(descriptor, found.st_size))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # ValueError: it became shorter just now
            raise _kind(error)(f"{path} cannot be read: {error}") from error

    def names(self, directory: str = "") -> list[str]:
        path = self.root / checked(directory) if directory else self.root
        try:
            return sorted(entry.name for entry in os.scandir(path) if not entry.is_symlink())
        except NOT_THERE:
            return []
        except OSError as error:
            raise UnreachableError(f"{path} cannot be listed: {error.strerror or error}") from error

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            found = path.lstat()
        except NOT_THERE:
            return None
        except OSError as error:
            raise UnreachableError(f"{path} cannot be read: {error}") from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, name: str) -> None:
        path, errors = self.root / name, []
        try:
            if path.is_dir() and not path.is_symlink():
                errors = [error for entry in list(os.scandir(path)) if (error := _unlink(Path(entry.path)))]
                if not errors:
                    path.rmdir()
            else:
                path.unlink()
        except NOT_THERE:
            return
        except OSError as error:
            errors = [error]
        if errors:
            raise StorageError(f"{path} could not be removed: {errors[0]}") from errors[0]


def _kind(error: Exception) -> type[StorageError]:
    """Of what failed: whether the storage did, nothing lies there, or what does is not as it should be."""
    if isinstance(error, NOT_THERE):
        return AbsentError
    is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
    return UnreachableError if isinstance(error, OSError) and not is_link else StorageError


def _unlink(path: Path) -> OSError | None:
    """Removes a file; returns why it could not."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


class RemoteStorage:
    """An object store, or any other file system of pyarrow."""

    def __init__(self, place: Place, filesystem: Any, path: str) -> None:
        self.place = place
        self.uri = str(place)
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self.is_s3: bool = filesystem.type_name == "s3"

    def put(self, name: str, parts: Iterable[memoryview]) -> None:
        path = f"{self._path}/{checked(name)}"
        with self._telling(f"{path} could not be written"):
            if self._filesystem.type_name != "s3":  # which has no directories
                self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            if self._filesystem.type_name in OBJECT_STORES:
                replaces = self._filesystem.get_file_info(path).type == pafs.FileType.File
                self._write(path, parts, keep=replaces)  # a file of this name is shown until the upload is complete
            else:
                directory, _, last = path.rpartition("/")
                partial = f"{directory}/.{last}.{secrets.token_hex(8)}.partial"
                self._write(partial, parts)
                self._filesystem.move(partial, path)

    def claim(self, name: str) -> bool:
        """pyarrow has no way to write an object only where there is none: of those who see none, the last to write has it."""
        if self.size(name) is not None:
            return False
        token = secrets.token_bytes(16)
        self.put(name, [memoryview(token)])
        time.sleep(SETTLE_S)
        return self.view(name).to_pybytes() == token

    def _write(self, path: str, parts: Iterable[memoryview], *, keep: bool = False) -> None:
        """`keep`: what is there after an error stays; otherwise it is what was written of it, shown when the stream was
        closed, and it is removed."""
        unsent = 0
        try:
            with self._filesystem.open_output_stream(path) as stream:
                for part in parts:
                    stream.write(part)
                    unsent += part.nbytes
                    if unsent >= UNSENT_BYTES:
                        stream.flush()
                        unsent = 0
        except BaseException:
            if not keep:
                with suppress(OSError):
                    self._filesystem.delete_file(path)
            raise

    def view(self, name: str) -> pa.Buffer:
        path = f"{self._path}/{checked(name)}"
        with self._telling(f"{path} cannot be read"), self._filesystem.open_input_file(path) as file:
            return file.read_buffer()

    def names(self, directory: str = "") -> list[str]:
        path = f"{self._path}/{checked(directory)}" if directory else self._path
        with self._telling(f"{path} cannot be listed"):
            found = self._filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found if not self._is_unfinished(info))

    def size(self, name: str) -> int | None:
        path = f"{self._path}/{checked(name)}"
        with self._telling(f"{path} cannot be read"):
            info = self._filesystem.get_file_info(path)
        return info.size if info.type == pafs.FileType.File and not self._is_unfinished(info) else None

    def _is_unfinished(self, info: pafs.FileInfo) -> bool:
        """pyarrow begins an upload to Azure with an empty blob of its name. No file of ours is empty."""
        return self._filesystem.type_name == "abfs" and info.type == pafs.FileType.File and info.size == 0

    def delete(self, name: str) -> None:
        path = f"{self._path}/{name}"
        with self._telling(f"{path} could not be removed"), suppress(FileNotFoundError):
            kind = self._filesystem.get_file_info(path).type
            if kind == pafs.FileType.Directory:
                self._filesystem.delete_dir(path)
            elif kind == pafs.FileType.File:
                self._filesystem.delete_file(path)

    @contextmanager
    def _telling(self, failure: str) -> Iterator[None]:
        """An error of pyarrow becomes one of ours. It may name a URL with credentials, so it is not kept as the cause."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise _kind(error)(f"{failure}: {self.place.told(str(error))}") from None
