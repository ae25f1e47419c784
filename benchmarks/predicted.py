"""Predicted against measured: does the simulator tell how long this project's own runs take, failures included?

    python -m benchmarks.predicted [--quick] --json FILE

Each strategy trains twice on a local cluster, with other failures each time. The simulator is calibrated on the first run's
event log, and predicts the second: of that one it is told when who fails, and nothing else. The first run is predicted as well,
from its own costs, as `raytrain-ft simulate --from-run` does.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import nn

import raytrain_ft as ft
from benchmarks.harness import Goal, Options, Report, main
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.drill.tasks import Tiny
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.simulate import simulate
from raytrain_ft.simulate.calibrate import Calibration, calibrate

FAILURES = 8
STEP_S = 0.3
WORKERS = 3
MICRO_BATCHES = 4
BETWEEN = 20
"""Steps between two failures, about: enough for another spare to start meanwhile, on a machine that is not busy."""
PHASES = ("data", "forward", "backward", "update")
STAGE_PHASES = ("data", "forward", "backward_pass")
STRATEGIES = ("replication", "checkpoint", "logging", "snapshot", "lossy", "rollback", "skip")
FORWARD = ("lossy", "rollback", "skip")
"""Those that act on a step that was interrupted between two of its buckets."""
BUCKETS = {"bucket_bytes": 8192, "first_bucket_bytes": 1024}
BETWEEN_BUCKETS = [(phase, bucket) for phase in ("backward", "reduce") for bucket in (1, 2)]
GOING_BACK = ("checkpoint", "snapshot", "logging")
"""Those that need something saved to go back to."""
GOALS = {f"predicted_vs_measured_{name}": Goal("<=", 0.1) for name in ("max_deviation", *STRATEGIES)}


class Patient(Tiny):
    """Without what has buffers, so that it can be cut into three stages."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(STEP_S, micro_batches)

    def model(self, stage: int) -> nn.Module:
        """Three layers, which can be cut into three stages."""
        return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One strategy. Seconds from the run's start to its end.

    Attributes:
        failures: that struck the predicted run; used: of its recoveries, those by the strategy. Others need not lose anything.
        measured, predicted: of the run that the simulator was not calibrated on.
        own_measured, own_predicted: of the one that it was.
    """

    strategy: str
    failures: int
    used: int
    measured: float
    predicted: float
    own_measured: float
    own_predicted: float

    @property
    def deviation(self) -> float:
        """Relative, of the run that was not calibrated on."""
        return abs(self.predicted / self.measured - 1)

    @property
    def own_deviation(self) -> float:
        """Relative, of the run that was."""
        return abs(self.own_predicted / self.own_measured - 1)


def compare_with_measured(failures: int = FAILURES, strategies: tuple[str, ...] = STRATEGIES) -> Iterator[Comparison]:
    """Trains on a local cluster of its own, twice per strategy, and predicts; each as soon as it is known."""
    with LocalCluster(num_nodes=WORKERS + 2) as _, tempfile.TemporaryDirectory() as directory:
        for strategy in strategies:
            yield _compare(Path(directory), strategy, failures)


def _compare(directory: Path, strategy: str, failures: int) -> Comparison:
    runs = [train(directory, strategy, failures, seed) for seed in (1, 2)]
    used = [sum(recovery.strategy == strategy for recovery in result.recoveries) for result in runs]
    if not all(used):
        raise RuntimeError(f"{strategy}: used {used} times in the two runs; both must show what it costs")
    known, other = map(calibrate_run, runs)
    struck = sum(len(failure.workers) for failure in other.failures.failures)
    if struck < failures:
        raise RuntimeError(f"{strategy}: only {struck} of {failures} failures struck")
    return Comparison(
        strategy,
        struck,
        used[1],
        other.measured_s,
        simulate(known.job, known.strategy, other.failures).seconds,
        known.measured_s,
        simulate(known.job, known.strategy, known.failures).seconds,
    )


def calibrate_run(result: ft.Result) -> Calibration:
    """What a run's event log says of its costs."""
    return calibrate(read_records(Path(result.path) / "events.jsonl"))


def train(directory: Path, strategy: str, failures: int, seed: int) -> ft.Result:
    """One run with so many failures at points that the seed chooses."""
    chance, staged = random.Random(seed), strategy == "logging"
    points = BETWEEN_BUCKETS if strategy in FORWARD else [(phase, None) for phase in (STAGE_PHASES if staged else PHASES)]
    steps = [BETWEEN * number + chance.randrange(2, BETWEEN - 1) for number in range(failures)]
    faults = []
    for step in steps:
        rank, (phase, bucket) = chance.randrange(WORKERS), chance.choice(points)
        faults.append(ft.FailAt(rank=rank, step=step, phase=phase, bucket=bucket))
    how = ft.ParallelismConfig(pipeline_parallel_degree=WORKERS, num_pp_microbatches=MICRO_BATCHES, split="auto")
    patience = timedelta(seconds=3)  # more processes than cores
    return ft.Trainer(
        Patient(MICRO_BATCHES if staged else 1),
        max_steps=BETWEEN * failures + BETWEEN,
        scaling_config=ft.ScalingConfig(num_workers=WORKERS),
        recovery_config=ft.RecoveryConfig(
            strategy="auto" if staged else strategy,
            update="wait_free" if strategy == "rollback" else "barrier",  # else it has no partial update to keep
            heartbeat_timeout=patience,
        ),
        run_config=ft.RunConfig(
            name=f"{strategy}-{seed}",
            storage_path=str(directory),
            checkpoint_config=ft.CheckpointConfig(every=6 if strategy in GOING_BACK else None),
        ),
        global_batch_size=48,
        seed=7,
        quiet=True,
        drop_last=True,
        faults=faults,
        **({"parallelism_config": how} if staged else BUCKETS if strategy in FORWARD else {}),
    ).fit()


def run(options: Options) -> Report:
    """The report."""
    report = Report("predicted", metrics_from=GOALS)
    deviations = []
    for one in compare_with_measured(strategies=STRATEGIES[:2] if options.quick else STRATEGIES):
        report.note(
            f"{one.strategy}: {one.failures} failures, {one.used} of them met by it, "
            f"predicted {one.predicted:.1f} s, measured {one.measured:.1f} s ({one.deviation:.1%}); the run calibrated on: "
            f"{one.own_predicted:.1f} s, {one.own_measured:.1f} s ({one.own_deviation:.1%})"
        )
        report.add(f"predicted_vs_measured_{one.strategy}", [one.deviation])
        deviations.append(one.deviation)
    report.add("predicted_vs_measured_max_deviation", [max(deviations)])
    return report


if __name__ == "__main__":
    main(run, __doc__)
