"""What logging costs a pipeline, and what a lost stage costs: replay by one, replay by several, and everybody going back.

    python -m benchmarks.pipeline [--quick] --json FILE

Paced: a stage sleeps over each micro-batch as an accelerator would keep the host idle, so that four stages fit on two cores.
Real: it computes. Step times and replays are measured on the product's own step, links and log in four processes; recoveries on
whole runs on a cluster of several nodes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import raytrain_ft as ft
from benchmarks import stages
from benchmarks.harness import REPORT_ONLY, Estimate, Goal, Options, Report, estimate, main, noise_floor, paired_ratio
from benchmarks.peers.ray_pipeline import measure_pipeline_restart
from benchmarks.stages import STAGES, Bench, Shape, Staged, paced
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.chaos.faults import when
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.training.links import Links, Sample
from raytrain_ft.training.team import Team

SUFFIXES = {8: "", 4: "_m4", 16: "_m16"}
"""Of keys, by the number of micro-batches."""
OF_STEPS = {
    "logged_step_ratio_paced": Goal("<=", 1.01),
    "logged_step_ratio_real": Goal("<=", 1.05),
    "written_step_ratio_paced": REPORT_ONLY,
    "written_step_ratio_real": REPORT_ONLY,
    "synchronous_step_ratio_paced": REPORT_ONLY,
    "synchronous_step_ratio_real": REPORT_ONLY,
    "agreement_share_paced": REPORT_ONLY,
    "agreement_share_real": REPORT_ONLY,
    "log_bytes_ratio_vs_formula": Goal("==", 1.0),
    "log_share_in_bubbles": Goal(">=", 0.95),
}
OF_REPLAYS = {
    "replay_ratio_vs_bound": Goal("<=", 1.10),
    "parallel_recovery_efficiency_d2": Goal(">=", 0.8),
    "parallel_recovery_efficiency_d4": Goal(">=", 0.8),
    "parallel_recovery_efficiency_d2_exact": REPORT_ONLY,
    "parallel_recovery_efficiency_d4_exact": REPORT_ONLY,
}
GOALS = {
    **{f"{name}{suffix}": goal for suffix in SUFFIXES.values() for name, goal in (OF_STEPS | OF_REPLAYS).items()},
    "parallel_recovery_efficiency_d2_real": Goal(">=", 0.7),
    "logged_step_ratio_paced_on_nodes": Goal("<=", 1.01),
    "recovery_reduction_vs_global_checkpoint": REPORT_ONLY,
    "recovery_reduction_vs_global_checkpoint_parallel": Goal(">=", 0.763),
    "recovery_reduction_vs_ray_train_restart": REPORT_ONLY,
    "recovery_reduction_vs_ray_train_restart_parallel": REPORT_ONLY,
    "bit_equal_share": Goal(">=", 1.0),
}
"""The reductions are SWIFT's (section 7.1): without helpers 36.0 % (ViT-128/32, a third of whose step are bubbles) and 58.5 %
(BERT-128, half), with helpers 57.3 and 76.3 %. Of four micro-batches in four stages 3/7 are bubbles, the most that a replay
without helpers can save. The paper leaves out the time until the replacement is there; here it counts."""
LOST = 1
"""The stage that is replayed."""
WRITTEN_BYTES = 64 * 2**20
"""Memory of a log that writes what it is given, but for the last quarter of this."""
AGREED_BYTES = (4 + STAGES) * 8 * STAGES
"""What all stages agree upon at the end of a step is logged by each of them: four numbers, and one of each worker."""
REPLAYS = {"": "logging", "_parallel": "logging, four workers"}
"""What is set beside going back: suffixes of metrics, and ways to recover. Both end with the same bits."""


# ---------------------------------------------------------------- steps, logged and not


def time_steps(blocks: int, steps: int, bench: Bench) -> dict[str, Any]:
    """In turns: without a log, without a log again (A/A), with one as it is by default, with one that has so little memory that
    it writes everything, with a synchronous one. Step times per block.

    After each block the logs are trimmed, as a checkpoint does it. By default nearly nothing has been written until then. Where
    files only grow, each of their pages is memory that nobody had before: on a virtual machine which gives free memory back to
    its host that takes ten times as long to write.
    """
    logs = {"on": bench.open_log(), "written": bench.open_log(memory_bytes=WRITTEN_BYTES)}
    logs["synchronous"] = bench.open_log(synchronous=True)
    agreements: list[float] = []
    ways = {"off": agreeing(bench.live(None), agreements), "off again": bench.live(None)}
    ways |= {name: bench.live(log) for name, log in logs.items()}
    replica = bench.replica()
    bench.start(replica)
    for links in ways.values():
        bench.steps(replica, links, 2)
    written = logs["written"]
    written.flush(10)
    agreements.clear()
    handed, before, per_block = logs["on"].stats.payload_bytes, written.stats, []
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for block in range(blocks):
        order = list(ways) if block % 2 == 0 else list(reversed(ways))
        for name in order:
            times[name].append(bench.steps(replica, ways[name], steps))
        now = written.stats
        per_block.append((now.written_bytes - before.written_bytes, now.idle_bytes - before.idle_bytes))
        for log in logs.values():
            log.trim(replica.state.step)
            log.flush(10)
        before = written.stats
    kept = logs["on"].stats
    return {
        "times": times,
        "agreements": agreements,
        "bytes": kept.payload_bytes - handed,
        "kept": 1 - kept.written_bytes / kept.payload_bytes,
        "written": per_block,
        "stalls": sum(log.stats.stalls for log in (logs["on"], written)),
    }


def agreeing(links: Links, seconds: list[float]) -> Links:
    """The same links, and how long each step's agreement takes, after which the stages update."""
    asked = links.agree
    assert asked is not None

    def agree(step: int, numbers: Tensor, sample: Sample) -> Tensor:
        began = time.perf_counter()
        agreed = asked(step, numbers, sample)
        seconds.append(time.perf_counter() - began)
        return agreed

    return replace(links, agree=agree)


