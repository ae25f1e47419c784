"""The simulations, studies and scenarios in jobs/ are opened as their commands open them, so that none is left behind when what
they describe changes. `tests/cluster/test_scenarios.py` plays the scenarios."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_ft.cli import simulation_file
from raytrain_ft.cli.main import main
from raytrain_ft.cli.study_file import load_plan, quick
from raytrain_ft.drill.predict import known_job, rehearse
from raytrain_ft.errors import ScenarioError
from raytrain_ft.scenario import Scenario

ROOT = Path(__file__).parents[2]
SIMULATIONS, STUDIES, SCENARIOS = (
    sorted(path for path in (ROOT / "jobs" / kind).iterdir() if path.suffix in (".yaml", ".py"))
    for kind in ("simulations", "studies", "scenarios")
)
RECORDED = Path(__file__).parent / "recorded" / "replication"


def test_every_file_is_opened_by_a_test_or_named_in_one_that_is() -> None:
    """Without this, a folder that was renamed would be one without files, and all tests of its files passed."""
    opened = {*SIMULATIONS, *STUDIES, *SCENARIOS}
    assert all((SIMULATIONS, STUDIES, SCENARIOS))
    words = {word for path in opened for word in re.findall(r"[\w.]+", path.read_text())}
    files = {path for kind in ("simulations", "studies", "scenarios") for path in (ROOT / "jobs" / kind).rglob("*.*")}
    compiled = {path for path in files if "__pycache__" in path.parts}
    assert {path.name for path in files - opened - compiled} <= words


@pytest.mark.parametrize("path", SIMULATIONS, ids=lambda path: path.stem)
def test_a_simulation_is_simulated(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = CliRunner().invoke(main, ["simulate", str(path), "--seeds", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    asked = simulation_file.load(path)
    found = json.loads(out.read_text())["strategies"]
    assert [one["strategy"] for one in found] == [strategy.name for strategy in asked.strategies]
    assert [one["finished"] for one in found] == [1] * len(found), "every strategy comes to the end"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_can_be_carried_out(path: Path) -> None:
    plan = load_plan(path)
    assert plan.count > quick(plan).count > 0


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_simulator_refuses_the_scenarios_that_the_page_says(path: Path) -> None:
    text = " ".join((ROOT / "docs" / "drills.md").read_text().split())
    listed = re.search(r"Of the examples, it refuses only ((?:`[\w.]+`(?:, | and )?)+)", text)
    assert listed is not None
    scenario, known = Scenario.load(path), known_job(RECORDED)
    if path.name in re.findall(r"`([\w.]+)`", listed[1]):
        with pytest.raises(ScenarioError):
            rehearse(scenario, known)
    else:
        assert rehearse(scenario, known).recoveries
