"""Replicas on a GPU, which sum over NCCL: the same promises. One GPU is enough; the replicas share it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import promise_kept, train
from torch import nn
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.chaos import FailAt
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.storage.arrow import read_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")

ON_GPU: dict[str, Any] = {
    "use_gpu": True,
    "worker_runtime_env": {"env_vars": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}},
}
STEP = 15


class OnOneGpu(Toy):
    """NCCL takes no two ranks of one host on one GPU, and believes what it is told of hosts."""

    def model(self, stage: int) -> nn.Module:
        os.environ["NCCL_HOSTID"] = f"host-{os.getpid()}"
        return super().model(stage)


def expected_of(undisturbed: Any, **arguments: Any) -> ft.Result:
    result = undisturbed(task=OnOneGpu(), **ON_GPU, **arguments)
    assert result.metrics["loss"] < 0.6, "it learns"
    return result


@pytest.mark.parametrize(
    "fault",
    [
        FailAt(rank=1, step=STEP, phase="backward", bucket=1),
        FailAt(rank=1, step=STEP, phase="update"),
        FailAt(rank=0, step=STEP, phase="update", action="sigkill_node"),
        FailAt(rank=2, step=STEP, phase="update", action="sigstop"),
    ],
    ids=lambda fault: f"{fault.phase}-{fault.action}",
)
def test_a_replica_on_a_gpu_is_lost(undisturbed, tmp_path: Path, fault: FailAt) -> None:
    result = train(tmp_path, "hurt", task=OnOneGpu(), faults=[fault], **ON_GPU)
    (recovery,) = result.recoveries
    assert promise_kept(result) == []
    assert (recovery.strategy, recovery.guarantee) == (Strategy.REPLICATION, Guarantee.EXACT)
    assert result.digest == expected_of(undisturbed).digest


def test_an_update_on_a_gpu_is_undone(undisturbed, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=STEP, phase="backward", bucket=1)
    task = OnOneGpu(backward_seconds=0.3)
    result = train(tmp_path, "undo", task=task, update="wait_free", faults=[fault], **ON_GPU)
    (recovery,) = result.recoveries
    assert promise_kept(result) == []
    assert recovery.undone > 0
    ours, theirs = (read_tensors(one.final_state)[0] for one in (result, expected_of(undisturbed, update="wait_free")))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_all_replicas_on_a_gpu_are_lost(undisturbed, tmp_path: Path) -> None:
    faults = [FailAt(rank=rank, step=STEP, phase="update") for rank in range(3)]
    checkpoints = ft.CheckpointConfig(every=5)
    result = train(tmp_path, "all", task=OnOneGpu(), checkpoints=checkpoints, faults=faults, **ON_GPU)
    assert {recovery.strategy for recovery in result.recoveries} == {Strategy.CHECKPOINT}
    assert promise_kept(result) == []
    assert result.digest == expected_of(undisturbed).digest
