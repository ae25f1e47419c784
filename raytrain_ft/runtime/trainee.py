"""What the training thread of a worker does: every method here runs on it, one after the other.

A worker's model, its group and its connections are touched by nobody else, so nothing here is locked. A fence is the only
thing that comes from outside: it wakes whatever this thread waits for, and the thread then leaves the step between two lines.
"""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from raytrain_ft.chaos.faults import Injector
from raytrain_ft.errors import (
    ConfigError,
    FencedError,
    LogGapError,
    NonFiniteLossError,
    ReplayDivergedError,
    StorageError,
)
from raytrain_ft.places import told
from raytrain_ft.policy.commands import Fill, Reconcile, Replay, Run
from raytrain_ft.policy.reconcile import Marks
from raytrain_ft.policy.topology import stage_of, waits
from raytrain_ft.runtime import connections, recovery, sealed
from raytrain_ft.runtime.connections import Connections
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.loop import TELL_S, Loop
from raytrain_ft.runtime.rendezvous import RayStore
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.runtime.transfer import Transfer
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.storage.filesystem import local_path
from raytrain_ft.training import aside, mending, process_group, replay
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.edges import Past
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.process_group import FencedGroup
from raytrain_ft.training.state import Extras
from raytrain_ft.training.step import Replica

GROUP_TIMEOUT = timedelta(seconds=30)
FLUSH_S = 5.0
"""How long a fence waits for what was logged to be readable by others."""
POLL_S = 0.2


