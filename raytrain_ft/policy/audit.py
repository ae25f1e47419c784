"""The proof that no sample was lost or repeated, from a run's own event log and nothing else.

Every rank records which steps it committed, from which position of the data, and a digest of the sample ids that it
drew. The auditor knows how ids follow from positions (`sampling`), so it derives them again, follows the lineage of
incarnations, and counts how often each sample of each epoch was drawn in a step that still stands.

What stands: incarnation i, resumed at step s, owns the steps from s up to where a younger one resumed. Whatever an
older incarnation says about a step that a younger one took over is void. Who owns a step depends on incarnations only,
never on the order in which records of different workers reached the log. A step reduces over all ranks before anybody
commits it, so one rank's record vouches for the whole global batch; those of several ranks must agree.

A sample may be drawn and not count (its gradient was dropped) or never be drawn: either way it must be listed, once, in
a `SamplesLost` record; if that says so, it is drawn again at the end of its epoch. Pure; reads dicts that may be damaged,
and answers in violations, not in exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raytrain_ft.policy.audit_records import Commit, Loss, Story, read_story
from raytrain_ft.policy.sampling import (
    GlobalBatch,
    Position,
    Sampling,
    after_loss,
    digest_of_ids,
    joined,
    next_batch,
    sample_ids,
    samples_in,
    share,
    steps_per_epoch,
)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the log proves. `ok` means: every step counted here stands, and of every epoch counted here each sample was
    used exactly once or is listed as lost (with `drop_last`, the rest after the last whole batch is not wanted)."""

    finished: bool  # the run says that it reached its end; otherwise its last, open steps are not looked at
    steps: int
    epochs_complete: int
    samples_used: int  # in complete epochs and in the one that is under way
    samples_lost: int
    violations: tuple[str, ...]  # each names the step, rank, incarnation or positions it is about

    @property
    def ok(self) -> bool:
        return not self.violations


def audit(records: Iterable[dict[str, Any]]) -> Audit:
    """Checks a run's event log: records with a key "event", in log order; events it does not know are passed over.

    RunStarted, Resumed, StepsCommitted, StepsStored, SamplesLost and RunFinished count. A `SamplesLost` belongs to the
    incarnation that it names, or else to the one that owned its step when the record was written.
    """
    story = read_story(records)
    if story.sampling is None:
        return Audit(False, 0, 0, 0, 0, (*story.violations, "no usable RunStarted record: nothing is proven"))
    story.begin_lineage()
    claims = _claims(story, story.sampling)
    return _walk(story, story.sampling, claims)


# ---------------------------------------------------------------- what the ranks say of each step


Claims = dict[int, dict[GlobalBatch, Commit]]
"""Per step that stands, the global batches that were drawn for it (there ought to be one), each with a witness."""


def _claims(story: Story, sampling: Sampling) -> Claims:
    claims: Claims = {}
    ranks: dict[tuple[int, str], int] = {}
    members: dict[tuple[int, int], set[str]] = {}
    done: dict[tuple[int, str], int] = {}  # where the last of their steps ends; commits come by their first step
    for commit in sorted(story.commits, key=lambda commit: commit.first_step):  # `order` keeps two epochs
        incarnation, rank = commit.incarnation, commit.rank
        problem = _out_of_place(commit, story)
        if problem is None and commit.first_step >= story.owned(incarnation).stop:
            continue  # void as a whole: a younger incarnation did these steps again
        who = members.setdefault((incarnation, rank), set())
        who.add(commit.member)
        as_many_as_stages = len(who) <= story.stages  # all stages of a pipeline's replica draw the same samples
        if problem is None and not (as_many_as_stages and ranks.setdefault((incarnation, commit.member), rank) == rank):
            problem = "another member has this rank, or this member another rank, in the same incarnation"
        batches: list[GlobalBatch] = []
        if problem is None:
            batches, problem = _drawn(commit, sampling)
        if problem is not None:
            story.violations.append(f"{commit}: {problem}")
            continue
        owned, who_did = story.owned(incarnation), (incarnation, commit.member)
        before = done.get(who_did, 0)
        done[who_did] = max(before, commit.stop_step)
        for step, batch in enumerate(batches, commit.first_step):
            if step in owned:
                if step < before:
                    story.violations.append(f"{commit}: step {step} was committed before by the same rank")
                if story.weights.setdefault((incarnation, step), commit.weights) != commit.weights:
                    story.violations.append(f"{commit}: weights {commit.weights} in step {step}; others say otherwise")
                claims.setdefault(step, {}).setdefault(batch, commit)
    for commit in story.stored:
        _fill_in(claims, commit, story, sampling)
    return claims


