"""How often one worker checkpoints: what it measures, and, of worker 0, what it decides, tells, and leaves to later runs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from raytrain_ft.errors import StorageError
from raytrain_ft.places import Place
from raytrain_ft.policy.frequency import Interval, Profile
from raytrain_ft.policy.tuner import Costs, Decision, Tuner
from raytrain_ft.storage.filesystem import open_storage
from raytrain_ft.storage.small import read_small

PROFILE_FILE = "profile.json"
PROFILE_S = 5.0
"""How long the measurements of an earlier run are waited for."""

Tell = Callable[[str, dict[str, Any]], None]
"""Is told of what happened: "CheckpointCommitted", "CheckpointFailed", "IntervalChosen", with their fields."""


class Tuning:
    """One worker's tuner, from the first world on that it has a part in.

    Args:
        place: the directory of checkpoints.
        key: what k and the measurements that it comes of depend on, but for the number of workers.
        tuner: makes a new one.

    Attributes:
        longest_s: the longest time that a checkpoint took to be durable, here or in an earlier run.
        in_first_step: no step was committed in this world yet.
    """

    def __init__(self, place: Place, key: str, tuner: Callable[[], Tuner], tell: Tell) -> None:
        self._place, self._for = place, key
        self._make = tuner
        self._tell = tell
        self._tuner: Tuner | None = None
        self._rank, self._count, self._incarnation = 0, 1, 0
        self._update_s = 0.0
        self.longest_s = 0.0
        self.in_first_step = True

    def begin(self, rank: int, count: int, incarnation: int, step: int, failure_s: float | None) -> None:
        """A world begins; as `Checkpointer.begin`."""
        leads = rank == 0 and (self._tuner is None or self._rank != 0)
        anew = incarnation != self._incarnation
        if self._tuner is None:
            self._tuner = self._make()
            self._tuner.last = step
        else:
            self._tuner.disturbed(step, resized=count != self._count)
        if failure_s is not None:
            self._tuner.failure_s = failure_s
        self._rank, self._count, self._incarnation, self.in_first_step = rank, count, incarnation, True
        if leads:  # who becomes worker 0 says by which k it goes, if that is known already
            if anew:  # in the midst of training nobody waits for storage
                self._recall(self._tuner)  # what worker 0 measured, who waits for the shards of all, counts most
            self._note(self._tuner.known(step))

    @property
    def latest(self) -> int:
        """The step of the latest checkpoint, or at which training began."""
        return 0 if self._tuner is None else self._tuner.last

    def catch_up(self, latest: int) -> None:
        """Others have written checkpoints meanwhile, the latest one of this step."""
        if self._tuner is not None:
            self._tuner.last = latest

    @property
    def mode(self) -> Literal["cpu", "gpu"]:
        """Where the next snapshot goes first, if there is room."""
        return "gpu" if self._tuner is None else self._tuner.mode

    def is_due(self, step: int, *, busy: bool) -> bool:
        """Whether there is to be a checkpoint once so many steps are committed. busy: one is under way."""
        return self._tuner is not None and self._tuner.due(step, busy=busy)

    def earliest(self, step: int) -> int:
        """The first step after this one at which one may be due, by what is known now."""
        assert self._tuner is not None
        return self._tuner.earliest(step, warm_up=int(self.in_first_step))

    def updated(self, seconds: float) -> None:
        """The weight update of the present step took so long."""
        self._update_s = seconds

    def stepped(self, step: int, seconds: float, looked_s: float, *, busy: bool) -> None:
        """A step was committed (`step`: how many by now). looked_s: of its seconds, what went to looks like this one."""
        if self._tuner is not None:
            if not self.in_first_step:  # it warms up, or comes after a recovery
                self._tuner.stepped(seconds, self._update_s, looked_s, busy=busy)
            self._note(self._tuner.settle(step))
        self.in_first_step = False

    def began(self, step: int, waited: float) -> None:
        """A checkpoint is taken here, or left out, after training has waited so long for the one before."""
        if self._tuner is not None:
            decision = self._tuner.began(step)
            self._tuner.waited(waited)  # the next step's time contains it
            self._note(decision)

    def persisted(self, costs: Costs, seconds: float, count: int) -> None:
        """A checkpoint of so many workers is durable; its persister took so long. May be called on any thread."""
        self.longest_s = max(self.longest_s, seconds)
        if self._tuner is not None and count == self._count:
            self._tuner.persisted(costs)

    def _note(self, decision: Decision | None) -> None:
        if decision is None or self._tuner is None or self._rank != 0:
            return
        about = {"step": decision.step, "k": decision.interval.k, "observed": decision.observed, "reason": decision.reason}
        asked = {"budget": self._tuner.budget, "failure_interval_s": self._tuner.failure_s}
        measured = {} if decision.profile is None else _numbers(decision.interval, decision.profile)
        self._tell("IntervalChosen", {"incarnation": self._incarnation, **about, **measured, **asked})

    @property
    def _key(self) -> str:
        """A world of another size takes other times."""
        return f"{self._for}, {self._count} workers"

    def files(self) -> dict[str, str]:
        """What is stored beside the checkpoints, by name."""
        if self._rank != 0 or self._tuner is None or not self._tuner.k:
            return {}
        return {PROFILE_FILE: json.dumps({"key": self._key, **self._tuner.to_json()})}

    def _recall(self, tuner: Tuner) -> None:
        """An earlier run of the same kind has measured already. What cannot be read, or not soon, is measured again."""
        found: Future[Any] = Future()
        threading.Thread(target=lambda: found.set_result(self._stored()), name="profile", daemon=True).start()
        try:
            stored = found.result(PROFILE_S)  # training does not hang with the storage
        except TimeoutError:
            return
        known = isinstance(stored, dict) and stored.get("key") == self._key
        if known and tuner.begin_from(stored) and tuner.profile is not None:
            self.longest_s = tuner.profile.persist

    def _stored(self) -> Any:
        try:
            profile = read_small(open_storage(self._place), PROFILE_FILE)
            return None if profile is None else json.loads(profile)
        except (StorageError, ValueError, RecursionError):
            return None


def _numbers(interval: Interval, profile: Profile) -> dict[str, Any]:
    """What a decision comes from, as it is told."""
    bounds = {name: getattr(interval, name) for name in ("mode", "k_persist", "k_overhead", "k_failures")}
    times = {f"{name}_s": getattr(profile, name) for name in ("iteration", "update", "copy", "persist")}
    times["device_copy_s"] = profile.device_copy if math.isfinite(profile.device_copy) else None
    room = {"snapshot_bytes": profile.size, "free_bytes": profile.free}
    return {**bounds, "overhead_s": interval.overhead, **times, **room}
