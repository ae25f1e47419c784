"""Make the survivors of a loss consistent: who copies what from whom, what is undone, from which step to go on.

A bucket's *version* is the number of updates applied to it. Facts that this rests on (docs/architecture.md proves them):
survivors have completed B or B+1 steps, never further apart, because nobody can reduce a bucket of step B+1 before everybody
has finished step B. So every version is B or B+1, and

1. if every bucket of step B is, on some survivor, either updated or reduced, everybody contributed to everything: the step
   is *completed* everywhere, by passing the reduced gradients (or, where they are gone, the state) to those without;
2. otherwise the step is *redone*: a bucket that some survivor has not updated is copied back from that one; one that every
   survivor updated is *undone* by everybody (SWIFT, section 4), by the same operations on the same bits.

Unlike SWIFT's prototype this needs no second copy of the gradients: a step that anybody completed is never undone.

A recovery may itself be interrupted anywhere, and the next one begins from the marks that it left. Two rules are there for
this alone: B is the number of steps *committed*, since a survivor may have updated everything without having come to its
commit; and a gradient is passed on only by who has not used it, since clipping and some optimizers change it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain_ft.errors import RecoveryError
from raytrain_ft.policy.sampling import Range


@dataclass(frozen=True, slots=True)
class Share:
    """What a survivor contributes to the step under way.

    Attributes:
        batch: positions of the global batch.
        mine: those that this survivor reads.
        whole: whether its backward pass has come to the end, so that it holds its own gradient of every parameter.
    """

    step: int
    batch: Range
    mine: Range
    whole: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """What a survivor did to the updates of a step as it carried out the plan of an incarnation: parameters whose update it has
    undone, and parameters whose update it has kept although the step is redone."""

    incarnation: int
    step: int
    undone: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Marks:
    """Where one survivor stands, bucket by bucket.

    Attributes:
        member: the survivor.
        step: steps that it has committed.
        versions: per bucket, updates applied to it.
        gradients: per bucket, the step whose reduced gradient is still held, or None.
        stage: the stage of a pipeline that it hosts.
        agreed: what all stages agreed upon at the end of the latest step of which this survivor knows it: (step, numbers).
        share: its part in the step under way, if it has begun one.
        lost: the latest step that went on without some samples, and their positions.
        left_out: the step that it counts as committed without an update, unless it has begun another one since.
        trained: the incarnation in which it trained last.
        not_finite: the latest step whose update it left out, because the loss or a gradient was not finite.
        changed: what it has undone or kept last; nobody may have heard its answer.
        restated: whether it has taken a bucket's state from another, and not yet what belongs to no bucket.
        unwritten: whether others cannot read yet all that it has logged.
    """

    member: str
    step: int
    versions: tuple[int, ...]
    gradients: tuple[int | None, ...]
    stage: int = 0
    agreed: tuple[int, tuple[float, ...]] | None = None
    share: Share | None = None
    lost: tuple[int, tuple[Range, ...]] | None = None
    left_out: int | None = None
    trained: int = 0
    not_finite: int | None = None
    changed: Changed | None = None
    restated: bool = False
    unwritten: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """One bucket's reduced gradient or state, sent by `source` to every one of `targets`."""

    bucket: int
    what: Literal["gradient", "state"]
    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the survivors do, in this order: copy gradients; update or undo; copy state; commit or discard the attempt. Those of
    the attributes that are lossy are set by `forward` alone.

    Attributes:
        step: the number of steps that all have committed afterwards: training goes on with this step.
        completes: whether the interrupted step is completed (else it is redone, or there was none).
        gradients: reduced gradients to pass on before updating.
        undo: buckets whose update of step `step` everybody undoes.
        states: buckets whose state is copied, after the updates.
        reason: the decision in words.
        agreed: in a pipeline, what all stages agreed upon in the step that is completed.
        mean: buckets that the survivors reduce once more among themselves, before updating (lossy).
        speaker: who of them speaks for all of what is the same everywhere: one that had samples, so it ran a forward pass.
        keep: buckets whose update of step `step` stays although that step is redone (lossy).
        skips: the interrupted step is left out: it counts as committed, without an update (lossy).
        lost: positions that the interrupted step goes on without.
        trained: the incarnation in which a step that is left out was begun.
        not_finite: the step that is completed has no update, as who completed it found: its loss or a gradient is not finite.
            Who copies that state has not seen it.
    """

    step: int
    completes: bool = False
    gradients: tuple[Copy, ...] = ()
    undo: tuple[int, ...] = ()
    states: tuple[Copy, ...] = ()
    reason: str = "nobody had begun to update"
    agreed: tuple[float, ...] = ()
    mean: tuple[int, ...] = ()
    speaker: str = ""
    keep: tuple[int, ...] = ()
    skips: bool = False
    lost: tuple[Range, ...] = ()
    trained: int = 0
    not_finite: bool = False

    @property
    def interrupted(self) -> int:
        """The step that it is about: completed, left out, or to be redone."""
        return self.step - int(self.completes or self.skips)


def reconcile(survivors: Sequence[Marks], *, whole_update: bool) -> Plan:
    """Decides how the survivors become consistent.

    Args:
        survivors: at least one; all with the same number of buckets.
        whole_update: whether the update needs all gradients at once (`update="barrier"`, which may clip by the global norm).

    Raises:
        RecoveryError: the survivors are further apart than one step, which no interruption can cause.
    """
    base = min(marks.step for marks in survivors)
    newest = max(version for marks in survivors for version in marks.versions)
    if newest - base > 1:
        raise RecoveryError(
            f"survivors are {newest - base} updates apart ({_places(survivors)}); only one step can be under way. "
            "This is a bug or corrupted memory: please report it with the event log."
        )
    buckets = range(len(survivors[0].versions))
    if all(unused(survivors, bucket, base) or holders(survivors, bucket, base + 1) for bucket in buckets):
        return _complete(survivors, base, whole_update)
    if newest == base:
        return Plan(step=base, reason=f"nobody had updated anything in step {base}: it is redone")
    return _redo(survivors, base)


def reconcile_stages(survivors: Sequence[Marks]) -> Plan:
    """Decides how the survivors of a pipeline become consistent.

    A stage updates only when all stages have agreed that nobody lacks a gradient any more. So if one survivor knows of that
    agreement, every survivor has its gradients and the step is completed; if none does, nobody has updated, and it is redone.

    Raises:
        RecoveryError: as `reconcile`.
    """
    base = min(marks.step for marks in survivors)
    newest = max(version for marks in survivors for version in marks.versions)
    if newest - base > 1:
        raise RecoveryError(
            f"survivors are {newest - base} updates apart ({_places(survivors)}); only one step can be under way"
        )
    known = [marks.agreed[1] for marks in survivors if marks.agreed is not None and marks.agreed[0] == base]
    if not known:
        return Plan(base, reason=f"step {base} was not finished by all stages: it is redone")
    return Plan(
        base + 1, True, reason=f"all stages had finished step {base}: it is completed everywhere", agreed=tuple(known[0])
    )


def _complete(survivors: Sequence[Marks], base: int, whole_update: bool) -> Plan:
    gradients: list[Copy] = []
    states: list[Copy] = []
    for bucket in range(len(survivors[0].versions)):
        behind = [marks for marks in survivors if marks.versions[bucket] == base]
        without = tuple(marks.member for marks in behind if marks.gradients[bucket] != base)
        if without and (sources := unused(survivors, bucket, base)):
            gradients.append(Copy(bucket, "gradient", sources[bucket % len(sources)], without))
        elif without:
            sources = holders(survivors, bucket, base + 1)
            states.append(Copy(bucket, "state", sources[bucket % len(sources)], without))
    if whole_update and states:
        # Somebody cannot have all gradients any more, and an update needs all of them: whoever lacks one takes the whole
        # state from a survivor that completed the step.
        gradients, states = [], _copy_whole(survivors, base)
    done = len(_completed(survivors, base))
    reason = f"{done} of {len(survivors)} survivors had completed step {base}" if done else f"step {base} was fully reduced"
    reason += ": it is completed everywhere"
    told = (base + 1, True, tuple(gradients), (), tuple(states), reason)
    not_finite = any(marks.not_finite == base for marks in survivors)
    return Plan(*told, lost=known_losses(survivors, base), not_finite=not_finite)


def known_losses(survivors: Sequence[Marks], step: int) -> tuple[Range, ...]:
    """What an interrupted recovery has already let go of this step's samples. Each such set contains those before it."""
    known = [marks.lost[1] for marks in survivors if marks.lost is not None and marks.lost[0] == step]
    return max(known, key=lambda ranges: sum(stop - start for start, stop in ranges), default=())


