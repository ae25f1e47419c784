"""The process that writes a worker's snapshots to storage, so that training shares neither its interpreter nor its patience.

The snapshot lies in memory that both processes map (a memfd: it has no name, and is gone when both are), and so does the job,
which of a large model is longer than a pipe takes in: a process that is frozen must not hold up who writes to it. Lines of
JSON on pipes say that there is a job, how it ended, and that all is tidy after it (an empty one). At most one job is under
way, and it is never abandoned (CheckFreq, section 4.3.1): when the worker is lost in the midst of one, it is brought to its
end before this process ends too. So what ends a worker together with all its processes does not reach this one, which has a
session of its own (torchrun signals the groups of all ranks when one of them fails), and it ignores a request to end. But
nothing may be left of a run: without a worker it waits for no more of others' shards than may be under way already.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from raytrain_ft.errors import LockedError, StorageError, UnreachableError
from raytrain_ft.places import Place
from raytrain_ft.storage import checkpoint, lock, pages, retention
from raytrain_ft.storage.filesystem import Storage, open_storage
from raytrain_ft.storage.job import Hearer, Job, Outcome, Teller
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.shard import Piece, encode

NICENESS = 10
"""Added to the worker's own: where training needs every core, it comes first."""
KILL_S = 5.0
"""How long the end of a process that was killed is waited for."""
POLL_S = 1.0
"""How often it is looked whether the worker still lives."""
RIGHT_S = 5.0
"""How often it is looked, while others are waited for, whether a later launch has the right to write."""
MARKING_S = 5.0
"""How long a mark that is being made is waited for before the shard that it is of is tried again: storage may hang."""
ORPHAN_S = 5.0
"""Without its worker it waits for others' shards as long as its own took to write, but at least this long."""
LINES_BYTES = 2**16


def carry_out(
    job: Job,
    parts: Sequence[memoryview],
    cancelled: set[str],
    done: Callable[[int], None] = lambda size: None,
    lives: Callable[[], bool] = lambda: True,
) -> str:
    """Writes a shard and, as number 0, commits. Then it tidies up, which takes as long again as some of the writing did.
    Returns what of that failed, in words.

    Args:
        parts: of the shard's file (`shard.encode`).
        done: is told of the bytes written by all, as soon as they are durable.
        lives: whether the worker does.

    Raises:
        StorageError: it could not be; LockedError: another run writes there by now.
    """
    storage = open_storage(job.place)
    if job.number == 0:  # one of them is enough
        with suppress(StorageError):  # perhaps there is room without
            _check_right(storage, job)
            retention.make_room(storage, job.name)
    began = time.monotonic()
    own = checkpoint.write_shard(storage, job.name, job.number, job.count, parts)
    if job.number != 0:
        done(own.size)
        return ""

    written = looked = time.monotonic()
    orphaned: float | None = None

    def check() -> None:
        nonlocal looked, orphaned
        now = time.monotonic()
        if str(job.name) in cancelled:
            raise StorageError(f"{job.name}: the world that was writing it is over")
        if orphaned is None and not lives():
            orphaned = now
        if orphaned is not None and now - orphaned > max(ORPHAN_S, written - began):
            raise StorageError(f"{job.name}: its worker is gone, and the shards of others did not come")
        if now - looked > RIGHT_S:
            with suppress(UnreachableError):  # that it cannot be told now does not say that it is lost
                _check_right(storage, job)  # the next launch is at work: who is missing will not come, the memory is needed
            looked = now

    entries = checkpoint.await_shards(storage, job.name, own, job.count, job.timeout_s, check)
    checkpoint.patiently(partial(_check_right, storage, job))
    manifest = Manifest(
        step=job.step,
        epoch=job.epoch,
        incarnation=job.incarnation,
        shards=entries,
        values=job.values,
        size=job.size,
        kept=job.kept,
        created=time.time(),
    )
    checkpoint.commit(storage, manifest)
    is_over = not lives() or str(job.name) in cancelled  # before the worker is told, which may be what it ends upon
    done(sum(entry.size for entry in entries))
    return "" if is_over else _tidy(storage, job)  # others may be going back to what it would delete


def _check_right(storage: Storage, job: Job) -> None:
    """Raises LockedError: it has passed to another. StorageError: nobody knows whose it is; UnreachableError: not now."""
    found = lock.standing(storage)
    if found is None:
        what = f"{lock.FILE} is gone or damaged, so nobody can tell who may write"
        raise StorageError(f"{storage.uri}/{what}; {job.name} is not committed")
    if (found.owner, found.epoch) != (job.owner, job.epoch):
        raise LockedError(f"{storage.uri}: another run has taken the right to write; {job.name} is not committed")
    if found.since > job.incarnation:
        raise StorageError(f"{job.name}: the world that was writing it is over")


