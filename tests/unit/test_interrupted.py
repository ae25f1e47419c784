"""Two survivors that were interrupted at any two places of a step are made equal, and go on as if nothing had been.

Both are real replicas that read the same samples, each in a group of its own, so each has the sums that a group of two would
give to both; what a survivor did not live to hear is taken from it. One of them may have begun the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.errors import FencedError, NonFiniteLossError, UndoRefusedError
from raytrain_ft.policy.forward import instead
from raytrain_ft.policy.reconcile import Changed, Copy, Plan, reconcile
from raytrain_ft.policy.sampling import Position, Sampling
from raytrain_ft.policy.world import rebuild_stages
from raytrain_ft.runtime import recovery
from raytrain_ft.training import mending, tail
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import StepSettings
from raytrain_ft.training.solo import Solo
from raytrain_ft.training.step import NOT_FINITE

SAMPLING = Sampling(32, 4, seed=0, shuffle=False)
STEP = 2
"""The step that is interrupted."""


class Task(ft.TrainTask):
    """Three layers, each a bucket of its own, and a BatchNorm."""

    def model(self, stage: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


class PartlyTrained(Task):
    """Its optimizer does not know the last layer's bias, though that gets a gradient."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return super().optimizer(list(params)[:-1])


class Spoilt(Task):
    """The loss of every step is infinite."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) + torch.inf


class Plateau(Task):
    """The learning rate is halved by nearly every loss."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


class Counting(torch.optim.SGD):
    """Its updates depend on how many there were, which is in no tensor and of no parameter."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        with torch.no_grad():
            for p in group["params"]:
                p.sub_(0.001 * group["count"])
        return super().step(closure)


class Counted(Plateau):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Counting(params, lr=0.1, momentum=0.9)


class Survivor:
    """A replica that is stopped at a place."""

    def __init__(self, name: str, update: Any, task: Task, first_bucket_bytes: int, more: dict[str, Any]) -> None:
        self.name = name
        self.stop_at: tuple[str, int, int | None] | None = None
        settings = StepSettings(update=update, bucket_bytes=1, first_bucket_bytes=first_bucket_bytes, **more)
        self.replica = build_replica(task, SAMPLING, settings, use_gpu=False, undo_mode="exact", probe=self._probe)
        self.replica.state.filled = True
        self._go_on(Position())

    def _go_on(self, position: Position) -> None:
        fence = Fence(1)
        self.replica.loader.start(position, 0, 1)
        self.links = Links(fence, 0, 1, Solo(fence))

    def _probe(self, phase: str, step: int, bucket: int | None) -> None:
        if (phase, step, bucket) == self.stop_at:
            self.stop_at = None
            raise FencedError("the incarnation is over")

    def train(self, until: int) -> None:
        """Whole steps."""
        while self.replica.state.step < until:
            self.replica.train_step(self.links)

    def interrupt(self, place: tuple[str, int, int | None], heard: set[int]) -> None:
        """Goes on to this place, and is parked. Of reductions that it did not wait for, it has heard of some buckets'."""
        self.stop_at = place
        with pytest.raises(FencedError):
            self.train(place[1] + 1)
        reducer = self.replica.reducer
        for bucket in reducer.buckets:
            if bucket.work is not None and bucket.index not in heard:
                bucket.work = None
                bucket.allocate()
        reducer.abandon()

    def resume(self) -> None:
        """As in a new incarnation."""
        self.replica.loader.stop()
        self._go_on(self.replica.state.position)


class Wire:
    """One member's end of what passes on what somebody gives to others, who take it afterwards."""

    group = None

    def __init__(self, member: str, sent: dict[tuple[str, int, str], Tensor]) -> None:
        self.member, self.sent = member, sent

    def copy(self, copies: Sequence[Copy], give: Callable[[Copy], Tensor]) -> list[tuple[int, Tensor]]:
        for copy in copies:
            for target in copy.targets if self.member == copy.source else ():
                self.sent[copy.what, copy.bucket, target] = give(copy).clone()
        mine = [copy for copy in copies if self.member in copy.targets]
        return [(copy.bucket, self.sent.pop((copy.what, copy.bucket, self.member))) for copy in mine]


