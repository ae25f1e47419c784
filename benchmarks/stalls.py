"""What a loop feels of its checkpoints: a step that sleeps as long as an accelerator would compute, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.saving import MB, seconds, state
from raytrain_ft.policy.tuner import Tuner
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.training.checkpointer import Checkpointer
from raytrain_ft.training.layout import total_size
from raytrain_ft.training.settings import Target

STEP_S = 0.15
"""What an accelerator would compute."""


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
    target = Target(place=storage.place, owner="paced", epoch=held.owner.epoch)
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
        "import json, sys; from pathlib import Path; from benchmarks.stalls import paced; "
        "print(json.dumps(paced(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))"
    )
    arguments = [sys.executable, "-c", code, str(directory), str(megabytes), str(checkpoints)]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout)
