"""Snapshots of a state that lives on a GPU: through host memory, and through the device's own; overlapped with an update."""

from __future__ import annotations

import time
from typing import Any, Literal

import pytest
import torch

from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.training.layout import share
from raytrain_ft.training.snapshot import Copy, free_on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")


def nothing() -> None:
    """Leaves no wait."""


@pytest.mark.parametrize("mode", ["cpu", "gpu"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_snapshot_is_the_state_before_the_update(mode: Literal["cpu", "gpu"], count: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors = [(f"t{i}", torch.randn(1000, 4096 + i, device="cuda", generator=generator)) for i in range(4)]
    before = b"".join(tensor.cpu().numpy().tobytes() for _, tensor in tensors)
    taken = bytearray()
    for number in range(count):
        memory, done = SharedMemory(), []
        copy = Copy(share(tensors, number, count), memory, done.append, mode)
        copy.start()
        copy.wait(nothing)
        if number == count - 1:
            for _, tensor in tensors:
                tensor.add_(1.0)  # at once: the copy within the device must be complete
        copy.join()
        assert copy.error is None
        assert (copy.device_seconds is not None) == (mode == "gpu")
        taken += memory.reserve(copy.size)
        memory.close()
    assert bytes(taken) == before


def test_within_the_device_is_faster_than_over_the_bus() -> None:
    tensors = [("big", torch.zeros(256 * 2**20 // 4, device="cuda"))]
    assert free_on_device(tensors) > 0
    seconds = {}
    for mode in ("cpu", "gpu", "cpu", "gpu"):  # the first of each touches the memory
        memory = SharedMemory()
        copy = Copy(share(tensors, 0, 1), memory, lambda _: None, mode)
        torch.cuda.synchronize()
        began = time.monotonic()
        copy.start()
        copy.wait(nothing)
        seconds[mode] = time.monotonic() - began
        copy.join()
        memory.close()
    assert seconds["gpu"] < seconds["cpu"]


def test_all_snapshots_use_the_same_memory_of_the_device() -> None:
    tensors, memory = [("big", torch.zeros(64 * 2**20 // 4, device="cuda"))], SharedMemory()
    reserved = []
    for _ in range(4):
        copy = Copy(share(tensors, 0, 1), memory, lambda _: None, "gpu")
        copy.start()
        copy.wait(nothing)
        copy.join()
        assert copy.device_seconds is not None
        reserved.append(torch.cuda.memory_reserved())
    memory.close()
    assert len(set(reserved)) == 1, reserved


def test_a_device_without_room_does_not_cost_the_snapshot() -> None:
    torch.cuda.empty_cache()
    tensors, memory = [("big", torch.ones(256 * 2**20 // 4, device="cuda"))], SharedMemory()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        copy = Copy(share(tensors, 0, 1), memory, lambda _: None, "gpu")
        copy.start()
        copy.wait(nothing)
        copy.join()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (copy.error, copy.device_seconds) == (None, None)
    assert bytes(memory.reserve(copy.size)) == tensors[0][1].cpu().numpy().tobytes()
    memory.close()


def test_memory_that_cannot_be_pinned_costs_nothing_but_time() -> None:
    tensors, memory = [("w", torch.ones(1000, device="cuda"))], SharedMemory()
    memory.reserve(4000)
    address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(address, len(memory.view), 0)) == 0  # so it cannot be once more
    copy = Copy(share(tensors, 0, 1), memory, lambda _: None)
    copy.start()
    copy.join()
    assert copy.error is None
    assert (tensors[0][1] + 1).tolist() == [2.0] * 1000, "no error is left for whoever uses the GPU next"
    assert bytes(memory.reserve(4000)) == tensors[0][1].cpu().numpy().tobytes()
    runtime.cudaHostUnregister(address)
    memory.close()