def _tidy(storage: Storage, job: Job) -> str:
    """What comes after the commit: first what makes room, also for the rest. That one fails holds up no other, and makes the
    checkpoint no worse; but where it always fails, nobody would know why the storage fills up. Returns what did."""

    def write_files() -> None:
        for name, content in job.files.items():
            storage.put(name, [memoryview(content.encode())])

    def delete() -> None:
        _check_right(storage, job)  # in a world that is cut off, and over since the commit, what others go back to would go
        retention.retain(storage, job.name, job.keep, job.rejected, job.begun, job.unread)

    failed: list[str] = []
    for part, what in ((delete, "what it replaces could not be deleted"), (write_files, "what was measured was not written")):
        try:
            part()
        except Exception as error:
            failed.append(f"{what}: {error if isinstance(error, StorageError) else repr(error)}")
            print(f"after {job.name}: {error!r}", file=sys.stderr)  # the last of a run is told nowhere else
    return "; ".join(failed)


# ---------------------------------------------------------------- the worker's side


class SharedMemory:
    """Memory that a persister maps too. Grows when it must; its pages are kept, so that they are touched only once.

    Attributes:
        unpin: undoes what was done to the present mapping; called before another takes its place.
    """

    def __init__(self) -> None:
        self.unpin: Callable[[], object] | None = None
        self.descriptor = os.memfd_create("raytrain_ft-snapshot", os.MFD_CLOEXEC)
        self.view = memoryview(bytearray())
        self._growing = threading.Lock()

    def reserve(self, size: int) -> memoryview:
        """At least this many bytes, the first of which are the first of the memory.

        Raises:
            OSError: there is not so much memory.
        """
        with self._growing:
            if size > len(self.view):
                self._unpin()
                os.ftruncate(self.descriptor, size)
                try:
                    self.view = memoryview(pages.for_writing(self.descriptor, size, len(self.view)))
                except OSError:
                    os.ftruncate(self.descriptor, len(self.view))  # what there was of it is needed elsewhere
                    raise
            return self.view[:size]

    def close(self) -> None:
        """Gives the memory back once no view of it is left."""
        self._unpin()
        self.view = memoryview(bytearray())
        os.close(self.descriptor)

    def _unpin(self) -> None:
        if self.unpin is not None:
            self.unpin()
            self.unpin = None


