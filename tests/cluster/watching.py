"""What a test sees of a run that goes on, and does to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE

PATIENCE_S = 120.0
LOOK_S = 0.05


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Of a run's record, as far as it goes."""
    log = run / "events.jsonl"
    return [record for record in read_records(log) if record["event"] == name] if log.exists() else []


def steps_done(run: Path) -> int:
    """How many steps somebody has told of."""
    return max((record["stop_step"] for record in events(run, "StepsCommitted")), default=0)


def account(name: str) -> dict[str, Any]:
    """What the supervisor says of this run, which trains; waits until it does."""
    found: list[dict[str, Any]] = []

    def is_training() -> bool:
        with suppress(ValueError, RayError):  # it is not there yet
            status = ray.get_actor(f"supervisor:{name}", namespace=NAMESPACE).status.remote()
            found.append(ray.get(status, timeout=10))
        return bool(found) and found[-1]["state"] == "RUNNING"

    wait_for(is_training, f"{name} trains")
    return found[-1]


def kill(status: dict[str, Any], *members: str) -> None:
    """At once."""
    for member in members:
        os.kill(status["pids"][member], signal.SIGKILL)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError: it does not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(LOOK_S)
