"""What a user sets that Ray Train has no words for; `ray_config` has the rest.

Nothing here loads Ray Train, which takes half a second: a worker needs none of it to load a module that has a task in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import check_types, knows_its_names
from raytrain_ft.places import Place
from raytrain_ft.policy.schedule import MOST_MICRO_BATCHES, Schedule

Strategy = Literal["auto", "replication", "logging", "checkpoint", "snapshot", "lossy", "rollback", "skip"]
NOTICE_SOURCES = ("aws", "gcp", "azure", "ray", "sigterm")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of runs become names of files and actors, so they are checked against this allow-list."""


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How the model is spread: over stages of a pipeline, and each stage over replicas.

    Attributes:
        pipeline_parallel_degree: stages of the model; 1 is no pipeline. Divides `num_workers`.
        num_pp_microbatches: into how many micro-batches each replica cuts its share of a step; by default twice the stages.
        schedule: "1f1b", "gpipe" or "zero_bubble", as in torch.distributed.pipelining.
        num_pp_chunks: how many parts of the model each stage has, so that it takes part in every round of as many through the
            pipeline (interleaved schedules).
        split: "task" asks `TrainTask.model(stage)` for every part; "auto" cuts the `torch.nn.Sequential` that `model(0)`
            returns into parts of about equal cost, which is counted; a tuple says which layer begins each further part.
    """

    pipeline_parallel_degree: int = 1
    num_pp_microbatches: int | None = None
    schedule: Schedule = "1f1b"
    num_pp_chunks: int = 1
    split: Literal["task", "auto"] | tuple[int, ...] = "task"

    def __post_init__(self) -> None:
        check_types(self, ParallelismConfig)
        for name in ("pipeline_parallel_degree", "num_pp_microbatches", "num_pp_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"ParallelismConfig({name}={value!r}): use a whole number of at least 1")
        stages, chunks, cuts = self.pipeline_parallel_degree, self.num_pp_chunks, self.split
        if chunks > 1 and stages == 1:
            raise ConfigError(f"ParallelismConfig(num_pp_chunks={chunks}): chunks are of stages: set pipeline_parallel_degree")
        count = stages * chunks - 1
        if isinstance(cuts, tuple) and (len(cuts) != count or list(cuts) != sorted(set(cuts)) or any(cut < 1 for cut in cuts)):
            raise ConfigError(
                f"ParallelismConfig(split={cuts!r}): {stages} stages{f' of {chunks} chunks' if chunks > 1 else ''} need "
                f"{count} rising numbers of layers, from 1 on"
            )
        if self.micro_batches * chunks > MOST_MICRO_BATCHES:
            most = MOST_MICRO_BATCHES // chunks
            raise ConfigError(f"ParallelismConfig(num_pp_microbatches={self.micro_batches}): use {most} at most")

    @property
    def micro_batches(self) -> int:
        """Of each step and replica."""
        return self.num_pp_microbatches or 2 * self.pipeline_parallel_degree


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How what crosses between the stages of a pipeline is logged, so that a lost stage can be replayed (SWIFT, section 5).

    Attributes:
        enabled: without a log, the loss of a stage that has no replica takes everybody back to the newest checkpoint.
        memory_bytes: how much may wait to be written on each worker; beyond that training waits, which is counted. A quarter is
            written only if a loss is noticed before the next checkpoint is durable.
        quota_bytes: how much each worker may have on the disk, its parts of the checkpoints beside it included; beyond that it
            stops logging until the next checkpoint.
        compression: "lz4" or "zstd", lossless; None writes the bytes as they are.
        synchronous: write before sending. Only to see what that costs.
        budget_bytes: of log between two checkpoints, over all workers: those boundaries are logged that recover fastest within
            it. The stages between two logged boundaries go back and replay together.
        recovery_target: of replay per lost step, the mean over which stage is lost: as little is logged as meets it. At most
            one of the two; with neither, every boundary between nodes is logged. In any case not those between stages that
            have replicas on other nodes, unless the strategy is "logging" or there are no checkpoints.
    """

    enabled: bool = True
    memory_bytes: int = 256 * 2**20
    quota_bytes: int | None = None
    compression: Literal["lz4", "zstd"] | None = None
    synchronous: bool = False
    budget_bytes: int | None = None
    recovery_target: timedelta | None = None

    @property
    def selective(self) -> bool:
        """Whether only some boundaries may be logged."""
        return self.budget_bytes is not None or self.recovery_target is not None

    def __post_init__(self) -> None:
        check_types(self, LogConfig)
        target = self.recovery_target
        if target is not None and target <= timedelta():
            raise ConfigError(f"LogConfig(recovery_target={target!r}): use a timedelta longer than zero")
        for name in ("memory_bytes", "quota_bytes", "budget_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"LogConfig({name}={value!r}): use a number of bytes greater than 0")
        if self.budget_bytes is not None and target is not None:
            raise ConfigError("LogConfig: budget_bytes and recovery_target exclude each other: give one of them")
        if self.selective and not self.enabled:
            raise ConfigError("LogConfig(enabled=False): there is no log for budget_bytes or recovery_target to choose")


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How losses are met.

    Attributes:
        strategy: "auto" takes the cheapest that keeps the result exact: from replicas; if none is left, in a pipeline by replay
            from the log, else from a checkpoint; "logging" keeps the log even where that does not seem worth its cost, or
            replicas make it needless;
            "replication" insists on replicas; "checkpoint" has everybody go back to the newest checkpoint after every loss;
            "snapshot" to the newest copy in the memory of another node, and writes no checkpoints to storage. Three go on
            without redoing what cannot be completed, and say what that cost: "lossy" has the survivors finish the step with
            their own gradients; "rollback" keeps a survivor's partial update and reads the same batch again; "skip" leaves the
            step out.
        quorum: of a batch's samples, the share that "lossy" needs to be left; with fewer the step is redone.
        lost_samples: what becomes of those that "lossy", "skip" or a replica told to sleep at once lost: "drop" lists them in
            the record, "return" also reads them again at the end of their epoch, which is that much longer.
        log: of what crosses between the stages of a pipeline.
        replay_workers: how many replay one lost stage: its replacement, and survivors that take some of the micro-batches.
        replay_sums: "exact" adds their gradients in the order of the micro-batches, so that the result is the same to the bit;
            "fast" as they come, the same up to rounding.
        update: "barrier" updates when all gradients are reduced, and never needs an undo; "wait_free" (SWIFT's) updates
            each bucket as soon as it is reduced; a loss in the backward pass may then have to be undone.
        undo: with wait-free updates: "exact" refuses optimizers whose update cannot be inverted; "replay" also allows
            those whose inverse is only good for applying the same gradient again (AMSGrad, Adamax).
        num_spares: warm workers that wait beyond those that train.
        replacement: what survivors do when no spare is ready: "wait" for a new worker (the result stays bit-identical),
            or "shrink" at once and grow again later.
        replacement_timeout: how long to wait for it before going on with fewer.
        heartbeat_interval, heartbeat_timeout: a worker that was silent for the timeout is asked directly ...
        probe_timeout: ... and is lost if it does not answer within this.
        preemption: which notices are heeded that a node or a worker will be taken away: some of "aws", "gcp", "azure" (their
            metadata services), "ray" (`ray drain-node`, autoscalers) and "sigterm"; "auto" is the last two and the cloud that
            is found; None heeds none.
        on_notice: what a worker with notice does until it leaves: "train" on, which keeps the result the same to the bit, or
            "sleep", so that strategy="lossy" loses no sample with it if its node goes sooner than was said; not in a pipeline.
        sigterm_grace: how long a worker goes on after SIGTERM at most: as long as whoever sends it waits before SIGKILL.
        hang_timeout: a step that makes no progress for this long, and for ten times the longest step so far, is suspect.
        fence_timeout: the least time that a survivor has to leave its step (three times the longest step if longer; in the
            first step `hang_timeout`; where somebody may be building a model, three times as long as that ever took).
        phase_timeout: how long each exchange of a recovery (load, transfer, hand-over), and saving the final state, may take
            before it is tried in another way; by default a minute, and another for every 100 million parameters. With every
            attempt in a row it has twice as long, up to eight times.
        schedule_timeout: how long to wait at the start for enough workers, and before that for the supervisor (at least two
            minutes).
        setup_timeout: how long a worker may take to build its model and to open its dataset before it is given up. If that
            takes minutes, `schedule_timeout` must allow for it, and `replacement_timeout` where there may be no spare.
        lease: a worker that has not reached the supervisor for this long stops itself.
        driver_timeout: a run that nobody has followed for this long, neither the job that started it nor `raytrain-ft attach`,
            saves a checkpoint and ends. With hours, a run outlives its driver.
        stop_timeout: how long a run that is to end before its time (Ctrl-C, SIGTERM, `ray job stop`, no driver) may take for a
            last checkpoint; by default half a minute, and another for every 100 million parameters.
        max_fruitless_recoveries: recoveries in a row without a committed step before the run gives up. One that a further
            loss broke off does not count, nor one in which a newcomer failed that the others can do without.
    """

    strategy: Strategy = "auto"
    quorum: float = 0.5
    lost_samples: Literal["drop", "return"] = "drop"
    log: LogConfig = field(default_factory=LogConfig)
    replay_workers: int = 1
    replay_sums: Literal["exact", "fast"] = "exact"
    update: Literal["barrier", "wait_free"] = "barrier"
    undo: Literal["exact", "replay"] = "exact"
    num_spares: int = 1
    replacement: Literal["wait", "shrink"] = "wait"
    replacement_timeout: timedelta = timedelta(seconds=60)
    heartbeat_interval: timedelta = timedelta(milliseconds=250)
    heartbeat_timeout: timedelta = timedelta(milliseconds=700)
    probe_timeout: timedelta = timedelta(milliseconds=500)
    preemption: Literal["auto"] | tuple[str, ...] | None = "auto"
    on_notice: Literal["train", "sleep"] = "train"
    sigterm_grace: timedelta = timedelta(seconds=30)
    hang_timeout: timedelta = timedelta(seconds=60)
    fence_timeout: timedelta = timedelta(seconds=10)
    phase_timeout: timedelta | None = None
    schedule_timeout: timedelta = timedelta(seconds=120)
    setup_timeout: timedelta = timedelta(seconds=120)
    lease: timedelta = timedelta(seconds=120)
    driver_timeout: timedelta = timedelta(seconds=15)
    stop_timeout: timedelta | None = None
    max_fruitless_recoveries: int = 10

    def __post_init__(self) -> None:
        wanted = self.preemption
        are_sources = isinstance(wanted, tuple | list | set | frozenset) and all(one in NOTICE_SOURCES for one in wanted)
        if wanted not in ("auto", None) and not are_sources:
            known = ", ".join(NOTICE_SOURCES)
            raise ConfigError(f'RecoveryConfig(preemption={wanted!r}): use "auto", None, or a tuple of {known}')
        check_types(self, RecoveryConfig)
        if not 0 <= self.quorum <= 1:
            raise ConfigError(f"RecoveryConfig(quorum={self.quorum}): use a share from 0 to 1")
        if self.num_spares < 0:
            raise ConfigError(f"RecoveryConfig(num_spares={self.num_spares}): use 0 or more")
        if self.log.selective and self.strategy not in ("auto", "logging"):
            raise ConfigError(
                f'RecoveryConfig(strategy="{self.strategy}") keeps no log: leave out budget_bytes and recovery_target of its '
                "LogConfig"
            )
        if self.strategy in ("skip", "lossy") and self.undo == "replay":
            raise ConfigError(
                f'RecoveryConfig(strategy="{self.strategy}", undo="replay"): what is undone in that mode is right only once '
                "the step is done again with the same gradients, which this strategy may not do. Use another one of either"
            )
        if self.strategy == "logging" and not self.log.enabled:
            raise ConfigError('RecoveryConfig(strategy="logging", log=LogConfig(enabled=False)): one of them is to be left out')
        for name in ("max_fruitless_recoveries", "replay_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"RecoveryConfig({name}={getattr(self, name)}): use 1 or more")
        for name, value in vars(self).items():
            if isinstance(value, timedelta) and value <= timedelta():
                raise ConfigError(f"RecoveryConfig({name}={value}): a time must be longer than zero")
        if self.heartbeat_timeout <= 2 * self.heartbeat_interval:
            raise ConfigError(
                f"RecoveryConfig: heartbeat_timeout ({self.heartbeat_timeout}) must be more than twice heartbeat_interval "
                f"({self.heartbeat_interval}), or a single late beat looks like a loss"
            )


def check_name(name: str) -> str:
    """A run's name, if it is safe as the name of a file and an actor.

    Raises:
        ConfigError: it is not.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"RunConfig(name={Place(name)!r}): use up to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


__all__ = ["LogConfig", "ParallelismConfig", "RecoveryConfig"]
