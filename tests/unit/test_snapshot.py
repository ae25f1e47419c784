"""Which bytes a snapshot holds: those of the moment when it was begun, of every device, whatever training does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.shard import Piece
from raytrain_ft.training import snapshot
from raytrain_ft.training.snapshot import Copy, Slice, share


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


def test_a_parameter_that_gets_other_memory_is_stored_as_it_was(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the forward pass of MoCo does it: the bytes that it had are neither freed nor overwritten while they are copied."""
    go_on, reserve = threading.Event(), memory.reserve

    def late(size: int) -> memoryview:
        assert go_on.wait(30)
        return reserve(size)

    monkeypatch.setattr(memory, "reserve", late)
    weight = nn.Parameter(torch.ones(2**20))
    copy = Copy(share([("w", weight)], 0, 1), memory, lambda _: None)
    copy.start()
    weight.data = weight.data * 2
    go_on.set()
    copy.join(30)
    assert copy.error is None
    assert torch.frombuffer(reserve(copy.size), dtype=torch.float32).eq(1.0).all()


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_that_is_over_holds_no_memory_of_training(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if fails:
        monkeypatch.setattr(memory, "reserve", lambda size: 1 / 0)
    copy = Copy(share([("w", torch.ones(8))], 0, 1), memory, lambda _: None)
    copy.start()
    copy.join(30)
    assert (copy.error is not None, copy.slices) == (fails, [])


# ---------------------------------------------------------------- several devices


@dataclass(frozen=True)
class OnDevice:
    """A tensor of a GPU that is not here."""

    device: str
    is_cuda: bool = True
    is_cpu: bool = False


@dataclass(frozen=True)
class Stream:
    """Notes who waits for whom."""

    name: str
    log: list[tuple[str, str, str]]

    def record_event(self) -> str:
        return f"what is queued on {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits for", event))

    def synchronize(self) -> None:
        self.log.append(("the host", "waits for", self.name))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What happens on devices "a" and "b", in order."""
    log: list[tuple[str, str, str]] = []
    current = threading.local()

    def current_stream(device: str = "a") -> Stream:
        return vars(current).get(device) or Stream(f"training on {device}", log)

    def set_stream(stream: Stream) -> None:
        vars(current)[stream.name[-1]] = stream

    def bytes_of(tensor: OnDevice) -> torch.Tensor:
        log.append((current_stream(tensor.device).name, "copies", ""))
        return torch.full((8,), ord(tensor.device), dtype=torch.uint8)

    for name, fake in (("current_stream", current_stream), ("set_stream", set_stream), ("is_initialized", lambda: True)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(snapshot, "_stream", lambda device: Stream(f"snapshots on {device}", log))
    monkeypatch.setattr(snapshot, "_pin", lambda memory: None)
    monkeypatch.setattr(snapshot, "bytes_of", bytes_of)
    return log


@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_every_device_is_waited_for(memory: SharedMemory, log: list[tuple[str, str, str]], mode: Literal["cpu", "gpu"]) -> None:
    """On each one the copy comes after what training has queued there, and training goes on only when it is complete."""
    slices: list[Any] = [Slice(Piece(f"w{d}", "torch.uint8", (8,), 0, 8), OnDevice(d)) for d in "ab"]  # pyright: ignore
    copy = Copy(slices, memory, lambda _: None, mode)

    class Told(threading.Event):
        def set(self) -> None:
            log.append(("training", "goes on", ""))
            super().set()

    copy._done = Told()
    copy.start()
    copy.join(30)
    assert copy.error is None
    assert bytes(memory.reserve(16)) == b"a" * 8 + b"b" * 8
    before = log[: log.index(("training", "goes on", ""))]
    for device in "ab":
        ours = [line for line in before if line[0].endswith(f" {device}") or line[2].endswith(f" {device}")]
        own = f"snapshots on {device}"
        queued = f"what is queued on training on {device}"
        assert ours == [(own, "waits for", queued), (own, "copies", ""), ("the host", "waits for", own)]


def test_the_fullest_device_says_how_much_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ({"a": 7, "b": 5}[device], 10))
    tensors: list[Any] = [("on a", OnDevice("a")), ("on b", OnDevice("b")), ("here", torch.ones(1))]
    assert snapshot.free_on_device(tensors) == 5
    assert snapshot.free_on_device(tensors[2:]) == 0
