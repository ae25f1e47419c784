"""Who is refused, what strangers can reach, and that none of a cluster's secrets is written down."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import promise_kept, train
from ray._private.worker import global_worker
from toy import Leisurely

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError
from raytrain_ft.runtime.event_log import read_records

WORKERS = 3
EVERYWHERE = {"0.0.0.0", "::"}
GARBAGE = (
    b"",
    b"\x00" * 8,
    b"\xff" * 64,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    bytes(range(256)) * 256,
)

STRANGER = """
import os, sys
from ray._raylet import GcsClient
from raytrain_ft.chaos.cluster import _refresh_authentication
address, right = sys.argv[1], sys.stdin.read()
for mode, token in (("token", "0" * len(right)), ("disabled", ""), ("token", right)):
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = mode, token
    _refresh_authentication()
    try:
        print("let in:", len(GcsClient(address=address).get_all_node_info(timeout=10)), "nodes")
    except Exception as error:
        print("refused:", type(error).__name__, str(error).replace(chr(10), " "))
"""
"""Asks a cluster who belongs to it: with another token, with none, and with the right one."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Seen:
    """What was seen of a run while strangers talked to its processes.

    Attributes:
        trainers, spare: the listeners of each process.
        persisters: the listeners of all of the workers' children.
        reached: connections that were taken.
        command_lines: of all processes of the cluster.
        tokens: in the environments of the workers.
    """

    result: ft.Result
    trainers: list[set[Address]]
    spare: set[Address]
    persisters: set[Address]
    reached: int
    command_lines: list[str]
    tokens: list[str]


def listeners(process: psutil.Process) -> set[Address]:
    sockets = process.net_connections("tcp")
    return {(found.laddr.ip, found.laddr.port) for found in sockets if found.status == psutil.CONN_LISTEN}


def open_to_all(found: Iterable[Address]) -> int:
    return sum(ip in EVERYWHERE for ip, _ in found)


