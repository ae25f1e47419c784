"""Replicas of a pipeline on machines of several sizes: one stage has both of its replicas on one machine, so it is replayed
from what is logged; those of the others are apart, and are filled from each other. One job has both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PIPELINE_STEPS, STAGES, pipeline, promise_kept
from toy import Leisurely
from watching import account, events, kill, steps_done, wait_for

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.strategy import Guarantee, Strategy

pytestmark = [pytest.mark.own_cluster, pytest.mark.long]
EVERY = 4
PASSED_ON = PIPELINE_STEPS * 16 * 64 * 4
"""Bytes over one boundary in one replica and one direction, in a run."""
AGREED = PIPELINE_STEPS * (4 + 2 * STAGES) * 8


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[LocalCluster]:
    """One has room for four workers, which two replicas of three stages cannot be seated in without two of one stage."""
    with LocalCluster(num_nodes=2) as cluster:
        cluster.add_node(num_cpus=4)
        yield cluster


def nodes_of(run: Path) -> dict[str, str]:
    return {started["member"]: started["node"] for started in events(run, "WorkerStarted")}


def alone(places: dict[str, str], stages: dict[str, int]) -> int:
    """The stage whose replicas are on one node."""
    hosts = [{places[member] for member, its in stages.items() if its == stage} for stage in range(STAGES)]
    (found,) = [stage for stage, of_stage in enumerate(hosts) if len(of_stage) == 1]
    return found


class Striker:
    """Kills both workers of the stage whose replicas are on one node; then one of another stage; then both of the first again.

    Attributes:
        stages: that were lost, in order.
    """

    def __init__(self, run: Path, pace: Path) -> None:
        self.run, self.pace = run, pace
        self.stages: list[int] = []
        self.thread = threading.Thread(target=self._strike, daemon=True)
        self.thread.start()

    def _strike(self) -> None:
        wait_for(lambda: steps_done(self.run) >= 2, "two steps")
        self._lose(together=True)
        self._lose(together=False)
        # until then, what the filled one sent before is not all in the log, and its stage would be replayed with the other
        filled = events(self.run, "Recovery")[-1]["step"]
        wait_for(lambda: self._has_trained_on(filled), f"a step after a checkpoint after {filled}")
        self._lose(together=True)
        self.pace.unlink()

    def _has_trained_on(self, filled: int) -> bool:
        done = steps_done(self.run)
        return any(filled < e["step"] < done for e in events(self.run, "CheckpointCommitted"))

    def _lose(self, *, together: bool) -> None:
        before, status = len(events(self.run, "Recovery")), account(self.run.name)
        stages = {member: rank % STAGES for rank, member in enumerate(status["world"])}
        places = nodes_of(self.run)
        stage = alone(places, stages)
        victims = [member for member, its in stages.items() if its == stage]
        if not together:  # somebody on another node has a replica on this one
            victims = [next(member for member in stages if places[member] != places[victims[0]])]
        kill(status, *victims)
        self.stages.append(stages[victims[0]])
        wait_for(lambda: len(events(self.run, "Recovery")) > before, f"the recovery of {victims}")


def test_one_stage_is_replayed_and_another_filled_from_its_replica(tmp_path: Path) -> None:
    how: dict[str, Any] = {"workers": 2 * STAGES, "micro_batches": 2, "split": (4, 6)}
    how |= {"num_spares": 0, "checkpoints": ft.CheckpointConfig(every=EVERY)}
    pace = tmp_path / "pace"
    calm = pipeline(tmp_path, "calm", task=Leisurely(pace), **how)
    pace.touch()
    striker = Striker(tmp_path / "run", pace)
    result = pipeline(tmp_path, "run", task=Leisurely(pace), **how)
    striker.thread.join(10)
    assert not striker.thread.is_alive()
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    kinds = [(recovery.strategy, len(recovery.lost)) for recovery in result.recoveries]
    assert kinds == [(Strategy.LOGGING, 2), (Strategy.REPLICATION, 1), (Strategy.LOGGING, 2)]
    assert {(recovery.guarantee, recovery.redone) for recovery in result.recoveries} == {(Guarantee.EXACT, 0)}
    one, other, again = striker.stages
    assert one == again != other
    for recovery in (result.recoveries[0], result.recoveries[2]):
        assert f"stage {one} had no replica left" in recovery.reason, "no other was replayed with it"
        assert recovery.replayed > 0


def test_what_crosses_between_stages_with_replicas_elsewhere_is_not_logged(tmp_path: Path) -> None:
    how: dict[str, Any] = {"workers": 2 * STAGES, "micro_batches": 2, "split": (4, 6), "num_spares": 0}
    run = Path(pipeline(tmp_path, "run", **how).path)
    stages = {done["member"]: done["stage"] for done in events(run, "Completed")}
    lonely = alone(nodes_of(run), stages)
    logged = {boundary for boundary in range(STAGES - 1) if lonely in (boundary, boundary + 1)}
    for record in events(run, "LogWritten"):
        stage = stages[record["member"]]
        crossing = len({stage - 1, stage} & logged)
        assert record["payload_bytes"] - AGREED == crossing * PASSED_ON, f"stage {stage}, logged {logged}"
