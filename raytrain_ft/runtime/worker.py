"""The worker actor: runs steps on one thread, answers commands on others.

All training state is touched by the training thread alone: reconciling, filling and running are jobs that are queued for it.
A fence is the only thing that comes from outside: it wakes whatever the training thread waits for, and the thread then leaves
the step between two lines. The worker never waits without a deadline, and it stops itself when it has not reached the
supervisor for its lease, so that a node that was cut off does not go on alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import ray
import torch

from raytrain_ft.chaos.faults import Injector
from raytrain_ft.errors import ConfigError, FencedError, NonFiniteLossError
from raytrain_ft.policy.reconcile import Copy, Marks, Plan
from raytrain_ft.policy.topology import stage_of
from raytrain_ft.runtime import connections, placement, recovery
from raytrain_ft.runtime.connections import Connections
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.preemption import Preemption
from raytrain_ft.runtime.rendezvous import RayStore
from raytrain_ft.runtime.spec import Introduction, RunSpec
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.training import process_group, replay
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.links import Links
from raytrain_ft.training.process_group import Fence, FencedGroup, PeerLostError
from raytrain_ft.training.state import Extras
from raytrain_ft.training.step import Replica

GROUP_TIMEOUT = timedelta(seconds=30)
TELL_S = 5.0
"""How long a worker that is about to end tries to tell the supervisor what is left to tell."""
FLUSH_S = 5.0
"""How long a fence waits for what was logged to be readable by others."""
PARK_DEADLINE_S = 3600.0
"""How long a fence waits for the training thread. A backstop: the supervisor's own deadline comes long before."""


