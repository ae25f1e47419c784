"""What a person sees of a run."""

from __future__ import annotations

import pytest

from raytrain_ft.progress import Display


def test_a_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    account = {"name": "run", "state": "RUNNING", "world_size": 3, "loss": None, "step": 4, "seconds": 1.0, "recoveries": []}
    with Display("run", 20) as display:
        for warnings in ([], ["w0 cannot log"], ["w0 cannot log"], ["w0 cannot log", "nor can w1"]):
            display.show(account | {"warnings": warnings})
    shown = capsys.readouterr().out
    assert shown.count("[run] w0 cannot log\n") == 1
    assert shown.count("[run] nor can w1\n") == 1
