"""How one worker is connected with the others in one incarnation: all that a step needs to know of the world.

Without a pipeline this is a group that reduces gradients. In a pipeline there are also the edges to the stages before and
after, and the agreement at the step's end: a few numbers summed over all stages. It costs one small all-reduce, at a time when
the last of the pipeline's bubbles has just ended for everybody, and it is why no stage ever updates in a step that another one
could not finish: undo is never needed (SWIFT, section 6, has stages undo instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raytrain_ft.policy.topology import replica_of, stage_of
from raytrain_ft.storage.tensor_log import Key, TensorLog
from raytrain_ft.training.edges import (
    RECORD_DEADLINE_S,
    WHOLE_STEP,
    Inbound,
    LiveInbound,
    LiveOutbound,
    LoggedInbound,
    Outbound,
    Past,
    Tap,
)
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.team import Team

EVERYBODY = -1
"""In place of a sender and a receiver."""


def agreed_key(step: int) -> Key:
    """What all agreed upon at the end of a step. Everybody logs it, for everybody has the same."""
    return Key(step, WHOLE_STEP, "agreed", EVERYBODY, EVERYBODY)


Sample = Callable[[], int]
"""Makes a number that stands for this worker's gradients (`buckets.sample_of`); asked for only where there is a log."""
Agree = Callable[[int, Tensor, Sample], Tensor]
"""Given a step, numbers to be summed over all stages, and what makes a sample of this worker's gradients;
returns the sums and, by rank, a number for all that each worker has sent and computed in the step, which a replay compares."""


@dataclass(frozen=True, slots=True)
class TiedEdge:
    """Between two stages that share parameters: once a step, the gradients of these go both ways.

    Attributes:
        stage: the other one.
    """

    stage: int
    outbound: Outbound
    inbound: Inbound


@dataclass(frozen=True, slots=True)
class Links:
    """One worker's connections.

    Attributes:
        replica, replicas: which copy of its stage the worker hosts, and of how many.
        group: of the replicas of this stage, or of those that do not sleep; sums their gradients.
        activations, gradients: where a stage's inputs come from, in the forward and in the backward pass.
        outputs, input_gradients: where its outputs go.
        ties: to each stage that shares parameters with this one.
        agree: sums a few numbers over all stages; None without a pipeline.
        team: who replays this stage together with this worker; None if it is alone.
    """

    fence: Fence
    replica: int
    replicas: int
    group: FencedGroup | Solo
    activations: Inbound | None = None
    gradients: Inbound | None = None
    outputs: Outbound | None = None
    input_gradients: Outbound | None = None
    ties: tuple[TiedEdge, ...] = ()
    agree: Agree | None = None
    team: Team | None = None


def data_parallel(group: FencedGroup) -> Links:
    """The connections of a worker that hosts the whole model."""
    return Links(group.fence, group.rank(), group.size(), group)