class Worker:
    """One replica. `member` is its name for life, `rank` its number in the present incarnation."""

    def __init__(self, member: str, spec: RunSpec, supervisor: Any, epoch: int) -> None:
        self._member = member
        self._epoch = epoch  # of the run's right to write checkpoints
        self._spec = spec
        self._supervisor = supervisor
        self._host = ray.util.get_node_ip_address()
        self._training = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._lock = threading.Lock()
        self._fence = Fence(0)
        self._group: FencedGroup | None = None
        self._connections: Connections | None = None
        self._log = connections.open_log(spec, member, self._note)
        self._world: tuple[str, ...] = ()
        self._rank = -1
        self._ready: Future[Introduction] | None = None
        self._first_step = False
        self._replayed = ""  # the checkpoint that an interrupted replay began from
        self._asleep = False
        self._used = False  # whether this replica may hold anything else than what it was built with
        self._chaos = Injector(spec.faults, spec.directory / "faults", "worker", self._fall_silent)
        self._preemption = Preemption(spec.notices, self._note_no_notices)
        self._heartbeat = Heartbeat(member, spec, supervisor, self._preemption.notice)

    # ---------------------------------------------------------------- becoming ready

    def setup(self) -> Introduction:
        """Builds the model and begins to beat. Safe to call again: the answer is the same."""
        with self._lock:
            if self._ready is None:
                self._ready = self._training.submit(self._build)
        return self._ready.result(timeout=PARK_DEADLINE_S)

    def _build(self) -> Introduction:
        self._check_directory()
        threads = int(self._spec.options.get("num_cpus") or 1)
        torch.set_num_threads(max(1, threads))
        self._replica = self._build_replica()
        self._preemption.start()
        self._heartbeat.start()
        buckets = self._replica.state.buckets
        return Introduction(
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._host,
            sum(p.numel() for bucket in buckets for p in bucket.params),
            len(buckets),
        )

    def _note(self, event: str, fields: dict[str, Any]) -> None:
        self._heartbeat.note(event, {name: value for name, value in fields.items() if name != "member"})

    def _note_no_notices(self, source: str, reason: str) -> None:
        self._heartbeat.note("NoticesUnavailable", {"source": source, "reason": reason})

    def _tell_of_log(self, incarnation: int) -> None:
        if self._log is not None and self._log.stats.records:
            stats = {name: value for name, value in asdict(self._log.stats).items() if name != "failed"}
            self._note("LogWritten", {"incarnation": incarnation, "step": self._replica.state.step, **stats})

    def _build_replica(self, stage: int = 0, *, writes: bool = True) -> Replica:
        spec = self._spec
        return build_replica(
            spec.task,
            spec.sampling,
            spec.step,
            use_gpu=spec.use_gpu,
            undo_mode=spec.undo,
            probe=self._probe,
            checkpoints=recovery.checkpointing(spec, self._epoch, self._heartbeat) if writes else None,
            stage=stage,
        )

    def _check_directory(self) -> None:
        path = self._spec.directory / "nonce"
        found = path.read_text() if path.exists() else None
        if found != self._spec.nonce:
            raise ConfigError(
                f"RunConfig.storage_path: node {self._host} does not see the run's directory {self._spec.directory}. "
                "Use a path that is shared by all nodes."
            )

    def _probe(self, phase: str, step: int, part: int | None) -> None:
        self._heartbeat.at(phase, step)
        self._chaos.probe(phase, rank=self._rank, step=step, part=part)
        if self._first_step and phase == "forward":
            self._chaos.probe("first_step", rank=self._rank, step=step)

    def _fall_silent(self, bucket: int) -> None:
        self._replica.state.tail.sleep.silent_from = bucket

    def _probe_recovery(self, phase: str) -> None:
        step = self._replica.state.step
        self._heartbeat.at(phase, step)
        self._chaos.probe(phase, rank=self._rank if self._rank >= 0 else None, step=step)

    # ---------------------------------------------------------------- answered at once

    def ping(self) -> int:
        """Shows that this process lives."""
        return os.getpid()

    def watch(self, seconds: float) -> None:
        """Returns after a while. Ray fails the call the moment this process dies, which is what it is for."""
        threading.Event().wait(seconds)

    def unreached(self, places: dict[str, dict[str, Any]]) -> list[str]:
        """Those of the other workers whose nodes, in Ray's words, take no connection from here."""

        async def look() -> list[bool]:
            return await asyncio.gather(*(placement.is_silent(node) for node in places.values()))

        return [member for member, silent in zip(places, asyncio.run(look()), strict=True) if silent]

    def stop_at_boundary(self) -> None:
        """Asks for a stop at the next step boundary that all ranks agree upon."""
        self._replica.state.tail.stop_requested = True

    def sleep(self, asleep: bool, at_once: bool) -> None:
        """Asks for a replica that contributes nothing, or does again, from the next step on; `at_once`, from where it is."""
        sleep = self._replica.state.tail.sleep
        sleep.at_once = at_once
        sleep.wanted = asleep

    # ---------------------------------------------------------------- the phases of a recovery

    def fence(self, incarnation: int) -> Marks | None:
        """Ends every earlier incarnation here: leaves the step and the group, and says where this worker stands."""
        with self._lock:
            if incarnation <= self._fence.incarnation:
                raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
            old, self._fence = self._fence, Fence(incarnation)
        old.trip()
        return self._training.submit(self._park, incarnation, old.incarnation).result(timeout=PARK_DEADLINE_S)

    def _park(self, incarnation: int, ended: int) -> Marks | None:
        self._probe_recovery("fence")
        self._heartbeat.idle(incarnation)
        if self._replica.checkpointer is not None:
            self._replica.checkpointer.fenced()
        self._replica.loader.stop(timedelta(seconds=0))
        self._replica.reducer.abandon()
        if self._connections is not None:
            self._connections.leave()
        process_group.abandon(self._group)
        self._group = self._connections = None
        if self._log is not None:
            self._log.flush(FLUSH_S)
            self._tell_of_log(ended)
        return recovery.marks(self._member, self._replica)

    def reconcile(
        self,
        world: tuple[str, ...],
        incarnation: int,
        plan: Plan | None,
        load: str,
        holders: tuple[str, ...],
        logged: tuple[int, ...],
    ) -> tuple[tuple[str, ...], int, int]:
        """Joins the group of this incarnation and carries out the plan; returns (hash per bucket, parameters undone, parameters
        whose update was kept).

        Without a plan it loads the checkpoint `load`, or begins anew if that is empty.

        Args:
            holders: whose state counts.
            logged: see `messages.Reconcile`.
        """
        fence = self._enter(incarnation)
        job = self._training.submit(self._reconcile, fence, world, plan, load, holders, frozenset(logged))
        return job.result(timeout=PARK_DEADLINE_S)

    def _enter(self, incarnation: int) -> Fence:
        with self._lock:
            if incarnation > self._fence.incarnation:  # a newcomer that was never fenced
                self._fence.trip()
                self._fence = Fence(incarnation)
            if incarnation != self._fence.incarnation:
                raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
            return self._fence

    def _reconcile(
        self,
        fence: Fence,
        world: tuple[str, ...],
        plan: Plan | None,
        load: str,
        holders: tuple[str, ...],
        logged: frozenset[int],
    ) -> tuple[tuple[str, ...], int, int]:
        fence.check()
        self._world, self._rank = world, world.index(self._member)
        self._probe_recovery("join")
        store = RayStore(self._supervisor, fence, GROUP_TIMEOUT)
        self._group = process_group.build(
            store, self._rank, len(world), fence, host=self._host, use_gpu=self._spec.use_gpu, timeout=GROUP_TIMEOUT
        )
        self._connections = Connections(self._spec, self._supervisor, self._group, self._host, logged, self._log, GROUP_TIMEOUT)
        self._probe_recovery("reconcile")
        self._take_stage(stage_of(self._rank, self._spec.rules.stages))
        self._replica.state.filled &= self._member in holders
        if plan is None:
            self._begin_from(load)
            return self._replica.state.digests(), 0, 0
        state = self._replica.state
        transfer = recovery.Transfer(self._group, world, self._member, state.device, self._probe_recovery)
        if not state.filled:
            recovery.lend(self._replica, plan, transfer)
            return (), 0, 0
        leads = self._member == next(member for member in world if member in holders)
        outcome = recovery.reconcile(self._replica, plan, transfer, self._spec.sampling, leads=leads)
        if outcome.commit is not None:
            self._connections.note_agreed(outcome.commit.attempt.step, plan.agreed)
            self._heartbeat.committed(outcome.commit)
        return state.digests(), outcome.undone, outcome.kept

    def _take_stage(self, stage: int) -> None:
        """Hosts another stage of the pipeline than before, with its first weights."""
        if self._replica.stage != stage:
            self._rebuild(stage)

    def _rebuild(self, stage: int) -> None:
        if self._replica.checkpointer is not None:
            self._replica.checkpointer.close()
        self._replica = self._build_replica(stage)
        self._used, self._replayed = False, ""

    def _begin_from(self, load: str) -> None:
        """From a checkpoint, or from the beginning: there everybody has built the same model from the same seed."""
        if load:
            self._used = True  # also by a load that fails half way
            recovery.load(self._replica, self._spec, load)
        elif self._used:
            self._rebuild(self._replica.stage)
        self._replica.state.filled = self._used = True

    def extras(self, incarnation: int) -> Extras:
        """What replacements need besides the buckets."""
        self._enter(incarnation)
        return self._training.submit(self._replica.state.extras).result(timeout=PARK_DEADLINE_S)

    def hand_over(self, incarnation: int) -> tuple[ray.ObjectRef]:
        """This worker leaves, and nobody else holds its state: the whole of it, in the object store."""
        self._enter(incarnation)
        return (ray.put(self._training.submit(recovery.pack, self._replica.state).result(timeout=PARK_DEADLINE_S)),)

    def fill(
        self, incarnation: int, copies: tuple[Copy, ...], extras: Extras | None, handed: recovery.Packed | None = None
    ) -> tuple[str, ...]:
        """Copies state bucket by bucket, and takes over `extras` or what was handed over; returns the hash per bucket."""
        fence = self._enter(incarnation)
        return self._training.submit(self._fill, fence, copies, extras, handed).result(timeout=PARK_DEADLINE_S)

    def _fill(
        self, fence: Fence, copies: tuple[Copy, ...], extras: Extras | None, handed: recovery.Packed | None
    ) -> tuple[str, ...]:
        fence.check()
        assert self._group is not None
        state = self._replica.state
        self._used = True
        if (extras is not None or handed is not None) and self._replica.attempt is not None:  # of a world before
            self._replica.discard()
        if handed is not None:
            recovery.unpack(state, handed)
            self._replayed = ""
        transfer = recovery.Transfer(self._group, self._world, self._member, state.device, self._probe_recovery)
        recovery.take_states(self._replica, copies, transfer, version=extras.step if extras else state.step)
        if extras is not None:
            state.take(extras)
            self._replayed = ""
        return state.digests()

    def replay(
        self, incarnation: int, stages: tuple[int, ...], load: str, until: int, team: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Computes again, from the log, what a lost stage committed since a checkpoint: this worker's own stage, or as a helper
        that of the first of its team. Returns the hash per bucket of its own state.

        Raises:
            LogGapError: a record is missing or damaged.
        """
        fence = self._enter(incarnation)
        job = self._replay if team[0] == self._member else self._help
        return self._training.submit(job, fence, frozenset(stages), load, until, team).result(timeout=PARK_DEADLINE_S)

    def _replay(self, fence: Fence, stages: frozenset[int], load: str, until: int, team: tuple[str, ...]) -> tuple[str, ...]:
        """A replay by one alone that was interrupted goes on from where it stood: what it has is what any other would have."""
        fence.check()
        assert self._connections is not None
        source = load or "the beginning"
        if self._replayed != source or len(team) > 1 or len(stages) > 1:
            self._begin_from(load)
            self._replayed = source
        self._replica.state.filled = False
        self._first_step = False
        links = self._connections.replay(stages, self._replica.stage, len(team), 0)
        replay.replay(self._replica, links, until, self._spec.step.micro_batches)
        self._replica.state.filled = self._used = True
        self._replayed = ""
        return self._replica.state.digests()

    def _help(self, fence: Fence, stages: frozenset[int], load: str, until: int, team: tuple[str, ...]) -> tuple[str, ...]:
        """Its own replica is not touched: beside it, it has one of the lost stage for as long as this takes."""
        fence.check()
        assert self._connections is not None
        stage = stage_of(self._world.index(team[0]), self._spec.rules.stages)
        helper = self._build_replica(stage, writes=False)
        if load:
            recovery.load(helper, self._spec, load)
        links = self._connections.replay(stages, stage, len(team), team.index(self._member))
        try:
            replay.replay(helper, links, until, self._spec.step.micro_batches)
        finally:
            helper.loader.stop(timedelta(seconds=0))
        return self._replica.state.digests()

    def trim(self, step: int) -> None:
        """A checkpoint of this step is durable: what was logged before it is not needed any more."""
        if self._log is not None:
            self._log.trim(step)

    def run(self, incarnation: int, failure_s: float | None) -> None:
        """Goes on training. Returns at once; the heartbeat tells how it goes."""
        fence = self._enter(incarnation)
        if not self._heartbeat.is_running(incarnation):
            self._heartbeat.running(incarnation, self._rank)
            self._training.submit(self._run, fence, failure_s)

    # ---------------------------------------------------------------- training

    def _run(self, fence: Fence, failure_s: float | None) -> None:
        """Step after step until the end, a stop, a fence or an error."""
        replica, state = self._replica, self._replica.state
        assert self._connections is not None
        try:
            fence.check()
            links = self._connections.live()
            assert state.filled, "told to run before it was filled"
            replica.stop_agreed = False
            state.tail.stop_requested = False
            state.tail.sleep.asleep = frozenset()  # after a recovery all take part in a step, and then sleep again
            self._first_step = True
            rank, size, stages = self._rank, len(self._world), self._spec.rules.stages
            if replica.checkpointer is not None:
                replica.checkpointer.begin(rank, size, fence.incarnation, state.step, failure_s, stages)
            self._share_out(links)
            while state.step < self._spec.rules.max_steps:
                commit = replica.train_step(links)
                self._heartbeat.committed(commit)
                self._first_step = False
                if replica.reads_changed:
                    self._share_out(links)
                replica.checkpoint(fence.check)
                if replica.stop_agreed:
                    self._heartbeat.ended("stopped", str(state.step))
                    return
            replica.finish(fence.check)
            self._tell_of_log(fence.incarnation)
            self._heartbeat.ended("completed", ":".join(state.digests()))
        except FencedError:
            return
        except PeerLostError as error:
            self._heartbeat.ended("suspect", str(error)[:300])
        except NonFiniteLossError as error:
            self._heartbeat.ended("failed", str(error), kind="non_finite")
        except BaseException:
            if fence.tripped:
                return  # the error is the fence's doing: torch wraps what a hook raises
            self._heartbeat.ended("failed", traceback.format_exc(), kind="task")

    def _share_out(self, links: Links) -> None:
        """From here on, this is who reads what."""
        state = self._replica.state
        sleep, micro_batches = state.tail.sleep, self._spec.step.micro_batches
        self._replica.loader.start(
            state.position, links.replica, links.replicas, micro_batches, weights=sleep.weights(links.replicas)
        )
        asleep = links.replica in sleep.asleep
        sleep.at_once &= not asleep  # it has done so; a share that is empty anyway breaks off nowhere
        if asleep != self._asleep:
            self._asleep = asleep
            self._note("Dormant", {"incarnation": links.fence.incarnation, "step": state.step, "asleep": asleep})

    # ---------------------------------------------------------------- the end

    def checkpoint(self, incarnation: int) -> int:
        """The last checkpoint of a run that is to end, of the boundary at which everybody has stopped. Returns the step when it
        is durable, or will never be, and the supervisor has been told which of the two."""
        fence = self._enter(incarnation)
        self._training.submit(self._replica.finish, fence.check).result(timeout=PARK_DEADLINE_S)
        self._heartbeat.await_told(TELL_S)
        return self._replica.state.step

    def save(self, path: str) -> str:
        """Writes the model's final state as an Arrow file; returns its path."""
        return self._training.submit(self._save, path).result(timeout=PARK_DEADLINE_S)

    def _save(self, path: str) -> str:
        state = self._replica.state
        values: dict[str, Any] = {"step": state.step, "digests": list(state.digests())}
        pipeline = self._spec.step.pipeline
        if pipeline is not None:
            values |= {"stage": self._replica.stage, "stages": pipeline.stages, "cuts": pipeline.cuts}
        write_tensors(path, state.model.state_dict(), values)
        return path
