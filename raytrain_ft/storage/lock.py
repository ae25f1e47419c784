"""Who may write here: one run at a time, shown by a small file that its owner renews.

Every owner has an *epoch*, one more than the owner before, which it claims by making a file: nobody else gets the same one. It
is part of the names of its checkpoints, and is looked at again before every commit, so whoever was taken for dead and is not
cannot commit any more. Time is measured by the reader's own monotonic clock: a file that does not change for `LEASE_S` has no
living owner. How long an owner itself was held up is measured by one that goes on while the machine is suspended.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from raytrain_ft.errors import LockedError, StorageError, UnreachableError
from raytrain_ft.storage import checkpoint, selection
from raytrain_ft.storage.filesystem import Storage
from raytrain_ft.storage.small import LONGEST

FILE = "writer.json"
CLAIM = re.compile(r"writer-([0-9]{1,9})\.claim")
"""The small file by which an owner claims its epoch; those of the owners before are removed."""
LARGEST_CLAIM = 64
"""Bytes. What is larger, or is a directory, is somebody else's."""
LEASE_S = 10.0
RENEW_S = 2.5
POLL_S = 0.2
LATEST_EPOCH = 10**9 - 1
KINDS = {
    "owner": str,
    "epoch": int,
    "host": str,
    "pid": int,
    "started": (int, float),
    "renewed": int,
    "machine": str,
    "since": int,
}
OPTIONAL = {"machine", "since"}
"""Absent from files of earlier versions."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The content of the file. `renewed` grows with every renewal; -1: the owner has left. `machine` says which processes
    `pid` is one of: see `_machine`; empty if that is not known. `since`: worlds of an earlier incarnation write no more."""

    owner: str
    epoch: int
    host: str
    pid: int
    started: float
    renewed: int = 0
    machine: str = ""
    since: int = 0


def read_owner(storage: Storage) -> Owner | None:
    """Who may write; None if nobody ever did, or the file is damaged.

    Raises:
        StorageError: that cannot be told now.
    """
    if not 0 < (storage.size(FILE) or 0) < LONGEST:
        return None
    content = storage.view(FILE).to_pybytes()
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not KINDS.keys() - OPTIONAL <= fields.keys():
        return None
    owner = Owner(**{name: fields[name] for name in KINDS if name in fields})  # a later version may say more of itself
    sound = all(isinstance(getattr(owner, name), kind) for name, kind in KINDS.items()) and 0 <= owner.epoch <= LATEST_EPOCH
    return owner if sound else None


class WriterLock:
    """The right to write. Renewed by a thread until `release`; ends with its process at the latest.

    Attributes:
        new: whether its epoch is. If not, this owner has had it before, and others may be writing in its name.
        lost: why it is this owner's no longer; empty as long as that is not known.
    """

    def __init__(self, storage: Storage, owner: Owner, *, new: bool) -> None:
        self._storage = storage
        self.owner = owner
        self.new = new
        self.lost = ""
        self._seen, self._doubtful, self._since = _passed(), False, owner.since
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="writer-lock", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self.lost and not self._released.wait(RENEW_S):
            with suppress(StorageError):  # the storage may come back; if it does not, others take over after the lease
                self._say()

    def _say(self) -> None:
        """Once more whose the right is, unless it is another's by now, or was given up."""
        if not self._writing.acquire(timeout=LEASE_S):
            raise UnreachableError(f"{self._storage.uri}/{FILE} has been being written for {LEASE_S:g} s")
        try:
            if self._released.is_set():
                return
            found = read_owner(self._storage)
            mine = found is not None and (found.owner, found.epoch) == (self.owner.owner, self.owner.epoch)
            gone = found is None and _passed() - self._seen < LEASE_S  # so nobody can have succeeded this owner
            late = found is not None and found.epoch < self.owner.epoch  # the one before was held up in the middle of this
            if not (mine or gone or late):
                self.lost = _succeeded(self._storage, found)
                return
            self._seen = _passed()
            said = found.since if found is not None and mine else 0  # perhaps by another process of this owner
            self.owner = replace(self.owner, renewed=self.owner.renewed + 1, since=max(self._since, said))
            _write(self._storage, self.owner)
            self._doubtful |= _passed() - self._seen > LEASE_S
            if self._doubtful and _was_succeeded(self._storage, self.owner.epoch):
                self.lost = _succeeded(self._storage, None)
            self._doubtful = False
        finally:
            self._writing.release()

    def fence(self, since: int) -> None:
        """Worlds of an earlier incarnation commit nothing from now on, and delete nothing: some may be cut off from all who
        could tell them that they are over, but not from this storage.

        Raises:
            LockedError: another has the right. StorageError: it cannot be said now; it is with the next renewal that succeeds.
        """
        self._since = max(self._since, since)
        if not self.lost:
            self._say()
        if self.lost:
            raise LockedError(self.lost)

    def hand_over(self) -> None:
        """Leaves it to another process of the same owner, which has taken it over."""
        self._released.set()
        self._thread.join(timeout=LEASE_S)

    def release(self) -> None:
        """Gives it up; the next one need not wait."""
        self.hand_over()
        if self._thread.is_alive():
            return  # in a storage that hangs; it runs out by itself
        if not self._writing.acquire(timeout=LEASE_S):
            return
        try:
            if holds(self._storage, self.owner.owner, self.owner.epoch):
                _write(self._storage, replace(self.owner, renewed=-1))
        except StorageError:
            return  # it runs out by itself
        finally:
            self._writing.release()


