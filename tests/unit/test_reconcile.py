"""Reconciling: every combination of marks that an interruption can leave, and every way in which a recovery can be cut short.

The model below is what `training.step` and `runtime.recovery` do, without tensors. The state of a bucket is the history of what
was done to it: `s` for the update of step s, `~s` for its undo. Two replicas with equal histories hold equal bits, for all of
them apply the same operations to the same reduced gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.errors import RecoveryError
from raytrain_ft.policy.reconcile import Copy, Marks, Plan, reconcile

Gradient = tuple[int, bool] | None  # the step that it is of, and whether it was used (clipped, perhaps overwritten)


class Rank(NamedTuple):
    """One replica. `launched` buckets of the step under way are being reduced; the first `accepted` of them are."""

    step: int
    launched: int
    accepted: int
    states: tuple[tuple[int, ...], ...]
    gradients: tuple[Gradient, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sum(1 if entry >= 0 else -1 for entry in history) for history in self.states)

    def marks(self, member: str) -> Marks:
        return Marks(member, self.step, self.versions, tuple(g[0] if g else None for g in self.gradients))


World = tuple[Rank, ...]


def new_world(ranks: int, buckets: int, step: int = 0) -> World:
    history = tuple(range(step))
    return (Rank(step, 0, 0, (history,) * buckets, ((step - 1, True) if step else None,) * buckets),) * ranks


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


# ---------------------------------------------------------------- training


def launch(rank: Rank) -> Rank:
    """Begins to reduce the next bucket, whose buffer forgets the gradient of the step before."""
    return rank._replace(launched=rank.launched + 1, gradients=_put(rank.gradients, rank.launched, None))


def accept(rank: Rank, wait_free: bool) -> Rank:
    """The next bucket is reduced; wait-free, it is updated at once. The last one ends the step."""
    bucket = rank.accepted
    rank = rank._replace(accepted=bucket + 1, gradients=_put(rank.gradients, bucket, (rank.step, False)))
    if wait_free:
        rank = update(rank, [bucket])
    if rank.accepted < len(rank.states):
        return rank
    rank = rank if wait_free else update(rank, range(len(rank.states)))
    return rank._replace(step=rank.step + 1, launched=0, accepted=0)


def update(rank: Rank, buckets: Sequence[int]) -> Rank:
    for bucket in buckets:
        assert rank.gradients[bucket] == (rank.step, False), "an update needs this step's gradient, as it was reduced"
        history = (*rank.states[bucket], rank.step)
        rank = rank._replace(
            states=_put(rank.states, bucket, history), gradients=_put(rank.gradients, bucket, (rank.step, True))
        )
    return rank


def contributed(rank: Rank, step: int, bucket: int) -> bool:
    return rank.step > step or (rank.step == step and rank.launched > bucket)


def moves(world: World, wait_free: bool) -> Iterator[World]:
    """Everything that may happen next: some rank launches a bucket or accepts one that every rank has launched."""
    for i, rank in enumerate(world):
        if rank.launched < len(rank.states):
            yield _put(world, i, launch(rank))
        if rank.accepted < rank.launched and all(contributed(other, rank.step, rank.accepted) for other in world):
            yield _put(world, i, accept(rank, wait_free))


def fenced(world: World) -> Iterator[World]:
    """What a fence may find: a reduction that all contributed to has come to its end on this rank, or has not."""
    outcomes: list[list[Rank]] = []
    for rank in world:
        found = [rank]
        for bucket in range(rank.accepted, rank.launched):
            if all(contributed(other, rank.step, bucket) for other in world):
                found += [r._replace(gradients=_put(r.gradients, bucket, (r.step, False))) for r in found]
        outcomes.append(found)
    return itertools.product(*outcomes)


# ---------------------------------------------------------------- recovery, in the order of runtime/recovery.py


def first_half(rank: Rank, member: str, plan: Plan, before: dict[str, Rank], wait_free: bool) -> Rank:
    """Gradients are copied; then updates or undo."""
    base = plan.step - 1 if plan.completes else plan.step
    for copy in plan.gradients:
        if member in copy.targets:
            sent = before[copy.source].gradients[copy.bucket]
            assert sent == (base, False), f"{copy} sends {sent}"
            rank = rank._replace(gradients=_put(rank.gradients, copy.bucket, sent))
    if plan.completes:
        behind = [bucket for bucket, version in enumerate(rank.versions) if version == base]
        ready = [bucket for bucket in behind if (rank.gradients[bucket] or (None,))[0] == base]
        if wait_free or ready == behind:
            rank = update(rank, ready)
    for bucket in plan.undo:
        assert rank.gradients[bucket] == (base, True), "undo needs the gradient that was used"
        assert rank.states[bucket][-1] == base
        rank = rank._replace(states=_put(rank.states, bucket, (*rank.states[bucket], ~base)))
    return rank


def second_half(rank: Rank, member: str, plan: Plan, halfway: dict[str, Rank]) -> Rank:
    """States are copied; then the step is committed, or the attempt discarded."""
    for copy in plan.states:
        if member in copy.targets:
            sent = halfway[copy.source]
            assert sent.versions[copy.bucket] == plan.step, f"{copy} sends version {sent.versions[copy.bucket]}"
            rank = rank._replace(states=_put(rank.states, copy.bucket, sent.states[copy.bucket]))
    if plan.completes and rank.step == plan.step - 1:
        assert rank.launched, "only a step under way can be committed"
        return rank._replace(step=plan.step, launched=0, accepted=0)
    if rank.launched:
        return rank._replace(launched=0, accepted=0, gradients=(None,) * len(rank.gradients))
    return rank


def execute(world: World, plan: Plan, progress: Sequence[int], wait_free: bool) -> World:
    """Where the survivors stand when each has come so far: 0 waits for a gradient, 1 for a state, 2 is done."""
    before = dict(zip(_names(world), world, strict=True))
    halfway = {name: first_half(rank, name, plan, before, wait_free) for name, rank in before.items()}
    done = {name: second_half(rank, name, plan, halfway) for name, rank in halfway.items()}
    return tuple((before, halfway, done)[stage][name] for name, stage in zip(before, progress, strict=True))


def interruptions(world: World, plan: Plan) -> Iterator[tuple[int, ...]]:
    """Every way in which the survivors can have come so far. Who is done has received from those that send to it."""
    for progress in itertools.product((0, 1, 2), repeat=len(world)):
        reached = dict(zip(_names(world), progress, strict=True))
        if all(reached[copy.source] > 0 for copy in plan.states if any(reached[name] == 2 for name in copy.targets)):
            yield progress


def _names(world: World) -> list[str]:
    return [f"w{i}" for i in range(len(world))]


def plan_for(world: World, wait_free: bool) -> Plan:
    marks = [rank.marks(name) for name, rank in zip(_names(world), world, strict=True)]
    return reconcile(marks, whole_update=not wait_free)


def check(world: World, everybody_contributed: bool, wait_free: bool) -> Plan:
    """The plan for these survivors, having checked all that is promised of it."""
    plan = plan_for(world, wait_free)
    base = min(rank.step for rank in world)
    assert plan.step == base + plan.completes
    assert everybody_contributed or not plan.completes, "a step that somebody did not contribute to was completed"
    assert plan.completes or all(rank.step == base for rank in world), "a committed step was given up"
    for_all = [
        any(rank.versions[bucket] > base or rank.gradients[bucket] == (base, False) for rank in world)
        for bucket in range(len(world[0].states))
    ]
    assert plan.completes == all(for_all), "a step that could be completed is redone, or the other way round"
    assert wait_free or not plan.undo, "under a barrier nothing is ever undone"
    for bucket in plan.undo:
        assert all(rank.versions[bucket] == base + 1 for rank in world)
    for copy in (*plan.gradients, *plan.states):
        assert copy.targets
        assert copy.source not in copy.targets
    after = execute(world, plan, [2] * len(world), wait_free)
    assert len({(rank.step, rank.states) for rank in after}) == 1, f"the survivors differ: {after}"
    for history in after[0].states:
        assert _net(history) == list(range(plan.step)), f"skipped or applied twice: {history}"
    return plan


def _net(history: Sequence[int]) -> list[int]:
    net: list[int] = []
    for entry in history:
        if entry >= 0:
            net.append(entry)
        else:
            assert net.pop() == ~entry
    return net


# ---------------------------------------------------------------- everything, for small worlds


@pytest.mark.parametrize("wait_free", [False, True], ids=["barrier", "wait_free"])
@pytest.mark.parametrize(("ranks", "buckets"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_survivors_end_equal_wherever_they_are_interrupted_and_however_often(ranks: int, buckets: int, wait_free: bool) -> None:
    """Every interleaving of a step, every subset that survives it, every interruption of the recovery, and of the next one."""
    trained = _reachable(new_world(ranks, buckets, step=1), wait_free)
    todo = list({(survivors, full) for world in trained for survivors, full in _survivors_of(world)})
    seen = set(todo)
    plans: set[tuple[bool, bool, bool, bool]] = set()
    while todo:
        world, full = todo.pop()
        plan = check(world, full, wait_free)
        plans.add((plan.completes, bool(plan.gradients), bool(plan.undo), bool(plan.states)))
        for progress in interruptions(world, plan):
            for survivors in _subsets(execute(world, plan, progress, wait_free)):
                if (survivors, full) not in seen:
                    seen.add((survivors, full))
                    todo.append((survivors, full))
    assert {completes for completes, *_ in plans} == {False, True}
    assert any(undo for *_, undo, _ in plans) == (wait_free and buckets > 1)


def _reachable(start: World, wait_free: bool) -> set[World]:
    """All worlds within the step after `start`; when everybody has finished it, the story repeats itself."""
    seen, todo = {start}, [start]
    while todo:
        for world in moves(todo.pop(), wait_free):
            if world not in seen:
                seen.add(world)
                if any(rank.step == start[0].step for rank in world):
                    todo.append(world)
    return seen


def _survivors_of(world: World) -> Iterator[tuple[World, bool]]:
    base = min(rank.step for rank in world)
    full = all(contributed(rank, base, len(rank.states) - 1) for rank in world)
    for found in fenced(world):
        for survivors in _subsets(found):
            if min(rank.step for rank in survivors) == base:
                yield survivors, full
            else:  # who is a step behind died: for the others this is the beginning of a step
                yield survivors, False


def _subsets(world: World) -> Iterator[World]:
    for size in range(1, len(world) + 1):
        yield from itertools.combinations(world, size)


# ---------------------------------------------------------------- larger worlds, longer stories


@settings(max_examples=150, derandomize=True)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 6), buckets=st.integers(1, 7), wait_free=st.booleans())
def test_a_long_run_with_many_losses_applies_every_step_once(seed: int, ranks: int, buckets: int, wait_free: bool) -> None:
    """Train, lose some, recover (perhaps after being interrupted), fill replacements, train on: again and again."""
    chance = Random(seed)
    world = new_world(ranks, buckets)
    for _ in range(6):
        for _ in range(chance.randrange(4 * ranks * buckets)):
            world = chance.choice(list(moves(world, wait_free)))
        base = min(rank.step for rank in world)
        full = all(contributed(rank, base, buckets - 1) for rank in world)
        world = _lose_some(chance.choice(list(itertools.islice(fenced(world), 64))), chance)
        full = full and min(rank.step for rank in world) == base
        while chance.random() < 0.6:
            plan = check(world, full, wait_free)
            progress = chance.choice(list(itertools.islice(interruptions(world, plan), 64)))
            world = _lose_some(execute(world, plan, progress, wait_free), chance)
        plan = check(world, full, wait_free)
        world = execute(world, plan, [2] * len(world), wait_free)
        filled = Rank(plan.step, 0, 0, world[0].states, (None,) * buckets)
        world = (*world, *([filled] * (ranks - len(world))))


def _lose_some(world: World, chance: Random) -> World:
    return tuple(sorted(chance.sample(world, chance.randint(1, len(world))), key=world.index))


# ---------------------------------------------------------------- examples


def test_nobody_had_updated_so_the_step_is_redone_from_where_it_began() -> None:
    plan = reconcile([Marks("a", 4, (4, 4), (4, None)), Marks("b", 4, (4, 4), (3, 3))], whole_update=True)
    assert plan == Plan(step=4, reason="nobody had updated anything in step 4: it is redone")


def test_who_completed_the_step_takes_the_others_along() -> None:
    """b has its first gradient only; a has all and has not begun the next step, but has used them: b takes a's state."""
    plan = reconcile([Marks("a", 5, (5, 5), (4, 4)), Marks("b", 4, (4, 4), (4, None))], whole_update=True)
    assert (plan.step, plan.completes, plan.undo) == (5, True, ())
    assert plan.states == (Copy(0, "state", "a", ("b",)), Copy(1, "state", "a", ("b",)))


