"""The log of the tensors that cross from one pipeline stage to another, kept by their sender (SWIFT, section 5.1).

It protects against the loss of the *receiver*: its replacement computes again from what it was sent. So a record is safe once
another process can read it; nothing is fsynced. The caller hands over references, which are kept: most records are needed by
nobody, and go with the next checkpoint without ever being written. When a loss is noticed, `flush` writes them. A thread does
if they become too many, while the caller waits for another stage anyway: in the bubbles of the pipeline (SWIFT,
section 5.1). That is the only copy. Training is never disturbed: a log that cannot be written stops, says why, and lets
training go on without it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.log_files import LogFiles, Record, on_cpu, version_of
from raytrain_ft.storage.log_format import NAME, Checksum, Compression, Key
from raytrain_ft.storage.log_sums import Sums

__all__ = ["Key", "LogStats", "TensorLog"]

STALL_LIMIT_S = 20.0
"""If the disk takes no record for so long while training waits for it, the log gives up: long before anybody takes the wait for
a hang, which is after a minute by default."""
CHECK_S = 0.1
"""How often a caller that waits looks whether it is to leave."""
CLOSE_LIMIT_S = 60.0
NAP_S = 0.002
"""A bubble that has lasted so long will mostly last long enough to write a record; in a shorter one nothing is begun."""
PATIENCE_S = 1.0
"""How long the thread waits for a bubble: there are some in every step, but none in a replay, nor in a pass that is so long."""
KEPT = 0.25
"""Of the memory. Less than that stays where it is. More would have to be written when a loss is noticed, while all wait."""
INCOMING = 1 / 128
"""Of the memory. What is handed over is taken in when the caller waits for another stage, or once it is so much: between one
pass and the next, when other stages wait for the caller, it is only put down."""
BATCH_BYTES = 2**20
"""So much is written in a row. Who wakes up for each record finds the caches cold: CPU time that other stages on the machine
lack."""


@dataclass(slots=True)
class LogStats:
    """What a log has done so far.

    Attributes:
        payload_bytes: Bytes of the tensors that were handed over.
        records: Written whole.
        written_bytes: Bytes of the tensors in these, before compression.
        idle_bytes: Of these, bytes of records that were written in bubbles: from beginning to end within one `idle`.
        file_bytes: Bytes of the files that exist now; `trim` lowers it.
        stalls, stalled_s: How often and how long `append` waited because too much was waiting to be written.
        failed: Why nothing is written at present; empty if all is well.
    """

    payload_bytes: int = 0
    records: int = 0
    written_bytes: int = 0
    idle_bytes: int = 0
    file_bytes: int = 0
    stalls: int = 0
    stalled_s: float = 0.0
    failed: str = ""


@dataclass(slots=True)
class _Trim:
    step: int
    incarnation: int
    size: int = 0


@dataclass(slots=True)
class _Close:
    size: int = 0
    done: bool = False


class _Idle:
    """See `TensorLog.idle`. Made once: it is entered on the way from one pass to the next."""

    def __init__(self, log: TensorLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log.begin_idle()

    def __exit__(self, *_: object) -> None:
        self._log.end_idle()


class TensorLog:
    """The log of one sender process, for one life of it. Safe for use by several threads.

    Args:
        directory: Shared by all members of a run; made if need be.
        member: Names the files; letters, digits, ".", "_" and "-".
        memory_bytes: How much may wait to be written; `append` waits for room beyond that. Of a quarter nothing is written
            before a `flush`.
        quota_bytes: How much may lie on the disk at one time; beyond that the log fails.
        beside: How much else counts towards the quota now, bytes; asked by the log's thread.
        synchronous: `append` writes before it returns. For comparison.
        tell: Is told ("LogFailed", {"member", "incarnation", "step", "reason", "number"}) when the log fails, once until a
            `trim` or `begin` revives it; and ("LogWhole", the same without the reason) when a `trim` has, with the step from
            which on nothing is missing; from the log's thread. The number is that of the failure, from 1.

    Raises:
        StorageError: the member's name cannot be that of a file.
    """

    def __init__(
        self,
        directory: Path,
        member: str,
        *,
        memory_bytes: int = 256 * 2**20,
        quota_bytes: int | None = None,
        beside: Callable[[], int] = lambda: 0,
        compression: Compression | None = None,
        synchronous: bool = False,
        tell: Callable[[str, dict[str, Any]], None] = lambda kind, about: None,
    ) -> None:
        if not NAME.fullmatch(f"{member}-0-0-0-0.arrow"):
            raise StorageError(f"{member!r} cannot name a log: letters, digits, '.', '_' and '-' only, 64 at most")
        self._member = member
        self._memory_bytes = memory_bytes
        self._tell = tell
        self._files = LogFiles(directory, member, quota_bytes, compression, beside)
        self._incoming: deque[tuple[Record, Callable[[], None]]] = deque()  # and how its caller leaves a wait
        self._incoming_bytes = 0  # about: callers do not wait for each other here
        self._idle = _Idle(self)
        self._queue: deque[Record | _Trim | _Close] = deque()
        self._sums = Sums()
        self._done = self._waiting = self._trims = 0  # items, bytes and trims that are in the queue
        self._flushed: _Close | None = None  # the last one, and whether nothing was put after it
        self._is_flushed = True
        self._counted = LogStats()  # but for what the files and `_failed` say
        self._idle_since = math.inf  # when the bubble began that the caller is in
        self._used = 0.0  # when the one began in which something was written last
        self._overdue = False  # no bubble came: a batch is written without one
        self._failed = ""
        self._told = 0  # failures
        self._latest = (0, 0)  # incarnation and step of the record that was taken in last
        self._missing = 0  # the step of the last record that the log lacks because it failed
        self._began = 0
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # for the writer: there is enough to do
        self._hurry = threading.Condition(lock)  # for the writer: it need not wait for a bubble any longer, or one has begun
        self._room = threading.Condition(lock)  # for callers: something was done
        self._awaited = 0  # callers that wait for the writer
        self._serial = threading.Lock()  # only for a log that is synchronous
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._run, name=f"tensor-log-{member}", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ for the caller

    def append(
        self,
        key: Key,
        incarnation: int,
        tensors: Sequence[Tensor],
        check: Callable[[], None] = lambda: None,
        checksum: Checksum | None = None,
    ) -> None:
        """Hands a record over; never raises because of the disk. If that has to be waited for, here or in an `idle`, `check` is
        called meanwhile, and may raise to leave the wait. The record goes in all the same, though there is no room: it may be
        of a step that is committed, and the only one of its kind.

        The tensors must not be changed until a `flush`: they are not copied. Where PyTorch notices that one was, the log fails
        rather than hold something false. Tensors of a device are copied to the CPU here, which waits for the device.

        Args:
            checksum: of the tensors, if the caller needs it too.
        """
        kept = tuple([on_cpu(tensor) for tensor in tensors])
        size = sum([tensor.numel() * tensor.element_size() for tensor in kept])
        self._incoming.append((Record(key, incarnation, kept, tuple(map(version_of, kept)), size, checksum), check))
        self._incoming_bytes += size
        waits_anyway = self._thread is None or self._idle_since < math.inf
        if waits_anyway or self._incoming_bytes > INCOMING * self._memory_bytes:
            self._take_in()
            self._help()

    def idle(self) -> AbstractContextManager[None]:
        """Around whatever the caller waits for without anything to do: a bubble, and the time to write in."""
        return self._idle

    def begin_idle(self) -> None:
        """Such a wait begins."""
        if self._incoming:
            self._take_in()
        with self._work:
            self._idle_since = time.monotonic()
            self._hurry.notify()

    def end_idle(self) -> None:
        """It is over."""
        self._idle_since = math.inf

    def flush(self, seconds: float) -> bool:
        """Waits until everything appended so far can be read by other processes. It need not be on the disk, but its file is
        closed: only then does NFS show other nodes what is in it.

        Returns:
            False if the time was up before that, or the log has failed.
        """
        self._take_in(waits=False)
        with self._work:
            if not self._closed and not self._is_flushed:
                self._flushed = _Close()
                self._put(self._flushed)
            last = self._flushed
        self._help()
        with self._room:
            return self._room.wait_for(lambda: last is None or last.done, seconds) and not self._failed

    def trim(self, step: int, since: int | None = None) -> None:
        """Says that records of earlier steps than `step` are not needed any more. Returns at once.

        Files that hold nothing else are deleted, and what is not written yet never is. A log that had failed begins anew: it is
        seen from the keys which records are missing.

        Args:
            since: with which incarnation the log began, by whoever says so. If it has begun with a later one, everybody has
                gone back meanwhile, and these steps are done again.
        """
        if since is None or since >= self._began:
            self._trim(_Trim(step, 0))

    def begin(self, incarnation: int) -> None:
        """Says that records of earlier incarnations than this one count no more: like `trim`, once for each incarnation."""
        if incarnation > self._began:
            self._began = incarnation
            self._trim(_Trim(0, incarnation))

    def _trim(self, item: _Trim) -> None:
        self._take_in(waits=False)
        with self._work:
            if self._closed:
                return
            self._discard(
                lambda one: isinstance(one, Record) and (one.key.step < item.step or one.incarnation < item.incarnation)
            )
            self._trims += 1
            self._put(item, first=True)
        self._help()

    def close(self) -> None:
        """Writes what is waiting, for a minute at most, and ends. What is appended later is ignored."""
        self._take_in(waits=False)
        with self._work:
            self._closed = True
            for condition in (self._work, self._hurry, self._room):
                condition.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
        else:
            self._files.end()

    @property
    def synchronous(self) -> bool:
        """Whether `append` writes before it returns."""
        return self._thread is None

    @property
    def stats(self) -> LogStats:
        """What was done so far."""
        self._take_in(waits=False)
        with self._room:
            return replace(self._counted, file_bytes=self._files.size, failed=self._failed)

    # ------------------------------------------------------------ inside

    def _take_in(self, *, waits: bool = True) -> None:
        """Queues what was handed over.

        Args:
            waits: for room. Who must not be held up does without: it is little (`INCOMING`).
        """
        while self._incoming:
            reason = ""
            with self._work:
                try:
                    record, check = self._incoming.popleft()
                except IndexError:  # another thread has taken it
                    return
                self._incoming_bytes = max(0, self._incoming_bytes - record.size)
                try:
                    if waits and not self._drops():
                        reason = self._wait_for_room(record.size, check)
                finally:
                    self._accept(record)
            if reason:
                self._say_failed(reason, record.incarnation, record.key.step)

    def _drops(self) -> bool:
        """Whether what is handed over goes no further: the log has ended, or failed, and nothing on its way revives it."""
        return self._closed or (bool(self._failed) and not self._trims)

    def _accept(self, record: Record) -> None:
        if self._drops():  # perhaps since this waited
            self._missing = record.key.step
            return
        self._latest = (record.incarnation, record.key.step)
        self._counted.payload_bytes += record.size
        self._sums.forget_known()
        if record.checksum is not None and self._thread is not None:
            self._sums.put(record.checksum, record.size)
        self._put(record)

    def _put(self, item: Record | _Trim | _Close, *, first: bool = False) -> None:
        was_enough = self._is_enough()
        (self._queue.appendleft if first else self._queue.append)(item)
        self._waiting += item.size
        self._is_flushed = isinstance(item, _Close)
        is_enough = self._is_enough()
        if self._is_urgent():
            self._hurry.notify()
            self._work.notify()
        elif is_enough or self._are_sums_enough():
            self._work.notify()
            if is_enough and not was_enough:  # who waits for a bubble to make checksums in would do so without end
                self._hurry.notify()

    def _discard(self, is_needless: Callable[[Record | _Trim | _Close], bool]) -> None:
        """Of what waits, this is never carried out."""
        before = list(self._queue)
        left = [item for item in before if not is_needless(item)]
        self._queue.clear()
        self._queue.extend(left)
        self._done += len(before) - len(left)
        self._waiting -= sum(item.size for item in before) - sum(item.size for item in left)
        self._room.notify_all()

    def _wait_for_room(self, size: int, check: Callable[[], None]) -> str:
        """Returns why the log fails just now, if the disk does not take anything. A record that is larger than all the room
        goes in alone."""

        def is_room() -> bool:
            return not self._waiting or self._waiting + size <= self._memory_bytes

        if self._thread is None or is_room():
            return ""
        self._counted.stalls += 1
        began = moved = time.monotonic()
        done = self._done
        try:
            with self._hurried():
                while not is_room() and not self._closed:
                    self._room.wait(min(CHECK_S, STALL_LIMIT_S))
                    check()
                    if done != self._done:
                        done, moved = self._done, time.monotonic()
                    elif not is_room() and time.monotonic() - moved >= STALL_LIMIT_S:
                        # where it was to begin anew, others take it to be whole again
                        is_known = bool(self._failed) and not self._trims
                        self._trims = 0  # nothing that waits will be carried out in time: the record at hand must not go in
                        reason = "" if is_known else f"nothing could be written for {STALL_LIMIT_S:.0f} s"
                        self._failed = self._failed or reason
                        self._discard(lambda one: not isinstance(one, _Close))
                        return reason
        finally:
            self._counted.stalled_s += time.monotonic() - began
        return ""

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Somebody waits for room."""
        self._awaited += 1
        self._hurry.notify()
        self._work.notify()
        try:
            yield
        finally:
            self._awaited -= 1

    def _help(self) -> None:
        """Without a thread, the caller writes."""
        if self._thread is None:
            with self._serial:
                while self._queue:
                    self._carry_out_next()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            with suppress(Exception):  # of a checksum, that whoever asks for it meets too
                task()
        with suppress(OSError):  # nobody is left to be told
            self._files.end()

    def _next(self) -> Callable[[], object] | None:
        """Waits until there is something to do; returns None if there never will be."""
        with self._work:
            began = math.inf  # when there was enough to write, while no bubble came
            while not self._is_urgent():
                now, since, is_enough = time.monotonic(), self._idle_since, self._is_enough()
                if not is_enough:
                    self._overdue, began = False, math.inf
                if not is_enough and not self._are_sums_enough():
                    self._work.wait()
                elif self._overdue or since == self._used:
                    break  # more of the batch
                elif now >= since + NAP_S:
                    self._used = since
                    break
                else:
                    began = min(began, now) if is_enough else math.inf
                    self._overdue = now >= began + PATIENCE_S
                    if not self._overdue:
                        until = min(since + NAP_S, began + PATIENCE_S)
                        self._hurry.wait(None if until == math.inf else until - now)
            if self._queue and (self._is_urgent() or self._is_enough()):
                return self._carry_out_next
            if self._closed:
                return None
            return self._sums.take() if self._sums else _do_nothing

    def _carry_out_next(self) -> None:
        with self._work:  # a trim may have left nothing meanwhile
            item = self._queue.popleft() if self._queue else None
        if item is not None:
            self._carry_out(item)

    def _is_urgent(self) -> bool:
        """Whether to go on at once: somebody waits, or would soon have to, for room; or there is something to be deleted."""
        if not self._queue:
            return self._closed
        flushes = self._flushed is not None and not self._flushed.done
        trims = isinstance(self._queue[0], _Trim)
        return self._closed or flushes or trims or self._awaited > 0 or 2 * self._waiting > self._memory_bytes

    def _is_enough(self) -> bool:
        """Whether something is to be written in the next bubble; what has begun goes on until a batch is done."""
        begun = self._overdue or self._idle_since == self._used
        return bool(self._queue) and self._waiting >= KEPT * self._memory_bytes - begun * BATCH_BYTES

    def _are_sums_enough(self) -> bool:
        """The same of checksums that the caller needs by the end of the step."""
        return bool(self._sums) and (self._sums.size >= BATCH_BYTES or self._idle_since == self._used)

    def _carry_out(self, item: Record | _Trim | _Close) -> None:
        reason, written, revived, whole = "", False, False, 0
        bubble = self._idle_since
        try:
            if isinstance(item, _Trim):
                self._files.trim(item.step, item.incarnation)
                revived = True
            elif isinstance(item, _Close):
                self._files.end()
            elif not self._failed:
                self._files.write(item)
                written = True
            if self._failed and not revived:
                self._files.delete()  # it was given up while the disk hung, and could not be deleted then
        except Exception as error:  # whatever it is: training goes on without the log
            self._files.delete()  # a log with a gap is of no use, and its room may be what a checkpoint lacks
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            reason = f"{self._files.directory}: {reason}"
            if isinstance(item, Record) and item.incarnation < self._began and self._trims:
                reason = ""  # it counts no more, nor does anything else that is gone: what is to delete it all is on its way
        with self._room:
            self._done += 1
            self._waiting -= item.size
            if written:
                self._counted.records += 1
                self._counted.written_bytes += item.size
                self._counted.idle_bytes += item.size if bubble == self._idle_since < math.inf else 0
            if isinstance(item, _Close):
                item.done = True
            if isinstance(item, _Trim):
                self._trims = max(0, self._trims - 1)
                if revived and self._failed and not item.incarnation:  # else whoever has it begin anew knows
                    whole = self._missing + 1
                self._failed = "" if revived else self._failed
            if self._failed:
                reason = ""
            elif reason:
                self._failed, self._missing = reason, self._latest[1]
            if self._failed and not self._trims:  # else what waits behind the trim is of the log that begins anew
                self._discard(lambda one: isinstance(one, Record))
            self._room.notify_all()
        if reason:
            self._say_failed(reason, *((item.incarnation, item.key.step) if isinstance(item, Record) else self._latest))
        if whole:
            self._say("LogWhole", self._latest[0], whole)

    def _say_failed(self, reason: str, incarnation: int, step: int) -> None:
        self._told += 1
        self._say("LogFailed", incarnation, step, reason=reason)

    def _say(self, what: str, incarnation: int, step: int, **more: str) -> None:
        about = {"member": self._member, "incarnation": incarnation, "step": step, "number": self._told, **more}
        with suppress(Exception):  # the listener's trouble is not the log's
            self._tell(what, about)


def _do_nothing() -> None:
    """What there was to do is done already."""
