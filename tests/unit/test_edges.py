"""The ends of a pipeline's edges, without gloo."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_ft.errors import ReplayDivergedError
from raytrain_ft.storage import tensor_log
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import Key, TensorLog
from raytrain_ft.training.buckets import Bucket, sample_of
from raytrain_ft.training.edges import HEADER_TAG, WHOLE_STEP, LiveInbound, LiveOutbound, Past, Tap, describe
from raytrain_ft.training.fence import Fence, PeerLostError


class Arrival:
    """A receive that never ends, or that of a description."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, timeout: Any) -> None:
        assert self._ended.wait(30)


class Group:
    """Takes the description and one receive; then the connection is reset."""

    def __init__(self) -> None:
        self.fence = Fence(1)
        self.posted = 0
        self.ended = threading.Event()

    def post_receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Arrival:
        if tag == HEADER_TAG:
            tensor.copy_(torch.tensor(describe([torch.zeros(3)])))
            done = threading.Event()
            done.set()
            return Arrival(done)
        self.posted += 1
        if self.posted > 1:
            raise PeerLostError("connection reset by peer")
        return Arrival(self.ended)


def test_a_connection_that_breaks_ends_every_wait_at_once() -> None:
    """Also that for what was posted before, whose end gloo may never tell, and for what is wanted later."""
    group: Any = Group()
    edge = LiveInbound(group, peer=1, kind="activation")
    try:
        edge.begin(0, (0, 1, 2))
        for number in (0, 1, 2):
            with pytest.raises(PeerLostError, match="nothing more comes from rank 1: connection reset"):
                within(5, lambda number=number: edge.take(number))
        edge.begin(1, (0,))
        with pytest.raises(PeerLostError, match="nothing more comes"):
            within(5, lambda: edge.take(0))
    finally:
        group.fence.trip()
        group.ended.set()


def test_who_waits_for_a_neighbour_is_idle_and_who_need_not_is_not() -> None:
    group: Any = Group()
    entered: list[bool] = []

    @contextmanager
    def idle() -> Iterator[None]:
        entered.append(True)
        group.ended.set()  # only now it comes
        yield
        entered.append(False)

    edge = LiveInbound(group, 1, "activation", idle)
    try:
        edge.begin(0, (0,))
        within(5, lambda: edge.take(0))
        assert entered == [True, False]
        edge.begin(1, (0,))
        assert edge._arrivals[0].done.wait(5)
        with pytest.raises(PeerLostError):
            edge.take(0)
        assert entered == [True, False]
    finally:
        group.fence.trip()
        group.ended.set()


def edge_key(step: int, micro_batch: int) -> Key:
    return Key(step, micro_batch, "tied" if micro_batch == WHOLE_STEP else "activation", 1, 2)


@pytest.fixture
def logged(tmp_path: Path) -> LogReader:
    """What stage 1 sent in step 7: four micro-batches, of which one is not a number, and a gradient."""
    log = TensorLog(tmp_path, "w1")
    for number in (0, 1, 2, 3, WHOLE_STEP):
        log.append(edge_key(7, number), 1, sent(number))
    assert log.flush(10)
    log.close()
    return LogReader(tmp_path)


def sent(number: int) -> list[torch.Tensor]:
    return [torch.tensor([number, torch.nan]), torch.arange(6.0).reshape(2, 3).T]


def test_a_replay_that_computes_the_same_bits_does_not_diverge(logged: LogReader) -> None:
    """Not even where they are no numbers; nor if the log breaks off."""
    edge = Tap(None, None, edge_key, Fence(2), Past(logged, 8, exact=True))
    for step in (7, 8):
        edge.begin(step)
        for number in (0, 1, 2, 3, WHOLE_STEP):
            edge.give(number, sent(number))


@pytest.mark.parametrize(("number", "what"), [(0, "of micro-batch 0"), (3, "of micro-batch 3"), (WHOLE_STEP, "tied gradients")])
def test_a_replay_that_computes_something_else_is_noticed_wherever_it_is(logged: LogReader, number: int, what: str) -> None:
    edge = Tap(None, None, edge_key, Fence(2), Past(logged, 8, exact=True))
    edge.begin(7)
    other = sent(number)
    other[1] += 1e-6
    for wrong in (other, other[:1], [tensor.double() for tensor in sent(number)], [t[:, None] for t in sent(number)]):
        with pytest.raises(ReplayDivergedError, match=f"stage 1, step 7: .*{what}"):
            edge.give(number, wrong)


