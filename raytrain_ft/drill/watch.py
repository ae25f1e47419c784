"""How a run stands, as its driver sees it: asks the supervisor again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_ft.policy.states import ENDED
from raytrain_ft.runtime.spec import NAMESPACE, supervisor_name

ABORT_S = 60.0


class Watch:
    """Asks the supervisor how the run stands, and never waits for it long.

    Attributes:
        account: the latest. offsets: of each life of the supervisor (by its node and process), what to subtract from `clock`
            for the time in its records; of the answer that came fastest.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._supervisor: Any = None
        self._asked: tuple[Any, float] | None = None
        self.account: dict[str, Any] | None = None
        self.offsets: dict[tuple[str, int], float] = {}
        self._fastest: dict[tuple[str, int], float] = {}

    def look(self, seconds: float) -> bool:
        """Waits up to so long for news; whether there are any."""
        deadline = time.monotonic() + seconds
        try:
            if self._asked is None:
                self._supervisor = self._supervisor or ray.get_actor(supervisor_name(self._name), namespace=NAMESPACE)
                self._asked = (self._supervisor.status.remote(), self._clock())
            call, asked = self._asked
            if not ray.wait([call], timeout=seconds)[0]:
                return False
            self._asked = None
            account: Any = ray.get(call)
        except (RayError, ValueError):  # not there yet, or on its way back
            self._supervisor = self._asked = None
            time.sleep(max(0.0, deadline - time.monotonic()))
            return False
        took, life = self._clock() - asked, (account["node"], account["pid"])
        ended = account["state"] in ENDED  # its seconds stand still
        if not ended and took < self._fastest.get(life, math.inf):
            self._fastest[life], self.offsets[life] = took, asked + took / 2 - account["seconds"]
        self.account = account
        time.sleep(max(0.0, deadline - time.monotonic()))
        return True

    @property
    def zero(self) -> float:
        """When the run began, by `clock`."""
        return next(iter(self.offsets.values()), self._clock())

    def abort(self, reason: str) -> None:
        """Ends the run, and waits for that."""
        try:
            supervisor = ray.get_actor(supervisor_name(self._name), namespace=NAMESPACE)
            ray.get(supervisor.abort.remote(reason), timeout=ABORT_S)
        except (RayError, ValueError, TimeoutError):
            return  # it is gone; `fit` sees to the rest
