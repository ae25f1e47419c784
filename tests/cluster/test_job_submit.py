"""`ray job submit` through a real job server with token authentication: every job in jobs/, stop, a lost driver, attach."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import STEPS
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util import list_named_actors

import raytrain_ft as ft
from raytrain_ft.policy.audit import audit
from raytrain_ft.runtime.event_log import read_records, read_run
from raytrain_ft.runtime.spec import NAMESPACE

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # several jobs at once, each with processes that import torch
ROOT = Path(__file__).parents[2]
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
JOBS = {
    "train_digits": "--num-workers 1 --max-steps 4",
    "train_images": "--num-workers 1 --max-steps 4 --images {path}/images",
    "train_vit": "--num-workers 1 --max-steps 4 --images {path}/vit-images",
    "train_lm": "--stages 2 --max-steps 4 --micro-batches 2",
    "checkfreq_plain": "--epochs 1 --path {path}/plain",
    "checkfreq_ray_train": "--epochs 4 --path {path}/ray-train",
}
LAST_LINE = {
    "train_lm": r"held-out modules: \d\.\d\d bits per byte",
    "checkfreq_plain": r"test accuracy: \d+\.\d\d%",
    "checkfreq_ray_train": r"(?s)begins with step [1-9].*'accuracy': 0\.\d+",  # it was killed, and went on in the midst
}
"""What a job prints at its end; the others print their test accuracy too."""
ATTACH = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
from raytrain_ft.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def client(cluster) -> Iterator[JobSubmissionClient]:
    with cluster.job_server() as address:
        client = JobSubmissionClient(address)
        until(lambda: takes_jobs(client), "an agent of the job server")
        yield client


def takes_jobs(client: JobSubmissionClient) -> bool:
    """A job server that has just started says for a moment that it has nobody to run a job."""
    try:
        job = client.submit_job(entrypoint="true")
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        return False
    return client.get_job_status(job) is not None


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def submit(client: JobSubmissionClient, entrypoint: str) -> str:
    return client.submit_job(entrypoint=f"{sys.executable} {entrypoint}", runtime_env={"working_dir": str(ROOT)})


def ended(client: JobSubmissionClient, job: str, seconds: float = 100) -> tuple[JobStatus, str]:
    """Status and logs of a job that has ended."""
    until(lambda: client.get_job_status(job) in ENDED, f"the end of {job}", seconds)
    return client.get_job_status(job), client.get_job_logs(job)


def ray_job(client: JobSubmissionClient, *command: str) -> str:
    """`ray job ...` as a person types it."""
    line = [str(Path(sys.executable).parent / "ray"), "job", *command]
    environment = os.environ | {"RAY_ADDRESS": client.get_address()}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def processes_of(*signs: str) -> set[psutil.Process]:
    """The cluster's processes with one of these words in their command lines. Its token, which nobody else on this machine
    has, is in the environment of what was started with it; Ray's workers, who overwrite theirs, are children of such."""
    family: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]:
                family |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return {process for process in family if any(sign in command_line(process) for sign in signs)}


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has ended meanwhile


