"""Somebody who has nothing but docs/checkpoints.md reads an optimizer out of a checkpoint: no code of ours, but to write it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from store import own, save
from torch import nn

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.policy.sampling import Position
from raytrain_ft.storage.filesystem import LocalStorage
from raytrain_ft.training import durable
from raytrain_ft.training.state import TrainingState

BLOCK = 4 * 2**20
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def read(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors, as arrays, and the values of a checkpoint."""
    content = (directory / "manifest.json").read_bytes()
    manifest = json.loads(content)
    assert manifest["format"] == "raytrain_ft-checkpoint-1"
    head = f'{{"format":"raytrain_ft-checkpoint-1","hash":"{manifest["hash"]}",'.encode()
    assert content.startswith(head)
    assert xxhash.xxh3_128_hexdigest(content[len(head) :]) == manifest["hash"]
    pieces: dict[str, list[dict[str, Any]]] = {}
    count = len(manifest["shards"])
    for number, shard in enumerate(manifest["shards"]):
        data = (directory / f"shard-{number:05d}-of-{count:05d}.arrow").read_bytes()
        assert len(data) == shard["size"]
        assert [xxhash.xxh3_64_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)] == shard["blocks"]
        reader = pa.ipc.open_file(data)
        assert reader.schema.metadata == {b"format": b"raytrain_ft-shard-1"}
        for row in reader.read_all().to_pylist():
            pieces.setdefault(row["name"], []).append(row)
    arrays = {}
    for name, rows in pieces.items():
        rows.sort(key=lambda row: row["start"])
        whole = b"".join(row["data"] for row in rows)
        arrays[name] = np.frombuffer(whole, rows[0]["dtype"].removeprefix("torch.")).reshape(rows[0]["shape"])
    return arrays, manifest["values"]


def together(skeleton: Any, tensor: Callable[[str], np.ndarray]) -> Any:
    """What a skeleton stands for; of the kinds that an optimizer has."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    match kind:
        case "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        case "tensor":
            return tensor(value)
        case "dict":
            return {together(key, tensor): together(one, tensor) for key, one in value}
        case "list":
            return [together(one, tensor) for one in value]
        case "tuple":
            return tuple(together(one, tensor) for one in value)
    raise AssertionError(f"{kind} is unexpected here")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(300, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("told", ["float", "tensor", "dict", "list", "tuple"])
def test_the_page_has_what_is_read_here(told: str) -> None:
    assert f'{{"{told}": ' in PAGE or f"`{told}`" in PAGE


def test_an_optimizer_is_read_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = TrainingState(model, optimizer, None, bucket_bytes=10_000, first_bucket_bytes=5000)
    state.step, state.position = 1, Position(0, 8)
    storage = LocalStorage(tmp_path)
    own(storage)
    tensors, values = durable.capture(state, {"dataset_size": 100}, [])
    save(storage.uri, 1, dict(tensors), 2, values=values)
    (directory,) = tmp_path.glob("step-*")
    arrays, found = read(directory)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert np.array_equal(arrays[f"optimizer/{name}/{key}"], value.numpy())
    settings = together(found["settings"], arrays.__getitem__)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert settings == {"groups": groups, "scheduler": None}
    assert found["params"] == [["weight", "bias"]]
    assert found["position"] == [0, 8]
    assert (found["optimizer"], found["scheduler"]) == ("AdamW", None)


def test_an_optimizer_is_read_from_a_checkpoint_of_checkfreq(tmp_path: Path) -> None:
    model, optimizer = trained()
    with checkfreq.open(tmp_path, every=1, model=model, optimizer=optimizer):
        optimizer.step()
    (directory,) = tmp_path.glob("checkpoints/step-*")
    arrays, found = read(directory)
    assert found["kind"] == "raytrain_ft.checkfreq-1"
    skeletons = json.loads(arrays["rank-0/skeletons"].tobytes())
    state = together(skeletons["optimizer"], lambda path: arrays[f"rank-0/{path}" if f"rank-0/{path}" in arrays else path])
    real = optimizer.state_dict()
    assert state["param_groups"] == real["param_groups"]
    for number, values in real["state"].items():
        for key, value in values.items():
            assert np.array_equal(state["state"][number][key], value.numpy())
            assert np.array_equal(arrays[f"optimizer/state/{number}/{key}"], value.numpy())
