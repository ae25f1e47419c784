"""Notices on a real cluster: workers leave before their deadline, nothing is lost, nobody else starts again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import promise_kept, train
from toy import Leisurely

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.notices.metadata import ENDPOINT_VARIABLE
from raytrain_ft.runtime.spec import NAMESPACE

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from clouds import Ec2

pytestmark = pytest.mark.long

GRACE_S = 20.0
STEPS = 300


class Watched:
    """A run that goes on in a thread, and what it says of itself."""

    def __init__(self, path: Path, name: str) -> None:
        self._log = path / name / "events.jsonl"
        self._name = name

    def records(self, event: str) -> list[dict[str, Any]]:
        return [r for r in read_records(self._log) if r["event"] == event] if self._log.exists() else []

    def until(self, condition: Callable[[], object], seconds: float = 40) -> float:
        """Waits for it; returns the time (monotonic)."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.02)
        return time.monotonic()

    def account(self) -> dict[str, Any]:
        supervisor = ray.get_actor(f"supervisor:{self._name}", namespace=NAMESPACE)
        return ray.get(supervisor.status.remote(), timeout=10)

    def settled(self) -> dict[str, Any]:
        """The account of a time when the run trains and a spare is ready."""
        self.until(lambda: self.account()["state"] == "RUNNING" and "spare" in self.account()["members"].values())
        return self.account()

    def leaves(self, member: str, pid: int, notice: Callable[[], object]) -> float:
        """Gives notice; returns the seconds until the process of this member is gone and training goes on without it."""
        before = len(self.records("Resumed"))
        began = time.monotonic()
        notice()
        gone = self.until(lambda: not psutil.pid_exists(pid)) - began
        self.until(lambda: len(self.records("Resumed")) > before)
        assert member not in self.account()["members"]
        return gone


@contextmanager
def taking_time(path: Path) -> Iterator[Path]:
    """The file that makes a run take its time; it is gone after the block at the latest."""
    slow = path / "slow"
    slow.touch()
    try:
        yield slow
    finally:
        slow.unlink(missing_ok=True)


def test_whoever_has_notice_leaves_in_time_and_nothing_is_lost(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., ft.Result]
) -> None:
    run = Watched(tmp_path, "noticed")
    arguments = {"steps": STEPS, "global_batch_size": 36}
    settings: dict[str, Any] = {"preemption": ("aws", "gcp", "ray", "sigterm"), "sigterm_grace": timedelta(seconds=GRACE_S)}
    cluster.add_node()  # room for a new spare after each of two departures; the third takes its node with it
    with Ec2() as service, ThreadPoolExecutor(1) as pool, taking_time(tmp_path) as slow:
        environment = {"env_vars": {ENDPOINT_VARIABLE: service.url}}
        task = Leisurely(slow)
        training = pool.submit(
            train, tmp_path, "noticed", task=task, num_spares=1, worker_runtime_env=environment, **arguments, **settings
        )
        run.until(lambda: run.records("StepsCommitted"))

        account = run.settled()
        supervisor = ray.get_actor("supervisor:noticed", namespace=NAMESPACE)
        with pytest.raises(ConfigError, match="no number of seconds"):
            ray.get(supervisor.notice.remote(account["world"][0], float("nan"), "a mistake"))
        with pytest.raises(ConfigError, match="w99"):
            ray.get(supervisor.notice.remote("w99", 30.0, "a mistake"))
        spot = account["world"][1]
        service.machine = account["pids"][spot]
        end = (datetime.now(UTC) + timedelta(seconds=100)).strftime("%Y-%m-%dT%H:%M:%SZ")
        notice = json.dumps({"action": "terminate", "time": end})
        assert run.leaves(spot, account["pids"][spot], lambda: setattr(service, "spot", notice)) < 30

        account = run.settled()
        terminated = account["world"][0]
        pid = account["pids"][terminated]
        assert run.leaves(terminated, pid, lambda: os.kill(pid, signal.SIGTERM)) < GRACE_S

        account = run.settled()
        drained = account["world"][2]
        node = account["nodes"][drained]
        assert run.leaves(drained, account["pids"][drained], lambda: cluster.drain_node(node, 30)) < 30
        run.until(lambda: node not in cluster.node_ids())  # its raylet ends by itself when nothing runs there any more
        slow.unlink()
        result = training.result(timeout=90)

    sources = [(r["member"], r["source"]) for r in run.records("Noticed")]
    assert sources == [(spot, "aws spot"), (terminated, "sigterm"), (drained, "ray drain")]
    assert [(r.left, r.lost, r.attempts, r.redone) for r in result.recoveries if r.left] == [
        ([member], [], 1, 0) for member, _ in sources
    ]
    assert {r.guarantee for r in result.recoveries} == {Guarantee.EXACT}
    unavailable = run.records("NoticesUnavailable")
    silent = [r["member"] for r in unavailable if r["source"] == "gcp"]  # this is none of its machines: said once by each
    assert len(silent) == len(set(silent)) >= 3
    assert all("TimeoutError" in r["reason"] for r in unavailable if r["source"] != "gcp")  # on a machine that is held up
    started = [r["member"] for r in run.records("WorkerStarted")]
    assert len(started) == len(set(started)) <= 3 + 1 + 3  # nobody but the replacements was started
    assert promise_kept(result) == []
    assert result.digest == undisturbed(**arguments).digest


