"""A node is lost, Ray's autoscaler brings another, training grows again: on one machine, and everything else is real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.util import placement_group_table

from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.demand import Demand
from raytrain_ft.runtime.event_log import read_records

pytestmark = pytest.mark.long

STEPS = 30
SCRIPT = Path(__file__).parent / "autoscaled_run.py"


def test_a_lost_node_is_replaced_by_the_autoscaler_and_the_run_ends_with_the_same_bits(undisturbed, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), str(STEPS)], capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout.splitlines()[-1])
    assert story["auth"] == "token"
    assert story["nodes_before"] == [], "nodes come because the run has no room"
    assert story["waiting"] == [], "at its end the run asks for nothing any more"

    records = read_records(tmp_path / "scaled" / "events.jsonl")
    started = {record["member"]: record["node"] for record in records if record["event"] == "WorkerStarted"}
    (recovery,) = (record for record in records if record["event"] == "Recovery")
    (lost,) = recovery["lost"]
    assert started[lost] not in story["nodes_after"]
    assert len(story["nodes_after"]) == 2
    assert sorted(node for member, node in started.items() if member != lost) == story["nodes_after"], "one worker on each"
    assert (recovery["world_before"], recovery["world_after"]) == (2, 2)

    assert story["digest"] == undisturbed(workers=2, steps=STEPS).digest, "the bits of the run without a loss"
    assert story["violations"] == []
    proof = audit(records)
    assert proof.ok
    assert (proof.steps, proof.samples_lost) == (STEPS, 0)
    assert [line for line in map(command_line, psutil.process_iter()) if story["session"] in line] == [], "nothing is left"


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