def acquire(storage: Storage, owner: str) -> WriterLock:
    """Takes the right to write. An owner of the same name takes it over at once (a supervisor that was restarted).

    Its epoch is also greater than that of every checkpoint there, in case the file was lost.

    Raises:
        LockedError: another owner lives; StorageError: the storage cannot be written.
    """
    found = read_owner(storage)
    if found is not None and found.owner != owner and not _has_left(found):
        found = _await_end(storage, found)
    known = found.epoch if found is not None and found.owner == owner else None
    epoch = _claim(storage, found) if known is None else known
    since = found.since if found is not None and known is not None else 0
    mine = Owner(owner, epoch, socket.gethostname(), os.getpid(), began(os.getpid()), machine=_machine(), since=since)
    try:
        began_at = _passed()
        if known is None and read_owner(storage) != found:  # while this process was held up
            raise _taken(storage)
        _write(storage, mine)
        late = _passed() - began_at > LEASE_S
        if not holds(storage, owner, epoch) or (late and _was_succeeded(storage, epoch)):
            raise _taken(storage)
    except (StorageError, LockedError):
        if known is None:  # else the next ones would wait for who has claimed it
            with suppress(StorageError):
                storage.delete(_claim_of(epoch))
        raise
    for older in _claims(storage):
        if older < epoch:
            with suppress(StorageError):  # it is in nobody's way
                storage.delete(_claim_of(older))
    return WriterLock(storage, mine, new=known is None)


def take_over(storage: Storage, owner: str) -> WriterLock:
    """Takes over the right to write from an earlier process of this owner, and from nobody else.

    Raises:
        LockedError: another owner has it, or has had it since; StorageError: the storage cannot be written.
    """
    found = read_owner(storage)
    if found is not None and found.owner != owner:
        raise LockedError(_succeeded(storage, found))
    return acquire(storage, owner)


def successor(storage: Storage, owner: str) -> Owner | None:
    """Who has the right to write now, if it is another than this owner. Of one elsewhere that has left without a word it takes
    up to `LEASE_S` to find that out.

    Raises:
        StorageError: that cannot be told now.
    """
    found = read_owner(storage)
    if found is None or found.owner == owner or _has_left(found):
        return None
    try:
        _await_end(storage, found)
    except LockedError:
        return found
    return None


def _claim(storage: Storage, found: Owner | None) -> int:
    """An epoch after all that there were, which nobody else has or gets."""
    latest = max([found.epoch if found else 0, _begun(storage), *(name.epoch for name in checkpoint.names(storage))])
    epoch = latest + 1
    while epoch <= LATEST_EPOCH and not storage.claim(_claim_of(epoch)):
        _await_end(storage, found)  # another has claimed it and is about to say so, or was killed before it could
        epoch += 1
    if epoch > LATEST_EPOCH:
        raise StorageError(
            f"{storage.uri}: writer.json, begun.json or a checkpoint says that {latest} owners wrote here before; remove it"
        )
    return epoch


