"""What a user sets is checked when it is set: a typed error names the value and the remedy, and no bare error gets out."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import ray
import ray.train
import torch
from ray.exceptions import ActorDiedError

import raytrain_ft as ft
from raytrain_ft.earlier import after_earlier_runs, earlier_runs
from raytrain_ft.errors import ConfigError, FTError, StorageError
from raytrain_ft.model_checks import check_optimizer, check_stages, choose_update
from raytrain_ft.places import Place
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.lineage import Return, stands
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.prepare import Given, _checkpoints, _seconds_to_move, _worker_options
from raytrain_ft.ray_config import check_supported
from raytrain_ft.runtime.event_log import encode
from raytrain_ft.runtime.spec import RunSpec
from raytrain_ft.settings import Keywords, TrainSettings
from raytrain_ft.trainer import _account_of
from raytrain_ft.training.settings import PipelineSettings


class Linear(ft.TrainTask):
    """Could be run."""

    def __init__(self, samples: int = 8, lock: Any = None) -> None:
        self.samples, self.lock = samples, lock

    def model(self, stage: int) -> Any:
        return torch.nn.Linear(2, 2)

    def optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> Any:
        return torch.utils.data.TensorDataset(torch.zeros(self.samples, 2))

    def loss(self, output: Any, batch: Any) -> Any: ...


class Closure(Linear):
    """Its optimizer evaluates the model as often as it likes."""

    def optimizer(self, params: Any) -> Any:
        return torch.optim.LBFGS(params)


class Task(ft.TrainTask):
    """Is never run."""

    def model(self, stage: int) -> Any: ...

    def optimizer(self, params: Any) -> Any: ...

    def dataset(self) -> Any: ...

    def loss(self, output: Any, batch: Any) -> Any: ...


SILENT = ft.FailAt(phase="backward", action="silence")
IN_STAGES: dict[str, Any] = {
    "scaling_config": ft.ScalingConfig(num_workers=2),
    "parallelism_config": ft.ParallelismConfig(pipeline_parallel_degree=2),
}


def trainer(**arguments: Any) -> ft.Trainer:
    return ft.Trainer(Task(), **({"max_steps": 1, "global_batch_size": 4} | arguments))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ft.RecoveryConfig(hang_timeout=60), r"hang_timeout=60\): use a timedelta, such as"),
        (lambda: ft.RecoveryConfig(quorum="0.5"), "use a number"),
        (lambda: ft.RecoveryConfig(quorum=1.5), "a share from 0 to 1"),
        (lambda: ft.RecoveryConfig(num_spares=1.5), "use a whole number"),
        (lambda: ft.RecoveryConfig(num_spares=True), "use a whole number"),
        (lambda: ft.RecoveryConfig(log=False), "use LogConfig"),
        (lambda: ft.RecoveryConfig(strategy=["auto"]), "use one of auto, replication"),
        (lambda: ft.RecoveryConfig(preemption="aws"), "a tuple of aws, gcp"),
        (lambda: ft.RecoveryConfig(preemption=False), "a tuple of aws, gcp"),  # pyright: ignore[reportArgumentType]
        (lambda: ft.RecoveryConfig(preemption=([],)), "a tuple of aws, gcp"),  # pyright: ignore[reportArgumentType]
        (lambda: ft.CheckpointConfig(override=None), "a tuple of"),  # pyright: ignore[reportArgumentType]
        (lambda: ft.RecoveryConfig(lease=timedelta()), "longer than zero"),
        (lambda: ft.LogConfig(enabled="no"), "use True or False"),
        (lambda: ft.LogConfig(recovery_target=2), "use a timedelta, such as"),
        (lambda: ft.LogConfig(recovery_target=timedelta()), "use a timedelta longer than zero"),
        (lambda: ft.CheckpointConfig(overhead="3"), "use a number"),
        (lambda: ft.CheckpointConfig(every="often"), 'use a whole number, "auto" or None'),
        (lambda: ft.CheckpointConfig(every=0), "a number of steps"),
        (lambda: ft.CheckpointConfig(resume="x"), "use one of auto, never, require"),  # pyright: ignore[reportArgumentType]
        (lambda: ft.LogConfig(compression="x"), 'use "lz4", "zstd" or None'),  # pyright: ignore[reportArgumentType]
        (lambda: ft.ParallelismConfig(schedule="x"), "use one of 1f1b, gpipe"),  # pyright: ignore[reportArgumentType],
        (lambda: ft.ParallelismConfig(split=[1]), "tuple"),
        (lambda: ft.FailAt(phase="forward", role="x"), "use one of worker, supervisor"),
        (lambda: ft.FailAt(phase="forward", nth=0), "nth=0"),
        (lambda: ft.FailAt(phase="nowhere"), "a worker has the phases data"),
        (lambda: ft.FailAt(phase="forward", action="x"), "use one of sigkill"),
        (lambda: trainer(faults=ft.FailAt(phase="forward")), r"use Sequence\[FailAt\]"),
        (lambda: trainer(callbacks=ft.TensorBoard()), "a list of instances"),
        (lambda: trainer(recovery_config={"num_spares": 1}), "use a raytrain_ft.RecoveryConfig"),
        (lambda: trainer(precision="fp16"), "use one of fp32, bf16"),
        (lambda: trainer(max_steps=1e3), "use a whole number"),
        (lambda: trainer(seed="a"), "use a whole number"),
        (lambda: trainer(recovery_config=ft.RecoveryConfig(replacement="shrink")), r"num_workers=\(min, max\)"),
        (lambda: trainer(recovery_config=ft.RecoveryConfig(strategy="logging")), "only a pipeline logs"),
        (lambda: ft.RecoveryConfig(strategy="logging", log=ft.LogConfig(enabled=False)), "one of them is to be left out"),
        (
            lambda: trainer(on_non_finite="roll_back", recovery_config=ft.RecoveryConfig(strategy="replication")),
            "goes back to a checkpoint",
        ),
        (lambda: trainer(faults=[SILENT], recovery_config=ft.RecoveryConfig(update="wait_free")), 'goes with update="barrier"'),
        (lambda: trainer(faults=[SILENT], **IN_STAGES), "without a pipeline"),
        (
            lambda: trainer(faults=[ft.FailAt(phase="update", step=3)] * 2),
            r"FailAt\(phase='update', step=3.* among faults twice",
        ),
        (lambda: trainer(faults=[ft.FailAt(phase="update", rank=1)]), r"FailAt\(rank=1\) would never strike.* at most 1"),
    ],
)
def test_a_value_that_cannot_be_used(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("config", "wrong", "meant"),
    [
        (ft.RecoveryConfig, "num_spare", "num_spares"),
        (ft.CheckpointConfig, "overhed", "overhead"),
        (ft.RunConfig, "nmae", "name"),
        (ft.ScalingConfig, "num_worker", "num_workers"),
        (ft.FailureConfig, "max_failure", "max_failures"),
        (ft.ParallelismConfig, "scheduler", "schedule"),
        (ft.LogConfig, "memory", "memory_bytes"),
        (ft.FailAt, "fase", "phase"),
    ],
)
def test_a_name_that_a_config_does_not_have_is_refused_with_the_nearest(config: type, wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"^{config.__name__} has no argument '{wrong}'; did you mean '{meant}'\\?$"):
        config(**{wrong: 1})
    with pytest.raises(ConfigError, match=f"^{config.__name__} has no argument 'zzzz'$"):
        config(zzzz=1)
    named = [field.name for field in dataclasses.fields(config) if field.init]
    assert set(inspect.signature(config).parameters) == set(named), "which editors complete"


@pytest.mark.parametrize(
    ("settings", "recovery", "policy", "words"),
    [
        ({}, {"strategy": "checkpoint"}, {"every": None}, r'strategy="checkpoint"\) goes back to checkpoints'),
        ({}, {"strategy": "snapshot"}, {"every": None}, r'strategy="snapshot"\) goes back to checkpoints'),
        ({"on_non_finite": "roll_back"}, {}, {"every": None}, r'on_non_finite="roll_back"\) goes back to checkpoints'),
        ({}, {"strategy": "snapshot"}, {"resume": "require"}, "keeps copies in memory alone"),
        ({}, {"strategy": "snapshot"}, {"keep_epochs": True}, "keeps copies in memory alone"),
    ],
)
def test_checkpoints_that_will_not_be_there(
    settings: dict[str, Any], recovery: dict[str, Any], policy: dict[str, Any], words: str, tmp_path: Any
) -> None:
    """Before the task is looked at, and before there is a cluster."""
    checkpoints = ft.CheckpointConfig(**policy)
    run = ft.RunConfig(name="run", storage_path=str(tmp_path), checkpoint_config=checkpoints)
    with pytest.raises(ConfigError, match=words):
        trainer(recovery_config=ft.RecoveryConfig(**recovery), run_config=run, **settings).fit()
    assert not ray.is_initialized()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [(4, 2), (2,), "4", [2, 4], 2.5, (2, 3, 4), (0, 2), (True, 2), 0, True, None], ids=repr)
def test_what_is_no_number_and_no_range_of_workers_is_refused_by_its_value(wrong: Any) -> None:
    """Before there is a cluster; also in Ray's own class, which lets fields be set as one likes."""
    words = re.escape(f"ScalingConfig(num_workers={wrong!r}): use a number of at least 1, or a range (min, max)")
    with pytest.raises(ConfigError, match=words):
        ft.ScalingConfig(num_workers=wrong)
    late = ray.train.ScalingConfig()
    late.num_workers = wrong
    with pytest.raises(ConfigError, match=words):
        trainer(scaling_config=late)
    with pytest.raises(ConfigError, match=words):
        trainer(scaling_config=late, parallelism_config=ft.ParallelismConfig(pipeline_parallel_degree=2))
    assert not ray.is_initialized()


