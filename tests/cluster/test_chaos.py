"""`make chaos`, small: real kills of real processes, on a cluster of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_ft.policy.history import check
from raytrain_ft.runtime.event_log import read_records

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
KILLS = 8


def test_a_campaign_kills_and_finds_no_violation(tmp_path: Path) -> None:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # not of the tests' cluster
    places = {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}  # a socket's path must be short
    command = [sys.executable, "-m", "raytrain_ft.campaign", "--kills", str(KILLS), "--mtbf", "1.5", "--steps", "200"]
    done = subprocess.run(command, env=mine | places, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\d+) kills \(.*\) in (\d+) runs?; 0 violations$", done.stdout, re.MULTILINE)
    assert told is not None, done.stdout
    assert int(told[1]) == KILLS
    assert done.stdout.count(", bit-equal, ") == int(told[2])
    (storage,) = tmp_path.glob("raytrain_ft-campaign-*")
    runs = {path.name: read_records(path / "events.jsonl") for path in storage.glob("run-*")}
    assert len(runs) == int(told[2])
    assert all(check(records) == [] for records in runs.values())
    assert any(record["event"] == "Recovery" for records in runs.values() for record in records)
