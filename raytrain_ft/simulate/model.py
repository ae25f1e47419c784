"""The job that is simulated, and what everything in it costs: seconds, bytes, steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raytrain_ft import checks
from raytrain_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a job's parts cost. All are measured of one worker; workers do the same at the same time. By default, nothing.

    Attributes:
        update_s: of a step, the weight update [CheckFreq's T_w].
        copy_s: a snapshot of the state into host memory [T_c]; also of Elastic Horovod's snapshot.
        persist_s: from host memory to durable storage [T_s].
        load_s: a checkpoint from storage into the model.
        restore_s: an in-memory snapshot into the model (Elastic Horovod's rollback).
        log_s: what logging adds to a step.
        state_bytes: of one worker. bandwidth: at which a replacement is filled, bytes per second.
        detect_s: from the failure until the supervisor knows of it.
        fence_s: until all survivors have left the interrupted step and said where they stand.
        rendezvous_s: until all members of the next world have joined a group and made their state consistent.
        fill_s: of filling a replacement, what does not depend on its size.
        restart_s: until all workers are up again where a strategy restarts all of them, as global checkpoints do.
        start_s: until a new worker is ready as a spare, once there is a node for it.
        resume_s: from the last fill to the beginning of the first step.
        replay_ratio: time of a step that is replayed from the log, per time of a step.
        parallel_replay_ratio: the same, with the strategy's `replay_workers` sharing it; None: by the micro-batches that each
            of them replays (`Job.micro_batches`), as SWIFT bounds it (section 5.2).
        begin_s: from the run's start to its first step. end_s: from the last step to the final state saved.
    """

    update_s: float = 0.0
    copy_s: float = 0.0
    persist_s: float = 0.0
    load_s: float = 0.0
    restore_s: float = 0.0
    log_s: float = 0.0
    state_bytes: float = 0.0
    bandwidth: float = 1e9
    detect_s: float = 0.0
    fence_s: float = 0.0
    rendezvous_s: float = 0.0
    fill_s: float = 0.0
    restart_s: float = 0.0
    start_s: float = 0.0
    resume_s: float = 0.0
    replay_ratio: float = 1.0
    parallel_replay_ratio: float | None = None
    begin_s: float = 0.0
    end_s: float = 0.0

    def __post_init__(self) -> None:
        optional = {"parallel_replay_ratio"} if self.parallel_replay_ratio is None else set()
        checks.seconds(self, *(name for name in self.__slots__ if name not in optional))
        checks.seconds(self, "bandwidth", positive=True)

    @property
    def filling_s(self) -> float:
        """Of filling a replacement from survivors."""
        return self.fill_s + self.state_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: what is to be done, on what, and what that costs.

    Attributes:
        steps: to be committed.
        step_s: of an undisturbed step of all workers, without checkpoints and logs.
        workers: that train at full strength. stages: of the pipeline; each stage has workers / stages replicas.
        nodes: that these workers are spread over in blocks; None: one each. A node is lost as a whole.
        spares: further nodes whose workers are up and wait to replace lost ones.
        spare_nodes: nodes beyond those of workers and spares, on which lost workers can be started again; None: no shortage.
        min_workers: with which to go on where replacements do not come; None: `workers`.
        micro_batches: of a step in a pipeline.
        batch: samples of a step; what is lost is counted in these.
        replacement_timeout: for how long to wait for a replacement, seconds.
        max_fruitless_recoveries: recoveries in a row without a committed step before the run gives up.
        node_hour: price of a node for an hour, in any currency.
    """

    steps: int
    step_s: float
    workers: int
    name: str = "job"
    stages: int = 1
    nodes: int | None = None
    spares: int = 1
    spare_nodes: int | None = None
    min_workers: int | None = None
    micro_batches: int = 1
    batch: int = 1
    replacement_timeout: float = 86_400.0
    max_fruitless_recoveries: int = 10
    node_hour: float = 1.0
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        checks.text(self, "name")
        checks.whole(self, "steps", "workers", "stages", "micro_batches", "batch", "max_fruitless_recoveries")
        checks.whole(self, "spares", least=0)
        checks.seconds(self, "step_s", "replacement_timeout", positive=True)
        checks.seconds(self, "node_hour")
        for name, least in (("nodes", 1), ("spare_nodes", 0), ("min_workers", 1)):
            if getattr(self, name) is not None:
                checks.whole(self, name, least=least)
        if self.workers % self.stages:
            raise ConfigError(f"Job(workers={self.workers}): {self.stages} stages need a multiple of {self.stages}")
        if self.workers % self.number_of_nodes:
            raise ConfigError(
                f"Job(nodes={self.nodes}): {self.workers} workers are spread evenly: use a number that divides {self.workers}"
            )
        if not 1 <= self.fewest <= self.workers or self.fewest % self.stages:
            raise ConfigError(
                f"Job(min_workers={self.min_workers}): use a multiple of {self.stages} up to the {self.workers} workers"
            )
        if self.costs.update_s >= self.step_s:
            raise ConfigError(f"Costs(update_s={self.costs.update_s!r}): use less than Job.step_s, which is {self.step_s}")

    @property
    def number_of_nodes(self) -> int:
        """Nodes that the workers of a full world are on."""
        return self.workers if self.nodes is None else self.nodes

    @property
    def per_node(self) -> int:
        """Workers of a node."""
        return self.workers // self.number_of_nodes

    @property
    def fewest(self) -> int:
        """Workers to go on with at least."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def useful_s(self) -> float:
        """Seconds of the steps alone: what a run takes that nothing disturbs and in which nothing is saved."""
        return self.steps * self.step_s

    def replay_ratio(self, workers: int, lost_stages: int = 1) -> float:
        """Time of a replayed step per time of a step, if so many workers share each lost stage.

        With m micro-batches, p stages and g neighbours lost together, a step takes m + p - 1 turns; its replay by d workers
        takes ceil(m / d) + g - 1 (SWIFT, section 5.2).
        """
        if workers <= 1:
            return self.costs.replay_ratio
        if self.costs.parallel_replay_ratio is not None:
            return self.costs.parallel_replay_ratio
        turns = self.micro_batches + lost_stages - 1
        return self.costs.replay_ratio * (math.ceil(self.micro_batches / workers) + lost_stages - 1) / turns
