"""What does a durable checkpoint cost?    python -m benchmarks.checkpoint [--quick]

Ours and what it is compared with take turns on the same bytes, disk and minute: raw write + fsync, torch.save + fsync,
torch.distributed.checkpoint (save and async_save), raw read, torch.load(mmap=True) + copy, memcpy. The keys are of 256 MB in
few large tensors; those of other sizes, of many small tensors, and of a model's and its optimizer's state have the same goals
and end with the state's name. "memcpy" copies one block of as many bytes, "memcpy each" in a loop in C the tensors themselves:
what lies in ten thousand places takes longer, whoever copies it. "persist" is what comes after the snapshot, "durable" both:
torch.save has no snapshot. Stall and memory are those of a loop that sleeps as long as an accelerator would compute. Snapshots
of a state on a GPU are measured where there is one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_snapshot
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, noise_floor, paired_ratio
from benchmarks.saving import Times, as_workers, measure, state
from benchmarks.stalls import paced_elsewhere

RATIOS = {
    "snapshot_ratio_vs_memcpy": ("snapshot", "memcpy", Goal("<=", 1.1)),
    "snapshot_ratio_vs_memcpy_each": ("snapshot", "memcpy each", REPORT_ONLY),
    "persist_ratio_vs_raw": ("write", "persist", Goal(">=", 0.9)),
    "persist_ratio_vs_torch_save": ("torch.save", "persist", Goal(">=", 1.3)),
    "persist_ratio_vs_dcp": ("dcp.save", "persist", Goal(">=", 1.3)),
    "durable_ratio_vs_torch_save": ("torch.save", "durable", REPORT_ONLY),
    "durable_ratio_vs_dcp": ("dcp.save", "durable", Goal(">=", 1.3)),
    "restore_ratio_vs_raw_read": ("read", "restore", Goal(">=", 0.85)),
    "restore_ratio_vs_torch_load": ("torch.load", "restore", Goal(">=", 1.0)),
}
"""Of which times each is the ratio. Throughputs are of the same bytes, so a ratio of them is one of times."""
JUDGED = (256, "few")
OTHERS = (
    (64, "few"),
    (64, "many"),
    (64, "model"),
    (256, "many"),
    (256, "model"),
    (1024, "few"),
    (1024, "many"),
    (1024, "model"),
)
QUICK = (JUDGED, (64, "many"))
COLUMNS = ("memcpy", "memcpy each", "snapshot", "write", "persist", "durable", "torch.save", "dcp.save", "dcp.async_save")
COLUMNS += ("read", "restore", "torch.load")


def key_of(name: str, size: tuple[int, str]) -> str:
    """A ratio's key, of a state of so many MB in few or many tensors."""
    return name if size == JUDGED else f"{name}_{size[0]}_{size[1]}"


GOALS = {name: goal for name, (_, _, goal) in RATIOS.items()}
GOALS |= {"stall_ratio_paced": Goal("<=", 0.1), "host_memory_ratio": Goal("<=", 1.1)}
GOALS |= {key_of(name, size): goal for size in OTHERS for name, (_, _, goal) in RATIOS.items()}
GOALS |= gpu_snapshot.GOALS


def judge(report: Report, size: tuple[int, str], times: Times) -> None:
    """The ratios of what was measured in turns."""
    both = [a + b for a, b in zip(times["memcpy"], times["memcpy again"], strict=True)]
    blocks = times | {"memcpy": both}
    for name, (above, below, _) in RATIOS.items():
        if below in blocks:
            report.add(key_of(name, size), paired_ratio(blocks[above], blocks[below]))
        else:
            report.absent(key_of(name, size), why="no C compiler (cc) is installed")
    if size == JUDGED:
        report.noise_floor = noise_floor(times["memcpy"], times["memcpy again"])


def measure_sizes(report: Report, directory: Path, quick: bool) -> Table:
    """Each state in turn; returns the median seconds."""
    table = Table(title="seconds, median (one intra-op thread)")
    for title in ("state", *COLUMNS):
        table.add_column(title, justify="right")
    for size in (JUDGED, *OTHERS):
        megabytes, kind = size
        if quick and size not in QUICK:
            for name in RATIOS:
                report.absent(key_of(name, size), why="--quick leaves this out")
            continue
        blocks = (9 if size == JUDGED else 5) if quick else 25 if megabytes <= JUDGED[0] else 9
        (place := directory / f"{megabytes}-{kind}").mkdir()
        times = measure(place, state(megabytes, kind), blocks)
        shutil.rmtree(place)
        judge(report, size, times)
        medians = [f"{float(np.median(np.concatenate(times[name]))):.4f}" if name in times else "" for name in COLUMNS]
        table.add_row(f"{megabytes} MB, {kind}", *medians)
    return table


def run(options: Options) -> Report:
    """Measures everything, with one intra-op thread."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    report = Report("checkpoint", metrics_from=GOALS)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=os.environ.get("CHECKPOINT_DIRECTORY")))
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # async_save asks for one
    try:
        table = measure_sizes(report, directory, options.quick)
        found = paced_elsewhere(directory, JUDGED[0], 12 if options.quick else 20)
        report.add("stall_ratio_paced", [stall / float(np.median(found["memcpy"])) for stall in found["stalls"]])
        report.add("host_memory_ratio", found["memory"])
        gpu_snapshot.add_to(report, JUDGED[0], 9 if options.quick else 25)
        Console(width=160).print(table)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(directory, ignore_errors=True)
    return report


if __name__ == "__main__":
    as_workers("benchmarks.checkpoint")
    main(run, __doc__)
