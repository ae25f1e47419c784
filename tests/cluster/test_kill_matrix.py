"""Every phase of a step, every phase of a recovery: killed there with SIGKILL, and the final bits compared.

With `update="barrier"` the end is bit-equal to the undisturbed run in every cell. The cells share a run, one after the other,
because starting workers is what takes the time: the first ones of a run are more than those that a few cells need.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import promise_kept, train, until
from toy import Toy

from raytrain_ft import FailAt, Result
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records

STEP_PHASES = [
    *(("data", None), ("forward", None), ("backward", 0), ("backward", 1), ("backward", 2)),
    *(("reduce", 0), ("reduce", 1), ("reduce", 2), ("reduced", 0), ("reduced", 2)),
    *(("update", None), ("updated", None), ("commit", None)),
]
PATIENT = timedelta(seconds=3)
"""Somebody starts all the time, on few cores: a false alarm would be survived, but these tests count. A killed process is
noticed by other signs than its silence."""
RECOVERY_PHASES = ["transfer_receiver", "fence", "join", "reconcile", "transfer_source", "first_step"]
"""The first of them strikes a replacement, which counts no steps yet: so it cannot be told for which recovery it is."""


def cascades(phase: str, bucket: int | None, action: Any = "sigkill", *, apart: int = 4) -> list[FailAt]:
    """Pairs of failures: rank 0 is killed in this phase of a step, and another fails in the recovery from that."""
    faults: list[FailAt] = []
    for number, then in enumerate(RECOVERY_PHASES):
        step = apart * (number + 1)
        where = (0, None) if then == "transfer_receiver" else (2 if then == "first_step" else 1, step)
        faults.append(FailAt(rank=0, step=step, phase=phase, bucket=bucket))
        faults.append(FailAt(rank=where[0], step=where[1], phase=then, action=action))
    return faults


def struck(result: Result) -> set[str]:
    return {marker.name for marker in (Path(result.path) / "faults").iterdir()}


@pytest.mark.timeout(400)
def test_a_worker_killed_in_every_phase_of_the_step(undisturbed, tmp_path: Path) -> None:
    """One failure every two steps, of another rank each time, rank 0 included."""
    cells = enumerate(STEP_PHASES)
    faults = [FailAt(rank=n % 3, step=4 + 2 * n, phase=phase, bucket=bucket) for n, (phase, bucket) in cells]
    result = train(tmp_path, "kill", faults=faults, num_spares=2, heartbeat_timeout=PATIENT)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert struck(result) == {fault.name for fault in faults}
    assert sum(len(recovery.lost) for recovery in result.recoveries) == len(faults)
    assert all(recovery.guarantee == Guarantee.EXACT and recovery.undone == 0 for recovery in result.recoveries)
    assert all(recovery.world_after == 3 for recovery in result.recoveries)


@pytest.mark.timeout(400)
def test_a_second_loss_in_every_phase_of_the_recovery(undisturbed, tmp_path: Path) -> None:
    faults = cascades("reduce", 1)
    result = train(tmp_path, "cascade", faults=faults, num_spares=2, heartbeat_timeout=PATIENT)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert struck(result) == {fault.name for fault in faults}
    assert sum(len(recovery.lost) for recovery in result.recoveries) == len(faults)
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)


def test_all_but_one_killed_at_once(undisturbed, tmp_path: Path) -> None:
    faults = [FailAt(rank=rank, step=10, phase="reduced", bucket=1, together=2) for rank in (0, 2)]
    result = train(tmp_path, "lonely", faults=faults)
    assert sum(len(recovery.lost) for recovery in result.recoveries) == 2
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []


def test_the_supervisor_killed_in_every_state(undisturbed, tmp_path: Path) -> None:
    states = ["SCHEDULING", "RUNNING", "FENCE", "REPLACE", "REBUILD", "RESUME", "SHUTTING_DOWN", "FINISHED"]
    faults = [FailAt(role="supervisor", phase=state) for state in states]
    result = train(tmp_path, "supervisor", faults=[*faults, FailAt(rank=1, step=10, phase="forward")])
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert len(list((Path(result.path) / "faults").glob("supervisor-*"))) == len(states)


def test_a_worker_killed_while_the_supervisor_is_away(undisturbed, tmp_path: Path) -> None:
    """The supervisor dies with the first steps, a worker in one of the next, long before Ray has restarted an actor."""
    away, lost = FailAt(role="supervisor", phase="RUNNING"), FailAt(rank=1, step=5, phase="reduce", bucket=1)
    result = train(tmp_path, "away", task=Toy(step_seconds=0.1), faults=[away, lost])
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    records = read_records(Path(result.path) / "events.jsonl")
    back = next(i for i, record in enumerate(records) if record["event"] == "SupervisorRestarted")
    seconds = records[back]["at"] - records[back - 1]["at"]
    struck = [(Path(result.path) / "faults" / fault.name).stat().st_mtime for fault in (away, lost)]
    assert 0 < struck[1] - struck[0] < seconds, "nobody watched when the worker died"
    assert "WorkerLost" in [record["event"] for record in records[back:]]
    assert [recovery.guarantee for recovery in result.recoveries] == [Guarantee.EXACT]


class Weighty(Toy):
    """As the task of a script whose data is a global variable: it is larger than what Ray keeps of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = bytes(300_000)


