"""Commands that write files: a place that cannot be written is told in a line, before anything is worked out if that can be."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import raytrain_ft
from raytrain_ft.cli import output, records, simulate, study
from raytrain_ft.cli.main import main

RUN = Path(__file__).parent / "recorded" / "replication"
JOB = {"job": {"steps": 10, "step_s": 1.0, "workers": 2}, "failures": {"kind": "list", "failures": [{"step": 5, "lost": 1}]}}


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # no traceback
    return result.output


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB))
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins to work fails the test."""

    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(simulate, "compare", work)
    monkeypatch.setattr(simulate, "calibrate", work)
    monkeypatch.setattr(study, "run", work)
    monkeypatch.setattr(records.reports, "write", work)
    monkeypatch.setattr(records.timelines, "write", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("option", ["--json", "--plots"])
def test_a_place_that_cannot_be_is_refused_before_the_work(option: str, job: Path) -> None:
    place = job / "beside" / "out"  # a file is no directory
    for command in (["simulate", job], ["simulate", "--from-run", RUN], ["study"]):
        told = refused(*command, option, place)
        assert told.startswith(f"Error: {place} cannot be written: Not a directory; use a place with room where you may write")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_run_on_a_read_only_disk_gets_no_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    (tmp_path / "events.jsonl").write_text("")
    monkeypatch.setattr(output, "TemporaryFile", read_only)
    assert refused(command, tmp_path).startswith(f"Error: {tmp_path} cannot be written: Read-only file system; use a place")


def test_a_disk_that_fills_up_meanwhile_is_told(job: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full: not Linux")
    assert "Error: /dev/full cannot be written: No space left on device" in refused("simulate", job, "--json", full)


def test_what_turns_out_to_be_in_the_way_is_told(job: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    for name in ("report.html", "timeline.json", "losses.png"):
        (tmp_path / name).mkdir()
    for command in (["report", tmp_path], ["timeline", tmp_path], ["simulate", job, "--plots", tmp_path]):
        assert f"Error: {tmp_path} cannot be written: Is a directory" in refused(*command)
    assert f"Error: {job / 'out'} cannot be written: Not a directory" in refused("dashboard", "--out", job / "out")


def test_trying_makes_nothing_and_touches_nothing(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("as it was")
    output.try_out(None, there, tmp_path / "new.json", tmp_path / "new" / "plots", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.json", "as it was")]
    output.write(tmp_path / "new" / "out.json", "{}")
    assert (tmp_path / "new" / "out.json").read_text() == "{}\n"


def test_the_version_is_told_where_the_package_is_not_installed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the nodes of a cluster, to which a job's directory is uploaded."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    result = CliRunner().invoke(main, ["--version"], prog_name="raytrain-ft")
    assert (result.exit_code, result.output) == (0, f"raytrain-ft, version {raytrain_ft.__version__}\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == raytrain_ft.__version__


DIRECTORY = f"/mnt/shared/{'runs-of-a-team/' * 8}digits"
RUN_ALIVE = {
    "name": "a-name-of-a-run-that-is-long",
    "state": "RUNNING",
    "step": 1234,
    "max_steps": 10_000,
    "unfollowed_s": 3.0,
    "world_size": 16,
    "directory": DIRECTORY,
}


def listed(monkeypatch: pytest.MonkeyPatch, **terminal: str) -> list[str]:
    """The lines of `raytrain-ft list` with 80 columns."""
    monkeypatch.setattr("raytrain_ft.attaching.alive", lambda: [RUN_ALIVE])
    found = CliRunner().invoke(main, ["list"], env={"COLUMNS": "80", **terminal})
    assert found.exit_code == 0, found.output
    assert "…" not in found.output
    return found.output.splitlines()


def test_without_a_terminal_each_row_is_a_line_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies a path from a job's log needs all of it, and `grep` finds a line."""
    (row,) = [line for line in listed(monkeypatch) if line.startswith("│")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [RUN_ALIVE["name"], "running", "1,234 of 10,000", "16", "3 s ago", DIRECTORY]


def test_on_a_terminal_a_table_is_folded_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = listed(monkeypatch, FORCE_COLOR="1", TERM="dumb")
    assert max(map(len, lines)) <= 80
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    folded = ["".join(cells).replace(" ", "") for cells in zip(*rows, strict=True)]
    assert folded == [RUN_ALIVE["name"], "running", "1,234of10,000", "16", "3sago", DIRECTORY]
