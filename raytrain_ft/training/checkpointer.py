"""Checkpoints of one worker in two phases: snapshot (a copy in memory, overlapped with the next step), then persist (durable,
in another process). CheckFreq, section 4.3.1.

After a step that all workers agree upon, each begins to copy its share of the state; the next weight update waits for that, and
for nothing else. The copy then goes to the persister. At most one checkpoint is under way, and it is never abandoned: when the
next one is due and the one before is not durable yet, training waits. Worker 0 decides how often (`policy.frequency`); each
measures for itself, and decides by that where its own copy goes first.

Knows nothing of Ray: the trainer uses it, and so does `raytrain_ft.checkfreq` in any training loop.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from torch import Tensor

from raytrain_ft.errors import StorageError
from raytrain_ft.policy.tuner import Costs, Tuner
from raytrain_ft.storage.job import AnyPersister, Job, Outcome
from raytrain_ft.storage.manifest import Name
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.storage.retention import KEEP_ALL
from raytrain_ft.training.layout import ALIGNMENT, Layout, Pairs, share, total_size
from raytrain_ft.training.settings import Target
from raytrain_ft.training.snapshot import Copy, free_on_device
from raytrain_ft.training.stay import Stay
from raytrain_ft.training.tuning import Tell, Tuning

POLL_S = 0.05
PATIENCE_S = 10.0
"""How long training waits at least for the checkpoint before to be durable: three times the longest that was, if that is more;
not at all after one that failed or was not in time, until one is durable. At the end of a run a checkpoint is given as long as
the shards of others, if that is more, also where it was too slow for training: there is none to hold up."""

Capture = Callable[[], tuple[Sequence[tuple[str, Tensor]], dict[str, Any]]]
"""Gives the tensors of the state, by name in an order that is the same on every worker, and everything else as JSON."""
Own = Callable[[], Sequence[tuple[str, Tensor]]]
"""Gives tensors that this worker alone stores, whole, by names that no other worker uses."""


class Checkpointer:
    """One worker's part in the checkpoints of a run. All methods but the callbacks belong to the training thread.

    Attributes:
        asked: whether there is to be one soon, whatever the interval; set by other threads.
    """

    def __init__(
        self,
        target: Target,
        capture: Capture,
        tuner: Callable[[], Tuner],
        tell: Tell,
        own: Own | None = None,
        persister: Callable[[SharedMemory], AnyPersister] = Persister,
    ) -> None:
        """`tuner` makes a new one; `tell` may be called on any thread; `own` is called right after `capture`."""
        self._target = target
        self._capture = capture
        self._own = own or (lambda: ())
        self._tuning = Tuning(target.place, target.profile_key, tuner, tell)
        self._tell = tell
        self._memory = SharedMemory()
        self._persister = persister(self._memory)
        self._rank, self._count, self._stages, self._incarnation = 0, 1, 1, 0
        self._rejected: list[str] = []
        self._unread: list[str] = []
        self._begun = 0
        self._layout: Layout | None = None
        self._copy: Copy | None = None
        self._job: Job | None = None
        self._void: Job | None = None  # whose world was over before it was handed on, if it was not by then
        self._outcome: Future[Outcome] | None = None
        self._preparing: threading.Thread | None = None
        self.asked = False
        self._failing = False
        self._began_at = -math.inf
        self._looked_s = 0.0  # since the latest step: whether a checkpoint is due, and what the step took
        self._free = 0
        self._part = 0  # bytes of this worker's part of a checkpoint, once it is known
        self._waited_s = 0.0
        self._stall_s = 0.0

    # ---------------------------------------------------------------- a world begins and ends

    def begin(
        self,
        rank: int,
        count: int,
        incarnation: int,
        step: int,
        failure_s: float | None = None,
        stages: int = 1,
        rejected: Collection[str] = (),
        unread: Collection[str] = (),
    ) -> None:
        """Training begins at `step` as worker `rank` of `count`.

        Args:
            failure_s: mean time between failures so far, seconds, if it is to be regarded.
            stages: of the pipeline; the state that is captured is that of stage `rank % stages`.
            rejected: names of checkpoints that were found to be damaged; unread: of those that could not be read.
        """
        self._stages, self._begun = stages, step
        self._rejected, self._unread = sorted(rejected), sorted(unread)
        with suppress(OSError, RuntimeError):  # each checkpoint tries it again, and tells why there is none
            self._persister.start()  # now, so that its start is not in the first checkpoint's time
        self._rank, self._count, self._incarnation = rank, count, incarnation
        self._tuning.begin(rank, count, incarnation, step, failure_s)

    @property
    def keeps_epochs(self) -> bool:
        """Whether there is to be a checkpoint at the end of every epoch, that is kept: whoever asks for one knows when."""
        return self._target.keep_epochs

    @property
    def latest(self) -> int:
        """The step of the latest checkpoint, or at which training began."""
        return self._tuning.latest

    def catch_up(self, latest: int) -> None:
        """Others have written checkpoints meanwhile, the latest one of this step."""
        self.asked = False
        self._tuning.catch_up(latest)

    def fenced(self) -> None:
        """The world is over. A copy that is under way comes to its end before anything else touches the state. One that is
        then still on its way to the host is not handed on."""
        if self._copy is not None:
            self._copy.wait(go_on)
            self._copy.join()
        if self._job is not None:
            self._void = self._job
            self._persister.cancel(self._job.name)

    def close(self, timeout_s: float = 60.0) -> None:
        """Brings the checkpoint under way to its end, ends the persister, and gives the memory back."""
        if self._copy is not None:
            self._copy.wait(go_on)
            self._copy.join()
        self._capture, self._own = lambda: ((), {}), lambda: ()  # what they refer to is not kept while storage is waited for
        self._persister.close(timeout_s)
        if self._preparing is not None:
            self._preparing.join(timeout_s)
        self._memory.close()

    # ---------------------------------------------------------------- step by step

    def wants(self, step: int) -> bool:
        """Whether worker 0 wants a checkpoint once `step` steps are committed. Everybody must be told before the commit. What
        `take` would leave out at once is left out here: the others would write their shards of it for nothing."""
        if self._rank != 0:
            return False
        began, busy = time.monotonic(), self.busy
        wanted = (self.asked and not busy) or self._tuning.is_due(step, busy=busy)
        self._looked_s += time.monotonic() - began
        if wanted and busy and self._failing:
            self._leave_out(step, str(self._hangs()), 0.0)
            return False
        return wanted

    def earliest(self, step: int) -> int:
        """The first step after this one at which worker 0 may want a checkpoint, by what it knows now; on worker 0 only."""
        return self._tuning.earliest(step)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way."""
        copying = self._copy is not None and self._copy.seconds is None
        return copying or (self._outcome is not None and not self._outcome.done())

    @property
    def disk_bytes(self) -> int:
        """What this worker's parts of checkpoints need on the disk: of those that stay, and of the one under way. Where all
        stay there is no end to it: one is counted, for that is what a recovery needs."""
        stay = 1 if self._target.keep == KEEP_ALL else self._target.keep
        return self._part * (stay + 1)

    def await_copy(self, check: Callable[[], None]) -> None:
        """Waits until the weights may change.

        Args:
            check: called while waiting; may raise to leave the wait.
        """
        if self._copy is not None:
            self._stall_s += self._copy.wait(check)

    def updated(self, seconds: float) -> None:
        """The weight update of the present step took so long."""
        self._tuning.updated(seconds)

    def stepped(self, step: int, seconds: float) -> None:
        """A step was committed (`step`: how many by now)."""
        if self._tuning.in_first_step:
            self._prepare()
        began = time.monotonic()
        # To delete what a checkpoint replaces is part of what it costs, though nobody waits for that.
        self._tuning.stepped(step, seconds, self._looked_s, busy=not self._persister.is_tidy or self.busy)
        self._looked_s = time.monotonic() - began

    def _prepare(self) -> None:
        """Touches the memory for snapshots, in the background: the first one is then as fast as those after it. After the first
        step the state has its whole size."""
        tensors, _ = self._capture()
        self._part = -(-total_size(tensors) // (self._count // self._stages))
        if self._copy is not None and self._copy.seconds is None:
            return  # the memory has its size, or is about to; it must not be mapped elsewhere while a GPU writes to it
        reserve = (self._part + ALIGNMENT,)
        preparing = threading.Thread(target=self._memory.reserve, args=reserve, name="prepare", daemon=True)
        with suppress(RuntimeError):  # there is no thread for it: the first snapshot takes longer
            preparing.start()
            self._preparing = preparing

    def take(self, step: int, check: Callable[[], None], *, kept: bool = False) -> bool:
        """Begins a checkpoint of the state after `step` steps. Waits for the one before to be durable; where storage hangs,
        this one is left out after `PATIENCE_S` and those after it at once, until the one before is over. Nor is that which is
        begun then waited for, until one is durable: training does not hang with storage. Returns whether it began.

        Args:
            check: called while waiting; may raise to leave the wait.
            kept: retention leaves it alone.
        """
        began, self.asked = time.monotonic(), False
        try:
            self.await_durable(check, 0.0 if self._failing else min(self._patience(PATIENCE_S), self._target.most_patience_s))
        except StorageError as error:
            self._failing = True
            self._leave_out(step, str(error), time.monotonic() - began)
            return False
        self._failing = self._failed()
        waited = time.monotonic() - began
        self._tuning.began(step, waited)
        tensors, values = self._capture()
        own = self._own()
        try:
            with Stay() as stay:
                self._copy_state(step, waited, kept, (tensors, own, values), stay)
        except OSError as error:  # a lack of threads, which is no error of what is trained
            self._fail(self._name(step), self._rank, self._count, f"the snapshot could not begin: {error}")
            return False
        return True

    def _name(self, step: int) -> Name:
        return Name(step, self._target.epoch, self._incarnation)

    def _leave_out(self, step: int, reason: str, waited: float) -> None:
        self._fail(self._name(step), self._rank, self._count, reason)
        self._tuning.began(step, waited)

    def _copy_state(self, step: int, waited: float, kept: bool, state: tuple[Pairs, Pairs, dict[str, Any]], stay: Stay) -> None:
        """Begins to copy this worker's part. `waited`: seconds for the checkpoint before; `state`: tensors, what of them is
        this worker's alone, and values."""
        tensors, own, values = state
        mine = share(tensors, self._rank // self._stages, self._count // self._stages, own, self._layout)
        self._layout = mine.layout
        self._job = Job(
            place=self._target.place,
            owner=self._target.owner,
            epoch=self._target.epoch,
            step=step,
            incarnation=self._incarnation,
            number=self._rank,
            count=self._count,
            pieces=mine.layout.pieces,
            values=values if self._rank == 0 else {},
            kept=kept,
            keep=self._target.keep,
            rejected=self._rejected,
            unread=self._unread,
            begun=self._begun,
            files=self._tuning.files(),
            size=total_size(tensors),
            timeout_s=self._target.timeout_s,
        )
        self._began_at, self._waited_s, self._stall_s = time.monotonic(), waited, 0.0
        self._outcome = Future()
        self._free = free_on_device(tensors)
        copy = Copy(mine, self._memory, self._copied, self._tuning.mode if self._free > mine.layout.size else "cpu", stay)
        try:
            copy.start()
        except BaseException:  # it never began: nobody waits for its end
            self._job = self._outcome = None
            raise
        self._copy = copy

    def finish(self, step: int, check: Callable[[], None], *, kept: bool = False) -> None:
        """A checkpoint of the last state, unless there is one, and waits until it is durable, and what it replaces deleted: who
        ends next ends the persister too. That it cannot be is told, not raised: what was trained is not lost with it.

        Args:
            check: called while waiting; may raise to leave the wait.
            kept: retention leaves it alone.
        """
        patience = self._patience(max(PATIENCE_S, self._target.timeout_s))
        # The persister waits for others' shards from when its own is written. Whoever gave up before it does, when that is
        # about to be told, could not take the last one.
        more = PATIENCE_S + self._tuning.longest_s
        try:
            self.await_durable(check, max(0.0, self._began_at + patience - time.monotonic()) + more)
            job = self._job
            taken = job is not None and (job.step, job.incarnation) == (step, self._incarnation)
            # All ranks must answer this alike, and that it has failed one may know alone: so who is one tries it again.
            if not taken or (self._count == 1 and self._failed()):
                self.take(step, check, kept=kept)
            self.await_durable(check, patience)
            deadline = time.monotonic() + patience
            while not self._persister.await_tidy(POLL_S) and time.monotonic() < deadline:
                check()
        except StorageError as error:
            self._tell("CheckpointFailed", {"incarnation": self._incarnation, "step": step, "reason": str(error)})

    def await_durable(self, check: Callable[[], None], timeout_s: float | None = None) -> None:
        """Waits until no checkpoint is under way.

        Args:
            check: called while waiting; may raise to leave the wait.
            timeout_s: by default twice the time that the target allows.

        Raises:
            StorageError: it is not durable in time.
        """
        deadline = time.monotonic() + (2 * self._target.timeout_s if timeout_s is None else timeout_s)
        while self.busy:
            assert self._outcome is not None
            if time.monotonic() >= deadline:
                raise self._hangs()
            wait([self._outcome], POLL_S)
            check()

    def _hangs(self) -> StorageError:
        return StorageError(f"{self._target.place} is slow or hangs: the checkpoint before is still being written")

    def _failed(self) -> bool:
        """Whether the latest checkpoint, which is over, is not durable; but for one that was broken off with its world."""
        if self._job is None or self._outcome is None or self._job.incarnation != self._incarnation:
            return False
        return self._outcome.result().error is not None

    def _patience(self, least: float) -> float:
        return max(least, 3 * self._tuning.longest_s)

    # ---------------------------------------------------------------- the two phases

    def _copied(self, copy: Copy) -> None:
        """The snapshot is complete: on to the persister. Runs on the snapshot's thread."""
        job, outcome = self._job, self._outcome
        assert job is not None
        assert outcome is not None
        began = time.monotonic()
        if copy.error is not None:
            reason = f"the snapshot failed: {str(copy.error) or repr(copy.error)}"
        elif job is self._void:
            reason = f"{job.name}: the world that was writing it is over"
        else:
            try:
                done = self._persister.submit(job)
            except Exception as error:
                reason = f"the persister could not be given its job: {error!r}"
            else:
                done.add_done_callback(lambda done: self._persisted(job, copy, done.result(), outcome, began))
                if job is self._void:  # since that was looked at
                    self._persister.cancel(job.name)
                return
        try:
            self._fail(job.name, job.number, job.count, reason)
        finally:
            outcome.set_result(Outcome(reason, 0.0, 0))

    def _persisted(self, job: Job, copy: Copy, result: Outcome, outcome: Future[Outcome], began: float) -> None:
        """The persister is done. Runs on its listening thread."""
        try:
            self._tell_end(job, copy, result, began)
        finally:  # without an outcome, all checkpoints after it would be left out
            outcome.set_result(result)

    def _tell_end(self, job: Job, copy: Copy, result: Outcome, began: float) -> None:
        assert copy.seconds is not None
        # What training waits for, which on a busy machine is more than the persister's own time.
        seconds = time.monotonic() - began
        if result.error is not None:  # and how long that took says nothing of how long one takes
            reason = result.error + (f". Of the one before, {result.untidy}" if result.untidy else "")
            self._fail(job.name, job.number, job.count, reason)
        else:
            times = {"copy": copy.seconds, "persist": seconds, "device_copy": copy.device_seconds}
            costs = Costs(stall=self._stall_s, size=copy.size, free=self._free, **times)  # pyright: ignore[reportArgumentType]
            self._tuning.persisted(costs, result.seconds, job.count)
        if result.error is None and job.number == 0:
            self._tell(
                "CheckpointCommitted",
                {
                    "incarnation": job.incarnation,
                    "step": job.step,
                    "name": str(job.name),
                    "bytes": result.size,
                    "snapshot_s": copy.seconds,
                    "device_copy_s": copy.device_seconds,
                    "stall_s": self._waited_s + self._stall_s,
                    "persist_s": result.seconds,
                    "untidy": result.untidy,
                },
            )

    def _fail(self, name: Name, number: int, count: int, reason: str) -> None:
        """There will be no such checkpoint, or not this worker's shard of it."""
        if number != 0:
            self._persister.give_up(self._target.place, name, number, count)
        self._tell("CheckpointFailed", {"incarnation": name.incarnation, "step": name.step, "reason": reason})


def go_on() -> None:
    """Nothing ends this wait but its deadline."""
