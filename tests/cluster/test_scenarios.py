"""The scenarios in jobs/scenarios as a person plays them: from the command line, each on a laptop cluster of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_ft.chaos import network

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PLACE = Path(__file__).parents[2] / "jobs" / "scenarios"
SCENARIOS = sorted(path for path in PLACE.iterdir() if path.suffix in (".yaml", ".py"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_is_played_and_passes(scenario: Path, tmp_path: Path) -> None:
    if scenario.stem == "unplug" and (why := network.why_unavailable()):
        pytest.skip(f"several hosts: {why}")
    command = [sys.executable, "-m", "raytrain_ft.cli", "drill", str(scenario), "--storage-path", str(tmp_path), "--quiet"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(tmp_path.glob("**/drill.json")).read_text())
    assert found["passed"] is True
    assert (found["missed"], found["violations"]) == ([], [])
    assert found["strikes"]
    if "assumed:" in scenario.read_text():  # the same file on other ground, which is asked for its report alone
        done = subprocess.run([*command[:5], "--on", "simulator"], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
