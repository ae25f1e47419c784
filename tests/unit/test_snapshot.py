"""Which bytes a snapshot holds: those of the moment when it was begun, of every device, whatever training does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_ft.errors import ConfigError, StorageError
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.training import guard, snapshot
from raytrain_ft.training.layout import Described, Layout, Share, share
from raytrain_ft.training.snapshot import Copy


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
    assert (copy.error is not None, copy.pending) == (fails, None)


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

    def detach(self) -> OnDevice:
        return self


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

    def bytes_of(tensor: OnDevice | torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor):
            return tensor  # a clone
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
    described = Described(["wa", "wb"], [torch.uint8] * 2, [torch.Size([8])] * 2, 0, 0, 1)
    devices: list[Any] = [OnDevice("a"), OnDevice("b")]
    copy = Copy(Share(Layout(described, devices), devices, np.zeros(2, np.int64)), memory, lambda _: None, mode)

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


# ---------------------------------------------------------------- many small tensors


def taken(tensors: list[tuple[str, torch.Tensor]], memory: SharedMemory, before: Layout | None = None) -> tuple[bytes, Layout]:
    """What a snapshot holds, and the layout that it was taken by."""
    mine = share(tensors, 0, 1, before=before)
    copy = Copy(mine, memory, lambda _: None)
    copy.start()
    copy.join(30)
    assert copy.error is None
    return bytes(memory.reserve(copy.size)), mine.layout


def raw(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Their bytes. Of clones: memory that numpy has looked at cannot be resized."""
    clones = [tensor.detach().clone().resolve_conj().resolve_neg().contiguous() for _, tensor in tensors]
    return b"".join(clone.view(-1).view(torch.uint8).numpy().tobytes() for clone in clones)


def test_small_tensors_are_copied_before_training_goes_on(memory: SharedMemory) -> None:
    """So nobody needs to wait with changing them; large ones and those that have no bytes in a row are copied later."""
    small = [(f"s{n}", torch.full((n % 900,), float(n))) for n in range(3000)]
    odd = [("turned", torch.arange(6.0).view(2, 3).t()), ("conjugate", torch.tensor([1 + 2j, 3j]).conj())]
    odd += [("negative", torch.tensor([1 + 2j, 3j]).conj().imag), ("large", torch.rand(100_000))]
    mixed = [*small[:1500], *odd, *small[1500:]]
    whole = raw(mixed)
    memory.reserve(len(whole))
    copy = Copy(share(mixed, 0, 1), memory, lambda _: None)
    copy.start()
    if (pending := copy.pending) is not None:
        assert {one.piece.name for one in pending.slices} == {"turned", "conjugate", "negative"}
        assert [mixed[number][0] for number in pending.plain.numbers] == ["large"]
    for _, tensor in small:
        tensor.zero_()
    copy.join(30)
    assert copy.error is None
    assert bytes(memory.reserve(copy.size)) == whole


