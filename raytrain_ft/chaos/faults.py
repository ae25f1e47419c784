"""Failures on demand, at an exact point: this rank, this step, this phase. Part of the product, not of its tests.

A `FailAt` fires once in a run: a marker file in the run's directory says that it has, for whoever dies cannot tell.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil
import ray

from raytrain_ft.errors import ConfigError
from raytrain_ft.fields import check_types, knows_its_names
from raytrain_ft.policy.states import State

Action = Literal["sigkill", "sigkill_node", "sigstop", "sigterm", "silence", "exception", "exit", "hang"]
Phase = Literal[
    "data",
    "receive",
    "forward",
    "backward_pass",
    "send",
    "weight_pass",
    "backward",
    "reduce",
    "reduced",
    "tied",
    "update",
    "updated",
    "commit",
    "checkpoint",
    "fence",
    "reconcile",
    "transfer_source",
    "transfer_receiver",
    "join",
    "replay",
    "first_step",
]

TOGETHER_S = 20.0
"""How long one that is to fail together with others waits for them."""
NOWHERE = "-"
"""The node of a process that is not Ray's."""
SUPERVISOR_PHASES = tuple(str(state) for state in State)


class ChaosError(RuntimeError):
    """What a `FailAt` with action "exception" raises in place of the user's code."""


@knows_its_names
@dataclass(frozen=True, slots=True, kw_only=True)
class FailAt:
    """One failure.

    Attributes:
        step: the step in which it happens; for the phases of a recovery, the step that the recovery interrupts or any (None).
        phase: `data` (before the batch is read), `forward` (of micro-batch k); in a pipeline `receive` (before it waits for
            micro-batch k), `backward_pass` (of micro-batch k), `send` (of what comes out of either), `weight_pass` (of
            micro-batch k, if the schedule puts it off), `tied` (before it waits for others' gradients of what they share);
            `backward` (before bucket k is reduced), `reduce` (inside the all-reduce of bucket k), `reduced` (between reduce
            and update), `update` (before the optimizer's step of bucket k), `updated` (after it), `commit` (between update
            and commit), `checkpoint` (one is about to begin), `fence`, `reconcile`, `transfer_source`, `transfer_receiver`,
            `join` (the new group), `replay` (before this step is replayed), `first_step` (the first step after a recovery).
            For the supervisor: a state of the machine.
        rank: who fails; None with `role="supervisor"`, or for "whoever comes first".
        bucket, micro_batch: for phases of a bucket or of a micro-batch, which one (None: the first that gets there).
        action: SIGKILL of the process or of its whole node, SIGSTOP, SIGTERM (a notice), an exception, `os._exit`, a hang in
            user code; or "silence", a loss that is only simulated: from this bucket on the rank contributes zeros to the step,
            as if it had died there and `strategy="lossy"` went on without it (Nicolae et al., III-C; phase `backward`).
        nth: fail at the nth time that this point is reached in this process (1 is the first).
        together: so many ranks have a failure at this point, and each waits there until all of them have come: else the first
            one's loss is noticed, and the others are fenced before they get there. None must need another to go on to get
            there.
    """

    phase: str
    step: int | None = None
    rank: int | None = None
    bucket: int | None = None
    micro_batch: int | None = None
    action: Action = "sigkill"
    role: Literal["worker", "supervisor"] = "worker"
    nth: int = 1
    together: int = 1

    def __post_init__(self) -> None:
        check_types(self, FailAt)
        if self.nth < 1:
            raise ConfigError(f"FailAt(nth={self.nth}): the first time that a point is reached is 1")
        if self.together < 1:
            raise ConfigError(f"FailAt(together={self.together}): one rank that fails is 1")
        known = get_args(Phase) if self.role == "worker" else SUPERVISOR_PHASES
        if self.phase not in known:
            raise ConfigError(f"FailAt(phase={self.phase!r}): a {self.role} has the phases {', '.join(known)}")
        if self.action == "silence" and self.phase != "backward":
            raise ConfigError(f'FailAt(action="silence", phase={self.phase!r}): a rank falls silent in phase backward')

    @property
    def name(self) -> str:
        """A name that is safe as the name of a file."""
        return self._named(self.rank)

    @property
    def names_of_all(self) -> str:
        """The pattern of the names of this failure and of those of other ranks at the same point."""
        return self._named("*")

    def _named(self, rank: int | str | None) -> str:
        return f"{self.role}-{rank}-{self.step}-{self.phase}-{self.bucket}-{self.micro_batch}-{self.action}-{self.nth}"


