"""The writer of the tensor log: what it costs, what it deletes, and how it gives up."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from disks import small_file_system
from store import complete_steps, same_bits
from torch import Tensor

from raytrain_ft.errors import FencedError, LogGapError, StorageError
from raytrain_ft.storage import log_files, tensor_log
from raytrain_ft.storage.log_format import END, Checksum, checksum_of
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import Key, TensorLog
from raytrain_ft.training.fence import Fence


def key(step: int, micro_batch: int = 0) -> Key:
    return Key(step, micro_batch, "activation", 0, 1)


def fill(log: TensorLog, steps: range, micro_batches: int = 2, elements: int = 100, incarnation: int = 1) -> None:
    for step in steps:
        for number in range(micro_batches):
            log.append(key(step, number), incarnation, [torch.full((elements,), float(step))])


def seen(directory: Path) -> LogReader:
    reader = LogReader(directory)
    reader.refresh()
    return reader


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Told(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, about: dict[str, Any]) -> None:
        self.append((kind, about))


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = log_files.write_all

    def write_all(descriptor: int, parts: list[memoryview]) -> None:
        time.sleep(seconds)
        real(descriptor, parts)

    monkeypatch.setattr(log_files, "write_all", write_all)


def test_any_arrow_reader_reads_a_closed_file(tmp_path: Path) -> None:
    log = TensorLog(tmp_path / "made" / "here", "w0")
    fill(log, range(2))
    log.close()
    (path,) = (tmp_path / "made" / "here").iterdir()
    assert path.name == "w0-1-0-0-1.arrow"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert table.column("step").to_pylist() == [0, 0, 1, 1]
    assert table.column("data")[3].as_py() == bytes(torch.ones(100).numpy())
    assert log.stats.records == 4
    assert log.stats.payload_bytes == 1600
    assert log.stats.file_bytes == path.stat().st_size
    log.append(key(9), 1, [torch.ones(1)])  # ignored
    log.trim(9)
    log.close()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a b", "é", "a" * 65, "a\n"])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot name a log"):
        TensorLog(tmp_path, name)


def test_synchronous_writes_before_it_returns(tmp_path: Path) -> None:
    log = TensorLog(tmp_path, "w0", synchronous=True)
    for step in range(3):
        log.append(key(step), 1, [torch.full((5,), float(step))])
        assert seen(tmp_path).read(key(step))[0].tolist() == [step] * 5
    log.trim(9)
    assert names(tmp_path) == []
    log.close()


def test_files_begin_anew_and_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w0-1-0-0-1.arrow").write_bytes(b"of an earlier life")
    monkeypatch.setattr(log_files, "FILE_BYTES", 20_000)
    log = TensorLog(tmp_path, "w0")
    fill(log, range(8))  # by their steps
    fill(log, range(8, 9), incarnation=2)
    fill(log, range(9, 10), elements=6000, incarnation=2)  # by their size
    log.close()
    assert (tmp_path / "w0-1-0-0-1.arrow").read_bytes() == b"of an earlier life"
    assert names(tmp_path) == [
        "w0-1-0-0-1.arrow",
        "w0-1-1-0-1.arrow",
        "w0-1-2-4-1.arrow",
        "w0-2-3-8-1.arrow",
        "w0-2-4-9-1.arrow",
    ]
    reader = seen(tmp_path)
    assert complete_steps(reader, 0, 1, "activation", 2) == set(range(10))


def test_trim_deletes_exactly(tmp_path: Path) -> None:
    log = TensorLog(tmp_path, "w0")
    fill(log, range(10))  # files of steps 0-3, 4-7, 8-9
    assert log.flush(10)
    full = log.stats.file_bytes
    for step, kept in ((3, 0), (4, 4), (7, 4), (8, 8), (9, 8), (10, 10)):
        log.trim(step)
        assert log.flush(10)
        assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == set(range(kept, 10)), step
        assert log.stats.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert log.stats.file_bytes == 0 < full
    fill(log, range(10, 12))  # the current one was deleted, too: a new one begins
    log.close()
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == {10, 11}


def test_a_trim_of_before_everybody_went_back_deletes_nothing_of_what_is_logged_since(tmp_path: Path) -> None:
    """It was held up on its way, and the checkpoint that it tells of is none that they went back to."""
    log = TensorLog(tmp_path, "w0")
    log.begin(3)
    fill(log, range(5, 9), incarnation=3)
    log.trim(9, since=1)
    log.close()
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == set(range(5, 9))


def test_quota_leaves_a_gap_and_trim_revives(tmp_path: Path) -> None:
    told = Told()
    log = TensorLog(tmp_path, "w0", quota_bytes=10_000, tell=told)
    fill(log, range(20))
    log.flush(10)
    assert "quota of 10000 bytes" in log.stats.failed
    assert not log.flush(1)
    assert log.stats.file_bytes == 0
    assert [kind for kind, _ in told] == ["LogFailed"]
    assert names(tmp_path) == [], "with a gap it is of no use"
    log.append(key(20, 0), 1, [torch.zeros(1)])  # the first half of a step is lost, the second is not
    log.trim(16)
    log.append(key(20, 1), 1, [torch.zeros(1)])
    fill(log, range(21, 23))
    assert log.flush(10)
    assert log.stats.failed == ""
    reader = seen(tmp_path)
    found = complete_steps(reader, 0, 1, "activation", 2)
    assert {21, 22} <= found
    assert not {19, 20} & found
    with pytest.raises(LogGapError, match=r"nothing was found of Key.step=20, micro_batch=0"):
        reader.read(key(20, 0))
    fill(log, range(23, 60))
    log.flush(10)
    numbers = [(kind, about["number"]) for kind, about in told]
    assert numbers == [("LogFailed", 1), ("LogWhole", 1), ("LogFailed", 2)]
    assert told[1][1] == {"member": "w0", "incarnation": 1, "step": 21, "number": 1}, "of step 20 one half is missing"
    log.close()


def test_checkpoints_come_first_in_the_quota(tmp_path: Path) -> None:
    needed = [0]
    log = TensorLog(tmp_path, "w0", quota_bytes=10_000, beside=lambda: needed[0])
    fill(log, range(2))
    assert log.flush(10)
    needed[0] = 9_000
    fill(log, range(2, 4))
    assert not log.flush(10)
    assert "quota of 10000 bytes is used up, of which checkpoints need 9000" in log.stats.failed
    needed[0] = 1_000
    log.trim(4)
    fill(log, range(4, 6))
    assert log.flush(10)
    log.close()


def test_a_log_that_begins_anew_forgets_what_was_before(tmp_path: Path) -> None:
    log = TensorLog(tmp_path, "w0", quota_bytes=10_000)
    log.begin(1)
    fill(log, range(20))
    assert not log.flush(10)
    log.begin(1)
    assert not log.flush(10), "it is the one that has failed"
    log.begin(2)
    assert log.flush(10)
    fill(log, range(6, 9), incarnation=2)
    log.begin(2)
    assert log.flush(10), "it goes on"
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == {6, 7, 8}
    log.begin(5)
    fill(log, range(6, 7), incarnation=5)
    assert log.flush(10)
    assert names(tmp_path) == [path.name for path in tmp_path.glob("w0-5-*")]
    assert log.stats.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    log.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB."""
    with small_file_system(tmp_path / "disk", "1M") as path:
        yield path


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_disk_that_is_full(small_disk: Path, synchronous: bool) -> None:
    told = Told()
    log = TensorLog(small_disk, "w0", tell=told, synchronous=synchronous)
    fill(log, range(30), elements=12_345)
    log.flush(10)
    assert "No space left" in log.stats.failed
    assert [about["reason"] for _, about in told] == [log.stats.failed]
    assert log.stats.records == pytest.approx(20, abs=4)
    (small_disk / "checkpoint").write_bytes(bytes(900_000))  # it has made room for what it protects
    (small_disk / "checkpoint").unlink()
    log.trim(30)
    fill(log, range(30, 33), elements=12_345)
    assert log.flush(10)
    assert complete_steps(seen(small_disk), 0, 1, "activation", 2) == {30, 31, 32}
    log.close()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = Told()
    log = TensorLog(tmp_path / "file" / "log", "w0", tell=told)
    fill(log, range(3))
    assert not log.flush(10)
    assert len(told) == 1
    log.close()