def test_the_supervisor_killed_in_a_run_with_a_large_task(undisturbed, tmp_path: Path) -> None:
    """And a worker after that: what takes its place needs the task, too."""
    faults = [FailAt(role="supervisor", phase=state) for state in ("RUNNING", "REBUILD")]
    task = Weighty()
    result = train(tmp_path, "weighty", task=task, faults=[*faults, FailAt(rank=1, step=10, phase="forward")], num_spares=0)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert len(list((Path(result.path) / "faults").glob("supervisor-*"))) == len(faults)
    assert list(Path(result.path).glob("*task*")) == []


def test_a_node_killed_in_the_update(cluster, undisturbed, tmp_path: Path) -> None:
    expected = undisturbed().digest
    result = train(tmp_path, "node", faults=[FailAt(rank=1, step=10, phase="update", action="sigkill_node")])
    cluster.add_node()
    assert result.digest == expected
    assert promise_kept(result) == []
    assert [recovery.guarantee for recovery in result.recoveries] == [Guarantee.EXACT]


def test_a_raylet_killed_alone(cluster, undisturbed, tmp_path: Path) -> None:
    """Its worker lives on for a moment, in the midst of a step: Ray ends it."""
    log = tmp_path / "raylet" / "events.jsonl"
    with ThreadPoolExecutor(1) as pool:  # Ray adds nodes from the main thread only
        training = pool.submit(train, tmp_path, "raylet", task=Toy(step_seconds=0.1))
        assert until(lambda: log.exists() and "StepsCommitted" in log.read_text(), 60)
        node = next(record["node"] for record in read_records(log) if record.get("member") == "w1")
        raylet, *others = cluster.processes(node)
        assert any("Worker" in " ".join(other.cmdline()) for other in others)
        raylet.kill()
        result = training.result(120)
    cluster.add_node()
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert [(recovery.lost, recovery.guarantee) for recovery in result.recoveries] == [(["w1"], Guarantee.EXACT)]


def test_other_ways_to_be_lost(undisturbed, tmp_path: Path) -> None:
    ways = [("sigstop", "forward"), ("exit", "backward"), ("hang", "forward")]
    faults = [FailAt(rank=1, step=5 + 8 * n, phase=phase, action=action) for n, (action, phase) in enumerate(ways)]
    result = train(tmp_path, "ways", faults=faults, hang_timeout=timedelta(seconds=2))
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    frozen, _, hung = result.recoveries
    assert (frozen.noticed_by, hung.noticed_by) == ("heartbeat", "step time")
