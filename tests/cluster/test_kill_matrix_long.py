"""The cells of the kill matrix that `test_kill_matrix` has no time for: whole nodes, wait-free updates, and both in cascades.

Barrier updates end with the bits of the undisturbed run in every cell; so do wait-free ones, except where an undo could not be
avoided: then they are within its bound. That replicas are equal, the history checker reads in the log.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import promise_kept, train
from test_kill_matrix import RECOVERY_PHASES, cascades
from test_wait_free import BOUND, distance
from toy import Toy

import raytrain_ft as ft
from raytrain_ft import FailAt, attaching
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.errors import AbortedError, TaskError
from raytrain_ft.policy.history import check
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records

pytestmark = pytest.mark.long

APART = 5
"""Steps between two failures of a run: each has come to its end when the next one strikes."""
STEP_PHASES = [
    [("data", None), ("forward", None), ("backward", 0), ("backward", 1), ("backward", 2)],
    [("reduce", 0), ("reduce", 1), ("reduce", 2), ("reduced", 0), ("reduced", 2)],
    [("checkpoint", None), ("update", None), ("updated", None), ("commit", None)],
]
NOTHING_REDUCED = [("data", None), ("forward", None), ("backward", 0)]
ALL_REDUCED = [("checkpoint", None), ("reduced", 2), ("update", 2), ("updated", 2), ("commit", None)]
PARTLY_REDUCED = [
    [("reduce", 0), ("reduced", 0), ("update", 0), ("updated", 0)],
    [("backward", 1), ("reduce", 1), ("reduced", 1), ("update", 1)],
    [("updated", 1), ("backward", 2), ("reduce", 2)],
]
"""A survivor may have a bucket's gradient that another lacks, or all may have updated it: it depends on the moment."""
ACTIONS = ["sigkill", "sigkill_node"]


def name_of(cells: Any) -> str:
    return "-".join(dict.fromkeys(phase for phase, _ in cells))


def strikes(cells: Any, action: Any) -> list[FailAt]:
    """One failure every few steps, of another rank each time, rank 0 included. Before the first of them a checkpoint is due."""
    places = [(number % 3, APART * (number + 1), phase, bucket) for number, (phase, bucket) in enumerate(cells)]
    return [FailAt(rank=rank, step=step, phase=phase, bucket=bucket, action=action) for rank, step, phase, bucket in places]


def steps_for(cells: Any) -> int:
    return APART * (len(cells) + 2)


def disturbed(cluster: LocalCluster, path: Path, faults: list[FailAt], **arguments: Any) -> ft.Result:
    """A run in which all of this fails, on a cluster that gets a node for each one that it loses; what must hold in every cell
    is checked."""
    full = len(cluster.node_ids())
    how = {"checkpoints": ft.CheckpointConfig(every=APART), **arguments}
    with ThreadPoolExecutor(1) as pool:  # Ray adds nodes from the main thread only
        training = pool.submit(train, path, "run", faults=faults, **how)
        while not training.done():
            top_up(cluster, full)
            time.sleep(0.2)
    top_up(cluster, full)
    result = training.result()
    assert promise_kept(result) == []
    assert {marker.name for marker in (path / "run" / "faults").glob("*")} == {fault.name for fault in faults}
    assert all(recovery.world_after == 3 for recovery in result.recoveries)
    assert all(recovery.guarantee == Guarantee.ROUNDING for recovery in result.recoveries if recovery.undone)
    return result


def top_up(cluster: LocalCluster, full: int) -> None:
    for _ in range(full - len(cluster.node_ids())):
        cluster.add_node()


def check_bits(result: ft.Result, expected: ft.Result) -> None:
    """Equal, unless something had to be undone; then within the bound of as many undos."""
    undos = sum(recovery.guarantee == Guarantee.ROUNDING for recovery in result.recoveries)
    if undos:
        assert distance(result.final_state, expected.final_state) <= undos * BOUND
    else:
        assert result.digest == expected.digest


# ---------------------------------------------------------------- one loss at a time


@pytest.mark.parametrize("cells", STEP_PHASES, ids=name_of)
def test_a_node_killed_in_a_phase_of_the_step(cells: Any, cluster: LocalCluster, undisturbed: Any, tmp_path: Path) -> None:
    result = disturbed(cluster, tmp_path, strikes(cells, "sigkill_node"), steps=steps_for(cells))
    assert result.digest == undisturbed(steps=steps_for(cells)).digest


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("cells", [NOTHING_REDUCED, ALL_REDUCED], ids=name_of)
def test_wait_free_nothing_is_undone_of_what_was_reduced_whole_or_not_at_all(
    cells: Any, action: str, cluster: LocalCluster, undisturbed: Any, tmp_path: Path
) -> None:
    result = disturbed(cluster, tmp_path, strikes(cells, action), steps=steps_for(cells), update="wait_free")
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)
    assert result.digest == undisturbed(steps=steps_for(cells), update="wait_free").digest


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("cells", PARTLY_REDUCED, ids=name_of)
def test_wait_free_what_was_reduced_in_part(
    cells: Any, action: str, cluster: LocalCluster, undisturbed: Any, tmp_path: Path
) -> None:
    result = disturbed(cluster, tmp_path, strikes(cells, action), steps=steps_for(cells), update="wait_free")
    check_bits(result, undisturbed(steps=steps_for(cells), update="wait_free"))


