"""Steering a run that is alive on the cluster: a replica sleeps, wakes up, or leaves.

For planned downsizing without a failure: a suspended replica contributes nothing and can take part again
from one step to the next; one that is asked to leave is replaced first, if there is room, and then goes at a step boundary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_ft.attaching import find
from raytrain_ft.errors import ConfigError, last_words
from raytrain_ft.follow import ANSWER_S, Account


def suspend(run: str | Path, rank: int, *, at_once: bool = False) -> None:
    """This replica contributes nothing from the next step on; the others share out its samples.

    Args:
        run: its directory, or the name of one that is alive on the cluster.
        at_once: also nothing more to the step under way, whose mean is then over fewer samples; the record lists them. With
            `update="wait_free"` the step is finished nevertheless.

    Raises:
        ConfigError: there is no such run or rank, or nobody else is left to train.
    """
    _ask(run, "sleep", rank, True, at_once)


def resume(run: str | Path, rank: int) -> None:
    """A suspended replica takes part again from the next step on.

    Raises:
        ConfigError: there is no such run or rank.
    """
    _ask(run, "sleep", rank, False, False)


def leave(run: str | Path, rank: int, within_s: float, *, replace: bool = True) -> None:
    """This worker is to be gone within so many seconds. It trains on until a replacement is ready, but no longer than the
    deadline allows; if there is none by then, and the run may not go on with fewer workers, it stays.

    Args:
        run, rank: as in `suspend`.
        replace: if not, it leaves at the next step boundary, nobody takes its place, and the run has one worker less from then
            on, also when the cluster has room.

    Raises:
        ConfigError: there is no such run or rank, or `num_workers` does not allow one less.
    """
    supervisor, account = _alive(run)
    world = account["world"]
    if not 0 <= rank < len(world):
        raise ConfigError(f"rank {rank}: the run has ranks 0 to {len(world) - 1}")
    _get(supervisor.notice.remote(world[rank], within_s, "a person asked for it", replace))


def _ask(run: str | Path, method: str, *args: object) -> None:
    supervisor, _ = _alive(run)
    _get(getattr(supervisor, method).remote(*args))


def _alive(run: str | Path) -> tuple[Any, Account]:
    supervisor, account = find(run)
    if supervisor is None:
        raise ConfigError(f"the run {account['name']!r} has ended ({account['state'].lower()})")
    return supervisor, account


def _get(answer: Any) -> None:
    try:
        ray.get(answer, timeout=ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise ConfigError(f"the supervisor failed at this request: {last_words(str(error))}") from error
    except RayError as error:
        raise ConfigError(f"the supervisor did not answer, so the request may not have come: ask again ({error})") from error


__all__ = ["leave", "resume", "suspend"]