def _begun(storage: Storage) -> int:
    """The epoch from which on checkpoints count: those of an owner before it would not, and nobody would go on from them."""
    try:
        return selection.begun(storage)
    except UnreachableError:
        raise
    except StorageError:
        return 0  # damaged, which is told to who is about to go on from a checkpoint


def _claims(storage: Storage) -> list[int]:
    """The epochs that were claimed. What only looks like a claim is left out."""
    found = [name for name in storage.names() if CLAIM.fullmatch(name)]
    return [int(name[7:-6]) for name in found if (size := storage.size(name)) is not None and size <= LARGEST_CLAIM]


def _was_succeeded(storage: Storage, epoch: int) -> bool:
    """Whether another has had the right since this epoch was claimed: it removes the claims before its own. That is to be asked
    by who was held up for so long, before it wrote that the right is its own, that the other may have come and gone."""
    return storage.size(_claim_of(epoch)) is None


def _passed() -> float:
    """Seconds that have passed for everybody else: while this machine is suspended, its monotonic clock stands still. For how
    long another is silent, `_await_end`, that one is right: perhaps both were suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _claim_of(epoch: int) -> str:
    return f"writer-{epoch}.claim"


def _taken(storage: Storage) -> LockedError:
    return LockedError(f"{storage.uri}: another run took the right to write at the same moment; try again")


def _succeeded(storage: Storage, found: Owner | None) -> str:
    """Why an owner has the right no longer."""
    by = f"run {found.owner} (process {found.pid} on {found.host})" if found is not None else "a run that has left no name"
    return (
        f"{storage.uri}: {by} has taken the right to write, while this one did not renew it. Look at the space and the mount "
        "of its file system, and run the job again when the other one has ended, or under another name"
    )


def holds(storage: Storage, owner: str, epoch: int) -> bool:
    """Whether this owner still has the right to write.

    Raises:
        StorageError: that cannot be told now.
    """
    found = standing(storage)
    return found is not None and (found.owner, found.epoch) == (owner, epoch)


def standing(storage: Storage) -> Owner | None:
    """As `read_owner`, but a file that is not there is looked for again for a while: where a file is replaced in two steps
    (hdfs, abfs), that is how it looks while it is renewed."""
    deadline = time.monotonic() + RENEW_S
    while True:
        late = time.monotonic() > deadline
        try:
            found = read_owner(storage)
        except StorageError:
            if late:
                raise
            found = None
        if found is not None or late:
            return found
        time.sleep(POLL_S)


def _has_left(owner: Owner) -> bool:
    """Whether it is known to be gone: it said so, or its process on this machine is another one or none."""
    if owner.renewed < 0:
        return True
    if owner.host != socket.gethostname() or (owner.machine and owner.machine != _machine()):
        return False
    try:
        return began(owner.pid) != owner.started
    except (psutil.Error, ValueError, OverflowError):
        return True


def began(pid: int) -> float:
    """When a process of this machine began, by a clock that nobody sets: in ticks since the machine was started. Where that
    cannot be told, in seconds since 1970.

    Raises:
        psutil.Error: there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return psutil.Process(pid).create_time()
    return float(stat.rpartition(")")[2].split()[19])  # proc(5): field 22; its name, field 2, may have spaces


def _machine() -> str:
    """This boot of this machine, and this namespace of its processes: containers may share their host's name, and each counts
    its processes by itself. Empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _await_end(storage: Storage, found: Owner | None) -> Owner | None:
    """Waits until nobody can be writing any more; returns what the file says then.

    Raises:
        LockedError: somebody renews it.
    """
    deadline = time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        now = read_owner(storage)
        if now != found:
            if now is not None and now.renewed < 0:
                return now
            owner = now or found
            assert owner is not None
            itself = (owner.pid, owner.host, owner.machine) == (os.getpid(), socket.gethostname(), _machine())
            what = "this process has it open: call close() on that run," if itself else "wait for its end,"
            raise LockedError(
                f"{storage.uri} is being written by run {owner.owner} (process {owner.pid} on {owner.host}): {what} or choose "
                "another name or storage_path"
            )
        time.sleep(POLL_S)
    return found


def _write(storage: Storage, owner: Owner) -> None:
    storage.put(FILE, [memoryview(json.dumps(asdict(owner)).encode())])
