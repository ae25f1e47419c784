"""What a replacement is filled with arrives changed: a bit that no hash of the network has seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import promise_kept, train
from toy import Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.strategy import Guarantee
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.training.state import HEADER_LENGTH_BYTES, TrainingState


class Damaged(Toy):
    """In the first bucket that any worker receives, one bit of the first number is another. Only who is filled receives any."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes
        self.driver = os.getpid()

    def model(self, stage: int):
        if os.getpid() != self.driver:  # where the model is built as well, to look at it
            damage_once(self.notes / "damaged")
        return super().model(stage)


def damage_once(note: Path) -> None:
    unpack = TrainingState.unpack

    def damaged(state: TrainingState, bucket, packed: torch.Tensor) -> None:
        try:
            with note.open("x") as file:
                file.write(str(bucket.index))
        except FileExistsError:
            return unpack(state, bucket, packed)
        start = HEADER_LENGTH_BYTES + int.from_bytes(bytes(packed[:HEADER_LENGTH_BYTES].tolist()), "little")
        packed[start + 2] ^= 0x40
        return unpack(state, bucket, packed)

    TrainingState.unpack = damaged


@pytest.mark.parametrize(
    ("rank", "how"), [pytest.param(1, {}, marks=pytest.mark.long), (0, {"workers": 2})], ids=["of three", "of two"]
)
def test_what_arrives_changed_is_sent_again(rank: int, how: dict[str, Any], undisturbed, tmp_path: Path) -> None:
    """Also where the replacement has the lower rank of two: it is no matter of majorities who is right."""
    task, fault = Damaged(tmp_path), FailAt(rank=rank, step=10, phase="forward")
    result = train(tmp_path, "run", task=task, faults=[fault], **how)
    assert result.digest == undisturbed(**how).digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert "differs between replicas after filling" in recovery.cause
    assert len(recovery.lost) == 1
    assert (recovery.guarantee, recovery.repaired) == (Guarantee.EXACT, 0), "survivors did not differ"
    filled = [r for r in read_records(Path(result.path) / "events.jsonl") if r["event"] == "Filled"]
    bucket = int((tmp_path / "damaged").read_text())
    versions = [
        {r["digests"][bucket] for r in filled if r["incarnation"] == i} for i in sorted({r["incarnation"] for r in filled})
    ]
    assert (len(versions[0]), len(versions[-1])) == (2, 1), "of this bucket; and it was seen before anybody trained"
    assert versions[-1] < versions[0]
    assert len({(*r["digests"][:bucket], *r["digests"][bucket + 1 :]) for r in filled}) == 1, "of the others"
