"""Ray Train with torchft: survivors keep going, only the lost replica group is replaced, the step at hand is dropped.

    python -m benchmarks.peers.ray_torchft --quick

Measured: what torchft's quorum and vote cost per step against plain DDP, and the time from a SIGKILL to full strength.
torchft is optional (`pip install "raytrain_ft[bench]"`): without it, or if it cannot run here, the results say why.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import ray.train
import torch
from ray.train.torch import TorchTrainer

from benchmarks.ddp import start_blocks
from benchmarks.harness import Estimate, Options, Report, estimate, main, paired_ratio
from benchmarks.models import RECOVERY, SMALL, Work, batch_of
from benchmarks.peers.cluster import (
    fitting,
    local_cluster,
    one_worker_per_node,
    reason,
    run_config,
    why_ended,
    why_failed,
)
from benchmarks.peers.kills import Journal, Kill, Killer, summary
from benchmarks.turns import BlockClock, BlockTimes, Turns, read_blocks

SIDE = "torchft"
# How long a quorum waits for replicas that live but are late. torchft's default, 100 ms, is less than the jitter of a
# step where workers share cores: every quorum then leaves somebody out, who is healed in the next, and four workers
# never work together. Longer than a few steps would only delay the survivors of a loss.
JOIN_TIMEOUT_MS = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """torchft's and DDP's blocks, taken in turns, without the first (a warm-up); or why there are none."""

    torchft: list[BlockTimes] = field(default_factory=list)
    ddp: list[BlockTimes] = field(default_factory=list)
    why: str | None = None

    def ratio(self, seed: int = 0) -> Estimate:
        """Step time of torchft / of DDP, each step as long as its slowest rank."""
        if self.why is not None:
            return Estimate(None, float("nan"), float("nan"), 0, self.why)
        return paired_ratio([block.slowest for block in self.torchft], [block.slowest for block in self.ddp], seed)


@dataclass(frozen=True, slots=True)
class Replacements:
    """What torchft's replacements cost, kill by kill; or why none was measured."""

    kills: list[Kill] = field(default_factory=list)
    why: str | None = None

    @property
    def full_strength_s(self) -> list[float]:
        """Seconds from each kill until a step was completed by all workers again."""
        return [kill.full_strength_s for kill in self.kills]

    def full_strength(self, seed: int = 0) -> Estimate:
        """The median of those, in seconds."""
        if self.why is not None:
            return Estimate(None, float("nan"), float("nan"), 0, self.why)
        return estimate(self.full_strength_s, seed=seed)


def _survivable_ddp() -> type[torch.nn.parallel.DistributedDataParallel]:
    """torchft's DDP, with the one change that lets a survivor outlive a lost peer.

    In torchft 0.2.0, after gloo reports a broken connection, the hook finds no future behind the failed work and raises
    (`assert fut._fut`) inside the survivor's backward pass; Ray Train then restarts everybody. Here a failed bucket is
    handed back as it is, which is what torchft means to do: its vote drops the step anyhow. The peer at its best.
    """
    import torchft

    class SurvivableDDP(torchft.DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # torch compares a hook's annotations with its own: strings will not do
            work = state.allreduce(bucket.buffer())
            work.wait()
            reduced = getattr(work.get_future(), "_fut", None)
            if reduced is None:  # the collective failed, now or in an earlier bucket
                reduced = torch.futures.Future()
                reduced.set_result(bucket.buffer())
            return reduced

    return SurvivableDDP


class Replica:
    """One worker's model under torchft, put together as in the example that Ray Train ships."""

    def __init__(self, work: Work, min_replicas: int) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.checkpointing.pg_transport import PGTransport

        torch.set_num_threads(1)
        context = ray.train.get_context()
        self.rank, self.world_size, self.work = context.get_world_rank(), context.get_world_size(), work
        module = work.model()
        self.optimizer = work.optimizer(module)
        self.dataset = work.dataset()

        def load_state_dict(state: dict[str, Any]) -> None:
            module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        group = ProcessGroupGloo(timeout=timedelta(seconds=30))
        self.manager = Manager(
            pg=group,
            min_replica_size=min_replicas,
            load_state_dict=load_state_dict,
            state_dict=lambda: {"model": module.state_dict(), "optimizer": self.optimizer.state_dict()},
            world_size=1,  # each worker is a replica group of its own
            rank=0,
            replica_id=f"replica_{self.rank}",
            hostname="127.0.0.1",
            timeout=timedelta(seconds=60),
            checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=30), device=torch.device("cpu")),
        )
        self.model = _survivable_ddp()(self.manager, module, bucket_cap_mb=work.bucket_mb)

    def step(self, data_step: int, before_loss: Callable[[], None] = lambda: None) -> bool:
        """One step, as `torchft.Optimizer` does it. Returns whether it was committed."""
        self.manager.start_quorum()
        self.optimizer.zero_grad()
        inputs, targets = batch_of(self.dataset, data_step, self.rank, self.world_size, self.work.batch_per_worker)
        output = self.model(inputs)
        before_loss()
        self.work.loss(output, targets).backward()
        committed = self.manager.should_commit()
        if committed:
            self.optimizer.step()
        return committed