def test_too_little_time_is_a_loss_like_any_other(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., ft.Result]
) -> None:
    run = Watched(tmp_path, "late")
    settings: dict[str, Any] = {"sigterm_grace": timedelta(milliseconds=300), "preemption": ("sigterm",), "num_spares": 0}
    with ThreadPoolExecutor(1) as pool, taking_time(tmp_path) as slow:
        training = pool.submit(train, tmp_path, "late", task=Leisurely(slow), **settings)
        run.until(lambda: run.records("StepsCommitted"))
        account = run.account()
        member = account["world"][1]
        os.kill(account["pids"][member], signal.SIGTERM)
        run.until(lambda: any(r["member"] == member for r in run.records("WorkerLost")))
        slow.unlink()
        result = training.result(timeout=90)
    assert [r["source"] for r in run.records("Noticed")] == ["sigterm"]
    assert [(r.lost, r.left) for r in result.recoveries] == [([member], [])]
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []


def test_when_all_are_told_to_go_what_was_trained_is_stored_first(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Callable[..., ft.Result]
) -> None:
    """There is no room for others. The nodes stay in the end, so the run goes on from that checkpoint by itself."""
    run = Watched(tmp_path, "all")
    arguments = {"workers": 5, "steps": 60}
    settings: dict[str, Any] = {"sigterm_grace": timedelta(seconds=7), "preemption": ("sigterm",), "num_spares": 0}
    with ThreadPoolExecutor(1) as pool, taking_time(tmp_path) as slow:
        never = ft.CheckpointConfig(every=10_000)
        task = Leisurely(slow)
        training = pool.submit(train, tmp_path, "all", task=task, checkpoints=never, **arguments, **settings)
        run.until(lambda: run.records("StepsCommitted"))
        for pid in run.account()["pids"].values():
            os.kill(pid, signal.SIGTERM)
        run.until(lambda: len({record["member"] for record in run.records("WorkerLost")}) == 5)
        slow.unlink()
        result = training.result(timeout=90)
    stored = run.records("CheckpointCommitted")[0]
    assert stored["step"] > 0
    assert stored["at"] < run.records("WorkerLost")[0]["at"]
    redone = sum(recovery.redone for recovery in result.recoveries)
    assert redone <= 15, "it was stored four seconds before the end, in steps of more than 0.4 s"
    assert result.digest == undisturbed(**arguments).digest
    assert promise_kept(result) == []


def test_a_worker_that_would_ask_another_machine_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{ENDPOINT_VARIABLE}.*loopback"):
        train(tmp_path, "elsewhere", workers=1, worker_runtime_env={"env_vars": {ENDPOINT_VARIABLE: "http://93.184.216.34"}})
