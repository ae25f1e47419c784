"""Every phase of a step, every phase of a recovery: killed there with SIGKILL, and the final bits compared.

With `update="barrier"` the end is bit-equal to the undisturbed run in every cell. Several cells share a run, one after the
other, because starting workers is what takes the time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records

STEP_PHASES = [
    [("data", None), ("forward", None), ("backward", 0), ("backward", 1), ("backward", 2)],
    [("reduce", 0), ("reduce", 1), ("reduce", 2), ("reduced", 0), ("reduced", 2)],
    [("update", None), ("updated", None), ("commit", None)],
]
RECOVERY_PHASES = ["fence", "join", "reconcile", "transfer_source", "transfer_receiver", "first_step"]


def faults_of(cells, action="sigkill"):
    """One failure every five steps, of another rank each time, rank 0 included."""
    return [
        FailAt(rank=number % 3, step=4 + 5 * number, phase=phase, bucket=bucket, action=action)
        for number, (phase, bucket) in enumerate(cells)
    ]


@pytest.mark.parametrize("cells", STEP_PHASES, ids=lambda cells: "-".join(dict.fromkeys(phase for phase, _ in cells)))
def test_a_worker_killed_in_a_phase_of_the_step(cells, undisturbed, tmp_path: Path) -> None:
    result = train(tmp_path, "kill", faults=faults_of(cells))
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert sum(len(recovery.lost) for recovery in result.recoveries) == len(cells)
    assert all(recovery.guarantee == Guarantee.EXACT and recovery.undone == 0 for recovery in result.recoveries)
    assert all(recovery.world_after == 3 for recovery in result.recoveries)


@pytest.mark.parametrize("phase", RECOVERY_PHASES)
def test_a_second_loss_in_a_phase_of_the_recovery(phase: str, undisturbed, tmp_path: Path) -> None:
    rank = {"transfer_receiver": 0, "first_step": 2}.get(phase, 1)
    first = FailAt(rank=0, step=10, phase="reduce", bucket=1)
    second = FailAt(rank=rank, phase=phase, step=10 if phase == "first_step" else None, nth=2 if phase == "join" else 1)
    if phase in ("reconcile",):
        second = FailAt(rank=rank, phase=phase, nth=2)  # the first is the beginning of the run
    result = train(tmp_path, "cascade", faults=[first, second])
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert sum(len(recovery.lost) for recovery in result.recoveries) == 2
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


@pytest.mark.parametrize(("action", "phase"), [("sigstop", "forward"), ("exit", "backward"), ("hang", "forward")])
def test_other_ways_to_be_lost(action, phase, undisturbed, tmp_path: Path) -> None:
    from datetime import timedelta

    fault = FailAt(rank=1, step=10, phase=phase, action=action)
    result = train(tmp_path, action, faults=[fault], hang_timeout=timedelta(seconds=2))
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert {"sigstop": "heartbeat", "hang": "step time"}.get(action, recovery.noticed_by) == recovery.noticed_by
