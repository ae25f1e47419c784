"""Following a run whose supervisor is known: to the job that started it, or to who has found it (`attaching`).

The supervisor owns the run. Whoever follows it asks it how it stands, a few times a second, and thereby keeps it going: a run
that nobody follows saves a checkpoint and ends after `RecoveryConfig.driver_timeout`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)

from raytrain_ft import errors
from raytrain_ft.errors import ConfigError, FTError, LockedError, TrainingFailedError, refusal
from raytrain_ft.places import Place
from raytrain_ft.policy.accounts import Accounts
from raytrain_ft.policy.history import ENDS
from raytrain_ft.policy.states import ENDED, State
from raytrain_ft.progress import Display
from raytrain_ft.result import Result, first_of, recovery_of
from raytrain_ft.runtime.event_log import each_record, has_end
from raytrain_ft.runtime.leftovers import kill_named
from raytrain_ft.runtime.spec import worker_name
from raytrain_ft.storage.filesystem import within

POLL_S = 0.2
RENEW_S = 1.0
ANSWER_S = 10.0
GRACE_S = 2.0
"""How long the supervisor has to end by itself, once its run has ended."""
UNAVAILABLE_S = 120.0
"""How long a supervisor is waited for that Ray is restarting, or for as long as its lease, if that is longer."""
LAST_WORDS_S = 30.0
"""How long the end of a run may take beyond the time that it has for a last checkpoint."""
DRAWING_S = 600.0
"""How long a run that has ended may go on to draw its report and to clean up. Of a log of weeks that takes minutes, and who is
killed meanwhile leaves drafts, logs and the right to write behind."""
_NOT_BEGUN = (
    ", and nothing has begun: it waits for a place in the cluster, or for its node to install the job's runtime environment; "
    "look at `ray status` and `ray list actors`, or raise RecoveryConfig(schedule_timeout=...)"
)

Account = dict[str, Any]


def watch(
    supervisor: Any, known: Account | None = None, most_s: float = math.inf, start_s: float = UNAVAILABLE_S
) -> Iterator[Account]:
    """How the run stands, again and again; the last account is that of its end. A supervisor that is silent is waited for as
    long as its workers train on without it.

    Args:
        known: how it stood a moment ago.
        most_s: how long it is waited for at most while it is silent.
        start_s: how long its first word may take: Ray first brings the job's runtime environment to its node.

    Raises:
        ConfigError: the cluster's nodes cannot import the task, or have other code of raytrain_ft; TrainingFailedError: the
            supervisor is gone, or this process's connection to Ray.
    """
    ended = supervisor.run.remote()
    unreachable: float | None = None
    while True:
        _check_connected()
        done, _ = ray.wait([ended], timeout=POLL_S)
        over = _over(known)
        try:
            told: Any = ray.get(ended if done else supervisor.follow.remote(len(over)), timeout=ANSWER_S)
            unreachable = None
        except (ActorUnavailableError, GetTimeoutError) as error:
            unreachable = unreachable or time.monotonic()
            patience = min(most_s, max(UNAVAILABLE_S, known["lease"] if known is not None else start_s))
            if time.monotonic() - unreachable > patience:
                hint = "" if known is not None else _NOT_BEGUN
                raise TrainingFailedError(f"the supervisor has not answered for {patience:g} s{hint}") from error
            continue
        except ActorDiedError as error:
            yield _last_account(error, known)
            return
        except RayTaskError as error:
            raise TrainingFailedError(f"the supervisor failed: {error}") from error
        account: Account = told if done else told | {"recoveries": over[: told["recoveries_before"]] + told["recoveries"]}
        known = account
        yield account
        if done:
            return


def _check_connected() -> None:
    """Whether Ray can be asked for anything: without a connection it would make one by itself, with a cluster of its own.

    Raises:
        TrainingFailedError: this process has none any more.
    """
    if not ray.is_initialized():
        raise TrainingFailedError(
            "this process is not connected to Ray any more: did it call ray.shutdown()? It cannot follow the run. If nobody "
            "else does (`raytrain-ft attach`), the run stores a checkpoint and ends after RecoveryConfig(driver_timeout=...); "
            "run its job again then, and it goes on from there"
        )


def _over(known: Account | None) -> list[dict[str, Any]]:
    """The recoveries that are over: there may be thousands, which need not be told again five times a second. That the cause of
    one became known later is told in the account of the run's end."""
    return [] if known is None else [recovery for recovery in known["recoveries"] if recovery["resumed"] is not None]


