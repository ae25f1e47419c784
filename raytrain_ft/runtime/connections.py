"""How a worker connects with the others of its incarnation: the groups of a world, and the log of what crosses its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from raytrain_ft.policy.commands import Replay
from raytrain_ft.policy.topology import replica_of, stage_of
from raytrain_ft.runtime.rendezvous import RayStore
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.tensor_log import TensorLog
from raytrain_ft.training import process_group
from raytrain_ft.training.apart import Parting
from raytrain_ft.training.edges import Past
from raytrain_ft.training.links import Links, Switchboard, agreed_key, data_parallel
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.team import Team


def open_log(
    spec: RunSpec, member: str, tell: Callable[[str, dict[str, Any]], None], beside: Callable[[], int]
) -> TensorLog | None:
    """A worker's log of what it sends to other stages; None if the run has none. `beside`: see `TensorLog`."""
    if spec.log is None:
        return None
    how = spec.log
    return TensorLog(
        spec.logs,
        member,
        memory_bytes=how.memory_bytes,
        quota_bytes=how.quota_bytes,
        beside=beside,
        compression=how.compression,
        synchronous=how.synchronous,
        tell=tell,
    )


class Connections:
    """One worker's connections in one incarnation.

    Args:
        world: the group of all ranks.
        logged: the boundaries that are logged, each named by the stage before it.
        past: what this worker has replayed in an earlier incarnation, of whose end nothing was sent yet.

    Attributes:
        past: what it has replayed, now or before.
    """

    def __init__(
        self,
        spec: RunSpec,
        supervisor: Any,
        world: FencedGroup,
        host: str,
        logged: frozenset[int],
        log: TensorLog | None,
        timeout: timedelta,
        past: Past | None = None,
    ) -> None:
        self._spec, self._supervisor, self._world, self._host = spec, supervisor, world, host
        self._logged, self._log, self._timeout = logged, log, timeout
        self._stages = spec.rules.stages
        self._team: FencedGroup | None = None
        self._parting: Parting | None = None
        self._links: list[Links] = []
        self.past = past
        self._board: Switchboard | None = None
        self._stage_group: FencedGroup | Solo | None = None
        if self._stages > 1:
            self._stage_group = self._join_stage()
            self._board = self._switchboard(None)

    def _join_stage(self) -> FencedGroup | Solo:
        rank, replicas = self._world.rank(), self._world.size() // self._stages
        if replicas == 1:
            return Solo(self._world.fence)
        return self._join(f"stage-{stage_of(rank, self._stages)}/", replica_of(rank, self._stages), replicas)

    def _join(self, name: str, rank: int, size: int) -> FencedGroup:
        """Builds a group of some of this world's workers."""
        fence = self._world.fence
        store = RayStore(self._supervisor, fence, self._timeout, name)
        return process_group.build(store, rank, size, fence, host=self._host, timeout=self._timeout, default=False)

    def parting(self) -> Parting:
        """For while some sleep."""
        replicas = self._world.size() // self._stages
        self._parting = Parting(self._join, replica_of(self._world.rank(), self._stages), replicas)
        return self._parting

    def _switchboard(self, stage: int | None) -> Switchboard:
        pipeline = self._spec.step.pipeline
        assert self._stage_group is not None
        assert pipeline is not None
        about = (self._world, self._stage_group, self._stages, self._logged, self._log, stage)
        return Switchboard(*about, pipeline.sharing, looped=pipeline.chunks > 1)

    def log_only(self, incarnation: int, boundaries: frozenset[int]) -> None:
        """Of the boundaries that are logged, these are enough from now on. A word of another incarnation is not about these."""
        if incarnation == self._world.fence.incarnation and self._board is not None:
            self._board.log_only(boundaries)

    def live(self, rounded: int = 0) -> Links:
        """For training. `rounded`: see `Run`."""
        if self._board is None:
            return data_parallel(self._world)
        if self.past is not None and self.past.until < rounded:
            self.past = None  # another stage is not what it was, to the bit: what it receives is not what it had received
        return self._keep(self._board.live(self.past))

    def _keep(self, links: Links) -> Links:
        """What was sent at the end of a replay may be on its way for longer than the replay takes."""
        self._links.append(links)
        return links

    @contextmanager
    def replay(self, command: Replay, stage: int, size: int, number: int) -> Iterator[Links]:
        """For a replay, as long as it takes.

        Args:
            stage: the one that this worker replays, as `number` of a team of `size`; number 0 hosts it.
        """
        past = Past(LogReader(self._spec.logs, command.since), command.until, command.exact, command.since)
        try:
            team = self._join_team(stage, size, number) if size > 1 else None
            yield self._keep(self._switchboard(stage).replay(past, frozenset(command.stages), team))
        finally:
            past.reader.close()
        if number == 0:  # else this is another stage's, and its own is as it was
            self.past = past if command.exact else None

    def _join_team(self, stage: int, size: int, number: int) -> Team:
        """Whoever helps builds the stage first, and loads its checkpoint."""
        fence, timeout = self._world.fence, max(self._timeout, timedelta(seconds=self._spec.rules.phase_timeout))
        store = RayStore(self._supervisor, fence, timeout, f"team-{stage}/")
        self._team = process_group.build(store, number, size, fence, host=self._host, timeout=timeout, default=False)
        pipeline = self._spec.step.pipeline
        assert pipeline is not None
        return Team(self._team, pipeline.micro_batches, exact=self._spec.rules.exact_sums)

    def note_agreed(self, step: int, numbers: Sequence[float]) -> None:
        """Logs what all agreed upon in a step that was completed by a recovery."""
        if self._log is not None and numbers:
            agreed = torch.tensor(numbers, dtype=torch.float64)
            self._log.append(agreed_key(step), self._world.fence.incarnation, [agreed])

    def leave(self) -> None:
        """The incarnation is over."""
        for group in (self._stage_group, self._team):
            process_group.leave(group)
        if self._parting is not None:
            self._parting.leave()