def test_a_write_of_an_incarnation_that_is_over_costs_the_next_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor would not heed that the log failed in the old one, and would hold that of the new one for whole."""
    told = Told()
    entered, gate = threading.Event(), threading.Event()
    written = os.writev

    def hang_once(descriptor: int, parts: Any) -> int:
        if entered.is_set():
            return written(descriptor, parts)
        entered.set()
        assert gate.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log_files.os, "writev", hang_once)
    log = TensorLog(tmp_path, "w0", tell=told)
    log.append(key(20), 3, [torch.ones(4)])
    assert not log.flush(0.1)
    assert entered.wait(30)
    log.begin(7)
    for number in range(4):
        log.append(key(20, number), 7, [torch.ones(4)])
    log._take_in(waits=False)
    gate.set()
    assert log.flush(30)
    found = seen(tmp_path)
    assert all(found.has(key(20, number)) for number in range(4))
    assert told == []
    log.close()


def test_a_file_that_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS tells only then that there was no room for what was written."""
    told = Told()
    log = TensorLog(tmp_path, "w0", tell=told)
    fill(log, range(3))
    close, refused = os.close, [OSError(errno.ENOSPC, "No space left on device")]

    def refusing(descriptor: int) -> None:
        of_log = Path(f"/proc/self/fd/{descriptor}").readlink().parent == tmp_path
        close(descriptor)
        if of_log and refused:
            raise refused.pop()

    monkeypatch.setattr(os, "close", refusing)
    assert not log.flush(10)
    assert [(about["incarnation"], about["step"]) for _, about in told] == [(1, 2)]
    assert "No space left" in told[0][1]["reason"]
    log.trim(3)
    fill(log, range(3, 5))
    assert log.flush(10)
    log.close()
    assert [(kind, about["step"]) for kind, about in told] == [("LogFailed", 2), ("LogWhole", 3)]
    log = TensorLog(tmp_path, "w1", memory_bytes=4000, tell=told)  # of which some is written, to a file that stays open
    fill(log, range(5, 6), micro_batches=8)
    deadline = time.monotonic() + 10
    while log.stats.file_bytes == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    refused.append(OSError(errno.EDQUOT, "Disk quota exceeded"))
    log.begin(2)
    fill(log, range(6, 7), incarnation=2)
    assert log.flush(10), "what could not be closed is deleted"
    assert (len(told), refused) == (2, [])
    log.close()


