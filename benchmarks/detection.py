"""How soon the loss of a node is noticed: its cable pulled, frozen, or killed; beside Ray's own time, in the same run.

    python -m benchmarks.detection [--quick] --json FILE

Nodes are hosts in network namespaces with cables of their own. That needs root and iproute2; elsewhere all numbers are absent.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytrain_ft as ft
from benchmarks.exactness import BUCKETS, Small, spin
from benchmarks.harness import REPORT_ONLY, Goal, Options, Report, main, p95_of
from benchmarks.ours import Run
from raytrain_ft.chaos.hosts import HostCluster
from raytrain_ft.chaos.network import why_unavailable
from raytrain_ft.runtime.event_log import read_records

WORKERS = 3
FREE_NODES = 3  # besides those of the workers and of the spare: a node that was struck is avoided for a while
HOGS = 4
RAY_WAITS_S = 150.0
GOALS = {
    "unplugged_p95_s": Goal("<=", 2.0),
    "frozen_node_p95_s": Goal("<=", 2.0),
    "killed_raylet_p95_s": Goal("<=", 0.3),
    "ray_unplugged_s": REPORT_ONLY,
    "false_alarms": Goal("<=", 0.0),
}
KINDS = ("unplugged", "frozen_node", "killed_raylet")


def strike(cluster: HostCluster, kind: str, node: str) -> None:
    """Lets a node be lost in this way."""
    {"unplugged": cluster.unplug, "frozen_node": cluster.freeze_node, "killed_raylet": cluster.kill_node}[kind](node)


def restore(cluster: HostCluster, kind: str, node: str) -> None:
    """Brings it back, or another for it."""
    if kind == "killed_raylet":
        cluster.add_node()
    else:
        {"unplugged": cluster.plug, "frozen_node": cluster.thaw_node}[kind](node)


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that the supervisor gave up: whose it was, and how long after the strike."""

    member: str
    seconds: float
    noticed_by: str


def start(directory: str, name: str, steps: int, num_spares: int) -> Run:
    """A run of short steps, on a thread of its own."""
    trainer = ft.Trainer(
        Small(step_s=0.02),
        max_steps=steps,
        global_batch_size=12 * WORKERS,
        drop_last=True,  # BatchNorm needs more than one sample of each rank
        quiet=True,
        scaling_config=ft.ScalingConfig(num_workers=WORKERS),
        recovery_config=ft.RecoveryConfig(num_spares=num_spares),
        run_config=ft.RunConfig(name=name, storage_path=directory, checkpoint_config=ft.CheckpointConfig(every=None)),
        **BUCKETS,
    )
    run = Run(name, Path(directory) / name)
    threading.Thread(target=run.fit, args=(trainer,), name=f"fit-{name}", daemon=True).start()
    return run


def strike_once(cluster: HostCluster, run: Run, kind: str, draws: random.Random) -> Loss:
    """Strikes the node of a random rank at a random moment of its heartbeats; returns what was noticed, and restores it."""
    account = run.wait_for("a full world and a spare", is_ready)
    time.sleep(draws.uniform(0.0, 0.5))
    member = draws.choice(account["world"])
    node = account["nodes"][member]
    ahead = clock_ahead(run)
    struck = time.monotonic()
    strike(cluster, kind, node)
    try:
        lost = first_loss(run, member)
    finally:
        restore(cluster, kind, node)
    return Loss(member, lost["at"] - ahead - struck, lost["noticed_by"])


def is_ready(account: dict[str, Any]) -> bool:
    """Whether it trains at full strength and a spare waits."""
    spares = list(account["members"].values()).count("spare")
    return account["state"] == "RUNNING" and account["world_size"] == WORKERS and spares > 0


def clock_ahead(run: Run) -> float:
    """What the run's clock says at monotonic 0: of several answers the quickest, to half its time."""
    found = []
    for _ in range(5):
        before = time.monotonic()
        account = run.status()
        after = time.monotonic()
        if account is not None:
            found.append((after - before, account["seconds"] - (before + after) / 2))
    return min(found)[1]


