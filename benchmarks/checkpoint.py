"""What does a durable checkpoint cost?    python -m benchmarks.checkpoint [--quick]

Ours and what it is compared with take turns on the same bytes, disk and minute: raw write + fsync, torch.save + fsync,
torch.distributed.checkpoint (save and async_save), raw read, torch.load(mmap=True) + copy, memcpy. The goals are judged at
256 MB of few large tensors; a table shows the other sizes, and many small tensors. Stall and memory are those of a loop that
sleeps as long as an accelerator would compute, in a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import Goal, Options, Report, main, noise_floor, paired_ratio
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.storage import checkpoint, lock
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.persister import Job, Persister, SharedMemory
from raytrain_ft.training.checkpointer import Checkpointer, Target
from raytrain_ft.training.restore import fill
from raytrain_ft.training.snapshot import Copy, share, total_size

GOALS = {
    "snapshot_ratio_vs_memcpy": Goal("<=", 1.1),
    "persist_ratio_vs_raw": Goal(">=", 0.9),
    "persist_ratio_vs_torch_save": Goal(">=", 1.3),
    "persist_ratio_vs_dcp": Goal(">=", 1.3),
    "restore_ratio_vs_raw_read": Goal(">=", 0.85),
    "restore_ratio_vs_torch_load": Goal(">=", 1.0),
    "stall_ratio_paced": Goal("<=", 0.1),
    "host_memory_ratio": Goal("<=", 1.1),
}
MB = 2**20
JUDGED = (256, "few")
STEP_S = 0.15
"""Of the paced loop: what an accelerator would compute."""
Tensors = dict[str, Tensor]
Pairs = list[tuple[str, Tensor]]


def state(megabytes: int, kind: str) -> Tensors:
    """Random tensors: a few of 16 MB each, or ten thousand of all sizes."""
    generator = torch.Generator().manual_seed(0)
    if kind == "few":
        return {f"layer.{i}": torch.rand(2048, 2048, generator=generator) for i in range(megabytes // 16)}
    unit = megabytes * MB // 4 // 10_000 // 2
    return {f"layer.{i}": torch.rand(1 + unit * (i % 4 + 1) * 4 // 5, generator=generator) for i in range(10_000)}


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---------------------------------------------------------------- ours


class Ours:
    """A worker's snapshot, its persister, and its restore, as `Checkpointer` puts them together."""

    def __init__(self, directory: Path, tensors: Tensors) -> None:
        self.storage = open_storage(str(directory))
        self.lock = lock.acquire(self.storage, "benchmark")
        self.memory = SharedMemory()
        self.persister = Persister(self.memory)
        self.pairs: Pairs = list(tensors.items())
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self._steps = itertools.count(1)
        self.job: Job | None = None

    def snapshot(self) -> None:
        """From the decision to the moment from which the weights may change."""
        slices = share(self.pairs, 0, 1)
        copy = Copy(slices, self.memory, lambda _: None)
        copy.start()
        copy.wait(lambda: None)
        self.job = Job(
            uri=self.storage.uri,
            owner="benchmark",
            epoch=self.lock.owner.epoch,
            step=next(self._steps),
            incarnation=1,
            number=0,
            count=1,
            pieces=[(p.name, p.dtype, p.shape, p.start, p.size) for p in (s.piece for s in slices)],
            size=total_size(self.pairs),
        )

    def persist(self) -> None:
        """From the snapshot to a durable checkpoint."""
        assert self.job is not None
        outcome = self.persister.submit(self.job).result()
        assert outcome.error is None, outcome.error

    def settle(self) -> None:
        """Waits until the one before is deleted, so that this disturbs nobody: no measured time holds a deletion."""
        while len(checkpoint.found(self.storage)) > 1:
            time.sleep(0.01)
        os.sync()

    def restore(self) -> None:
        """From the files to tensors, verified."""
        manifest = next(checkpoint.select(self.storage, print))
        fill(self.targets, checkpoint.map_shards(self.storage, manifest))

    def file(self) -> Path:
        """The newest shard."""
        return next(Path(self.storage.uri).glob("step-*/*.arrow"))

    def close(self) -> None:
        """Ends the persister and gives the memory back."""
        self.persister.close(30.0)
        self.lock.release()
        self.memory.close()


# ---------------------------------------------------------------- what it is compared with


