"""`raytrain-ft checkpoints`: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from click.testing import CliRunner, Result
from disks import small_file_system
from safetensors import safe_open
from safetensors.torch import load_file
from store import own, save
from torch import nn
from torch.utils.data import TensorDataset

import raytrain_ft.checkfreq as checkfreq
from raytrain_ft.cli import checkpoints as cli_checkpoints
from raytrain_ft.cli.main import main
from raytrain_ft.errors import UnreachableError
from raytrain_ft.result import load_model
from raytrain_ft.storage import checkpoint, filesystem, retention, selection
from raytrain_ft.storage.filesystem import LocalStorage, open_storage
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.storage.shard import Piece, encode
from raytrain_ft.training import durable
from raytrain_ft.training.state import TrainingState


def call(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["checkpoints", *map(str, arguments)])


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a narrow table words are on several lines."""
    monkeypatch.setattr(cli_checkpoints.console, "width", 200)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A run with checkpoints of steps 2 and 3."""
    directory = tmp_path_factory.mktemp("runs") / "digits"
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    loader = checkfreq.Loader(TensorDataset(torch.randn(8, 4)), global_batch_size=4)
    with checkfreq.open(directory, every=1, model=model, optimizer=optimizer, loader=loader) as run:
        for (batch,) in run.batches(loader, until_step=3):
            model(batch).sum().backward()
            optimizer.step()
    return directory, model, optimizer


@pytest.fixture
def run_directory(trained: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    for path in trained[0].rglob("*"):
        if path.is_file():
            copy = tmp_path / "run" / path.relative_to(trained[0])
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return tmp_path / "run"


def damage(directory: Path, step: int) -> str:
    (file,) = directory.glob(f"checkpoints/step-{step:09d}-*/shard-*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return f"{file.parent.name}/{file.name}"


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_list(run_directory: Path, inside: str) -> None:
    (run_directory / "checkpoints" / "step-000000009-e1-i1").mkdir()
    result = call("list", run_directory / inside)
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if "step-" in line]
    assert [line.split()[1] for line in lines] == [f"step-00000000{n}-e1-i1" for n in (9, 3, 2)]
    assert "incomplete" in lines[0]
    assert "KB" in lines[1]
    assert "ok" not in result.output


def test_list_says_which_no_run_goes_on_from(run_directory: Path) -> None:
    storage = open_storage(str(run_directory / "checkpoints"))
    selection.begin_anew(storage, 2)
    lines = [line for line in call("list", run_directory).output.splitlines() if "step-" in line]
    assert ["abandoned" in line for line in lines] == [True, True]
    (run_directory / "checkpoints" / selection.BEGUN_FILE).write_text('{"epoch": 1}')
    assert "abandoned" not in call("list", run_directory).output
    (run_directory / "checkpoints" / selection.BEGUN_FILE).write_text("x")
    assert "begun.json is damaged" in call("list", run_directory).output


def test_list_verifies(run_directory: Path) -> None:
    damage(run_directory, 2)
    lines = [line for line in call("list", run_directory, "--verify").output.splitlines() if "step-" in line]
    assert "ok" in lines[0]
    assert "damaged" in lines[1]


def test_what_retention_deletes_meanwhile_is_not_damaged(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.read

    def late(storage: LocalStorage, manifest: Manifest) -> checkpoint.Content:
        if manifest.step == 2:
            retention.retain(storage, Name(3, 1, 1), 1)
        return read(storage, manifest)

    monkeypatch.setattr(checkpoint, "read", late)
    result = call("verify", run_directory)
    assert result.exit_code == 0
    assert "step-000000002-e1-i1  gone" in result.output


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_nor_is_it_in_a_list(run_directory: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    read = checkpoint.read_manifest

    def late(storage: LocalStorage, name: Name) -> Manifest:
        if name.step == 2:
            storage.delete(str(name))
        return read(storage, name)

    monkeypatch.setattr(checkpoint, "read_manifest", late)
    result = call("list", run_directory, *options)
    assert result.exit_code == 0
    assert "damaged" not in result.output
    assert "gone: it was deleted meanwhile" in result.output


def test_that_a_server_cannot_be_reached_says_nothing_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked where the bucket is before anything else."""

    def away(uri: str) -> Any:
        raise OSError("When resolving region for bucket 'bucket': AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr(filesystem.pafs, "FileSystem", SimpleNamespace(from_uri=away))
    for command in ("verify", "list", "show"):
        result = call(command, "s3://bucket/runs")
        assert result.exit_code == 3
        assert "cannot be reached" in result.output


@pytest.mark.parametrize("what", ["shard", "manifest"])
def test_what_storage_does_not_answer_for_is_not_damaged(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Who is told that it is damaged deletes what may be whole."""
    view = LocalStorage.view

    def fails(self: LocalStorage, name: str) -> Any:
        if name.startswith(f"step-000000002-e1-i1/{what}"):
            raise UnreachableError(f"{name} cannot be read: 503 Slow Down")
        return view(self, name)

    monkeypatch.setattr(LocalStorage, "view", fails)
    monkeypatch.setattr(checkpoint, "READ_S", 0.0)
    result = call("verify", run_directory)
    assert result.exit_code == 3
    assert "DAMAGED" not in result.output
    assert "step-000000002-e1-i1  could not be read: " in result.output
    assert "step-000000003-e1-i1  ok" in result.output
    listed = call("list", run_directory, "--verify").output
    assert "damaged" not in listed
    assert "could not be read" in listed
    assert call("show", run_directory, "--name", "2").exit_code == 3
    damage(run_directory, 3)
    assert call("verify", run_directory).exit_code == 1


def test_what_another_version_wrote_is_not_damaged(run_directory: Path) -> None:
    """It is whole, and that version can read it."""
    file = run_directory / "checkpoints" / "step-000000002-e1-i1" / "manifest.json"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"raytrain_ft-checkpoint-1", b"raytrain_ft-checkpoint-12"))
    result = call("verify", run_directory)
    assert result.exit_code == 3
    assert "DAMAGED" not in result.output
    assert "step-000000002-e1-i1  could not be read: " in result.output
    assert "another version" in result.output
    assert call("show", run_directory, "--name", "2").exit_code == 3
    file.write_bytes(file.read_bytes().replace(b'"step":2', b'"step":3'))
    assert call("verify", run_directory).exit_code == 1, "what says that it is of another version may be damaged, too"


class Tied(nn.Module):
    """One matrix by two names, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(5, 3)
        self.outputs = nn.Linear(3, 5, bias=False)
        self.outputs.weight = self.inputs.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.outputs(self.inputs(ids))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_tied_weights_are_loaded_and_exported_by_all_of_their_names(tmp_path: Path, kind: str) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stored = TrainingState(model, optimizer, None, bucket_bytes=1000, first_bucket_bytes=1000)
    tensors, values = durable.capture(stored, {}, [])
    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    own(storage)
    save(storage.uri, 10, dict(tensors), values=values)
    task = SimpleNamespace(model=lambda stage: Tied())
    found = load_model(task, f"{storage.uri}/step-000000010-e1-i1")
    assert isinstance(found, Tied)
    assert found.outputs.weight is found.inputs.weight
    assert torch.equal(found.inputs.weight, model.inputs.weight)
    file = tmp_path / "model"
    assert call("export", tmp_path / "run", file, "--format", kind).exit_code == 0
    state = load_file(file) if kind == "safetensors" else torch.load(file, weights_only=True)["model"]
    other = Tied()
    other.load_state_dict(state)
    assert torch.equal(other.inputs.weight, model.inputs.weight)


def test_verify_names_the_file(run_directory: Path) -> None:
    assert call("verify", run_directory).exit_code == 0
    file = damage(run_directory, 3)
    result = call("verify", run_directory)
    assert result.exit_code == 1
    assert f"{file} is damaged" in result.output
    assert "step-000000002-e1-i1  ok" in result.output


def test_list_says_how_old_they_are(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("raytrain_ft.cli.checkpoints.time.time", lambda: now + 90 * 60)
    lines = [line for line in call("list", run_directory).output.splitlines() if "step-" in line]
    assert ["1.5 h" in line for line in lines] == [True, True]


def test_show(run_directory: Path, trained: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    result = call("show", run_directory, "--name", "3")
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if "model/0.weight" in line]
    assert "float32" in line
    assert "[3, 4]" in line
    assert "48 B" in line
    assert xxhash.xxh3_64_hexdigest(trained[1].state_dict()["0.weight"].numpy().tobytes()) in line
    assert 'kind: "raytrain_ft.checkfreq-1"' in result.output
    assert call("show", run_directory).output == result.output
    damage(run_directory, 3)
    fallen_back = call("show", run_directory)
    assert "passed over" in fallen_back.output
    assert "step-000000002-e1-i1" in fallen_back.output
    assert call("show", run_directory, "--name", "3").exit_code == 1


def test_export_safetensors(
    run_directory: Path, trained: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    result = call("export", run_directory, file)
    assert result.exit_code == 0, result.output
    tensors = load_file(file)
    expected = trained[1].state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    build().load_state_dict(tensors)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["step"] == "3"
    assert "exists" in call("export", run_directory, file).output
    assert call("export", run_directory, file, "--force", "--optimizer", "--name", "2").exit_code == 0
    assert "optimizer/state/0/exp_avg" in load_file(file)
    assert {path.name for path in tmp_path.iterdir()} == {file.name, run_directory.name}, "nothing half written is left"


def test_export_torch(run_directory: Path, trained: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    assert call("export", run_directory, file, "--format", "torch").exit_code == 0
    state = torch.load(file, weights_only=True)
    model = build()
    assert state["model"]._metadata["1"] == {"version": 2}, "that of BatchNorm's present layout"
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    wanted = trained[2].state_dict()["state"][0]
    assert all(torch.equal(optimizer.state_dict()["state"][0][key], wanted[key]) for key in wanted)


def test_export_of_several_models_says_which_is_written(tmp_path: Path) -> None:
    models = {"discriminator": nn.Linear(2, 1), "generator": nn.Linear(4, 2)}
    with checkfreq.open(tmp_path / "run", **models) as run, run.update():
        pass
    refused = call("export", tmp_path / "run", tmp_path / "x.safetensors")
    assert refused.exit_code == 1
    assert "several models (discriminator, generator)" in refused.output
    assert call("export", tmp_path / "run", tmp_path / "x.pt", "--format", "torch").exit_code == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == models.keys()
    with checkfreq.open(tmp_path / "other", ema=nn.Linear(4, 2), model=models["generator"]) as run, run.update():
        pass
    written = call("export", tmp_path / "other", tmp_path / "x.safetensors")
    assert "model is written; left out: ema" in written.output
    assert torch.equal(load_file(tmp_path / "x.safetensors")["weight"], models["generator"].weight)


def named_freely(directory: Path, **objects: Any) -> None:
    with checkfreq.open(directory, **objects) as run, run.update():
        pass


def stepped(kind: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    made = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    made.step()
    return made


def test_an_optimizer_is_exported_under_whatever_name_it_was_given(tmp_path: Path) -> None:
    """And a module may be called so: a learned optimizer, say."""
    model = nn.Linear(2, 1)
    file = tmp_path / "x.safetensors"
    named_freely(tmp_path / "run", net=model, adam=stepped(torch.optim.Adam, model))
    result = call("export", tmp_path / "run", file, "--optimizer")
    assert result.exit_code == 0
    assert "no tensors" not in result.output
    moments = {f"adam/state/{number}/{key}" for number in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert load_file(file).keys() == {"weight", "bias"} | moments
    named_freely(tmp_path / "learned", optimizer_net=model, adam=stepped(torch.optim.Adam, model))
    assert call("export", tmp_path / "learned", file, "--force").exit_code == 0
    assert load_file(file).keys() == {"weight", "bias"}


def test_an_export_with_an_optimizer_says_that_there_is_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    file = tmp_path / "x.safetensors"
    for number, objects in enumerate(({}, {"optimizer": stepped(torch.optim.SGD, model)})):
        named_freely(tmp_path / f"{number}", model=model, **objects)
        result = call("export", tmp_path / f"{number}", file, "--optimizer", "--force")
        assert result.exit_code == 0
        assert "holds no tensors of an optimizer" in result.output
        assert load_file(file).keys() == {"weight", "bias"}


def test_a_state_that_is_called_an_optimizers_is_taken_for_one_unless_it_is_a_modules(tmp_path: Path) -> None:
    """Some optimizers are none of torch's."""
    file = tmp_path / "x.safetensors"
    named_freely(tmp_path / "run", net=nn.Linear(2, 1), optimizer=Holds({"momentum": torch.ones(2)}))
    assert call("export", tmp_path / "run", file, "--optimizer").exit_code == 0
    assert load_file(file).keys() == {"weight", "bias", "optimizer/momentum"}


class Counts(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_export_writes_the_tensors_of_a_model_that_has_other_state_too_and_of_none_else(tmp_path: Path) -> None:
    """Another module was written in its place, without a word."""
    model, teacher = Counts(2, 1), nn.BatchNorm1d(2)
    with checkfreq.open(tmp_path / "run", model=model, teacher=teacher) as run, run.update():
        pass
    written = call("export", tmp_path / "run", tmp_path / "x.safetensors")
    assert written.exit_code == 0, written.output
    assert "model is written; left out: teacher" in written.output
    assert "left out of model, for they are no tensors: _extra_state" in written.output
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"weight", "bias"}
    assert torch.equal(found["weight"], model.weight)
    with checkfreq.open(tmp_path / "other", net=model, teacher=teacher) as run, run.update():
        pass
    assert "several models (net, teacher)" in call("export", tmp_path / "other", tmp_path / "y.safetensors").output
    assert not (tmp_path / "y.safetensors").exists()
    with checkfreq.open(tmp_path / "third", model=nn.ReLU(), teacher=teacher) as run, run.update():
        pass
    assert "has no tensors" in call("export", tmp_path / "third", tmp_path / "y.safetensors").output


class Holds:
    """State of one's own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def exported(directory: Path, file: Path, value: Any) -> Result:
    """The export as torch state dicts of {"held": {"it": value}}."""
    with checkfreq.open(directory, held=Holds({"it": value})) as run, run.update():
        pass
    return call("export", directory, file, "--format", "torch")


@pytest.mark.parametrize(
    "value",
    [
        {np.int64(3): 1},
        Counter({np.int64(3): 2}),
        {(np.int64(1), "x"): 5},
        {np.int64(1), 2},
        {(np.int32(1), 2)},
    ],
    ids=repr,
)
def test_numbers_of_numpy_among_keys_and_in_sets_are_written_as_those_of_python(tmp_path: Path, value: Any) -> None:
    """What torch then refused to read was written as if all was well."""
    result = exported(tmp_path / "run", tmp_path / "x.pt", value)
    assert result.exit_code == 0, result.output
    found = torch.load(tmp_path / "x.pt", weights_only=True)["held"]["it"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({frozenset({1}): 2}, "held/it/(key frozenset({1}))", "frozenset"),
        ({frozenset({1})}, "held/it/0", "frozenset"),
        ({(1, np.longdouble(1)): 2}, "held/it/(key (1, np.longdouble('1.0')))/1", "longdouble"),
        (np.zeros(2, np.longdouble), "held/it", "ndarray"),
    ],
)
def test_what_no_key_and_no_array_of_torch_can_be_is_refused(tmp_path: Path, value: Any, path: str, kind: str) -> None:
    result = exported(tmp_path / "run", tmp_path / "x.pt", value)
    assert isinstance(result.exception, SystemExit), "an error that nobody caught would be a traceback"
    assert f"{path} is a {kind}, which torch.load(weights_only=True)" in result.output.replace("\n", " ")
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_dtype_that_safetensors_does_not_know_is_told_in_a_line(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex32))
    with checkfreq.open(tmp_path / "run", model=model) as run, run.update():
        pass
    result = call("export", tmp_path / "run", tmp_path / "x.safetensors")
    assert isinstance(result.exception, SystemExit), "an error that nobody caught would be a traceback"
    assert "complex32): use --format torch" in result.output.replace("\n", " ")


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_name_of_an_export_may_be_as_long_as_any(run_directory: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / ("x" * 255)
    result = call("export", run_directory, file, "--format", kind)
    assert result.exit_code == 0, result.output
    assert file.stat().st_size > 0
    assert "too long" in call("export", run_directory, tmp_path / ("x" * 256), "--format", kind).output


def test_what_torch_cannot_read_back_safely_is_not_written(tmp_path: Path) -> None:
    """Values of numpy become torch's; a schedule has them as soon as it is computed by numpy."""
    of_numpy = {"lr": np.float64(0.5), "last": [np.float32(1.5)], "seen": np.arange(3), "queue": deque([1, 2], maxlen=3)}
    of_numpy |= {"milestones": Counter({4: 1, 9: 2})}  # as MultiStepLR's
    with checkfreq.open(tmp_path / "run", model=nn.Linear(1, 1), held=Holds(of_numpy)) as run, run.update():
        pass
    result = call("export", tmp_path / "run", tmp_path / "x.pt", "--format", "torch")
    assert result.exit_code == 0, result.output
    held = torch.load(tmp_path / "x.pt", weights_only=True)["held"]
    assert (held["lr"], held["last"], held["seen"].tolist(), held["queue"]) == (0.5, [1.5], [0, 1, 2], [1, 2])
    assert type(held["lr"]) is float
    assert held["milestones"] == Counter({4: 1, 9: 2})
    with checkfreq.open(tmp_path / "other", held=Holds({"seen": frozenset({1, 2})})) as run, run.update():
        pass
    refused = call("export", tmp_path / "other", tmp_path / "y.pt", "--format", "torch")
    assert "held/seen is a frozenset, which torch.load(weights_only=True) does not read back" in refused.output.replace(
        "\n", " "
    )
    assert not (tmp_path / "y.pt").exists()


def trainers(directory: Path) -> None:
    """A checkpoint with the names that the trainer gives its tensors, and one that steers terminals."""
    storage = LocalStorage(directory)
    pieces = [
        Piece(name, "torch.float32", (2,), 0, 8)
        for name in ("model/a.weight", "buffer/a.mean", "optimizer/a.weight/exp_avg", "\x1b[31mred[bold]")
    ]
    name = Name(5, 1, 1)
    entry = checkpoint.write_shard(storage, name, 0, 1, encode(pieces, memoryview(bytes(32))))
    values = {"optimizer": "Adam", "note": "\x1b[31m" + "x" * 1000}
    checkpoint.commit(storage, Manifest(step=5, epoch=1, incarnation=1, shards=[entry], values=values))


def test_trainers_checkpoints(tmp_path: Path) -> None:
    trainers(tmp_path / "checkpoints")
    shown = call("show", tmp_path)
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert "red[bold]" in shown.output
    assert "characters)" in shown.output
    file = tmp_path / "model.safetensors"
    assert call("export", tmp_path, file, "--optimizer").exit_code == 0
    assert sorted(load_file(file)) == ["a.mean", "a.weight", "optimizer/a.weight/exp_avg"]


def test_clear_errors(tmp_path: Path, run_directory: Path) -> None:
    assert "holds no checkpoints" in call("list", tmp_path / "nothing").output
    for mistyped in (tmp_path / "nothing", "s4://bucket/runs"):
        assert call("verify", mistyped).exit_code == 2, "1 is for what is damaged"
    assert "no kind that pyarrow.fs knows" in call("list", "nosuch://x").output
    assert "not there" in call("show", run_directory, "--name", "77").output
    assert "no step or name" in call("show", run_directory, "--name", "../../etc").output
    manifest = next(run_directory.glob("checkpoints/step-000000003-*/manifest.json"))
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"step": 4}))
    assert "damaged" in call("list", run_directory).output
    assert call("verify", run_directory).exit_code == 1
    for kind in ("safetensors", "torch"):
        result = call("export", run_directory, tmp_path / "missing" / "file", "--name", "2", "--format", kind)
        assert isinstance(result.exception, SystemExit), "an error that nobody caught would be a traceback"
        assert f"{tmp_path / 'missing'} is no directory: make it first" in result.output


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_disk_that_becomes_full(tmp_path: Path, kind: str) -> None:
    """torch tells of what fails as it ends the file, not of why."""
    with checkfreq.open(tmp_path / "run", model=nn.Linear(200, 200)) as run, run.update():
        pass
    with small_file_system(tmp_path / "disk", "64K") as disk:
        result = call("export", tmp_path / "run", disk / "file", "--format", kind)
        assert isinstance(result.exception, SystemExit), "an error that nobody caught would be a traceback"
        assert "No space left" in result.output
        assert not list(disk.iterdir())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_disk_that_is_full(tmp_path: Path, run_directory: Path, kind: str) -> None:
    with small_file_system(tmp_path / "disk", "4K") as disk:
        (disk / "mine").write_bytes(bytes(4096))
        result = call("export", run_directory, disk / "file", "--name", "2", "--format", kind)
        assert isinstance(result.exception, SystemExit), "an error that nobody caught would be a traceback"
        assert "No space left" in result.output
        assert [path.name for path in disk.iterdir()] == ["mine"]