def report_steps(report: Report, shape: Shape, blocks: int, steps: int) -> None:
    """Logged over unlogged; of each step the slowest stage's time, which is the pipeline's.

    In bubbles: of the bytes that were written by the end of a block, those whose record was copied to its file, from the first
    byte to the last, while its sender waited for another stage, in a receive or in the agreement at the step's end. On CPUs
    there is no copy before this. Of an agreement, what the stage takes that comes last to it: the others would wait anyway.
    """
    found = stages.run(shape, partial(time_steps, blocks, steps))

    def of(name: str) -> list[list[float]]:
        per_stage = [answer["times"][name] for answer in found]
        return [[max(times) for times in zip(*block, strict=True)] for block in zip(*per_stage, strict=True)]

    unlogged = [before + after for before, after in zip(of("off"), of("off again"), strict=True)]
    ratio = paired_ratio(of("on"), unlogged)
    others = {name: paired_ratio(of(name), unlogged) for name in ("written", "synchronous")}
    step = statistics.median(t for block in of("off") for t in block)
    kind, suffix = "paced" if shape.forward_s else "real", SUFFIXES[shape.micro_batches]
    report.add(f"logged_step_ratio_{kind}{suffix}", ratio)
    for name, other in others.items():
        report.add(f"{name}_step_ratio_{kind}{suffix}", other)
    report.noise_floor = report.noise_floor or noise_floor(of("off again"), of("off"))
    last = [min(waits) for waits in zip(*(answer["agreements"] for answer in found), strict=True)]
    shares = [wait / step for wait, step in zip(last, itertools.chain.from_iterable(of("off")), strict=True)]
    report.add(f"agreement_share_{kind}{suffix}", shares)
    logged = sum(answer["bytes"] for answer in found) / (blocks * steps) - AGREED_BYTES
    written, idle = np.array([answer["written"] for answer in found]).sum(axis=0).T  # per block, of all stages
    in_bubbles = estimate((idle / written).tolist())
    kept = statistics.mean(answer["kept"] for answer in found)
    report.note(
        f"{kind}, m = {shape.micro_batches}: step {1000 * step:.1f} ms; logged {ratio}, {100 * kept:.0f} % of it trimmed "
        f"unwritten; all written {others['written']}, {in_bubbles} of it in bubbles; synchronous {others['synchronous']}; "
        f"{logged / 2**20:.2f} MiB per step, {sum(answer['stalls'] for answer in found)} stalls"
    )
    if kind == "paced":
        report.add(f"log_bytes_ratio_vs_formula{suffix}", logged / shape.log_bytes, n=blocks * steps)
        report.add(f"log_share_in_bubbles{suffix}", in_bubbles)


