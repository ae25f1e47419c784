"""Going on without redoing: what the record says was lost is what was lost, and the survivors stay equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import promise_kept, train
from toy import Apart, Toy

from raytrain_ft import FailAt
from raytrain_ft.policy.audit import audit
from raytrain_ft.policy.sampling import Sampling, next_batch, position_at, sample_ids, share
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.result import load_model
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.study import Group, Worker
from raytrain_ft.study.emulate import Lost
from raytrain_ft.training.random import sample_seed, seed_all, step_seed

Step = Callable[[Group, list[Worker]], None]
"""A mini-batch of the emulation."""
RESTING = Toy(backward_seconds=0.2)
"""So that everybody has begun the step, and updated its first bucket, when a later one is reduced. Its bits are Toy's."""


def lost_samples(result) -> list[dict]:
    return [r for r in read_records(Path(result.path) / "events.jsonl") if r["event"] == "SamplesLost"]


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_survivors_finish_the_step_with_their_own_gradients(update: str, cluster, tmp_path: Path) -> None:
    faults = [FailAt(rank=1, step=10, phase="reduce", bucket=1), FailAt(rank=0, step=17, phase="backward", bucket=2)]
    result = train(tmp_path, "lossy", strategy="lossy", update=update, task=RESTING, steps=20, faults=faults)
    assert promise_kept(result) == []
    assert [recovery.strategy for recovery in result.recoveries] == [Strategy.LOSSY] * 2
    assert all(recovery.guarantee == Guarantee.LOSSY and recovery.completes for recovery in result.recoveries)
    assert [recovery.samples_lost for recovery in result.recoveries] == [11, 11]  # of 32 over 3 ranks
    assert [(lost["step"], lost["stop"] - lost["start"]) for lost in lost_samples(result)] == [(10, 11), (17, 11)]
    assert audit(read_records(Path(result.path) / "events.jsonl")).samples_lost == 22


@pytest.mark.long
def test_survivors_go_on_smaller_and_are_joined_later(cluster, tmp_path: Path) -> None:
    task = Toy(step_seconds=0.1, backward_seconds=0.2)
    how = {"strategy": "lossy", "replacement": "shrink", "workers": (1, 3), "num_spares": 0, "steps": 60}
    result = train(tmp_path, "joined", task=task, faults=[FailAt(rank=1, step=10, phase="reduce", bucket=1)], **how)
    assert promise_kept(result) == []
    loss, *rest = result.recoveries
    assert (loss.strategy, loss.samples_lost, loss.world_after) == (Strategy.LOSSY, 11, 2)
    assert [recovery.lost for recovery in rest] == [[]] * len(rest)
    assert rest[-1].world_after == 3
    assert [(lost["step"], lost["stop"] - lost["start"]) for lost in lost_samples(result)] == [(10, 11)]


def test_what_was_lost_is_read_again_at_the_end_of_its_epoch(cluster, tmp_path: Path) -> None:
    """500 samples, 16 steps an epoch, and 18 steps: what step 10 lost fills up the short batch of step 15."""
    fault = FailAt(rank=1, step=10, phase="reduce", bucket=1)
    how = {"strategy": "lossy", "lost_samples": "return", "steps": 18}
    result = train(tmp_path, "returned", task=RESTING, faults=[fault], **how)
    assert promise_kept(result) == []
    assert [(lost["step"], lost["stop"] - lost["start"], lost["returned"]) for lost in lost_samples(result)] == [(10, 11, True)]
    found = audit(read_records(Path(result.path) / "events.jsonl"))
    assert (found.ok, found.samples_lost, found.epochs_complete) == (True, 0, 1)
    assert found.samples_used == 500 + 2 * 32


def test_too_few_left_redo_the_step_exactly(undisturbed, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="reduce", bucket=1)
    result = train(tmp_path, "quorum", strategy="lossy", quorum=0.9, task=RESTING, faults=[fault])
    assert result.digest == undisturbed().digest
    (recovery,) = result.recoveries
    assert recovery.guarantee == Guarantee.EXACT
    assert "quorum is 90%" in recovery.reason


def test_who_computes_in_vain_leaves_off(undisturbed, tmp_path: Path) -> None:
    """Rank 1 dies at the beginning of step 11, of which rank 2 has no gradients, for it is still updating: so step 11 will be
    redone, and rank 0, who has begun it, need not come to its end."""
    fault = FailAt(rank=1, step=11, phase="forward")
    result = train(tmp_path, "vain", strategy="lossy", task=Apart(), steps=16, faults=[fault])
    assert promise_kept(result) == []
    assert result.digest == undisturbed(task=Apart(rests=False), steps=16).digest
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee, recovery.step) == (Strategy.REPLICATION, Guarantee.EXACT, 11)
    assert recovery.fenced - recovery.detected < 3, "rank 0 rests six seconds if nobody tells it anything"


def test_a_partial_update_stays_and_is_counted(cluster, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="backward", bucket=2)
    result = train(tmp_path, "rollback", strategy="rollback", update="wait_free", task=RESTING, steps=20, faults=[fault])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee) == (Strategy.ROLLBACK, Guarantee.LOSSY)
    assert recovery.updated_twice > 0
    assert recovery.undone == 0
    assert lost_samples(result) == []