def _fill_in(claims: Claims, commit: Commit, story: Story, sampling: Sampling) -> None:
    """The steps that only a checkpoint tells of."""
    if commit.incarnation not in story.begins:
        return  # of a run whose records are not here
    if commit.stop_step > story.limit(commit.incarnation):
        story.violations.append(f"{commit}, as a checkpoint has it: its run has {story.limit(commit.incarnation)} steps")
        return
    batches, problem = _drawn(commit, sampling)
    if problem is not None:
        story.violations.append(f"{commit}, as a checkpoint has it: {problem}")
        return
    owned = story.owned(commit.incarnation)
    for step, batch in enumerate(batches, commit.first_step):
        if step in owned:
            claims.setdefault(step, {}).setdefault(batch, commit)


def _out_of_place(commit: Commit, story: Story) -> str | None:
    """Why this commit cannot belong to its incarnation, or None."""
    if commit.incarnation not in story.begins:
        return "no record says where this incarnation was resumed"
    begin = story.begins[commit.incarnation]
    limit = story.limit(commit.incarnation)
    if commit.first_step < begin or commit.stop_step > limit:
        return f"its incarnation goes on from step {begin}, and the run has {limit} steps"
    world_size = story.worlds.setdefault(commit.incarnation, commit.world_size)
    if commit.world_size != world_size:
        return f"a world of {commit.world_size}; others say {world_size}"
    return None


def _drawn(commit: Commit, sampling: Sampling) -> tuple[list[GlobalBatch], str | None]:
    """The global batches of the commit's steps, and what, if anything, is wrong with the ids that its rank drew."""
    batches, ids, position = [], [], commit.position
    try:
        for _ in range(commit.first_step, commit.stop_step):
            batch, position = next_batch(sampling, position)
            batches.append(batch)
            mine = share(batch, commit.rank, commit.world_size, commit.weights)
            ids.append(sample_ids(sampling, batch.epoch, mine, batch.owed))
    except (TypeError, ValueError) as error:
        return [], f"its position or weights are impossible: {error}"
    expected = digest_of_ids(ids)
    if expected != commit.ids_digest:
        return [], f"it drew other samples: digest {commit.ids_digest}, expected {expected} from {commit.position} on"
    return batches, None


# ---------------------------------------------------------------- every sample of every epoch, counted


def _walk(story: Story, sampling: Sampling, claims: Claims) -> Audit:
    """Follows the steps that stand, in order, and counts what they drew and lost."""
    violations, tally = story.violations, _Tally(sampling, story.violations)
    losses = _standing_losses(story)
    last = max(claims, default=-1) + 1
    steps = last if story.finished_at is None else story.finished_at
    if last > steps:
        violations.append(f"the run finished after {steps} steps, but step {last - 1} is committed")
    if steps > story.max_steps:
        violations.append(f"the run finished after {steps} steps, but it was to have {story.max_steps}")
        steps = story.max_steps
    position = Position()
    for step in range(steps):
        lost = losses.pop(step, [])
        expected, _ = next_batch(sampling, position)
        for loss in lost:
            tally.lose(loss, expected)
        batches = claims.get(step, {})
        if len(batches) > 1:
            drawn = {drawn: str(witness) for drawn, witness in batches.items()}
            violations.append(f"step {step}: the ranks drew different batches: {drawn}")
        batch = next(iter(batches), expected)
        skipped = _between(sampling, expected, batch)
        if skipped is None or not all(_is_lost(piece, lost) for piece in skipped):
            violations.append(f"step {step} drew {batch}, but {expected} was next, and what lies between is not lost")
        for loss in lost:
            if not any(_inside(loss, piece) for piece in (*(skipped or ()), batch)):
                violations.append(f"{loss}: that step drew {batch}")
        for piece in (*(skipped or ()), batch):
            if _is_lost(piece, lost) or (batches and piece is batch):
                tally.draw(piece)
        if not batches and not _is_lost(batch, lost):
            violations.append(f"step {step}: no commit of it stands")
        position = after_loss(sampling, batch, sorted((loss.start, loss.stop) for loss in lost if loss.returned))
        position = replace(position, owed=joined(position.owed))  # in which pieces they were told of does not count
        tally.close_before(position.epoch)
    if story.finished_at is not None:
        violations.extend(f"{loss}: the run has no such step" for rest in losses.values() for loss in rest)
    if steps == 0:
        violations.append("no step was committed: nothing is proven")
    tally.close_open()
    return Audit(story.finished_at is not None, steps, position.epoch, tally.used, tally.lost, tuple(violations))


