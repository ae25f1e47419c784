"""Snapshots in memory, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytrain_ft.runtime import holder
from raytrain_ft.storage.manifest import Name


def test_a_snapshot_may_take_as_long_as_an_exchange_of_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = ["w", "torch.uint8", [4], 0, 4]
    asked: list[float] = []

    def get(what: Any, timeout: float) -> Any:
        asked.append(timeout)
        return [np.zeros(4, np.uint8)] if isinstance(what, list) else what

    answer = {"values": {}, "size": 4}, [([piece], "reference")]
    actor = SimpleNamespace(get=SimpleNamespace(remote=lambda name: answer))
    monkeypatch.setattr(holder, "holder_of", lambda spec: actor)
    monkeypatch.setattr(holder, "ray", SimpleNamespace(get=get))
    spec: Any = SimpleNamespace(rules=SimpleNamespace(phase_timeout=900.0))
    assert list(holder.load(spec, Name(5, 0, 1)).pieces) == ["w"]
    assert asked[-1] == 900.0
