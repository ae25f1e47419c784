"""Snapshots of a state on a GPU, beside plain copies of its bytes: within the device, and over the bus to pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.harness import REPORT_ONLY, Goal, Report, paired_ratio
from benchmarks.saving import MB, Times, seconds
from raytrain_ft.storage.persister import SharedMemory
from raytrain_ft.training.layout import share
from raytrain_ft.training.snapshot import Copy

GOALS = {
    "cuda_snapshot_ratio_vs_pinned_copy": Goal("<=", 1.1),  # mode "cpu"
    "cuda_snapshot_ratio_vs_device_copy": REPORT_ONLY,  # mode "gpu": the copy takes no longer than waking the snapshot's thread
    "cuda_step_ratio_beside_snapshot": REPORT_ONLY,  # it is copied on a stream of its own meanwhile
}
NO_GPU = "no GPU: torch.cuda.is_available() is False"
TENSOR_MB = 16
MATRIX = 4096
PRODUCTS = 20
"""Of a pretended step."""


def until_done(work: Callable[[], object]) -> float:
    """Seconds, until the device has nothing more to do."""
    torch.cuda.synchronize()

    def all_of_it() -> None:
        work()
        torch.cuda.synchronize()

    return seconds(all_of_it)


def measure(megabytes: int, blocks: int) -> Times:
    """Everything in turns; the first block warms up."""
    pairs = [(f"layer.{i}", torch.rand(TENSOR_MB * MB // 4, device="cuda")) for i in range(megabytes // TENSOR_MB)]
    beside = [torch.empty_like(tensor) for _, tensor in pairs]
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for _, tensor in pairs]
    matrix, memory = torch.rand(MATRIX, MATRIX, device="cuda"), SharedMemory()

    def copied(into: list[torch.Tensor]) -> None:
        for target, (_, source) in zip(into, pairs, strict=True):
            target.copy_(source, non_blocking=True)

    def step() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    layout = share(pairs, 0, 1).layout

    def begun(mode: Literal["cpu", "gpu"]) -> Copy:
        copy = Copy(share(pairs, 0, 1, before=layout), memory, lambda _: None, mode)
        copy.start()
        return copy

    def snapshot(mode: Literal["cpu", "gpu"]) -> float:
        """Until the weights may change again."""
        torch.cuda.synchronize()
        found: list[Copy] = []
        taken = seconds(lambda: (found.append(begun(mode)), found[0].wait(lambda: None)))
        found[0].join()
        if found[0].error is not None:
            raise found[0].error
        return taken

    def step_beside() -> float:
        copy = begun("cpu")
        taken = until_done(step)
        copy.join()
        return taken

    times: Times = {}
    for block in range(-1, blocks):
        turn: dict[str, list[float]] = {}
        for _ in range(3):
            turn.setdefault("pinned copy", []).append(until_done(lambda: copied(pinned)))
            turn.setdefault("cpu", []).append(snapshot("cpu"))
            turn.setdefault("device copy", []).append(until_done(lambda: copied(beside)))
            turn.setdefault("gpu", []).append(snapshot("gpu"))
            turn.setdefault("step", []).append(until_done(step))
            turn.setdefault("step beside", []).append(step_beside())
        if block >= 0:
            for name, values in turn.items():
                times.setdefault(name, []).append(values)
    memory.close()
    return times


def add_to(report: Report, megabytes: int, blocks: int) -> None:
    """The metrics of the GPU paths, or why there are none."""
    if not torch.cuda.is_available():
        for key in GOALS:
            report.absent(key, why=NO_GPU)
        return
    times = measure(megabytes, blocks)
    report.add("cuda_snapshot_ratio_vs_pinned_copy", paired_ratio(times["cpu"], times["pinned copy"]))
    report.add("cuda_snapshot_ratio_vs_device_copy", paired_ratio(times["gpu"], times["device copy"]))
    report.add("cuda_step_ratio_beside_snapshot", paired_ratio(times["step beside"], times["step"]))