def test_a_listener_that_raises_and_tensors_that_cannot_be_logged(tmp_path: Path) -> None:
    def tell(kind: str, about: dict[str, Any]) -> None:
        raise RuntimeError("listener")

    log = TensorLog(tmp_path, "w0", tell=tell)
    log.append(key(0), 1, [torch.ones(2, 2).to_sparse()])
    assert not log.flush(10)
    log.trim(0)
    log.append(key(1), 1, [torch.zeros(1)] * 500)
    assert not log.flush(10)
    assert "too many tensors" in log.stats.failed
    log.trim(0)
    log.append(Key(1, 0, "other", 0, 1), 1, [torch.zeros(1)])  # pyright: ignore
    assert not log.flush(10)
    log.trim(0)
    fill(log, range(1))
    assert log.flush(10)
    log.close()


def test_a_tensor_that_was_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.1)
    log = TensorLog(tmp_path, "w0")
    tensor = torch.zeros(10)
    fill(log, range(1), micro_batches=1)
    log.append(key(1), 1, [tensor])
    tensor.add_(1)
    assert not log.flush(10)
    assert "was changed before it was written" in log.stats.failed
    assert not seen(tmp_path).has(key(1))
    log.close()


def test_back_pressure_is_counted_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.02)
    log = TensorLog(tmp_path, "w0", memory_bytes=1000)
    most = 0
    for number in range(10):
        log.append(key(0, number), 1, [torch.zeros(100)])
        most = max(most, log._waiting)
    log.append(key(1), 1, [torch.zeros(1000)])  # larger than all the room: alone
    assert log._waiting == 4000
    assert most <= 1000
    stats = log.stats
    assert stats.stalls >= 8
    assert stats.stalled_s > 0.1
    assert log.flush(10)
    assert log.stats.records == 11
    log.close()