# ---------------------------------------------------------------- replay


def time_replays(steps: int, repeats: int, bench: Bench) -> dict[str, Any]:
    """Trains some steps with a log, then replays one stage from it: alone, and in teams."""
    log = bench.open_log()
    replica = bench.replica()
    bench.start(replica)
    links = bench.live(log)
    normal = bench.steps(replica, links, steps)
    log.flush(10)
    wanted = replica.state.digests() if bench.rank == LOST else ()
    teams = {(1, True): [LOST], (2, False): [LOST, 2], (2, True): [LOST, 2], (4, False): [1, 2, 3, 0], (4, True): [1, 2, 3, 0]}
    times: dict[str, list[float]] = {}
    equal: list[bool] = []
    for repeat in range(repeats):
        for (size, exact), members in teams.items():
            bench.barrier()
            group = bench.team(members, f"team-{size}-{exact}-{repeat}")
            if group is None:
                continue
            other = bench.replica(LOST)
            team = Team(group, bench.shape.micro_batches, exact=exact) if size > 1 else None
            seconds = bench.replay(other, bench.logged(1, LOST, team), steps)
            times.setdefault(f"{size} {'exact' if exact else 'fast'}", []).append(seconds / steps)
            if bench.rank == LOST and exact:
                equal.append(other.state.digests() == wanted)
            other.loader.stop()
    return {"normal": normal, "times": times, "equal": equal}


def report_replays(report: Report, shape: Shape, steps: int, repeats: int) -> None:
    """Replay against the bound (m + g - 1) / (m + p - 1) of a normal step, and teams against one."""
    found = stages.run(shape, partial(time_replays, steps, repeats))
    normal = statistics.median(max(times) for times in zip(*(answer["normal"] for answer in found), strict=True))
    lost = found[LOST]
    alone = lost["times"]["1 exact"]
    m = shape.micro_batches
    bound = normal * m / (m + STAGES - 1)
    kind = "paced" if shape.forward_s else "real"
    efficiency = {
        f"{size} {sums}": [a / b / size for a, b in zip(alone, lost["times"][f"{size} {sums}"], strict=True)]
        for size in (2, 4)
        for sums in ("fast", "exact")
    }
    if kind == "real":
        report.add("parallel_recovery_efficiency_d2_real", efficiency["2 fast"])
    else:
        report.add(f"replay_ratio_vs_bound{SUFFIXES[m]}", [seconds / bound for seconds in alone])
        for size in (2, 4):
            report.add(f"parallel_recovery_efficiency_d{size}{SUFFIXES[m]}", efficiency[f"{size} fast"])
            report.add(f"parallel_recovery_efficiency_d{size}_exact{SUFFIXES[m]}", efficiency[f"{size} exact"])
    words = ", ".join(f"{name}: {estimate(values)}" for name, values in efficiency.items())
    report.note(
        f"{kind}, m = {m}: normal step {1000 * normal:.1f} ms, replayed {1000 * statistics.median(alone):.1f} ms "
        f"({statistics.median(alone) / bound:.3f} of the bound); efficiency of {words}"
    )
    if not all(lost["equal"]):
        raise RuntimeError(f"{kind}, m = {m}: a replay was NOT bit-equal: {lost['equal']}")


# ---------------------------------------------------------------- recoveries of whole runs


class Clock:
    """Stands where the schedule stands: `step()` is called once for every step that is committed, and notes when."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._steps = 0

    def step(self) -> None:
        """A step was committed, for the first time or in a replay."""
        with (self._directory / f"clock-{os.getpid()}").open("a") as file:
            file.write(f"{self._steps} {time.monotonic()}\n")
        self._steps += 1

    def state_dict(self) -> dict[str, int]:
        """What a replacement takes over."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes it over."""
        self._steps = state["steps"]