@pytest.fixture(params=["all at once", "one by one"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the call of torch that looks at all tensors at once, and without."""
    if request.param == "one by one":
        monkeypatch.setattr(guard, "TensorGuards", None)


@pytest.mark.usefixtures("look")
def test_a_layout_is_used_again_for_tensors_of_the_same_kind_alone(memory: SharedMemory) -> None:
    memory.reserve(10_000)
    first = [("a", torch.rand(6)), ("b", torch.rand(2, 3)), ("c", torch.rand(4))]
    content, layout = taken(first, memory)
    assert content == raw(first)
    second = [(name, torch.rand_like(tensor)) for name, tensor in first]
    assert taken(second, memory, layout) == (raw(second), layout)
    others = {
        "another name": [("a", first[0][1]), ("z", first[1][1]), first[2]],
        "another dtype": [first[0], ("b", torch.arange(6).view(2, 3)), first[2]],
        "another shape": [first[0], ("b", first[1][1].view(3, 2)), first[2]],
        "another order": first[::-1],
        "one less": first[:2],
    }
    for name, tensors in others.items():
        content, other = taken(tensors, memory, layout)
        assert (content, other is layout) == (raw(tensors), False), name
        assert [(piece.name, piece.shape) for piece in other.pieces] == [(n, tuple(t.shape)) for n, t in tensors]
    turned = [first[0], ("b", torch.rand(3, 2).t()), first[2]]
    assert taken(turned, memory, layout) == (raw(turned), layout), "what a tensor's memory looks like is no part of it"


@pytest.mark.usefixtures("look")
def test_a_layout_does_not_vouch_for_what_has_no_plain_bytes() -> None:
    layout = share([("w", torch.eye(3))], 0, 1).layout
    with pytest.raises(ConfigError, match=r"w is a torch\.sparse_coo tensor"):
        share([("w", torch.eye(3).to_sparse())], 0, 1, before=layout)


@pytest.mark.usefixtures("look")
def test_a_parameter_that_was_given_other_memory_is_copied_from_there(memory: SharedMemory) -> None:
    weight = nn.Parameter(torch.ones(100))
    memory.reserve(400)
    _, layout = taken([("w", weight)], memory)
    weight.data = torch.full((100,), 2.0)
    assert taken([("w", weight)], memory, layout) == (raw([("w", weight)]), layout)


def to_storage(weight: torch.Tensor, like: torch.Tensor) -> None:
    weight.set_(like)  # pyright: ignore[reportCallIssue, reportArgumentType]


def to_data(weight: torch.Tensor, like: torch.Tensor) -> None:
    weight.data = like


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "turned": lambda w: w.t_(),
    "of another size": lambda w: w.resize_(w.shape[0] - 1, w.shape[1]),
    "larger": lambda w: w.resize_(w.shape[0] + 1, w.shape[1]).fill_(1),
    "of another shape": lambda w: w.unsqueeze_(0),
    "column by column": lambda w: w.as_strided_(tuple(w.shape), (1, w.shape[0])),
    "one element, again and again": lambda w: w.as_strided_(tuple(w.shape), (0, 0)),
    "in other memory": lambda w: to_storage(w, torch.rand(w.shape)),
    "in other memory, turned": lambda w: to_storage(w, torch.rand(w.shape[::-1]).t()),
    "with other data": lambda w: to_data(w, torch.rand(w.shape)),
    "with other data, turned": lambda w: to_data(w, torch.rand(w.shape[::-1]).t()),
    "with other data of another shape": lambda w: to_data(w, torch.rand(w.numel())),
    "with data that are another's, negated": lambda w: to_data(w, torch.rand(*w.shape, dtype=torch.complex64).conj().imag),
}


@pytest.mark.usefixtures("look")
@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("scale", [1, 100])
def test_a_tensor_that_becomes_another_between_two_snapshots(memory: SharedMemory, change: str, scale: int) -> None:
    """It is the same object: its name and address may be all that stays."""
    tensors = [("a", torch.rand(5)), ("w", torch.rand(2 * scale, 3 * scale)), ("z", torch.rand(5000))]
    memory.reserve(10 * 2**20)
    content, layout = taken(tensors, memory)
    assert content == raw(tensors)
    IN_PLACE[change](tensors[1][1])
    content, layout = taken(tensors, memory, layout)
    assert content == raw(tensors)
    assert [piece.shape for piece in layout.pieces] == [tuple(tensor.shape) for _, tensor in tensors]


def test_a_tensor_whose_memory_was_given_up_costs_the_snapshot_and_not_the_process(memory: SharedMemory) -> None:
    tensor = torch.rand(100)
    memory.reserve(tensor.nbytes)
    _, layout = taken([("w", tensor)], memory)
    tensor.untyped_storage().resize_(0)
    copy = Copy(share([("w", tensor)], 0, 1, before=layout), memory, lambda _: None)
    copy.start()
    copy.join(30)
    assert isinstance(copy.error, RuntimeError)


def test_what_cannot_be_copied_at_once_is_left_to_the_thread(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tells what it meets, and costs the snapshot and not the training."""
    tensors = [("a", torch.rand(6)), ("b", torch.rand(2, 3))]
    memory.reserve(48)
    monkeypatch.setattr(snapshot, "copy_small", lambda share, memory: 1 / 0)
    assert taken(tensors, memory)[0] == raw(tensors)