def test_a_disk_that_takes_nothing_does_not_hold_training_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, go = Told(), threading.Event()
    monkeypatch.setattr(tensor_log, "STALL_LIMIT_S", 0.2)
    real = log_files.write_all
    monkeypatch.setattr(log_files, "write_all", lambda *args: (go.wait(), real(*args)))
    log = TensorLog(tmp_path, "w0", memory_bytes=1000, tell=told)
    began = time.monotonic()
    fill(log, range(50))
    assert time.monotonic() - began < 2
    assert "nothing could be written" in log.stats.failed
    assert not log.flush(0.1)
    log.trim(40)
    fill(log, range(50, 60))  # still stuck
    assert time.monotonic() - began < 4
    assert len(told) == 2, "it was to begin anew, and has not: whoever took it to be whole again must know"
    go.set()
    log.flush(10)
    assert names(tmp_path) == [], "what it had is of no use, and takes room"
    log.trim(60)
    fill(log, range(60, 62))
    assert log.flush(10)
    found = complete_steps(seen(tmp_path), 0, 1, "activation", 2)
    assert {60, 61} <= found
    assert not set(range(2, 50)) & found
    log.close()


def test_a_fence_leaves_the_wait_for_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not leave a step in time is given up; and that the disk is stuck is not its fault."""
    go, fence = threading.Event(), Fence(1)
    real = log_files.write_all
    monkeypatch.setattr(log_files, "write_all", lambda *args: (go.wait(20), real(*args)))
    log = TensorLog(tmp_path, "w0", memory_bytes=1000)
    log.append(key(0), 1, [torch.zeros(250)], fence.check)
    threading.Timer(0.2, fence.trip).start()
    began = time.monotonic()
    with pytest.raises(FencedError):
        log.append(key(0, 1), 1, [torch.ones(250)], fence.check)
    assert time.monotonic() - began < 2
    go.set()
    log.append(key(1), 2, [torch.zeros(250)])
    assert log.flush(10)
    found = seen(tmp_path)
    assert [found.has(one) for one in (key(0), key(0, 1), key(1))] == [True] * 3, "it may be of a step that is committed"
    log.close()


def test_what_is_logged_behind_a_new_beginning_is_not_lost_with_what_was_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk comes back after everybody has gone back: nobody is told that the log is not whole, so it is."""
    told, go, real = Told(), threading.Event(), log_files.write_all
    monkeypatch.setattr(tensor_log, "STALL_LIMIT_S", 0.2)
    monkeypatch.setattr(log_files, "write_all", lambda *args: (go.wait(20), real(*args)))
    log = TensorLog(tmp_path, "w0", memory_bytes=4000, tell=told)
    fill(log, range(20))
    assert len(told) == 1
    log.begin(2)
    log.append(key(0), 2, [torch.ones(10)])
    go.set()
    assert log.flush(10)
    assert LogReader(tmp_path, 2).has(key(0))
    assert len(told) == 1
    log.close()


def test_flush_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), log_files.write_all
    monkeypatch.setattr(log_files, "write_all", lambda *args: (go.wait(20), real(*args)))
    log = TensorLog(tmp_path, "w0")
    assert log.flush(0)
    fill(log, range(1))
    began = time.monotonic()
    assert not log.flush(0.1)
    assert time.monotonic() - began < 10
    go.set()
    assert log.flush(10)
    assert seen(tmp_path).has(key(0, 1))
    log.close()


def test_who_waits_is_not_kept_waiting_for_a_bubble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `flush`, for room, and for the end: no bubble ever comes."""
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 1e6)
    log = TensorLog(tmp_path, "w0", memory_bytes=1000)
    fill(log, range(1))
    assert log.flush(10)
    fill(log, range(1, 3), elements=200)  # waits for room
    assert log.flush(10)
    fill(log, range(3, 4))
    log.close()
    reader = seen(tmp_path)
    assert all(reader.has(key(step, number)) for step in range(4) for number in range(2))


def comes(what: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.001)
    return what()


def written(log: TensorLog) -> int:
    return log.stats.records


def test_what_a_checkpoint_makes_needless_is_never_written(tmp_path: Path) -> None:
    """In bubbles neither, as long as there is room for it; what is not needless is there when somebody is lost."""
    log = TensorLog(tmp_path, "w0", memory_bytes=40_000)
    for first in range(0, 50, 5):
        fill(log, range(first, first + 5))  # 4,000 bytes, of 10,000 that may stay
        with log.idle():
            time.sleep(0.005)
        log.trim(first + 4)
    assert log._waiting <= 2 * 400 + 4000
    assert log.flush(10)
    assert (log.stats.payload_bytes, log.stats.written_bytes) == (50 * 800, 800)
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == {49}
    fill(log, range(50, 52))
    log.begin(2)
    fill(log, range(52, 53), incarnation=2)
    assert log.flush(10)
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) == {52}, "of another world"
    log.close()


def test_the_writer_takes_nothing_from_under_who_trims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has decided to write, and is held up, while what it would write is found to be needless."""
    log, (decided, trimmed) = TensorLog(tmp_path, "w0"), (threading.Event(), threading.Event())
    carry_out = log._carry_out_next

    def held_up() -> None:
        decided.set()
        trimmed.wait(0.2)
        carry_out()

    monkeypatch.setattr(log, "_carry_out_next", held_up)
    fill(log, range(50))
    flushing = threading.Thread(target=log.flush, args=(10,))
    flushing.start()
    assert decided.wait(10)
    discard = log._discard

    def slowly(is_needless: Any) -> None:
        def ask(item: Any) -> bool:
            time.sleep(0.005)
            return is_needless(item)

        discard(ask)

    monkeypatch.setattr(log, "_discard", slowly)
    log.trim(49)
    trimmed.set()
    flushing.join(10)
    assert log.flush(10)
    assert log._waiting == 0
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 2) >= {49}
    log.close()