class Clocked(Staged):
    """The same, with the time of every commit."""

    def __init__(self, shape: Shape, directory: str) -> None:
        super().__init__(shape)
        self._directory = directory

    def scheduler(self, optimizer: Any) -> Clock:
        """No schedule: a clock."""
        return Clock(self._directory)


def run_of(
    shape: Shape, directory: str, checkpoint: int | None, steps: int, faults: list[ft.FailAt], **recovery: Any
) -> tuple[ft.Result, list[tuple[int, float]]]:
    """A run in stages, and when each of its workers committed which step."""
    result = ft.Trainer(
        Clocked(shape, directory),
        max_steps=steps,
        global_batch_size=shape.batch,
        drop_last=True,
        quiet=True,
        faults=faults,
        scaling_config=ft.ScalingConfig(num_workers=STAGES),
        parallelism_config=ft.ParallelismConfig(pipeline_parallel_degree=STAGES, num_pp_microbatches=shape.micro_batches),
        recovery_config=ft.RecoveryConfig(**recovery),
        run_config=ft.RunConfig(name="run", storage_path=directory, checkpoint_config=ft.CheckpointConfig(every=checkpoint)),
    ).fit()
    lines = [line.split() for path in Path(directory).glob("clock-*") for line in path.read_text().splitlines()]
    return result, [(int(step), float(at)) for step, at in lines]


def recover(shape: Shape, checkpoint: int, steps: int, kill: int | None, **recovery: Any) -> tuple[float, str, str]:
    """A run, one of whose stages is killed in step `kill`: seconds until that step is committed, digest, and its account."""
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        fault = ft.FailAt(rank=LOST, step=kill, phase="forward", micro_batch=1)
        result, commits = run_of(shape, directory, checkpoint, steps, [] if kill is None else [fault], **recovery)
        struck = None if kill is None else when(Path(result.path) / "faults", fault)
        reached = [at for step, at in commits if step == kill and struck is not None and at > struck]
        seconds = min(reached) - struck if struck is not None else 0.0
        return seconds, result.digest, "; ".join(r.reason for r in result.recoveries)