class Injector:
    """Carries out the failures of one process."""

    def __init__(
        self, faults: Sequence[FailAt], directory: Path, role: str, silence: Callable[[int], None] | None = None
    ) -> None:
        self._silence = silence
        self._faults = [fault for fault in faults if fault.role == role]
        self._directory = directory
        self._counts: dict[str, int] = {}

    def probe(self, phase: str, *, rank: int | None = None, step: int | None = None, part: int | None = None) -> None:
        """Called wherever a failure could strike; almost always does nothing.

        Args:
            part: the bucket or the micro-batch.
        """
        for fault in self._faults:
            if fault.phase != phase or (fault.rank is not None and fault.rank != rank):
                continue
            wanted = fault.bucket if fault.bucket is not None else fault.micro_batch
            if (fault.step is not None and fault.step != step) or (wanted is not None and wanted != part):
                continue
            self._counts[fault.name] = self._counts.get(fault.name, 0) + 1
            if self._counts[fault.name] == fault.nth and self._claim(fault):
                self._await_others(fault)
                self._tell(fault)
                if fault.action == "silence" and self._silence is not None and part is not None:
                    self._silence(part)
                else:
                    strike(fault.action, fault.name)

    def _await_others(self, fault: FailAt) -> None:
        deadline = time.monotonic() + TOGETHER_S
        while len(list(self._directory.glob(fault.names_of_all))) < fault.together and time.monotonic() < deadline:
            time.sleep(0.001)

    def _claim(self, fault: FailAt) -> bool:
        """Nobody else carries it out. The marker is empty until it strikes, for others may have to come first."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._directory / fault.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def _tell(self, fault: FailAt) -> None:
        """It strikes now: the marker says when, and whom; at once, so that nobody reads half of it."""
        draft = self._directory / f".{fault.name}"  # no marker to whoever counts them
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else NOWHERE
        draft.touch(0o600)
        draft.write_text(f"{time.monotonic():.6f} {os.getpid()} {time.time():.6f} {node}")
        draft.replace(self._directory / fault.name)


def strike(action: Action, why: str) -> None:
    """Lets this process, or its whole node, fail now."""
    if action == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "sigkill_node":
        kill_node(os.getppid())
    elif action == "exit":
        sys.stdout.flush()
        os._exit(3)
    elif action == "hang":
        while True:  # a hang in user code: the process lives, its heartbeat too, but the step never ends
            time.sleep(3600)
    else:
        raise ChaosError(f"injected failure {why}")


def kill_node(raylet_pid: int) -> None:
    """SIGKILLs a raylet and every process that it started (this one included, if it is one of them)."""
    raylet = psutil.Process(raylet_pid)
    if "raylet" not in raylet.name():
        raise ChaosError(f"process {raylet_pid} is {raylet.name()}, not a raylet: is this a Ray worker?")
    children = raylet.children(recursive=True)
    last = sorted(children, key=lambda process: process.pid == os.getpid())  # this one last, if it is among them
    for process in (raylet, *last):
        with suppress(psutil.NoSuchProcess):  # it has just ended by itself
            process.kill()


def when(directory: Path, fault: FailAt) -> float | None:
    """The time (CLOCK_MONOTONIC, seconds) at which a failure struck, or None."""
    try:
        return float((directory / fault.name).read_text().split()[0])
    except (FileNotFoundError, IndexError):  # not reached, or not all have come who are to fail together
        return None
