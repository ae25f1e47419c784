"""The worker actor: runs steps on one thread, answers commands on others.

All training state is touched by the training thread alone: reconciling, filling and running are jobs that are queued for it.
A fence is the only thing that comes from outside: it wakes whatever the training thread waits for, and the thread then leaves
the step between two lines. The worker never waits without a deadline, and it stops itself when it has not reached the
supervisor for its lease, so that a node that was cut off does not go on alone.
"""

from __future__ import annotations

import os
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import ray
import torch

from raytrain_ft.chaos.faults import Injector
from raytrain_ft.errors import ConfigError, FencedError, NonFiniteLossError
from raytrain_ft.policy.reconcile import Copy, Marks, Plan
from raytrain_ft.runtime import recovery
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.rendezvous import RayStore
from raytrain_ft.runtime.spec import Introduction, RunSpec
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.training import process_group
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.process_group import Fence, FencedGroup, PeerLostError
from raytrain_ft.training.state import Extras
from raytrain_ft.training.step import Replica

GROUP_TIMEOUT = timedelta(seconds=30)
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
        self._world: tuple[str, ...] = ()
        self._rank = -1
        self._ready: Future[Introduction] | None = None
        self._first_step = False
        self._used = False  # whether this replica may hold anything else than what it was built with
        self._chaos = Injector(spec.faults, spec.directory / "faults", "worker")
        self._heartbeat = Heartbeat(member, spec, supervisor)

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
        self._heartbeat.start()
        buckets = self._replica.state.buckets
        return Introduction(
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._host,
            sum(p.numel() for bucket in buckets for p in bucket.params),
            len(buckets),
        )

    def _build_replica(self) -> Replica:
        spec = self._spec
        return build_replica(
            spec.task,
            spec.sampling,
            spec.step,
            use_gpu=spec.use_gpu,
            undo_mode=spec.undo,
            probe=self._probe,
            checkpoints=recovery.checkpointing(spec, self._epoch, self._heartbeat),
        )

    def _check_directory(self) -> None:
        path = self._spec.directory / "nonce"
        found = path.read_text() if path.exists() else None
        if found != self._spec.nonce:
            raise ConfigError(
                f"RunConfig.storage_path: node {self._host} does not see the run's directory {self._spec.directory}. "
                "Use a path that is shared by all nodes."
            )

    def _probe(self, phase: str, step: int, bucket: int | None) -> None:
        self._heartbeat.at(phase, step)
        self._chaos.probe(phase, rank=self._rank, step=step, bucket=bucket)
        if self._first_step and phase == "forward":
            self._chaos.probe("first_step", rank=self._rank, step=step)

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

    def stop_at_boundary(self) -> None:
        """Asks for a stop at the next step boundary that all ranks agree upon."""
        self._replica.state.tail.stop_requested = True

    # ---------------------------------------------------------------- the phases of a recovery

    def fence(self, incarnation: int) -> Marks | None:
        """Ends every earlier incarnation here: leaves the step and the group, and says where this worker stands."""
        with self._lock:
            if incarnation <= self._fence.incarnation:
                raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
            old, self._fence = self._fence, Fence(incarnation)
        old.trip()
        return self._training.submit(self._park, incarnation).result(timeout=PARK_DEADLINE_S)

    def _park(self, incarnation: int) -> Marks | None:
        self._probe_recovery("fence")
        self._heartbeat.idle(incarnation)
        if self._replica.checkpointer is not None:
            self._replica.checkpointer.fenced()
        self._replica.loader.stop(timedelta(seconds=0))
        self._replica.reducer.abandon()
        process_group.abandon(self._group)
        self._group = None
        return recovery.marks(self._member, self._replica)

    def reconcile(self, world: tuple[str, ...], incarnation: int, plan: Plan | None, load: str) -> tuple[tuple[str, ...], int]:
        """Joins the group of this incarnation and carries out the plan; returns (hash per bucket, parameters undone).

        Without a plan it loads the checkpoint `load`, or begins anew if that is empty.
        """
        fence = self._enter(incarnation)
        return self._training.submit(self._reconcile, fence, world, plan, load).result(timeout=PARK_DEADLINE_S)

    def _enter(self, incarnation: int) -> Fence:
        with self._lock:
            if incarnation > self._fence.incarnation:  # a newcomer that was never fenced
                self._fence.trip()
                self._fence = Fence(incarnation)
            if incarnation != self._fence.incarnation:
                raise FencedError(f"incarnation {incarnation} is over; this worker is in {self._fence.incarnation}")
            return self._fence

    def _reconcile(self, fence: Fence, world: tuple[str, ...], plan: Plan | None, load: str) -> tuple[tuple[str, ...], int]:
        fence.check()
        self._world, self._rank = world, world.index(self._member)
        self._probe_recovery("join")
        store = RayStore(self._supervisor, fence, GROUP_TIMEOUT)
        self._group = process_group.build(
            store, self._rank, len(world), fence, host=self._host, use_gpu=self._spec.use_gpu, timeout=GROUP_TIMEOUT
        )
        self._probe_recovery("reconcile")
        if plan is None:
            self._begin_from(load)
            return self._replica.state.digests(), 0
        state = self._replica.state
        if not state.filled:
            return (), 0
        transfer = recovery.Transfer(self._group, world, self._member, state.device, self._probe_recovery)
        undone, commit = recovery.reconcile(self._replica, plan, transfer)
        if commit is not None:
            self._heartbeat.committed(commit)
        return state.digests(), undone

    def _begin_from(self, load: str) -> None:
        """From a checkpoint, or from the beginning: there everybody has built the same model from the same seed."""
        if load:
            self._used = True  # also by a load that fails half way
            recovery.load(self._replica, self._spec, load)
        elif self._used:
            assert self._replica.checkpointer is not None
            self._replica.checkpointer.close()
            self._replica = self._build_replica()
        self._replica.state.filled = self._used = True

    def extras(self, incarnation: int) -> Extras:
        """What replacements need besides the buckets."""
        self._enter(incarnation)
        return self._training.submit(self._replica.state.extras).result(timeout=PARK_DEADLINE_S)

    def fill(self, incarnation: int, copies: tuple[Copy, ...], extras: Extras | None) -> tuple[str, ...]:
        """Copies state bucket by bucket, and takes over `extras` if given; returns the hash per bucket."""
        fence = self._enter(incarnation)
        return self._training.submit(self._fill, fence, copies, extras).result(timeout=PARK_DEADLINE_S)

    def _fill(self, fence: Fence, copies: tuple[Copy, ...], extras: Extras | None) -> tuple[str, ...]:
        fence.check()
        assert self._group is not None
        state = self._replica.state
        self._used = True
        transfer = recovery.Transfer(self._group, self._world, self._member, state.device, self._probe_recovery)
        recovery.take_states(self._replica, copies, transfer, version=extras.step if extras else state.step)
        if extras is not None:
            state.take(extras)
        return state.digests()

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
        assert self._group is not None
        try:
            fence.check()
            assert state.filled, "told to run before it was filled"
            replica.stop_agreed = False
            state.tail.stop_requested = False
            self._first_step = True
            rank, size = self._rank, len(self._world)
            if replica.checkpointer is not None:
                replica.checkpointer.begin(rank, size, fence.incarnation, state.step, failure_s)
            replica.loader.start(state.position, rank, size, self._spec.step.gradient_accumulation_steps)
            while state.step < self._spec.rules.max_steps:
                commit = replica.train_step(self._group)
                self._heartbeat.committed(commit)
                self._first_step = False
                replica.checkpoint(fence.check)
                if replica.stop_agreed:
                    self._heartbeat.ended("stopped", str(state.step))
                    return
            replica.finish(fence.check)
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

    # ---------------------------------------------------------------- the end

    def save(self, path: str) -> str:
        """Writes the model's final state as an Arrow file; returns its path."""
        return self._training.submit(self._save, path).result(timeout=PARK_DEADLINE_S)

    def _save(self, path: str) -> str:
        state = self._replica.state
        write_tensors(path, state.model.state_dict(), {"step": state.step, "digests": list(state.digests())})
        return path