def nothing_runs(path: Path) -> bool:
    """No driver, actor or persister of ours lives. Ray Train leaves an actor of its own."""
    ours = processes_of(str(path), "ray::Supervisor", "ray::Worker", "raytrain_ft.storage.persister")
    named = [actor for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return not ours and not named


def steps_of(run: Path) -> int:
    """Steps that are known to be committed."""
    log = run / "events.jsonl"
    records = read_records(log) if log.exists() else []
    return max((record["stop_step"] for record in records if record["event"] == "StepsCommitted"), default=0)


def attach(address: str) -> tuple[subprocess.Popen[str], str]:
    """`raytrain-ft attach toy` as a person types it, and the first line that it prints."""
    command = [sys.executable, "-c", ATTACH, "attach", "toy"]
    environment = os.environ | {"RAY_ADDRESS": address}
    attached = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert attached.stdout is not None
    return attached, attached.stdout.readline()


def test_stopped_resubmitted_orphaned_attached(client: JobSubmissionClient, cluster, undisturbed, tmp_path: Path) -> None:
    """One run through it all: it ends with the bits of the undisturbed run."""
    run, held = tmp_path / "toy", tmp_path / "held"
    held.touch()
    script = f"tests/cluster/submitted.py --storage-path {tmp_path} --name toy"

    # Submitted by hand; again while it runs; stopped by hand.
    said = ray_job(client, "submit", "--no-wait", "--working-dir", ".", "--", sys.executable, *script.split())
    first = re.search(r"raysubmit_\w+", said)
    assert first, said
    until(lambda: steps_of(run) > 0, "the first step")
    running = [len(processes_of(sign)) for sign in ("ray::Supervisor", "ray::Worker", "raytrain_ft.storage.persister")]
    assert running == [1, 2, 2], "what is looked for below can be seen"
    second = submit(client, script)
    status, logs = ended(client, second)
    assert status == JobStatus.FAILED
    assert "RunActiveError: a run named 'toy' is alive on this cluster" in logs
    assert "raytrain-ft attach toy" in client.get_job_info(second).message
    assert client.get_job_status(first[0]) == JobStatus.RUNNING, client.get_job_logs(first[0])
    ray_job(client, "stop", "--no-wait", first[0])
    until(lambda: "takes a last checkpoint" in client.get_job_logs(first[0]), "the driver's answer to SIGTERM")
    held.unlink()
    status, logs = ended(client, first[0])
    assert status == JobStatus.STOPPED
    assert "its job was stopped (SIGTERM): takes a last checkpoint" in logs
    assert "SIGTERM received" not in logs, "Ray's own stack"
    until(lambda: nothing_runs(tmp_path), "the end of every process")
    records = read_records(run / "events.jsonl")
    stored = [record for record in records if record["event"] == "CheckpointCommitted"][-1]
    assert records[-1]["event"] == "RunFailed"
    assert records[-1]["error"][0] == "AbortedError"
    assert 0 < stored["step"] == steps_of(run) < STEPS
    uploaded = re.search(r"working directory: (.*)", logs)
    assert uploaded
    assert "jobs" in uploaded[1]
    assert not {".git", ".venv", "docs"} & set(uploaded[1].split())

    # Again: it goes on. The driver is lost, then a worker; attached to until its end.
    held.touch()
    third = submit(client, f"{script} --driver-timeout 100")
    until(lambda: stored["step"] < steps_of(run), "the first step after the checkpoint")
    (driver,) = [process for process in processes_of("submitted.py") if "python" in process.name()]
    driver.kill()
    assert ended(client, third)[0] == JobStatus.FAILED

    # Attached to by somebody who leaves again (Ctrl-C): the same processes go on.
    ours = processes_of("ray::Supervisor", "ray::Worker")
    assert len(ours) == 3
    attached, heard = attach(cluster.address)
    attached.send_signal(signal.SIGINT)
    heard += attached.communicate(timeout=60)[0]
    assert attached.returncode == 130, heard
    assert "left; the run goes on" in heard
    left_at = steps_of(run)
    until(lambda: steps_of(run) > left_at, "a step after that")
    assert processes_of("ray::Supervisor", "ray::Worker") == ours

    attached, heard = attach(cluster.address)
    worker = next(record for record in read_records(run / "events.jsonl") if record["event"] == "WorkerStarted")
    psutil.Process(worker["pid"]).kill()
    held.unlink()
    heard += attached.communicate(timeout=100)[0]
    assert attached.returncode == 0, heard
    assert "[toy] " in heard
    # by Ray where the kernel does not allow lifelines
    assert re.search(rf"noticed by (lifeline|ray); lost {worker['member']}; workers 2 -> 2", heard), heard
    assert f"finished: step {STEPS}" in heard

    result = ft.attach(run)  # of a run that has ended: what its records say
    assert result.digest == undisturbed(workers=2).digest
    assert f"digest {result.digest}" in heard
    assert len(result.recoveries) == 1
    assert audit(read_run(run)).violations == ()
    until(lambda: nothing_runs(tmp_path), "the end of every process")


@pytest.mark.example
def test_every_job_through_the_job_server(client: JobSubmissionClient, tmp_path: Path) -> None:
    everything = {path.stem for path in (ROOT / "jobs").glob("*.py")}
    assert everything - {*JOBS} == {"demo"}, "which starts a cluster of its own: see test_jobs"
    submitted = {}
    for name, arguments in JOBS.items():
        more = "" if name.startswith("checkfreq") else f" --storage-path {tmp_path} --name {name}"
        submitted[name] = submit(client, f"jobs/{name}.py {arguments.format(path=tmp_path)}{more}")
    for name, job in submitted.items():
        status, logs = ended(client, job, seconds=250)  # all of them at once
        assert status == JobStatus.SUCCEEDED, f"{name}: {client.get_job_info(job).message}\n{logs}"
        assert re.search(LAST_LINE.get(name, r"test accuracy: \d+\.\d\d%"), logs), f"{name}:\n{logs}"
    assert until(lambda: nothing_runs(tmp_path), "the end of every process")


def asked_with(client: JobSubmissionClient, headers: dict[str, str]) -> int:
    """How the job server answers who asks for its jobs so."""
    request = urllib.request.Request(f"{client.get_address()}/api/jobs/", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_without_the_right_token_the_job_server_refuses(client: JobSubmissionClient) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    for name in ("Authorization", "X-Ray-Authorization"):
        assert asked_with(client, {name: f"Bearer {token}"}) == 200, "this is how a token is shown"
        for wrong in ("0" * len(token), token[:-1], token.swapcase(), ""):
            assert asked_with(client, {name: f"Bearer {wrong}"}) in (401, 403), wrong
    assert asked_with(client, {}) in (401, 403)
    assert client.get_version()  # with the token