class Persister:
    """A persister process, started with its first job and again if it was lost."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._described = os.fdopen(os.memfd_create("raytrain_ft-job", os.MFD_CLOEXEC), "r+b", buffering=0)
        self._told = Teller()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: Future[Outcome] | None = None
        self._untidied = 0  # jobs
        self._marking: threading.Thread | None = None
        self._lock = threading.Lock()
        self._tidied = threading.Condition(self._lock)

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
            OSError, RuntimeError: there is no room for it, or for a thread that listens to it.
        """
        if self.pid is not None:
            return
        # One that has just died may not have been heard of yet; what it had to do is over with it.
        self._ended(self._process, "the persister process ended")
        with self._lock:
            self._process = None  # what it still says is of no matter
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        reading, writing = os.pipe()  # its standard output is not for answers: a library may print to it
        with ExitStack() as on_error, os.fdopen(writing, "w") as answering:
            answers = on_error.enter_context(os.fdopen(reading))
            descriptors = [self._memory.descriptor, self._described.fileno(), answering.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raytrain_ft.storage.persister", *map(str, [*descriptors, os.getpid()])],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=descriptors,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            on_error.callback(setattr, self, "_process", None)
            on_error.callback(self._end, self._process, 0.0)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            threading.Thread(target=self._listen, args=(self._process, answers), name="persister", daemon=True).start()
            on_error.pop_all()

    def submit(self, job: Job) -> Future[Outcome]:
        """Begins a job. The future never fails: an outcome with an error says what went wrong."""
        future: Future[Outcome] = Future()
        if self._marking is not None:  # it may be of this very shard, which removes it before it is written, and not after
            self._marking.join(MARKING_S)
        try:
            message = self._told.tell(job, self._described.fileno())
            self.start()
        except (OSError, RuntimeError, ValueError, TypeError) as error:  # the latter two: the values are no JSON
            future.set_result(Outcome(f"the persister could not be given its job: {error}", 0.0, 0))
            return future
        with self._lock:
            assert self._pending is None, "at most one job at a time"
            self._pending = future
            self._untidied += 1
        try:
            self._send(message)
        except OSError as error:
            self._ended(self._process, f"the persister could not be reached: {error}")
        return future

    def cancel(self, name: Name) -> None:
        """The world that writes this checkpoint is over: waiting for the shards of others is no use, and nothing is deleted for
        its sake."""
        if self._pending is not None:
            try:
                self._send({"cancel": str(name)})
            except OSError:
                return  # it has ended, which settles the job; or it is frozen, and gives it up by its own time limit

    def give_up(self, place: Place, name: Name, number: int, count: int) -> None:
        """Who waits for this shard is told that it will not come, also if it never came to the process, or that was killed. On
        a thread, for storage may hang; while it does, no more are told."""
        if self._marking is None or not self._marking.is_alive():
            marking = threading.Thread(target=_mark, args=(place, name, number, count), name="mark", daemon=True)
            with suppress(RuntimeError):  # there is no thread for it: who waits gives up by its own time limit
                marking.start()
                self._marking = marking

    @property
    def is_tidy(self) -> bool:
        """Whether no job is under way, and nothing is left to delete after the last one."""
        return self._untidied == 0

    def await_tidy(self, timeout_s: float) -> bool:
        """Waits until what is not needed any more since the last commit is deleted; returns whether it is. Who ends a process
        before that leaves its half-written files."""
        with self._tidied:
            return self._tidied.wait_for(lambda: self.is_tidy, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Lets it finish its job and end; a process that does not end in time is killed."""
        self._described.close()
        if self._process is not None:
            self._end(self._process, timeout_s)
        if self._marking is not None:
            self._marking.join(timeout_s)

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        assert process.stdin is not None
        try:
            self._send({"end": True})  # processes that were forked here may hold the pipe open
            process.stdin.close()
            process.wait(timeout_s)
        except (subprocess.TimeoutExpired, OSError):
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel kills nobody whose storage does not answer
                process.wait(KILL_S)

    def _send(self, message: dict[str, Any]) -> None:
        """A line is so short that the pipe takes all of it, or nothing.

        Raises:
            OSError: the process has ended, or has not read for so long that the pipe is full.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _listen(self, process: subprocess.Popen[bytes], answers: TextIO) -> None:
        last = ""
        try:
            with answers as lines:
                for answer in map(json.loads, lines):
                    if answer:
                        self._settle(process, Outcome(**answer))
                    else:
                        self._tidy(process, jobs=1)
        except (ValueError, TypeError) as error:  # it was killed in the midst of a line
            last = f", and what it said last makes no sense: {error}"
            process.kill()  # else nobody would hear any more of it
        self._ended(process, f"the persister process ended (exit code {process.wait()}){last}")

    def _ended(self, process: subprocess.Popen[bytes] | None, error: str) -> None:
        self._settle(process, Outcome(error, 0.0, 0))
        self._tidy(process)

    def _tidy(self, process: subprocess.Popen[bytes] | None, jobs: int | None = None) -> None:
        """Nothing is left to do after so many jobs (all)."""
        with self._tidied:
            if process is self._process:
                self._untidied = 0 if jobs is None else max(0, self._untidied - jobs)
                self._tidied.notify_all()

    def _settle(self, process: subprocess.Popen[bytes] | None, outcome: Outcome) -> None:
        """What a process that was replaced still says is not about the present job."""
        with self._lock:
            if process is not self._process:
                return
            future, self._pending = self._pending, None
        if future is not None:
            future.set_result(outcome)


def _mark(place: Place, name: Name, number: int, count: int) -> None:
    with suppress(StorageError):
        checkpoint.mark_failed(open_storage(place), name, number, count)


# ---------------------------------------------------------------- the process


def main() -> None:
    """Body of the process: jobs from standard input until it ends, or says that there are no more."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the driver and the worker: a job is brought to its end
        signal.signal(number, signal.SIG_IGN)
    descriptor, described, answering, worker = map(int, sys.argv[1:])
    answers = os.fdopen(answering, "w")

    def lives() -> bool:
        return os.getppid() == worker

    def tell(what: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the worker is gone
            print(json.dumps(what), file=answers, flush=True)

    mapped = memoryview(b"")  # it grows only, so what is mapped once stays so
    pieces: list[Piece] = []
    parts: list[memoryview] = []
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    cancelled: set[str] = set()
    untidy = ""
    threading.Thread(target=_read, args=(lives, described, jobs, cancelled), name="jobs", daemon=True).start()
    while (job := jobs.get()) is not None:
        began = time.monotonic()

        def answer(error: str | None, size: int = 0, began: float = began, untidy: str = untidy) -> None:
            tell(asdict(Outcome(error, time.monotonic() - began, size, untidy)))

        untidy = ""
        try:
            if job.pieces is not pieces:
                total = sum(piece.size for piece in job.pieces)
                if total > len(mapped):
                    mapped = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, mmap.PROT_READ))
                pieces, parts = job.pieces, encode(job.pieces, mapped[:total])
            untidy = carry_out(job, parts, cancelled, lambda size: answer(None, size), lives)
        except StorageError as error:
            answer(str(error))
        except Exception:
            answer(traceback.format_exc())
        cancelled.discard(str(job.name))
        tell({})


def _read(lives: Callable[[], bool], described: int, jobs: queue.SimpleQueue[Job | None], cancelled: set[str]) -> None:
    hears = Hearer(described)
    for message in map(json.loads, _lines(lives)):
        if "end" in message:
            break
        if "cancel" in message:
            cancelled.add(message["cancel"])
        else:
            jobs.put(hears.hear(message))
    jobs.put(None)


def _lines(lives: Callable[[], bool]) -> Iterator[bytes]:
    """Lines of standard input until it ends, or the worker has: processes that it forked may hold the pipe open."""
    descriptor, rest = sys.stdin.fileno(), b""
    while True:
        alive = lives()
        readable, _, _ = select.select([descriptor], [], [], POLL_S if alive else 0.0)
        read = os.read(descriptor, LINES_BYTES) if readable else b""
        if not read and (readable or not alive):
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from lines


if __name__ == "__main__":
    main()
