"""`raytrain-ft plan`: how a job would recover in a pipeline, and what to log for it, from its own measured stages."""

from __future__ import annotations

import click
from rich.table import Table

from raytrain_ft.cli import arguments, output
from raytrain_ft.config import ParallelismConfig
from raytrain_ft.errors import ConfigError, FTError
from raytrain_ft.loading import load_task
from raytrain_ft.policy.logging_cost import bubble_share
from raytrain_ft.policy.plan_words import explain
from raytrain_ft.policy.planning import ASSUMED_INTERVAL, BANDWIDTH, Groups, Measured, Plan, Wish, named, plan
from raytrain_ft.policy.units import in_bytes, in_seconds
from raytrain_ft.task import TrainTask
from raytrain_ft.training.profile import measure_pipeline
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.split import measure_cuts
from raytrain_ft.training.ties import find_ties

console = output.console()
SAMPLES = 4
"""Of a micro-batch, where no batch size is given."""


@click.command("plan")
@click.argument("job", metavar="JOB:TASK")
@click.option("--stages", type=click.IntRange(min=2), required=True, help="Stages of the pipeline.")
@click.option("--replicas", type=arguments.WHOLE, default=1, show_default=True, help="Copies of the pipeline.")
@click.option("--nodes", type=arguments.WHOLE, help="Nodes that the workers are spread over; default: one for each worker.")
@click.option("--micro-batches", type=arguments.WHOLE, help="Of each replica and step; default: twice the stages.")
@click.option("--batch-size", type=arguments.WHOLE, help=f"Samples of a step; default: {SAMPLES} per micro-batch.")
@click.option("--checkpoint-every", type=arguments.WHOLE, default=ASSUMED_INTERVAL, show_default=True, help="Steps.")
@click.option("--bandwidth", type=arguments.POSITIVE, default=BANDWIDTH / 1e9, show_default=True, help="Of the network, GB/s.")
@click.option("--budget", type=arguments.WHOLE, help="Bytes of log between two checkpoints, all workers together.")
@click.option("--target", type=arguments.POSITIVE, help="Seconds of recovery per lost step.")
@click.option(
    "--parallel-recovery",
    is_flag=True,
    help="Survivors help to replay, all of them: RecoveryConfig(replay_workers=N) with N stages.",
)
@click.option(
    "--split", type=click.Choice(["auto", "task"]), default="auto", show_default=True, help="As in ParallelismConfig."
)
def plan_command(
    job: str,
    stages: int,
    replicas: int,
    nodes: int | None,
    micro_batches: int | None,
    batch_size: int | None,
    checkpoint_every: int,
    bandwidth: float,
    budget: int | None,
    target: float | None,
    parallel_recovery: bool,
    split: str,
) -> None:
    """Recommends how to recover a job in stages, and which boundaries to log.

    JOB is a Python file or module, TASK a TrainTask in it: an instance, or a subclass with its arguments, as in
    jobs/train_lm.py:'PythonLM(100)'. The stages are built and timed here, one after the other; nothing is trained, and no
    cluster is needed.
    """
    wish = Wish(
        interval=checkpoint_every,
        bandwidth=bandwidth * 1e9,
        nodes=nodes or 0,
        budget_bytes=budget,
        target_seconds=target,
        replay_workers=stages if parallel_recovery else 1,
    )
    try:
        how = ParallelismConfig(pipeline_parallel_degree=stages, num_pp_microbatches=micro_batches)
        measured = _measure(load_task(job), stages, replicas, how.micro_batches, batch_size, split)
        show(plan(measured, wish))
    except FTError as error:
        raise click.ClickException(str(error)) from error


# ---------------------------------------------------------------- the job


def _measure(task: TrainTask, stages: int, replicas: int, micro_batches: int, batch_size: int | None, split: str) -> Measured:
    per_step = replicas * micro_batches
    batch_size = SAMPLES * per_step if batch_size is None else batch_size
    if batch_size % per_step:
        raise ConfigError(
            f"--batch-size {batch_size}: {replicas} replicas of {micro_batches} micro-batches need a multiple of {per_step}"
        )
    samples = batch_size // per_step
    cuts = measure_cuts(task, stages, batch_size // micro_batches) if split == "auto" else None  # `pipeline_of` does so too
    ties = find_ties(task, stages, cuts)
    step = StepSettings(pipeline=PipelineSettings(stages=stages, micro_batches=micro_batches, cuts=cuts, ties=ties))
    return measure_pipeline(task, step, samples, replicas, threads=1)


# ---------------------------------------------------------------- printing


def show(found: Plan) -> None:
    """Prints a plan: the stages, the recoveries, the groupings, and why."""
    measured, wish = found.measured, found.wish
    nodes, copies = wish.nodes or measured.stages * measured.replicas, measured.replicas
    console.print(
        f"{measured.stages} stages in {'one copy' if copies == 1 else f'{copies} copies'} on {nodes} node{'s' * (nodes > 1)}, "
        f"{measured.micro_batches} micro-batches; a step takes about {in_seconds(measured.step_seconds)} here, with "
        f"{bubble_share(measured.stages, measured.micro_batches):.0%} of it idle"
    )
    console.print(_stages(found))
    console.print(_recoveries(found))
    if len(found.every) > 1 and not found.all_replicated:
        console.print(_groupings(found))
    for line in explain(found):
        console.print(f"* {line}", markup=False)


def _stages(found: Plan) -> Table:
    measured = found.measured
    table = Table("stage", "computes per step", "state", "crosses to the next per step", "logged", "if it is lost")
    logged = {group[-1] for group in found.groups[:-1]} if found.worth.worth else set()
    for stage, seconds in enumerate(measured.compute):
        last = stage == measured.stages - 1
        crossing = "" if last else in_bytes(measured.replicas * measured.crossing[stage])
        mark = "" if last else "yes" if stage in logged else "no"
        state = in_bytes(measured.state[stage])
        output.row(table, str(stage), in_seconds(seconds), state, crossing, mark, found.strategies[stage])
    return table


def _recoveries(found: Plan) -> Table:
    """What losses cost: on average half an interval is lost."""
    measured, wish = found.measured, found.wish
    table = Table(
        "recovery", "per lost step", f"expected, {wish.interval / 2:g} steps lost", "log per step", "between checkpoints"
    )

    def row(name: str, seconds: float, log: float) -> None:
        between = log * wish.interval
        output.row(table, name, in_seconds(seconds), in_seconds(seconds * wish.interval / 2), in_bytes(log), in_bytes(between))

    if "replication" in found.strategies:
        output.row(table, "replication", "none lost", in_seconds(max(measured.state) / wish.bandwidth), "0 B", "0 B")
    if len(found.groups) > 1:
        helpers = [found.most_helpers(group) for group in found.groups]
        row("logging, without helpers", found.seconds(found.groups, 1), found.log)
        most = f"{min(helpers)} to {max(helpers)}" if len(set(helpers)) > 1 else str(helpers[0])
        if max(helpers):
            row(f"logging, with {most} helpers", found.seconds(found.groups, measured.stages), found.log)
    row("global checkpoint", measured.step_seconds, 0)
    return table


def _groupings(found: Plan) -> Table:
    table = Table("grouping", "groups", "expected per lost step", "log between checkpoints")

    def row(name: str, groups: Groups) -> None:
        seconds = found.seconds(groups)
        output.row(table, name, named(groups), in_seconds(seconds), in_bytes(found.log_between(groups)))

    row("every boundary", found.every)
    row("optimum", found.groups)
    row("greedy (the paper's)", found.greedy)
    return table
