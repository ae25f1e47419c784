"""Reading the tensor logs of all members of a run, also while they are being written."""

from __future__ import annotations

import os
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from raytrain_ft.errors import LogGapError
from raytrain_ft.storage.log_format import NAME, Head, Key
from raytrain_ft.storage.log_scan import UNREADABLE, LogFile, Place, load, scan

POLL_S = 0.002
AHEAD_BYTES = 256 * 2**20
"""How much is read ahead before somebody asks for it."""
AHEAD_S = 5.0
"""How long what is being read ahead is waited for; then whoever needs it reads it."""


class LogReader:
    """All records in the directory that the members of a run share. Safe for use by several threads.

    What lies there is not trusted: names are matched against an allow-list, links are not followed, every head and every tensor
    is verified by a checksum, and nothing is unpickled.

    Args:
        since: files of earlier incarnations are passed over.
    """

    def __init__(self, directory: Path, since: int = 0) -> None:
        self._directory, self._since = directory, since
        self._unlisted = ""
        self._files: dict[str, LogFile] = {}
        self._places: dict[Key, list[Place]] = {}  # in order: the last one counts
        self._keys: dict[str, list[Key]] = {}  # of each file
        self._looking = threading.Lock()  # one looks at a time, and may take its time over it
        self._lock = threading.Lock()  # for what was found
        self._looked: set[tuple[int, int]] = set()  # for records of these steps and receivers, in files that were known
        self._listed: set[tuple[int, int]] = set()  # for these, after a look for new files
        self._ahead: _Ahead | None = None

    def refresh(self, key: Key | None = None) -> None:
        """Looks for new files, for new records at the ends of known ones, and for files that were deleted.

        Args:
            key: look only into those that may hold this record: a look takes 0.02 ms for every record.

        No directory is an empty one; for the moment, so is one that cannot be listed.
        """
        with self._looking:
            found = self._names()
            if found is None:
                return
            with self._lock:
                for name in self._files.keys() - found:
                    self._forget(name)
                for name in found - self._files.keys():
                    self._files[name] = _file_of(self._directory / name)
                    self._keys[name] = []
            self._look_into(key)
            if key is not None:
                self._listed.add((key.step, key.receiver))

    def _look_into(self, key: Key | None) -> None:
        """Looks into the files that are known, the highest incarnation first. What is for all is in each one's files: one that
        has it is enough."""
        with self._lock:
            files = [(name, file) for name, file in self._files.items() if key is None or file.may_hold(key)]

        def promise(item: tuple[str, LogFile]) -> tuple[int, bool, int]:
            return item[1].incarnation, key is None or item[1].step <= key.step, item[1].sequence

        for name, file in sorted(files, key=promise, reverse=True):
            if not file.ended:
                self._look(name, file)
            if key is not None and key.receiver < 0 and key in self._keys.get(name, ()):
                break
        if key is not None:
            self._looked.add((key.step, key.receiver))

    def _names(self) -> set[str] | None:
        self._unlisted = ""
        try:
            with os.scandir(self._directory) as entries:
                return {e.name for e in entries if self._counts(e)}
        except FileNotFoundError:
            return set()
        except OSError as error:
            self._unlisted = f"{self._directory} cannot be listed: {error.strerror or error}"
            return None

    def _counts(self, entry: os.DirEntry[str]) -> bool:
        if entry.name in self._files:
            return True
        match = NAME.fullmatch(entry.name)
        return match is not None and int(match["incarnation"]) >= self._since and entry.is_file(follow_symlinks=False)

    def _look(self, name: str, file: LogFile) -> None:
        try:
            for place in scan(file):
                with self._lock:
                    insort(self._places.setdefault(place.head.key, []), place)
                    self._keys[name].append(place.head.key)
        except FileNotFoundError:  # trimmed just now
            with self._lock:
                self._forget(name)
        except OSError as error:
            file.broken = error.strerror or str(error)

    def _forget(self, name: str) -> None:
        file = self._files.pop(name)
        for key in set(self._keys.pop(name)):
            left = [place for place in self._places[key] if place.file is not file]
            if left:
                self._places[key] = left
            else:
                del self._places[key]

    def has(self, key: Key) -> bool:
        """Whether a whole record was found. Its head was verified, its tensors were not. Looks if nobody has for its like."""
        return self.head(key) is not None

    def head(self, key: Key) -> Head | None:
        """What is known of the record that counts without reading its tensors; None if `has` finds none. Looks for new files
        only if those that are known do not have it: what a replay reads was written before it began."""
        like = (key.step, key.receiver)
        if like not in self._looked:
            with self._looking:
                self._look_into(key)
        if not (places := self._find(key)) and like not in self._listed:
            self.refresh(key)
            places = self._find(key)
        return places[-1].head if places else None

    def read(self, key: Key, *, incarnation: int | None = None) -> tuple[Tensor, ...]:
        """The tensors of a record that a `refresh` has found, on the CPU and for the caller to keep.

        Of several records of this key it is that of the highest incarnation, and the last one of that; or of the incarnation
        asked for.

        Raises:
            LogGapError: there is none, or it is damaged. A record of a lower incarnation never takes its place: it may be of a
                step that was undone.
        """
        places = self._find(key, incarnation)
        if not places:
            raise self._gap(key, incarnation)
        if self._ahead is not None and (tensors := self._ahead.take(key, places[-1])) is not None:
            return tensors
        damage: list[str] = []
        for place in reversed(places):
            try:
                return load(place)
            except UNREADABLE as error:
                damage.append(f"damaged in {place} ({error})")
        raise LogGapError(f"{key} in {self._directory}: {'; '.join(damage)}")

    def _find(self, key: Key, incarnation: int | None = None) -> list[Place]:
        """The places of the incarnation that counts; the last one first of all."""
        with self._lock:
            places = self._places.get(key, [])
            if incarnation is None and places:
                incarnation = places[-1].incarnation
            return [place for place in places if place.incarnation == incarnation]

    def _gap(self, key: Key, incarnation: int | None) -> LogGapError:
        with self._lock:
            others = [str(place.incarnation) for place in self._places.get(key, [])]
            trouble = [what for file in self._files.values() for what in file.trouble()]
            trouble += [self._unlisted] if self._unlisted else []
            looked = f"looked into {sum(file.size >= 0 for file in self._files.values())} files in {self._directory}"
        wanted = "" if incarnation is None else f" of incarnation {incarnation}"
        if others:
            wanted += f", only of {', '.join(others)}"
        more = f", and {len(trouble) - 8} more" if len(trouble) > 8 else ""
        return LogGapError("; ".join([f"nothing was found of {key}{wanted} ({looked})", *trouble[:8]]) + more)

    def await_record(self, key: Key, deadline_s: float, check: Callable[[], None]) -> tuple[Tensor, ...]:
        """Like `read`, for a record that is still on its way.

        Args:
            deadline_s: Seconds from now.
            check: Is called every few milliseconds; what it raises ends the wait.

        Raises:
            LogGapError: it has not come in time, or is damaged.
        """
        end = time.monotonic() + deadline_s
        while not self.has(key):
            check()
            self.refresh(key)
            if self.has(key):
                break
            if time.monotonic() >= end:
                raise self._gap(key, None)
            time.sleep(POLL_S)
        try:
            return self.read(key)
        except LogGapError:
            self.refresh()  # perhaps there is a copy of it in a file that nobody has looked into
            return self.read(key)

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Looks for records and reads them ahead on another thread, in this order and a bounded amount of them. Those that are
        not there yet, or are damaged, are passed over: whoever asks for them will be told."""
        with self._lock:
            if self._ahead is None:
                self._ahead = _Ahead(self._look_for)
            ahead = self._ahead
        ahead.want(keys)

    def _look_for(self, key: Key) -> list[Place]:
        return self._find(key) if self.has(key) else []

    def close(self) -> None:
        """Ends the reading ahead and gives its memory back."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def forget(self) -> None:
        """Nothing will be read any more: gives back the memory for what is known of the files, too."""
        self.close()
        with self._lock:
            for known in (self._files, self._keys, self._places):
                known.clear()