@pytest.mark.parametrize("update", ["barrier", pytest.param("wait_free", marks=pytest.mark.long)])
def test_an_interrupted_step_is_left_out(update: str, cluster, tmp_path: Path) -> None:
    fault = FailAt(rank=1, step=10, phase="reduce", bucket=1)
    result = train(tmp_path, "skip", strategy="skip", update=update, task=RESTING, steps=14, faults=[fault])
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (recovery.strategy, recovery.guarantee, recovery.samples_lost) == (Strategy.SKIP, Guarantee.LOSSY, 32)
    assert [(lost["step"], lost["stop"] - lost["start"]) for lost in lost_samples(result)] == [(10, 32)]


SEED, STRUCK, STEPS = 7, 10, 14


def rolled_back(done: int, lost: Lost = "skip") -> Step:
    """A step that is cut after so many tensors and redone."""

    def step(group: Group, workers: list[Worker]) -> None:
        group.interrupt(group.gradients(workers), done, lost)
        group.train(group.gradients(workers))

    return step


def finished(done: int) -> Step:
    """A step that is cut after so many tensors and finished by rank 0 alone."""
    return lambda group, workers: group.lossy(group.gradients(workers), done, survivors=1)


def whole(group: Group, workers: list[Worker]) -> None:
    """An undisturbed step."""
    group.train(group.gradients(workers))


def emulated(optimizer: str, struck: Step = whole) -> Group:
    """What two workers that train the toy come to by the study's emulation, with `struck` in the place of step 10."""
    task = Toy(optimizer=optimizer)
    dataset = task.dataset()
    sampling = Sampling(len(dataset), 32, SEED)
    seed_all(SEED)
    model = task.model(0)
    group = Group(model, task.optimizer(model.parameters()))
    scheduler = task.scheduler(group.optimizer)

    def loss(step: int, rank: int, model: torch.nn.Module) -> torch.Tensor:
        batch, _ = next_batch(sampling, position_at(sampling, step))
        generator = torch.Generator()
        samples = [
            task.augment(dataset[i], generator.manual_seed(sample_seed(SEED, batch.epoch, i)))
            for i in sample_ids(sampling, batch.epoch, share(batch, rank, 2)).tolist()
        ]
        inputs, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        seed_all(step_seed(SEED, step, rank, 0))
        return task.loss(model(inputs), (inputs, labels))

    for step in range(STEPS):
        workers = [Worker(partial(loss, step, rank), 0) for rank in range(2)]
        (struck if step == STRUCK else whole)(group, workers)
        scheduler.step()
    return group


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a worker has: the sums of two are other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD", "AdamW"))])
def test_a_real_rollback_is_the_emulated_one(optimizer: str, cluster, tmp_path: Path) -> None:
    """A SIGKILL between the second and the third bucket: the bits of the study's emulation (mechanisms NI-14), for with two
    workers, halves are exact; BatchNorm's statistics up to rounding, for replicas agree upon their changes. The paper's zeros
    instead of lost gradients come to the same with plain SGD, and to something else where momentum, decay or moments move what
    has none.

    The survivor hears of it within milliseconds, before or after it updates the second bucket, too: the record tells.
    """
    fault = FailAt(rank=1, step=STRUCK, phase="backward", bucket=2)
    task = Toy(optimizer=optimizer, backward_seconds=0.2)
    how = {"strategy": "rollback", "update": "wait_free", "workers": 2, "steps": STEPS, "seed": SEED}
    result = train(tmp_path, "emulated", task=task, faults=[fault], **how)
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert recovery.updated_twice is not None
    undisturbed = emulated(optimizer)
    sizes = [p.numel() for p in undisturbed.params]
    buckets = [sum(sizes[:2]), sum(sizes[:4])].index(recovery.updated_twice) + 1
    assert f"{buckets} buckets stay so" in recovery.reason
    real = load_model(task, result)
    _check_same(real, emulated(optimizer, rolled_back(2 * buckets)).model)
    assert _apart(real, undisturbed.model) > 1e-3  # another cut, or none, would show
    zeroed = _apart(real, emulated(optimizer, rolled_back(2 * buckets, "zero")).model)
    assert zeroed == 0 if optimizer == "plain" else zeroed > 1e-4


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("bucket", [1, 2])
@pytest.mark.parametrize("optimizer", ["plain", "AdamW"])
def test_a_real_lossy_step_is_the_emulated_one(optimizer: str, bucket: int, cluster, tmp_path: Path) -> None:
    """Up to the cut the mean over both, from there on the survivor's own gradients (Nicolae et al., III-C)."""
    fault = FailAt(rank=1, step=STRUCK, phase="backward", bucket=bucket)
    task = Toy(optimizer=optimizer, backward_seconds=0.2)
    result = train(tmp_path, "emulated", task=task, faults=[fault], strategy="lossy", workers=2, steps=STEPS, seed=SEED)
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert recovery.strategy == Strategy.LOSSY
    found = re.search(r"(\d) of 3 buckets", recovery.reason)
    assert found is not None, recovery.reason
    real = load_model(task, result)
    _check_same(real, emulated(optimizer, finished(2 * (3 - int(found[1])))).model)
    assert _apart(real, emulated(optimizer).model) > 1e-3


def _check_same(real: torch.nn.Module, group: torch.nn.Module) -> None:
    """Parameters to the bit; BatchNorm's statistics up to rounding."""
    for (name, mine), other in zip(group.named_parameters(), real.named_parameters(), strict=True):
        assert torch.equal(mine, other[1]), name
    statistics = [name for name, buffer in real.named_buffers() if buffer.is_floating_point()]
    assert statistics
    for name in statistics:
        torch.testing.assert_close(group.get_buffer(name), real.get_buffer(name), rtol=1e-5, atol=1e-6)


def _apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of two weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
