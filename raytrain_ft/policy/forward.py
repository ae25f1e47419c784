"""Going on without redoing: what Nicolae et al. and torchft do instead of redoing an interrupted step, and at what price.

Whatever can be completed exactly is completed exactly, so a strategy has a say only where the step would be redone. Where it
cannot apply, the step is redone after all, which keeps more. Three strategies:

* ``lossy`` (Nicolae et al., III-B, "lossy forward"): survivors finish the step with the mean of their own gradients for every
  bucket that was not reduced yet. Buckets reduced before keep the gradients of all workers, the lost ones included: an
  all-reduce that completed has them all, and dropping them would lose more.
* ``rollback`` ("immediate mini-batch rollback"): the partial update of one survivor becomes everybody's, and the same batch
  is read again, so some buckets are updated twice.
* ``skip`` (torchft): the step is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from raytrain_ft.policy.reconcile import Copy, Marks, Plan, Share, holders, known_losses, unused
from raytrain_ft.policy.sampling import GlobalBatch, Range, samples_in, share

STRATEGIES = ("lossy", "rollback", "skip")


def instead(plan: Plan, survivors: Sequence[Marks], strategy: str, quorum: float) -> Plan:
    """The plan of this strategy instead of one that redoes the step; `plan` itself where it cannot apply, and then its reason
    says why.

    Args:
        plan: the exact plan for these survivors.
        quorum: of the batch's samples, the share that `lossy` needs to be left, from 0 to 1.
    """
    if sources := [marks.member for marks in survivors if marks.left_out == plan.interrupted == marks.step - 1]:
        return _skip_again(plan.interrupted, survivors, sources)
    shares = [marks.share for marks in survivors if marks.share is not None and marks.share.step == plan.step]
    if plan.completes or not shares:  # nothing is lost: it was completed, or nobody had begun it
        return plan
    if strategy == "lossy":
        return _finish(plan, survivors, shares, quorum)
    if strategy == "rollback":
        return _keep(plan, survivors)
    if strategy == "skip":
        reason = f"step {plan.step} is skipped: its batch is lost"
        left_out = {"skips": True, "lost": (shares[0].batch,), "trained": _trained(survivors)}
        return replace(plan, step=plan.step + 1, reason=reason, **left_out)
    return plan


def could_finish(marks: Marks) -> tuple[int, Range] | None:
    """The step, and its batch, that this survivor could finish alone; None: there is none."""
    return (marks.share.step, marks.share.batch) if marks.share and marks.share.whole else None


def worth_finishing(survivors: Iterable[Marks], gone: Sequence[int], size: int, quorum: float) -> int | None:
    """The step that survivors like these can finish alone, if the others compute their gradients of it; None: there is none.

    Args:
        gone: the ranks that are lost, of a world of this size. That somebody slept is not regarded: then this may be wrong, and
            what could have been finished is redone.
    """
    shares = {could_finish(marks) for marks in survivors}
    found = shares.pop() if len(shares) == 1 else None
    if found is None:
        return None
    step, (start, stop) = found
    lost = sum(len(share(GlobalBatch(0, start, stop), rank, size)) for rank in gone)
    return step if (stop - start - lost) / (stop - start) >= quorum else None  # one division: 0.2 of 5 is exactly 1


def _finish(plan: Plan, survivors: Sequence[Marks], shares: Sequence[Share], quorum: float) -> Plan:
    step = plan.step
    start, stop = shares[0].batch
    lost = complement(shares[0].batch, [share.mine for share in shares])
    left = (stop - start - samples_in(lost)) / (stop - start)
    all_began = len(shares) == len(survivors)
    if all_began and (left < quorum or left <= 0):  # first: survivors may have left their gradients for it (`worth_finishing`)
        return replace(plan, reason=f"{plan.reason}, because {left:.0%} of its batch are left and the quorum is {quorum:.0%}")
    if not all_began or not all(share.whole for share in shares):
        return replace(plan, reason=f"{plan.reason}, because some survivor has no gradients of its own to finish it with")
    gradients: list[Copy] = []
    states: list[Copy] = []
    mean: list[int] = []
    for bucket in range(len(survivors[0].versions)):
        behind = [marks for marks in survivors if marks.versions[bucket] == step]
        without = tuple(marks.member for marks in behind if marks.gradients[bucket] != step)
        updated = holders(survivors, bucket, step + 1)
        if sources := unused(survivors, bucket, step):
            gradients += [Copy(bucket, "gradient", sources[0], without)] if without else []
        elif updated:
            states += [Copy(bucket, "state", updated[0], without)] if without else []
        else:
            mean.append(bucket)
    count = len(survivors[0].versions)
    reason = f"step {step} is finished by {len(survivors)} survivors: {len(mean)} of {count} buckets hold their gradients only"
    losses = max(lost, known_losses(survivors, step), key=samples_in)
    speaker = next(marks.member for marks, own in zip(survivors, shares, strict=True) if samples_in([own.mine]))
    told = (step + 1, True, tuple(gradients), (), tuple(states), reason)
    return Plan(*told, mean=tuple(mean), speaker=speaker, lost=losses)


def _keep(plan: Plan, survivors: Sequence[Marks]) -> Plan:
    step = plan.step
    leader = max(survivors, key=lambda marks: sum(marks.versions))  # of several, the lowest rank
    keep = tuple(bucket for bucket, version in enumerate(leader.versions) if version == step + 1)
    if not keep:  # redoing it is exact
        return replace(plan, reason=f"{plan.reason}, because there is no partial update to keep")
    states: list[Copy] = []
    for bucket, version in enumerate(leader.versions):
        others = tuple(marks.member for marks in survivors if marks.versions[bucket] != version)
        states += [Copy(bucket, "state", leader.member, others)] if others else []
    reason = f"step {step} was partly updated: {len(keep)} buckets stay so and are updated twice, because it is redone"
    return Plan(step, False, (), (), tuple(states), reason, keep=keep)


def _skip_again(step: int, survivors: Sequence[Marks], sources: Sequence[str]) -> Plan:
    """An interrupted recovery has left this step out on some survivors: their versions are the next step's, but no update is in
    their state."""
    states: list[Copy] = []
    for bucket in range(len(survivors[0].versions)):
        updated = tuple(m.member for m in survivors if m.step == step and m.versions[bucket] == step + 1)
        states += [Copy(bucket, "state", sources[bucket % len(sources)], updated)] if updated else []
    reason = f"step {step} is skipped by all, as {len(sources)} of {len(survivors)} survivors have done: its batch is lost"
    lost = known_losses(survivors, step)
    return Plan(step + 1, states=tuple(states), reason=reason, skips=True, lost=lost, trained=_trained(survivors))


def _trained(survivors: Sequence[Marks]) -> int:
    """The incarnation in which the interrupted step was begun: not everybody has come to train in it."""
    return max(marks.trained for marks in survivors)


def complement(batch: Range, parts: Sequence[Range]) -> tuple[Range, ...]:
    """What of `batch` is in none of `parts`, which may lie beside it."""
    found: list[Range] = []
    at, end = batch
    inside = [(max(start, at), min(stop, end)) for start, stop in parts]
    for start, stop in sorted(part for part in inside if part[0] < part[1]):
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    return (*found, (at, end)) if at < end else tuple(found)
