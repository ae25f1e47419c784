"""Power is lost at any moment of a commit, and with it whatever was not synced: names, data, or both, in any combination.

The calls of a commit are recorded, and a model of a disk says what may be left of them. It grants less than any real file
system: data is there only after fsync of the file, and a name only after fsync of its directory; of what is not synced, any
part may be there, in any order.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import commits
import pytest
from commits import newest, prepare
from disks import small_file_system

from raytrain_ft.errors import StorageError
from raytrain_ft.storage import durable, retention, shard
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.storage.manifest import Name

OLD, NEW = 20, 30
DIRECTORY = -1
Change = dict[Path, int | None]
"""Names that a call makes (a file's number, or DIRECTORY) or removes (None), all at once."""


@dataclass
class File:
    """What is written, and what of it is on the disk."""

    data: bytes = b""
    synced: bytes = b""


@dataclass
class Disk:
    """Names and files, as a process sees them and as they are on the disk."""

    files: list[File] = field(default_factory=list)
    names: dict[Path, int | None] = field(default_factory=dict)
    pending: list[tuple[Path, Change]] = field(default_factory=list)  # changes of a directory since its last fsync

    def apply(self, operation: tuple[Any, ...]) -> None:
        """One call that was recorded."""
        match operation:
            case "create", path, number:
                assert number == len(self.files)
                self.files.append(File())
                self.pending.append((path.parent, {path: number}))
            case "write", number, data:
                self.files[number].data += data
            case "sync", number:
                self.files[number].synced = self.files[number].data
            case "sync directory", directory:
                for where, change in self.pending:
                    if where == directory:
                        self.names |= change
                self.pending = [(where, change) for where, change in self.pending if where != directory]
            case "change", directory, change:
                self.pending.append((directory, change))

    def left(self, names: float, data: float, chance: random.Random) -> dict[Path, bytes | None]:
        """What power loss may leave: files with their content, directories with None.

        Args:
            names, data: how probable it is that a change of a name, and data, that was not synced is on the disk.
        """
        found = dict(self.names)
        for _, change in self.pending:
            if chance.random() < names:
                found |= change
        tree: dict[Path, bytes | None] = {}
        for path, number in sorted(found.items()):
            if number is not None and (path.parent == Path() or path.parent in tree):
                tree[path] = None if number == DIRECTORY else self._content(self.files[number], data, chance)
        return tree

    def _content(self, file: File, data: float, chance: random.Random) -> bytes:
        if file.synced == file.data or chance.random() < data:
            return file.data
        kept = chance.choice([0, len(file.data) // 2, len(file.data)])
        return chance.choice([file.synced, file.data[:kept], bytes(kept), file.data[:kept] + bytes(len(file.data) - kept)])


class Killed(BaseException):
    """The process is gone: nothing that it would still do is done."""


@contextmanager
def recorded(root: Path, log: list[tuple[Any, ...]], numbers: Iterator[int], stop_at: int | None = None) -> Iterator[None]:
    """Records calls under a directory; from call number `stop_at` on none is made."""
    open_files: dict[int, int | Path] = {}  # by descriptor: the number of a file, or the path of a directory
    ids: dict[Path, int] = {}
    made = itertools.count()

    def wrap(patch: pytest.MonkeyPatch, name: str, record: Any) -> None:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            if stop_at is not None and next(made) >= stop_at:
                raise Killed
            result = real(*args, **more)
            for operation in record(result, *args):
                log.append(operation)
            return result

        patch.setattr(os, name, call)

    def opened(result: int, path: Any, flags: int, *_: Any) -> Iterator[tuple[Any, ...]]:
        inside = Path(path)
        if not inside.is_relative_to(root.parent):
            return
        inside = inside.relative_to(root.parent)
        if flags & os.O_DIRECTORY:
            open_files[result] = inside
        elif flags & os.O_CREAT:
            open_files[result] = ids[inside] = next(numbers)
            yield "create", inside, ids[inside]

    def synced(_: Any, descriptor: int) -> Iterator[tuple[Any, ...]]:
        what = open_files[descriptor]
        yield ("sync directory", what) if isinstance(what, Path) else ("sync", what)

    def removed(_: Any, path: Any) -> Iterator[tuple[Any, ...]]:
        inside = Path(path).relative_to(root.parent)
        yield "change", inside.parent, {inside: None}

    def renamed(_: Any, source: Any, target: Any) -> Iterator[tuple[Any, ...]]:
        a, b = (Path(path).relative_to(root.parent) for path in (source, target))
        yield "change", a.parent, {a: None, b: ids[a]}

    def directory_made(_: Any, path: Any, *__: Any) -> Iterator[tuple[Any, ...]]:
        inside = Path(path).relative_to(root.parent)
        yield "change", inside.parent, {inside: DIRECTORY}

    def written(count: int, descriptor: int, data: Any) -> Iterator[tuple[Any, ...]]:
        yield "write", open_files[descriptor], bytes(data[:count])

    with pytest.MonkeyPatch.context() as patch:
        wrap(patch, "open", opened)
        wrap(patch, "write", written)
        wrap(patch, "rename", renamed)
        wrap(patch, "mkdir", directory_made)
        for name in ("fsync", "fdatasync"):
            wrap(patch, name, synced)
        for name in ("unlink", "rmdir"):
            wrap(patch, name, removed)
        yield


def disk_of(root: Path) -> Disk:
    """A disk that holds what is there, all of it synced."""
    disk = Disk(names={Path(root.name): DIRECTORY} if root.exists() else {})
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root.parent)
        disk.names[inside] = DIRECTORY if path.is_dir() else len(disk.files)
        if path.is_file():
            disk.files.append(File(path.read_bytes(), path.read_bytes()))
    return disk


def after_power_loss(disk: Disk, where: Path, names: float, data: float, chance: random.Random) -> int | None:
    """The step that is found afterwards."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    for path, content in disk.left(names, data, chance).items():
        if content is None:
            (where / path).mkdir()
        else:
            (where / path).write_bytes(content)
    return newest(LocalStorage(where / "checkpoints"))


VARIANTS = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), *[(0.5, 0.3)] * 8]
"""Nothing that was not synced is left; only the names; only the data; all; and eight times any part."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK_BYTES", 16_384)
    monkeypatch.setattr(durable, "WRITE_BACK_BYTES", 2**40)  # its thread would make the order of calls a matter of chance


@pytest.mark.usefixtures("small_blocks")
def test_power_is_lost_after_any_call_of_a_commit(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    prepare(root)
    disk = disk_of(root)
    log: list[tuple[Any, ...]] = []
    with recorded(root, log, itertools.count(len(disk.files))):
        commits.commit(root, NEW)
    assert len(log) > 40
    chance = random.Random(0)
    points, after = 0, []
    for number in range(len(log) + 1):
        for names, data in VARIANTS:
            found = after_power_loss(disk, tmp_path / "after", names, data, chance)
            assert found in (OLD, NEW), f"after {log[:number][-1:]} (names {names}, data {data}): {found}"
            points += 1
            after.append(found)
        if number < len(log):
            disk.apply(log[number])
    assert set(after[-len(VARIANTS) :]) == {NEW}
    committed = next(i for i, entry in enumerate(log) if entry[0] == "change" and "manifest.json" in str(entry[2]))
    assert log[committed + 1][0] == "sync directory"
    assert set(after[(committed + 2) * len(VARIANTS) :]) == {NEW}  # durable for good, whatever is deleted or written then
    print(f"\n{points} states that power loss may leave, at {len(log)} calls")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("there", [True, False], ids=["a directory that is there", "the first checkpoint of a run"])
def test_what_a_killed_writer_had_not_synced_is_synced_by_the_next(tmp_path: Path, there: bool) -> None:
    """A directory that a killed writer has made, and not made durable, is there for the next one: which must not trust it."""
    base = tmp_path / "base" / "checkpoints"
    base.parent.mkdir()
    if there:
        prepare(base)
    points = 0
    chance = random.Random(0)
    for stop_at in itertools.count(0, 2 if there else 3):
        root = tmp_path / "now" / "checkpoints"
        shutil.rmtree(root.parent, ignore_errors=True)
        root.parent.mkdir()
        if there:
            shutil.copytree(base, root)
        disk = disk_of(root)
        log: list[tuple[Any, ...]] = []
        numbers = itertools.count(len(disk.files))
        ended = True
        try:
            with recorded(root, log, numbers, stop_at):
                if not there:
                    commits.lock._write(LocalStorage(root), commits.OWNER)
                commits.commit(root, NEW)
        except Killed:
            ended = False
        with recorded(root, log, numbers):
            commits.lock._write(LocalStorage(root), commits.OWNER)
            commits.commit(root, NEW)  # of the same name, as when only the persister was lost
        for operation in log:
            disk.apply(operation)
        for names, data in VARIANTS:
            assert after_power_loss(disk, tmp_path / "after", names, data, chance) == NEW, (stop_at, names, data)
            points += 1
        if ended:
            break
    assert points > 200
    print(f"\n{points} states after a writer that was killed and another that was not")


# ---------------------------------------------------------------- a real file system that is full, or cannot be written


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB."""
    with small_file_system(tmp_path / "disk", "2M") as path:
        yield path


def attempt(root: Path, step: int) -> str | None:
    """Why it could not be committed."""
    try:
        commits.commit(root, step)
    except StorageError as error:
        return str(error)
    return None


def test_a_disk_that_is_full_at_any_point(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    prepare(root)
    errors, step = 0, NEW
    for free in range(0, 160 * 1024, 8192):
        ballast = small_disk / "ballast"
        status = os.statvfs(small_disk)
        ballast.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free)))
        before = newest(LocalStorage(root))
        failure = attempt(root, step)
        if failure is not None:
            errors += 1
            assert "Free some space" in failure
            assert newest(LocalStorage(root)) == before
        else:
            assert newest(LocalStorage(root)) == step
            step += 1
        ballast.unlink()
    assert errors >= 7
    assert step > NEW
    print(f"\n{errors} commits on a disk that was too full")


def test_what_broke_off_does_not_fill_a_disk_for_ever(small_disk: Path) -> None:
    """It has room for the checkpoints that stay and the one under way. Worker 0 was lost before it had written its part of
    that: with the other part, which nobody can commit any more, there is no room for the next."""
    root = small_disk / "checkpoints"
    prepare(root)
    stays = root / str(Name(OLD, 1, 1))
    needed = sum(path.stat().st_blocks * 512 for path in stays.iterdir())
    status = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize - needed * 5 // 4))
    commits.carry_out(commits.job(root, NEW, 1), memoryview(bytes(3 * commits.SIZE)), set())
    for step in (40, 50, 60):
        assert attempt(root, step) is None
        assert newest(LocalStorage(root)) == step


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    import subprocess

    root = small_disk / "checkpoints"
    prepare(root)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageError, match="mount and its permissions"):
        commits.commit(root, NEW)
    assert newest(LocalStorage(root)) == OLD
    with suppress(StorageError):
        retention.retain(LocalStorage(root), commits.checkpoint.Name(OLD, 1, 1), 1)
    assert newest(LocalStorage(root)) == OLD