def test_what_died_with_its_log_is_compared_by_what_all_know_of_it(tmp_path: Path) -> None:
    """A worker's own log lacks what it had not written yet. All of it that it sent has one number, in whatever order."""
    empty = LogReader(tmp_path)
    past = Past(empty, 8, exact=True)

    def sum_of(*numbers: int, step: int = 7) -> int:
        edge = Tap(None, None, edge_key, Fence(2), past)
        edge.begin(step - 1)
        edge.give(0, sent(9))
        edge.begin(step)
        for number in numbers:
            edge.give(number, sent(number))
        return edge.sent

    before = sum_of(0, 1, 2, 3, WHOLE_STEP)
    past.compare(1, 7, before, sum_of(2, 0, WHOLE_STEP, 3, 1))
    past.compare(1, 7, 0, sum_of(0, 1))  # nobody knows
    for other in (sum_of(0, 1, 2, 3), sum_of(0, 1, 2, 4, WHOLE_STEP)):
        assert 0 < other < 2**48
        with pytest.raises(ReplayDivergedError, match="stage 1, step 7: what it computed is another than before"):
            past.compare(1, 7, before, other)
        Past(empty, 8, exact=False).compare(1, 7, before, other)  # sums in another order are something else


def test_a_number_stands_for_the_gradients_and_not_for_what_lies_beside_them() -> None:
    """Those of other random numbers differ in it, wherever they are; a wish for a checkpoint, which is made anew, does not."""
    weight, bias = torch.nn.Parameter(torch.zeros(256, 512)), torch.nn.Parameter(torch.zeros(3))
    buckets = [Bucket(0, [weight], 0), Bucket(1, [bias], 4)]
    chance = torch.Generator().manual_seed(0)
    for bucket in buckets:
        bucket.flat.copy_(torch.randn(bucket.flat.shape, generator=chance))
    before = sample_of(buckets)
    assert 0 < before < 2**48
    buckets[1].tail.add_(1)
    buckets[1].missing.add_(1)
    assert sample_of(buckets) == before
    for column in (0, 255, 511):  # of one feature alone
        buckets[0].views[0][:, column] += 1e-6
        assert sample_of(buckets) != before
        before = sample_of(buckets)
    buckets[1].views[0][2] += 1e-6
    assert sample_of(buckets) != before


class Sent(list[int]):
    """A live edge; which micro-batches were sent."""

    def begin(self, step: int) -> None: ...

    def arrived(self, micro_batch: int) -> None: ...

    def give(self, micro_batch: int, tensors: Any) -> None:
        self.append(micro_batch)


def test_what_is_known_of_the_log_is_let_go_of_when_it_has_been_compared(logged: LogReader) -> None:
    """Of thousands of steps it is a lot."""
    edge = Tap(Sent(), None, edge_key, Fence(2), Past(logged, 7, exact=True))
    edge.begin(7)
    edge.give(0, sent(0))
    assert logged._places
    edge.begin(8)
    assert not logged._places


def test_the_step_after_a_replay_shows_what_its_last_update_led_to(logged: LogReader, tmp_path: Path) -> None:
    """It was begun before. Later ones were not: what may be found of them is of another time."""
    live, log = Sent(), TensorLog(tmp_path / "again", "w3")
    edge = Tap(live, log, edge_key, Fence(2), Past(logged, 7, exact=True))
    edge.begin(7)
    edge.give(0, sent(0))
    with pytest.raises(ReplayDivergedError, match="stage 1, step 7"):
        edge.give(1, sent(2))
    assert live == [0], "nobody gets the other one"
    early = Tap(live, log, edge_key, Fence(2), Past(logged, 6, exact=True))
    early.begin(7)
    early.give(1, sent(2))
    assert live == [0, 1]
    log.close()
    assert log.stats.records == 1, "nor is it logged"


MICRO_BATCHES = 4


def replayed(log: TensorLog, directory: Path, steps: range, *, exact: bool = True, noise: float = 0.0) -> None:
    """Stage 1 computes these steps again, whose log is in the directory."""
    edge = Tap(None, log, edge_key, Fence(2), Past(LogReader(directory), steps.stop, exact))
    for step in steps:
        edge.begin(step)
        for number in range(MICRO_BATCHES):
            edge.give(number, [tensor + noise for tensor in large(step, number)])


def large(step: int, number: int) -> list[torch.Tensor]:
    return [torch.full((1000,), 10.0 * step + number)]


def logged_by(member: str, directory: Path, steps: range, missing: tuple[int, ...] = ()) -> None:
    """What stage 1 sent in these steps, but for micro-batches of the last one that were not written any more."""
    log = TensorLog(directory, member)
    for step in steps:
        for number in range(MICRO_BATCHES):
            if step < steps[-1] or number not in missing:
                log.append(edge_key(step, number), 1, large(step, number))
    log.close()


@pytest.mark.parametrize("exact", [True, False])
def test_a_replay_within_a_quota_does_not_delete_the_log_that_it_reads(tmp_path: Path, exact: bool) -> None:
    """Who helps has logged as much as the lost stage: both together would be too much."""
    logged_by("w1", tmp_path, range(6))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    log = TensorLog(tmp_path, "w0", quota_bytes=int(1.2 * size))
    sent = [Key(step, number, "activation", 0, 1) for step in range(6) for number in range(MICRO_BATCHES)]
    for key in sent:
        log.append(key, 1, large(0, 0))
    assert log.flush(10)
    replayed(log, tmp_path, range(6), exact=exact)
    log.close()
    assert log.stats.failed == ""
    reader = LogReader(tmp_path)
    assert all(map(reader.has, sent))


