"""Whatever is lost, training goes on from a checkpoint, and ends with the bits of the run that lost nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from conftest import promise_kept, train
from ray.util import list_named_actors
from torch.utils.data import TensorDataset
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.errors import ConfigError, LockedError, MismatchError, NoCheckpointError, NonFiniteLossError
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.policy.tuner import MOST_RECALLED
from raytrain_ft.runtime.event_log import read_records, read_run
from raytrain_ft.storage import lock
from raytrain_ft.storage.filesystem import open_storage

OFTEN = ft.CheckpointConfig(every=5)
EVERYBODY = range(3)


def events(result: ft.Result | Path, name: str) -> list[dict]:
    path = Path(result.path) if isinstance(result, ft.Result) else result
    return [record for record in read_records(path / "events.jsonl") if record["event"] == name]


def persisters() -> list[psutil.Process]:
    """Those of this cluster: nobody else's may be touched."""
    found = psutil.process_iter(["cmdline", "environ"])
    return [
        process
        for process in found
        if "raytrain_ft.storage.persister" in (process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("RAYTRAIN_FT_TESTED_BY") == str(os.getpid())
    ]


def whole_run_is_proven(path: Path) -> bool:
    """Over all runs of this name: every sample once."""
    return audit(read_run(path)).ok


def test_a_run_of_the_same_name_goes_on_where_it_ended(undisturbed, tmp_path: Path) -> None:
    train(tmp_path, "run", steps=12, checkpoints=OFTEN)
    result = train(tmp_path, "run", checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    assert events(result, "Resumed")[0]["step"] == 12
    assert whole_run_is_proven(tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) == 2
    assert kept[-1] == Path(result.checkpoint).name
    stored, final = (ft.load_model(Toy(), place).state_dict() for place in (result.checkpoint, result))
    assert all(torch.equal(stored[name], final[name]) for name in final)


class Alike(Toy):
    """Without what depends on how samples are shared out: dropout, and statistics over a share."""

    def model(self, stage: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


@pytest.mark.long
def test_a_run_goes_on_with_other_numbers_of_workers(undisturbed, tmp_path: Path) -> None:
    train(tmp_path, "run", task=Alike(), steps=12, checkpoints=OFTEN)
    train(tmp_path, "run", task=Alike(), steps=20, workers=2, checkpoints=OFTEN)
    result = train(tmp_path, "run", task=Alike(), workers=4, checkpoints=OFTEN)
    assert whole_run_is_proven(tmp_path / "run")
    ours, theirs = (ft.load_model(Alike(), one) for one in (result, undisturbed(task=Alike())))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # the same sums in another order


def test_the_interval_is_chosen_and_outlives_who_chose_it(undisturbed, tmp_path: Path) -> None:
    """Worker 0 measures a few steps, chooses k, and is killed: who comes after it goes on by that k."""
    steps = 60
    fault = ft.FailAt(rank=0, step=45, phase="forward")
    chosen_by_itself = ft.CheckpointConfig(overhead=0.1)
    result = train(
        tmp_path, "run", task=Toy(step_seconds=0.1), steps=steps, faults=[fault], num_spares=1, checkpoints=chosen_by_itself
    )
    assert result.digest == undisturbed(steps=steps).digest
    assert promise_kept(result) == []
    decisions = events(result, "IntervalChosen")
    first = decisions[0]
    assert first["k"] == max(1, first["k_persist"], first["k_overhead"]), "by Algorithm 1, from what was measured"
    assert min(first[name] for name in ("iteration_s", "copy_s", "persist_s", "snapshot_bytes")) > 0
    assert first["iteration_s"] >= 0.1
    stored = [event["step"] for event in events(result, "CheckpointCommitted")]
    assert 4 < stored[0] <= first["step"], "the first steps are measured without one; the first checkpoint is measured itself"
    assert stored[-1] == steps
    heir = next(decision for decision in decisions if decision["member"] != first["member"])
    assert heir["step"] == result.recoveries[0].step
    # k is stored with each checkpoint, of which the last may not have become durable; and of what is recalled no more counts
    # than a few times what Algorithm 1 says without what was observed.
    durable = max(event["step"] for event in events(result, "CheckpointCommitted") if event["at"] < heir["at"])
    before = [decision for decision in decisions if decision["member"] == first["member"]]
    newest = max(index for index, decision in enumerate(before) if decision["step"] <= durable)
    most = MOST_RECALLED * max(1, heir["k_persist"], heir["k_overhead"])
    assert heir["k"] in [min(decision["k"], most) for decision in before[newest:]]


PHASES = [(12, "data", None), (22, "backward", 1)], [(12, "update", None), (20, "checkpoint", None)]


@pytest.mark.long
@pytest.mark.parametrize("phases", PHASES, ids=["data-backward", "update-checkpoint"])
def test_every_replica_dies_at_once_twice(undisturbed, tmp_path: Path, phases: list[tuple[int, str, int | None]]) -> None:
    faults = [
        ft.FailAt(rank=rank, step=step, phase=phase, bucket=bucket, together=len(EVERYBODY))
        for step, phase, bucket in phases
        for rank in EVERYBODY
    ]
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert all(recovery.guarantee == Guarantee.EXACT for recovery in result.recoveries)
    # On a machine that is too busy somebody may be given up on the way, which costs nothing but time.
    back = [recovery for recovery in result.recoveries if recovery.strategy == Strategy.CHECKPOINT]
    assert len(back) >= 2
    assert 10 <= back[-1].step <= 20


@pytest.mark.long
def test_every_replica_dies_before_the_first_checkpoint(undisturbed, tmp_path: Path) -> None:
    faults = [ft.FailAt(rank=rank, step=3, phase="forward", together=len(EVERYBODY)) for rank in EVERYBODY]
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    assert result.recoveries[0].step == 0


def test_the_whole_cluster_of_workers_and_the_supervisor_die(undisturbed, tmp_path: Path) -> None:
    faults = [ft.FailAt(rank=rank, step=17, phase="reduced", together=len(EVERYBODY)) for rank in EVERYBODY]
    faults.append(ft.FailAt(role="supervisor", phase="REPLACE", nth=2))
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []


@pytest.mark.parametrize("update", ["barrier", pytest.param("wait_free", marks=pytest.mark.long)])
def test_a_worker_dies_while_a_checkpoint_is_written(undisturbed, tmp_path: Path, update: str) -> None:
    """The steps after a checkpoint began: it is under way then. What the others go on from is not the checkpoint."""
    faults = [ft.FailAt(rank=0, step=10, phase="forward"), ft.FailAt(rank=2, step=15, phase="data")]
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN, update=update)
    assert result.digest == undisturbed(update=update).digest
    assert promise_kept(result) == []
    assert {recovery.strategy for recovery in result.recoveries} == {Strategy.REPLICATION}
    assert events(result, "CheckpointCommitted")[-1]["step"] == 30


def test_the_end_of_an_epoch_is_kept_though_a_worker_dies_before_its_part(undisturbed, tmp_path: Path) -> None:
    """The others have begun it, and everybody goes on from that very step."""
    epoch, faults = 16, [ft.FailAt(rank=1, step=16, phase="checkpoint")]
    how = ft.CheckpointConfig(every=100, keep_epochs=True)
    result = train(tmp_path, "run", faults=faults, checkpoints=how)
    assert result.digest == undisturbed().digest
    assert promise_kept(result) == []
    assert (result.recoveries[0].strategy, result.recoveries[0].step) == (Strategy.REPLICATION, epoch)
    (stored,) = [one for one in events(result, "CheckpointCommitted") if one["step"] == epoch]
    assert stored["incarnation"] == result.recoveries[0].incarnation


@pytest.mark.long
def test_strategy_checkpoint_has_everybody_go_back(undisturbed, tmp_path: Path) -> None:
    faults = [ft.FailAt(rank=1, step=23, phase="forward")]
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN, strategy="checkpoint", task=Toy(0.02))
    assert result.digest == undisturbed(task=Toy(0.02)).digest
    assert (result.recoveries[0].strategy, result.recoveries[0].step) == (Strategy.CHECKPOINT, 20)
    assert whole_run_is_proven(tmp_path / "run")


@pytest.mark.parametrize("lost", [[1], [0, 1, 2]], ids=["one dies", "all die"])
def test_strategy_snapshot_goes_back_to_what_another_node_holds_in_memory(undisturbed, tmp_path: Path, lost: list[int]) -> None:
    faults = [ft.FailAt(rank=rank, step=23, phase="forward", together=len(lost)) for rank in lost]
    result = train(tmp_path, "run", faults=faults, checkpoints=OFTEN, strategy="snapshot", task=Toy(0.02))
    assert result.digest == undisturbed(task=Toy(0.02)).digest
    assert promise_kept(result) == []
    assert (result.recoveries[0].strategy, result.recoveries[0].step) == (Strategy.SNAPSHOT, 20)
    assert not list((tmp_path / "run").glob("checkpoints/step-*")), "nothing is written to storage"


def test_snapshots_are_held_on_a_node_where_no_worker_is(tmp_path: Path) -> None:
    train(tmp_path, "run", steps=8, checkpoints=OFTEN, strategy="snapshot", task=NotesNodes(tmp_path))
    holders = {path.read_text() for path in tmp_path.glob("holder-*")}
    workers = {path.read_text() for path in tmp_path.glob("worker-*")}
    assert len(holders) == 1
    assert workers
    assert not holders & workers, "a node that is lost would take the snapshots with it"


class NotesNodes(Toy):
    """Its workers write down on which node they are, and on which the holder of snapshots is."""

    def __init__(self, path: Path) -> None:
        super().__init__(0.02)
        self._path, self._noted = path, False

    def loss(self, output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        if not self._noted:
            self._noted = True
            name = next(a for a in list_named_actors(all_namespaces=True) if a["name"].endswith(":holder"))
            holder: Any = ray.get_actor(name["name"], namespace=name["namespace"])
            where = ray.get(holder.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=20)
            (self._path / f"holder-{os.getpid()}").write_text(where)
            (self._path / f"worker-{os.getpid()}").write_text(ray.get_runtime_context().get_node_id())
        return super().loss(output, batch)


def test_without_their_holder_the_survivors_go_on_from_what_they_have(undisturbed, tmp_path: Path) -> None:
    """And later snapshots are held by another one."""
    task, steps = KillsTheHolder(tmp_path / "killed"), 90
    faults = [ft.FailAt(rank=1, step=23, phase="forward"), ft.FailAt(rank=1, step=88, phase="forward")]
    result = train(tmp_path, "run", steps=steps, faults=faults, strategy="snapshot", task=task, checkpoints=OFTEN)
    assert task.killed.exists()
    assert result.digest == undisturbed(steps=steps).digest
    assert [r.step for r in result.recoveries] == [23, 85]


class KillsTheHolder(Toy):
    """Before step 22, a worker kills the holder of snapshots."""

    calls = 0

    def __init__(self, killed: Path) -> None:
        super().__init__(0.1)
        self.killed = killed

    def loss(self, output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        if self.calls == 22 and not self.killed.exists():
            self.killed.touch()
            for actor in list_named_actors(all_namespaces=True):
                if actor["name"].endswith(":holder"):
                    with suppress(ValueError):
                        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        return super().loss(output, batch)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(undisturbed, tmp_path: Path) -> None:
    how = ft.CheckpointConfig(every=5, num_to_keep=4)
    train(tmp_path, "run", steps=20, checkpoints=how)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*20-*"))[-1]
    shard = sorted(newest.glob("*.arrow"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = train(tmp_path, "run", checkpoints=how)
    assert result.digest == undisturbed().digest
    rejected = events(result, "CheckpointRejected")
    assert rejected
    assert shard.name in rejected[0]["reason"]
    assert events(result, "Resumed")[0]["step"] == 15
    left = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert newest.name not in left, "it counted as one to fall back to"
    assert any(name.startswith("step-000000015-") for name in left)


@pytest.mark.long
def test_the_persister_is_killed(undisturbed, tmp_path: Path) -> None:
    """In the midst of a checkpoint: training goes on, says so, and writes the next one with another persister."""
    slow, killed = Toy(0.05), threading.Event()
    stored = tmp_path / "run" / "checkpoints"

    def is_under_way() -> bool:
        return any(not (path / "manifest.json").exists() for path in stored.glob("step-*"))

    def kill_one() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed.is_set():
            if is_under_way():
                for process in persisters()[:1]:
                    process.kill()
                    killed.set()
            time.sleep(0.001)

    killer = threading.Thread(target=kill_one)
    killer.start()
    result = train(tmp_path, "run", task=slow, checkpoints=ft.CheckpointConfig(every=2))
    killer.join()
    assert killed.is_set()
    assert result.digest == undisturbed(task=slow).digest
    assert events(result, "CheckpointCommitted")[-1]["step"] == 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.long
def test_a_full_disk_does_not_end_training(undisturbed, tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(120_000))
    result = train(tmp_path, "run", checkpoints=ft.CheckpointConfig(every=5, storage_path=str(small_disk)))
    assert result.digest == undisturbed().digest
    failed = events(result, "CheckpointFailed")
    assert failed
    assert "No space left" in failed[0]["reason"]
    assert "Free some space" in failed[0]["reason"]


def test_what_is_required_must_be_there(cluster, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no valid checkpoint"):
        train(tmp_path, "run", checkpoints=ft.CheckpointConfig(resume="require"))


class Wider(Toy):
    """Another model and another optimizer."""

    def model(self, stage: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


class Longer(Toy):
    """Other data."""

    def dataset(self) -> TensorDataset:
        return TensorDataset(*(torch.cat([tensor, tensor[:100]]) for tensor in super().dataset().tensors))


class Negated(Toy):
    """Other data of the same length."""

    def dataset(self) -> TensorDataset:
        inputs, labels = super().dataset().tensors
        return TensorDataset(-inputs, labels)


@pytest.mark.long
def test_a_checkpoint_of_something_else_is_refused_with_every_difference(cluster, tmp_path: Path) -> None:
    train(tmp_path, "run", steps=10, checkpoints=OFTEN)
    with pytest.raises(MismatchError) as caught:
        train(tmp_path, "run", task=Wider(optimizer="SGD"), checkpoints=OFTEN)
    for difference in ("0.weight is torch.float32 [64, 16]", "4.weight is in the checkpoint only", "AdamW", "SGD"):
        assert difference in str(caught.value)
    with pytest.raises(MismatchError, match="dataset_size 500 in the checkpoint, 600 here"):
        train(tmp_path, "run", task=Longer(), checkpoints=OFTEN)
    with pytest.raises(MismatchError, match="dataset of the same length with other content"):
        train(tmp_path, "run", task=Negated(), checkpoints=OFTEN)
    overridden = ft.CheckpointConfig(every=5, override=("dataset",))
    assert events(train(tmp_path, "run", task=Longer(), checkpoints=overridden), "Resumed")[0]["step"] == 10


def test_fewer_steps_than_are_done_already_are_refused(cluster, tmp_path: Path) -> None:
    train(tmp_path, "run", workers=1, steps=10, checkpoints=OFTEN)
    with pytest.raises(ConfigError, match=r"newest checkpoint .* is of step 10"):
        train(tmp_path, "run", workers=1, steps=9, checkpoints=OFTEN)


@pytest.mark.long
def test_never_resume_begins_anew(undisturbed, tmp_path: Path) -> None:
    train(tmp_path, "run", steps=10, checkpoints=OFTEN)
    result = train(tmp_path, "run", checkpoints=ft.CheckpointConfig(every=5, resume="never"))
    assert result.digest == undisturbed().digest
    assert events(result, "Resumed")[0]["step"] == 0


class Sometimes(Toy):
    """Its loss is not finite at one step: the first time only, or always."""

    def __init__(self, marker: Path, always: bool) -> None:
        super().__init__()
        self.marker, self.always, self.calls = marker, always, 0

    def loss(self, output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        if self.calls == 13 or (self.always and self.marker.exists()):
            first = not self.marker.exists()
            self.marker.touch()
            if first or self.always:
                return super().loss(output, batch) * float("nan")
        return super().loss(output, batch)


def test_a_loss_that_is_not_finite_once_is_rolled_back(undisturbed, tmp_path: Path) -> None:
    task = Sometimes(tmp_path / "marker", always=False)
    result = train(tmp_path, "run", task=task, on_non_finite="roll_back", checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    assert result.recoveries[0].strategy == Strategy.CHECKPOINT


class KeepsItsModel(Sometimes):
    """Asked for its model a second time, it gives the one that was trained meanwhile."""

    kept: torch.nn.Module | None = None

    def model(self, stage: int) -> torch.nn.Module:
        if self.kept is None:  # in the driver already, whose generator may be anywhere
            torch.manual_seed(5)
            self.kept = super().model(stage)
        return self.kept


def test_the_beginning_is_one_with_first_weights_whatever_the_task_keeps(undisturbed, tmp_path: Path) -> None:
    """There is no checkpoint yet, so the processes that are there begin anew."""
    (tmp_path / "there").touch()
    calm, once = (KeepsItsModel(tmp_path / name, always=False) for name in ("there", "marker"))
    how = {"on_non_finite": "roll_back", "checkpoints": ft.CheckpointConfig(every=100)}
    result = train(tmp_path, "run", task=once, **how)
    assert result.digest == train(tmp_path, "calm", task=calm, **how).digest
    assert [r.step for r in result.recoveries] == [0]


class Spoilt(Toy):
    """Its tenth update, the first time, leaves something in the model that is not finite; the next loss shows it."""

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer, updates = super().optimizer(params), itertools.count(1)

        def spoil(*_: object) -> None:
            if next(updates) == 10:
                with torch.no_grad():
                    params[-1].fill_(float("inf"))

        optimizer.register_step_post_hook(spoil)
        return optimizer


@pytest.mark.long
def test_a_checkpoint_of_what_an_update_has_spoilt_is_passed_over(undisturbed, tmp_path: Path) -> None:
    """It was stored before anybody could see that."""
    result = train(tmp_path, "run", task=Spoilt(step_seconds=0.3), on_non_finite="roll_back", checkpoints=OFTEN)
    assert result.digest == undisturbed().digest
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.step, recovery.guarantee) == (Strategy.CHECKPOINT, 5, Guarantee.EXACT)
    stored = [(event["step"], event["incarnation"]) for event in events(result, "CheckpointCommitted")]
    assert (10, 1) in stored


def test_a_loss_that_is_never_finite_ends_the_run(cluster, tmp_path: Path) -> None:
    task = Sometimes(tmp_path / "marker", always=True)
    with pytest.raises(NonFiniteLossError):
        train(tmp_path, "run", workers=2, task=task, on_non_finite="roll_back", checkpoints=OFTEN)


@pytest.mark.parametrize(
    "values",
    [
        *({"overhead": 0}, {"overhead": 1.0}, {"overhead": "5%"}, {"every": 0}, {"every": 2.5}),
        *({"resume": "maybe"}, {"override": "all"}),
    ],
)
def test_values_that_cannot_be_used(values: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ft.CheckpointConfig(**values)


def test_a_place_of_no_known_kind(cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere://"):
        train(tmp_path, "run", checkpoints=ft.CheckpointConfig(storage_path="nowhere://bucket"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checkpoints_on_a_disk_that_the_workers_do_not_share(cluster, tmp_path: Path) -> None:
    """The same path leads elsewhere from their working directory than from the supervisor's."""
    here = ray.get(ray.remote(lambda: Path.cwd()).remote())
    place = f"/proc/self/cwd/{os.path.relpath(tmp_path / 'elsewhere', here)}"
    (tmp_path / "code").mkdir()
    code = shutil.make_archive(str(tmp_path / "code"), "zip", tmp_path, "code")
    environment, often = {"working_dir": Path(code).as_uri()}, ft.CheckpointConfig(every=5, storage_path=place)
    with pytest.raises(ConfigError, match=r"node .* does not see the run's checkpoints in /proc/self/cwd"):
        train(tmp_path, "run", checkpoints=often, worker_runtime_env=environment)
    assert not list((tmp_path / "elsewhere").glob("run/checkpoints/step-*"))
    train(tmp_path, "again", steps=10, checkpoints=often)
    assert list((tmp_path / "elsewhere").glob("again/checkpoints/step-*"))


def test_two_writers_to_one_place(cluster, tmp_path: Path) -> None:
    """The other one may be of another cluster: only the place itself can tell. Its records are not touched."""
    train(tmp_path, "run", workers=1, steps=3, checkpoints=OFTEN)
    records = {name: (tmp_path / "run" / name).read_bytes() for name in ("events.jsonl", "nonce")}
    for place, checkpoints in (("run", ft.CheckpointConfig(every=None)), ("run/checkpoints", OFTEN)):
        other = lock.acquire(open_storage(str(tmp_path / place)), "somebody else")
        try:
            with pytest.raises(LockedError, match="somebody else"):
                train(tmp_path, "run", workers=1, checkpoints=checkpoints)
            assert place != "run" or {name: (tmp_path / "run" / name).read_bytes() for name in records} == records
        finally:
            other.release()


class Unstorable(Toy):
    """Its schedule keeps what has no plain form."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        schedule.notes = object()  # type: ignore[attr-defined]
        return schedule


def test_what_cannot_be_stored_is_told_before_the_first_step(cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler/notes is a builtins\.object"):
        train(tmp_path, "run", workers=2, task=Unstorable(), checkpoints=OFTEN)
    never = ft.CheckpointConfig(every=None)
    train(tmp_path, "without", workers=1, steps=3, task=Unstorable(), checkpoints=never)


class InLists(torch.optim.SGD):
    """Keeps matrices of a parameter in a list."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["GG"] = [torch.eye(2)]


class Listed(Toy):
    """What its optimizer keeps cannot be stored; there is nothing of it before the first update."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return InLists(params, lr=0.01)


def test_what_an_optimizer_cannot_have_stored_is_told_after_the_first_step(cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer/.*/GG/0 .* under a key of its own"):
        train(tmp_path, "run", workers=2, task=Listed(), checkpoints=OFTEN)


def test_no_persister_outlives_its_run(cluster, tmp_path: Path) -> None:
    train(tmp_path, "run", workers=2, checkpoints=OFTEN)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not persisters():
            return
        time.sleep(0.1)
    pytest.fail("a persister process is left")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_frozen_persister_does_not_hold_up_training(undisturbed, tmp_path: Path) -> None:
    """Storage hangs: training leaves checkpoints out, says so, and ends with the same bits. Only the end of the run waits, for
    two minutes: what hangs might yet go on, and would then have the last state."""
    slow, frozen = Toy(0.02), []

    def freeze_all() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(frozen) < len(EVERYBODY):
            for process in persisters():
                if process.pid not in frozen:
                    os.kill(process.pid, signal.SIGSTOP)
                    frozen.append(process.pid)
            time.sleep(0.01)

    freezer = threading.Thread(target=freeze_all)
    freezer.start()
    try:
        result = train(tmp_path, "run", task=slow, checkpoints=ft.CheckpointConfig(every=4))
    finally:
        freezer.join()
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert result.digest == undisturbed(task=slow).digest
    assert "hangs" in events(result, "CheckpointFailed")[0]["reason"]