class Switchboard:
    """Makes the connections of one worker of a pipeline.

    Args:
        world: the group of all ranks; rank r hosts stage r % stages of replica r // stages.
        stage_group: that of the replicas of this worker's stage.
        logged: the boundaries that are logged, each named by the stage before it.
        log: this worker's log; None logs nothing.
        stage: the stage to connect, if that is not the worker's own: it helps another one.
        sharing: the stages that share parameters, for each that is shared.
        looped: the last stage feeds the first.
    """

    def __init__(
        self,
        world: FencedGroup,
        stage_group: FencedGroup | Solo,
        stages: int,
        logged: frozenset[int],
        log: TensorLog | None,
        stage: int | None = None,
        sharing: Sequence[Sequence[int]] = (),
        *,
        looped: bool = False,
    ) -> None:
        self._world, self._stage_group = world, stage_group
        self._stages, self._logged, self._log = stages, logged, log
        self._idle = nullcontext if log is None else log.idle
        self._stage = stage_of(world.rank(), stages) if stage is None else stage
        self._replica = replica_of(world.rank(), stages)
        self._replicas = world.size() // stages
        self._tied = sorted({other for stages in sharing if self._stage in stages for other in stages} - {self._stage})
        self._looped = looped
        self._taps: list[tuple[frozenset[int], Tap]] = []

    def log_only(self, boundaries: frozenset[int]) -> None:
        """From now on, of what is logged this is enough; also on the edges that there are. From any thread."""
        self._logged &= boundaries
        for crossed, tap in self._taps:
            if self._logged.isdisjoint(crossed):
                tap.stop_logging()

    def live(self, past: Past | None = None) -> Links:
        """For training: every edge leads to a neighbour.

        Args:
            past: what this worker has replayed. The first step that it then trains was begun before, and shows what the last
                update has led to.
        """
        return self._connect(self._live_inbound, None, self._agree, past)

    def replay(self, past: Past, together: frozenset[int], team: Team | None = None) -> Links:
        """For a replay: edges to stages that are replayed `together` are live, all others come from the log.

        Args:
            team: who replays the same stage; all of its members log what they compute of it and nobody has logged.
        """
        reader = past.reader

        def inbound(neighbour: int, kind: Any) -> Inbound:
            if neighbour in together:
                return self._live_inbound(neighbour, kind)
            key = lambda step, number: Key(step, number, kind, neighbour, self._stage, self._replica)  # noqa: E731
            return LoggedInbound(reader, key, self._world.fence.check)

        def recall(edges: Sequence[Outbound], step: int, numbers: Tensor, sample: Sample) -> Tensor:
            found = reader.await_record(agreed_key(step), RECORD_DEADLINE_S, self._world.fence.check)[0]
            before = int(found[len(numbers) :][self._own].sum())  # 0 where a log does not say it
            now = of_step(edges, sample() if team is None or team.leads else 0)  # which all of a team have
            past.compare(self._stage, step, before, team.total(now) if team is not None and past.exact else now)
            return found

        return self._connect(inbound, together, recall, past, team)

    def _connect(
        self,
        inbound: Callable[[int, Any], Inbound],
        together: frozenset[int] | None,
        agree: Callable[[Sequence[Outbound], int, Tensor, Sample], Tensor],
        past: Past | None,
        team: Team | None = None,
    ) -> Links:
        is_fed, feeds = self._looped or self._stage > 0, self._looped or self._stage < self._stages - 1
        before, after = (self._stage - 1) % self._stages, (self._stage + 1) % self._stages

        def outbound(neighbour: int, kind: Any) -> Outbound:
            return self._outbound(neighbour, kind, together, past)

        outputs = outbound(after, "activation") if feeds else None
        input_gradients = outbound(before, "gradient") if is_fed else None
        ties = tuple(TiedEdge(other, outbound(other, "tied"), inbound(other, "tied")) for other in self._tied)
        edges = [edge for edge in (outputs, input_gradients) if edge is not None]
        if team is None or team.leads:  # all of a team send the same there
            edges += [tie.outbound for tie in ties]
        return Links(
            self._world.fence,
            self._replica,
            self._replicas,
            self._stage_group if team is None else team.sums,
            activations=inbound(before, "activation") if is_fed else None,
            gradients=inbound(after, "gradient") if feeds else None,
            outputs=outputs,
            input_gradients=input_gradients,
            ties=ties,
            agree=partial(agree, edges),
            team=team,
        )

    def _rank(self, stage: int) -> int:
        return self._replica * self._stages + stage

    def _live_inbound(self, neighbour: int, kind: Any) -> LiveInbound:
        return LiveInbound(self._world, self._rank(neighbour), kind, self._idle)

    def _outbound(self, neighbour: int, kind: Any, together: frozenset[int] | None, past: Past | None) -> Outbound:
        is_live = together is None or neighbour in together
        replays = together is not None
        live = LiveOutbound(self._world, self._rank(neighbour), kind, replays=replays) if is_live else None
        if live is not None and past is None and not self._logs:
            return live
        crossed = frozenset(range(min(self._stage, neighbour), max(self._stage, neighbour)))
        log = self._log if not self._logged.isdisjoint(crossed) else None  # else both are lost together
        key = lambda step, number: Key(step, number, kind, self._stage, neighbour, self._replica)  # noqa: E731
        tap = Tap(live, log, key, self._world.fence, past)
        self._taps.append((crossed, tap))
        return tap

    @property
    def _logs(self) -> bool:
        """Whether anything may be replayed: without a boundary that is logged, all stages are lost together."""
        return self._log is not None and bool(self._logged)

    @property
    def _own(self) -> slice:
        """Where, behind the numbers that all agree upon, the one is that stands for what this stage sent and computed."""
        rank = self._rank(self._stage)
        return slice(rank, rank + 1)

    def _agree(self, edges: Sequence[Outbound], step: int, numbers: Tensor, sample: Sample) -> Tensor:
        of_all = numbers.new_zeros(self._world.size())
        logs = self._logs
        if logs:
            of_all[self._own] = of_step(edges, sample())
        agreed = torch.cat([numbers, of_all])
        with self._idle():
            self._world.all_reduce(agreed).wait()
        if logs and self._log is not None:
            fence = self._world.fence
            self._log.append(agreed_key(step), fence.incarnation, [agreed], fence.check)
        return agreed


def of_step(edges: Sequence[Outbound], sample: int) -> int:
    """What a stage has sent (`Tap.sent`) and computed in the step at hand, in a number of 48 bits."""
    return (sum(edge.sent for edge in edges if isinstance(edge, Tap)) + sample) % 2**48
