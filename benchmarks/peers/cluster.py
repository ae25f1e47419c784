"""A Ray cluster of several nodes on this machine, and a Ray Train run on it, for the length of one measurement.

The cluster has a token and a directory of its own, and nothing of it is left afterwards.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

import psutil  # isort: skip  # Ray brings its own copy, importable once ray is

# What a training worker gets: one thread for its arithmetic, and gloo on the loopback device alone.
WORKER_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

# A resource that only the worker nodes have: the head keeps its CPU for what the frameworks put there.
WORKER_SLOT = "worker_slot"
FINISHED = "it finished"


@contextmanager
def local_cluster(num_nodes: int) -> Iterator[Cluster]:
    """A head and `num_nodes` nodes for one worker each; this process is connected to it as a driver.

    Whatever happens inside, every process of the cluster and its directory are gone afterwards.
    """
    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already: call ray.shutdown() first")
    directory = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray puts sockets below it
    before = set(psutil.Process().children(recursive=True))
    # RAY_TMPDIR also keeps the cluster's address out of the file that other people's `ray.init()` look into
    with _environment({"RAY_TMPDIR": directory, "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}):
        try:
            _with_token()
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            try:
                for _ in range(num_nodes):
                    cluster.add_node(num_cpus=1, resources={WORKER_SLOT: 1})
                ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
                yield cluster
            finally:
                started = set(psutil.Process().children(recursive=True)) - before
                with suppress(Exception):
                    ray.shutdown()
                with suppress(Exception):
                    cluster.shutdown()
                _end(started)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _with_token() -> None:
    """Turn Ray's token authentication on, as `ray.init()` does for a local cluster; a bare `Cluster` would not."""
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
    from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  # compiled

    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # this process's own: never written to a file
    enable_token_auth_by_default()
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end(processes: set[psutil.Process], grace_s: float = 5.0) -> None:
    """Kill those of our own processes that a shutdown left behind."""
    _, alive = psutil.wait_procs(list(processes), timeout=grace_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


@contextmanager
def fitting(trainer: TorchTrainer) -> Iterator[ray.ObjectRef]:
    """`trainer.fit()` as a task of its own, so that the caller's deadlines hold whatever becomes of it."""

    @ray.remote(num_cpus=0, max_retries=0)
    def fit() -> str:
        trainer.fit()
        return FINISHED

    running = fit.remote()
    try:
        yield running
    finally:
        ray.cancel(running, force=True)


def why_ended(running: ray.ObjectRef) -> str | None:
    """What became of a `fitting` run: None while it runs."""
    if not ray.wait([running], timeout=0)[0]:
        return None
    try:
        return ray.get(running)
    except Exception as error:
        return reason(error)


def why_failed(running: ray.ObjectRef) -> str | None:
    """The same for a run that may finish in its own time: None then, too."""
    why = why_ended(running)
    return None if why == FINISHED else why


def reason(error: BaseException) -> str:
    """An exception in one line: its kind, and the last line of what it says (Ray puts a traceback before that)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else 'no message'}"


def one_worker_per_node(num_workers: int) -> ray.train.ScalingConfig:
    """Workers of one CPU, each on a node of its own."""
    return ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1, WORKER_SLOT: 1})


def run_config(directory: str) -> ray.train.RunConfig:
    """Unlimited retries; everything Ray Train writes goes below the directory."""
    return ray.train.RunConfig(
        name="peer",
        storage_path=str(Path(directory) / "storage"),
        failure_config=ray.train.FailureConfig(max_failures=-1),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        worker_runtime_env={"env_vars": WORKER_ENV},
    )
