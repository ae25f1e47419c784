"""Which checkpoints a run begins from, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from store import save

from raytrain_ft.places import Place
from raytrain_ft.runtime.library import Library


def launched(directory: Path, resume: str, run_id: str, step: int | None = None) -> list[int]:
    """The steps that a launch may begin from; before it ends, or is lost, it stores one."""
    place = Place(str(directory))
    checkpoints = SimpleNamespace(place=place, resume=resume)
    spec: Any = SimpleNamespace(checkpoints=checkpoints, run_id=run_id, rules=SimpleNamespace(strategy="auto"))
    library = Library(spec)

    async def live() -> list[int]:
        found = await library.open()
        if step is not None:
            about = {"owner": run_id, "epoch": library.epoch, "values": {"records": []}}
            await asyncio.to_thread(save, place, step, {"w": torch.zeros(3)}, **about)
        await library.close()
        return [stored.step for stored in found]

    return asyncio.run(live())


def test_what_was_abandoned_does_not_come_back(tmp_path: Path) -> None:
    """Not in the launch after the one that was told so, either, though that one may have stored nothing."""
    assert launched(tmp_path, "auto", "a", step=1000) == []
    assert launched(tmp_path, "auto", "b") == [1000]
    assert launched(tmp_path, "never", "c") == []
    assert launched(tmp_path, "auto", "d", step=5) == []
    assert launched(tmp_path, "auto", "e") == [5]
