"""What those who train tell of it: steps and checkpoints that are committed, and what goes wrong while training goes on."""

from __future__ import annotations

from raytrain_ft.policy import arrivals, leaving, stopping
from raytrain_ft.policy import commands as c
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.roster import MemberState
from raytrain_ft.policy.run_state import MOST_HELPED, RunState
from raytrain_ft.policy.states import TRAINING, State

FORGETTING = 0.9
"""With every record of committed steps, what was a long step before counts by so much less."""
FORGETTING_SLOWLY = 0.999
"""The same of what is a reason to be patient with who hangs perhaps: a rare step may take long."""
MOST_STORED = 16
"""Checkpoints that are remembered to go back to."""
UNTIDY = "when a checkpoint was durable, "
"""How the warning begins that something was left to be done then; told once, for it is rarely another reason."""


def on_steps_committed(run: RunState, event: m.StepsCommitted) -> list[c.Command]:
    is_first = event.incarnation >= run.counts_from and event.stop_step > run.step  # to tell of these steps
    if is_first:
        _advance(run, event.stop_step)
    if event.incarnation != run.incarnation:
        return []  # a step that a recovery completed, for example: its time says nothing
    run.longest_step = max(event.longest_s, (FORGETTING_SLOWLY if is_first else 1.0) * run.longest_step)
    run.long_step = max(event.longest_s, FORGETTING * run.long_step)
    if run.newcomers:
        run.roster.join_failures = 0
    run.fruitless, run.help_left, run.slow_replays, run.newcomers = 0, MOST_HELPED, 0, frozenset()
    if run.state != State.RESUME:
        return []
    run.history.close(event.at)
    if run.abort_reason:
        return stopping.stop(run)
    run.state = State.RUNNING
    return run.provision() + leaving.watch(run, event.at) + arrivals.resize(run, event.at)


def _advance(run: RunState, step: int) -> None:
    """Somebody has committed all steps before this one. A recovery that has completed one of them is not fruitless, though its
    incarnation commit none; and what is told only now of training before it shows that it is the first in a row at most. A step
    that was left out is no progress."""
    run.step = step
    if run.plan is None or step <= run.plan.interrupted:
        run.fruitless = min(run.fruitless, 1)
    elif run.plan.completes:
        run.fruitless = 0


def on_checkpoint_committed(run: RunState, event: m.CheckpointCommitted) -> list[c.Command]:
    if event.untidy and not any(words.startswith(UNTIDY) for words in run.warnings):
        run.warn(f"{UNTIDY}{event.untidy}. Training goes on, but the storage may fill up: look at its permissions")
    stored = m.Stored(event.name, event.step, event.incarnation)
    standing = run.standing([stored])
    if event.incarnation < run.counts_from:
        return []  # everybody has gone back to before it, or to it: it is no part of what is logged since
    run.stored = [*standing, *run.stored][:MOST_STORED]
    run.persist_s = event.persist_s
    if (event.incarnation, event.step) >= run.unstored_at:  # else it is an older one, and was only long under way
        run.unstored = 0
    if not run.rules.logging or run.state not in TRAINING:
        return []  # in a recovery, the log may be being replayed from an older checkpoint: the next one trims it
    run.log.begins_with(event.step)
    # spares too: some have logged what they sent while they had a seat
    members = tuple(one for one, state in run.members.items() if state != MemberState.STARTING)
    return [c.Trim(members, event.step, run.log.incarnation)]


def on_checkpoint_failed(run: RunState, event: m.CheckpointFailed) -> list[c.Command]:
    """Told of the first in a row, the tenth, the hundredth and so on: what follows is rarely another reason, but who has seen
    nothing for long takes it to be over. Each of many workers may tell of one; it counts once."""
    at = event.incarnation, event.step
    if event.incarnation != run.incarnation or at <= run.unstored_at:
        return []
    run.unstored, run.unstored_at = run.unstored + 1, at
    if run.unstored == 1:
        run.warn(f"the checkpoint of step {event.step} could not be written: {event.reason}")
    elif run.unstored == 10 ** (len(str(run.unstored)) - 1):
        durable = "there is no durable one" if run.newest is None else f"the newest durable one is of step {run.newest.step}"
        words = f"the last {run.unstored} checkpoints could not be written, up to that of step {event.step}"
        run.warn(f"{words}: {event.reason}; {durable}")
    return []


def on_samples_lost(run: RunState, event: m.SamplesLost) -> list[c.Command]:
    if not any(event.why in words for words in run.warnings):
        run.warn(f"samples of step {event.step} were lost: {event.why}. Further ones are listed by raytrain-ft audit")
    return []


def on_state_unseen(run: RunState, event: m.StateUnseen) -> list[c.Command]:
    run.warn(
        f"{event.names}: changed in the forward pass, and neither stored nor given to a replacement. If a result depends on "
        "it, keep it in a buffer of the model (register_buffer)"
    )
    return []


def on_noted(
    run: RunState,
    event: m.IntervalChosen | m.LogChosen | m.LogWritten | m.NoticesUnavailable | m.Parted | m.SetAside,
) -> list[c.Command]:
    del run, event  # for the record
    return []


def on_dormant(run: RunState, event: m.Dormant) -> list[c.Command]:
    run.history.slept(event.member, event.step, asleep=event.asleep)
    if not event.asleep and run.state != State.RESUME:  # else perhaps all take part in one step, and then sleep again
        leaving.woke(run, event.member)
    return []


def on_log_failed(run: RunState, event: m.LogFailed) -> list[c.Command]:
    if event.incarnation < run.log.incarnation:
        return []  # it has begun anew since
    run.log.broke_off(event.member)
    run.warn(
        f"{event.member} cannot log what it sends to other stages ({event.reason}): training goes on, but until the log is "
        "whole again, a lost stage takes everybody back to the newest checkpoint"
    )
    return []


def on_log_whole(run: RunState, event: m.LogWhole) -> list[c.Command]:
    run.log.whole_again(event.member, event.step)
    return []
