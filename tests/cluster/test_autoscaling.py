"""A node is lost, Ray's autoscaler brings another, training grows again: on one machine, and everything else is real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util import placement_group_table

from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.demand import Demand
from raytrain_ft.runtime.event_log import read_records

pytestmark = pytest.mark.long

STEPS = 30
LONG = 500
"""Steps that take longer, at the pace of a run that takes its time, than nodes do to come."""
SCRIPT = Path(__file__).parent / "autoscaled_run.py"


def scaled(path: Path, steps: int, story: str, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What became of the cluster, and the run's records."""
    command = [sys.executable, str(SCRIPT), str(path), str(steps), story]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["auth"] == "token"
    assert seen["nodes_before"] == [], "nodes come because the run has no room"
    assert seen["waiting"] == [], "at its end the run asks for nothing any more"
    assert seen["violations"] == []
    assert [line for line in map(command_line, psutil.process_iter()) if seen["session"] in line] == [], "nothing is left"
    records = read_records(path / "scaled" / "events.jsonl")
    proof = audit(records)
    assert proof.ok
    assert (proof.steps, proof.samples_lost) == (steps, 0)
    return seen, records


def homes(records: list[dict[str, Any]]) -> dict[str, str]:
    """The node of each worker that there ever was."""
    return {record["member"]: record["node"] for record in records if record["event"] == "WorkerStarted"}


def test_a_lost_node_is_replaced_by_the_autoscaler_and_the_run_ends_with_the_same_bits(undisturbed, tmp_path: Path) -> None:
    seen, records = scaled(tmp_path, STEPS, "wait", seconds=160)
    started = homes(records)
    (recovery,) = (record for record in records if record["event"] == "Recovery")
    (lost,) = recovery["lost"]
    assert started[lost] not in seen["nodes_after"]
    assert len(seen["nodes_after"]) == 2
    assert sorted(node for member, node in started.items() if member != lost) == seen["nodes_after"], "one worker on each"
    assert (recovery["world_before"], recovery["world_after"]) == (2, 2)
    assert seen["digest"] == undisturbed(workers=2, steps=STEPS).digest, "the bits of the run without a loss"


@pytest.mark.timeout(400)
def test_a_run_that_shrank_grows_again_with_the_node_that_the_autoscaler_brings(tmp_path: Path) -> None:
    """It does not wait for the node: the one worker that is left trains meanwhile."""
    seen, records = scaled(tmp_path, LONG, "shrink", seconds=360)
    worlds = [size for size, _ in groupby(record["world_size"] for record in records if record["event"] == "Resumed")]
    assert worlds in ([2, 1, 2], [1, 2, 1, 2]), "to begin with, one node may come before the other"
    *_, shrunk, grown = (record for record in records if record["event"] == "Recovery")
    (lost,) = shrunk["lost"]
    assert (shrunk["world_before"], shrunk["world_after"]) == (2, 1)
    assert (grown["world_before"], grown["world_after"], grown["lost"]) == (1, 2, [])
    alone = [record for record in records if record["event"] == "StepsCommitted" and record["world_size"] == 1]
    assert any(shrunk["resumed"] <= record["at"] <= grown["detected"] for record in alone)
    started = homes(records)
    assert started[lost] not in seen["nodes_after"]
    assert len(seen["nodes_after"]) == 2
    assert sorted(node for member, node in started.items() if member != lost) == seen["nodes_after"], "the newcomer's is new"


def asked(prefix: str) -> list[str]:
    """The states of what is asked for and was not taken back."""
    known = [group for group in placement_group_table().values() if group["name"].startswith(prefix)]
    return [group["state"] for group in known if group["state"] != "REMOVED"]


def test_room_that_there_is_not_is_asked_for_and_taken_back(cluster) -> None:
    demand = Demand("demand:big:", {"CPU": 64.0})
    demand.adjust(3)
    assert asked("demand:big:") == ["PENDING"] * 3
    demand.adjust(1)
    assert asked("demand:big:") == ["PENDING"]
    restarted = Demand("demand:big:", {"CPU": 64.0})
    restarted.forget_earlier()
    assert asked("demand:big:") == [], "what a supervisor asked for before it was lost is not asked for for ever"
    restarted.adjust(1)
    assert asked("demand:big:") == ["PENDING"]
    asyncio.run(restarted.close())
    assert asked("demand:big:") == []


def test_room_that_came_is_given_up_for_a_worker(cluster) -> None:
    demand = Demand("demand:small:", {"CPU": 1.0})
    demand.adjust(1)
    deadline = time.monotonic() + 20
    while asked("demand:small:") != ["CREATED"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    demand.adjust(1)
    assert asked("demand:small:") == [], "nor is it asked for again before it can be counted"


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it ended meanwhile
