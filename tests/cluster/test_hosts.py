"""What crosses a network, on hosts with real cables: cut, flapping, slow, and clocks that differ or jump."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import promise_kept, train
from ray._private.state import actors
from ray.exceptions import RayError
from toy import Leisurely

import raytrain_ft as ft
from raytrain_ft.chaos import network
from raytrain_ft.chaos.hosts import HEAD, HostCluster
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE, worker_name

pytestmark = [
    pytest.mark.long,
    pytest.mark.own_cluster,
    pytest.mark.skipif(network.why_unavailable() is not None, reason=f"several hosts: {network.why_unavailable()}"),
]
LEASE_S = 3.0
STEPS = 250


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostCluster]:
    with HostCluster(num_nodes=5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(hosts: HostCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run to which nothing happens."""
    return train(tmp_path_factory.mktemp("calm"), "calm", steps=STEPS).digest


class Running:
    """A run on a thread of its own, so that the test can disturb it."""

    def __init__(self, path: Path, name: str, **arguments: Any) -> None:
        self._name = name
        self._pace = path / "pace"
        self._pace.touch()
        self._supervisor: Any = None
        settings = {"steps": STEPS, "num_spares": 1, "lease": timedelta(seconds=LEASE_S), **arguments}
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(train, path, name, task=Leisurely(self._pace), **settings)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.unlink(missing_ok=True)
        self._pool.shutdown()

    def result(self) -> ft.Result:
        """From now on nothing disturbs it, and it hurries to its end."""
        self._pace.unlink(missing_ok=True)
        return self._future.result(timeout=60)

    def account(self) -> dict[str, Any]:
        """As of now, or of when the supervisor answers again."""
        return self.until(lambda account: True)

    def until(self, what: Callable[[dict[str, Any]], Any], seconds: float = 40.0) -> dict[str, Any]:
        """The first account that is as wanted."""
        deadline = time.monotonic() + seconds
        account: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if self._future.done():
                raise AssertionError(f"the run ended: {self._future.result()}")
            try:
                self._supervisor = self._supervisor or ray.get_actor(f"supervisor:{self._name}", namespace=NAMESPACE)
                account = ray.get(self._supervisor.status.remote(), timeout=5)
                if what(account):
                    return account
            except (ValueError, RayError):
                pass  # it has not begun, or Ray is not itself again after what was done to the network
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {account}")

    def actors(self) -> dict[str, Any]:
        """The supervisor and every worker, by name."""
        account = self.account()
        workers = {member: ray.get_actor(worker_name(account["run_id"], member), NAMESPACE) for member in account["members"]}
        return {"supervisor": self._supervisor, **workers}

    def supervisor_node(self) -> str:
        return actors(self._supervisor._actor_id.hex())["Address"]["NodeID"]

    def ready(self, spares: int = 1) -> dict[str, Any]:
        """It trains at full strength, and so many spares wait."""

        def look(account: dict[str, Any]) -> bool:
            spare = list(account["members"].values()).count("spare")
            return account["state"] == "RUNNING" and account["world_size"] == 3 and spare >= spares

        return self.until(look)

    def goes_on(self, lost: int) -> dict[str, Any]:
        """So many have been lost, and it trains again."""
        return self.until(
            lambda a: sum(len(r["lost"]) for r in a["recoveries"]) >= lost and a["recoveries"][-1]["resumed"] is not None
        )


