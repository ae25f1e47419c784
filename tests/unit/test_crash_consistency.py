"""A commit that is broken off anywhere leaves the checkpoint before, or the new one, whole; never a mix, never neither.

Every call of a commit that changes a file or makes it durable is killed at, and fails, once: in a fork whose calls are wrapped,
and again, by strace, in the kernel. The disk that loses what was not synced is in `test_unsynced_data`.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commits
import pytest
from commits import check_recovery, newest, prepare

from raytrain_ft.errors import StorageError
from raytrain_ft.storage import checkpoint, durable, shard
from raytrain_ft.storage.filesystem import LocalStorage

CALLS = ("write", "fsync", "fdatasync", "rename", "mkdir", "unlink", "rmdir", "open", "close")
OLD, NEW = 20, 30
FAILED = 3


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints, to be copied."""
    root = tmp_path_factory.mktemp("template") / "checkpoints"
    prepare(root)
    assert newest(LocalStorage(root)) == OLD
    return root


# ---------------------------------------------------------------- every call, in a fork

Fault = Callable[[Callable[..., Any], str, tuple[Any, ...]], Any]


def kill(_: Callable[..., Any], __: str, ___: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(real: Callable[..., Any], call: str, args: tuple[Any, ...]) -> None:
    if call == "write":
        real(args[0], args[1][: len(args[1]) // 2])  # torn
    else:
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def error(number: int) -> Fault:
    def fail(real: Callable[..., Any], call: str, args: tuple[Any, ...]) -> None:
        if call == "close":
            real(*args)  # a descriptor is closed also when close fails
        raise OSError(number, os.strerror(number))

    return fail


FAULTS: dict[str, Fault] = {
    "killed": kill,
    "killed after it": kill_after,
    "EIO": error(errno.EIO),
    "ENOSPC": error(errno.ENOSPC),
}


def install(at: int, fault: Fault) -> None:
    """The `at`-th of the calls has this fault. In a fork only."""
    numbers = itertools.count(1)

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            return fault(real, name, args) if next(numbers) == at else real(*args, **more)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def in_fork(root: Path, at: int, fault: Fault) -> tuple[int, bool]:
    """Commits in a fork; its exit status, and whether it came as far as the fault."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status, reached = 99, False
        try:
            shard.BLOCK_BYTES = durable.WRITE_BACK_BYTES = 16_384  # more calls, and some of them on the other thread

            def reaching(*args: Any) -> Any:
                os.set_blocking(writer, False)
                real_write(writer, b"!")
                return fault(*args)

            real_write = os.write
            install(at, reaching)
            commits.commit(root, NEW)
            status = 0
        except StorageError:
            status = FAILED
        finally:
            os._exit(status)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    reached = os.read(reader, 1) == b"!"
    os.close(reader)
    return os.waitstatus_to_exitcode(status), reached


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_call_of_a_commit(template: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK_BYTES", 16_384)
    base = tmp_path / "base"
    prepare(base)
    outcomes: list[tuple[int, int | None]] = []
    for at in itertools.count(1):
        root = tmp_path / str(at)
        shutil.copytree(base, root)
        status, reached = in_fork(root, at, FAULTS[fault])
        assert status in (0, FAILED, -signal.SIGKILL), f"call {at}: exit code {status}"
        found = newest(LocalStorage(root))
        assert found in (OLD, NEW), f"call {at}: {found}"
        if status == 0:
            assert found == NEW, f"call {at}: said to be committed, and it is not"
        outcomes.append((status, found))
        check_recovery(root)
        shutil.rmtree(root)
        if not reached:
            break
    assert outcomes[-1] == (0, NEW)
    assert len(outcomes) > 60
    # in order: the old one for long, then the new one for the rest
    steps = [step for _, step in outcomes]
    assert steps[: steps.index(NEW)] == [OLD] * steps.index(NEW)
    print(f"\n{len(outcomes) - 1} calls ({fault}): the old one {steps.count(OLD)} times, the new one {steps.count(NEW)} times")


def test_an_error_on_the_other_thread_is_not_lost(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of it once: whoever asks next hears that all is well."""
    root = tmp_path / "checkpoints"
    shutil.copytree(template, root)
    monkeypatch.setattr(durable, "WRITE_BACK_BYTES", 1)
    go = durable._WriteBack.go

    def go_and_see(self: durable._WriteBack) -> None:
        """On a busy machine the thread may come too late to do anything, and then nothing is lost either."""
        go(self)
        deadline = time.monotonic() + 30
        while self._wanted.is_set() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(durable._WriteBack, "go", go_and_see)
    monkeypatch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(StorageError, match="could not be written"):
        commits.commit(root, NEW)
    assert newest(LocalStorage(root)) == OLD


def test_the_end_of_a_file_is_not_missed_by_the_other_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be told of the end just as it begins with what it was told of before."""
    begins = threading.Event()

    class Ended(threading.Event):
        """Is cleared only once it was set for the second time."""

        sets = 0

        def set(self) -> None:
            super().set()
            self.sets += 1

        def clear(self) -> None:
            begins.set()
            deadline = time.monotonic() + 10
            while self.sets < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            super().clear()

    with (tmp_path / "file").open("wb") as file:
        with monkeypatch.context() as patch:
            patch.setattr(durable, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
            write_back = durable._WriteBack(file.fileno())
        write_back.go()
        assert begins.wait(20)
        ending = threading.Thread(target=write_back.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


# ---------------------------------------------------------------- the same in the kernel

SYSCALLS = {
    "fsync": "fsync",
    "rename": "rename,renameat,renameat2",
    "mkdir": "mkdir,mkdirat",
    "unlink": "unlink,unlinkat,rmdir",
    "write": "write",
}
STRIDES = {"fsync": 7, "rename": 3, "mkdir": 1, "unlink": 4, "write": 7}
"""Not every call: a traced process takes half a second, and those between are done in a fork."""


def strace_works() -> str | None:
    """None, or why it does not."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    command = ["strace", "-e", "inject=fsync:error=EIO:when=9", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace cannot trace here: {done.stderr.strip()[:200]}"


@pytest.fixture(scope="module")
def traced() -> None:
    if why := strace_works():
        pytest.skip(why)


@pytest.mark.parametrize(
    ("call", "fault"), [*itertools.product(SYSCALLS, ["signal=SIGKILL", "error=EIO"]), ("write", "error=ENOSPC")]
)
@pytest.mark.usefixtures("traced")
def test_a_fault_in_the_kernel(template: Path, tmp_path: Path, call: str, fault: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    points = 0
    log = tmp_path / "log"
    for at in itertools.count(1, STRIDES[call]):
        root = tmp_path / str(at)
        shutil.copytree(template, root)
        command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={SYSCALLS[call]}"]
        command += ["-e", f"inject={SYSCALLS[call]}:{fault}:when={at}", sys.executable, commits.__file__, str(root), str(NEW)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode in (0, FAILED, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
        found = newest(LocalStorage(root))
        assert found == NEW if done.returncode == 0 else found in (OLD, NEW)
        check_recovery(root)
        shutil.rmtree(root)
        if "INJECTED" not in log.read_text() and done.returncode == 0:
            break
        points += 1
    assert points >= 1
    print(f"\n{points} points of {fault} at {call}")


# ---------------------------------------------------------------- damage of what was committed


def files_of(root: Path) -> list[Path]:
    """What a reader reads of the newest checkpoint."""
    directory = root / str(checkpoint.found(LocalStorage(root))[0].name)
    return sorted([*directory.glob("*.arrow"), directory / "manifest.json"])


def test_every_one_of_a_thousand_flipped_bits_is_detected(template: Path, tmp_path: Path) -> None:
    import random

    root = tmp_path / "checkpoints"
    shutil.copytree(template, root)
    chance = random.Random(0)
    missed = 0
    originals = {path: path.read_bytes() for path in files_of(root)}
    assert len(originals) == 3
    for number in range(1000):
        path = list(originals)[number % len(originals)]  # the manifest is small, and gets as many as each shard
        bit = chance.randrange(8 * len(originals[path]))
        damaged = bytearray(originals[path])
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        warnings: list[str] = []
        if newest(LocalStorage(root), warnings) != 10:
            missed += 1
        else:
            assert any(f"{path.parent.name}/{path.name}" in warning for warning in warnings), warnings
        path.write_bytes(originals[path])
    assert missed == 0
    assert newest(LocalStorage(root)) == OLD


def test_every_bit_of_a_manifest_counts(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(template, root)
    path = files_of(root)[0]
    assert path.name == "manifest.json"
    original = path.read_bytes()
    for bit in range(8 * len(original)):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="manifest"):
            checkpoint.read_manifest(LocalStorage(root), checkpoint.found(LocalStorage(root))[0].name)


def test_files_that_were_cut_short_at_any_page(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(template, root)
    for path in files_of(root):
        original = path.read_bytes()
        for size in sorted({*range(0, len(original), 4096), 1, len(original) - 1}):
            path.write_bytes(original[:size])
            warnings: list[str] = []
            assert newest(LocalStorage(root), warnings) == 10
            assert any(f"{path.parent.name}/{path.name}" in warning for warning in warnings), warnings
        path.write_bytes(original + b"\0")
        assert newest(LocalStorage(root)) == 10
        path.write_bytes(original)
    assert newest(LocalStorage(root)) == OLD
