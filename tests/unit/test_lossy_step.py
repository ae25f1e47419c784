"""What a step says that it went without: of this attempt at it, and of no other."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import FencedError, NonFiniteLossError
from raytrain_ft.policy.sampling import GlobalBatch, Position, Sampling, sample_ids
from raytrain_ft.runtime.worker import Worker
from raytrain_ft.training import mending
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence, PeerLostError
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.sleep import ASLEEP, SILENT, WAKES, Sleep
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.step import NOT_FINITE, Replica


class Line(ft.TrainTask):
    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs[:, :2].argmax(dim=1))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1])


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Any:
    """A replica that is the only one, and its connections to nobody. Its parameter: more of its settings."""
    more = getattr(request, "param", {})
    settings = StepSettings(seats=2, bucket_bytes=64, first_bucket_bytes=64, finishes_alone=True, **more)
    replica = build_replica(Line(), Sampling(24, 8, 0), settings, use_gpu=False, undo_mode="exact", probe=None)
    fence = Fence(1)
    replica.loader.start(replica.state.position, 0, 1)
    yield replica, Links(fence, 0, 1, Solo(fence))  # type: ignore[arg-type]
    replica.loader.stop()


def test_a_step_that_is_done_again_has_all_of_its_samples_again(alone: tuple[Replica, Links]) -> None:
    """After a lossy recovery everybody may go back to a checkpoint: the same step then lacks nothing."""
    replica, links = alone
    replica.lost = (0, ((0, 4),))  # what an attempt at step 0 went without, before everybody went back
    replica.not_finite = 0
    assert replica.train_step(links).lost == ()
    assert replica.lost is replica.not_finite is None


@pytest.mark.parametrize("alone", [{"returns_lost": True}], indirect=True)
def test_what_a_step_lost_is_read_again_at_the_end_of_the_epoch(alone: tuple[Replica, Links]) -> None:
    replica, links = alone
    first = replica.train_step(links)
    assert (first.returned, first.reads_change) == (False, False)
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    replica.reducer.finish()
    replica.lost = (1, ((10, 13),))  # what a recovery says
    replica.update()
    commit = replica.commit()
    assert (commit.lost, commit.returned, commit.reads_change) == (((10, 13),), True, True)
    assert replica.state.position == Position(0, 16, ((10, 13),))
    replica.loader.start(replica.state.position, 0, 1)
    drawn = [replica.train_step(links).attempt for _ in range(3)]
    own = sample_ids(Sampling(24, 8, 0), 0, range(24))
    assert [len(attempt.batch) for attempt in drawn] == [8, 3, 8]
    assert drawn[1].ids[0].tolist() == own[10:13].tolist()
    assert replica.state.position == Position(1, 8)


@pytest.mark.parametrize("lost", [None, (7, ((0, 4),))], ids=["never", "in another step"])
def test_a_loss_that_cost_no_sample_scales_nothing(alone: tuple[Replica, Links], lost: Any) -> None:
    """Who died slept, or its share of a short batch was empty: the sum over the survivors is the mean already."""
    replica, links = alone
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    replica.reducer.finish()
    reduced = [bucket.flat.clone() for bucket in replica.state.buckets]
    replica.lost = lost
    group: Any = links.group
    mending.reduce_alone(replica, range(len(reduced)), group, leads=True)
    assert all(torch.equal(bucket.flat, before) for bucket, before in zip(replica.state.buckets, reduced, strict=True))


def test_the_mean_is_over_samples_and_not_over_ranks(alone: tuple[Replica, Links]) -> None:
    """Of a batch of 8, the 3 of one that died are missing: what the others hold are sums over 5, each weighted with 1/8."""
    replica, links = alone
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    replica.reducer.finish()
    held = [[p.grad.clone() for p in bucket.params if p.grad is not None] for bucket in replica.state.buckets]
    replica.lost = (0, ((2, 5),))
    group: Any = links.group
    mending.reduce_alone(replica, range(len(held)), group, leads=True)
    for bucket, grads in zip(replica.state.buckets, held, strict=True):
        for view, grad in zip(bucket.views, grads, strict=True):
            torch.testing.assert_close(view, grad * (8 / 5))


def reduce_most(replica: Replica, links: Links) -> None:
    """Step 0: its last bucket is reduced by the survivors alone, and the others are not finite, of one that died since."""
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    replica.reducer.finish()
    *others, last = replica.state.buckets
    for bucket in others:
        bucket.flat[: -len(bucket.params) - 1] = torch.nan
    replica.lost = (0, ((2, 5),))
    group: Any = links.group
    mending.reduce_alone(replica, [last.index], group, leads=True)


@pytest.mark.parametrize("alone", [{"returns_lost": True}], indirect=True)
@pytest.mark.parametrize("on_non_finite", ["raise", "skip"])
def test_a_gradient_of_the_lost_is_looked_at_although_their_loss_went_down(
    alone: tuple[Replica, Links], on_non_finite: Any
) -> None:
    """Those who are left hold a finite loss, and sums that were made before with what is not."""
    replica, links = alone
    replica.settings = replace(replica.settings, on_non_finite=on_non_finite)
    reduce_most(replica, links)
    before = replica.state.digests()
    if on_non_finite == "raise":
        with pytest.raises(NonFiniteLossError, match="the norm of the gradients of step 0 is nan"):
            replica.update()
        assert replica.state.digests() == before
        return
    replica.update()
    commit = replica.commit()
    assert math.isfinite(commit.loss)
    assert (commit.lost, commit.why, commit.returned) == (((0, 8),), NOT_FINITE, False)
    assert all(p.isfinite().all() for p in replica.state.model.parameters())


@pytest.mark.parametrize("alone", [{"update": "wait_free"}], indirect=True)
@pytest.mark.parametrize("value", [torch.nan, 0.0], ids=["not finite", "finite"])
def test_what_was_updated_with_before_the_loss_is_looked_at_too(
    alone: tuple[Replica, Links], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Wait-free, all have applied the lost worker's gradient of the first bucket when they finish the step without it."""
    replica, links = alone
    group: Any = links.group
    reduce, buckets = group.all_reduce, replica.state.buckets

    def breaks_off(tensor: torch.Tensor, *more: Any) -> Any:
        if tensor is buckets[-1].flat:
            raise PeerLostError("a collective failed")
        if tensor is buckets[0].flat:
            tensor[0] = value
        return reduce(tensor, *more)

    monkeypatch.setattr(group, "all_reduce", breaks_off)
    with pytest.raises(PeerLostError):
        replica.train_step(links)
    monkeypatch.undo()
    replica.reducer.abandon()
    replica.lost = (0, ((2, 5),))
    mending.reduce_alone(replica, [buckets[-1].index], group, leads=True)
    buckets[-1].accept()
    replica.update_bucket(buckets[-1])
    assert [bucket.version for bucket in buckets] == [1] * len(buckets)
    assert math.isfinite(replica.state.loss)
    if value == 0.0:
        replica.check_loss()
        return
    with pytest.raises(NonFiniteLossError, match="the norm of the gradients of step 0 is nan, and wait-free updates"):
        replica.check_loss()


