"""The options of the jobs: what they come to, and that the commands in their own words work on a cluster."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

JOBS = Path(__file__).parents[2] / "jobs"
SHARED = re.compile("every node sees|shared by all nodes")
"""How a job's help says that an option's default does not do on a cluster."""


class Asked(Exception):
    """A job came to what is tested of it."""


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS))
    return importlib.import_module(name)


def run(module: ModuleType, command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `Trainer` is given when the job is started with these options."""
    given: dict[str, Any] = {}

    def trainer(*task: object, **options: Any) -> None:
        given.update(options)
        raise Asked

    monkeypatch.setattr(module.ft, "Trainer", trainer)
    monkeypatch.setattr(module, "write_digits", lambda folder: None, raising=False)
    monkeypatch.setattr(sys, "argv", [module.__name__, *shlex.split(command)])
    with pytest.raises(Asked):
        module.main()
    return given


def refused(name: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a job says of options that it does not begin with."""
    with pytest.raises(SystemExit) as ended:
        run(load(name, monkeypatch), command, monkeypatch)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["train_digits", "train_images", "train_lm", "train_vit"])
def test_a_job_waits_for_nodes_as_long_as_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = run(load(name, monkeypatch), "--node-minutes 15", monkeypatch)["recovery_config"]
    assert (recovery.schedule_timeout, recovery.replacement_timeout) == (timedelta(minutes=30), timedelta(minutes=15))


def test_the_batch_of_a_pipeline_is_of_whole_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("train_vit", monkeypatch)
    assert run(module, "--stages 3 --num-workers 6", monkeypatch)["global_batch_size"] == 132
    assert run(module, "--stages 2 --num-workers 8 --micro-batches 100", monkeypatch)["global_batch_size"] == 400


def test_the_batch_without_a_pipeline_does_not_depend_on_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is of one size of batch, and a run may go on with another number of workers."""
    module = load("train_vit", monkeypatch)
    assert {run(module, f"--num-workers {workers}", monkeypatch)["global_batch_size"] for workers in (1, 2, 3, 7)} == {128}


@pytest.mark.parametrize(("name", "own"), [("train_lm", "lm"), ("train_lm", "masked-lm"), ("train_vit", "vit")])
def test_a_rehearsal_has_a_name_of_its_own(name: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew each time, and so would delete a real run's checkpoints."""
    module, options = load(name, monkeypatch), "--stages 3" + " --masked" * (own == "masked-lm")
    assert run(module, options, monkeypatch)["run_config"].name == f"{own}-3-stages"
    assert run(module, f"{options} --lose-stage 1", monkeypatch)["run_config"].name == f"{own}-3-stages-rehearsal"
    assert run(module, f"{options} --lose-stage 1 --name mine", monkeypatch)["run_config"].name == "mine"


@pytest.mark.parametrize("name", ["train_lm", "train_vit"])
@pytest.mark.parametrize(
    "command", ["--stages 3 --num-workers 2", "--stages 3 --num-workers 4", "--stages 0", "--num-workers 0"]
)
def test_workers_that_are_no_whole_replicas_are_refused(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "stages need a multiple of" in refused(name, command, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["train_lm", "train_vit"])
@pytest.mark.parametrize("command", ["--stages 2 --num-workers 4 --lose-stage 1", "--lose-stage 0"])
def test_a_stage_that_another_replica_has_too_cannot_be_lost(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rehearsal would show how a worker is lost: no log is read, and nothing is replayed."""
    assert "use as many as stages" in refused(name, command, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("name", "option"),
    [("train_lm", "--micro-batches 8"), ("train_lm", "--schedule 1f1b"), ("train_vit", "--micro-batches 2")],
)
def test_what_only_a_pipeline_has_is_refused_without_one(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even its default: who gives it expects a pipeline."""
    assert "of a pipeline: give --stages" in refused(name, option, monkeypatch, capsys)
    assert run(load(name, monkeypatch), f"--stages 2 {option}", monkeypatch)["parallelism_config"].pipeline_parallel_degree == 2


def test_a_pipeline_of_the_language_model_has_8_micro_batches_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("train_lm", monkeypatch)
    found = [run(module, f"--stages 2{more}", monkeypatch)["parallelism_config"] for more in ("", " --micro-batches 4")]
    assert [(one.micro_batches, one.schedule) for one in found] == [(8, "1f1b"), (4, "1f1b")]
    assert run(module, "--stages 2 --schedule gpipe", monkeypatch)["parallelism_config"].schedule == "gpipe"


def test_ray_train_keeps_its_own_files_where_every_node_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = load("checkfreq_ray_train", monkeypatch), {}

    def trainer(*loop: object, **options: Any) -> None:
        given.update(options)
        raise Asked

    monkeypatch.setattr("ray.train.torch.TorchTrainer", trainer)
    monkeypatch.setattr("ray.init", lambda **options: None)
    monkeypatch.setattr(sys, "argv", ["checkfreq_ray_train", "--path", str(tmp_path / "run")])
    with pytest.raises(Asked):
        module.main()
    assert given["train_loop_config"]["path"] == str(tmp_path / "run")
    assert Path(given["run_config"].storage_path).parent == tmp_path


@pytest.mark.parametrize("is_there", [True, False])
def test_the_job_with_ray_train_uses_the_cluster_that_is_there_or_starts_its_own(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of a cluster need not say so in RAY_ADDRESS."""
    module, calls = load("checkfreq_ray_train", monkeypatch), []

    def init(**options: Any) -> None:
        calls.append(options)
        if is_there and "num_cpus" in options:
            raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")

    def trainer(*loop: object, **options: Any) -> None:
        raise Asked

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.train.torch.TorchTrainer", trainer)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(sys, "argv", ["checkfreq_ray_train", "--path", str(tmp_path / "run")])
    with pytest.raises(Asked):
        module.main()
    assert calls == [{"num_cpus": 3, "include_dashboard": False}, *[{}] * is_there]


def texts() -> list[str]:
    files = [*JOBS.glob("*.py"), *(JOBS.parent / "docs").glob("*.md"), JOBS.parent / "README.md"]
    return [file.read_text().replace("\\\n", " ") for file in files]


def commands(before: str) -> list[tuple[str, str]]:
    """(job, options) of every command of this kind in the jobs' own words and in the documentation."""
    pattern = re.compile(before + r"python jobs/(\w+)\.py([^\n`#]*)", re.MULTILINE)
    return sorted({(found[1], " ".join(found[2].split())) for text in texts() for found in pattern.finditer(text)})


SUBMITTED, HERE = commands(r"ray job submit [^\n]*-- +"), commands(r"^ *")


def parsed(job: str, options: str, monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """A job's parser, and what it makes of these options."""
    parsers: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser) -> None:
        parsers.append(parser)
        raise Asked

    module = load(job, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Asked):
            module.main()
    return parsers[0], parsers[0].parse_args(shlex.split(options))


def test_commands_are_found() -> None:
    assert {job for job, _ in SUBMITTED} >= {"train_digits", "train_images", "train_lm", "train_vit", "checkfreq_ray_train"}
    assert ("train_digits", "--max-steps 2000 --name digits-kill") in HERE


@pytest.mark.parametrize(("job", "options"), HERE)
def test_a_command_for_one_machine_has_options_that_there_are(job: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed(job, options, monkeypatch)


@pytest.mark.parametrize(("job", "options"), SUBMITTED)
def test_a_command_for_a_cluster_names_every_path_that_all_nodes_must_see(
    job: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser, given = parsed(job, options, monkeypatch)
    shared = [action for action in parser._actions if SHARED.search(action.help or "")]
    assert [action.dest for action in shared if getattr(given, action.dest) == action.default] == []
