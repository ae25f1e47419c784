"""Which bytes a snapshot holds: those of the moment when it was begun, of every device, whatever training does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

from raytrain_ft.errors import StorageError
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.storage.shard import Piece
from raytrain_ft.training import snapshot
from raytrain_ft.training.snapshot import Copy, Slice, share


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


def copied_while(
    tensor: torch.Tensor, change: Callable[[], object], memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> tuple[BaseException | None, bytes]:
    """What becomes of a snapshot if something is done before its bytes are copied."""
    go_on, reserve = threading.Event(), memory.reserve

    def late(size: int) -> memoryview:
        assert go_on.wait(30)
        return reserve(size)

    monkeypatch.setattr(memory, "reserve", late)
    copy = Copy(share([("w", tensor)], 0, 1), memory, lambda _: None)
    copy.start()
    with torch.no_grad():
        change()
    go_on.set()
    copy.join(30)
    return copy.error, bytes(reserve(copy.size))


def test_a_parameter_that_gets_other_memory_is_stored_as_it_was(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the forward pass of MoCo does it: the bytes that it had are neither freed nor overwritten while they are copied."""
    weight = nn.Parameter(torch.ones(2**20))

    def replace() -> None:
        weight.data = weight.data * 2

    assert copied_while(weight, replace, memory, monkeypatch) == (None, torch.ones(2**20).numpy().tobytes())


def average(weight: nn.Parameter) -> None:
    torch._foreach_lerp_([weight.detach()], [torch.zeros_like(weight)], 0.5)  # pyright: ignore[reportPrivateImportUsage]


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "a weight": lambda weight: weight.mul_(2),
    "a part of it": lambda weight: weight[3:].zero_(),
    "an average": average,
    "an embedding": lambda weight: torch.embedding_renorm_(weight.detach(), torch.tensor([1]), 0.5, 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changes_while_it_is_copied_costs_the_snapshot(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    weight = nn.Parameter(torch.ones(8, 2))
    error, _ = copied_while(weight, lambda: CHANGES[change](weight), memory, monkeypatch)
    assert isinstance(error, StorageError)
    assert str(error).startswith("w changed while being copied")


def other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2
    weight.mul_(2)


def gradients(weight: nn.Parameter) -> None:
    with torch.enable_grad():
        (weight * 2).sum().backward()
    assert weight.grad is not None
    weight.grad.zero_()


UNCHANGED: dict[str, Callable[[nn.Parameter], object]] = {
    "gets other memory, which changes": other_memory,
    "is put into other memory": lambda weight: weight.set_(weight.clone()),
    "gets gradients": gradients,
    "is written from": lambda weight: torch.zeros(8, 2).copy_(weight),
    "is frozen": lambda weight: weight.requires_grad_(False),
}


@pytest.mark.parametrize("use", UNCHANGED)
def test_what_is_done_with_a_tensor_without_changing_it_costs_nothing(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    weight = nn.Parameter(torch.ones(8, 2))
    assert copied_while(weight, lambda: UNCHANGED[use](weight), memory, monkeypatch) == (None, torch.ones(16).numpy().tobytes())


def test_a_neighbour_in_the_same_memory_may_change(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what counts changes, and a parameter does not tell that it is a view."""
    flat = torch.ones(20)
    error, content = copied_while(nn.Parameter(flat[:16]), lambda: flat[16:].add_(1), memory, monkeypatch)
    assert (error, content) == (None, torch.ones(16).numpy().tobytes())


def test_a_tensor_whose_changes_are_not_counted_is_copied(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        tensor = torch.ones(16)
    assert copied_while(tensor, lambda: None, memory, monkeypatch) == (None, torch.ones(16).numpy().tobytes())


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
    _version: int = 0

    def is_inference(self) -> bool:
        return False


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
    slices: list[Any] = [Slice(Piece(f"w{d}", "torch.uint8", (8,), 0, 8), OnDevice(d), OnDevice(d)) for d in "ab"]  # pyright: ignore
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