def test_checksums_that_the_caller_has_made_are_not_kept(tmp_path: Path) -> None:
    """There may be no bubble for hours: a replay has none."""
    log = TensorLog(tmp_path, "w0")
    for number in range(200):
        tensors = [torch.full((10,), float(number))]
        checksum = Checksum(tensors)
        log.append(key(number), 1, tensors, checksum=checksum)
        checksum()
        log.stats  # noqa: B018  takes in what was handed over
    assert len(log._sums) <= 1
    log.close()


def test_bubbles_are_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between them, nor at the beginning of one that may be short; what a flush writes is not counted among them."""
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 1e6)
    log = TensorLog(tmp_path, "w0", memory_bytes=2000)
    fill(log, range(1))
    with log.idle():
        assert comes(lambda: written(log) == 2)
    fill(log, range(1, 2))
    assert written(log) == 2
    monkeypatch.setattr(tensor_log, "NAP_S", 1e6)
    with log.idle():
        log.trim(0)
        time.sleep(0.01)
    assert written(log) == 2
    assert log.flush(10)
    assert (written(log), log.stats.idle_bytes, log.stats.written_bytes) == (4, 800, 1600)
    log.close()


def test_a_batch_is_written_of_what_is_too_much_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bubble that comes before that, nothing is begun; what has begun goes on in the same bubble."""
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 1e6)
    monkeypatch.setattr(tensor_log, "BATCH_BYTES", 1000)
    log = TensorLog(tmp_path, "w0", memory_bytes=16_000)
    fill(log, range(4))  # 3,200 bytes, of 4,000
    with log.idle():
        assert not comes(lambda: written(log) > 0, seconds=0.05)
    fill(log, range(4, 6))  # 4,800
    with log.idle():
        assert comes(lambda: written(log) == 5), "until less than 3,000 wait"
        assert not comes(lambda: written(log) > 5, seconds=0.05)
        fill(log, range(6, 7), micro_batches=1)
        assert comes(lambda: written(log) == 6), "the same bubble"
    fill(log, range(7, 8))  # 3,600
    with log.idle():
        assert not comes(lambda: written(log) > 6, seconds=0.05), "another one"
    assert log.stats.idle_bytes == log.stats.written_bytes == 2400
    log.close()
    assert complete_steps(seen(tmp_path), 0, 1, "activation", 1) == set(range(8)), "the end is a flush"


