"""The ends of a pipeline's edges: where a stage's inputs come from, and where its outputs go.

An edge is *live* (a neighbour of this incarnation, over gloo) or *logged* (records that its sender wrote when it was live). A
step is the same on either, which is what makes a replay the same to the bit. What is sent on a logged edge is also given to
the log, by reference: nobody changes an activation or a gradient once it was sent.

A live edge describes its tensors once per incarnation, in plain integers, and then sends nothing but their bytes. A send is
never waited for, but what is sent is kept until it has arrived. An activation has when its gradient comes back; all that is
sent in a step of training has when the stages have agreed at its end. In a replay, where nobody agrees, a gradient has when
the neighbour sends something of the next step: so what was sent in one step is safe to forget when the next one is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from raytrain_ft.errors import FencedError, ReplayDivergedError, TaskError
from raytrain_ft.policy.schedule import MOST_MICRO_BATCHES
from raytrain_ft.storage.log_files import on_cpu
from raytrain_ft.storage.log_format import Checksum
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import Key, TensorLog
from raytrain_ft.training.fence import WAIT_DEADLINE, Fence, PeerLostError
from raytrain_ft.training.fenced_work import in_short
from raytrain_ft.training.process_group import FencedGroup

DTYPES = tuple(sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str))
HEADER = 64
"""Integers of a description: count, then for each tensor dtype, dimensions, shape."""
HEADER_TAG, FIRST_TAG = 8, 16
"""Tags of gloo messages; lower ones belong to the transfers of a recovery."""
CHANNELS = ("activation", "gradient", "tied")
"""Of edges from one stage to another, each of which numbers its messages by itself."""
WHOLE_STEP = -1
"""In place of a micro-batch: what belongs to a step as a whole."""
TAGGED_STEPS = 2**16
"""A tag says which micro-batch of which step it is, so that two who are at different steps can never take one for another."""
POSTED = 2
"""Receives that are posted at once, so that a sender need not wait for the receiver to be ready."""
IDLE_S = 1.0
"""How often a receiver that has nothing to do looks whether its incarnation is over."""
RECORD_DEADLINE_S = 5.0
"""How long a replay waits for a record that ought to be there: the sender has flushed its log when it was fenced."""


class Inbound(Protocol):
    """Where the activations of a step come from, or the gradients, or a neighbour's part in the gradients of what is shared."""

    def begin(self, step: int, micro_batches: Sequence[int]) -> None:
        """A step begins in which these micro-batches come, in this order."""
        ...

    def take(self, micro_batch: int) -> list[Tensor]:
        """The tensors of a micro-batch."""
        ...