@contextmanager
def survivors(update: str, task: Task | None = None, first_bucket_bytes: int = 1, **more: Any) -> Iterator[list[Survivor]]:
    found = [Survivor(name, update, task or Task(), first_bucket_bytes, more) for name in ("w0", "w1", "undisturbed")]
    try:
        yield found
    finally:
        for survivor in found:
            survivor.replica.loader.stop()


AHEAD = [("commit", None), ("data", None), ("forward", 0), ("backward", 0), ("reduce", 0)]
"""How far the one may be: in the step's end, or in the next step before anything of that is reduced, which takes both."""
BEHIND = [("wait", 0, ()), ("wait", 0, (0,)), ("wait", 0, (0, 1, 2, 3)), ("reduced", 2, ())]
"""Where the other hangs in the step before, and of which other reductions it has heard."""


@pytest.mark.parametrize("ahead", AHEAD, ids=lambda place: f"{place[0]}-{place[1]}")
@pytest.mark.parametrize("behind", BEHIND, ids=lambda place: f"{place[0]}-{place[1]}-{len(place[2])}")
@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_one_has_begun_the_next_step(
    ahead: tuple[str, int | None], behind: tuple[str, int, tuple[int, ...]], update: Any
) -> None:
    """The other is still in the reductions of the last one."""
    with survivors(update) as (newer, older, calm):
        for survivor in (newer, older):
            survivor.train(STEP)
        newer.interrupt((ahead[0], STEP if ahead[0] == "commit" else STEP + 1, ahead[1]), set())
        older.interrupt((behind[0], STEP, behind[1]), set(behind[2]))
        mend(newer, older, whole_update=update == "barrier")
        assert newer.replica.state.step == older.replica.state.step == STEP + 1
        calm.train(STEP + 1)
        assert newer.replica.state.digests() == older.replica.state.digests() == calm.replica.state.digests()
        for survivor in (newer, older):
            survivor.resume()
        for survivor in (newer, older, calm):
            survivor.train(STEP + 3)
        assert newer.replica.state.digests() == older.replica.state.digests() == calm.replica.state.digests()


IN_IT = [
    *(("wait", 0, ()), ("wait", 0, (1,)), ("wait", 0, (0, 1, 2, 3)), ("reduced", 2, ()), ("reduced", 2, (3,))),
    *(("updated", None, ()), ("commit", None, ())),
]
"""Places in a step of which everything is launched; wait-free, every bucket is updated by itself."""


