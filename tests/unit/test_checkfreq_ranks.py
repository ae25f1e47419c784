"""`raytrain_ft.checkfreq` on two ranks of gloo that do not hold the same: refused on both, before anything of it is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.errors import ConfigError
from raytrain_ft.training.objects import digests

RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.errors import ConfigError

rank, directory, what, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
torch.manual_seed(0)
whole = nn.Linear(4, 2)
torch.manual_seed(rank)
model = nn.Linear(4, 2)  # half of a layer that is cut by hand: of one shape on both
if what == "FSDP":
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
if what == "replicas":
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
loader = checkfreq.Loader(TensorDataset(torch.ones(20, 4)), global_batch_size=4)
objects = {"model": whole if what == "optimizer" else model, "optimizer": optimizer, "loader": loader}
try:
    with checkfreq.open(f"{directory}/run", every=2, timeout=timedelta(seconds=60), **objects) as run:
        for (inputs,) in run.batches(loader, until_step=steps):
            model(inputs).square().sum().backward()
            optimizer.step()
    print("stored", run.step)
except ConfigError as error:
    print(error)
dist.destroy_process_group()
"""


def said(program: str, directory: Path, *arguments: object) -> list[str]:
    """What each of two ranks had to say at its end."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(directory), *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    return found


@pytest.mark.parametrize(
    ("what", "steps", "first"),
    [("by hand", 5, "model/bias"), ("by hand", 1, "model/bias"), ("optimizer", 5, "optimizer/state/0/exp_avg")],
)
def test_what_is_cut_into_pieces_of_one_shape_is_refused_on_all_ranks(
    tmp_path: Path, what: str, steps: int, first: str
) -> None:
    """Also where the first step is the last."""
    for rank, message in enumerate(said(RANK, tmp_path, what, steps)):
        assert message.startswith("" if rank else "rank 1: ")
        assert f"{first} is not the same here as on rank 0 after the first step" in message
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_fsdp_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for message in said(RANK, tmp_path, "FSDP", 5):
        assert "model=FullyShardedDataParallel" in message
        assert "use DistributedDataParallel instead" in message
    assert not (tmp_path / "run").exists()


def test_replicas_are_compared_once_and_stored(tmp_path: Path) -> None:
    assert said(RANK, tmp_path, "replicas", 5) == ["stored 5\n"] * 2
    assert {name.name[:14] for name in tmp_path.glob("run/checkpoints/step-*")} == {"step-000000004", "step-000000005"}


COUNTING = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
import raytrain_ft.checkfreq as checkfreq

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("counted", torch.zeros(1), persistent=False)
    def forward(self, inputs):
        self.counted += rank + 1
        return self.layer(inputs)

rank, directory, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous{steps}", rank=rank, world_size=2)
model = nn.parallel.DistributedDataParallel(Counting(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = checkfreq.Loader(TensorDataset(torch.ones(20, 4)), global_batch_size=4)
objects = {"model": model, "optimizer": optimizer, "loader": loader}
with checkfreq.open(f"{directory}/run", every=2, timeout=timedelta(seconds=60), **objects) as run:
    for (inputs,) in run.batches(loader, until_step=steps):
        model(inputs).square().sum().backward()
        optimizer.step()
print(int(model.module.counted))
dist.destroy_process_group()
"""


def test_each_rank_has_its_own_buffers_back(tmp_path: Path) -> None:
    """Also those that the state dict leaves out."""
    assert said(COUNTING, tmp_path, 3) == ["3\n", "6\n"]
    assert said(COUNTING, tmp_path, 5) == ["5\n", "10\n"]


def test_a_module_with_fsdp_somewhere_in_it_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Module):
        """As torch and fairscale call theirs."""

    class Mine(FullyShardedDataParallel):
        pass

    with pytest.raises(ConfigError, match=r"model=Sequential\): there is a FullyShardedDataParallel in it"):
        checkfreq.open(tmp_path, model=nn.Sequential(nn.Linear(2, 2), nn.Sequential(Mine())))


def test_digests_tell_bits_shapes_and_dtypes_apart() -> None:
    zeros = torch.zeros(4)
    others = {"shape": zeros.reshape(2, 2), "dtype": zeros.int(), "bits": -zeros, "size": torch.zeros(0)}
    assert digests({"one": zeros, "other": torch.zeros(8)[::2]})["one"] == digests({"other": torch.zeros(8)[::2]})["other"]
    assert len(set(digests(others | {"zeros": zeros}).values())) == 5
    with pytest.raises(ConfigError, match=r"edges is a torch\.sparse_coo tensor"):
        digests({"edges": torch.eye(3).to_sparse()})


LATE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from raytrain_ft.errors import StorageError
from raytrain_ft.training.ranks import Ranks

rank, directory = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
ranks = Ranks(timedelta(seconds=2))
time.sleep(5 if rank == 0 else 0)
print(ranks.meet(["due", 7]))
time.sleep(5 if rank == 0 else 0)
try:
    print(ranks.first_says("resumed"))
except StorageError as error:
    print("within", error)
ranks.leave()  # as `checkfreq.open` does in any case
"""


def test_a_rank_that_evaluates_is_waited_for_between_steps(tmp_path: Path) -> None:
    """As DDP waits for it. At the beginning nobody waits that long for who is not there."""
    found = said(LATE, tmp_path)
    assert all(told.startswith("['due', 7]") for told in found), found
    assert "within rank 1 of 2: the others could not be reached within 0:00:02" in found[1]


HUNG = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.storage.persister import Persister
from raytrain_ft.training import checkpointer

rank, directory = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
submit, stopped = Persister.submit, []

def stopping(self, job):
    if job.step == 4 and rank == 0:
        checkpointer.PATIENCE_S = 0.1
        stopped.append(self.pid)
        os.kill(self.pid, signal.SIGSTOP)
    return submit(self, job)

Persister.submit = stopping
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
with checkfreq.open(f"{directory}/run", every=2, timeout=timedelta(seconds=60), model=model, optimizer=optimizer) as run:
    for _ in range(13):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
        time.sleep(0.1)
    dist.barrier()
    time.sleep(1.0)
    print(*sorted(name[:14] for name in os.listdir(f"{directory}/run/checkpoints") if name.startswith("step")))
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    dist.barrier()  # who is done sooner begins the last checkpoint, which the other is not to see
dist.destroy_process_group()
"""


def test_of_a_checkpoint_that_rank_0_leaves_out_nobody_writes_anything(tmp_path: Path) -> None:
    """Its storage hangs, and that of others, which is the same one, would fill up meanwhile."""
    first, _ = said(HUNG, tmp_path)
    assert first == "step-000000002 step-000000004\n"
