"""Runs whose checkpoints are objects in S3: everybody is lost, or the run ends, and the next goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import LEFT_S, left, promise_kept, train, until
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records, read_run

pytest.importorskip("moto.server")
from s3_server import s3_server, uri


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.mark.long
def test_a_run_is_continued_from_s3_and_loses_everybody(undisturbed, port: int, tmp_path: Path) -> None:
    """In its first part a worker is killed while it writes to S3. All are lost in the second, which has at least the checkpoint
    that ended the first to go back to: how far S3 has come with a later one, nobody knows."""
    checkpoints = ft.CheckpointConfig(every=5, storage_path=uri(port, "all"))
    faults = [ft.FailAt(rank=0, step=10, phase="checkpoint")]
    first = train(tmp_path, "run", steps=12, faults=faults, checkpoints=checkpoints)
    assert promise_kept(first) == []
    assert [recovery.strategy for recovery in first.recoveries] == [Strategy.REPLICATION]
    everybody = [ft.FailAt(rank=rank, step=18, phase="reduced", together=3) for rank in range(3)]
    result = train(tmp_path, "run", faults=everybody, checkpoints=checkpoints)
    assert result.digest == undisturbed().digest
    assert until(lambda: not left(), LEFT_S)
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)
    back = [recovery.step for recovery in result.recoveries if recovery.strategy == Strategy.CHECKPOINT]
    assert back
    assert 12 <= back[-1] <= 18
    records = read_records(Path(result.path) / "events.jsonl")
    assert next(record["step"] for record in records if record["event"] == "Resumed") == 12
    assert audit(read_run(Path(result.path))).ok
    assert not (Path(result.path) / "checkpoints").exists(), "they are where they were asked for"
    stored, final = (ft.load_model(Toy(), place).state_dict() for place in (result.checkpoint, result))
    assert all(torch.equal(stored[name], final[name]) for name in final)
