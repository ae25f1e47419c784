"""How exact the end of a killed run is, and whether anybody is given up who lives."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import raytrain_ft as ft
from benchmarks.harness import Options, Report
from raytrain_ft.drill.tasks import Tiny
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.storage.arrow import read_tensors

STEPS = 60
PHASES = [("data", None), ("forward", None), ("update", None), ("commit", None)]
PHASES += [(phase, bucket) for phase in ("backward", "reduce", "reduced") for bucket in range(3)]
BUCKETS = {"bucket_bytes": 65_536, "first_bucket_bytes": 8_192}


class Small(Tiny):
    """A classifier with BatchNorm and dropout, in several buckets; a step takes `step_s` besides its computing."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__(step_s)

    def model(self, stage: int) -> nn.Module:
        """About 40 thousand parameters."""
        return nn.Sequential(
            *(nn.Linear(32, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8)),
        )


def train(
    directory: str, name: str, update: str, faults: list[ft.FailAt], steps: int = STEPS, step_s: float = 0.0, workers: int = 3
) -> ft.Result:
    """One run."""
    return ft.Trainer(
        Small(step_s),
        max_steps=steps,
        global_batch_size=12 * workers,
        quiet=True,
        faults=faults,
        scaling_config=ft.ScalingConfig(num_workers=workers),
        recovery_config=ft.RecoveryConfig(update=update),  # type: ignore[arg-type]
        run_config=ft.RunConfig(name=name, storage_path=directory, checkpoint_config=ft.CheckpointConfig(every=None)),
        **BUCKETS,
    ).fit()


def faults_of(draws: random.Random, kills: int) -> list[ft.FailAt]:
    """Kills at random ranks and phases, the last one 20 steps before the end."""
    spacing = (STEPS - 22) // kills
    found = []
    for number in range(kills):
        phase, bucket = draws.choice(PHASES)
        step = STEPS - 21 - spacing * (kills - 1 - number)
        found.append(ft.FailAt(rank=draws.randrange(3), step=step, phase=phase, bucket=bucket))
    return found


def distance(result: ft.Result, reference: ft.Result) -> float:
    """Greatest relative difference (Frobenius norm) over the tensors of two final states."""
    ours, theirs = read_tensors(result.final_state)[0], read_tensors(reference.final_state)[0]
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    # Python's own max passes over a NaN
    return float(np.max([float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs]))


def check_struck(killed: list[ft.Result], kills: int) -> None:
    """Raises RuntimeError unless each of these runs was struck so often: of an undisturbed one the bits say nothing."""
    for result in killed:
        struck, recoveries = len(list((Path(result.path) / "faults").iterdir())), len(result.recoveries)
        if struck != kills or not recoveries:
            raise RuntimeError(f"{Path(result.path).name}: of {kills} kills {struck} struck, met by {recoveries} recoveries")


def measure_bits(report: Report, options: Options) -> None:
    """Killed runs against the undisturbed one, in both ways to update."""
    draws = random.Random(options.seed)
    runs, kills = (1, 3) if options.quick else (6, 5)
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        for update in ("barrier", "wait_free"):
            reference = train(directory, f"undisturbed-{update}", update, [])
            killed = [train(directory, f"{update}-{n}", update, faults_of(draws, kills)) for n in range(runs)]
            check_struck(killed, kills)
            equal = [float(result.digest == reference.digest) for result in killed]
            recoveries = [recovery for result in killed for recovery in result.recoveries]
            undone = sum(recovery.undone > 0 for recovery in recoveries)
            report.note(f"{update}: {len(recoveries)} recoveries in {runs} runs, {undone} with an undo")
            if update == "barrier":
                report.add("bit_equal_share", sum(equal) / runs, n=runs)
                report.add("undo_share", undone / len(recoveries), n=len(recoveries))
            else:
                report.add("wait_free_bit_equal_share", sum(equal) / runs, n=runs)
                report.add(
                    "wait_free_max_relative_error", float(np.max([distance(result, reference) for result in killed])), n=runs
                )


def spin(parent: int) -> None:
    """Wants all of a processor, as long as the process that started it lives: that may be killed before it ends this one."""
    os.nice(15 - os.nice(0))  # as Ray's workers: at nice 0 these would take nearly all, which is no twofold oversubscription
    while os.getppid() == parent:
        pass


def measure_false_alarms(report: Report, options: Options) -> None:
    """A healthy run of many short steps while twice as many processes as cores want the CPU."""
    steps = 300 if options.quick else 10_000
    cores = multiprocessing.cpu_count()
    context = multiprocessing.get_context("spawn")  # a fork of this process would inherit Ray's threads and handlers
    hogs = [context.Process(target=spin, args=(os.getpid(),), daemon=True) for _ in range(2 * cores)]
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        for hog in hogs:
            hog.start()
        try:
            result = train(directory, "healthy", "barrier", [], steps=steps, step_s=0.005, workers=2)
            if not all(hog.is_alive() for hog in hogs):
                raise RuntimeError(f"the busy processes ended before the run did, which took {result.seconds:.0f} s")
        finally:
            for hog in hogs:
                hog.kill()
        records = read_records(Path(result.path) / "events.jsonl")
    alarms = [record for record in records if record["event"] in ("WorkerLost", "Suspected")]
    for alarm in alarms:
        report.note(f"FALSE ALARM: {alarm}")
    report.add("false_alarms_per_10000_steps", len(alarms) * 10_000 / steps, n=steps)
    report.note(f"false alarms: {steps} steps in {result.seconds:.0f} s with {2 * cores} busy processes on {cores} cores")
