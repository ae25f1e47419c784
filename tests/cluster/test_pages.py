"""Code blocks of the pages that start something do what they say: on the cluster of the tests, or as a script of their own.

What a block takes for granted is there (`page_names.py`). Numbers and places in it become what a test can have (`smaller`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import page_names
import pytest
from conftest import train
from pages import Block, blocks
from toy import Leisurely

import raytrain_ft as ft
from raytrain_ft.chaos import network
from raytrain_ft.runtime.event_log import read_records

pytestmark = [pytest.mark.long, pytest.mark.example]

SAYS = {"docs/quickstart.md": r"lost w\d+; back after \d+\.\d\d s; kept: exact\nthe same bits\nrecords: /"}
"""What a script prints at its end."""
SMALLER = {
    "10_000": "12",
    "max_steps=150": "max_steps=30",
    "step=75": "step=15",
    '{"CPU": 4}': '{"CPU": 1}',
    "PythonLM(ft.TrainTask)": "PythonLM(Text)",  # of which the page leaves out all but the layers
}
NOT_BEFORE = ("docs/checkpoints.md", "docs/metrics.md", "docs/submit.md")
"""Pages whose block is about a run that has ended."""
STEERING = "docs/choose-a-strategy.md"
ON_CLUSTER = {block.page: block for block in blocks("on a cluster")}
STARTING = [block for block in blocks("on a cluster") if block.page not in (*NOT_BEFORE, STEERING)]


@pytest.mark.parametrize("block", blocks("as a script"), ids=lambda block: block.name)
def test_a_script(block: Block, tmp_path: Path) -> None:
    if "HostCluster" in block.code and (why := network.why_unavailable()):
        pytest.skip(f"several hosts: {why}")
    script = tmp_path / "script.py"
    script.write_text(f"from page_names import *\n\n{block.code}")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # not of the tests' cluster
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}  # a socket's path must be short
    command, environment = [sys.executable, str(script)], mine | places
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SAYS.get(block.page, ""), done.stdout), done.stdout


def run(block: Block, runs: Path, **smaller: str) -> dict[str, Any]:
    """The names that the block leaves behind; `runs` stands for the pages' directory of runs."""
    code = block.code
    for told, instead in {"/mnt/shared/runs": str(runs), **SMALLER, **smaller}.items():
        code = code.replace(told, instead)
    names: dict[str, Any] = {"__name__": "a_page", **{name: getattr(page_names, name) for name in page_names.__all__}}
    exec(compile(code, block.name, "exec"), names)
    return names


@pytest.mark.parametrize("block", STARTING, ids=lambda block: block.name)
def test_what_starts_a_run(block: Block, cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run(block, tmp_path).get("result")
    assert found is None or found.metrics["step"] == 12


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    """A run that has ended."""
    runs, every = tmp_path_factory.mktemp("runs"), ft.CheckpointConfig(every=5)
    return train(runs, "digits", task=page_names.task, workers=2, steps=10, checkpoints=every)


@pytest.mark.parametrize("page", NOT_BEFORE)
def test_what_is_told_of_a_run_that_has_ended(page: str, ended: ft.Result) -> None:
    (told,) = re.findall(r"step-\d+-e\d+-i\d+", ON_CLUSTER[page].code) or ["none"]
    names = run(ON_CLUSTER[page], Path(ended.path).parent, **{told: Path(str(ended.checkpoint)).name})
    expected = ft.load_model(page_names.task, ended).state_dict()
    if "result" in names:
        assert names["result"].digest == ended.digest
        return
    model = names["model"] if "model" in names else names["FineTune"]().model(0)
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())


@pytest.fixture
def records(cluster, tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Those of a run named "digits" that is under way for as long as it is needed."""
    pace, log = tmp_path / "pace", tmp_path / "digits" / "events.jsonl"
    pace.touch()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(train, tmp_path, "digits", task=Leisurely(pace), workers=2, steps=200, num_spares=1)
        yield lambda: read_records(log) if log.exists() else []
        pace.unlink()
        future.result(timeout=60)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.1)


def test_how_a_run_is_steered(records: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> None:
    until(lambda: any(record["event"] == "StepsCommitted" for record in records()))
    run(ON_CLUSTER[STEERING], tmp_path)
    until(lambda: any(record["event"] == "Recovery" for record in records()))
    (change,) = [record for record in records() if record["event"] == "Recovery"]
    assert (len(change["left"]), change["lost"], change["world_after"]) == (1, [], 2)
