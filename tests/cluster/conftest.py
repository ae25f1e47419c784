"""One cluster of several real Ray nodes, with token authentication on; runs on it; checks after it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray.cloudpickle
from ray.util import list_named_actors, placement_group_table
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.chaos.cluster import LocalCluster
from raytrain_ft.policy.history import check
from raytrain_ft.runtime import placement
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE

STEPS = 30
STAGES, MICRO_BATCHES, PIPELINE_STEPS = 3, 4, 20
LEFT_S = 10.0
"""How long the processes of a run that is over may take to end."""
ACTORS = re.compile(r"ray::(.*:)?(Worker|SupervisorActor|Holder)\b")
"""How the titles of our actors' processes begin, busy or not."""
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = re.compile(r"\.partial$|^task-")
"""Names of files in a run's directory that are being written, or are needed while it lasts."""
before: list[Any] = []
"""What was there when the module's first test began: others may have left it, or be using the machine."""
SMALL_BUCKETS = {"bucket_bytes": 8192, "first_bucket_bytes": 1024}
DEFAULTS = {field.name: field.default for field in fields(ft.RecoveryConfig)} | {"workers": 3, "steps": STEPS, "seed": 7}


# The workers import the toy task from here.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
# All processes of the cluster inherit this: other tests, and real runs, may be on this machine, too.
os.environ["RAYTRAIN_FT_TESTED_BY"] = str(os.getpid())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process can be connected to one cluster: modules with one of their own come before the shared one is started. Tasks of
    test modules travel as those of a script do: a worker that loaded the module would load all that the test needs, which takes
    a second."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        ray.cloudpickle.register_pickle_by_value(module)
    items.sort(key=lambda item: item.get_closest_marker("own_cluster") is None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(num_nodes=5) as cluster:
        yield cluster


def train(path: Path, name: str, **arguments: Any) -> ft.Result:
    """One run of the toy task, with the arguments of `trainer_of`."""
    return trainer_of(path, name, **arguments).fit()


def trainer_of(
    path: Path, name: str, *, task: Any = None, workers: Any = 3, use_gpu: bool = False, steps: int = STEPS, **arguments: Any
) -> ft.Trainer:
    """A trainer of the toy task; `arguments` are of Trainer, of RecoveryConfig where it has them, or of
    RunConfig."""
    checkpoints = arguments.pop("checkpoints", None)
    environment = arguments.pop("worker_runtime_env", None)
    recovery = {key: arguments.pop(key) for key in list(arguments) if key in ft.RecoveryConfig.__dataclass_fields__}
    if not arguments.get("faults"):
        recovery.setdefault("num_spares", 0)  # a process less to start
    settings = {"global_batch_size": 32, "seed": 7, "quiet": True, **SMALL_BUCKETS, **arguments}
    return ft.Trainer(
        task or Toy(),
        max_steps=steps,
        scaling_config=ft.ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        recovery_config=ft.RecoveryConfig(**recovery),
        run_config=ft.RunConfig(
            name=name, storage_path=str(path), checkpoint_config=checkpoints, worker_runtime_env=environment
        ),
        **settings,
    )


def kill_the_sleeper(run: Path) -> str:
    """SIGKILL to the one replica of a run that sleeps; returns which."""
    records = read_records(run / "events.jsonl")
    (sleeper,) = {record["member"] for record in records if record["event"] == "Dormant"}
    (pid,) = {record["pid"] for record in records if record["event"] == "WorkerStarted" and record["member"] == sleeper}
    os.kill(pid, signal.SIGKILL)
    return sleeper


def pipeline(path: Path, name: str, *, stages: int = STAGES, workers: Any = STAGES, **arguments: Any) -> ft.Result:
    """A run of the toy task in stages."""
    how = ft.ParallelismConfig(
        pipeline_parallel_degree=stages,
        num_pp_microbatches=arguments.pop("micro_batches", MICRO_BATCHES),
        num_pp_chunks=arguments.pop("num_pp_chunks", 1),
        schedule=arguments.pop("schedule", "1f1b"),
        split=arguments.pop("split", "auto"),
    )
    # more processes than cores: a false alarm would be survived, but these tests count recoveries
    settings = {"steps": PIPELINE_STEPS, "drop_last": True, "heartbeat_timeout": timedelta(seconds=3), **arguments}
    return train(path, name, workers=workers, parallelism_config=how, **settings)


@pytest.fixture(scope="session")
def undisturbed_pipeline(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    """What every disturbed run of three stages is compared with."""
    result = pipeline(tmp_path_factory.mktemp("pipeline"), "undisturbed")
    assert result.recoveries == []
    assert promise_kept(result) == []
    return result


@pytest.fixture(scope="session")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ft.Result]:
    """The undisturbed run of the same kind, made once. It does not rest: how long a task rests, and arguments that only spell
    a default out, make no other kind."""
    path = tmp_path_factory.mktemp("undisturbed")
    known: dict[str, ft.Result] = {}

    def run(**arguments: Any) -> ft.Result:
        task = copy(arguments.pop("task", Toy()))
        if isinstance(task, Toy):
            task.step_seconds = task.backward_seconds = 0.0
        arguments = {name: value for name, value in arguments.items() if name not in DEFAULTS or value != DEFAULTS[name]}
        key = repr((type(task), vars(task), sorted(arguments.items())))
        if key not in known:
            known[key] = train(path, f"run{len(known)}", task=task, **arguments)
            assert known[key].recoveries == []
        return known[key]

    return run


@pytest.fixture(autouse=True, scope="module")
def _remember_what_is_there() -> None:
    """Of a module's own runs, those of its fixtures too, nothing counts as having been there."""
    before[:] = _there()


def promise_kept(result: ft.Result) -> list[str]:
    """Violations found in the run's own event log; and what is left of it. Ask when no run is under way."""
    until(lambda: not left(), LEFT_S)
    remains = [*left(), *(path for path in Path(result.path).rglob("*") if TEMPORARY.search(path.name))]
    return check(read_records(Path(result.path) / "events.jsonl")) + [f"left: {one}" for one in remains]


def left() -> list[Any]:
    """What is there of runs that are over: actors, placement groups, processes, shared memory."""
    return [one for one in _there() if one not in before]


def _there() -> list[Any]:
    found: list[Any] = [*processes(), *SHARED_MEMORY.iterdir()]
    if ray.is_initialized():  # Ray Train, in other tests, leaves an actor of its own
        found += [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
        found += [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        found += held()
    return found


def held() -> list[str]:
    """Processors that Ray has not been given back, on nodes that live: Ray itself learns late of those that do not."""

    def all_free(node: dict[str, Any]) -> bool:
        return node["Available"].get("CPU", 0.0) >= node["Resources"].get("CPU", 0.0)

    some = [node for node in placement.nodes() if node["Alive"] and not all_free(node)]
    return [f"a processor of node {node['NodeID']}" for node in some if asyncio.run(placement.reaction(node)) == "answer"]


def processes() -> list[psutil.Process]:
    """Those of our runs, and of nobody else who may be testing on this machine: what descends from this process, for Ray may
    write a title over what shows the environment; and what has lost its parents, by its environment."""
    mine, family = os.environ["RAYTRAIN_FT_TESTED_BY"], psutil.Process().children(recursive=True)
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ends just now
            title = " ".join(process.cmdline())
            is_ours = ACTORS.match(title) or "raytrain_ft.storage.persister" in title
            if is_ours and (process in family or process.environ().get("RAYTRAIN_FT_TESTED_BY") == mine):
                found.append(process)
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
