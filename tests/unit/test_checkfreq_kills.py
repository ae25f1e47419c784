"""Scripts that use `raytrain_ft.checkfreq` are killed, resumed, and resumed in other worlds: same bits, each sample once."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

JOB = Path(__file__).with_name("checkfreq_job.py")
SAMPLES, BATCHES_PER_EPOCH = 60, 8
DEADLINE_S = 120
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")


@contextmanager
def started(directory: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The job as a process, gone at the end with its persister."""
    process = subprocess.Popen(
        [sys.executable, str(JOB), str(directory), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_with_persister(process.pid)
        process.communicate(timeout=DEADLINE_S)


def kill_with_persister(pid: int) -> None:
    """As a machine does that loses its power: neither sees the other's end."""
    job = psutil.Process(pid)
    for one in [*job.children(), job]:
        one.kill()


def complete(directory: Path, *arguments: str, world: int = 1) -> list[Any]:
    """Runs the job to its end as so many ranks; returns what each had at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    environments = [common | {"RANK": str(rank)} for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(directory), *arguments],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        for environment in environments
    ]
    try:
        codes = [process.wait(DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    return [torch.load(directory / f"final-{rank}.pt", weights_only=True) for rank in range(world)]


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b


def used(directory: Path) -> dict[int, tuple[int, list[int]]]:
    """{step: (epoch, sample ids over all ranks)}; of a step that was done again, the later launch counts."""
    found: dict[int, tuple[int, list[int]]] = {}
    launches: dict[tuple[str, ...], list[Path]] = {}
    for path in sorted(directory.glob("ids-*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        _, _, world, _, begun, pid = path.stem.split("-")
        launches.setdefault((world, begun, pid if world == "1" else ""), []).append(path)
    for paths in launches.values():
        steps: dict[int, tuple[int, list[int]]] = {}
        for path in paths:
            for record in map(json.loads, path.read_text().split("\n")[:-1]):
                ids = steps.get(record["step"], (0, []))[1]
                steps[record["step"]] = (record["epoch"], ids + record["ids"])
        found |= steps
    return found


def check_each_once(directory: Path, until: int) -> None:
    found = used(directory)
    assert sorted(found) == list(range(1, until + 1))
    for epoch in range(until // BATCHES_PER_EPOCH):
        ids = [index for e, batch in found.values() if e == epoch for index in batch]
        assert sorted(ids) == list(range(SAMPLES)), epoch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_killed_anywhere_the_end_has_the_same_bits(tmp_path: Path, device: str) -> None:
    directory, schedule = tmp_path / "killed", ("--total-steps", "1000000", "--device", device)
    generator = random.Random(5)
    step = 0
    for how in ("step", "persisting", "step", "persisting", "process alone"):
        with started(directory, "--until", "1000000", *schedule) as process:  # it has no end before it is killed
            assert process.stdout is not None
            aim = step + generator.randint(4, 9)
            for line in process.stdout:
                step = int(line)
                if step >= aim:
                    break
            if how == "persisting":
                until_incomplete(directory / "checkpoints")
            if how == "process alone":  # its persister brings the checkpoint under way to its end
                process.kill()
            else:
                kill_with_persister(process.pid)
            process.wait(DEADLINE_S)
            step = max([step, *(int(line) for line in process.stdout if line.endswith("\n"))])
    end = str(step + 5)
    (final,) = complete(directory, "--until", end, *schedule)
    (reference,) = complete(tmp_path / "undisturbed", "--until", end, *schedule)
    assert same_bits(final, reference)
    assert used(directory) == used(tmp_path / "undisturbed")
    check_each_once(directory, step + 5)


def until_incomplete(checkpoints: Path) -> None:
    """Returns at a moment when a checkpoint is being written."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for entry in checkpoints.glob("step-*"):
            if not (entry / "manifest.json").exists():
                return
    pytest.fail("no checkpoint was under way")


def test_other_worlds_read_each_sample_once_and_learn_the_same(tmp_path: Path) -> None:
    (alone,) = complete(tmp_path / "alone", "--quiet", "--until", "24")
    elastic = tmp_path / "elastic"
    complete(elastic, "--quiet", "--until", "10", world=2)
    complete(elastic, "--quiet", "--until", "15", world=1)
    first, second = complete(elastic, "--quiet", "--until", "24", world=2)
    check_each_once(elastic, 24)
    assert same_bits(first["model"], second["model"])
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(first["model"][name], tensor, rtol=1e-3, atol=1e-5)


def test_the_same_world_has_the_same_bits(tmp_path: Path) -> None:
    """Dropout and BatchNorm differ between ranks: each must get its own back."""
    reference = complete(tmp_path / "undisturbed", "--until", "24", world=2)
    complete(tmp_path / "resumed", "--until", "11", world=2)
    assert same_bits(complete(tmp_path / "resumed", "--until", "24", world=2), reference)
    check_each_once(tmp_path / "resumed", 24)


def test_a_checkpoint_that_takes_longer_to_read_than_ranks_wait_for_each_other_is_resumed(tmp_path: Path) -> None:
    complete(tmp_path, "--until", "4", world=2)
    complete(tmp_path, "--until", "5", "--timeout", "12", "--reading", "15", world=2)
    assert sorted(used(tmp_path)) == [1, 2, 3, 4, 5]
    assert list(tmp_path.glob("ids-*-2-from-4-*.jsonl")), "it began with what was stored"


@contextmanager
def by_torchrun(directory: Path, *arguments: str) -> Iterator[psutil.Popen]:
    """The job as two ranks that torchrun starts, gone at the end with all that it started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = psutil.Popen(
        [*command, str(JOB), str(directory), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        yield torchrun
    finally:
        if torchrun.poll() is None:
            lose_power(torchrun)
        torchrun.wait(DEADLINE_S)


def lose_power(process: psutil.Process) -> None:
    """None of them sees another's end."""
    everything = [process, *process.children(recursive=True)]
    for one in everything:  # none may start another, or end in an orderly way, while they are killed
        one.suspend()
    for one in everything:
        one.kill()


def until_durable(directory: Path, step: int) -> None:
    """Returns when there is a checkpoint of this step, or a later one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if any(int(path.parent.name.split("-")[1]) >= step for path in directory.glob("checkpoints/step-*/manifest.json")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {step} came")


@pytest.mark.long
def test_a_real_torchrun_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    directory, endless = tmp_path / "killed", ("--until", "1000000", "--total-steps", "1000000")
    with by_torchrun(directory, *endless) as torchrun:
        until_durable(directory, 3)
        lose_power(torchrun)
    with by_torchrun(directory, *endless) as torchrun:  # of one rank that dies torchrun learns, and ends the other
        until_durable(directory, max(used(directory)) + 1)
        next(one for one in torchrun.children() if str(JOB) in one.cmdline()).kill()
        assert torchrun.wait(DEADLINE_S) == 1
    begun = {int(path.stem.split("-")[4]) for path in directory.glob("ids-*.jsonl")}
    assert len(begun) == 2, "the second one began with what the first had stored"
    end = max(used(directory)) + 5
    arguments = ("--until", str(end), "--total-steps", "1000000")
    with by_torchrun(directory, *arguments) as torchrun:
        assert torchrun.wait(DEADLINE_S) == 0
    finals = [torch.load(directory / f"final-{rank}.pt", weights_only=True) for rank in range(2)]
    assert same_bits(finals, complete(tmp_path / "undisturbed", *arguments, world=2))
    check_each_once(directory, end)