def steps_on_nodes(shape: Shape, steps: int, log: bool) -> list[float]:
    """Seconds of each step of a run whose stages are on nodes of a cluster, from one commit of the last stage to the next; the
    first tenth is left out."""
    with tempfile.TemporaryDirectory(prefix="raytrain_ft-") as directory:
        result, commits = run_of(shape, directory, None, steps, [], log=ft.LogConfig(enabled=log), num_spares=0)
        written = [r for r in read_records(Path(result.path) / "events.jsonl") if r["event"] == "LogWritten"]
        logged, wanted = sum(r["payload_bytes"] for r in written), steps * (shape.log_bytes + AGREED_BYTES)
        if result.recoveries or logged != (wanted if log else 0):
            raise RuntimeError(f"{len(result.recoveries)} recoveries, {logged} bytes of log instead of {wanted if log else 0}")
        last = [max(at for step, at in commits if step == number) for number in range(steps // 10, steps)]
        return [b - a for a, b in pairwise(last)]


def report_on_nodes(report: Report, shape: Shape, rounds: int, steps: int) -> None:
    """Whole runs with a log and without, in turns, each stage on a node of its own."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    with LocalCluster(num_nodes=STAGES):
        for number in range(rounds):
            for log in (False, True) if number % 2 == 0 else (True, False):
                times[log].append(steps_on_nodes(shape, steps, log))
    ratio = paired_ratio(times[True], times[False])
    report.add("logged_step_ratio_paced_on_nodes", ratio)
    medians = [1000 * statistics.median(itertools.chain.from_iterable(times[log])) for log in (False, True)]
    report.note(f"on nodes, m = {shape.micro_batches}: step {medians[0]:.1f} ms, logged {medians[1]:.1f} ms, ratio {ratio}")


def report_recoveries(report: Report, shape: Shape, checkpoint: int, kill: int, repeats: int) -> dict[str, list[float]]:
    """The paper's protocol: one checkpoint, and a stage killed 50 steps later (SWIFT, section 7). Helpers sum as training does,
    which the paper's do not: what is replayed has the same bits. Returns the seconds of each way."""
    ways: dict[str, dict[str, Any]] = {
        "global checkpoint": {"strategy": "checkpoint"},
        "logging": {},
        "logging, four workers": {"replay_workers": STAGES, "replay_sums": "exact"},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    equal: list[bool] = []
    with LocalCluster(num_nodes=STAGES + 1):
        steps = kill + 5
        _, calm, _ = recover(shape, checkpoint, steps, None)
        for _ in range(repeats):
            for name, how in ways.items():
                seconds, digest, reason = recover(shape, checkpoint, steps, kill, **how)
                times[name].append(seconds)
                equal.append(digest == calm)
                report.note(f"{name}: back after {seconds:.2f} s ({reason})")
    for suffix, name in REPLAYS.items():
        pairs = zip(times[name], times["global checkpoint"], strict=True)
        report.add(f"recovery_reduction_vs_global_checkpoint{suffix}", [1 - ours / theirs for ours, theirs in pairs])
    report.add("bit_equal_share", Estimate(float(np.mean(equal)), float(np.mean(equal)), float(np.mean(equal)), len(equal)))
    return times


def report_peer(report: Report, shape: Shape, checkpoint: int, kill: int, times: dict[str, list[float]]) -> None:
    """The same protocol for Ray Train, which starts everybody again. `times`: ours."""
    try:
        theirs = measure_pipeline_restart(shape, checkpoint, kill, repeats=len(times["logging"]))
    except RuntimeError as error:
        for suffix in REPLAYS:
            report.absent(f"recovery_reduction_vs_ray_train_restart{suffix}", why=str(error))
        return
    report.note(f"Ray Train restart: back after {', '.join(f'{seconds:.2f}' for seconds in theirs)} s")
    for suffix, name in REPLAYS.items():
        reductions = [1 - a / b for a, b in zip(times[name], theirs, strict=True)]
        report.add(f"recovery_reduction_vs_ray_train_restart{suffix}", reductions)


def measure_all(report: Report, options: Options) -> None:
    """Steps, replays, whole runs on nodes, recoveries."""
    blocks, steps = (4, 5) if options.quick else (10, 10)
    replayed, repeats = (10, 3) if options.quick else (30, 11)  # of five, one slow replay decided the interval
    for micro_batches in (8,) if options.quick else SUFFIXES:
        report_steps(report, paced(micro_batches), blocks, steps)
        # steps that compute differ more from each other, and take as long as they have work: more blocks, all equally long
        report_steps(report, Shape(micro_batches), 2 * blocks, steps * max(SUFFIXES) // micro_batches)
        report_replays(report, paced(micro_batches), replayed, repeats)
    if not options.quick:
        report_replays(report, Shape(8), replayed, 15)  # of those that compute
    # whole runs differ more from each other than their steps do: many of them
    report_on_nodes(report, paced(8), *((2, 20) if options.quick else (16, 40)))
    checkpoint, kill = (20, 38) if options.quick else (100, 149)  # there is no second checkpoint before the kill
    times = report_recoveries(report, paced(4), checkpoint, kill, 1 if options.quick else 3)
    if options.quick:
        left_out = [f"{name}{suffix}" for name in OF_STEPS | OF_REPLAYS for suffix in ("_m4", "_m16")]
        left_out += [f"recovery_reduction_vs_ray_train_restart{suffix}" for suffix in REPLAYS]
        for key in (*left_out, "parallel_recovery_efficiency_d2_real"):
            report.absent(key, why="--quick leaves this out")
    else:
        report_peer(report, paced(4), checkpoint, kill, times)


def run(options: Options) -> Report:
    """All of it."""
    report = Report("pipeline", metrics_from=GOALS)
    with report.until_interrupted():
        measure_all(report, options)
    return report


if __name__ == "__main__":
    main(run, __doc__)
