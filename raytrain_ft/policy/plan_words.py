"""Why a plan is as it is, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_ft.policy.logging_cost import bubble_share
from raytrain_ft.policy.planning import Measured, Plan, most_per_stage, named
from raytrain_ft.policy.topology import Groups
from raytrain_ft.policy.units import in_bytes, in_seconds

DEVICE_COPY = 12e9
"""Bytes per second from a GPU to its host: what PCIe 3.0 x16 reaches, and the paper's machines with it."""


def explain(plan: Plan) -> tuple[str, ...]:
    """Sentences: of the strategies, of the groups, and what holds on GPUs."""
    return (*_why_strategies(plan), *_why_groups(plan), *_advice(plan.measured, plan.groups))


def _why_strategies(plan: Plan) -> list[str]:
    measured, strategies, lines = plan.measured, plan.strategies, []
    copied = [stage for stage, strategy in enumerate(strategies) if strategy == "replication"]
    others = [stage for stage, strategy in enumerate(strategies) if strategy != "replication"]
    if copied:
        slowest = max(measured.state[stage] for stage in copied) / plan.wish.bandwidth
        lines.append(
            f"Replication for {_stages(copied)}: a replica is on another node, so no step is lost; its state is copied in "
            f"{in_seconds(slowest)}."
        )
    if others and measured.replicas > 1:
        lines.append(f"The replicas of {_stages(others)} share a node, and would be lost together.")
    if others:
        lines.append(f"{strategies[others[0]].capitalize()} for {_stages(others)}: {plan.worth.reason}.")
    else:
        lines.append(
            "Nothing is logged: that would only matter if all replicas of a stage were lost at once, and then everybody goes "
            'back to the checkpoint. strategy="logging" logs all the same.'
        )
    return lines


def _why_groups(plan: Plan) -> list[str]:
    wish, groups, greedy = plan.wish, plan.groups, plan.greedy
    if plan.all_replicated:
        return []
    if len(plan.every) == 1:
        return ["All stages are on one node: there is no boundary to log."]
    full, kept = plan.log_between(plan.every), plan.log_between(groups)
    lines = []
    if wish.budget_bytes is not None:
        fits = "within" if full <= wish.budget_bytes else "over"
        lines.append(
            f"Logging every boundary takes {in_bytes(full)} between two checkpoints, {fits} the budget of "
            f"{in_bytes(wish.budget_bytes)}; the groups {named(groups)} take {in_bytes(kept)}, and of all that fit they "
            "recover fastest."
        )
    elif wish.target_seconds is not None:
        lines.append(
            f"The groups {named(groups)} log least ({in_bytes(kept)} between two checkpoints, of {in_bytes(full)}) of all that "
            f"recover within {in_seconds(wish.target_seconds)} per lost step."
        )
    else:
        lines.append(
            f"Every boundary between nodes is logged, {in_bytes(full)} between two checkpoints; --budget asks for less."
        )
    if greedy != groups:
        ours, theirs = (plan.seconds(one) for one in (groups, greedy))
        more = plan.log_between(greedy) - kept
        lines.append(
            f"The paper's greedy algorithm chooses {named(greedy)}: {in_seconds(theirs)} per lost step instead of "
            f"{in_seconds(ours)}, and {in_bytes(abs(more))} {'more' if more >= 0 else 'less'} log."
        )
    joint = [group for group in groups if len(group) > 1]
    if joint:
        lines.append(
            "If one stage of a group is lost, all of that group go back and replay together. Their times are added up here, as "
            "in the paper; in fact they overlap."
        )
        if wish.replay_workers > 1:
            lines.append(
                "The paper's estimate has survivors help larger groups; so far only groups of one stage have helpers here."
            )
    return lines


def _advice(measured: Measured, groups: Groups) -> list[str]:
    """Whether a GPU could copy its log while it is idle (section 5.4). A CPU copies nothing, so this decides nothing."""
    if len(groups) == 1:
        return []
    busiest = most_per_stage(measured, groups)
    idle = bubble_share(measured.stages, measured.micro_batches)
    shortest = busiest / DEVICE_COPY / idle if idle else 0.0
    return [
        f"A stage is idle for {idle:.0%} of a step ({measured.stages} stages, {measured.micro_batches} micro-batches). On GPUs "
        f"that copy {in_bytes(DEVICE_COPY)}/s to the host, its {in_bytes(busiest)} of log fit in there if a step takes "
        f"{in_seconds(shortest)} or more; on CPUs nothing is copied."
    ]


def _stages(numbers: Sequence[int]) -> str:
    return ("stage " if len(numbers) == 1 else "stages ") + ", ".join(map(str, numbers))
