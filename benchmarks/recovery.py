"""What a lost worker costs: kills at random phases, beside Ray Train's restart and Ray Train + torchft.

    python -m benchmarks.recovery [--quick] --json FILE

All three train the same model on four workers, keep the same journal of completed steps, and are killed by the same killer.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import raytrain_ft as ft
from benchmarks import exactness
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, loopback_bandwidth, main, median_ratio, p95_of, p99_of
from benchmarks.models import RECOVERY
from benchmarks.ours import Run, Task, training
from benchmarks.peers.kills import Journal, Kill, Killer, summary
from benchmarks.peers.ray_torchft import measure_replacement
from benchmarks.peers.ray_train import measure_restart
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import MARKS
from raytrain_ft.runtime.event_log import read_records

WORKERS = 4
ADAMW_STATES = 3  # parameters and two moments, fp32
GOALS = {
    "pause_full_strength_p95_steps": Goal("<=", 2.0),
    "pause_shrink_p95_steps": Goal("<=", 1.5),
    "full_strength_ratio_vs_ray_train_restart": Goal("<=", 0.10),
    "full_strength_ratio_vs_torchft": Goal("<=", 0.5),
    "samples_lost": Goal("<=", 0.0),
    "detect_sigkill_p99_s": Goal("<=", 0.1),
    "detect_sigstop_p95_s": Goal("<=", 1.5),
    "false_alarms_per_10000_steps": Goal("<=", 0.0),
    "bit_equal_share": Goal(">=", 1.0),
    "undo_share": Goal("<=", 0.0),
    "wait_free_bit_equal_share": REPORT_ONLY,
    "wait_free_max_relative_error": Goal("<=", 1e-5),
}


class CommitJournal:
    """Stands where the schedule stands: `step()` is called once for every step that is committed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._journal: Journal | None = None
        self._steps = 0

    def step(self) -> None:
        """Notes a committed step. A spare that never trains writes nothing."""
        self._journal = self._journal or Journal(self._directory)
        self._journal.ended(self._steps, dist.get_world_size())
        self._steps += 1

    def state_dict(self) -> dict[str, int]:
        """What a replacement takes over."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes it over."""
        self._steps = state["steps"]


class Journaled(Task):
    """The peers' work, with a journal of committed steps."""

    def __init__(self, directory: str) -> None:
        super().__init__(RECOVERY)
        self._directory = directory

    def scheduler(self, optimizer: Any) -> CommitJournal:
        """No schedule: a journal."""
        return CommitJournal(self._directory)


def kill_ours(recovery: ft.RecoveryConfig, signals: list[int], workers: Any, seed: int) -> tuple[list[Kill], list[dict], float]:
    """Our run, struck once per signal. Returns what each cost, the run's records, and what its clock said at monotonic 0."""
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        run = training(Journaled(directory), "recovery", directory, workers, recovery, max_steps=1_000_000)
        with run as running:
            killer = Killer(directory, WORKERS, running.why_ended, seed, timeout_s=120)
            kills = []
            for number in signals:
                wait_for(lambda: has_spares(running, recovery.num_spares), 60)
                kills.append(killer.kill_one(number))
            account = running.status()
            assert account is not None
            offset = account["seconds"] - time.monotonic()
        return kills, read_records(Path(directory) / "recovery" / "events.jsonl"), offset


def has_spares(running: Run, wanted: int) -> bool:
    """Whether so many warm spares wait."""
    account = running.status()
    return (
        account is not None and account["world_size"] == WORKERS and list(account["members"].values()).count("spare") >= wanted
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until it is true.

    Raises:
        TimeoutError: it does not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.1)


def detections(kills: list[Kill], records: list[dict], offset: float) -> list[float]:
    """Seconds from each strike to the supervisor's first WorkerLost event after it."""
    lost = [record["at"] for record in records if record["event"] == "WorkerLost"]
    return [min(at for at in lost if at > kill.killed_at + offset) - kill.killed_at - offset for kill in kills]


def steps_again(kills: list[Kill], records: list[dict], offset: float) -> list[float]:
    """Seconds from each kill to the end of a step that nobody had in hand when it came.

    Where survivors redo the interrupted step, that is the first that they end as a smaller world, be it sooner than a step
    takes otherwise; only where the recovery completed that step it is a later one.
    """
    recoveries = [r for r in records if r["event"] == "Recovery" and r["lost"]]
    found = []
    for kill in kills:
        recovery = next(r for r in recoveries if r["detected"] > kill.killed_at + offset)
        redone = kill.fewer_s is not None and not recovery["completes"]
        found.append(min(kill.fewer_s, kill.first_step_s) if redone else kill.first_step_s)
    return found