def _file_of(path: Path) -> LogFile:
    match = NAME.fullmatch(path.name)
    assert match is not None
    receiver = -1 if match["receiver"] == "all" else int(match["receiver"])
    return LogFile(path, int(match["incarnation"]), int(match["sequence"]), int(match["step"]), receiver)


class _Ahead:
    """Reads records before they are asked for, on a thread of its own."""

    def __init__(self, find: Callable[[Key], list[Place]]) -> None:
        self._find = find
        self._wanted: dict[Key, None] = {}  # in order
        self._reading: Key | None = None
        self._held: dict[Key, tuple[Place, tuple[Tensor, ...]]] = {}
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log-read-ahead", daemon=True)
        self._thread.start()

    def want(self, keys: Iterable[Key]) -> None:
        with self._changed:
            self._wanted |= {key: None for key in keys if key not in self._held and key != self._reading}
            self._changed.notify_all()

    def take(self, key: Key, place: Place) -> tuple[Tensor, ...] | None:
        """What was read of this key, if it was of this place; waits if it is being read just now."""
        with self._changed:
            self._wanted.pop(key, None)
            self._changed.wait_for(lambda: self._reading != key, AHEAD_S)
            held, tensors = self._held.pop(key, (None, None))
            if held is not None:
                self._bytes -= held.head.size
                self._changed.notify_all()
            return tensors if held == place else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.notify_all()
        self._thread.join(AHEAD_S)  # storage may hang: the thread is left behind then
        self._held.clear()

    def _run(self) -> None:
        while (key := self._next()) is not None:
            self._read(key)

    def _next(self) -> Key | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._wanted and self._bytes < AHEAD_BYTES))
            if self._closed:
                return None
            self._reading = next(iter(self._wanted))
            del self._wanted[self._reading]
            return self._reading

    def _read(self, key: Key) -> None:
        held = None
        try:
            if places := self._find(key):
                held = places[-1], load(places[-1])
        except UNREADABLE:
            pass  # whoever asks for it reads it again, and learns why
        with self._changed:
            if held is not None:
                self._held[key] = held
                self._bytes += held[0].head.size
            self._reading = None
            self._changed.notify_all()
