"""The examples in jobs/ as they are: a language model as a pipeline that loses a stage, and the demo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import ray.cloudpickle
import torch
from conftest import promise_kept, train

import raytrain_ft as ft
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.storage.arrow import read_tensors

pytestmark = [pytest.mark.long, pytest.mark.example]

STEPS = 6
JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def train_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The job as a module. Its classes travel whole, as those of a script do: no worker can import it."""
    spec = importlib.util.spec_from_file_location("train_lm", JOBS / "train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_lm", module)
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


def test_a_masked_language_model_loses_a_stage(cluster, train_lm: ModuleType, tmp_path: Path) -> None:
    task = train_lm.MaskedPythonLM(STEPS)
    result = train(
        tmp_path,
        "lm",
        task=task,
        workers=2,
        steps=STEPS,
        drop_last=True,
        max_grad_norm=1.0,
        parallelism_config=ft.ParallelismConfig(pipeline_parallel_degree=2, split="auto"),
        faults=[ft.FailAt(rank=1, step=3, phase="backward_pass", micro_batch=1)],
    )
    assert promise_kept(result) == []
    assert [(r.strategy, r.guarantee, r.replayed) for r in result.recoveries] == [(Strategy.LOGGING, Guarantee.EXACT, 3)]
    model = ft.load_model(task, result)
    assert model(torch.zeros(1, train_lm.CONTEXT, dtype=torch.uint8)).shape == (1, train_lm.CONTEXT, 256)


def job(name: str, arguments: list[str], path: Path) -> str:
    """Runs a job as a person does: in a process of its own, which starts a cluster for itself. What it says."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # not of the tests' cluster
    places = {"TMPDIR": str(path), "RAY_TMPDIR": "/tmp"}  # a socket's path must be short
    command = [sys.executable, str(JOBS / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=mine | places, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("train_lm", ["--stages", "2", "--steps", "8"]), ("train_vit", ["--stages", "3", "--steps", "8", "--images", "images"])],
    ids=["gpt", "vit-dali"],
)
def test_whichever_stage_a_job_loses_it_ends_with_the_same_bits(name: str, arguments: list[str], tmp_path: Path) -> None:
    stages = int(arguments[1])
    where = [str(tmp_path / "images") if one == "images" else one for one in arguments]
    states = []
    for lost in (0, stages - 1):
        job(name, [*where, "--lose-stage", str(lost), "--storage-path", str(tmp_path), "--name", f"lost-{lost}"], tmp_path)
        run = tmp_path / f"lost-{lost}"
        assert [r["guarantee"] for r in read_records(run / "events.jsonl") if r["event"] == "Recovery"] == [Guarantee.EXACT]
        found = [read_tensors(run / f"final-stage-{stage}.arrow")[0] for stage in range(stages)]
        states.append({f"{stage}/{name}": tensor for stage, own in enumerate(found) for name, tensor in own.items()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.timeout(400)
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    """As `make demo` runs it."""
    said = job("demo", [], tmp_path)
    assert said.rstrip().endswith("the promise was kept"), said
    assert len(list(tmp_path.glob("raytrain_ft-demo-*/*/events.jsonl"))) == 3
