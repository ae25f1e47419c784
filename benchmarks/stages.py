"""Four stages of a pipeline as four processes without a cluster: the product's own step, links, log, replay and teams.

Every process runs the same script, `work`; what it measures comes back as plain numbers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import TensorLog
from raytrain_ft.training import process_group
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.edges import Past
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links, Switchboard
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.replay import replay
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.step import Replica
from raytrain_ft.training.team import Team

STAGES = 4
STEP_S = 0.5
"""Of a paced pipeline, without what it costs to keep it together. Steps of seconds, as in the paper, would take hours."""
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline to measure.

    Attributes:
        micro_batches: of a step; size: samples of each; tokens, hidden: of what crosses between stages, in fp32.
        forward_s, backward_s: how long a stage sleeps over a micro-batch, as an accelerator would; 0 computes instead.
    """

    micro_batches: int
    size: int = 4
    tokens: int = 64
    hidden: int = 256
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batches * self.size

    @property
    def log_bytes(self) -> int:
        """Bytes that cross the boundaries in a step: activations one way, gradients the other (SWIFT, table 3)."""
        return 2 * self.batch * self.tokens * self.hidden * 4 * (STAGES - 1)


def paced(micro_batches: int) -> Shape:
    """A pipeline that sleeps: a backward pass for twice as long as a forward pass."""
    forward_s = STEP_S / (micro_batches + STAGES - 1) / 3
    return Shape(micro_batches, forward_s=forward_s, backward_s=2 * forward_s)


class _Sleep(torch.autograd.Function):
    """Takes the time of an accelerator's pass, and leaves the processor to others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Block(nn.Module):
    """A stage's layers. A paced one computes next to nothing: an accelerator would not keep the host busy either."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.scale = nn.Parameter(torch.ones(shape.hidden))
        wide = shape.hidden * 4
        layers = [nn.Linear(shape.hidden, wide), nn.GELU(), nn.Linear(wide, shape.hidden)]
        self.inner = nn.Sequential(*([] if shape.forward_s > 0 else layers))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[size, tokens, hidden] both ways."""
        if self.shape.forward_s > 0:
            return _Sleep.apply(x + self.dropout(self.scale), self.shape.forward_s, self.shape.backward_s)  # pyright: ignore
        return x + self.dropout(self.inner(x * self.scale))


class Staged(ft.TrainTask):
    """One block a stage."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def model(self, stage: int) -> nn.Module:
        """The block of a stage."""
        return Block(self.shape)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=1e-4)

    def dataset(self) -> TensorDataset:
        """Four steps' worth of noise."""
        return TensorDataset(torch.randn(4 * self.shape.batch, self.shape.tokens, self.shape.hidden))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        """Its mean square."""
        return output.square().mean()


class Bench:
    """What one of the processes has at hand.

    Attributes:
        world: the group of all stages; rank: this one's stage.
    """

    def __init__(self, world: FencedGroup, directory: Path, shape: Shape) -> None:
        self.world, self.directory, self.shape = world, directory, shape
        self.rank = world.rank()
        self._logs = 0

    def replica(self, stage: int | None = None) -> Replica:
        """A new one, always with the same first weights."""
        shape = self.shape
        pipeline = PipelineSettings(stages=STAGES, micro_batches=shape.micro_batches)
        settings = StepSettings(seed=1, pipeline=pipeline)
        sampling = Sampling(4 * shape.batch, shape.batch, seed=1, shuffle=True, drop_last=True)
        torch.manual_seed(1)
        stage = self.rank if stage is None else stage
        return build_replica(Staged(shape), sampling, settings, use_gpu=False, undo_mode="exact", probe=None, stage=stage)

    def open_log(self, **how: Any) -> TensorLog:
        """A log of its own directory; `how` as `TensorLog` takes it."""
        self._logs += 1
        return TensorLog(self.directory / f"log-{self._logs}", f"w{self.rank}", **how)

    def live(self, log: TensorLog | None) -> Links:
        """For training, with a log or without."""
        edges = frozenset(range(STAGES - 1)) if log is not None else frozenset()
        return Switchboard(self.world, Solo(self.world.fence), STAGES, edges, log).live()

    def logged(self, number: int, stage: int, team: Team | None = None) -> Links:
        """For a replay of this stage from log `number`."""
        board = Switchboard(self.world, Solo(self.world.fence), STAGES, frozenset(), None, stage)
        past = Past(LogReader(self.directory / f"log-{number}"), sys.maxsize, exact=team is None or team.exact)
        return board.replay(past, frozenset({stage}), team)

    def team(self, members: list[int], name: str) -> FencedGroup | None:
        """A group of some ranks; None for who is not of it."""
        if self.rank not in members:
            return None
        store = dist.FileStore(str(self.directory / name), len(members))
        fence = self.world.fence
        return process_group.build(
            store, members.index(self.rank), len(members), fence, host="127.0.0.1", timeout=TIMEOUT, default=False
        )

    def barrier(self) -> None:
        """All have come to here."""
        self.world.all_reduce(torch.zeros(1)).wait()

    def start(self, replica: Replica) -> None:
        """The replica's loader begins where it stands."""
        replica.loader.start(replica.state.position, 0, 1, self.shape.micro_batches)

    def steps(self, replica: Replica, links: Links, count: int) -> list[float]:
        """So many steps; the seconds of each."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            replica.train_step(links)
            times.append(time.perf_counter() - began)
        return times

    def replay(self, replica: Replica, links: Links, until: int) -> float:
        """Seconds of a replay up to here."""
        began = time.perf_counter()
        replay(replica, links, until, self.shape.micro_batches)
        return time.perf_counter() - began


Work = Callable[[Bench], Any]


def _enter(rank: int, directory: str, shape: Shape, work: Work, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", STAGES)
    world = process_group.build(store, rank, STAGES, Fence(1), host="127.0.0.1", timeout=TIMEOUT)
    bench = Bench(world, Path(directory), shape)
    answers.put((rank, work(bench)))
    bench.barrier()
    answers.close()
    answers.join_thread()
    os._exit(0)  # threads that wait inside gloo cannot be joined


def run(shape: Shape, work: Work, timeout_s: float = 600.0) -> list[Any]:
    """What `work` returns in each of the stages' processes.

    Raises:
        TimeoutError: it takes longer than `timeout_s`. RuntimeError: a process failed.
    """
    with _directory() as directory:
        context = mp.get_context("spawn")
        answers = context.Queue()
        workers = mp.start_processes(_enter, (directory, shape, work, answers), STAGES, join=False, start_method="spawn")
        assert workers is not None
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(found) < STAGES:
                if answers.empty():
                    workers.join(timeout=0.05)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the stages did not come to their end within {timeout_s:g} s")
                    continue
                rank, answer = answers.get()
                found[rank] = answer
            while not workers.join(timeout=1.0) and time.monotonic() < deadline:
                pass
        finally:
            for process in workers.processes:
                process.kill()
        return [found[rank] for rank in range(STAGES)]


@contextmanager
def _directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-stages-") as directory:
        yield directory