def timed_loop(config: dict[str, Any]) -> None:
    """What runs in every worker to compare step times: blocks of steps, in turns with the other side."""
    turns: Turns = config["turns"]
    try:
        replica = Replica(config["work"], min_replicas=ray.train.get_context().get_world_size())
        clock = BlockClock(turns, SIDE, replica.rank, config["blocks"], config["steps_per_block"])
        for step in range(clock.num_ticks):
            if not replica.step(step, before_loss=clock.tick):
                raise RuntimeError(f"torchft dropped step {step} although nobody had failed")
        replica.manager.shutdown()
    except BaseException as error:
        turns.stop(f"{SIDE} failed: {error!r}")
        raise


def killed_loop(config: dict[str, Any]) -> None:
    """What runs in every worker while workers are killed: steps until told to stop, each noted in the journal."""
    with Journal(config["directory"]) as journal:
        _run_until_stopped(Replica(config["work"], min_replicas=1), journal)


def _run_until_stopped(replica: Replica, journal: Journal) -> None:
    """Steps, committed or dropped, until the killer has said at which to stop."""
    while (end := journal.stop_at()) is None or replica.manager.current_step() < end:
        if replica.step(replica.manager.current_step()):
            journal.ended(replica.manager.current_step() - 1, replica.manager.num_participants())
        else:
            journal.ended(replica.manager.current_step(), 0)
    replica.manager.shutdown()


def _trainer(
    loop: Callable[[dict[str, Any]], None], config: dict[str, Any], num_workers: int, min_replicas: int, directory: str
) -> TorchTrainer:
    """Ray Train with one replica group per worker."""
    from ray.train.v2.torch.torchft_config import TorchftConfig

    return TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=TorchftConfig(
            lighthouse_kwargs={
                "bind": "127.0.0.1:0",
                "min_replicas": min_replicas,
                "join_timeout_ms": JOIN_TIMEOUT_MS,
            },
            backend="gloo",
        ),
        scaling_config=one_worker_per_node(num_workers),
        run_config=run_config(directory),
    )


def killed_trainer(work: Work, num_workers: int, directory: str) -> TorchTrainer:
    """Training whose workers may be killed: one replica is enough to go on, and all keep journals in the directory."""
    return _trainer(killed_loop, {"work": work, "directory": directory}, num_workers, 1, directory)


def _or_why(measurement: Callable[[], T], absent: Callable[[str], T]) -> T:
    """The measurement, or the reason in words why torchft cannot be measured here."""
    if importlib.util.find_spec("torchft") is None:
        return absent("torchft is not installed")
    try:
        return measurement()
    except Exception as error:
        return absent(f"torchft did not run: {reason(error)}")


def measure_step_time(
    num_workers: int = 2, work: Work = SMALL, blocks: int = 41, steps_per_block: int = 5, timeout_s: float = 120.0
) -> StepTimes:
    """Step times of Ray Train + torchft and of plain DDP, in turns (A/B/A/B). `timeout_s` bounds each turn."""

    def measurement() -> StepTimes:
        with (
            local_cluster(num_workers),
            tempfile.TemporaryDirectory(prefix="torchft-") as directory,
            Turns.create([(SIDE, num_workers), ("ddp", num_workers)], timeout_s) as turns,
        ):
            config = {"work": work, "turns": turns, "blocks": blocks, "steps_per_block": steps_per_block}
            trainer = _trainer(timed_loop, config, num_workers, num_workers, directory)
            with fitting(trainer) as running, start_blocks(num_workers, work, blocks, steps_per_block, turns) as ddp:
                ddp_blocks = ddp.result(timeout_s * (1 + blocks), failed=lambda: why_failed(running))
                ray.get(running, timeout=timeout_s)
                return StepTimes(read_blocks(turns, SIDE, blocks)[1:], ddp_blocks[1:])

    return _or_why(measurement, lambda why: StepTimes(why=why))


def measure_replacement(
    num_kills: int, num_workers: int = 4, work: Work = RECOVERY, seed: int = 0, timeout_s: float = 120.0
) -> Replacements:
    """SIGKILL a worker `num_kills` times, at random phases, and time torchft's way back to full strength.

    `timeout_s` bounds the start and each recovery.
    """

    def measurement() -> Replacements:
        with local_cluster(num_workers), tempfile.TemporaryDirectory(prefix="torchft-") as directory:
            trainer = killed_trainer(work, num_workers, directory)
            with fitting(trainer) as running:
                killer = Killer(directory, num_workers, lambda: why_ended(running), seed, timeout_s)
                kills = [killer.kill_one() for _ in range(num_kills)]
                killer.stop()
                ray.wait([running], timeout=timeout_s)
        return Replacements(kills)

    return _or_why(measurement, lambda why: Replacements(why=why))


def measure(options: Options) -> Report:
    """torchft alone: its price per step, and its way back."""
    report = Report("Ray Train + torchft")
    blocks = 9 if options.quick else 41
    times = measure_step_time(blocks=blocks)
    report.add("torchft_step_ratio_vs_ddp_2_workers", times.ratio(options.seed))
    for num_workers in (2, 4):
        replacements = measure_replacement(2 if options.quick else 6, num_workers, seed=options.seed)
        report.add(f"torchft_full_strength_s_{num_workers}_workers", replacements.full_strength(options.seed))
        if replacements.kills:
            report.note(summary(f"Ray Train + torchft, {num_workers} workers", replacements.kills))
    return report


if __name__ == "__main__":
    main(measure, __doc__)
