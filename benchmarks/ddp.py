"""The yardstick: plain torch `DistributedDataParallel` over gloo, in its own processes. It survives no failure.

    python -m benchmarks.ddp --quick      # DDP against DDP: how far a ratio strays from 1 on this machine

`start_blocks` returns at once, so that another side (see `benchmarks.turns`) can live at the same time and take turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Options, Report, main, noise_floor, paired_ratio
from benchmarks.models import MEDIUM, SMALL, Work, batch_of
from benchmarks.turns import BlockClock, BlockTimes, Turns, read_blocks

SIDE = "ddp"


def _worker(rank: int, num_workers: int, work: Work, store: str, turns: Turns, side: str, plan: tuple[int, int]) -> None:
    """One DDP rank: build everything, then run `plan` = (blocks, steps per block) under the clock."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers, timeout=timedelta(seconds=120)
        )
        model = DistributedDataParallel(work.model(), bucket_cap_mb=work.bucket_mb)
        optimizer = work.optimizer(model)
        dataset = work.dataset()
        clock = BlockClock(turns, side, rank, *plan)
        for step in range(clock.num_ticks):
            inputs, targets = batch_of(dataset, step, rank, num_workers, work.batch_per_worker)
            optimizer.zero_grad()
            output = model(inputs)
            clock.tick()
            work.loss(output, targets).backward()
            optimizer.step()
        dist.destroy_process_group()
    except BaseException as error:
        turns.stop(f"{side} rank {rank} failed: {error!r}")  # nobody should wait for us until the deadline
        raise


class RunningBlocks:
    """DDP workers that run, block by block, as their turns come."""

    def __init__(self, processes: ProcessContext, turns: Turns, side: str, blocks: int) -> None:
        self._processes, self._turns, self._side, self._blocks = processes, turns, side, blocks

    def result(self, timeout_s: float = 600.0, failed: Callable[[], str | None] = lambda: None) -> list[BlockTimes]:
        """The times of every block, once all are run. The first block is a warm-up: drop it.

        `failed` tells why another side gave up, if it did: then there is nothing to wait for.
        """
        deadline = time.monotonic() + timeout_s
        while not self._processes.join(timeout=1.0):
            if (why := failed()) is not None:
                raise RuntimeError(why)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._side} has not finished its {self._blocks} blocks in {timeout_s:g} s")
        return read_blocks(self._turns, self._side, self._blocks)


@contextmanager
def start_blocks(
    num_workers: int, work: Work, blocks: int, steps_per_block: int, turns: Turns, side: str = SIDE
) -> Iterator[RunningBlocks]:
    """Start the workers of one side; those still alive at the end are killed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers
    with tempfile.TemporaryDirectory(prefix="ddp-") as directory:
        store = str(Path(directory) / "store")  # a file: no port to collide on
        arguments = (num_workers, work, store, turns, side, (blocks, steps_per_block))
        processes = spawn(_worker, args=arguments, nprocs=num_workers, join=False, daemon=True)
        assert processes is not None  # join=False
        try:
            yield RunningBlocks(processes, turns, side, blocks)
        finally:
            for process in filter(None, processes.processes):
                if process.is_alive():
                    process.kill()
                process.join(10.0)


def run_blocks(
    num_workers: int, work: Work, blocks: int, steps_per_block: int, turns: Turns | None = None, side: str = SIDE
) -> list[BlockTimes]:
    """Run one side to its end. Without `turns` it is alone."""
    with ExitStack() as stack:
        if turns is None:
            turns = stack.enter_context(Turns.create([(side, num_workers)]))
        return stack.enter_context(start_blocks(num_workers, work, blocks, steps_per_block, turns, side)).result()


def run_against_itself(
    num_workers: int, work: Work, blocks: int, steps_per_block: int
) -> tuple[list[BlockTimes], list[BlockTimes]]:
    """An A/A run: two sets of the same workers in turns. The first block, a warm-up, is dropped."""
    sides = ("ddp", "ddp again")
    with (
        Turns.create([(name, num_workers) for name in sides]) as turns,
        start_blocks(num_workers, work, blocks, steps_per_block, turns, sides[0]) as once,
        start_blocks(num_workers, work, blocks, steps_per_block, turns, sides[1]) as again,
    ):
        return once.result()[1:], again.result()[1:]


def measure(options: Options) -> Report:
    """DDP against DDP, with two and with four workers."""
    report = Report("ddp against itself")
    blocks, steps = (9, 5) if options.quick else (41, 5)
    floors: list[float] = []
    for num_workers, work in ((2, SMALL), (4, MEDIUM)):
        once, again = run_against_itself(num_workers, work, blocks, steps)
        first, second = [block.slowest for block in once], [block.slowest for block in again]
        report.add(f"ddp_step_ms_{num_workers}_workers", [1e3 * step for block in first + second for step in block])
        report.add(f"ddp_ratio_to_itself_{num_workers}_workers", paired_ratio(first, second, options.seed))
        floors.append(noise_floor(first, second, options.seed))
    report.noise_floor = max(floors)
    return report


if __name__ == "__main__":
    main(measure, __doc__)
