"""The quickstart does what it says, as a script of its own, with a cluster of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def test_the_quickstart_loses_a_node_and_no_bit(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "quickstart.py"
    path.write_text(script)
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # not of the tests' cluster
    places = {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}  # a socket's path must be short
    command, environment = [sys.executable, str(path)], mine | places
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    lost, same, records = done.stdout.splitlines()[-3:]
    assert re.fullmatch(r"lost w\d+; back after \d+\.\d\d s; kept: exact", lost)
    assert same == "the same bits"
    assert (Path(records.removeprefix("records: ")) / "report.html").exists()