class Trainee:
    """One replica, and all that is done to it.

    Args:
        epoch: of the run's right to write checkpoints.
        host: the address of this worker's node.
    """

    def __init__(self, member: str, spec: RunSpec, supervisor: Any, epoch: int, heartbeat: Heartbeat, host: str) -> None:
        self._member = member
        self._spec = spec
        self._supervisor = supervisor
        self._epoch = epoch
        self._heartbeat = heartbeat
        self._host = host
        self._group: FencedGroup | None = None
        self._connections: Connections | None = None
        self._past: Past | None = None  # what was replayed, if its end was not compared before the incarnation ended
        self.log = connections.open_log(spec, member, self._note, self._checkpoint_bytes)
        self._world: tuple[str, ...] = ()
        self.rank = -1
        self._loop: Loop | None = None
        self._replayed = ""  # the checkpoint that an interrupted replay began from
        self._team: tuple[str, ...] = ()  # who shared that replay
        self._asleep = False
        self._loaded = False  # whether the whole world began this incarnation with what is stored, or anew
        self._used = False  # whether this replica may hold anything else than what it was built with
        self._chaos = Injector(spec.faults, spec.directory / "faults", "worker", self._fall_silent)

    def build(self) -> None:
        """Builds the model."""
        threads = int(self._spec.options.get("num_cpus") or 1)
        torch.set_num_threads(max(1, threads))
        self._now_hosts(self._build_replica())

    def _now_hosts(self, replica: Replica) -> None:
        self.replica, self._checkpointer = replica, replica.checkpointer  # which a replay does without

    def _note(self, event: str, fields: dict[str, Any]) -> None:
        self._heartbeat.note(event, {name: value for name, value in fields.items() if name != "member"})

    def _checkpoint_bytes(self) -> int:
        """What its parts of checkpoints need where its log is."""
        checkpoints, checkpointer = self._spec.checkpoints, self._checkpointer
        path = local_path(checkpoints.place) if checkpoints is not None else None
        if checkpointer is None or path is None or not path.is_relative_to(self._spec.directory):
            return 0
        return checkpointer.disk_bytes

    def _flush_log(self, incarnation: int) -> bool:
        """Makes all that was logged readable, and tells how much it is. Returns whether others can read it now."""
        if self.log is None:
            return True
        is_written = self.log.flush(min(FLUSH_S, self._spec.rules.fence_timeout / 2))  # who is silent for longer is given up
        if self.log.stats.payload_bytes:
            stats = {name: value for name, value in asdict(self.log.stats).items() if name != "failed"}
            self._note("LogWritten", {"incarnation": incarnation, "step": self.replica.state.step, **stats})
        return is_written

    def _await_flushed(self, fence: Fence) -> bool:
        """The same in the midst of a recovery. Who is fenced meanwhile leaves at once, and waits for the rest there: there is
        no time for both. That a log has failed, the supervisor is told: nobody relies on it."""
        deadline = time.monotonic() + FLUSH_S
        while self.log is not None and not self.log.flush(POLL_S) and not self.log.stats.failed:
            fence.check()
            if time.monotonic() > deadline:
                return False
        return True

    def _build_replica(self, stage: int = 0, *, writes: bool = True) -> Replica:
        spec = self._spec
        built = build_replica(
            sealed.load(spec),  # each time: a task may keep the model that it gives, whose weights are no first ones any more
            spec.sampling,
            spec.step,
            use_gpu=spec.use_gpu,
            undo_mode=spec.undo,
            probe=self._probe,
            checkpoints=recovery.checkpointing(spec, self._epoch, self._heartbeat) if writes else None,
            stage=stage,
        )
        built.passes.first_incarnation = spec.incarnation + 1
        built.passes.tell_unseen = self._tell_unseen
        return built

    def _tell_unseen(self, names: list[str]) -> None:
        about = {"incarnation": self._spec.incarnation + 1, "step": self.replica.state.step}
        self._note("StateUnseen", {**about, "names": ", ".join(names)})

    def _probe(self, phase: str, step: int, part: int | None) -> None:
        self._heartbeat.at(phase, step)
        self._chaos.probe(phase, rank=self.rank, step=step, part=part)
        if self._loop is not None and self._loop.in_first_step and phase == "forward":
            self._chaos.probe("first_step", rank=self.rank, step=step)

    def _fall_silent(self, bucket: int) -> None:
        self.replica.state.tail.sleep.silent_from = bucket

    def _probe_recovery(self, phase: str) -> None:
        step = self.replica.state.step
        self._heartbeat.at(phase, step)
        self._chaos.probe(phase, rank=self.rank if self.rank >= 0 else None, step=step)

    # ---------------------------------------------------------------- training

    def run(self, fence: Fence, command: Run) -> None:
        """Step after step until the end, a stop, a fence or an error."""
        replica, state = self.replica, self.replica.state
        assert self._connections is not None
        try:
            fence.check()
            assert state.filled, "told to run before it was filled"
            replica.trained = fence.incarnation
            about = (fence, command, self.rank, self._asleep, self._loaded)
            self._loop = Loop(self._spec, replica, self._connections, self._heartbeat, *about)
            if self._loop.run():
                self._heartbeat.ended("stopped", str(state.step))
                return
            replica.finish(fence.check)
            self._flush_log(fence.incarnation)
            self._heartbeat.ended("completed", state.final_digest())
        except FencedError:
            return
        except PeerLostError as error:
            self._heartbeat.ended("suspect", str(error)[:300])
        except ReplayDivergedError as error:
            state.filled = False  # also for who does not hear of it in time
            self._heartbeat.ended("diverged", str(error)[:1000])
        except NonFiniteLossError as error:
            self._heartbeat.ended("failed", str(error), kind="non_finite")
        except ConfigError as error:
            self._heartbeat.ended("failed", str(error), kind="config")
        except StorageError as error:  # of its data set, which may be there again when the run is begun once more
            if not fence.tripped:
                self._heartbeat.ended("failed", told(str(error)), kind="storage")
        except BaseException:
            if fence.tripped:
                return  # the error is the fence's doing: torch wraps what a hook raises
            self._heartbeat.ended("failed", told(traceback.format_exc()), kind="task")

    def speak_for(self, member: str, asleep: bool) -> None:
        """This one was asked to sleep, or to wake: whoever leads those who are awake says it for who sleeps."""
        waking = self.replica.state.tail.sleep.waking
        (waking.difference_update if asleep else waking.update)(rank for rank, one in enumerate(self._world) if one == member)

    def log_only(self, incarnation: int, boundaries: frozenset[int]) -> None:
        """See `Worker.log_only`. From any thread."""
        connections = self._connections
        if connections is not None:
            connections.log_only(incarnation, boundaries)

    # ---------------------------------------------------------------- the phases of a recovery

    def park(self, incarnation: int, ended: int) -> Marks | None:
        """Leaves the group of the incarnation that has ended, and says where this worker stands."""
        self._probe_recovery("fence")
        self._heartbeat.idle(incarnation)
        if self._loop is not None:
            self._asleep, self._loop = self._loop.asleep, None
        if self.replica.checkpointer is not None:
            self.replica.checkpointer.fenced()
        self.replica.loader.stop(timedelta(seconds=0))
        self.replica.abandon()
        if self._connections is not None:
            self._connections.leave()
            past = self._connections.past
            self._past = past if past is not None and self.replica.state.step <= past.until else None
        process_group.abandon(self._group)
        self._group = self._connections = None
        is_written = self._flush_log(ended)
        marks = recovery.marks(self._member, self.replica)
        return marks if is_written or marks is None else replace(marks, unwritten=True)

    def reconcile(self, fence: Fence, command: Reconcile) -> tuple[tuple[str, ...], int, int]:
        """See `Worker.reconcile`."""
        fence.check()
        world, plan, holders = command.world, command.plan, command.holders
        self._loaded = plan is None
        self._world, self.rank = world, world.index(self._member)
        if self.log is not None:
            self.log.begin(command.since)
        self._probe_recovery("join")
        store = RayStore(self._supervisor, fence, GROUP_TIMEOUT)
        self._group = process_group.build(
            store, self.rank, len(world), fence, host=self._host, use_gpu=self._spec.use_gpu, timeout=GROUP_TIMEOUT
        )
        logged = frozenset(command.logged)
        past = self._past if self._past is not None and self._past.since == command.since else None
        self._connections = Connections(
            self._spec, self._supervisor, self._group, self._host, logged, self.log, GROUP_TIMEOUT, past
        )
        self._probe_recovery("reconcile")
        self._take_stage(stage_of(self.rank, self._spec.rules.stages))
        self.replica.state.filled &= self._member in holders
        if plan is None:
            self._begin_from(command.load, fence)
            return self.replica.state.digests(), 0, 0
        state = self.replica.state
        transfer = Transfer(self._group, world, self._member, state.device, self._probe_recovery)
        if not state.filled:
            recovery.lend(self.replica, plan, transfer)
            return (), 0, 0
        outcome = recovery.reconcile(self.replica, plan, transfer, self._spec.sampling, command.incarnation)
        if outcome.commit is not None:
            self._connections.note_agreed(outcome.commit.attempt.step, plan.agreed)
            try:
                self._await_flushed(fence)  # who replays may need it
            finally:  # it is committed, whatever comes next
                self._heartbeat.committed(outcome.commit)
        if outcome.lost is not None:
            self._heartbeat.note("SamplesLost", outcome.lost)
        if outcome.commit is not None or outcome.lost is not None:
            self._heartbeat.tell_all(TELL_S)  # else nobody could, if all who completed this step died once others were filled
        return state.digests(), outcome.undone, outcome.kept

    def _take_stage(self, stage: int) -> None:
        """Hosts another stage of the pipeline than before, with its first weights."""
        if self.replica.stage != stage:
            self._rebuild(stage)

    def _rebuild(self, stage: int) -> None:
        try:
            built = self._build_replica(stage)
        except StorageError as error:  # of the task's file, or its data set: no checkpoint is damaged by that
            raise PeerLostError(f"{self._member} cannot build stage {stage} now: {error}") from error
        before, checkpointer = self.replica.state.tail.sleep, self.replica.checkpointer
        built.state.tail.sleep.ask(before.wanted, before.at_once)
        self._now_hosts(built)
        self._used, self._replayed = False, ""
        if checkpointer is not None:  # it has a memory and a process of its own, and may wait for storage that hangs
            threading.Thread(target=checkpointer.close, name="close", daemon=True).start()

    def _begin_from(self, load: str, fence: Fence) -> None:
        """From a checkpoint, or from the beginning: there everybody has built the same model from the same seed."""
        self._replayed = ""
        if self._used and (not load or self._keeps_optimizer):
            self._rebuild(self.replica.stage)
        if load:
            self._used = True  # also by a load that fails half way
            recovery.load(self.replica, self._spec, load, fence)
        self.replica.state.filled = self._used = True

    @property
    def _keeps_optimizer(self) -> bool:
        """Whether a checkpoint may leave optimizer and schedule as they are: then everybody's must be as they were built."""
        assert self._spec.checkpoints is not None
        return "optimizer" in self._spec.checkpoints.override

    def extras(self) -> Extras:
        """What replacements need besides the buckets."""
        return self.replica.state.extras()

    def pack(self) -> recovery.Packed:
        """The whole state of a worker that leaves, and that nobody else holds."""
        return recovery.pack(self.replica)

    def fill(self, fence: Fence, command: Fill, extras: Extras | None, handed: recovery.Packed | None) -> tuple[str, ...]:
        """See `Worker.fill`."""
        fence.check()
        assert self._group is not None
        state = self.replica.state
        self._used = True
        if extras is not None or handed is not None:
            self._replayed = ""  # before anything is taken: what is broken off leaves no replay to go on with
            if self.replica.attempt is not None:  # of a world before
                mending.discard(self.replica)
        if handed is not None:
            recovery.unpack(state, handed)
        transfer = Transfer(self._group, self._world, self._member, state.device, self._probe_recovery)
        recovery.take_states(self.replica, command.copies, transfer, version=extras.step if extras else state.step)
        if extras is not None:
            state.take(extras)
        return state.digests()

    def replay(self, fence: Fence, command: Replay) -> tuple[str, ...]:
        """A replay by one alone that was interrupted goes on from where it stood: what it has is what any other would have. It
        may have been shared until then, but by nobody who is lost: with a helper goes what it had logged of this replay.

        With others (who share it, replay the next stage, or another replica of this one) it begins anew, for they may. Who
        replays a stage that it does not wait for is none of these.
        """
        fence.check()
        assert self._connections is not None
        source = command.load or "the beginning"
        rules, team = self._spec.rules, command.team_of(self._member)
        waiting = waits(self.replica.stage, frozenset(command.stages), rules.stages, rules.joined)
        alone = len(team) == 1 and not waiting and len(self._world) == rules.stages
        is_logged = self._replayed == source and set(self._team) <= set(self._world)
        if not alone or not is_logged or self.replica.state.step > command.until:
            self._begin_from(command.load, fence)
            self._replayed, self._team = source, team
        self.replica.state.filled = False
        with self._connections.replay(command, self.replica.stage, len(team), 0) as links:
            replay.replay(self.replica, links, command.until, self._spec.step.micro_batches)
            self._heartbeat.at("replayed", command.until)  # others may take longer, and this one does not hang
            if links.team is not None:
                links.team.total(0)  # what helpers logged is on the disk: a helper's loss is not that of this stage, too
        self.replica.state.filled = self._used = True
        self._replayed = ""
        return self.replica.state.digests()

    def help(self, fence: Fence, command: Replay) -> tuple[str, ...]:
        """Its own replica stays as it is: it has one of the lost stage besides for as long as this takes.

        Raises:
            PeerLostError: it cannot help. Nobody needs to: it is no reason to end the run or to reject the checkpoint, but to
                try again with less help.
        """
        fence.check()
        team = command.team_of(self._member)
        stage = stage_of(self._world.index(team[0]), self._spec.rules.stages)
        sharing = command.helpers_beside(self._member)
        try:
            extra = self._gradients_of(len(team))
            with aside.room_for_another(self.replica.state, fence.check, partial(self._set_aside, fence), sharing, extra):
                try:
                    self._replay_beside(fence, command, stage, team)
                finally:
                    self._heartbeat.at("replayed", command.until)  # its own state may now be read back from the disk
        except aside.LostAsideError as error:
            self.replica.state.filled = False
            raise PeerLostError(f"{self._member} has lost stage {self.replica.stage}: {error}") from error
        except (FencedError, PeerLostError, LogGapError, ReplayDivergedError):
            raise  # these say something of the incarnation or the log, whoever finds it
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise PeerLostError(f"{self._member} cannot help to replay stage {stage}: {what}") from error
        return self.replica.state.digests()

    def _gradients_of(self, workers: int) -> int:
        """Bytes of the gradients that each of so many holds, if sums are to be exact: of all of its micro-batches at once, and
        then, while it adds them up, three times as much as those of one. Stages are alike: this one's size is another's."""
        if not self._spec.rules.exact_sums:
            return 0
        size = sum(p.numel() * p.element_size() for bucket in self.replica.state.buckets for p in bucket.params)
        return (-(-self._spec.step.micro_batches // workers) + 3) * size

    def _set_aside(self, fence: Fence, size: int, seconds: float) -> None:
        about = {"incarnation": fence.incarnation, "step": self.replica.state.step}
        self._note("SetAside", {**about, "size": size, "seconds": round(seconds, 3)})

    def _replay_beside(self, fence: Fence, command: Replay, stage: int, team: tuple[str, ...]) -> None:
        assert self._connections is not None
        helper = self._build_replica(stage, writes=False)
        if command.load:
            recovery.load(helper, self._spec, command.load, fence)
        try:
            with self._connections.replay(command, stage, len(team), team.index(self._member)) as links:
                replay.replay(helper, links, command.until, self._spec.step.micro_batches)
                if not self._await_flushed(fence):  # what it sent for the lost stage to its own must outlive it
                    raise PeerLostError(f"{self._member} could not write what it logged for stage {stage} within {FLUSH_S:g} s")
                if links.team is not None:
                    links.team.total(0)
        finally:
            helper.loader.stop(timedelta(seconds=0))

    # ---------------------------------------------------------------- the end

    def finish(self, fence: Fence) -> None:
        """The last checkpoint of a run that is to end."""
        self.replica.finish(fence.check)

    def save(self, path: str) -> str:
        """Writes the model's final state as an Arrow file; returns its path."""
        state = self.replica.state
        values: dict[str, Any] = {"step": state.step, "digests": list(state.digests())}
        pipeline = self._spec.step.pipeline
        if pipeline is not None:
            values |= {"stage": self.replica.stage, **pipeline.spread}
        write_tensors(path, state.model.state_dict(), values)
        return path