def test_checksums_that_the_caller_needs_are_made_in_bubbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing is written: of a batch, and then of what comes in the same bubble."""
    monkeypatch.setattr(tensor_log, "BATCH_BYTES", 800)
    log = TensorLog(tmp_path, "w0")
    sums = [Checksum([torch.full((100,), float(number))]) for number in range(5)]

    def append(*numbers: int) -> None:
        for number in numbers:
            log.append(key(0, number), 1, [torch.full((100,), float(number))], checksum=sums[number])

    def made() -> list[bool]:
        return [one._value is not None for one in sums]

    append(0)
    with log.idle():
        assert not comes(lambda: any(made()), seconds=0.05)
    append(1, 2)
    assert not any(made())
    with log.idle():
        assert comes(lambda: made() == [True] * 3 + [False] * 2)
        append(3)
        assert comes(lambda: made() == [True] * 4 + [False])
    append(4)
    assert log.flush(10)
    assert all(made())
    assert [one() for one in sums] == [checksum_of([np.full(100, n, np.float32).view(np.uint8)]) for n in range(5)]
    assert log.stats.idle_bytes == 0
    log.close()


def test_a_record_that_outlasts_its_bubble_was_not_written_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, real = threading.Event(), threading.Event(), log_files.write_all
    monkeypatch.setattr(log_files, "write_all", lambda *args: (begun.set(), go.wait(20), real(*args)))
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 1e6)
    log = TensorLog(tmp_path, "w0", memory_bytes=1600)
    fill(log, range(1))
    with log.idle():
        assert begun.wait(10)
    go.set()
    assert comes(lambda: log.stats.records == 1)
    assert log.stats.idle_bytes == 0
    with log.idle():
        assert comes(lambda: log.stats.records == 2)
    assert log.stats.idle_bytes == 400
    log.close()


def test_where_no_bubble_comes_nothing_waits_for_long_nor_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 0.05)
    log = TensorLog(tmp_path, "w0", memory_bytes=16_000)
    fill(log, range(9))
    assert comes(lambda: log.stats.records == 18)
    log.close()
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 1e6)
    log = TensorLog(tmp_path, "w1", memory_bytes=2000)
    fill(log, range(1), micro_batches=3)
    assert comes(lambda: log.stats.records >= 1)
    assert log.stats.stalls == 0
    log.close()


def test_who_waits_with_checksums_for_a_bubble_hears_that_there_is_too_much_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one to make checksums in, the writer waits without a limit: the caller can make them itself."""
    monkeypatch.setattr(tensor_log, "PATIENCE_S", 0.05)
    monkeypatch.setattr(tensor_log, "BATCH_BYTES", 800)
    log = TensorLog(tmp_path, "w0", memory_bytes=16_000)
    for number in range(3):
        tensors = [torch.full((100,), float(number))]
        log.append(key(0, number), 1, tensors, checksum=Checksum(tensors))
    assert comes(lambda: bool(log._hurry._waiters))  # pyright: ignore
    fill(log, range(1, 6))  # 5,200 bytes, of 4,000
    assert comes(lambda: log.stats.records > 0)
    log.close()


def test_what_was_flushed_is_in_a_file_that_is_closed(tmp_path: Path) -> None:
    """Only then does NFS show it to other nodes."""
    log = TensorLog(tmp_path, "w0")
    fill(log, range(1))
    assert log.flush(10)
    opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    assert (tmp_path / "w0-1-0-0-1.arrow").read_bytes().endswith(END)
    assert log.flush(10)
    fill(log, range(1, 2))
    log.close()
    assert names(tmp_path) == ["w0-1-0-0-1.arrow", "w0-1-1-1-1.arrow"]


class Marked(torch.autograd.Function):
    """Ties an object to the life of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 1.0)  # so that on a busy machine, too, it is not yet written when it is looked at
    log = TensorLog(tmp_path, "w0")
    memory, mark = np.zeros(1000), Told()
    gone, graph_gone = weakref.ref(memory), weakref.ref(mark)
    log.append(key(0), 1, [torch.from_numpy(memory), Marked.apply(torch.zeros(3, requires_grad=True), mark)])
    del memory, mark
    gc.collect()
    assert gone() is not None
    assert graph_gone() is None, "the log keeps the graph alive"
    assert log.flush(10)
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
    log.close()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_compression(tmp_path: Path, compression: Any) -> None:
    log = TensorLog(tmp_path, "w0", compression=compression)
    tensors: list[Tensor] = [torch.arange(100_000) % 7, torch.empty(0), torch.rand(1001).bfloat16()]
    log.append(key(0), 1, tensors)
    log.append(key(1), 1, tensors[:1])
    log.append(key(2), 1, [])
    log.append(key(3), 1, tensors[1:2])
    log.close()
    reader = seen(tmp_path)
    assert all(map(same_bits, reader.read(key(0)), tensors))
    assert all(map(same_bits, reader.read(key(1)), tensors[:1]))
    assert reader.read(key(2)) == ()
    assert all(map(same_bits, reader.read(key(3)), tensors[1:2]))
    assert (log.stats.file_bytes < log.stats.payload_bytes) == (compression is not None)
