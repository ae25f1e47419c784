"""A checkpoint on a disk, and what it is compared with, in turns: on the same bytes, disk and minute."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from raytrain_ft.storage import checkpoint, lock, selection
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.job import Job
from raytrain_ft.storage.persister import Persister, SharedMemory
from raytrain_ft.training.layout import Layout, share
from raytrain_ft.training.memory import STREAMING
from raytrain_ft.training.restore import fill
from raytrain_ft.training.snapshot import Copy
from raytrain_ft.training.stay import Stay

MB = 2**20
Tensors = dict[str, Tensor]
Pairs = list[tuple[str, Tensor]]
Times = dict[str, list[list[float]]]
"""By what was timed: of each block of turns, the seconds of each time."""


WIDTHS = {64: 128, 256: 256, 1024: 512}
"""Of the transformer whose state, with AdamW's, takes so many MB."""
EACH = """
#include <string.h>

void copy_each(char *to, char **from, size_t *sizes, long count)
{
    for (long n = 0; n < count; to += sizes[n++])
        memcpy(to, from[n], sizes[n]);
}
"""


def state(megabytes: int, kind: str) -> Tensors:
    """Random tensors: a few of 16 MB each, or ten thousand of all sizes. Or a transformer of 28 layers and AdamW's state: 1,344
    tensors, of which the three quarters that are biases, norms and counters hold a hundredth of the bytes."""
    generator = torch.Generator().manual_seed(0)
    if kind == "model":
        return _trained(WIDTHS[megabytes])
    if kind == "few":
        return {f"layer.{i}": torch.rand(2048, 2048, generator=generator) for i in range(megabytes // 16)}
    unit = megabytes * MB // 4 // 10_000 // 2
    return {f"layer.{i}": torch.rand(1 + unit * (i % 4 + 1) * 4 // 5, generator=generator) for i in range(10_000)}


def _trained(width: int) -> Tensors:
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(28))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    weights = {f"model/{name}": p.data for name, p in model.named_parameters()}
    moments = ((name, optimizer.state[p]) for name, p in model.named_parameters())
    return weights | {f"optimizer/{name}/{key}": value for name, held in moments for key, value in held.items()}


def as_workers(module: str) -> None:
    """Starts a benchmark again in the environment that a run's workers have, which counts from a process's start on."""
    if not os.environ.items() >= STREAMING.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | STREAMING)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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
        self._layout: Layout | None = None
        self.job: Job | None = None

    def snapshot(self) -> None:
        """From the decision to the moment from which the weights may change."""
        with Stay() as stay:
            mine = share(self.pairs, 0, 1, before=self._layout)
            self._layout = mine.layout
            copy = Copy(mine, self.memory, lambda _: None, stay=stay)
            copy.start()
        copy.wait(lambda: None)
        self.job = Job(
            place=self.storage.place,
            owner="benchmark",
            epoch=self.lock.owner.epoch,
            step=next(self._steps),
            incarnation=1,
            number=0,
            count=1,
            pieces=mine.layout.pieces,
            size=mine.layout.size,
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
        manifest = next(selection.select(self.storage, print))
        fill(self.targets, checkpoint.map_shards(self.storage, manifest))

    def file(self) -> Path:
        """The newest shard."""
        return next(Path(self.storage.uri).glob("step-*/*.arrow"))

    def close(self) -> None:
        """Ends the persister and gives the memory back."""
        self.persister.close(30.0)
        self.lock.release()
        self.memory.close()


def _compiled(directory: Path) -> Callable[[int, int, int, int], None] | None:
    """`EACH`; None without a compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    (directory / "each.c").write_text(EACH)
    library = directory / "each.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, directory / "each.c"], check=True, timeout=60)
    function = ctypes.CDLL(str(library)).copy_each
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    function.restype = None
    return function


class Peers:
    """The others, each of which replaces its own file or directory."""

    def __init__(self, directory: Path, tensors: Tensors) -> None:
        self.directory = directory
        self.tensors = tensors
        self.flat = np.concatenate([tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()])
        self.spare = np.ones_like(self.flat)
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self._places = np.array([tensor.data_ptr() for tensor in tensors.values()], np.uint64)
        self._sizes = np.array([tensor.nbytes for tensor in tensors.values()], np.uint64)
        self.copy_each = _compiled(directory)

    def memcpy(self) -> None:
        """The C library's, of all bytes at once, as if they were one block."""
        ctypes.memmove(self.spare.ctypes.data, self.flat.ctypes.data, self.flat.nbytes)

    def memcpy_each(self) -> None:
        """The C library's, of each tensor from where it lies: nothing that leaves them there takes less on one thread."""
        assert self.copy_each is not None
        self.copy_each(self.spare.ctypes.data, self._places.ctypes.data, self._sizes.ctypes.data, len(self._sizes))

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
            if peers.copy_each is not None:
                turn.setdefault("memcpy each", []).append(seconds(peers.memcpy_each))
        peers.forget("raw", "saved.pt", "dcp", "async")
        for name in ("write", "persist", "persist", "write", "write", "persist"):
            if name == "write":
                turn.setdefault(name, []).append(seconds(peers.write))
            else:
                copied = seconds(ours.snapshot)
                turn.setdefault(name, []).append(seconds(ours.persist))
                turn.setdefault("durable", []).append(copied + turn[name][-1])
            ours.settle()
            peers.forget("raw")
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