def breakdown(records: list[dict]) -> str:
    """Medians of the phases of the recoveries, in words."""
    found = [r for r in records if r["event"] == "Recovery" and r["resumed"] is not None and r["lost"]]
    spans = itertools.pairwise(MARKS)
    return ", ".join(f"{b} +{1000 * statistics.median(r[b] - r[a] for r in found):.0f} ms" for a, b in spans if found)


def measure_ours(report: Report, options: Options) -> list[Kill]:
    """Kills with a warm spare, without one, and freezes."""
    kill, stop = int(signal.SIGKILL), int(signal.SIGSTOP)
    spare = ft.RecoveryConfig(num_spares=1)
    shrink = ft.RecoveryConfig(num_spares=0, replacement="shrink")
    killed, frozen = (3, 1) if options.quick else (30, 8)
    struck, records, offset = kill_ours(spare, [kill] * killed + [stop] * frozen, WORKERS, options.seed)
    kills, noticed = struck[:killed], detections(struck, records, offset)
    step = statistics.median(k.step_s for k in kills)
    transfer = RECOVERY.num_parameters * 4 * ADAMW_STATES / loopback_bandwidth()
    pauses = [(k.full_strength_s - 0.5 - transfer) / step for k in kills]
    report.add("pause_full_strength_p95_steps", pauses, statistic=p95_of)
    detected = noticed[:killed]
    report.add("detect_sigkill_p99_s", detected, statistic=p99_of)
    report.add("detect_sigstop_p95_s", noticed[killed:], statistic=p95_of)
    gone = [(k.gone_s, seconds - k.gone_s) for k, seconds in zip(kills, detected, strict=True) if k.gone_s is not None]
    if gone:
        dying, noticing = (np.array(column) for column in zip(*gone, strict=True))
        report.note(
            f"  SIGKILL: the kernel took {1000 * np.median(dying):.0f} ms (at most {1000 * dying.max():.0f}) to end the last "
            f"thread; from there to WorkerLost {1000 * np.median(noticing):.0f} ms (at most {1000 * noticing.max():.0f})"
        )
    report.note(summary("raytrain_ft, warm spare", kills))
    report.note(f"  medians of its phases: {breakdown(records)}; state / loopback bandwidth = {transfer * 1000:.0f} ms")

    smaller, more, ahead = kill_ours(shrink, [kill] * (1 if options.quick else 30), (2, WORKERS), options.seed + 1)
    step = statistics.median(k.step_s for k in smaller)
    report.add(
        "pause_shrink_p95_steps", [(again - 0.5) / step for again in steps_again(smaller, more, ahead)], statistic=p95_of
    )
    report.note(summary("raytrain_ft, no spare, goes on smaller and grows again", smaller))

    lost = [audit(r) for r in (records, more)]
    for proof in lost:
        for violation in proof.violations:
            report.note(f"AUDIT: {violation}")
    report.add("samples_lost", float(sum(p.samples_lost for p in lost) + sum(len(p.violations) for p in lost)))
    return kills


def measure_peers(report: Report, ours: list[Kill], options: Options) -> None:
    """The same kills for the peers, and the ratios of the medians."""
    mine = [k.full_strength_s for k in ours]
    restarts = measure_restart(1 if options.quick else 5, WORKERS, seed=options.seed)
    report.add("full_strength_ratio_vs_ray_train_restart", median_ratio(mine, restarts.full_strength_s))
    report.note(summary("Ray Train restart", restarts.kills))
    if options.quick:  # four minutes in all
        report.absent("full_strength_ratio_vs_torchft", why="--quick leaves this out")
        return
    replacements = measure_replacement(5, WORKERS, seed=options.seed)
    if replacements.kills:
        report.add("full_strength_ratio_vs_torchft", median_ratio(mine, replacements.full_strength_s))
        report.note(summary("Ray Train + torchft (its DDP hook mended, in its favour)", replacements.kills))
    else:
        report.absent("full_strength_ratio_vs_torchft", replacements.why or "it could not be run")


def run(options: Options) -> Report:
    """All of it."""
    report = Report("recovery", GOALS)
    with LocalCluster(WORKERS + 1):
        kills = measure_ours(report, options)
        exactness.measure_bits(report, options)
        exactness.measure_false_alarms(report, options)
    measure_peers(report, kills, options)
    return report


if __name__ == "__main__":
    main(run, __doc__)