def head_node() -> str:
    (node,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    return node


def node_of_rank(account: dict[str, Any], rank: int) -> str:
    return account["nodes"][account["world"][rank]]


def process_of_rank(account: dict[str, Any], rank: int) -> psutil.Process:
    return psutil.Process(account["pids"][account["world"][rank]])


def records_of(result: ft.Result, *events: str) -> list[dict[str, Any]]:
    return [record for record in read_records(Path(result.path) / "events.jsonl") if record["event"] in events]


@contextmanager
def during(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """What was done to the network is undone with the block, whatever its end: other tests come after it."""
    begin()
    try:
        yield
    finally:
        end()


def lives(process: psutil.Process) -> bool:
    """Not even as a zombie that its raylet has not looked after yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_by_themselves(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within their lease, give or take what a busy machine takes."""
    deadline = time.monotonic() + LEASE_S + 10
    while any(lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(lives(process) for process in processes)


def test_cables_that_are_cut(hosts: HostCluster, undisturbed: str, tmp_path: Path) -> None:
    with Running(tmp_path, "cut", hang_timeout=timedelta(seconds=4)) as run:
        account = run.ready()
        assert run.supervisor_node() == head_node()
        victim, node, stranded = account["world"][1], node_of_rank(account, 1), process_of_rank(account, 1)
        struck = account["seconds"]
        with during(partial(hosts.unplug, node), partial(hosts.plug, node)):
            run.goes_on(lost=1)
            assert end_by_themselves([stranded])

        for number, way in enumerate(("to the head", "from the head"), 2):
            account = run.ready()
            node = node_of_rank(account, 0)
            ends = ([node], [HEAD]) if way == "to the head" else ([HEAD], [node])
            with during(partial(hosts.cut, *ends), partial(hosts.join, *ends)):
                run.goes_on(lost=number)

        account = run.ready()  # between two workers: the supervisor hears both
        ends = ([node_of_rank(account, 1)], [node_of_rank(account, 2)])
        with during(partial(hosts.cut, *ends), partial(hosts.join, *ends)):
            run.goes_on(lost=4)
        result = run.result()
    assert result.digest == undisturbed
    assert promise_kept(result) == []
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)
    assert sum(len(recovery.lost) for recovery in result.recoveries) == 4
    assert [recovery.noticed_by for recovery in result.recoveries] == ["heartbeat", "heartbeat", "heartbeat", "peers"]
    first, *_ = records_of(result, "WorkerLost")
    assert first["member"] == victim
    assert first["at"] - struck < 2.0


def test_of_two_halves_only_one_goes_on(hosts: HostCluster, undisturbed: str, tmp_path: Path) -> None:
    with Running(tmp_path, "halves", num_spares=2) as run:
        account = run.ready(spares=2)
        assert set(account["nodes"].values()) == set(hosts.node_ids())  # those that were cut off before are used again
        half = [node_of_rank(account, rank) for rank in (0, 2)]
        stranded = [process_of_rank(account, rank) for rank in (0, 2)]
        with during(partial(hosts.split, half), partial(hosts.unite, half)):
            assert end_by_themselves(stranded)
            run.goes_on(lost=2)
        result = run.result()
    assert result.digest == undisturbed
    assert promise_kept(result) == []
    silent = {r["member"] for r in records_of(result, "WorkerLost") if r["noticed_by"] == "heartbeat"}
    assert silent == {account["world"][rank] for rank in (0, 2)}  # besides, there is no room for new spares for a while


def within(actor: Any, look: Callable[..., float], *arguments: Any) -> float:
    """What this returns in an actor's own process."""
    return ray.get(actor.__ray_call__.remote(look, *arguments), timeout=20)


def jump(_: Any, ahead: float) -> float:
    """Sets the wall clock of this process, as Python sees it; returns how far ahead it is."""
    time.time = lambda: time.clock_gettime(time.CLOCK_REALTIME) + ahead
    return lead(None)


def lead(_: Any) -> float:
    """How far the wall clock of this process is ahead of the machine's."""
    return time.time() - time.clock_gettime(time.CLOCK_REALTIME)


def test_what_must_not_cost_a_worker(hosts: HostCluster, undisturbed: str, tmp_path: Path) -> None:
    """A slow cable, where heartbeats wait behind gradients; a loose contact; the head's own cable out for longer than a worker
    may be silent; wall clocks that jump, the supervisor's and the workers'.

    The hosts' monotonic clocks are days apart, here and in the other tests.
    """
    began = time.monotonic()
    with Running(tmp_path, "calm-enough", lease=timedelta(seconds=60)) as run:
        account = run.ready()
        slow, loose = node_of_rank(account, 1), node_of_rank(account, 2)
        actors = run.actors()
        assert len(actors) == 5, "three who train, a spare, the supervisor"
        for ahead in (3600.0, -3600.0):
            leads = {name: within(actor, jump, ahead) for name, actor in actors.items()}
            assert leads == dict.fromkeys(actors, pytest.approx(ahead, abs=1))
            step = run.account()["step"]
            run.until(lambda a, step=step: a["step"] > step + 2)
        step = run.account()["step"]
        with during(partial(hosts.slow, slow, bits_per_second=0.8e6), partial(hosts.full_speed, slow)):
            run.until(lambda a: a["step"] > step + 4)
        with hosts.flapping(loose, down=0.2, up=0.5):
            time.sleep(3)
        with during(partial(hosts.unplug, HEAD), partial(hosts.plug, HEAD)):
            time.sleep(3)
        step = run.account()["step"]
        run.until(lambda a: a["step"] > step + 4)
        leads = {name: within(actor, lead) for name, actor in actors.items()}
        assert leads == dict.fromkeys(actors, pytest.approx(-3600.0, abs=1)), "through all of that, in the same processes"
        result = run.result()
    assert records_of(result, "WorkerLost", "Suspected") == []
    assert result.digest == undisturbed
    assert promise_kept(result) == []
    times = [record["at"] for record in read_records(Path(result.path) / "events.jsonl") if "at" in record]
    assert 0 <= min(times) <= max(times) < time.monotonic() - began, "the records' clock jumps with none"


KILLED = """
import time
from raytrain_ft.chaos.hosts import HostCluster
with HostCluster(1):
    print("up", flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_of_a_cluster_whose_process_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    started = psutil.Process(owner.pid).children(recursive=True)
    interface = f"hosts{owner.pid}"
    assert interface in psutil.net_if_addrs()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 15
    while any(lives(process) for process in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [process.name() for process in started if lives(process)]
    # Ray's agents try for a minute to tell the head node, which is gone, of the end of their raylet
    assert [name for name in left if not name.endswith("Agent")] == []
    deadline = time.monotonic() + 5
    while interface in psutil.net_if_addrs() and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel takes namespaces down in the background
    assert interface not in psutil.net_if_addrs()