@pytest.mark.parametrize("one", IN_IT, ids=lambda place: f"{place[0]}-{place[1]}-{len(place[2])}")
@pytest.mark.parametrize("other", IN_IT, ids=lambda place: f"{place[0]}-{place[1]}-{len(place[2])}")
@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_both_are_in_the_same_step(one: Any, other: Any, update: Any) -> None:
    """It is completed or redone; a bucket is undone only if both had updated it, and another was never reduced."""
    with survivors(update) as (first, second, calm):
        for survivor, (phase, bucket, heard) in ((first, one), (second, other)):
            survivor.train(STEP)
            place = 1 if (phase, bucket, update) == ("updated", None, "wait_free") else bucket
            survivor.interrupt((phase, STEP, place), set(heard))
        plan = mend(first, second, whole_update=update == "barrier")
        assert first.replica.state.digests() == second.replica.state.digests()
        for survivor in (first, second):
            survivor.resume()
        for survivor in (first, second, calm):
            survivor.train(STEP + 2)
        assert first.replica.state.digests() == second.replica.state.digests()
        if plan.undo:
            assert update == "wait_free"
            for a, b in zip(first.replica.state.model.parameters(), calm.replica.state.model.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert first.replica.state.digests() == calm.replica.state.digests()


@pytest.mark.parametrize("other", ["between", "wait", "commit"])
@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_one_is_between_the_last_bucket_and_the_large_buffers(other: str, update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is not reduced before these are, and is passed on together with them."""
    monkeypatch.setattr(tail, "LARGE", 1)

    def end(*_: Any) -> None:
        raise FencedError("the incarnation is over")

    with survivors(update) as (first, second, calm):
        for survivor, place in ((first, "between"), (second, other)):
            survivor.train(STEP)
            with monkeypatch.context() as patch:
                if place == "between":
                    patch.setattr(survivor.replica.state.tail, "fill_more", end)
                where = ("wait", LAST) if place == "wait" else ("commit", None)
                survivor.interrupt((where[0], STEP, where[1]), set(range(LAST + 1)))
            survivor.stop_at = None
            last = survivor.replica.state.buckets[LAST]
            assert (last.gradient, last.more is not None) == ((STEP, True) if place == "commit" else (None, False))
        plan = mend(first, second, whole_update=update == "barrier")
        assert plan.completes is (other == "commit")
        assert first.replica.state.digests() == second.replica.state.digests()
        for survivor in (first, second):
            survivor.resume()
        for survivor in (first, second, calm):
            survivor.train(STEP + 2)
        assert first.replica.state.digests() == second.replica.state.digests()
        for a, b in zip(
            first.replica.state.model.state_dict().values(), calm.replica.state.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first_bucket_bytes", [1, 20], ids=["a bucket of its own", "a bucket with others"])
def test_a_parameter_that_the_optimizer_does_not_know_needs_no_undo(first_bucket_bytes: int) -> None:
    with survivors("wait_free", PartlyTrained(), first_bucket_bytes) as (first, second, calm):
        for survivor in (first, second):
            survivor.train(STEP)
            survivor.interrupt(("updated", STEP, 1), set())
        assert mend(first, second, whole_update=False).undo == (0, 1)
        for survivor in (first, second):
            survivor.resume()
        for survivor in (first, second, calm):
            survivor.train(STEP + 2)
        assert first.replica.state.digests() == second.replica.state.digests()
        for a, b in zip(first.replica.state.model.parameters(), calm.replica.state.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_a_recovery_commits_no_step_whose_loss_is_not_finite(update: Any) -> None:
    with survivors(update, Spoilt()) as (first, second, _):
        for survivor in (first, second):
            survivor.interrupt(("reduced", 0, len(survivor.replica.state.buckets) - 1), set())
        with pytest.raises(NonFiniteLossError, match="the loss of step 0 is inf"):
            mend(first, second, whole_update=update == "barrier")
        assert first.replica.state.step == second.replica.state.step == 0


@pytest.mark.parametrize("lost", [(), ((9, 10),)], ids=["nothing lost", "lost before"])
@pytest.mark.parametrize("ahead", [("commit", STEP, None), ("data", STEP + 1, None), ("forward", STEP + 1, 0)], ids=str)
def test_who_copies_a_state_is_told_that_its_step_has_no_update(ahead: tuple[str, int, int | None], lost: Any) -> None:
    """It has not seen the loss. Of what had been lost of that step before, nothing is read again by the one alone."""
    with survivors("barrier", Spoilt(), on_non_finite="skip", returns_lost=True) as (first, second, calm):
        for survivor in (first, second):
            survivor.train(STEP)
        first.interrupt(ahead, set())
        second.interrupt(("wait", STEP, 0), set())
        if lost:
            first.replica.lost = second.replica.lost = (STEP, lost)  # the plan of a recovery that was interrupted
        plan = decide(first, second, whole_update=True, strategy="lossy")
        assert (plan.completes, plan.not_finite, plan.lost, len(plan.states)) == (True, True, lost, LAST + 1)
        outcome = carry_out(plan, first, second)
        assert outcome is not None
        commit = outcome.commit
        assert commit is not None
        assert (commit.lost, commit.why, commit.returned) == (((8, 12),), NOT_FINITE, False)
        calm.train(STEP + 1)
        assert first.replica.state.position == second.replica.state.position == calm.replica.state.position
        assert first.replica.state.digests() == second.replica.state.digests() == calm.replica.state.digests()
        assert second.replica.not_finite == STEP, "who copies from this one next is told, too"


@pytest.mark.parametrize("place", AHEAD[1:], ids=lambda place: f"{place[0]}-{place[1]}")
def test_who_leaves_in_the_midst_of_a_step_hands_over_what_was_committed(place: tuple[str, int | None]) -> None:
    with survivors("barrier") as (leaver, heir, calm):
        leaver.train(STEP)
        leaver.interrupt((place[0], STEP, place[1]), set())
        recovery.unpack(heir.replica.state, recovery.pack(leaver.replica))
        heir.resume()
        for survivor in (heir, calm):
            survivor.train(STEP + 2)
        assert heir.replica.state.digests() == calm.replica.state.digests()


class Fenced:
    """An end of which the incarnation is over before anything arrives."""

    def copy(self, copies: Sequence[Copy], give: Any) -> list[Any]:
        if copies:
            raise FencedError("the incarnation is over")
        return []


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_undone_or_kept_is_told_though_what_came_next_was_broken_off(keeps: bool) -> None:
    """The answer does not come, or too late: then the next fence is answered with it."""
    end: Any = Fenced()
    with survivors("wait_free") as (one, _, _):
        one.train(STEP)
        one.interrupt(("updated", STEP, 0), set())
        assert (marks := recovery.marks(one.name, one.replica)) is not None
        assert marks.changed is None
        size = sum(p.numel() for p in one.replica.state.buckets[0].params)
        if keeps:
            recovery.reconcile(one.replica, Plan(STEP, keep=(0,)), end, SAMPLING, 5)
        else:
            plan = Plan(STEP, undo=(0,), states=(Copy(1, "state", "another", (one.name,)),))
            with pytest.raises(FencedError):
                recovery.reconcile(one.replica, plan, end, SAMPLING, 5)
        assert (marks := recovery.marks(one.name, one.replica)) is not None
        assert set(marks.versions) == {STEP}
        assert marks.changed == (Changed(5, STEP, 0, size) if keeps else Changed(5, STEP, size))
        recovery.reconcile(one.replica, Plan(STEP), end, SAMPLING, 6)
        assert (marks := recovery.marks(one.name, one.replica)) is not None
        assert marks.changed is not None
        assert marks.changed.incarnation == 5, "there was nothing more to be undone"


LAST = 7
"""Of the task's buckets."""
ENDS = [
    (("reduced", LAST, ()), ("reduced", LAST, ())),
    (("reduced", LAST, ()), ("wait", 0, ())),
    (("commit", None, ()), ("wait", 0, ())),
    (("commit", None, ()), ("reduced", LAST, ())),
]
"""Where two stood when the step was reduced; the first of them has all of it, or has even updated all."""


@pytest.mark.parametrize(("one", "other"), ENDS, ids=lambda place: f"{place[0]}-{place[1]}")
@pytest.mark.parametrize("update", ["barrier", "wait_free"])
def test_a_schedule_is_given_the_loss_of_a_step_that_a_recovery_completes(one: Any, other: Any, update: Any) -> None:
    def schedules() -> list[tuple[Any, float]]:
        return [(s.state.scheduler.state_dict(), s.state.optimizer.param_groups[0]["lr"]) for s in replicas]

    with survivors(update, Plateau()) as (first, second, calm):
        replicas = [first.replica, second.replica, calm.replica]
        for survivor, (phase, bucket, heard) in ((first, one), (second, other)):
            survivor.train(STEP)
            survivor.interrupt((phase, STEP, bucket), set(heard))
        assert mend(first, second, whole_update=update == "barrier").completes
        calm.train(STEP + 1)
        assert schedules()[0] == schedules()[1] == schedules()[2]
        assert schedules()[0][1] < 0.1, "it was halved"
        for survivor in (first, second):
            survivor.resume()
        for survivor in (first, second, calm):
            survivor.train(STEP + 3)
        assert schedules()[0] == schedules()[1] == schedules()[2]
        assert first.replica.state.digests() == second.replica.state.digests() == calm.replica.state.digests()


@pytest.mark.parametrize(("one", "other"), ENDS, ids=lambda place: f"{place[0]}-{place[1]}")
def test_who_takes_the_state_of_an_update_takes_what_it_counted_too(one: Any, other: Any) -> None:
    """It has not made that update. What belongs to no bucket comes when replacements are filled, and until then it says so."""
    with survivors("barrier", Counted()) as (first, second, calm):
        for survivor, (phase, bucket, heard) in ((first, one), (second, other)):
            survivor.train(STEP)
            survivor.interrupt((phase, STEP, bucket), set(heard))
        takes = [copy.targets for copy in mend(first, second, whole_update=True).states]
        found = [recovery.marks(survivor.name, survivor.replica) for survivor in (first, second)]
        restated = [marks.restated for marks in found if marks is not None]
        assert restated == [False, bool(takes)]
        (_, whole) = rebuild_stages(("one", "two"), dict.fromkeys(("one", "two"), ("d",)), 1, {"two"} if takes else set())
        for _ in whole:
            second.replica.state.take(first.replica.state.extras())
        calm.train(STEP + 1)
        for survivor in (first, second):
            survivor.resume()
        for survivor in (first, second, calm):
            survivor.train(STEP + 3)
        digests = [survivor.replica.state.final_digest() for survivor in (first, second, calm)]
        assert digests[0] == digests[1] == digests[2]
        assert not second.replica.state.restated


@pytest.mark.parametrize(("update", "bucket"), [("barrier", None), ("wait_free", 0), ("wait_free", LAST)])
def test_who_broke_off_inside_an_update_holds_nothing_until_it_is_filled(update: Any, bucket: int | None) -> None:
    with survivors(update) as (torn, whole, calm):
        for survivor in (torn, whole):
            survivor.train(STEP)
        torn.interrupt(("update", STEP, bucket), set())
        state = torn.replica.state
        assert [b.index for b in state.buckets if b.dirty] == (list(range(LAST + 1)) if bucket is None else [bucket])
        assert recovery.marks(torn.name, torn.replica) is None
        assert not state.filled
        mending.discard(torn.replica)
        recovery.unpack(state, recovery.pack(whole.replica))
        assert recovery.marks(torn.name, torn.replica) is not None
        torn.resume()
        for survivor in (torn, calm):
            survivor.train(STEP + 2)
        assert torn.replica.state.digests() == calm.replica.state.digests()


@pytest.mark.parametrize("error", [RuntimeError, UndoRefusedError])
def test_who_broke_off_inside_an_undo_holds_nothing_and_who_refused_it_what_it_held(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("out of memory")

    with survivors("wait_free") as (torn, _, _):
        torn.train(STEP)
        torn.interrupt(("updated", STEP, 0), set())
        monkeypatch.setattr(torn.replica.undo, "undo", fail)
        end: Any = Wire(torn.name, {})
        with pytest.raises(error, match="out of memory"):
            recovery.reconcile(torn.replica, Plan(STEP, undo=(0,)), end, SAMPLING, 2)
        marks = recovery.marks(torn.name, torn.replica)
        assert (marks is None) is (error is RuntimeError)
        assert marks is None or marks.versions == (STEP + 1, *[STEP] * LAST)


def test_an_update_whose_outcome_was_replaced_by_another_state_cannot_be_undone() -> None:
    with survivors("wait_free") as (ahead, behind, _):
        for survivor, bucket in ((ahead, 1), (behind, 0)):
            survivor.train(STEP)
            survivor.interrupt(("updated", STEP, bucket), set())
        undo = ahead.replica.undo
        assert undo is not None
        first, second = (ahead.replica.state.buckets[index].params for index in (0, 1))
        assert {id(p) for p in undo.updated()} == {id(p) for p in (*first, *second)}
        sent = {("state", 1, ahead.name): behind.replica.state.pack(behind.replica.state.buckets[1])}
        end: Any = Wire(ahead.name, sent)
        recovery.take_states(ahead.replica, (Copy(1, "state", behind.name, (ahead.name,)),), end, STEP)
        assert {id(p) for p in undo.updated()} == {id(p) for p in first}
        mending.discard(ahead.replica)
        assert undo.updated() == []


BEFORE_IT_IS_LEFT_OUT = [
    ("barrier", ("data", None), ("reduce", 0)),
    ("barrier", ("wait", 0), ("wait", 0)),
    ("wait_free", ("data", None), ("reduce", 0)),
    ("wait_free", ("updated", 1), ("updated", 0)),
    ("wait_free", ("updated", 0), ("updated", 1)),
]
"""Where two survivors stood when they were told to leave the step out; the second alone did, before the next loss."""


@pytest.mark.parametrize(("update", "late", "first"), BEFORE_IT_IS_LEFT_OUT, ids=str)
def test_a_step_that_one_has_left_out_is_left_out_by_all(update: Any, late: tuple[str, Any], first: tuple[str, Any]) -> None:
    with survivors(update) as (one, other, calm):
        for survivor, (phase, bucket) in ((one, late), (other, first)):
            survivor.train(STEP)
            survivor.interrupt((phase, STEP, bucket), set())
        about: dict[str, Any] = {"whole_update": update == "barrier", "strategy": "skip"}
        plan = decide(one, other, **about)
        assert (plan.skips, plan.step, len(plan.lost)) == (True, STEP + 1, 1)
        carry_out(plan, one, other, until=other)
        assert (one.replica.state.step, other.replica.state.step) == (STEP, STEP + 1)
        plan = mend(one, other, **about)
        assert (plan.skips, plan.step, len(plan.lost)) == (True, STEP + 1, 1)
        assert one.replica.state.step == other.replica.state.step == STEP + 1
        assert one.replica.state.position == other.replica.state.position
        assert one.replica.state.digests() == other.replica.state.digests()
        calm.train(STEP)
        for a, b in zip(one.replica.state.model.parameters(), calm.replica.state.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for survivor in (one, other):
            survivor.resume()
            survivor.train(STEP + 3)
        assert one.replica.state.digests() == other.replica.state.digests()
        assert one.replica.left_out is None


def test_who_leaves_a_step_out_that_it_had_not_begun_tells_what_is_lost() -> None:
    """Who had begun it may be lost before it can."""
    with survivors("barrier") as (late, first, _):
        late.train(STEP)
        late.interrupt(("data", STEP, None), set())
        first.train(STEP)
        first.interrupt(("reduce", STEP, 0), set())
        late.replica.trained, first.replica.trained = 2, 3  # it has not come to train in the incarnation that is over
        plan = decide(late, first, whole_update=True, strategy="skip")
        assert plan.trained == 3
        outcome = carry_out(plan, late, first, until=late)
        assert outcome is not None
        assert outcome.commit is None
        assert outcome.lost is not None
        (lost,) = plan.lost
        assert {
            "incarnation": 3,
            "step": STEP,
            "start": lost[0],
            "stop": lost[1],
            "returned": False,
        }.items() <= outcome.lost.items()
        again = decide(late, whole_update=True, strategy="skip")  # what the next recovery finds, without the other
        assert (again.step, again.interrupted) == (STEP + 1, STEP + 1)
        outcome = carry_out(decide(late, first, whole_update=True, strategy="skip"), late, first, until=first)
        assert outcome is not None
        assert outcome.commit is not None
        assert outcome.lost is None, "it has a record of that step"


def mend(*members: Survivor, whole_update: bool, strategy: str = "auto") -> Plan:
    """The survivors' part of a recovery, one after the other."""
    plan = decide(*members, whole_update=whole_update, strategy=strategy)
    carry_out(plan, *members)
    return plan


def decide(*members: Survivor, whole_update: bool, strategy: str) -> Plan:
    found = [recovery.marks(member.name, member.replica) for member in members]
    marks = [m for m in found if m is not None]
    return instead(reconcile(marks, whole_update=whole_update), marks, strategy, 0.5)


def carry_out(plan: Plan, *members: Survivor, until: Survivor | None = None) -> recovery.Outcome | None:
    """Each bucket's giver comes before who takes it. With `until`, the others only give what they are asked for, and what comes
    of its part is returned."""
    outcome = None
    sent: dict[tuple[str, int, str], Tensor] = {}
    given = {copy.source for copy in (*plan.gradients, *plan.states)}
    for member in sorted(members, key=lambda member: member.name not in given):
        end: Any = Wire(member.name, sent)
        if until is None or member is until:
            outcome = recovery.reconcile(member.replica, plan, end, SAMPLING, 2)
            continue
        state = member.replica.state
        end.copy(plan.states, lambda copy, state=state: state.pack(state.buckets[copy.bucket]))
    return outcome
