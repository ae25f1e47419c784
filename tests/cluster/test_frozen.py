"""Who stands still is given up, and comes back later, or never: a whole node, and a worker in the midst of a recovery."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import promise_kept, train
from test_hosts import Running, during, end_by_themselves, node_of_rank, process_of_rank

from raytrain_ft import FailAt
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.history import VOICES
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records

pytestmark = pytest.mark.long
STEPS = 60


def test_a_node_that_freezes_and_goes_on_later(cluster: LocalCluster, undisturbed, tmp_path: Path) -> None:
    """Its worker wakes in a step that the others have long done without it, is told so, and ends. Nothing of it counts."""
    patient = timedelta(seconds=60)  # it does not end because its own lease is over
    with Running(tmp_path, "frozen", steps=STEPS, lease=patient) as run:
        account = run.ready()
        victim, node, frozen = account["world"][1], node_of_rank(account, 1), process_of_rank(account, 1)
        with during(partial(cluster.freeze_node, node), partial(cluster.thaw_node, node)):
            account = run.goes_on(lost=1)
            step = account["step"]
            run.until(lambda a: a["step"] > step)
            assert frozen.status() == psutil.STATUS_STOPPED, "nobody can have ended it yet"
        assert end_by_themselves([frozen])
        step = run.account()["step"]
        run.until(lambda a: a["step"] > step)
        result = run.result()
    assert result.digest == undisturbed(steps=STEPS).digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.lost, recovery.noticed_by, recovery.guarantee) == ([victim], "heartbeat", Guarantee.EXACT)
    records = read_records(Path(result.path) / "events.jsonl")
    lost = next(i for i, record in enumerate(records) if record["event"] == "WorkerLost")
    assert [record for record in records[lost:] if record["event"] in VOICES and record["member"] == victim] == []
    assert node in cluster.node_ids()


@pytest.mark.parametrize("phase", ["fence", "transfer_source"])
def test_a_worker_that_freezes_in_a_phase_of_the_recovery(phase: str, undisturbed, tmp_path: Path) -> None:
    """Before it says where it stands; and while the replacement of another waits for the state that it is to send."""
    first = FailAt(rank=0, step=10, phase="reduce", bucket=1)
    second = FailAt(rank=1, step=10, phase=phase, action="sigstop")
    result = train(tmp_path, "cascade", faults=[first, second])
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert len(recovery.lost) == 2
    assert recovery.guarantee == Guarantee.EXACT
    losses = [r for r in read_records(Path(result.path) / "events.jsonl") if r["event"] == "WorkerLost"]
    noticed = {loss["member"]: loss["noticed_by"] for loss in reversed(losses)}  # Ray tells as well, once it has killed it
    assert noticed[recovery.lost[1]] == "heartbeat"