class Outbound(Protocol):
    """Where these go."""

    def begin(self, step: int) -> None:
        """A step begins; everything of the last but one has arrived."""
        ...

    def arrived(self, micro_batch: int) -> None:
        """In training, what was given of this micro-batch has come back as its gradient."""
        ...

    def give(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Sends the tensors of a micro-batch, which require no gradient and are not to be changed afterwards."""
        ...


# ---------------------------------------------------------------- live


def tag(step: int, micro_batch: int, channel: int) -> int:
    """The tag of a message."""
    message = step % TAGGED_STEPS * (MOST_MICRO_BATCHES + 1) + micro_batch - WHOLE_STEP
    return FIRST_TAG + message * len(CHANNELS) + channel


def describe(tensors: Sequence[Tensor]) -> list[int]:
    """Tensors as integers: see `HEADER`."""
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(numbers) > HEADER:
        raise TaskError(f"a stage passes on {len(tensors)} tensors of so many dimensions: more than {HEADER} numbers say")
    return numbers + [0] * (HEADER - len(numbers))


def allocate(numbers: Sequence[int]) -> list[Tensor]:
    """Empty tensors as described."""
    tensors, at = [], 1
    for _ in range(numbers[0]):
        dtype, dimensions = numbers[at : at + 2]
        tensors.append(torch.empty(tuple(numbers[at + 2 : at + 2 + dimensions]), dtype=DTYPES[dtype]))
        at += 2 + dimensions
    return tensors


@dataclass(slots=True)
class _Arrival:
    """A micro-batch that is received."""

    tag: int
    done: threading.Event
    tensors: list[Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    error: Exception | None = None


class LiveInbound:
    """Receives from a neighbour, ahead of need, on a thread that is left behind when the incarnation ends: no gloo wait can be
    woken.

    Args:
        idle: entered while a tensor is waited for.
    """

    def __init__(
        self, group: FencedGroup, peer: int, kind: str, idle: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._group = group
        self._idle = idle
        self._peer = peer
        self._channel = CHANNELS.index(kind)
        self._wanted: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._arrivals: dict[int, _Arrival] = {}
        self._layout: list[int] | None = None
        self._broken: Exception | None = None
        threading.Thread(target=self._receive, name=f"from-{peer}", daemon=True).start()

    def begin(self, step: int, micro_batches: Sequence[int]) -> None:
        self._arrivals = {number: _Arrival(tag(step, number, self._channel), threading.Event()) for number in micro_batches}
        for arrival in self._arrivals.values():
            self._wanted.put(arrival)
        if self._broken is not None:
            self._give_up([], self._broken)

    def take(self, micro_batch: int) -> list[Tensor]:
        arrival = self._arrivals.pop(micro_batch)
        with nullcontext() if arrival.done.is_set() else self._idle():
            self._group.fence.wait(arrival.done)
        if arrival.error is not None:
            raise PeerLostError(f"nothing more comes from rank {self._peer}: {in_short(arrival.error)}") from arrival.error
        return arrival.tensors

    def _receive(self) -> None:
        posted: list[_Arrival] = []
        while not self._group.fence.tripped:
            with suppress(queue.Empty):
                arrival = self._wanted.get(timeout=0 if posted else IDLE_S)
                try:
                    self._post(arrival)
                except (RuntimeError, FencedError, IndexError, ValueError) as error:
                    self._give_up([*posted, arrival], error)
                    return
                posted.append(arrival)
            if len(posted) == POSTED or (posted and self._wanted.empty()):
                self._await(posted.pop(0))

    def _give_up(self, arrivals: list[_Arrival], error: Exception) -> None:
        """Nothing more comes, neither these nor what is wanted now or later."""
        self._broken = error
        with suppress(queue.Empty):
            while True:
                arrivals.append(self._wanted.get_nowait())
        for arrival in arrivals:
            arrival.error = error
            arrival.done.set()

    def _post(self, arrival: _Arrival) -> None:
        if self._layout is None:
            header = torch.empty(HEADER, dtype=torch.int64)
            self._group.post_receive(header, self._peer, HEADER_TAG + self._channel).wait(WAIT_DEADLINE)
            self._layout = header.tolist()
        arrival.tensors = allocate(self._layout)
        arrival.works = [self._group.post_receive(tensor, self._peer, arrival.tag) for tensor in arrival.tensors]

    def _await(self, arrival: _Arrival) -> None:
        try:
            for work in arrival.works:
                work.wait(WAIT_DEADLINE)  # else gloo gives up after the time that is for coming together
        except RuntimeError as error:
            arrival.error = error
        arrival.works = []
        arrival.done.set()


class LiveOutbound:
    """Sends to a neighbour.

    Args:
        replays: this is a replay, in which nothing says as soon as in training what has arrived.
    """

    def __init__(self, group: FencedGroup, peer: int, kind: str, *, replays: bool) -> None:
        self._group = group
        self._peer = peer
        self._channel = CHANNELS.index(kind)
        self._layout: list[int] | None = None
        self._step = 0
        self._replays = replays
        self._under_way: dict[int, list[tuple[Tensor, Any]]] = {}  # by micro-batch
        self._of_the_step_before: dict[int, list[tuple[Tensor, Any]]] = {}

    def begin(self, step: int) -> None:
        self._step = step
        self._of_the_step_before, self._under_way = self._under_way if self._replays else {}, {}

    def arrived(self, micro_batch: int) -> None:
        if not self._replays:  # a team's member may have it from the log
            self._under_way.pop(micro_batch, None)

    def give(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        layout = describe(tensors)
        if self._layout is None:
            self._layout = layout
            self._send(micro_batch, torch.tensor(layout, dtype=torch.int64), HEADER_TAG + self._channel)
        elif layout != self._layout:
            raise TaskError(
                f"micro-batch {micro_batch}: the tensors between two stages changed their shapes or dtypes within a run "
                f"(now {[(str(t.dtype), tuple(t.shape)) for t in tensors]}). Give every micro-batch the same shape."
            )
        for tensor in tensors:
            # else what is sent are the bytes of another tensor, which it stands for
            plain = tensor.resolve_conj().resolve_neg()
            self._send(micro_batch, plain.contiguous(), tag(self._step, micro_batch, self._channel))

    def _send(self, micro_batch: int, tensor: Tensor, number: int) -> None:
        work = self._group.post_send(tensor, self._peer, number)
        self._under_way.setdefault(micro_batch, []).append((tensor, work))


# ---------------------------------------------------------------- logged


class LoggedInbound:
    """Reads what a sender logged, in place of receiving it.

    Args:
        key: of a (step, micro-batch) on this edge.
        check: called while waiting; may raise to leave the wait.
    """

    def __init__(self, reader: LogReader, key: Callable[[int, int], Key], check: Callable[[], None]) -> None:
        self._reader = reader
        self._key = key
        self._check = check
        self._step = 0

    def begin(self, step: int, micro_batches: Sequence[int]) -> None:
        self._step = step
        self._reader.prefetch(self._key(ahead, number) for ahead in (step, step + 1) for number in micro_batches)

    def take(self, micro_batch: int) -> list[Tensor]:
        """Raises LogGapError: a record is missing or damaged."""
        return list(self._reader.await_record(self._key(self._step, micro_batch), RECORD_DEADLINE_S, self._check))


@dataclass(frozen=True, slots=True)
class Past:
    """What was logged before of what is computed again: by the worker that was lost, or by who replays it once more.

    Attributes:
        until: no step after this one was begun before.
        exact: it must be that again, to the bit and as far as it is there. Otherwise sums may be added in another order.
        since: the incarnation from which on records count.
    """

    reader: LogReader
    until: int
    exact: bool
    since: int = 1

    def has(self, key: Key, tensors: Sequence[Tensor], checksum: Checksum) -> bool:
        """Whether there is a record of what is now these tensors, of this checksum.

        Raises:
            ReplayDivergedError: it is another one.
        """
        before = self.reader.head(key)
        if before is not None and self.exact and not before.is_of(tensors, checksum()):
            where = "gradients" if key.micro_batch == WHOLE_STEP else f"of micro-batch {key.micro_batch}"
            raise diverged(key.sender, key.step, f"the {key.kind} {where}")
        return before is not None

    def compare(self, stage: int, step: int, before: int, now: int) -> None:
        """Compares all that a stage sent and computed in a step, as `links.of_step` sums it up. Its own log lacks what it had
        not written when it died; this number everybody has who was in the step.

        Args:
            before: 0 if nobody knows.

        Raises:
            ReplayDivergedError: it is another one.
        """
        if self.exact and before not in (0, now):
            raise diverged(stage, step, "what it computed")


def diverged(stage: int, step: int, what: str) -> ReplayDivergedError:
    """What is said of a stage that computed something else in a replay."""
    return ReplayDivergedError(
        f"stage {stage}, step {step}: {what} is another than before. Is something in the model random that is not drawn from "
        "torch, random or numpy, or are its kernels not deterministic?"
    )


class Tap:
    """Gives to the log what goes out on an edge, and sends it if somebody receives it: a replay has nobody to send to.

    Args:
        log: None if the edge is not logged.
        past: in a replay, and in the step after it, what was logged before. That is what the receiver was sent, so it is not
            logged again: a log that took twice the room could be full, and would then be deleted, together with what the replay
            itself reads.
    """

    def __init__(
        self,
        live: Outbound | None,
        log: TensorLog | None,
        key: Callable[[int, int], Key],
        fence: Fence,
        past: Past | None = None,
    ) -> None:
        self._live = live
        self._log = log
        self._past = past
        self._key = key
        self._fence = fence
        self._step = 0
        self._given: list[Checksum] = []  # of the step at hand

    @property
    def sent(self) -> int:
        """A number that sums up what went out in the step at hand, in any order: its checksums, modulo 2**48, so that a float64
        holds it. The log's thread has made most of them by the end of the step."""
        return sum(checksum() for checksum in self._given) % 2**48

    def stop_logging(self) -> None:
        """What is given from now on is sent only. From any thread."""
        self._log = None

    def begin(self, step: int) -> None:
        self._step, self._given = step, []
        if self._past is not None and step > self._past.until:
            self._past.reader.forget()
            self._past = None
        if self._live is not None:
            self._live.begin(step)

    def arrived(self, micro_batch: int) -> None:
        if self._live is not None:
            self._live.arrived(micro_batch)

    def give(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Raises ReplayDivergedError: what is sent is something else than before, so a replay has computed something else."""
        key = self._key(self._step, micro_batch)
        kept = [on_cpu(tensor) for tensor in tensors]
        checksum = Checksum(kept)
        self._given.append(checksum)
        is_there = self._past is not None and self._past.has(key, kept, checksum)
        log = None if is_there else self._log
        if log is not None and log.synchronous:
            log.append(key, self._fence.incarnation, kept, self._fence.check, checksum)
        if self._live is not None:
            self._live.give(micro_batch, tensors)
        if log is not None and not log.synchronous:  # the neighbour need not wait for the handing over
            log.append(key, self._fence.incarnation, kept, self._fence.check, checksum)
