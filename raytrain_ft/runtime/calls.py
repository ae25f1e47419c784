"""Calls to workers: each ends as an answer, or as an event that says why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from raytrain_ft.errors import (
    MAY_BE_WHOLE_ELSEWHERE,
    ConfigError,
    FencedError,
    LogGapError,
    MismatchError,
    NonFiniteLossError,
    ReplayDivergedError,
    StorageError,
    UndoRefusedError,
    last_words,
    plain,
    refusal,
)
from raytrain_ft.places import told
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.sketch import unlike
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.health import Health
from raytrain_ft.runtime.spec import Introduction, RunSpec
from raytrain_ft.training.fence import PeerLostError

DIED = "the process died (SIGKILL, a crash or an exit)"
BROKEN_SECONDS = 0.05
"""Until a call is tried again whose connection broke. If the worker died, Ray knows by then."""
LONGEST_PAUSE_S = 1.0
"""Between two tries of a call, each of which waits twice as long as the one before."""
LONGEST_CAUSE = 1000
_KINDS: dict[type[BaseException], m.FailureKind] = {
    NonFiniteLossError: "non_finite",
    MismatchError: "mismatch",
    ConfigError: "config",
    StorageError: "storage",
}
"""Of what a worker may raise, the first that fits; anything else is the task's."""


class Calls:
    """Asks the workers of a run."""

    def __init__(self, spec: RunSpec, tell: Callable[[m.Event], None], contacts: Contacts, health: Health) -> None:
        self._spec = spec
        self._tell = tell
        self._contacts = contacts
        self._health = health

    async def call(
        self,
        member: str,
        method: str,
        *args: Any,
        incarnation: int = 0,
        seconds: float | None = None,
        load: str = "",
        step: int | None = None,
    ) -> Any:
        """Calls a worker, about an incarnation; None if it could not answer, which is then an event. What is about none may
        come twice, and is asked again if a connection breaks."""
        try:
            ask = self._answer if incarnation else self.answer_again
            return await asyncio.wait_for(ask(member, method, *args), seconds)
        except RayTaskError as error:
            self.report(member, error, incarnation, load, step)
        except (RayActorError, GetTimeoutError, ValueError) as error:
            if incarnation and isinstance(error, ActorUnavailableError):
                await asyncio.sleep(2 * BROKEN_SECONDS)  # if it died, `Crew._watch` tells first, and the incarnation is over
                reason = f"the connection to {member} broke"
                self._tell(m.Suspected(incarnation=incarnation, reason=reason, noticed_by="supervisor"))
                return None
            if why := refusal(error):
                self._failed(member, "config", why, incarnation, step)
            else:
                self.lost(member, cause_of(error), "ray")
        except TimeoutError:
            self.lost(member, f"no answer to {method} within {seconds:g} s", "deadline")
        return None

    async def _answer(self, member: str, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(getattr(self._contacts.handle(member), method).remote(*args).future())

    async def answer_again(self, member: str, method: str, *args: Any) -> Any:
        """A connection that broke is no death, and does not say whether the call arrived: asks again, as long as the lease."""
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + self._spec.lease, BROKEN_SECONDS
        while True:
            try:
                return await self._answer(member, method, *args)
            except ActorUnavailableError:
                if clock() > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def report(self, member: str, error: RayTaskError, incarnation: int, load: str = "", step: int | None = None) -> None:
        """What a worker's method raised, as an event. A fence that overtook the command is none. `load`: the checkpoint that
        the worker was to load. `step`: the step that it was to complete or begin anew."""
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, FencedError):
            return
        if incarnation and isinstance(cause, PeerLostError | ObjectLostError | TimeoutError):  # setting one up asks no peer
            reason = str(cause)[:300] or f"{member} ran into a deadline"
            self._tell(m.Suspected(incarnation=incarnation, reason=reason, noticed_by=member))
            return
        if isinstance(cause, LogGapError | ReplayDivergedError):
            diverged = isinstance(cause, ReplayDivergedError)
            reason = str(cause)[:1000]
            self._tell(m.LogMissing(member=member, incarnation=incarnation, reason=reason, diverged=diverged))
            return
        if isinstance(cause, UndoRefusedError) and incarnation:  # while a worker is set up, its settings are refused
            reason = " ".join(str(cause).split())[:1000]
            self._tell(m.UndoRefused(member=member, incarnation=incarnation, reason=reason))
            return
        if load and isinstance(cause, StorageError):
            about = {"name": load, "reason": str(cause)[:1000], "damaged": not isinstance(cause, MAY_BE_WHOLE_ELSEWHERE)}
            self._tell(m.CheckpointRejected(member=member, incarnation=incarnation, **about))
            return
        kinds: list[m.FailureKind] = [kind for known, kind in _KINDS.items() if isinstance(cause, known)]
        kind = kinds[0] if kinds else "task"
        message = str(error) if kind == "task" else str(cause)  # a traceback quotes the user's code, with its URIs
        self._failed(member, kind, message, incarnation, step)

    def _failed(self, member: str, kind: m.FailureKind, message: str, incarnation: int, step: int | None) -> None:
        """A worker cannot do what others may be able to."""
        unable = kind != "non_finite" and (incarnation or self._health.is_starting(member))
        if unable and (node := self._contacts.node_of(member)) is not None:
            self._health.nodes.disfavour(node)
        step, of = self._health.step if step is None else step, incarnation or None
        message = plain(told(message))
        self._tell(m.TaskFailed(member=member, rank=None, step=step, kind=kind, message=message, incarnation=of))

    async def hint(self, member: str, method: str, *args: Any) -> None:
        """Tells a worker what it can do without: if that fails, it tells nothing of the worker."""
        with suppress(RayError, ValueError):
            await getattr(self._contacts.handle(member), method).remote(*args)

    def lost(self, member: str, cause: str, noticed_by: str, preempted: bool = False) -> None:
        """A worker is gone, or can no longer be used."""
        silent_s = self._health.silence(member)
        self._tell(m.WorkerLost(member=member, cause=cause, noticed_by=noticed_by, preempted=preempted, silent_s=silent_s))