# ---------------------------------------------------------------- a second loss in the recovery from the first


@pytest.mark.parametrize(("update", "action"), [("barrier", "sigkill_node"), ("wait_free", "sigkill_node")])
def test_a_second_loss_where_nothing_had_been_updated(
    update: str, action: str, cluster: LocalCluster, undisturbed: Any, tmp_path: Path
) -> None:
    steps = steps_for(RECOVERY_PHASES)
    result = disturbed(cluster, tmp_path, cascades("forward", None, action, apart=APART), steps=steps, update=update)
    assert result.digest == undisturbed(steps=steps, update=update).digest


def test_a_second_loss_while_updates_are_undone(cluster: LocalCluster, undisturbed: Any, tmp_path: Path) -> None:
    """The first is lost before it contributes to the last bucket, when the others have long updated the ones before."""
    steps, task = steps_for(RECOVERY_PHASES), Toy(backward_seconds=0.3)
    faults = cascades("backward", 2, apart=APART)
    result = disturbed(cluster, tmp_path, faults, steps=steps, update="wait_free", task=task)
    assert any(recovery.undone > 0 for recovery in result.recoveries)
    check_bits(result, undisturbed(steps=steps, update="wait_free"))


# ---------------------------------------------------------------- the supervisor


@pytest.mark.parametrize(("update", "action"), [("barrier", "sigkill_node"), ("wait_free", "sigkill")])
def test_the_supervisor_killed_in_every_state_of_a_recovery(
    update: str, action: Any, cluster: LocalCluster, undisturbed: Any, tmp_path: Path
) -> None:
    states = ["SCHEDULING", "RUNNING", "FENCE", "REPLACE", "REBUILD", "RESUME", "SHUTTING_DOWN", "FINISHED"]
    faults = [FailAt(role="supervisor", phase=state) for state in states]
    faults += [FailAt(rank=1, step=10, phase="backward", bucket=2, action=action)]
    result = disturbed(cluster, tmp_path, faults, update=update, task=Toy(backward_seconds=0.05))
    check_bits(result, undisturbed(update=update))


def test_the_supervisor_killed_when_the_run_has_failed(cluster: LocalCluster, tmp_path: Path) -> None:
    """The error of the task is what the driver sees, and the run has one end."""
    faults = [FailAt(rank=1, step=3, phase="forward", action="exception"), FailAt(role="supervisor", phase="ERRORED")]
    with pytest.raises(TaskError, match="step 3"):
        train(tmp_path, "run", faults=faults)
    assert check(read_records(tmp_path / "run" / "events.jsonl")) == []
    assert {marker.name for marker in (tmp_path / "run" / "faults").glob("*")} == {fault.name for fault in faults}


def end_it(run: Path) -> None:
    """Asks a run to end once it has committed something."""
    log, deadline = run / "events.jsonl", time.monotonic() + 60
    while not (log.exists() and "StepsCommitted" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    attaching.stop(run, "a test", quiet=True)


@pytest.mark.parametrize("state", ["STOPPING", "ABORTED"])
def test_the_supervisor_killed_while_the_run_is_ended(
    state: str, cluster: LocalCluster, undisturbed: Any, tmp_path: Path
) -> None:
    """It ends all the same, with a checkpoint of where it stood, from which it goes on when it is run again."""
    fault, rarely = FailAt(role="supervisor", phase=state), ft.CheckpointConfig(every=1000)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_it, tmp_path / "run")
        with pytest.raises(AbortedError, match="a test"):
            train(tmp_path, "run", task=Toy(step_seconds=0.4), faults=[fault], checkpoints=rarely)
        ending.result(60)
    records = read_records(tmp_path / "run" / "events.jsonl")
    assert check(records) == []
    assert (tmp_path / "run" / "faults" / fault.name).exists()
    (stored,) = [record for record in records if record["event"] == "CheckpointCommitted"]
    assert stored["step"] == max(record["stop_step"] for record in records if record["event"] == "StepsCommitted")
    resumed = train(tmp_path, "run", checkpoints=rarely)
    assert resumed.digest == undisturbed().digest


def test_the_supervisor_killed_in_a_planned_resize(cluster: LocalCluster, tmp_path: Path) -> None:
    """The world goes on smaller, and grows again while its supervisor is lost: not the bits of a run of one size."""
    faults = [FailAt(rank=1, step=10, phase="forward"), FailAt(role="supervisor", phase="RESIZING")]
    how = {"workers": (2, 3), "num_spares": 0, "replacement": "shrink", "steps": 150, "task": Toy(step_seconds=0.1)}
    result = train(tmp_path, "run", faults=faults, **how)
    assert promise_kept(result) == []
    assert len(list((tmp_path / "run" / "faults").glob("supervisor-*"))) == 1
    assert [(r.world_before, r.world_after) for r in result.recoveries if r.world_before != r.world_after] == [(3, 2), (2, 3)]
