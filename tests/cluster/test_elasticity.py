"""Workers come and go: smaller when there is no room, larger when a node joins, the global batch always the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import promise_kept, train, until
from test_wait_free import distance
from torch import nn
from toy import Leisurely, Toy

from raytrain_ft import FailAt, attaching
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.errors import ConfigError, RecoveryError
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records


class Alike(Leisurely):
    """Without what depends on how a batch is cut: dropout, and statistics over a part of it."""

    def __init__(self, pace: Path) -> None:
        super().__init__(pace)
        self.optimizer_name = "SGD"

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def resumed_sizes(run: Path) -> list[int]:
    """The sizes of the worlds that have trained so far."""
    log = run / "events.jsonl"
    return [r["world_size"] for r in read_records(log) if r["event"] == "Resumed"] if log.exists() else []


def test_goes_on_smaller_without_room_and_grows_when_a_node_joins(
    cluster: LocalCluster, undisturbed: Callable[..., Any], tmp_path: Path
) -> None:
    fault = FailAt(rank=1, step=3, phase="backward", bucket=1, action="sigkill_node")
    pace = tmp_path / "pace"
    pace.touch()
    full = len(cluster.node_ids())  # the run takes all the room there is
    steps = 60
    about = {"steps": steps, "global_batch_size": 40}
    arguments = {"workers": (2, full), "num_spares": 0, "replacement": "shrink", **about}

    def grown_to(*sizes: int) -> None:
        assert until(lambda: resumed_sizes(tmp_path / "elastic") == [*sizes], 100), resumed_sizes(tmp_path / "elastic")

    with ThreadPoolExecutor(1) as pool:  # Ray adds nodes from the main thread only
        training = pool.submit(train, tmp_path, "elastic", task=Alike(pace), faults=[fault], **arguments)
        grown_to(full, full - 1)
        cluster.add_node()
        grown_to(full, full - 1, full)
        pace.unlink()
        result = training.result(timeout=120)
    shrunk, grown = result.recoveries
    assert (shrunk.world_before, shrunk.world_after) == (full, full - 1)
    assert (grown.world_before, grown.world_after, grown.lost) == (full - 1, full, [])
    assert grown.attempts == 1
    assert shrunk.guarantee == grown.guarantee == Guarantee.ROUNDING
    assert promise_kept(result) == []
    records = read_records(Path(result.path) / "events.jsonl")
    proof = audit(records)
    assert proof.ok
    assert proof.steps == steps
    assert proof.samples_lost == 0
    calm = undisturbed(task=Alike(pace), workers=full, **about)
    assert result.digest != calm.digest, "sums in another order"
    assert distance(result.final_state, calm.final_state) < 1e-4, "and the same mathematics"
    # The survivors kept their processes: nobody but the lost one and the newcomers was ever started.
    reconciled = [(r["incarnation"], r["member"]) for r in records if r["event"] == "Reconciled"]
    first, last = (
        {one for incarnation, one in reconciled if incarnation == at} for at in (min(reconciled)[0], max(reconciled)[0])
    )
    assert len(first & last) == full - 1


class Slow(Toy):
    """Its workers are ready one after the other: who comes first has the dataset at once."""

    def __init__(self, first: Path) -> None:
        super().__init__()
        self.first = first

    def dataset(self) -> Any:
        try:
            self.first.mkdir()
        except FileExistsError:
            time.sleep(8.0)
        return super().dataset()


@pytest.mark.long
def test_who_is_being_set_up_when_the_supervisor_is_lost_is_waited_for(cluster: LocalCluster, tmp_path: Path) -> None:
    """There is room for all of them, where they are: nobody begins with fewer, and grows."""
    full = len(cluster.node_ids())
    arguments = {"task": Slow(tmp_path / "first"), "workers": (1, full), "num_spares": 0, "global_batch_size": 40}

    seen: dict[str, Any] = {}

    def are_on_their_way() -> bool:
        with suppress(ConfigError):  # it is not there yet
            seen.update(attaching.find("begun")[1])
        return seen.get("state") == "SCHEDULING" and sum(map(bool, seen["nodes"].values())) == full

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, tmp_path, "begun", **arguments)
        assert until(are_on_their_way, 30)
        os.kill(seen["pid"], signal.SIGKILL)
        result = training.result(timeout=120)
    records = read_records(Path(result.path) / "events.jsonl")
    assert any(record["event"] == "SupervisorRestarted" for record in records), "else this shows nothing"
    assert resumed_sizes(Path(result.path)) == [full]
    assert result.recoveries == []
    assert promise_kept(result) == []


@pytest.mark.long
def test_below_the_minimum_the_run_ends_with_a_reason(cluster: LocalCluster, tmp_path: Path) -> None:
    faults = [FailAt(rank=0, step=5, phase="forward", action="sigkill_node")]
    with pytest.raises(RecoveryError, match="at least") as failure:
        train(
            tmp_path,
            "minimum",
            workers=len(cluster.node_ids()),
            global_batch_size=40,
            num_spares=0,
            faults=faults,
            replacement_timeout=timedelta(seconds=8),
        )
    assert "Add nodes" in str(failure.value)
    cluster.add_node()


class OtherCode(Toy):
    """The fifth worker, which is started for the first one that is lost, has another version of the model."""

    def model(self, stage: int) -> nn.Module:
        name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
        return nn.Linear(16, 4) if (name or "").endswith(":w4") else super().model(stage)


@pytest.mark.long
def test_a_newcomer_with_other_code_is_replaced_and_ends_no_run(cluster: LocalCluster, tmp_path: Path) -> None:
    faults = [FailAt(rank=1, step=5, phase="forward"), FailAt(rank=2, step=60, phase="forward")]
    result = train(tmp_path, "other", task=OtherCode(step_seconds=0.15), steps=70, faults=faults)
    assert promise_kept(result) == []
    failed = [record for record in read_records(tmp_path / "other" / "events.jsonl") if record["event"] == "TaskFailed"]
    assert [(record["member"], record["kind"]) for record in failed] == [("w4", "mismatch")], "refused when it was ready"
    assert result.digest == train(tmp_path, "calm", steps=70).digest
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)


def test_an_uneven_share_and_short_last_batches_use_every_sample_once(cluster: LocalCluster, tmp_path: Path) -> None:
    result = train(
        tmp_path, "uneven", task=Toy(norm=False), global_batch_size=33, steps=40, gradient_accumulation_steps=2, num_spares=0
    )
    proof = audit(read_records(Path(result.path) / "events.jsonl"))
    assert proof.ok
    assert proof.epochs_complete == 2