def test_gradients_are_looked_at_only_where_samples_are_missing(
    alone: tuple[Replica, Links], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To do so in every step would cost a pass over all of them; nor are they clipped by what was found."""
    replica, links = alone
    looks: list[int] = []
    norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: looks.append(len(grads)) or norm(grads))
    replica.train_step(links)
    assert not looks
    replica.begin(replica.loader.next(), links, 0.0)
    replica.forward_backward()
    replica.reducer.finish()
    grads = [p.grad.clone() for p in replica.state.model.parameters() if p.grad is not None]
    replica.lost = (1, ((10, 13),))
    replica.update()
    assert looks == [4]
    assert all(torch.equal(p.grad, old) for p, old in zip(replica.state.model.parameters(), grads, strict=True))


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    ("worth", "whole"), [("unknown", True), (0, True), (1, False), (None, False)], ids=["unknown", "this", "another", "none"]
)
def test_gradients_are_computed_to_the_end_if_somebody_may_use_them(
    alone: tuple[Replica, Links], worth: Any, whole: bool, when: str
) -> None:
    replica, links = alone

    def end(*_: Any) -> None:
        links.fence.trip()
        if worth != "unknown":
            links.fence.forsake(worth)

    layer = replica.state.model.get_submodule("2")
    if when == "forward":
        layer.register_forward_hook(end)
    else:
        layer.register_full_backward_hook(end)
    with pytest.raises(FencedError):
        replica.train_step(links)
    replica.reducer.abandon()
    share = mending.share(replica)
    assert share is not None
    assert (share.step, share.whole) == (0, whole)
    first = next(replica.state.model.parameters())
    assert (first.grad is not None) is whole


def test_a_worker_forsakes_only_the_step_that_its_last_fence_ended() -> None:
    worker = object.__new__(Worker)
    worker._lock = threading.Lock()
    worker._trains, worker._fence = Fence(1), Fence(2)  # fenced as 2 while it trains as 1
    worker.forsake(1, None)
    assert not worker._trains.is_vain(0), "that one is over: what it says may not hold any more"
    worker.forsake(2, 5)
    assert (worker._trains.is_vain(4), worker._trains.is_vain(5)) == (True, False)
    worker._trains = worker._fence = Fence(3)
    worker.forsake(3, None)
    assert not worker._trains.is_vain(0), "it trains again: the word came too late"


def test_words_and_shares() -> None:
    sleep = Sleep()
    assert sleep.say(1, 5, leads=True) == {}
    sleep.wanted = True
    assert sleep.say(1, 5, leads=False) == {1: ASLEEP}
    sleep.at_once = True
    assert [sleep.is_silent(bucket) for bucket in range(1, 3)] == [True, True]
    assert sleep.say(1, 5, leads=False) == {1: ASLEEP | SILENT}
    assert sleep.say(1, 0, leads=False) == {1: ASLEEP}  # its share was empty: nothing is missing
    batch = GlobalBatch(0, 8, 20)
    assert sleep.lost([0, ASLEEP | SILENT, 0], batch) == ((12, 16),)
    assert sleep.settle([0, ASLEEP | SILENT, 0])
    assert sleep.weights(3) == (1.0, 0.0, 1.0)
    assert not sleep.settle([0, ASLEEP, 0])
    assert sleep.settle([ASLEEP] * 3)
    assert sleep.weights(3) is None  # if all want to sleep, nobody does


def test_a_sleeper_is_spoken_for() -> None:
    """By one who leads those who are awake, and no longer than until it is to wake. What woke it does not wake it again."""
    sleep = Sleep()
    sleep.settle([0, ASLEEP, ASLEEP])
    assert sleep.say(0, 5, leads=True) == {1: ASLEEP, 2: ASLEEP}
    assert sleep.say(0, 5, leads=False) == {}
    assert sleep.say(1, 0, leads=False) == {1: WAKES}, "it is not told to sleep any more"
    sleep.wanted = True
    assert sleep.say(1, 0, leads=False) == {}, "it said so when it fell asleep"
    sleep.wanted = False
    sleep.waking |= {0, 2}  # 0 is awake: it may be put to sleep before it is asked again
    assert sleep.say(0, 5, leads=True) == {1: ASLEEP}
    assert sleep.settle([0, ASLEEP, 0])
    assert sleep.waking == {0}
    assert sleep.settle([0, ASLEEP, ASLEEP])
    assert sleep.say(0, 5, leads=True) == {1: ASLEEP, 2: ASLEEP}
    assert sleep.settle([0, ASLEEP | WAKES, ASLEEP]), "who speaks for it did not hear of it, and it wakes all the same"
    assert sleep.asleep == {2}