def _standing_losses(story: Story) -> dict[int, list[Loss]]:
    """Per step, the losses that were not made void by doing the step again."""
    standing: dict[int, list[Loss]] = {}
    for loss in story.losses:
        incarnation = min(story.begins) if loss.incarnation is None else loss.incarnation
        if incarnation not in story.begins:
            story.violations.append(f"{loss}: no record says where incarnation {incarnation} was resumed")
        elif not story.begins[incarnation] <= loss.step < story.limit(incarnation):
            story.violations.append(f"{loss}: incarnation {incarnation} has no such step")
        elif loss.step in story.owned(incarnation):
            standing.setdefault(loss.step, []).append(loss)
    return standing


def _between(sampling: Sampling, expected: GlobalBatch, batch: GlobalBatch) -> list[GlobalBatch] | None:
    """The positions that were passed over from `expected` to `batch`; None when `batch` lies behind or is too far."""
    if batch.epoch == expected.epoch and batch.start >= expected.start and batch.owed == expected.owed:
        return [replace(expected, stop=batch.start)] if batch.start > expected.start else []
    if batch.epoch == expected.epoch + 1 and not batch.owed:
        rest = replace(expected, stop=_wanted(sampling) + samples_in(expected.owed))
        return [piece for piece in (rest, replace(batch, start=0, stop=batch.start)) if piece.start < piece.stop]
    return None


def _inside(loss: Loss, piece: GlobalBatch) -> bool:
    return loss.epoch == piece.epoch and piece.start <= loss.start and loss.stop <= piece.stop


def _is_lost(piece: GlobalBatch, lost: list[Loss]) -> bool:
    """Whether all of it is in these losses."""
    at = piece.start
    for loss in sorted(lost, key=lambda loss: loss.start):
        if loss.epoch == piece.epoch and loss.start <= at:
            at = max(at, loss.stop)
    return at >= piece.stop


def _wanted(sampling: Sampling) -> int:
    """How many positions of an epoch are to be read: all, or those in whole batches."""
    return min(sampling.dataset_size, steps_per_epoch(sampling) * sampling.global_batch_size)


class _Tally:
    """Counts per epoch and sample id; an epoch's counts are judged, and forgotten, when the walk has left it."""

    def __init__(self, sampling: Sampling, violations: list[str]) -> None:
        self.used = self.lost = 0
        self._sampling, self._violations = sampling, violations
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # epoch -> times drawn, times lost; int32 [samples]

    def _counts(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._open:
            size = self._sampling.dataset_size
            self._open[epoch] = (np.zeros(size, np.int32), np.zeros(size, np.int32))
        return self._open[epoch]

    def draw(self, piece: GlobalBatch) -> None:
        np.add.at(self._counts(piece.epoch)[0], self._ids(piece), 1)

    def lose(self, loss: Loss, batch: GlobalBatch) -> None:
        """Of that batch, or of one that follows it."""
        owed = batch.owed if batch.epoch == loss.epoch else ()
        if loss.stop > self._sampling.dataset_size + samples_in(owed):
            self._violations.append(f"{loss}: the epoch has {self._sampling.dataset_size}")
            return  # there is nothing to count, and a damaged record may speak of any number
        ids = self._ids(GlobalBatch(loss.epoch, loss.start, loss.stop, owed))
        np.add.at(self._counts(loss.epoch)[1], ids, 1)

    def _ids(self, piece: GlobalBatch) -> np.ndarray:
        return sample_ids(self._sampling, piece.epoch, range(piece.start, piece.stop), piece.owed)

    def close_before(self, epoch: int) -> None:
        for done in [number for number in self._open if number < epoch]:
            self._judge(done, complete=True)

    def close_open(self) -> None:
        for epoch in list(self._open):
            self._judge(epoch, complete=False)

    def _judge(self, epoch: int, complete: bool) -> None:
        """Adds the epoch to the totals, and to the violations whatever was not drawn or lost exactly once."""
        ids = sample_ids(self._sampling, epoch, range(self._sampling.dataset_size))
        drawn, lost = (counts[ids] for counts in self._open.pop(epoch))  # now by position
        self.used += int(np.sum(drawn > lost))
        self.lost += int(np.sum((lost > 0) & (drawn <= lost)))
        missing = (drawn + lost == 0) & (np.arange(len(ids)) < _wanted(self._sampling))
        for what, wrong in (
            ("drawn more than once", drawn - lost > 1),
            ("listed as lost more than once", lost > drawn),
            ("neither drawn nor listed as lost", missing & complete),
        ):
            if wrong.any():
                edges = np.flatnonzero(np.diff(np.concatenate([[0], wrong.view(np.int8), [0]])))
                runs = ", ".join(f"[{a}, {b})" for a, b in edges.reshape(-1, 2)[:5].tolist())
                self._violations.append(f"epoch {epoch}: {int(wrong.sum())} samples {what}, at positions {runs}")
