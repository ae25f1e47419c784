"""`raytrain_ft.checkfreq` and `raytrain-ft checkpoints` on an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from test_s3 import server, uri  # noqa: F401 - a fixture
from torch import nn
from torch.utils.data import TensorDataset

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.cli.main import main
from raytrain_ft.errors import StorageError


def train(place: str, until: int) -> tuple[int, nn.Module]:
    """Returns the step at which this launch began, and the model."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = checkfreq.Loader(TensorDataset(torch.ones(8, 4)), global_batch_size=4)
    with checkfreq.open(place, every=2, model=model, optimizer=optimizer, loader=loader) as run:
        begun = run.step
        for (batch,) in run.batches(loader, until_step=until):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    return begun, model


def test_a_run_on_an_object_store(server: int, tmp_path: Path) -> None:  # noqa: F811
    place = uri(server, "digits")
    assert train(place, 5)[0] == 0
    begun, model = train(place, 7)
    assert begun == 5
    runner = CliRunner(env={"COLUMNS": "200"})
    listed = runner.invoke(main, ["checkpoints", "list", place, "--verify"])
    assert "step-000000007-e2-i1" in listed.output
    assert "ok" in listed.output
    file = tmp_path / "model.safetensors"
    assert runner.invoke(main, ["checkpoints", "export", place, str(file)]).exit_code == 0
    assert torch.equal(load_file(file)["weight"], model.weight)


def test_a_bucket_that_is_not_there(server: int) -> None:  # noqa: F811
    with pytest.raises(StorageError):
        train(uri(server, "digits", bucket="elsewhere"), 1)