@pytest.mark.parametrize("amount", ["4", -1, True, float("nan"), float("inf")])
def test_amounts_of_resources_are_numbers(amount: Any) -> None:
    scaling = ft.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1, "memory": amount})
    with pytest.raises(ConfigError, match=r"resources_per_worker=\{'memory': .*a number"):
        _worker_options(scaling, ft.RunConfig())


@pytest.mark.parametrize(("name", "meant"), [("cpu", "CPU"), ("Gpu", "GPU"), ("Memory", "memory")])
def test_a_resource_of_rays_in_other_letters_is_refused(name: str, meant: str) -> None:
    """Else everybody waits for a node that has it, which none does."""
    scaling = ft.ScalingConfig(num_workers=1, resources_per_worker={name: 2, "cpus": 1})
    with pytest.raises(ConfigError, match=rf"resources_per_worker=\{{'{name}': 2\}}\): did you mean '{meant}'\?"):
        _worker_options(scaling, ft.RunConfig())


@pytest.mark.parametrize("asked", [2, 4])
def test_a_run_for_which_no_node_has_enough_ends_with_what_was_asked_for(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ("TooFewWorkersError", "0 workers could be placed within 120 s, num_workers asks for at least 1. Add nodes.")
    start: dict[str, Any] = {"failure": None}
    monkeypatch.setattr("raytrain_ft.trainer.watch", lambda *_, **__: iter([start, start | {"failure": failure}]))
    monkeypatch.setattr("raytrain_ft.trainer._check_directory", lambda spec: None)
    monkeypatch.setattr("raytrain_ft.trainer.Callbacks", lambda *_: SimpleNamespace(end=None, poll=lambda: None))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    rules = SimpleNamespace(schedule_timeout=120.0)
    spec: Any = SimpleNamespace(rules=rules, options={"num_cpus": asked}, name="r", directory=Path())
    said: list[str] = []
    display: Any = SimpleNamespace(say=said.append)
    right: Any = SimpleNamespace(hand_over=lambda: None)
    last: Any = SimpleNamespace(callback=lambda *_: None)
    *_, account = trainer()._follow(spec, None, display, last, right)
    want = "each worker takes 4 CPU, and no node has all of it (the most of each: 2 CPU)"
    assert said == [f"waits for a node that can host a worker: {want}"] * (asked == 4)
    assert account["failure"] == (failure[0], failure[1] + f" E{want[1:]}." * (asked == 4))


@pytest.mark.parametrize(
    ("task", "run", "words"),
    [
        (Linear(samples=0), {}, "empty"),
        (Linear(lock=threading.Lock()), {}, "cannot be sent to the workers"),
        (Closure(), {}, r"gives a LBFGS, whose step\(\) cannot be called without a closure"),
        (Linear(), {"checkpoint_config": ft.CheckpointConfig(resume="require")}, "no valid checkpoint"),
        (Linear(), {"checkpoint_config": ft.CheckpointConfig(storage_path="nowhere://x")}, "no kind that pyarrow.fs knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_leaves_nothing_behind(task: ft.TrainTask, run: dict[str, Any], words: str, tmp_path: Path) -> None:
    run_config = ft.RunConfig(name="r", storage_path=str(tmp_path), **run)
    with pytest.raises(FTError, match=words):
        ft.Trainer(task, max_steps=1, global_batch_size=4, run_config=run_config).fit()
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


def test_what_ray_lacks_is_told_before_anything_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.delattr("ray._private.state.available_resources_per_node")
    run = ft.RunConfig(name="digits", storage_path=str(tmp_path))
    with pytest.raises(ConfigError, match="does not tell what is free on each node"):
        ft.Trainer(Linear(), max_steps=1, global_batch_size=4, run_config=run).fit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recovery", [{"update": "wait_free"}, {"update": "wait_free", "strategy": "replication"}])
def test_an_optimizer_that_needs_a_closure_is_refused_however_it_updates(recovery: dict[str, Any]) -> None:
    """And no fallback is tried, which it would not fit either."""
    with pytest.raises(ConfigError, match="without a closure") as refused:
        choose_update(Closure(), ft.RecoveryConfig(**recovery))
    assert type(refused.value) is ConfigError


def test_functions_that_give_something_else_are_named() -> None:
    class Without(Linear):
        def model(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return torch.nn.Linear(1, 1)

    class Forgets(Linear):
        def model(self, stage: int) -> Any:
            torch.nn.Linear(1, 1)

    class Class(Linear):
        def optimizer(self, params: Any) -> Any:
            return torch.optim.Adam

    class Several(Linear):
        def optimizer(self, params: Any) -> Any:
            return [torch.optim.SGD(params, lr=0.1), torch.optim.AdamW(params)]

    class Wrapped(Linear):
        model = functools.wraps(Without.model)(lambda self, stage: torch.nn.Linear(1, 1))  # pyright: ignore

    choose_update(Wrapped(), ft.RecoveryConfig())
    for task, words in (
        (Without(), r"Without\.model\(\).* cannot be called with the number of a stage: write def model\(self, stage\)"),
        (Forgets(), r"Forgets\.model\(0\) returned None: it must return a torch\.nn\.Module"),
        (Class(), r"TrainTask\.optimizer\(\) returned the class Adam .*: it must return a torch\.optim\.Optimizer$"),
        (Several(), r"returned a list of SGD, AdamW: it must return a .*Optimizer; .*'Several optimizers in one'$"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose_update(task, ft.RecoveryConfig())


def test_an_optimizer_of_a_stage_that_needs_a_closure_is_refused() -> None:
    pipeline = PipelineSettings(stages=2, micro_batches=2, schedule="1f1b", cuts=None, ties=())
    with pytest.raises(ConfigError, match="without a closure"):
        check_stages(Closure(), pipeline)
    check_stages(Linear(), pipeline)


def in_stages(cuts: tuple[int, ...] | None) -> Callable[[ft.TrainTask], object]:
    pipeline = PipelineSettings(stages=2, micro_batches=2, schedule="1f1b", cuts=cuts, ties=())
    return lambda task: check_stages(task, pipeline)


def in_one_piece(task: ft.TrainTask) -> object:
    return choose_update(task, ft.RecoveryConfig())


class Matrices(Linear):
    """Its optimizer is for a part of the parameters."""

    def __init__(self, trains: Callable[[Any], bool], freezes: bool = False) -> None:
        super().__init__()
        self.trains, self.freezes = trains, freezes

    def model(self, stage: int) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[0].bias.requires_grad_(not self.freezes)
        return model

    def optimizer(self, params: Any) -> Any:
        return torch.optim.SGD([p for p in params if self.trains(p)], lr=0.1)


def test_parameters_that_the_optimizer_leaves_out_are_warned_of() -> None:
    for freezes, check, words in (
        (False, in_one_piece, "leaves out 2 parameters that require a gradient, the first is 0.bias: they are not"),
        (True, in_one_piece, "leaves out 1 parameters that require a gradient, the first is 1.bias: they are not"),
        (False, in_stages((1,)), "leaves out 2 .*, the first is 0.bias of stage 0: they are not"),
    ):
        with pytest.warns(UserWarning, match=words) as found:
            check(Matrices(lambda p: p.dim() == 2, freezes))
        assert len(found) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(Matrices(lambda p: True, freezes))


class Scheduled(Linear):
    """Has the schedule that somebody wants."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.schedule(optimizer)


@pytest.mark.parametrize("check", [in_one_piece, in_stages(None)], ids=["whole", "stages"])
def test_a_schedule_that_cannot_be_is_refused_before_any_worker_starts(check: Callable[[ft.TrainTask], object]) -> None:
    by_torch = torch.optim.lr_scheduler
    check(Scheduled(lambda optimizer: None))
    check(Scheduled(lambda optimizer: by_torch.StepLR(optimizer, 1)))
    check(Scheduled(by_torch.ReduceLROnPlateau))
    with pytest.raises(TypeError, match="not callable") as raised:
        check(Scheduled(None))
    assert raised.value.__notes__ == ["(raised by TrainTask.scheduler() of Scheduled)"]
    no_function: Any = Linear()
    no_function.scheduler = None
    for task, words in (
        (Scheduled(lambda optimizer: by_torch.StepLR), r"scheduler\(\) returned the class StepLR"),
        (
            Scheduled(lambda optimizer: lambda step: 1.0),
            r"scheduler\(\) returned a function: it must return None or a learning-rate",
        ),
        (no_function, r"scheduler is None: it must be a function"),
    ):
        with pytest.raises(ConfigError, match=rf"^TrainTask\.{words}"):
            check(task)


def test_a_schedule_that_gives_the_optimizer_hooks_has_updates_wait() -> None:
    """They would be called for each bucket."""

    class Hooked(Linear):
        def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
            optimizer.register_step_post_hook(lambda *_: None)
            return torch.optim.lr_scheduler.ConstantLR(optimizer)

    with pytest.warns(UserWarning, match="has hooks.*Falling back"):
        assert choose_update(Hooked(), ft.RecoveryConfig(update="wait_free"))[0] == "barrier"


def test_a_schedule_that_begins_at_zero_does_not_change_how_the_update_is_undone() -> None:
    warm_up = Scheduled(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10))
    for task in (Linear(), warm_up):
        assert choose_update(task, ft.RecoveryConfig(update="wait_free"))[0] == "wait_free"


@pytest.mark.parametrize("name", ["model", "optimizer", "dataset"])
def test_what_a_function_of_the_task_raises_says_which_it_was(name: str, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("bert-base")

    task = type("Own", (Linear,), {name: broken})()
    run = ft.RunConfig(name="r", storage_path=str(tmp_path))
    with pytest.raises(KeyError) as raised:
        ft.Trainer(task, max_steps=1, global_batch_size=4, run_config=run).fit()
    assert raised.value.__notes__ == [f"(raised by TrainTask.{name}() of Own)"]
    assert not ray.is_initialized()


class Dropping(Linear):
    """Its model is prepared as somebody wants it."""

    def __init__(self, prepare: Callable[[Any], object]) -> None:
        super().__init__()
        self.prepare = prepare

    def model(self, stage: int) -> Any:
        inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
        model = torch.nn.Sequential(inner, torch.nn.Linear(2, 2))
        self.prepare(model)
        return model


@pytest.mark.parametrize("check", [in_one_piece, in_stages(None), in_stages((1,))], ids=["whole", "task", "cut"])
def test_a_model_in_eval_mode_is_refused(check: Callable[[ft.TrainTask], object]) -> None:
    """As from_pretrained() returns it. Parts of it may stay so."""
    with pytest.raises(ConfigError, match=r"a model in eval mode, as from_pretrained\(\) does.*call \.train\(\)"):
        check(Dropping(lambda model: model.eval()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Dropping(lambda model: None))
        check(Dropping(lambda model: model[1].eval()))


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda model: model.eval()[0].train(), "is itself in eval mode, though parts of it are not"),
        (lambda model: model[0].eval(), "whose 0 is in eval mode.*it is trained without dropout"),
        (lambda model: model[0].eval().requires_grad_(False), ""),
        (lambda model: [setattr(model[0].eval()[1], "p", 0.0)], ""),
        (lambda model: model[1].eval(), ""),
    ],
)
def test_a_model_that_is_half_in_eval_mode_is_warned_of(prepare: Callable[[Any], object], words: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        choose_update(Dropping(prepare), ft.RecoveryConfig())
    assert len(found) == bool(words)
    assert all(re.search(words, str(one.message)) for one in found)


@pytest.mark.parametrize("kind", ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD"])
def test_an_optimizer_that_can_do_without_a_closure_is_not(kind: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    optimizer = getattr(torch.optim, kind)(params, lr=0.1)
    check_optimizer(optimizer, params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    check_optimizer(optimizer, params)


def test_an_optimizer_that_trains_what_the_model_does_not_have_is_refused() -> None:
    """Nobody would reduce its gradient, and a replacement would not have its value. A frozen one does no harm."""
    params, temperature = [torch.nn.Parameter(torch.zeros(2, 2))], torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*params, temperature], lr=0.1)
    with pytest.raises(ConfigError, match=r"SGD that also trains 1 parameters \(of shape \[1\]\)"):
        check_optimizer(optimizer, params)
    temperature.requires_grad_(False)
    check_optimizer(optimizer, params)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_what_is_half_a_uri_is_refused(tmp_path: Path, resume: Any) -> None:
    """`Path("s3://bucket/runs")` is s3:/bucket/runs, which would be a directory of its own on every node."""
    half = str(Path("s3://bucket/runs"))
    checkpoints = ft.CheckpointConfig(storage_path=half, resume=resume)
    for run in (
        ft.RunConfig(name="r", storage_path=str(tmp_path), checkpoint_config=checkpoints),
        ft.RunConfig(name="r", storage_path=half),
    ):
        with pytest.raises(ConfigError, match="'s3:/bucket/runs'"):
            ft.Trainer(Linear(), max_steps=1, global_batch_size=4, run_config=run).fit()
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ("ckpt", "{cwd}/ckpt/r/checkpoints"),
        ("~/ckpt", "{cwd}/ckpt/r/checkpoints"),
        ("file:///shared/a%20b", "/shared/a b/r/checkpoints"),
        ("s3://key@bucket/runs?region=x", "s3://key@bucket/runs/r/checkpoints?region=x"),
        (None, "/runs/r/checkpoints"),
    ],
)
def test_a_place_means_the_same_in_every_process(
    place: str | None, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the run have other working directories, and perhaps another home, than the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = ft.RunConfig(name="r", checkpoint_config=ft.CheckpointConfig(storage_path=place, resume="never"))
    spec = _checkpoints(given(run), Path("/runs/r"), Sampling(8, 4, 0), [])
    assert spec is not None
    assert spec.place == Place(uri.format(cwd=tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"scaling_config": ft.ScalingConfig(placement_strategy="STRICT_PACK")},
            r"ScalingConfig\(placement_strategy='STRICT_PACK'\)",
        ),
        ({"scaling_config": ft.ScalingConfig(accelerator_type="H100")}, "accelerator_type='H100'"),
        ({"run_config": ft.RunConfig(logging_config=ray.train.LoggingConfig(log_level="DEBUG"))}, "logging_config=.*DEBUG"),
        ({"run_config": ft.RunConfig(failure_config=ft.FailureConfig(preemption_grace_s=5.0))}, "preemption_grace_s=5.0"),
        (
            {"run_config": ft.RunConfig(checkpoint_config=ft.CheckpointConfig(checkpoint_score_order="min"))},
            "score_order='min'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_have_no_effect_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(**config)


def test_a_module_with_a_task_does_not_load_ray_train() -> None:
    """Every worker loads it, and Ray Train with pandas behind it would be a tenth of a worker's start."""
    program = (
        "import sys; import raytrain_ft as ft; ft.TrainTask, ft.FailAt; "
        "ft.RecoveryConfig(log=ft.LogConfig()), ft.ParallelismConfig(); "
        "import raytrain_ft.runtime.worker, raytrain_ft.runtime.trainee; "
        "print(sorted({'ray.train', 'ray.data', 'pandas', 'torch._dynamo'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


def test_what_is_so_anyway_may_be_said() -> None:
    trainer(scaling_config=ft.ScalingConfig(placement_strategy="SPREAD"))


def test_a_default_of_rays_that_allows_no_loss_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the first lost worker ends the run"):
        trainer(run_config=ray.train.RunConfig(checkpoint_config=ft.CheckpointConfig()))
    with warnings.catch_warnings(action="error"):
        trainer()
        trainer(run_config=ray.train.RunConfig(failure_config=ft.FailureConfig(), checkpoint_config=ft.CheckpointConfig()))
        trainer(run_config=ft.RunConfig(failure_config=ft.FailureConfig(max_failures=0)))


def test_a_default_of_rays_that_keeps_every_checkpoint_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="every checkpoint stays"):
        trainer(run_config=ray.train.RunConfig(failure_config=ft.FailureConfig()))
    with warnings.catch_warnings(action="error"):
        trainer(run_config=ft.RunConfig(checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3)))
        trainer(run_config=ft.RunConfig(checkpoint_config=ft.CheckpointConfig(num_to_keep=None)))


def test_memory_is_asked_for_as_ray_wants_it() -> None:
    scaling = ft.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2, "memory": 4e9, "disk": 1})
    options = _worker_options(scaling, ft.RunConfig())
    assert {name: options[name] for name in ("num_cpus", "memory", "resources")} == {
        "num_cpus": 2,
        "memory": 4e9,
        "resources": {"disk": 1},
    }


def given(run: ft.RunConfig, **scaling: Any) -> Given:
    numbers = TrainSettings(max_steps=10, global_batch_size=4)
    return Given(numbers, ft.ScalingConfig(**scaling), run, ft.RecoveryConfig())


def profile_key(path: Path, scaling: dict[str, Any] | None = None, **policy: Any) -> str:
    run = ft.RunConfig(checkpoint_config=ft.CheckpointConfig(**policy))
    sampling = Sampling(dataset_size=8, global_batch_size=4, seed=0)
    spec = _checkpoints(given(run, **scaling or {}), path / "run", sampling, ["model"])
    assert spec is not None
    return spec.profile_key


def test_a_run_does_not_take_over_an_interval_for_another_budget_or_device(tmp_path: Path) -> None:
    """How many workers there are is looked at when they are there."""
    known = profile_key(tmp_path)
    assert profile_key(tmp_path, {"num_workers": 2}) == known
    others = [{"overhead": 0.1}, {"every": 5}, {"failure_interval": timedelta(hours=1)}, {"scaling": {"use_gpu": True}}]
    assert len({known, *(profile_key(tmp_path, **other) for other in others)}) == 5


def test_of_the_checkpoints_that_are_there_the_newest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def select(*_: Any) -> Iterator[Any]:
        for step in (30, 20):
            asked.append(step)
            yield SimpleNamespace(step=step)

    monkeypatch.setattr("raytrain_ft.prepare.select", select)
    with pytest.raises(ConfigError, match=r"max_steps=10\): the newest checkpoint in .* is of step 30"):
        profile_key(tmp_path)
    assert asked == [30]


def test_editors_know_every_keyword() -> None:
    assert get_type_hints(Keywords) == get_type_hints(TrainSettings)


def test_values_that_can() -> None:
    range_of_workers = ft.ScalingConfig(num_workers=(2, 4))
    trainer(scaling_config=range_of_workers, recovery_config=ft.RecoveryConfig(replacement="shrink", quorum=1))
    trainer(scaling_config=ray.train.ScalingConfig(num_workers=(2, 4)))
    trainer(max_grad_norm=1, faults=[ft.FailAt(phase="forward")], callbacks=[ft.TensorBoard()])
    ft.CheckpointConfig(every=None, failure_interval=timedelta(hours=1), num_to_keep=None)
    ft.RecoveryConfig(preemption=("aws", "sigterm"), log=ft.LogConfig(recovery_target=timedelta(seconds=1)))


@pytest.mark.parametrize("strategy", ["skip", "lossy"])
def test_an_undo_that_is_right_only_if_the_step_is_redone_is_none_where_that_may_not_be(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=rf'RecoveryConfig\(strategy="{strategy}", undo="replay"\)'):
        ft.RecoveryConfig(strategy=strategy, undo="replay", update="wait_free")


def went_back(incarnation: int, step: int, *, looked: int | None = None) -> list[dict[str, Any]]:
    """What a log has of everybody's going back to this step, for which it was perhaps looked in another incarnation."""
    found = {"event": "CheckpointsFound", "incarnation": incarnation if looked is None else looked, "stored": []}
    return [found, {"event": "Resumed", "incarnation": incarnation, "step": step}]


def test_a_run_knows_when_everybody_went_back_in_those_before(tmp_path: Path) -> None:
    started, resumed = {"event": "RunStarted", "incarnation": 0}, {"event": "Resumed", "incarnation": 3, "step": 40}
    write_records(tmp_path / "events-001.jsonl", started, resumed, *went_back(4, 90))
    write_records(tmp_path / "events.jsonl", resumed | {"incarnation": 6}, *went_back(8, 120, looked=7))
    with (tmp_path / "events.jsonl").open("a") as log:
        log.write("\n".join(json.dumps(one) for one in went_back(9, 100)))
    assert earlier_runs(tmp_path) == (9, (Return(4, 90), Return(8, 120))), "the last line was cut short"
    (tmp_path / "events-001.jsonl").write_text("[1]\n")
    assert earlier_runs(tmp_path) == (9, (Return(8, 120),))
    assert earlier_runs(tmp_path / "new") == (0, ())


@pytest.mark.parametrize(
    ("back_to", "told"),
    [
        (12, {"strategy": "lossy", "incarnation": 4, "step": 13, "completes": True, "resumed": None}),
        (12, {"strategy": "checkpoint", "incarnation": 4, "step": 13, "completes": True, "resumed": 9.0}),
        (0, {"strategy": "logging", "incarnation": 4, "step": 1, "completes": True, "resumed": 9.0}),
        (0, {"strategy": "snapshot", "incarnation": 4, "step": 1, "completes": True, "resumed": 9.0}),
    ],
    ids=["went on without samples", "completed", "the beginning, replayed", "the beginning, completed"],
)
def test_that_everybody_went_back_is_known_though_that_recovery_was_interrupted_once_more(
    back_to: int, told: dict[str, Any], tmp_path: Path
) -> None:
    """Its account has what its last attempt did. A checkpoint that was late then is none to begin from."""
    again = [{"event": "Resumed", "incarnation": 4, "step": back_to + 1}] if told["resumed"] else []
    write_records(tmp_path / "events.jsonl", *went_back(3, back_to), *again, {"event": "Recovery", **told})
    last, returns = earlier_runs(tmp_path)
    assert (last, returns) == (4, (Return(3, back_to),))
    assert [stands(2, step, returns) for step in (back_to, back_to + 1)] == [True, False]


def test_nor_need_it_have_come_to_train_again(tmp_path: Path) -> None:
    """What an earlier attempt of that recovery had cost, and a late checkpoint has, is struck from its account."""
    found, _ = went_back(4, 12)
    account = {"event": "Recovery", "strategy": "checkpoint", "incarnation": 3, "step": 12, "resumed": None}
    write_records(tmp_path / "events.jsonl", *went_back(2, 30), {"event": "StepsCommitted"}, found, account)
    assert earlier_runs(tmp_path) == (4, (Return(4, 12),))


def write_records(log: Path, *records: dict[str, Any] | str) -> None:
    log.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))


def test_what_a_run_knew_of_those_before_it_need_not_be_read_again(tmp_path: Path) -> None:
    """A name may have had hundreds of runs, of days each."""
    started = json.loads(encode(m.RunStarted(run_id="r7", incarnation=7, returns=(Return(4, 90),))))
    (tmp_path / "events-006.jsonl").mkdir()  # what would be read would be an error
    write_records(tmp_path / "events-007.jsonl", started, *went_back(8, 120))
    assert earlier_runs(tmp_path) == (8, (Return(4, 90), Return(8, 120)))
    write_records(tmp_path / "events.jsonl")  # of one that did not come to say anything
    assert earlier_runs(tmp_path) == (8, (Return(4, 90), Return(8, 120)))
    write_records(tmp_path / "events.jsonl", started | {"incarnation": 8, "returns": []})
    assert earlier_runs(tmp_path) == (8, ())


def test_runs_before_one_that_does_not_tell_of_them_are_read(tmp_path: Path) -> None:
    """It is of an earlier version. The newest is that of the greatest number."""
    write_records(tmp_path / "events-999.jsonl", {"event": "RunStarted", "incarnation": 2, "returns": []}, *went_back(4, 90))
    write_records(tmp_path / "events-1000.jsonl", {"event": "RunStarted", "incarnation": 4}, *went_back(6, 90))
    assert earlier_runs(tmp_path) == (6, (Return(6, 90),)), "which says all that the first one says"


def test_a_damaged_line_hides_no_later_one(tmp_path: Path) -> None:
    """Else the run would begin with incarnations that there were."""
    write_records(tmp_path / "events.jsonl", {"event": "State", "incarnation": 3}, "\0\0", {"event": "State", "incarnation": 9})
    with pytest.warns(UserWarning, match=r"events\.jsonl, line 2 is damaged, and others follow it: it is passed over"):
        assert earlier_runs(tmp_path) == (9, ())


@pytest.mark.parametrize("away", ["listdir", "open"])
@pytest.mark.parametrize("times", [2, 10_000])
def test_records_that_cannot_be_read_are_not_taken_for_none(
    times: int, away: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run would take the checkpoints of this one for what an earlier one had left behind, and throw them away."""
    write_records(tmp_path / "events.jsonl", {"event": "State", "incarnation": 9})
    monkeypatch.setattr("raytrain_ft.earlier.RECORDS_S", 0.05)
    monkeypatch.setattr("raytrain_ft.earlier.AGAIN_S", 0.01)
    owner: Any = os if away == "listdir" else Path
    work, calls = getattr(owner, away), iter(range(times))

    def fail(*args: Any, **more: Any) -> Any:
        if next(calls, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return work(*args, **more)

    monkeypatch.setattr(owner, away, fail)
    spec = blank_spec(tmp_path)
    if times == 2:
        assert after_earlier_runs(spec).incarnation == 9
        return
    with pytest.raises(StorageError, match=rf"{tmp_path}: the records of earlier runs .* Input/output error\. Look"):
        after_earlier_runs(spec)


def blank_spec(directory: Path) -> RunSpec:
    fields: Any = dict.fromkeys(RunSpec.__dataclass_fields__) | {"directory": directory, "incarnation": 0, "returns": ()}
    return RunSpec(**fields)


def test_the_run_before_has_ended_when_its_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the name is taken, it may be writing its last ones."""

    def take(spec: RunSpec) -> Any:
        write_records(tmp_path / "events.jsonl", {"event": "State", "incarnation": 9})
        return SimpleNamespace(release=lambda: None)

    monkeypatch.setattr("raytrain_ft.trainer.prepare", lambda *_: (blank_spec(tmp_path), b""))
    monkeypatch.setattr("raytrain_ft.trainer._take_directory", take)
    monkeypatch.setattr("raytrain_ft.trainer.sealed", SimpleNamespace(write=lambda *_: None, remove=lambda *_: None))
    monkeypatch.setattr(ft.Trainer, "_train", lambda self, spec, right, last: spec)
    begun: Any = trainer().fit()
    assert begun.incarnation == 9


def test_a_supervisor_that_is_gone_as_it_is_asked_holds_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has ended; a job of the same name, which waits for that, is not refused."""

    def gone(answer: object, timeout: float) -> None:
        raise ActorDiedError

    supervisor = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("raytrain_ft.trainer.ray.get_actor", lambda name, namespace: supervisor)
    monkeypatch.setattr("raytrain_ft.trainer.ray.get", gone)
    assert _account_of("supervisor:digits") is None


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"run_config": {"failure_config": ft.FailureConfig(max_failures=None)}}, "max_failures=None"),  # pyright: ignore
        ({"run_config": {"failure_config": ft.FailureConfig(max_failures="3")}}, "max_failures='3'"),  # pyright: ignore
        ({"run_config": {"failure_config": ft.FailureConfig(max_failures=-2)}}, "max_failures=-2"),
        ({"scaling_config": {"use_gpu": 1}}, "use_gpu=1"),
    ],
)
def test_what_would_end_a_run_at_its_first_loss_is_refused_before_it(configs: Any, words: str) -> None:
    kinds = {"run_config": ft.RunConfig, "scaling_config": ft.ScalingConfig}
    made = {name: kinds[name](**fields) for name, fields in configs.items()}
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_supported(made.get("scaling_config", ft.ScalingConfig()), made.get("run_config", ft.RunConfig()))


def test_a_larger_model_has_longer_to_be_moved_and_written_unless_a_time_is_given() -> None:
    key = ["AdamW", ["weight", "torch.float32", [10_000, 20_000]], ["bias", "torch.float32", []]]
    assert _seconds_to_move(ft.RecoveryConfig(), key) == pytest.approx({"phase_timeout": 180.0, "stop_timeout": 90.0})
    given = ft.RecoveryConfig(phase_timeout=timedelta(seconds=7), stop_timeout=timedelta(seconds=5))
    assert _seconds_to_move(given, key) == {"phase_timeout": 7.0, "stop_timeout": 5.0}