def differs(known: Introduction, others: Iterable[Introduction], *, other_data: bool = False) -> str:
    """Why this worker cannot take what the others hold, or not to the bit, as far as that can be seen; empty if it can.
    `other_data`: that it reads other data is known, and wanted."""

    def words(one: Introduction) -> str:
        return f"{one.num_parameters} parameters in {one.num_buckets} buckets, with {one.software}"

    for other in others:
        if words(other) != words(known):
            return (
                f"on node {known.host} the model has {words(known)}; on node {other.host} it has {words(other)}. Install the "
                "same code and the same versions on every node"
            )
        if not other_data and (found := unlike(other.samples, known.samples)):
            # The global generators are no cause: they were seeded alike before.
            seed = (
                "TrainTask.dataset() makes it with randomness that has no fixed seed (np.random.default_rng(), the order of a "
                "set), give it one"
            )
            if known.host == other.host:  # where all read the same files
                return f"two workers on node {known.host} have different datasets: {found}. If {seed}"
            return (
                f"on node {known.host} the dataset is another one than on node {other.host}: {found}. If {seed}. Else put the "
                'same data on every node, or on storage that all share; or allow it: CheckpointConfig(override=("dataset",))'
            )
    return ""


def cause_of(error: BaseException) -> str:
    """A worker's death in a line."""
    if getattr(error, "actor_init_failed", False):
        return f"it could not begin: {told(last_words(str(error)))}"[:LONGEST_CAUSE]
    text = " ".join(str(error).split())
    if isinstance(error, ActorDiedError) or "actor" in text.lower():
        for sign, words in (
            ("OOM", "the process was killed, perhaps for memory"),
            ("node died", "the node died"),
            ("Failed to look up actor", "its process is gone"),
            ("connection error code 2", DIED),
            ("INTENDED_USER_EXIT", "the process exited"),
            ("The actor died unexpectedly", "the process died"),
            ("exit code", "the process exited"),
        ):
            if sign in text and (sign != "OOM" or ("memory usage" in text and "TaskOOM" in text)):
                return words
    return text[:200] or type(error).__name__