def test_what_was_logged_before_and_what_was_not_is_found_by_the_next_replay(tmp_path: Path) -> None:
    """The end of what the lost worker logged was not written. Who took its place has logged that, and nothing else."""
    logged_by("w1", tmp_path, range(6), missing=(2, 3))
    log = TensorLog(tmp_path, "w3")
    replayed(log, tmp_path, range(7))
    log.close()
    assert log.stats.records == 2 + MICRO_BATCHES
    again = TensorLog(tmp_path, "w4")
    replayed(again, tmp_path, range(7))
    again.close()
    assert again.stats.records == 0, "a third one finds all of it"
    reader = LogReader(tmp_path)
    for step in range(7):
        for number in range(MICRO_BATCHES):
            (read,) = reader.await_record(edge_key(step, number), 5, lambda: None)
            assert torch.equal(read, *large(step, number))


def test_sums_in_another_order_do_not_take_the_place_of_what_was_sent(tmp_path: Path) -> None:
    """A neighbour that is replayed later gets what it was sent before."""
    logged_by("w1", tmp_path, range(2))
    log = TensorLog(tmp_path, "w3")
    replayed(log, tmp_path, range(2), exact=False, noise=1e-3)
    log.close()
    assert log.stats.records == 0
    with pytest.raises(ReplayDivergedError):
        replayed(log, tmp_path, range(2), noise=1e-3)


class Written:
    """Sends nothing; notes what the log had written by then."""

    def __init__(self, log: TensorLog) -> None:
        self._log = log
        self.seen: list[int] = []

    def begin(self, step: int) -> None:
        del step

    def arrived(self, micro_batch: int) -> None: ...

    def give(self, micro_batch: int, tensors: Any) -> None:
        del micro_batch, tensors
        self.seen.append(self._log.stats.records)


@pytest.mark.parametrize(("synchronous", "written"), [(True, [1, 2]), (False, [0, 0])])
def test_a_synchronous_log_writes_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: bool, written: list[int]
) -> None:
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 60.0)  # else the thread may be quicker
    log = TensorLog(tmp_path, "w1", synchronous=synchronous)
    live = Written(log)
    edge = Tap(live, log, edge_key, Fence(1))
    edge.begin(7)
    for number in (0, 1):
        edge.give(number, sent(number))
    log.close()
    assert live.seen == written
    assert log.stats.records == 2


def within(seconds: float, call: Any) -> None:
    """What it raises; or AssertionError if it takes longer."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it takes longer than {seconds:g} s"
    if raised:
        raise raised[0]


class Mailbox(Group):
    """Keeps what is sent."""

    def post_send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.sent = tensor


def test_what_is_sent_are_the_bytes_of_the_tensor_itself() -> None:
    """torch notes beside a tensor that its bytes are to be conjugated, or negated; who receives them does not know."""
    group: Any = Mailbox()
    waves = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (waves.conj(), waves.conj().imag):
        LiveOutbound(group, 1, "activation", replays=False).give(0, [tensor])
        assert torch.equal(group.sent, tensor)
        assert not group.sent.is_conj()
        assert not group.sent.is_neg()


@pytest.mark.parametrize("replays", [False, True])
def test_what_has_arrived_is_let_go_of(replays: bool) -> None:
    """In a replay that is known a step later only."""
    group: Any = Mailbox()
    edge = LiveOutbound(group, 1, "activation", replays=replays)
    tensors = [torch.zeros(3) for _ in range(4)]
    left = [weakref.ref(tensor) for tensor in tensors]

    def there() -> list[int]:
        group.sent = None
        return [number for number, one in enumerate(left) if one() is not None]

    edge.begin(7)
    for number in range(3):
        edge.give(number, [tensors.pop(0)])
    assert there() == [0, 1, 2, 3]
    edge.arrived(1)
    assert there() == ([0, 1, 2, 3] if replays else [0, 2, 3])
    edge.begin(8)
    assert there() == ([0, 1, 2, 3] if replays else [3])
    edge.give(0, [tensors.pop(0)])
    edge.begin(9)
    assert there() == ([3] if replays else [])


def test_a_complex_tensor_is_logged(tmp_path: Path) -> None:
    log, waves = TensorLog(tmp_path, "w1"), torch.tensor([1 + 2j, 3 - 4j])
    log.append(edge_key(7, 0), 1, [waves.conj(), waves.conj().imag])
    assert log.flush(10)
    log.close()
    reader = LogReader(tmp_path)
    read = reader.await_record(edge_key(7, 0), 5, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(read, (waves.conj(), waves.conj().imag), strict=True))
