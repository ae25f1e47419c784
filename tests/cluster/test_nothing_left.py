"""Whatever the end of a run, nothing is left behind: no process, no actor, no shared memory, no file; no open listener."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import STEPS, left, promise_kept, train, until
from ray.util import list_named_actors
from toy import Toy

import raytrain_ft as ft
from raytrain_ft import follow
from raytrain_ft.errors import TaskError
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.supervisor_actor import SupervisorActor

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
sys.path.insert(0, {here!r})
from datetime import timedelta
from pathlib import Path
import ray
from conftest import train
from toy import Toy
import raytrain_ft as ft
ray.init(address={address!r}, log_to_driver=False)
train(Path({path!r}), "left", task=Toy(step_seconds=0.4), workers=2, driver_timeout=timedelta(seconds=2),
      checkpoints=ft.CheckpointConfig(every=1000))
"""


RECORDS = {"events.jsonl", "nonce", "report.html", "timeline.json", "writer-1.claim", "writer.json"}
"""The files of a run that is over, however it ended, beside its checkpoints and its final state."""


@pytest.mark.parametrize("end", ["ctrl-c", "driver killed"])
def test_when_the_driver_goes(cluster, undisturbed, end: str, tmp_path: Path) -> None:
    """The run ends and leaves nothing but a checkpoint of the last step; run again, it ends with the same bits as ever."""
    script = SCRIPT.format(here=str(Path(__file__).parent), address=cluster.address, path=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "left" / "events.jsonl"
    assert until(lambda: log.exists() and "StepsCommitted" in log.read_text(), 60)
    os.kill(driver.pid, signal.SIGINT if end == "ctrl-c" else signal.SIGKILL)
    driver.wait(60)
    assert until(lambda: left() == [], 45), left()
    assert {path.name for path in log.parent.iterdir()} == RECORDS | {"checkpoints"}
    records = read_records(log)
    (stored,) = [record for record in records if record["event"] == "CheckpointCommitted"]
    assert stored["step"] == max(record["stop_step"] for record in records if record["event"] == "StepsCommitted") < STEPS
    assert records[-1]["event"] == "RunFailed"
    assert stored["name"] in records[-1]["error"][1]
    resumed = train(tmp_path, "left", workers=2, checkpoints=ft.CheckpointConfig(every=1000))
    assert resumed.digest == undisturbed(workers=2).digest


@pytest.mark.parametrize("fails", [False, True])
def test_when_it_ends_by_itself(cluster, tmp_path: Path, fails: bool) -> None:
    """Well, or with an error of the task: when `fit` is over, nothing is left but the run's records."""
    faults = [ft.FailAt(rank=1, step=3, phase="forward", action="exception")] if fails else []
    with pytest.raises(TaskError) if fails else nullcontext():
        train(tmp_path, "clean", workers=2, steps=5, num_spares=0, faults=faults)
    assert list_named_actors(all_namespaces=True) == []
    assert until(lambda: left() == [], 10), left()
    files = {path.name for path in (tmp_path / "clean").iterdir()}
    assert files == RECORDS | {"checkpoints"} | ({"faults"} if fails else {"final.arrow"})


def test_when_rank_0_was_killed_while_its_checkpoint_waited_for_the_part_of_another(cluster, tmp_path: Path) -> None:
    """Which never comes, for that worker hangs, and is lost too."""
    faults = [
        ft.FailAt(rank=1, phase="checkpoint", step=5, action="hang"),
        ft.FailAt(rank=0, phase="reduce", bucket=0, step=5),  # its own part was copied while it computed
    ]
    rules = {"num_spares": 0, "fence_timeout": timedelta(seconds=2), "checkpoints": ft.CheckpointConfig(every=5)}
    own = tmp_path / "waited" / "checkpoints" / "step-000000005-e1-i1" / "shard-00000-of-00002.json"
    with ThreadPoolExecutor(1) as pool:
        task = Toy(step_seconds=0.2)
        training = pool.submit(train, tmp_path, "waited", task=task, workers=2, steps=8, faults=faults, **rules)
        assert until(own.exists, 60), "its own part is written: it waits for the other"
        result = training.result(120)
    assert promise_kept(result) == []
    assert [len(recovery.lost) for recovery in result.recoveries] == [2]


class Clinging(SupervisorActor):
    """A supervisor whose process does not end when Ray has taken it for dead."""

    def __init__(self) -> None:
        self._name = "clinging"
        atexit.register(time.sleep, 600)

    async def status(self) -> dict[str, Any]:
        return {"pid": os.getpid()}


def test_a_supervisor_that_hangs_on_its_way_out_is_ended_all_the_same(cluster) -> None:
    actor: Any = ray.remote(Clinging)
    supervisor = actor.options(num_cpus=0, max_restarts=-1).remote()
    process = psutil.Process(ray.get(supervisor.status.remote(), timeout=60)["pid"])
    follow.clean_up("none", supervisor)
    assert until(lambda: not process.is_running(), 10)


class Restarting:
    """A supervisor that Ray is restarting when it is asked to end: nobody has asked the new one."""

    def __init__(self, before: str) -> None:
        self._before = Path(before)

    def abort(self, reason: str) -> None:
        if not self._before.exists():
            self._before.touch()
            os._exit(1)
        self._before.write_text(reason)

    def run(self) -> dict[str, Any]:
        return {"state": "ABORTED"}


@pytest.mark.long
def test_a_supervisor_that_is_restarting_is_asked_again_to_end_the_run(cluster, tmp_path: Path) -> None:
    actor: Any = ray.remote(Restarting)
    supervisor = actor.options(num_cpus=0, max_restarts=1).remote(str(tmp_path / "asked"))
    account = follow.abort(supervisor, "Ctrl-C", 10.0, None)
    assert (account, (tmp_path / "asked").read_text()) == ({"state": "ABORTED"}, "Ctrl-C")