def command_line(process: psutil.Process) -> str:
    """Nothing of a process that has ended: its parent may not have looked after it yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def records(run: Path, event: str) -> list[dict[str, Any]]:
    log = run / "events.jsonl"
    return [record for record in read_records(log) if record["event"] == event] if log.exists() else []


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def step_of(run: Path) -> int:
    return max((record["stop_step"] for record in records(run, "StepsCommitted")), default=0)


def talk_nonsense(addresses: Iterable[Address]) -> list[socket.socket]:
    """Connections with garbage sent into them; every second one is closed at once, the others are left open."""
    left: list[socket.socket] = []
    for ip, port in addresses:
        for number, garbage in enumerate(GARBAGE):
            stranger = socket.create_connection(("127.0.0.1" if ip in EVERYWHERE else ip, port), timeout=5)
            left.append(stranger)
            try:
                stranger.sendall(garbage)
            except OSError:
                continue  # it hung up on us: so be it
            if number % 2:
                stranger.close()
    return left


@pytest.fixture(scope="module")
def seen(cluster, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = tmp_path_factory.mktemp("security")
    pace = path / "pace"
    pace.touch()
    outcome: list[ft.Result] = []
    thread = threading.Thread(target=lambda: outcome.append(train(path, "open", task=Leisurely(pace), num_spares=1)))
    thread.start()
    run = path / "open"

    def trained() -> set[str]:
        return {record["member"] for record in records(run, "StepsCommitted")}

    until(lambda: len(trained()) == WORKERS and len(records(run, "WorkerStarted")) > WORKERS)
    ranks = trained()
    processes = {record["member"]: psutil.Process(record["pid"]) for record in records(run, "WorkerStarted")}
    trainers = [listeners(process) for member, process in processes.items() if member in ranks]
    spare = next(listeners(process) for member, process in processes.items() if member not in ranks)
    children = [child for process in processes.values() for child in process.children(recursive=True)]
    persisters = set().union(*(listeners(child) for child in children))
    family = psutil.Process().children(recursive=True)
    command_lines = [line for process in family if (line := command_line(process))]
    tokens = [process.environ().get("RAY_AUTH_TOKEN", "") for process in processes.values()]
    strangers = talk_nonsense(set().union(spare, *trainers))
    then = step_of(run)
    until(lambda: step_of(run) > then + 1)
    pace.unlink()
    thread.join(120)
    for stranger in strangers:
        stranger.close()
    (result,) = outcome
    return Seen(result, trainers, spare, persisters, len(strangers), command_lines, tokens)


def test_strangers_do_not_disturb_a_run(seen: Seen, undisturbed) -> None:
    assert seen.reached >= len(GARBAGE) * 2 * WORKERS
    assert seen.result.recoveries == []
    assert promise_kept(seen.result) == []
    assert seen.result.digest == undisturbed().digest


def test_nothing_of_ours_listens_on_all_interfaces(seen: Seen) -> None:
    """A spare has the listeners of Ray alone; who trains has those of the group as well."""
    assert len(seen.trainers) == WORKERS
    for found in seen.trainers:
        assert len(found) > len(seen.spare)
        assert open_to_all(found) == open_to_all(seen.spare)
    assert seen.persisters == set()


@pytest.mark.long
def test_the_token_is_written_nowhere(seen: Seen) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    assert seen.tokens == [token] * len(seen.tokens)  # that is where it is
    assert any("raytrain_ft.storage.persister" in line for line in seen.command_lines)
    assert [line for line in seen.command_lines if token in line] == []
    files = [path for path in Path(seen.result.path).rglob("*") if path.is_file()]
    assert {"events.jsonl", "report.html", "final.arrow", "manifest.json"} <= {path.name for path in files}
    assert [path for path in files if token.encode() in path.read_bytes()] == []


def test_nobody_else_enters_the_directory_of_a_run(seen: Seen) -> None:
    assert stat.S_IMODE(Path(seen.result.path).stat().st_mode) == 0o700


@pytest.mark.long
def test_who_lacks_the_token_is_refused(cluster) -> None:
    command = [sys.executable, "-c", STRANGER, cluster.address]
    token = os.environ["RAY_AUTH_TOKEN"]
    done = subprocess.run(command, input=token, capture_output=True, text=True, timeout=90, check=True)
    wrong, none, right = done.stdout.splitlines()
    assert wrong.startswith("refused")
    assert none.startswith("refused")
    assert right == f"let in: {len(cluster.node_ids()) + 1} nodes"
    assert token not in done.stdout + done.stderr


FIT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import train
from raytrain_ft.errors import FTError
try:
    train(Path(sys.argv[2]), "refused")
except FTError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.long
def test_a_job_with_another_token_is_told_where_its_own_is_from(cluster, tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_AUTH_TOKEN": "0" * 64}
    command = [sys.executable, "-c", FIT, here, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=True)
    assert f"ConfigError RAY_ADDRESS={cluster.address}: there is no Ray cluster to be reached" in done.stdout
    assert "RAY_AUTH_MODE is token, and the token is looked for in RAY_AUTH_TOKEN." in done.stdout
    assert "0" * 64 not in done.stdout


@pytest.mark.long
def test_nor_is_the_token_in_rays_own_logs(seen: Seen) -> None:
    """Of the whole session: of nodes, workers, supervisors and drivers, of those who were refused before this test, and of
    whatever ran on this cluster in the tests before."""
    token = os.environ["RAY_AUTH_TOKEN"].encode()
    logs = Path(global_worker.node.get_logs_dir_path())
    files = [path for path in logs.rglob("*") if path.is_file()]
    kinds = {path.name.partition("-")[0].partition(".")[0] for path in files if path.stat().st_size}
    assert {"gcs_server", "raylet", "worker", "python"} <= kinds, "that is where they are"
    processes = {str(record["pid"]) for record in records(Path(seen.result.path), "WorkerStarted")}
    assert processes <= {path.stem.rpartition("-")[2].rpartition("_")[2] for path in files}, "of this run's workers, too"
    assert [path for path in files if token in path.read_bytes()] == []


@pytest.mark.parametrize("name", ["..", ".hidden", "a\n", "a;reboot", "$(reboot)", "a\\b", "%2e%2e", "é", "a" * 5000])
def test_hostile_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RunConfig"):
        train(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError):
        ft.attach(name)
