"""Finding a run from anywhere on its cluster, by name or directory: to attach to it, to stop it, to list what is alive."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raytrain_ft.config import check_name
from raytrain_ft.errors import ConfigError, RunActiveError, StorageError, TrainingFailedError
from raytrain_ft.follow import ANSWER_S, UNAVAILABLE_S, Account, abort, clean_up, recorded, result_of, watch
from raytrain_ft.places import Place
from raytrain_ft.policy.states import ENDED
from raytrain_ft.progress import Display
from raytrain_ft.result import Result
from raytrain_ft.runtime.leftovers import named
from raytrain_ft.runtime.placement import connect
from raytrain_ft.runtime.spec import NAMESPACE, supervisor_name
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import LocalStorage


def attach(run: str | Path, *, quiet: bool = False) -> Result:
    """Follows a run until its end, whoever started it, and keeps it going meanwhile. Leaving (Ctrl-C) does not end it.

    Args:
        run: its directory, or the name of one that is alive on the cluster. Of a run that has ended, the records in its
            directory tell the outcome.
        quiet: show nothing.

    Raises:
        ConfigError: there is no such run, or it is about to begin once more; TrainingFailedError: its supervisor does not
            answer; the errors of `Trainer.fit`: how the run ended.
    """
    supervisor, account = find(run)
    if supervisor is None:
        return result_of(account)
    with Display(account["name"], account["max_steps"], quiet=quiet) as display:
        for latest in watch(supervisor, account):
            account = latest
            display.show(account)
        display.show_end(account)
    clean_up(account["run_id"], supervisor)
    return result_of(account)


def stop(run: str | Path, reason: str, *, quiet: bool = False) -> Account:
    """Ends a run that is alive on the cluster, with a checkpoint of what it has come to; returns the account of its end.

    Raises:
        ConfigError: there is no such run, or it is about to begin once more; TrainingFailedError: its supervisor does not
            answer, or it was killed, and has left no word of its end.
    """
    supervisor, account = find(run)
    if supervisor is None:
        return account
    with Display(account["name"], account["max_steps"], quiet=quiet) as display:
        last = abort(supervisor, reason, account["stop_timeout"], display) or account
    clean_up(account["run_id"], supervisor)
    ended = recorded(Path(account["directory"])) or last
    if ended["state"] not in ENDED:
        raise TrainingFailedError(
            f"the run {account['name']!r} did not end by itself in time: it was killed at about step {last['step']}, and may "
            f"have left no checkpoint of that. Its records in {account['directory']} have no end; run its job again, and it "
            "goes on from the newest checkpoint"
        )
    return ended


def alive() -> list[Account]:
    """How the runs stand that are alive on this cluster; one whose supervisor does not answer has no more than its name.

    Raises:
        ConfigError: there is no cluster here.
    """
    _connect()
    accounts: list[Account] = []
    for name in _names():
        try:
            supervisor: Any = ray.get_actor(supervisor_name(name), namespace=NAMESPACE)
            accounts.append(ray.get(supervisor.status.remote(), timeout=ANSWER_S))
        except (ValueError, RayError):
            accounts.append({"name": name})
    return accounts


def _names() -> list[str]:
    """The names of all runs that have a supervisor."""
    prefix = supervisor_name("")
    return sorted(name.removeprefix(prefix) for name in named(prefix))


def find(run: str | Path) -> tuple[Any, Account]:
    """The supervisor of a run and how the run stands; without a supervisor, how it ended.

    Raises:
        ConfigError: there is no such run; RunActiveError: it is about to begin once more; TrainingFailedError: its supervisor
            does not answer.
    """
    directory = Path(run).resolve() if _has_records(Path(run)) else None
    ended = recorded(directory) if directory is not None else None
    if directory is not None and ended is not None and not _is_elsewhere(run, ended):
        _check_whether_over(directory, ended)
        return None, ended
    name = Path(run).name if directory is not None or Path(run).is_absolute() else str(run)
    if name != Path(name).name:
        raise ConfigError(
            f"{Place(name)!r}, seen from {Path.cwd()}, is no directory of a run: it has no events.jsonl. Give one that "
            "has, or the name of a run that is alive on the cluster"
        )
    check_name(name)
    _connect()
    began = time.monotonic()
    try:
        supervisor = ray.get_actor(supervisor_name(name), namespace=NAMESPACE)
        account: Any = ray.get(supervisor.follow.remote(), timeout=UNAVAILABLE_S)
    except (ValueError, ActorDiedError) as error:
        others = ", ".join(_names())
        there = f"alive are: {others}" if others else "no run is alive there"
        hint = "; its records have no end, so run its job again: it goes on from the newest checkpoint" if directory else ""
        raise ConfigError(f"no run named {name!r} is alive on this cluster ({there}){hint}") from error
    except RayError as error:
        raise TrainingFailedError(
            f"the supervisor of the run {name!r} is there, but has not answered for {time.monotonic() - began:.0f} s: look at "
            "its node and at the storage of its records, and ask again. If it stays silent, the workers end by themselves "
            f"after RecoveryConfig.lease. {type(error).__name__}: {error}"
        ) from error
    if directory is not None and account["directory"] != str(directory):
        raise ConfigError(
            f"the run named {name!r} that is alive on this cluster is in {account['directory']}, not in {directory}"
        )
    return supervisor, account


def _check_whether_over(directory: Path, ended: Account) -> None:
    """Whether these records are of the last launch. The next one has the right to write them from its driver's start on, and
    its supervisor, which has yet to come up, puts them aside.

    Raises:
        RunActiveError: the next launch is about to begin.
    """
    try:
        other = lock.successor(LocalStorage(directory), ended["run_id"])
    except StorageError:
        return  # who cannot read that is told what there is
    if other is not None:
        raise RunActiveError(
            f"a new launch of the run {ended['name']!r} is about to begin (process {other.pid} on {other.host}): ask again in "
            f"a moment. The records in {directory} are still those of the launch before"
        )


def _is_elsewhere(run: str | Path, ended: Account) -> bool:
    """Whether a bare name, which is also that of a directory here with the records of a run that has ended, is that of a run in
    another directory that is alive on the cluster. Without a cluster there is none."""
    if isinstance(run, Path) or run != Path(run).name:
        return False
    try:
        return any(one.get("directory", ended["directory"]) != ended["directory"] for one in alive() if one["name"] == run)
    except ConfigError:
        return False


def _has_records(run: Path) -> bool:
    try:
        return (run / "events.jsonl").exists()
    except OSError:  # longer than a path may be
        return False


def _connect() -> None:
    if not ray.is_initialized():
        connect("auto", log_to_driver=False, logging_level=logging.ERROR)
