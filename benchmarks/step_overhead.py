"""What does a step cost while nothing fails, against plain DDP?    python -m benchmarks.step_overhead [--quick]

All sides live at once and take turns, block by block: DDP, raytrain_ft, DDP again. A block of ours is compared with DDP's
before and after it, and DDP with itself. A step is measured from one point of the loop to the same point of the next.
All sides have equal terms (`EQUAL_TERMS`), the same optimizer, samples and bucket sizes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks import ddp
from benchmarks.harness import (
    REPORT_ONLY,
    Goal,
    Options,
    Report,
    Turns,
    main,
    noise_floor,
    paired_ratio,
    read_blocks,
    total_ratio,
)
from benchmarks.models import MEDIUM, SMALL, Work
from benchmarks.ours import PATIENT, Paced, Timed, training, update_seconds
from benchmarks.peers import ray_torchft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.training.memory import STREAMING

GOALS = {
    "step_ratio_vs_ddp_2_workers": Goal("<=", 1.02),
    "step_ratio_vs_ddp_4_workers": Goal("<=", 1.02),
    "step_ratio_of_all_steps_2_workers": REPORT_ONLY,  # slow steps count, too
    "step_ratio_of_all_steps_4_workers": REPORT_ONLY,
    "torchft_step_ratio_vs_ddp_2_workers": Goal("report"),
    "wait_free_ratio_vs_barrier": Goal("report"),
    "step_ratio_vs_ddp_2_workers_paced": Goal("report"),  # not in the specification
}
EQUAL_TERMS = {
    # Ray runs its workers at nice 15. That says something of Ray on a busy machine, and nothing of a step.
    "RAY_worker_niceness": "0",
    # glibc gives freed gradients back to the system and faults them in again in the next step, or it does not: that depends
    # on the thread and on the order of what is freed, and makes a step of either side up to a quarter longer.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    # Ours get this anyway, and it speeds up all large copies of a process: it would be an advantage that is no merit of a step.
    **STREAMING,
}
PATIENCE_S = 1200.0
Blocks = list[list[float]]  # step times in seconds, each step as long as its slowest rank


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: (blocks, steps per block) of each comparison."""

    two: tuple[int, int] = (81, 6)
    four: tuple[int, int] = (61, 6)
    update: tuple[int, int] = (41, 6)
    paced: tuple[int, int] | None = (41, 6)
    torchft: tuple[int, int] = (41, 6)


QUICK = Plan(two=(11, 5), four=(6, 4), update=(5, 5), paced=None, torchft=(5, 5))