def test_gradients_that_are_spread_over_survivors_complete_the_step() -> None:
    plan = reconcile([Marks("a", 4, (4, 4), (4, None)), Marks("b", 4, (4, 4), (None, 4))], whole_update=True)
    assert (plan.step, plan.completes, plan.states) == (5, True, ())
    assert plan.gradients == (Copy(0, "gradient", "a", ("b",)), Copy(1, "gradient", "b", ("a",)))


def test_a_used_gradient_is_not_passed_on() -> None:
    """Clipping and Nesterov's momentum change it in place: applying it again elsewhere would give other bits."""
    plan = reconcile([Marks("a", 4, (5, 4), (4, 4)), Marks("b", 4, (4, 4), (None, None))], whole_update=False)
    assert plan.states == (Copy(0, "state", "a", ("b",)),)
    assert plan.gradients == (Copy(1, "gradient", "a", ("b",)),)


def test_wait_free_undoes_what_everybody_updated_and_copies_back_what_somebody_did_not() -> None:
    survivors = [Marks("a", 4, (5, 5, 4), (4, 4, None)), Marks("b", 4, (5, 4, 4), (4, None, None))]
    plan = reconcile(survivors, whole_update=False)
    assert (plan.step, plan.completes, plan.undo) == (4, False, (0,))
    assert plan.states == (Copy(1, "state", "b", ("a",)),)


def test_a_survivor_that_updated_everything_but_did_not_commit_commits() -> None:
    plan = reconcile([Marks("a", 4, (5, 5), (4, 4))], whole_update=False)
    assert (plan.step, plan.completes) == (5, True)


@pytest.mark.parametrize(("step", "told"), [(4, True), (3, False), (None, False)])
def test_a_step_that_is_completed_has_no_update_if_one_found_it_so(step: int | None, told: bool) -> None:
    survivors = [Marks("a", 5, (5, 5), (4, 4), not_finite=step), Marks("b", 4, (4, 4), (4, None))]
    assert reconcile(survivors, whole_update=True).not_finite is told


def test_survivors_two_steps_apart_are_refused() -> None:
    with pytest.raises(RecoveryError, match=r"2 updates apart \(a: 6-6, b: 4-4\)"):
        reconcile([Marks("a", 6, (6,), (5,)), Marks("b", 4, (4,), (3,))], whole_update=True)