def _copy_whole(survivors: Sequence[Marks], base: int) -> list[Copy]:
    sources = _completed(survivors, base)
    lacking = tuple(
        marks.member
        for marks in survivors
        if any(version == base != gradient for version, gradient in zip(marks.versions, marks.gradients, strict=True))
    )
    return [Copy(bucket, "state", sources[bucket % len(sources)], lacking) for bucket in range(len(survivors[0].versions))]


def _redo(survivors: Sequence[Marks], base: int) -> Plan:
    undo: list[int] = []
    states: list[Copy] = []
    for bucket in range(len(survivors[0].versions)):
        untouched = holders(survivors, bucket, base)
        ahead = tuple(marks.member for marks in survivors if marks.versions[bucket] == base + 1)
        if not untouched:
            undo.append(bucket)
        elif ahead:
            states.append(Copy(bucket, "state", untouched[bucket % len(untouched)], ahead))
    changes = [f"{len(undo)} buckets undone by all"] if undo else []
    changes += [f"{len(states)} buckets copied back"] if states else []
    reason = f"step {base} was partly updated: {' and '.join(changes)}, and it is redone"
    return Plan(base, False, (), tuple(undo), tuple(states), reason)


def unused(survivors: Sequence[Marks], bucket: int, step: int) -> list[str]:
    """Who holds the bucket's reduced gradient as it came, not yet applied (and so not clipped or overwritten either)."""
    return [marks.member for marks in survivors if marks.gradients[bucket] == step == marks.versions[bucket]]


def holders(survivors: Sequence[Marks], bucket: int, version: int) -> list[str]:
    return [marks.member for marks in survivors if marks.versions[bucket] == version]


def _completed(survivors: Sequence[Marks], base: int) -> list[str]:
    return [marks.member for marks in survivors if all(version == base + 1 for version in marks.versions)]


def _places(survivors: Sequence[Marks]) -> str:
    return ", ".join(f"{marks.member}: {min(marks.versions)}-{max(marks.versions)}" for marks in survivors)