def as_ddp_does(work: Work) -> Work:
    """With torch's default bucket sizes: DDP has the small first bucket, as we do, only if it is given no size."""
    return replace(work, bucket_mb=None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The blocks of the three sides, without the first ones (warm-up)."""

    ddp: Blocks
    ours: Blocks
    again: Blocks

    @property
    def around(self) -> Blocks:
        """Of DDP: the block before and the block after each of ours, as one."""
        return [before + after for before, after in zip(self.ddp, self.again, strict=True)]

    def __str__(self) -> str:
        names = (("DDP", self.ddp), ("raytrain_ft", self.ours), ("DDP again", self.again))
        medians = (f"{name} {1e3 * statistics.median(itertools.chain(*blocks)):.1f}" for name, blocks in names)
        return f"median step, ms: {', '.join(medians)}"


def compare(name: str, num_workers: int, work: Work, plan: tuple[int, int]) -> Comparison:
    """DDP, raytrain_ft, DDP again; and so on."""
    sides = ("ddp", "raytrain_ft", "ddp again")
    with ExitStack() as stack:
        enter = stack.enter_context
        storage = enter(tempfile.TemporaryDirectory(prefix="step-"))
        turns = enter(Turns.create([(side, num_workers) for side in sides], timeout_s=240.0))
        task = Timed(work, turns, sides[1], plan)
        run = enter(training(task, name, storage, num_workers, PATIENT, max_steps=task.max_steps))
        peers = [enter(ddp.start_blocks(num_workers, work, *plan, turns=turns, side=side)) for side in sides[::2]]
        times = [peer.result(PATIENCE_S, failed=run.why_failed) for peer in peers]
        run.result(PATIENCE_S)
        first, ours, again = (
            [block.slowest for block in blocks[1:]] for blocks in (times[0], read_blocks(turns, sides[1], plan[0]), times[1])
        )
        return Comparison(first, ours, again)


def compare_updates(num_workers: int, work: Work, plan: tuple[int, int]) -> tuple[Blocks, Blocks, float]:
    """Blocks with `update="barrier"` and "wait_free", in turns; and the update's share of a step with the former."""
    sides = ("barrier", "wait_free")
    with ExitStack() as stack:
        enter = stack.enter_context
        storage = enter(tempfile.TemporaryDirectory(prefix="step-"))
        turns = enter(Turns.create([(side, num_workers) for side in sides], timeout_s=240.0))
        runs = []
        for side in sides:
            task = Timed(work, turns, side, plan)
            recovery = replace(PATIENT, update=side)
            run = enter(training(task, f"step-{side}", storage, num_workers, recovery, max_steps=task.max_steps))
            run.wait_for("its workers", lambda account: account["world"])  # before the other run looks for room
            runs.append(run)
        for run in runs:
            run.result(PATIENCE_S)
        barrier, wait_free = ([block.slowest for block in read_blocks(turns, side, plan[0])[1:]] for side in sides)
        update = statistics.median(update_seconds(turns, sides[0]))
        return barrier, wait_free, update / statistics.median(itertools.chain(*barrier))


def measure_ours(report: Report, plan: Plan, seed: int) -> None:
    """Everything that runs on our own cluster."""
    with LocalCluster(num_nodes=4):
        two = compare("step-2", 2, as_ddp_does(SMALL), plan.two)
        report.add("step_ratio_vs_ddp_2_workers", paired_ratio(two.ours, two.around, seed))
        report.add("step_ratio_of_all_steps_2_workers", total_ratio(two.ours, two.around, seed))
        report.note(f"2 workers, 4M: {two}")
        four = compare("step-4", 4, as_ddp_does(MEDIUM), plan.four)
        report.add("step_ratio_vs_ddp_4_workers", paired_ratio(four.ours, four.around, seed))
        report.add("step_ratio_of_all_steps_4_workers", total_ratio(four.ours, four.around, seed))
        floors = [noise_floor(side.ddp, side.again, seed) for side in (two, four)]
        report.noise_floor = max(floors)
        report.note(f"4 workers, 10M: {four}")
        report.note(f"DDP against itself: ±{floors[0]:.2%} with 2 workers, ±{floors[1]:.2%} with 4")
        barrier, wait_free, share = compare_updates(2, Work(num_parameters=10_000_000, batch_per_worker=16), plan.update)
        report.add("wait_free_ratio_vs_barrier", paired_ratio(wait_free, barrier, seed))
        report.note(f"wait-free: 2 workers, 10M, batches of 16; the update is {share:.0%} of a step with barrier")
        if plan.paced is None:
            report.absent("step_ratio_vs_ddp_2_workers_paced", "only without --quick")
            return
        work = as_ddp_does(Paced(num_parameters=4_000_000, batch_per_worker=32, pace_s=0.06))
        paced = compare("step-paced", 2, work, plan.paced)
        report.add("step_ratio_vs_ddp_2_workers_paced", paired_ratio(paced.ours, paced.around, seed))
        report.note(f"paced, 2 workers, 4M, 60 ms of each step asleep: {paced}")


def measure(options: Options) -> Report:
    """All comparisons, one after the other."""
    os.environ.update(EQUAL_TERMS)
    plan = QUICK if options.quick else Plan()
    report = Report("step_overhead", metrics_from=GOALS)
    measure_ours(report, plan, options.seed)
    peer = ray_torchft.measure_step_time(2, as_ddp_does(SMALL), *plan.torchft)
    report.add("torchft_step_ratio_vs_ddp_2_workers", peer.ratio(options.seed))
    report.note(
        "Equal terms on all sides: Ray's workers at nice 0 instead of 15, a C allocator that keeps freed memory, and large "
        "copies that are written past the caches. Whatever runs in the background runs in everybody's turn: it is not in the "
        "ratios."
    )
    report.note("torchft's hook is patched in its favour (see benchmarks/peers/ray_torchft.py).")
    return report


if __name__ == "__main__":
    main(measure, __doc__)