def first_loss(run: Run, member: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """The supervisor's record that this worker is lost."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for record in read_records(run.directory / "events.jsonl"):
            if record["event"] == "WorkerLost" and record["member"] == member:
                return record
        time.sleep(0.1)
    raise TimeoutError(f"{member} was struck, and that was not noticed within {timeout_s:g} s")


# ---------------------------------------------------------------- Ray's own time


class Idle:
    """An actor that is called once, for ever."""

    def rest(self) -> None:
        """Until it ends."""
        threading.Event().wait()


class RayWatch:
    """Nodes without a worker of ours that are struck in the same ways, to see when Ray tells of it.

    Attributes:
        seconds: of each kind, until a call to an actor there failed; without those of which Ray told nothing in `RAY_WAITS_S`.
    """

    def __init__(self, cluster: HostCluster) -> None:
        self.seconds: dict[str, float] = {}
        self._cluster = cluster
        self._nodes = {kind: cluster.add_node() for kind in KINDS}
        actor: Any = ray.remote(Idle)
        strategies = {kind: NodeAffinitySchedulingStrategy(node, soft=False) for kind, node in self._nodes.items()}
        self._actors = {
            kind: actor.options(num_cpus=1, scheduling_strategy=there).remote() for kind, there in strategies.items()
        }
        ray.get([actor.__ray_ready__.remote() for actor in self._actors.values()], timeout=60)
        self._threads = [threading.Thread(target=self._watch, args=(kind,), daemon=True) for kind in KINDS]
        for thread in self._threads:
            thread.start()

    def _watch(self, kind: str) -> None:
        call = self._actors[kind].rest.remote()
        time.sleep(1.0)  # it is under way
        struck = time.monotonic()
        strike(self._cluster, kind, self._nodes[kind])
        try:
            ray.get(call, timeout=RAY_WAITS_S)
        except GetTimeoutError:  # a RayError, too: it has told nothing
            return
        except RayError:
            self.seconds[kind] = time.monotonic() - struck

    def wait(self) -> None:
        """Until Ray has told of all, or was waited for long enough."""
        for thread in self._threads:
            thread.join()

    def __str__(self) -> str:
        nothing = f"nothing within {RAY_WAITS_S:g} s"
        return ", ".join(f"{kind} {f'{self.seconds[kind]:.1f} s' if kind in self.seconds else nothing}" for kind in KINDS)


# ---------------------------------------------------------------- nobody is given up who lives


def _steps_of(run: Run) -> int:
    """How many steps a run has committed. Raises RuntimeError if it has ended."""
    account = run.status()
    if account is None or (why := run.why_ended()) is not None:
        raise RuntimeError(f"the calm run ended: {why if account is not None else 'no supervisor answers'}")
    return account["step"]


def measure_false_alarms(report: Report, seconds: float, others: list[dict[str, Any]]) -> None:
    """Nothing happens for so long but that more processes than there are cores want the CPU. `others`: alarms from before."""
    context = multiprocessing.get_context("spawn")
    hogs = [context.Process(target=spin, args=(os.getpid(),), daemon=True) for _ in range(HOGS)]
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        run = start(directory, "calm", 10_000_000, num_spares=1)
        run.wait_for("a full world and a spare", is_ready)
        for hog in hogs:
            hog.start()
        try:
            before = _steps_of(run)
            time.sleep(seconds)
            steps = _steps_of(run) - before
        finally:
            for hog in hogs:
                hog.kill()
            run.abort()
        records = read_records(run.directory / "events.jsonl")
    alarms = others + [record for record in records if record["event"] in ("WorkerLost", "Suspected")]
    for alarm in alarms:
        report.note(f"FALSE ALARM: {alarm}")
    if not steps:
        raise RuntimeError(f"the calm run committed no step in {seconds:.0f} s: nobody watched anything")
    report.add("false_alarms", float(len(alarms)), n=1)
    report.note(
        f"false alarms: {steps} steps in {seconds:.0f} s with {HOGS} busy processes on {multiprocessing.cpu_count()} cores"
    )


# ---------------------------------------------------------------- all of it


def measure_losses(report: Report, cluster: HostCluster, rounds: int, seed: int) -> list[dict[str, Any]]:
    """All kinds in turns. Returns the records of workers that were given up and had not been struck."""
    draws = random.Random(seed)
    found: dict[str, list[Loss]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        run = start(directory, "detection", 10_000_000, num_spares=1)
        try:
            for _ in range(rounds):
                for kind in KINDS:
                    found[kind].append(strike_once(cluster, run, kind, draws))
        finally:
            run.abort()
        records = read_records(run.directory / "events.jsonl")
    for kind, losses in found.items():
        report.add(f"{kind}_p95_s", [loss.seconds for loss in losses], statistic=p95_of)
        ways = sorted({loss.noticed_by for loss in losses})
        median = float(np.median([loss.seconds for loss in losses]))
        report.note(f"  {kind}: median {median:.3f} s, longest {max(loss.seconds for loss in losses):.3f} s, noticed by {ways}")
    struck = {loss.member for losses in found.values() for loss in losses}
    return false_alarms(records, struck)


def false_alarms(records: list[dict[str, Any]], struck: set[str]) -> list[dict[str, Any]]:
    """Workers that were given up though nobody had struck them; one that could not be started is no false alarm."""
    ready = {record["member"] for record in records if record["event"] == "WorkerStarted"}
    lost = [record for record in records if record["event"] == "WorkerLost" and record["member"] in ready - struck]
    return [record for record in lost if by_sign(record)]


def by_sign(record: dict[str, Any]) -> bool:
    """Whether a worker was given up by a sign of its own."""
    return record["noticed_by"] in ("heartbeat", "lifeline", "peers", "ray", "raylet", "step time")


def run(options: Options) -> Report:
    """All of it."""
    report = Report("detection", GOALS)
    reason = why_unavailable()
    if reason is not None:
        for key in GOALS:
            report.absent(key, why=reason)
        return report
    with HostCluster(num_nodes=WORKERS + 1 + FREE_NODES) as cluster:
        ray_s = RayWatch(cluster)
        others = measure_losses(report, cluster, 3 if options.quick else 20, options.seed)
        ray_s.wait()
        report.note(f"Ray's own time until a call under way failed: {ray_s}")
        if "unplugged" in ray_s.seconds:
            report.add("ray_unplugged_s", ray_s.seconds["unplugged"])
        else:
            report.absent("ray_unplugged_s", why=f"Ray told nothing within {RAY_WAITS_S:g} s")
        measure_false_alarms(report, 20.0 if options.quick else 3600.0, others)
    return report


if __name__ == "__main__":
    main(run, __doc__)