@contextmanager
def kept_going(supervisor: Any) -> Iterator[None]:
    """Tells the supervisor from a thread of its own that it is followed: a slow callback must not end the run."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(RENEW_S):
            with suppress(RayError, FTError):
                _check_connected()
                ray.get(supervisor.follow.remote(sys.maxsize), timeout=ANSWER_S)

    thread = threading.Thread(target=renew, name="raytrain_ft-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(RENEW_S)  # it may still wait for an answer, for which nobody who ends the run should wait


def _last_account(error: ActorDiedError, known: Account | None) -> Account:
    """The supervisor is gone: if that is because the run has ended, somebody else was told a moment before, and the records
    tell it too. If Ray has started it again and it could not begin, all that there is of its error is the text."""
    ended = recorded(Path(known["directory"])) if known is not None else None
    if ended is not None and known is not None and ended["run_id"] == known["run_id"]:
        return ended
    locked = str(error).partition("LockedError: ")[2]
    if locked:
        raise LockedError(locked.splitlines()[0]) from error
    if refused := refusal(error):
        raise ConfigError(refused) from error
    if "No module named" not in str(error):
        raise TrainingFailedError(f"the supervisor could not be kept alive: {error}") from error
    module = str(error).split("No module named")[1].split()[0].strip("'\"")
    raise ConfigError(
        f"the cluster's nodes cannot import {module!r}, which the task needs: define the task in the job's own file, submit "
        "with --working-dir, or install the module on every node"
    ) from error


def abort(supervisor: Any, reason: str, stop_timeout: float, display: Display | None) -> Account | None:
    """Asks for the end of the run, which leaves a checkpoint, and waits for it, but not for ever. Returns the last account."""
    deadline = time.monotonic() + stop_timeout + LAST_WORDS_S
    account = None
    with suppress(RayError, FTError):  # it is gone, or all of Ray is, and its workers end themselves
        _check_connected()
        _ask_to_end(supervisor, reason, deadline)
        for account in watch(supervisor, most_s=deadline - time.monotonic()):
            if display is not None:
                display.show(account)
            patience = DRAWING_S if account["state"] in ENDED else 0.0
            if time.monotonic() > deadline + patience:
                break
    if display is not None and account is not None:
        display.show_end(account)
    return account


def _ask_to_end(supervisor: Any, reason: str, deadline: float) -> None:
    """Until it has heard: Ray may be restarting it, and a run that was only killed leaves no checkpoint."""
    while True:
        try:
            ray.get(supervisor.abort.remote(reason), timeout=ANSWER_S)
            return
        except (ActorUnavailableError, GetTimeoutError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def clean_up(run_id: str, supervisor: Any) -> None:
    """Leaves nothing behind: the supervisor, and any worker that it did not end. That this cannot be done is warned of, and
    takes the place of no outcome: how the run ended is known by now."""
    try:
        _check_connected()
        ended = supervisor.end.options(max_task_retries=0).remote()
        ray.wait([ended], timeout=GRACE_S)
        ray.kill(supervisor)
        kill_named(worker_name(run_id, ""))
    except (RayError, TrainingFailedError) as error:
        warnings.warn(
            f"Ray does not answer, so processes of the run may be left: {type(error).__name__}: {error}. They end by "
            "themselves, its workers after RecoveryConfig(lease=...) at the latest.",
            stacklevel=2,
        )


def result_of(account: Account) -> Result:
    """The outcome of a run that has ended.

    Raises:
        the error that it ended with.
    """
    if account["failure"] is not None:
        name, message = account["failure"]
        kind = getattr(errors, name, TrainingFailedError)
        raise kind(f"{message}\nThe run's records: {account['directory']}")
    recoveries = [recovery_of(fields) for fields in account["recoveries"]]
    metrics = {"loss": account["loss"], "step": account["step"]}
    digest, saved = (account["result"].get(name, "") for name in ("digest", "path"))
    final = first_of(saved) if saved else ""  # an earlier run of this name may have left another
    return Result(metrics, account["directory"], recoveries, digest, account["seconds"], account["checkpoint"], final)


def recorded(directory: Path) -> Account | None:
    """How a run ended, as its records tell; None if they do not."""
    if not has_end(directory / "events.jsonl"):
        return None
    records = each_record(directory / "events.jsonl")
    started, end, committed = next(records, None), None, None
    if started is None or started["event"] != "RunStarted":
        return None
    stored = started.get("stored", ())
    names, losses = [one["name"] for one in reversed(stored)], {one["step"]: one.get("loss") for one in reversed(stored)}
    recoveries, step, world_size = Accounts(), 0, 0
    for record in records:
        recoveries.take(record)
        match record["event"]:
            case "StepsCommitted":
                committed, step = record, max(step, record["stop_step"])
            case "CheckpointCommitted":
                names.append(record["name"])
            case "Resumed":
                world_size = max(world_size, record["world_size"] * started["details"].get("stages", 1))
            case name if name in ENDS:
                end = record
    if end is None:
        return None
    step = end.get("steps", step)
    details = started["details"]
    uri = details.get("checkpoints")
    return {
        "run_id": started["run_id"],
        "name": details["name"],
        "directory": str(directory),
        "max_steps": details["max_steps"],
        "state": end.get("state", str(State.FINISHED)),
        "world_size": world_size,
        "step": step,
        "loss": committed["loss"] if committed else losses.get(step),  # a run that was at its end when it began did no step
        "recoveries": recoveries.all,
        "warnings": [],  # they were of use while it ran
        "failure": end.get("error"),
        "result": {name: end.get(name, "") for name in ("digest", "path")},
        "seconds": end["at"],
        "checkpoint": str(within(Place(uri), names[-1])) if uri and names else None,
    }
