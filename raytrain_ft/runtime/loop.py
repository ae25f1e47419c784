"""What a worker does between two disturbances: step after step, checkpoints at boundaries, and sleep where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from raytrain_ft.policy.commands import Run
from raytrain_ft.runtime.connections import Connections
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.training.apart import Woken, can_be_sent
from raytrain_ft.training.attempt import Commit
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.step import Replica
from raytrain_ft.training.stopwatch import FirstSteps

TELL_S = 1.0
"""How long the supervisor is given to acknowledge steps that would be lost with who tells of them."""


class Loop:
    """The training of one replica in one incarnation. It belongs to the training thread.

    Args:
        command: to train. rank: of this worker.
        asleep: whether this replica slept when it was interrupted.
        loaded: the whole world has begun this incarnation with what is stored, or anew.

    Attributes:
        in_first_step: no step has been done yet.
        asleep: whether this replica sleeps now, as far as was told.
    """

    def __init__(
        self,
        spec: RunSpec,
        replica: Replica,
        connections: Connections,
        heartbeat: Heartbeat,
        fence: Fence,
        command: Run,
        rank: int,
        asleep: bool,
        loaded: bool,
    ) -> None:
        self._spec, self._replica, self._heartbeat = spec, replica, heartbeat
        self._fence, self._command, self._rank = fence, command, rank
        self._links, self._parting = connections.live(command.rounded), connections.parting()
        self._sleep = replica.state.tail.sleep
        self._writers: list[int] = []
        self.in_first_step = True
        self.asleep = asleep
        self._loaded = loaded

    def run(self) -> bool:
        """To the last step, or to a boundary at which all agree to stop; returns whether it is the latter.

        Raises:
            FencedError: the incarnation ended; PeerLostError: a peer did. And what a step raises.
        """
        replica, state = self._replica, self._replica.state
        state.tail.stop_requested = False
        self._sleep.begin()
        self._share_checkpoints(self._parting.members)
        self._share_out()
        if self._may_lack_epoch():
            replica.checkpoint(self._fence.check)
        first_steps = FirstSteps() if self._spec.rules.selective is not None else None
        while state.step < self._spec.rules.max_steps:
            boundary = self._train()
            if first_steps is not None and (seconds := first_steps.add(replica.computed_s)) is not None:
                self._note("StageTimed", seconds=seconds)
                first_steps = None
            self.in_first_step = False
            if boundary.reads_change:
                self._share_out()
            if boundary.checkpoint:
                replica.checkpoint(self._fence.check)
            if boundary.stop:
                return True
        return False

    def _may_lack_epoch(self) -> bool:
        """Whether the checkpoint of an epoch's end, which is to be kept, may have broken off with the incarnation before: no
        later step would store that state. All ranks answer this alike, or a checkpoint would lack shards, and not all know
        whether it broke off: one that did not is there twice. Not with a log: what was replayed, the next step compares."""
        rules = self._spec.rules
        stands_within = 0 < self._replica.state.step < rules.max_steps  # the last step's is taken at the end of the run
        return stands_within and not self._loaded and not rules.logging and self._replica.epoch_to_keep

    def _note(self, event: str, **fields: Any) -> None:
        self._heartbeat.note(event, {"incarnation": self._fence.incarnation, "step": self._replica.state.step, **fields})

    def _train(self) -> Commit | Woken:
        """A step; or, for who sleeps while the others train without it, so many of theirs."""
        replica, parting, before = self._replica, self._parting, self._parting.members
        busy = replica.checkpointer is not None and replica.checkpointer.busy
        dozes = parting.part(self._sleep, busy=busy)
        if parting.members != before and replica.leads:
            self._note("Parted")
        self._share_checkpoints(parting.members)
        boundary = self._doze() if dozes else self._step()
        self._share_checkpoints(parting.members)
        return boundary

    def _step(self) -> Commit:
        replica, parting = self._replica, self._parting
        commit = replica.train_step(parting.connect(self._links))
        self._heartbeat.committed(commit)
        if parting.ends(self._sleep, commit, last=replica.state.step == self._spec.rules.max_steps):
            if replica.leads:
                self._heartbeat.tell_all(TELL_S)  # else nobody could, if all who trained died once others hold the state
            parting.gather(replica, commit)
        return commit

    def _doze(self) -> Woken:
        replica = self._replica
        replica.loader.stop(timedelta(seconds=0))
        self._heartbeat.tell_all(0.0)
        if replica.checkpointer is not None:
            replica.at("wait")
            replica.checkpointer.await_copy(self._fence.check)  # of the state that will be written over
        return self._parting.doze(replica)

    def _share_checkpoints(self, replicas: Sequence[int]) -> None:
        """From here on, the workers of these replicas write checkpoints."""
        checkpointer, stages = self._replica.checkpointer, self._spec.rules.stages
        writers = [replica * stages + stage for replica in replicas for stage in range(stages)]
        if checkpointer is None or writers == self._writers:
            return
        self._writers, command = writers, self._command
        if self._rank in writers:
            about = (self._fence.incarnation, self._replica.state.step, command.failure_s, stages)
            bad = {"rejected": command.rejected, "unread": command.unread}
            checkpointer.begin(writers.index(self._rank), len(writers), *about, **bad)

    def _share_out(self) -> None:
        """From here on, this is who reads what."""
        replica, sleep, links = self._replica, self._sleep, self._links
        weights = sleep.weights(links.replicas)
        micro_batches, position = self._spec.step.micro_batches, replica.state.position
        replica.loader.start(position, links.replica, links.replicas, micro_batches, weights=weights)
        may_part = not self._spec.use_gpu and can_be_sent(replica)  # NCCL's groups beside one another were never tried
        if may_part and not sleep.apart:  # else they are in use from here on
            self._parting.begin(sleep.asleep, replica.state.step)
        elif not sleep.apart:
            self._parting.leave()
        asleep = links.replica in sleep.asleep
        sleep.at_once &= not asleep  # it has done so; a share that is empty anyway breaks off nowhere
        if asleep != self.asleep:
            self.asleep = asleep
            self._note("Dormant", asleep=asleep)