class Peers:
    """The others, each of which replaces its own file or directory."""

    def __init__(self, directory: Path, tensors: Tensors) -> None:
        self.directory = directory
        self.tensors = tensors
        self.flat = np.concatenate([tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()])
        self.spare = np.ones_like(self.flat)
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def memcpy(self) -> None:
        """The C library's, of all bytes at once."""
        ctypes.memmove(self.spare.ctypes.data, self.flat.ctypes.data, self.flat.nbytes)

    def write(self) -> None:
        """Raw write + fsync of a new file."""
        left = memoryview(self.flat)
        descriptor = os.open(self.directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        while len(left):
            left = left[os.write(descriptor, left[: 16 * MB]) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def torch_save(self) -> None:
        """torch.save + fsync."""
        with (self.directory / "saved.pt").open("wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(self) -> None:
        """torch.distributed.checkpoint.save, which syncs its files."""
        dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(self.directory / "dcp", sync_files=True), no_dist=True)

    def dcp_async(self) -> None:
        """Its async_save, to the end."""
        writer = dcp.FileSystemWriter(self.directory / "async", sync_files=True)
        future: Any = dcp.async_save(self.tensors, storage_writer=writer)
        future.result()

    def torch_load(self) -> None:
        """torch.load(mmap=True), then a copy into the tensors."""
        loaded = torch.load(self.directory / "saved.pt", mmap=True, weights_only=True)
        for name, tensor in self.targets.items():
            tensor.copy_(loaded[name])

    def forget(self, *names: str) -> None:
        """Removes what was written, outside the measured time, and lets the disk come to rest: it frees blocks later."""
        for name in names:
            shutil.rmtree(self.directory / name, ignore_errors=True)
            with suppress(OSError):
                (self.directory / name).unlink()
        os.sync()


def read_into(path: Path, target: memoryview) -> None:
    """A plain read of a whole file."""
    with path.open("rb", buffering=0) as file:
        read = 0
        while count := file.readinto(target[read : read + 16 * MB]):
            read += count


Times = dict[str, list[list[float]]]


def measure(directory: Path, tensors: Tensors, blocks: int) -> Times:
    """Everything in turns; per block one time each (two of what is short)."""
    ours, peers = Ours(directory / "checkpoints", tensors), Peers(directory, tensors)
    times: Times = {}
    for block in range(-1, blocks):  # the first warms up
        turn: dict[str, list[float]] = {}
        for _ in range(3):
            turn.setdefault("memcpy", []).append(seconds(peers.memcpy))
            turn.setdefault("snapshot", []).append(seconds(ours.snapshot))
            turn.setdefault("memcpy again", []).append(seconds(peers.memcpy))
        peers.forget("raw", "saved.pt", "dcp", "async")
        for name in ("write", "persist", "persist", "write", "write", "persist"):
            turn.setdefault(name, []).append(seconds(peers.write if name == "write" else ours.persist))
            ours.settle()
            peers.forget("raw")
            ours.snapshot()
        turn["torch.save"] = [seconds(peers.torch_save)]
        turn["dcp.save"] = [seconds(peers.dcp_save)]
        peers.forget("dcp")
        turn["dcp.async_save"] = [seconds(peers.dcp_async)]
        peers.forget("async")
        target = memoryview(np.ones(ours.file().stat().st_size, np.uint8))
        for _ in range(3):
            turn.setdefault("read", []).append(seconds(lambda into=target: read_into(ours.file(), into)))
            turn.setdefault("restore", []).append(seconds(ours.restore))
            turn.setdefault("torch.load", []).append(seconds(peers.torch_load))
        if block >= 0:
            for name, values in turn.items():
                times.setdefault(name, []).append(values)
    same = all(torch.equal(ours.targets[name], tensor) for name, tensor in tensors.items())
    assert same, "what was restored is not what was stored"
    ours.close()
    peers.forget("saved.pt")
    return times


# ---------------------------------------------------------------- the paced loop, in a process of its own


def host_memory(pids: list[int]) -> int:
    """Bytes of anonymous and shared memory of these processes; what they share counts once."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def paced(directory: Path, megabytes: int, checkpoints: int) -> dict[str, Any]:
    """A loop whose step is a sleep, with a checkpoint as often as they can be had: the stall of each, and the memory."""
    tensors = state(megabytes, "few")
    pairs = list(tensors.items())
    spare = np.ones(total_size(pairs), np.uint8)
    source = np.ones_like(spare)
    addresses = spare.ctypes.data, source.ctypes.data, spare.nbytes
    memcpy = [seconds(lambda: ctypes.memmove(*addresses)) for _ in range(9)]
    del spare, source
    storage = open_storage(str(directory / "paced"))
    held = lock.acquire(storage, "paced")
    target = Target(uri=storage.uri, owner="paced", epoch=held.owner.epoch)
    gc.collect()
    before = host_memory([os.getpid()])
    told: list[str] = []
    tuner = Tuner(budget=0.035, window=10**6)
    worker = Checkpointer(target, lambda: (pairs, {}), lambda: tuner, lambda kind, _: told.append(kind))
    worker.begin(0, 1, 1, 0)
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            samples.append(host_memory([os.getpid(), *([worker._persister.pid] if worker._persister.pid else [])]))

    stalls: list[float] = []
    step = 0
    for measured in (False, True, None):  # warm up; measure the stall; measure the memory, which disturbs
        sampler = threading.Thread(target=sample)
        if measured is None:
            sampler.start()
        for _ in range(2 if not measured else checkpoints):
            step += 1
            stall = seconds(lambda now=step: worker.take(now, lambda: None))
            while True:
                time.sleep(STEP_S)
                stall += seconds(lambda: worker.await_copy(lambda: None))
                if not worker.busy:
                    break
            if measured:
                stalls.append(stall)
    over.set()
    sampler.join()
    worker.close()
    held.release()
    assert told.count("CheckpointCommitted") == step, told
    size = total_size(pairs)
    return {"memcpy": memcpy, "stalls": stalls, "memory": (max(samples) - before - 64 * MB) / size}


def paced_elsewhere(directory: Path, megabytes: int, checkpoints: int) -> dict[str, Any]:
    """`paced` in a process that has done nothing else."""
    code = (
        "import json, sys; from pathlib import Path; from benchmarks.checkpoint import paced; "
        "print(json.dumps(paced(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))"
    )
    arguments = [sys.executable, "-c", code, str(directory), str(megabytes), str(checkpoints)]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout)


# ---------------------------------------------------------------- the report


def judge(report: Report, times: Times) -> None:
    """The ratios of what was measured in turns. Throughputs are of the same bytes, so a ratio of them is one of times."""
    both = [a + b for a, b in zip(times["memcpy"], times["memcpy again"], strict=True)]
    report.add("snapshot_ratio_vs_memcpy", paired_ratio(times["snapshot"], both))
    report.add("persist_ratio_vs_raw", paired_ratio(times["write"], times["persist"]))
    report.add("persist_ratio_vs_torch_save", paired_ratio(times["torch.save"], times["persist"]))
    report.add("persist_ratio_vs_dcp", paired_ratio(times["dcp.save"], times["persist"]))
    report.add("restore_ratio_vs_raw_read", paired_ratio(times["read"], times["restore"]))
    report.add("restore_ratio_vs_torch_load", paired_ratio(times["torch.load"], times["restore"]))
    report.noise_floor = noise_floor(times["memcpy"], times["memcpy again"])


COLUMNS = ("memcpy", "snapshot", "write", "persist", "torch.save", "dcp.save", "dcp.async_save")
COLUMNS += ("read", "restore", "torch.load")


def run(options: Options) -> Report:
    """Measures everything, with one intra-op thread."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    report = Report("checkpoint", metrics_from=GOALS)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=os.environ.get("CHECKPOINT_DIRECTORY")))
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # async_save asks for one
    table = Table(title="seconds, median (one intra-op thread)")
    for title in ("state", *COLUMNS):
        table.add_column(title, justify="right")
    sizes = [(64, "many"), JUDGED] if options.quick else [(64, "few"), (64, "many"), JUDGED, (256, "many"), (1024, "few")]
    try:
        for megabytes, kind in sizes:
            blocks = (9 if options.quick else 25) if (megabytes, kind) == JUDGED else 5
            (place := directory / f"{megabytes}-{kind}").mkdir()
            times = measure(place, state(megabytes, kind), blocks)
            shutil.rmtree(place)
            if (megabytes, kind) == JUDGED:
                judge(report, times)
            medians = [f"{float(np.median(np.concatenate(times[name]))):.4f}" for name in COLUMNS]
            table.add_row(f"{megabytes} MB, {kind}", *medians)
        found = paced_elsewhere(directory, JUDGED[0], 12 if options.quick else 20)
        report.add("stall_ratio_paced", [stall / float(np.median(found["memcpy"])) for stall in found["stalls"]])
        report.add("host_memory_ratio", found["memory"])
        Console(width=160).print(table)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(directory, ignore_errors=True)
    return report


if __name__ == "__main__":
    main(run, __doc__)
